"""Calls by name, with and without gradients; and their replay: a call that is like an earlier one starts the same
compiled kernels on its own tensors, and nothing else. So do calls of ops by torch."""

import gc
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mhc_ops.core import alike, call, native
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


@pytest.fixture(params=["in C", "in Python"])
def kernel(request, monkeypatch):
    """Stands for the kernels of a GPU; torch does what it does, unseen by who records."""
    found = Kernel()
    if request.param == "in Python":
        monkeypatch.setattr(native, "load", lambda: None)
        monkeypatch.setattr(native, "code", None)

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
    for wrong in ({}, {"options": Options(), "phi": None}):
        with pytest.raises(TypeError):
            scaled_fwd(x=torch.zeros(3), backend="triton", **wrong)
    with pytest.raises(TypeError, match="takes"):
        scaled_fwd.dispatched(x=torch.zeros(3), phi=None, backend="triton")


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


@pytest.mark.parametrize("copied", [False, True])
def test_with_and_without_gradients(copied, kernel, scaled):
    """A copy that is laid out without gradients needs none; the next one does."""
    shape, step = ((2, 128), 2) if copied else ((64,), 1)
    for _ in range(2):
        x = torch.zeros(shape, requires_grad=True)[..., ::step]
        with torch.no_grad():
            assert not scaled(x).requires_grad
        assert scaled(x).requires_grad
        assert not scaled(x.detach()).requires_grad
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
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view_as(tensor).copy_(tensor)


def test_what_hooks_bring_back_is_looked_at(kernel, scaled):
    """Offloading and checkpointing may bring a kept tensor back elsewhere. As kernels take it, what comes back is like
    what was kept; of another shape it is refused, also then."""

    def step(hook):
        x = torch.ones(4, 16, requires_grad=True)
        with saved_tensors_hooks(lambda tensor: tensor, hook):
            y = scaled(x)
        torch.autograd.grad(y, x, torch.ones(4, 16))
        return kernel.bound

    same, copied = (lambda t: t, torch.Tensor.detach), (lambda t: t.mT.contiguous().mT, lambda t: torch._neg_view(-t))
    assert [step(hook) for hook in (*same, *copied, elsewhere)] == [2, 2, 3, 3, 4], "copies need no gradient"
    for hook, error, message in (
        (lambda t: t.view(16, 4), ValueError, r"come back .* as it was kept, \[4, 16\] on cpu, got \[16, 4\]"),
        (torch.Tensor.half, TypeError, "be float32 as it was kept, got float16"),
        (lambda t: t.to("meta"), ValueError, "come back .* on cpu, got .* on meta"),
        (lambda t: torch.nested.nested_tensor(list(t)), TypeError, r"be a dense .*, got nested"),
    ):
        with pytest.raises(error, match=f"^scaled_fwd: x must {message}"):
            step(hook)


def test_what_torch_does_besides_is_never_left_out(kernel, scaled):
    for size, stray in ((64, lambda y: y.zero_()), (32, lambda y: y + 1)):  # in place, and new
        kernel.stray[:], kernel.bound = [stray], 0
        for _ in range(3):
            scaled(torch.zeros(size))
        assert kernel.bound == 3
    assert len(kernel.checks) == 2


def traced(x, amount=2.0):
    """As torch calls the op."""
    return scaled_fwd.traced(x, amount, 32, "triton")[0]


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_copy_in_another_layout_is_made_each_time(by_torch, kernel, scaled):
    function = traced if by_torch else scaled
    for value in (1.0, 5.0, 7.0):
        x = torch.full((2, 128), value)[:, ::2]
        function(x)
        assert kernel.started[-1][0] != x.data_ptr()
    assert (len(kernel.checks), kernel.bound) == (not by_torch, 1), "all else as in the first call"
    (dx,) = torch.autograd.grad(function(x.requires_grad_()).sum(), x)
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


def test_what_is_kept_is_bounded(kernel, scaled, monkeypatch):
    monkeypatch.setattr(alike, "MOST_KEYS", 3)
    monkeypatch.setattr(alike, "MOST", 2)
    for amount in range(10):
        for shape in [(64,), (2, 32), (4, 16), (8, 8)]:  # as many elements: one key
            scaled(torch.zeros(shape), float(amount))
    assert len(alike.calls) <= 3 and len(call.kept_calls()) <= 6


def test_a_descriptor_is_of_the_tensor_of_its_call():
    started = []

    class DescribedKernel:
        arg_names = ("x_desc", "y_ptr")

        def __getitem__(self, grid):
            return lambda x_desc, y: {
                grid: lambda x_desc, y, stream: started.append((x_desc.base.data_ptr(), x_desc.padding, y))
            }

    def double(tensors):
        y, descriptor = torch.empty_like(tensors[0]), SimpleNamespace(base=tensors[0], padding="zero")
        launch(DescribedKernel(), (1, 1, 1), x_desc=descriptor, y_ptr=y)
        return [y]

    replay = Replay(double)
    replay([torch.ones(4)])
    again = torch.ones(4)
    (y,) = replay([again])
    assert started == [(again.data_ptr(), "zero", y.data_ptr())]


def test_a_descriptor_is_gone_with_its_call():
    """This holds without a search for cycles too, as in training loops that switch gc off."""
    gc.disable()
    try:
        descriptor = weakref.ref(Descriptor(64, {"shape": [4]}))
        assert descriptor() is None
    finally:
        gc.enable()


def test_calls_that_are_prepared_each_time(kernel, scaled, monkeypatch):
    """Calls of a subclass, within a mode, and where another backend is chosen are prepared anew."""
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


# Ops as torch calls them.


def test_the_second_call_of_torch_starts_the_kernel_directly(kernel):
    traced(torch.ones(3, 4))
    x = torch.ones(3, 4)
    y, kept, empty, link = scaled_fwd.traced(x, 2.0, 32, "triton")
    assert kernel.bound == 1
    assert kernel.started[-1] == (x.data_ptr(), y.data_ptr(), 2.0, 32)
    assert (y.shape, kept.shape, empty.shape, link.shape) == ((3, 4), (3, 4), (0,), (3, 4))
    assert torch.equal(link, torch.zeros(3, 4)), "torch's checks of an op read it"
    others = torch.ones(12), torch.ones(3, 4).half(), torch.ones(13)[1:].view(3, 4)
    for bound, change in enumerate(({"amount": 3.0}, *({"x": x} for x in others)), start=2):
        traced(**{"x": torch.ones(3, 4)} | change)
        assert kernel.bound == bound, change


def test_gradients_of_torch(kernel):
    for _ in range(3):
        x = torch.ones(3, 4, requires_grad=True)
        (dx,) = torch.autograd.grad(traced(x), x, torch.ones(3, 4))
        assert dx.shape == (3, 4)
    assert (kernel.bound, len(kernel.started)) == (2, 6)


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
