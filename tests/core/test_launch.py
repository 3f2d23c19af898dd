"""Launching: compiled kernels are kept by what they were specialised for."""

import pytest
import torch

from mhc_ops.core import launch as module


class Kernel:
    """Counts how often it is bound the long way, and what its compiled form is called with."""

    arg_names = ("x_ptr", "T", "n", "BLOCK")

    def __init__(self):
        self.bound, self.called = 0, []

    def __getitem__(self, grid):
        def bind(*arguments, **constants):
            self.bound += 1
            return Compiled(self)

        return bind


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.called.append((grid, *arguments[1:]))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_INTERPRETED", False)
    monkeypatch.setattr(module, "_kept", {})
    return Kernel()


def launch(kernel, x, T=5, n=4, grid=(3,)):
    module.launch(kernel, grid, x, T, n=n, BLOCK=32, num_warps=4)


def test_second_call_is_direct(kernel):
    x = torch.zeros(64)
    launch(kernel, x)
    assert (kernel.bound, kernel.called) == (1, [])
    launch(kernel, torch.ones(64))
    assert (kernel.bound, kernel.called) == (1, [((3, 1, 1), 5, 4, 32)]), "constants in the kernel's order, no options"


@pytest.mark.parametrize(
    "change",
    [{"T": 6}, {"n": 2}, {"grid": (3, 2)}, {"x": torch.zeros(64, dtype=torch.bfloat16)}, {"x": torch.zeros(65)[1:]}],
    ids=["integer", "constant", "grid", "type", "alignment"],
)
def test_what_else_is_compiled_for(change, kernel):
    launch(kernel, torch.zeros(64))
    launch(kernel, **{"x": torch.zeros(64), **change})
    assert kernel.bound == 2


def test_what_is_kept_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT", 3)
    for T in range(10):
        launch(kernel, torch.zeros(64), T=T)
    assert len(module._kept) <= 3


def test_the_interpreter_compiles_nothing(kernel, monkeypatch):
    monkeypatch.setattr(module, "_INTERPRETED", True)
    for _ in range(2):
        launch(kernel, torch.zeros(64))
    assert (kernel.bound, module._kept) == (2, {})
