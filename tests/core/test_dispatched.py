"""Ops as torch calls them, also from code that torch.compile wrote: calls that are alike start the same kernels."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mhc_ops.core import backend as backends
from mhc_ops.core.launch import launch
from mhc_ops.core.layout import any_layout
from mhc_ops.core.op import op


class DoubledOutputs(NamedTuple):
    y: Tensor
    empty: Tensor  # an output that this call does not have
    link: Tensor


class DoubledGradients(NamedTuple):
    dx: Tensor


class WrittenOutputs(NamedTuple):
    y: Tensor


@op("mhc", unwritten=("link",))
def doubled_fwd(x: Tensor, factor: float) -> DoubledOutputs:
    return DoubledOutputs(y=torch.empty_like(x), empty=x.new_empty(0), link=x.new_empty(1).expand_as(x))


@op("mhc")
def doubled_bwd(x: Tensor, factor: float, dy: Tensor) -> DoubledGradients:
    return DoubledGradients(dx=torch.empty_like(x))


@op("mhc", mutates=("state",), layouts={"state": any_layout})
def written_(x: Tensor, state: Tensor) -> WrittenOutputs:
    return WrittenOutputs(y=torch.empty_like(x))


doubled_fwd.gradient_is(doubled_bwd)


class Kernel:
    """y = x · factor, and state = x where there is one. Counts its bindings; started through them or directly."""

    __name__ = "kernel"
    arg_names = ("x_ptr", "y_ptr", "state_ptr", "factor")

    def __init__(self):
        self.bound, self.started = 0, []

    def __getitem__(self, grid):
        def bind(x, y, state, factor):
            self.bound += 1
            torch.mul(x.detach(), factor, out=y.detach())
            if state is not None:
                state.detach().copy_(x)
            return self.compiled

        return bind

    @property
    def compiled(self):
        return {(1, 1, 1): lambda x, y, state, factor, stream: self.started.append((x, y, state, factor))}


@pytest.fixture
def kernel(monkeypatch):
    found = Kernel()

    def run(x, y, state=None, factor=2.0):
        with torch.utils._python_dispatch._disable_current_modes():
            launch(found, (1,), x_ptr=x, y_ptr=y, state_ptr=state, factor=factor)

    launchers = {
        "doubled_fwd": lambda *, x, factor, y, empty, link: run(x, y, factor=factor),
        "doubled_bwd": lambda *, x, factor, dy, dx: run(dy, dx, factor=factor),
        "written_": lambda *, x, state, y: run(x, y, state),
    }
    monkeypatch.setattr(backends, "_INTERPRETED", False)
    monkeypatch.setattr(backends, "load", lambda family, backend, name, device: launchers[name])
    return found


def doubled(x, factor=2.0):
    return doubled_fwd.traced(x, factor, "triton")


def test_the_second_call_starts_the_kernel_directly(kernel):
    doubled(torch.ones(3, 4))
    x = torch.ones(3, 4)
    y, empty, link = doubled(x)
    assert kernel.bound == 1
    assert kernel.started == [(x.data_ptr(), y.data_ptr(), None, 2.0)]
    assert (y.shape, empty.shape, link.shape) == ((3, 4), (0,), (3, 4))
    assert torch.equal(link, torch.zeros(3, 4)), "torch's checks of an op read it"


@pytest.mark.parametrize(
    "change",
    [{"factor": 3.0}, {"x": torch.ones(12)}, {"x": torch.ones(3, 4).half()}, {"x": torch.ones(13)[1:].view(3, 4)}],
    ids=["number", "shape", "type", "alignment"],
)
def test_what_makes_another_call(kernel, change):
    doubled(torch.ones(3, 4))
    doubled(**{"x": torch.ones(3, 4)} | change)
    assert kernel.bound == 2


def test_another_layout_is_copied_each_time(kernel):
    for value in (1.0, 2.0):
        x = torch.full((4, 3), value).mT
        doubled(x)
    assert kernel.bound == 1
    assert kernel.started[0][0] != x.data_ptr()


def test_gradients(kernel):
    for _ in range(3):
        x = torch.ones(3, 4, requires_grad=True)
        y, *_ = doubled(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones(3, 4))
        assert dx.shape == (3, 4)
    assert (kernel.bound, len(kernel.started)) == (2, 4)


def test_compiled_code_binds_once_for_a_number_of_tokens(kernel):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda x: doubled_fwd(x=x, factor=2.0, backend="triton").y + 1, backend=backend, dynamic=True
    )
    for tokens in (5, 6, 5, 6, 7, 7):
        compiled(torch.ones(tokens, 4))
    assert (kernel.bound, len(kernel.started)) == (3, 3)
    assert len(graphs) == 1, "nothing is compiled again for another number of tokens"


def test_what_is_written_to(kernel):
    state = torch.zeros(3, 4)
    versions = [state._version]
    for _ in range(3):
        written_.traced(torch.ones(3, 4), state, "triton")
        versions.append(state._version)
    assert versions == sorted(set(versions)), "autograd knows of each"
    assert (kernel.bound, len(kernel.started)) == (1, 2)
    written_.traced(state, state, "triton")
    assert kernel.started[-1][0] != state.data_ptr(), "read from a copy"
    with pytest.raises(ValueError, match="written_: state"):
        written_.traced(torch.ones(3, 4), torch.zeros(1).expand(3, 4), "triton")
