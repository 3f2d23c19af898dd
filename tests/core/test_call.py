"""Calls by name, with and without gradients; and their replay: a call that is like an earlier one starts the same
compiled kernels on its own tensors, and nothing else. So do calls of ops by torch, also from code that torch.compile
wrote."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mhc_ops.core import alike, call
from mhc_ops.core import backend as backends
from mhc_ops.core.call import Request, run
from mhc_ops.core.launch import Descriptor, launch
from mhc_ops.core.layout import any_layout
from mhc_ops.core.op import op
from mhc_ops.core.replay import Replay


class Kernel:
    """y = x·amount, and state = x where there is one. Counts how often it is bound the long way; notes each start."""

    __name__ = "kernel"
    arg_names = ("x_ptr", "between_ptr", "y_ptr", "state_ptr", "amount", "BLOCK")

    def __init__(self):
        self.bound, self.started, self.stray, self.checks = 0, [], [], []

    def __getitem__(self, grid):
        def bind(x, between, y, state, amount, BLOCK, num_warps):
            self.bound += 1
            self.started.append((x.data_ptr(), y.data_ptr(), amount, BLOCK))
            torch.mul(x.detach(), amount, out=y.detach())
            if state is not None:
                state.detach().copy_(x)
            return {(3, 1, 1): self.start}

        return bind

    def start(self, x, between, y, state, amount, BLOCK, stream):
        assert between not in (x, y)
        self.started.append((x, y, amount, BLOCK))


class ScaledOutputs(NamedTuple):
    y: Tensor
    kept: Tensor
    empty: Tensor  # an output that this call does not have
    link: Tensor


class ScaledGradients(NamedTuple):
    dx: Tensor


class Options(NamedTuple):
    amount: float = 2.0
    block: int = 32


class WrittenOutputs(NamedTuple):
    y: Tensor


@op("mhc", unwritten=("link",))
def scaled_fwd(x: Tensor, options: Options) -> ScaledOutputs:
    y, kept = torch.empty_like(x), torch.empty_like(x)
    return ScaledOutputs(y=y, kept=kept, empty=x.new_empty(0), link=x.new_empty(1).expand_as(x))


@op("mhc")
def scaled_bwd(x: Tensor, options: Options, kept: Tensor, dy: Tensor) -> ScaledGradients:
    return ScaledGradients(dx=torch.empty_like(x))


@op("mhc", mutates=("state",), layouts={"state": any_layout})
def written_(x: Tensor, state: Tensor) -> WrittenOutputs:
    return WrittenOutputs(y=torch.empty_like(x))


scaled_fwd.gradient_is(scaled_bwd)


@pytest.fixture
def kernel(monkeypatch):
    """Stands for the kernels of a GPU; torch does what it does, unseen by who records."""
    found = Kernel()

    def scale(x, y, options, state=None):
        numbers = {"amount": options.amount, "BLOCK": options.block, "num_warps": 4}
        between = torch.empty(100, dtype=torch.float32)
        with torch.utils._python_dispatch._disable_current_modes():
            launch(found, (3,), x_ptr=x, between_ptr=between, y_ptr=y, state_ptr=state, **numbers)
        for more in found.stray:
            more(y)

    launchers = {
        "scaled_fwd": lambda *, x, options, y, kept, empty, link: scale(x, y, options),
        "scaled_bwd": lambda *, x, options, kept, dy, dx: scale(dy, dx, options),
        "written_": lambda *, x, state, y: scale(x, y, Options(), state),
    }
    monkeypatch.setattr(backends, "_INTERPRETED", False)
    monkeypatch.setattr(backends, "load", lambda family, backend, name, device: launchers[name])
    return found


@pytest.fixture
def scaled(kernel):
    def prepare(x, amount, backend):
        kernel.checks.append(x.shape)
        return Request(scaled_fwd, "triton", {"x": x, "options": Options(amount=amount)}, "y")

    return lambda x, amount=2.0, backend=None: run(prepare, x=x, amount=amount, backend=backend)


def test_names_that_are_missing_or_unknown(kernel):
    expected = (
        "mhc_ops::scaled_fwd(Tensor x, float amount, SymInt block, str backend) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    assert str(scaled_fwd.traced._opoverload._schema) == expected
    with pytest.raises(TypeError, match="asks for \\['phi'\\]"):
        scaled_fwd.gradient(lambda run, phi, dy: {})
    with pytest.raises(TypeError, match=r"kernel: missing \['y_ptr'\], unknown \['z_ptr'\]"):
        launch(kernel, (1,), x_ptr=1, between_ptr=2, z_ptr=3, state_ptr=None, amount=4, BLOCK=5, num_warps=4)
    with pytest.raises(TypeError):
        scaled_fwd(x=torch.zeros(3), backend="triton")
    with pytest.raises(TypeError):
        scaled_fwd(x=torch.zeros(3), options=Options(), phi=None, backend="triton")
    with pytest.raises(TypeError, match="takes"):
        scaled_fwd.dispatched(x=torch.zeros(3), phi=None, backend="triton")


def test_second_call_is_direct(kernel, scaled):
    scaled(torch.zeros(64))
    x = torch.ones(64)
    y = scaled(x)
    assert (kernel.bound, len(kernel.checks)) == (1, 1)
    assert kernel.started[-1] == (x.data_ptr(), y.data_ptr(), 2.0, 32)
    assert (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, False)


def test_second_step_of_training_is_direct(kernel, scaled):
    """With gradients: forward and backward are bound once, and run on the tensors of each step."""
    for _ in range(3):
        x = torch.ones(64, requires_grad=True)
        y = scaled(x)
        assert kernel.started[-1][:2] == (x.data_ptr(), y.data_ptr())
        dy = torch.full((64,), 3.0)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert kernel.started[-1][:2] == (dy.data_ptr(), dx.data_ptr())
        assert y.grad_fn.name() == "scaled_fwdBackward"
    assert (kernel.bound, len(kernel.checks), len(kernel.started)) == (2, 1, 6)


def test_with_and_without_gradients(kernel, scaled):
    for _ in range(2):
        assert not scaled(torch.zeros(64)).requires_grad
        assert scaled(torch.zeros(64, requires_grad=True)).requires_grad
        with torch.no_grad():
            assert not scaled(torch.zeros(64, requires_grad=True)).requires_grad
    assert len(kernel.checks) == 2, "nothing is differentiated under no_grad: as without gradients"


def test_what_makes_another_call(kernel, scaled):
    """A number, its kind, a shape, a type, an alignment, strides, a device."""
    scaled(torch.zeros(64))
    others = (torch.zeros(65), torch.zeros(64).bfloat16(), torch.zeros(65)[1:], torch.zeros(128)[::2])
    changes = [{"amount": 6.0}, {"amount": 2}, *({"x": x} for x in (*others, torch.zeros(64, device="meta")))]
    for bound, change in enumerate(changes, start=2):
        scaled(**{"x": torch.zeros(64), **change})
        assert kernel.bound == bound, change


def test_the_alignment_of_a_cotangent_makes_another_call(kernel, scaled):
    for dy in (torch.ones(64), torch.ones(65)[1:], torch.ones(1).expand(64)):
        x = torch.ones(64, requires_grad=True)
        torch.autograd.grad(scaled(x), x, dy)
    assert kernel.bound == 1 + 2, "forward, and two alignments of dy; an expanded one is copied"


def elsewhere(tensor):
    """With another alignment."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].copy_(tensor)


def test_what_hooks_bring_back_is_looked_at(kernel, scaled):
    """Offloading and checkpointing may bring a kept tensor back elsewhere."""
    for hook in (torch.Tensor.detach, torch.Tensor.detach, elsewhere):
        x = torch.ones(64, requires_grad=True)
        with saved_tensors_hooks(torch.Tensor.detach, hook):
            y = scaled(x)
        torch.autograd.grad(y, x, torch.ones(64))
    assert kernel.bound == 1 + 2


def test_what_hooks_change_is_laid_out_and_replayed(kernel, scaled):
    """As kernels take it, what comes back is like what was kept; of another shape it is refused, also then."""

    def step(hook):
        x = torch.ones(4, 16, requires_grad=True)
        with saved_tensors_hooks(lambda tensor: tensor, hook):
            y = scaled(x)
        torch.autograd.grad(y, x, torch.ones(4, 16))

    for hook in (lambda t: t, lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: torch._neg_view(-t)):
        step(hook)
    assert kernel.bound == 3, "forward, backward, and that of copies, which need no gradient"
    for hook, error in ((lambda t: t.view(16, 4), ValueError), (torch.Tensor.half, TypeError)):
        with pytest.raises(error, match="scaled_fwd: x must "):
            step(hook)


def test_gradients_after_a_call_without_them(kernel, scaled):
    """The copy that is laid out without gradients needs none; the next one does."""
    x = torch.ones(2, 128, requires_grad=True)[:, ::2]
    with torch.no_grad():
        assert not scaled(x).requires_grad
    assert scaled(x).requires_grad


def test_what_torch_does_besides_is_never_left_out(kernel, scaled):
    for size, stray in ((64, lambda y: y.zero_()), (32, lambda y: y + 1)):  # in place, and new
        kernel.stray[:], kernel.bound = [stray], 0
        for _ in range(3):
            scaled(torch.zeros(size))
        assert kernel.bound == 3
    assert len(kernel.checks) == 2


def test_a_copy_in_another_layout_is_made_each_time(kernel, scaled):
    for value in (1.0, 5.0, 7.0):
        x = torch.full((2, 128), value)[:, ::2]
        scaled(x)
        assert kernel.started[-1][0] != x.data_ptr()
    assert (len(kernel.checks), kernel.bound) == (1, 1), "all else as in the first call"
    (dx,) = torch.autograd.grad(scaled(x.requires_grad_()).sum(), x)
    assert dx.shape == x.shape


def test_a_tensor_that_is_given_twice(kernel):
    """The next call may pass two: it is prepared each time."""
    for taken in ("one", "other"):

        def prepare(one, other, backend, taken=taken):
            kernel.checks.append(None)
            x = {"one": one, "other": other}[taken]
            return Request(scaled_fwd, "triton", {"x": x, "options": Options()}, ("y", "kept"))

        tensors = {"one": torch.ones(64), "other": torch.zeros(64)}
        x = tensors[taken]
        for given in ({"one": x, "other": x}, tensors, {"one": x, "other": x}):
            run(prepare, **given, backend=None)
            assert kernel.started[-1][0] == x.data_ptr()
    assert len(kernel.checks) == 6


def test_a_plan_allocates_with_plain_tuples(kernel, scaled):
    """A torch.Size is none to the function that allocates on CUDA."""
    scaled(torch.zeros(2, 3))
    (kept,) = call.kept_calls()
    (plan,) = kept.call.forward.plans.values()
    assert [[type(part) for part in layout] for layout in plan.made] == [[tuple, tuple, torch.dtype]]


def test_what_is_kept_is_bounded(kernel, scaled, monkeypatch):
    monkeypatch.setattr(alike, "MOST_KEYS", 3)
    monkeypatch.setattr(alike, "MOST", 2)
    for amount in range(10):
        for shape in [(64,), (2, 32), (4, 16), (8, 8)]:  # as many elements: one key
            scaled(torch.zeros(shape), float(amount))
    assert len(alike.calls) <= 3 and len(call.kept_calls()) <= 6


class Described:
    """As Triton's TensorDescriptor: a tensor, and how it is cut into blocks."""

    def __init__(self, base, shape):
        self.base, self.shape, self.strides, self.padding = base, shape, [1], "zero"


def test_a_descriptor_is_of_the_tensor_of_its_call():
    started = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda x_desc, y, stream: started.append((x_desc.base.data_ptr(), x_desc.shape, x_desc.padding, y))

    class DescribedKernel:
        __name__, arg_names = "kernel", ("x_desc", "y_ptr")

        def __getitem__(self, grid):
            return lambda x_desc, y: Compiled()

    def double(tensors):
        y = torch.empty_like(tensors[0])
        launch(DescribedKernel(), (1,), x_desc=Described(tensors[0], [4]), y_ptr=y)
        return [y]

    replay = Replay(double)
    replay([torch.ones(4)])
    again = torch.ones(4)
    (y,) = replay([again])
    assert started == [(again.data_ptr(), [4], "zero", y.data_ptr())]


def test_a_descriptor_is_gone_with_its_call():
    """Also without a search for cycles, as in training loops that switch gc off."""
    gc.disable()
    try:
        descriptor = weakref.ref(Descriptor(64, {"shape": [4]}))
        assert descriptor() is None
    finally:
        gc.enable()


def test_calls_that_are_prepared_each_time(kernel, scaled, monkeypatch):
    """Of a subclass, within a mode, and where another backend is chosen."""
    for attempt in range(2):
        scaled(torch.zeros(64).as_subclass(type("Own", (torch.Tensor,), {})))
        with torch.overrides.BaseTorchFunctionMode():
            scaled(torch.zeros(64))
        with backends.use_backend(("triton", "tilelang")[attempt]):
            scaled(torch.zeros(64))
    assert len(kernel.checks) == 6
    monkeypatch.setattr(backends, "_INTERPRETED", True)
    bound = kernel.bound
    for _ in range(2):
        scaled(torch.zeros(32))
    assert (kernel.bound, len(kernel.checks)) == (bound + 2, 7), "in the interpreter the checks hold all the same"


def test_a_second_derivative_says_so(kernel, scaled):
    x = torch.ones(64, requires_grad=True)
    (dx,) = torch.autograd.grad(scaled(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="scaled_bwd: a second derivative works with"):
        dx.sum().backward()


def test_no_gradient_where_no_output_is_used(kernel, scaled):
    x = torch.ones(64, requires_grad=True)
    unused = scaled(x)
    before = kernel.bound
    (unused.detach() + x).sum().backward()
    assert kernel.bound == before


# Ops as torch calls them.


def traced(x, amount=2.0):
    return scaled_fwd.traced(x, amount, 32, "triton")


def test_the_second_call_of_torch_starts_the_kernel_directly(kernel):
    traced(torch.ones(3, 4))
    x = torch.ones(3, 4)
    y, kept, empty, link = traced(x)
    assert kernel.bound == 1
    assert kernel.started[-1] == (x.data_ptr(), y.data_ptr(), 2.0, 32)
    assert (y.shape, kept.shape, empty.shape, link.shape) == ((3, 4), (3, 4), (0,), (3, 4))
    assert torch.equal(link, torch.zeros(3, 4)), "torch's checks of an op read it"
    others = torch.ones(12), torch.ones(3, 4).half(), torch.ones(13)[1:].view(3, 4)
    for bound, change in enumerate(({"amount": 3.0}, *({"x": x} for x in others)), start=2):
        traced(**{"x": torch.ones(3, 4)} | change)
        assert kernel.bound == bound, change


def test_torch_has_another_layout_copied_each_time(kernel):
    for value in (1.0, 2.0):
        x = torch.full((4, 3), value).mT
        traced(x)
        assert kernel.started[-1][0] != x.data_ptr()
    assert kernel.bound == 1


def test_gradients_of_torch(kernel):
    for _ in range(3):
        x = torch.ones(3, 4, requires_grad=True)
        (dx,) = torch.autograd.grad(traced(x)[0], x, torch.ones(3, 4))
        assert dx.shape == (3, 4)
    assert (kernel.bound, len(kernel.started)) == (2, 6)


def test_compiled_code_binds_once_for_a_number_of_tokens(kernel):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def plus_one(x):
        return scaled_fwd(x=x, options=Options(), backend="triton").y + 1

    compiled = torch.compile(plus_one, backend=backend, dynamic=True)
    for tokens in (5, 6, 5, 6, 7, 7):
        compiled(torch.ones(tokens, 4))
    assert (kernel.bound, len(kernel.started)) == (3, 6)
    assert len(graphs) == 1, "nothing is compiled again for another number of tokens"


def test_what_is_written_to(kernel):
    state = torch.zeros(3, 4)
    versions = [state._version]
    for _ in range(3):
        written_.traced(torch.ones(3, 4), state, "triton")
        versions.append(state._version)
    assert versions == sorted(set(versions)), "autograd knows of each"
    assert (kernel.bound, len(kernel.started)) == (1, 3)
    written_.traced(state, state, "triton")
    assert kernel.started[-1][0] != state.data_ptr(), "read from a copy"
    with pytest.raises(ValueError, match="written_: state"):
        written_.traced(torch.ones(3, 4), torch.zeros(1).expand(3, 4), "triton")
