"""Replay: a call that is like an earlier one starts the same compiled kernels on its own tensors, and nothing else."""

import pytest
import torch

from mhc_ops.core import backend, replay
from mhc_ops.core.launch import launch


class Kernel:
    """Counts how often it is bound the long way, and keeps what its compiled form is started with."""

    arg_names = ("x_ptr", "between_ptr", "out_ptr", "amount", "BLOCK")

    def __init__(self):
        self.bound, self.started = 0, []

    def __getitem__(self, grid):
        def bind(*arguments, **constants):
            self.bound += 1
            addresses = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            self.started.append(((*grid, 1, 1), *addresses, constants["BLOCK"]))
            return Compiled(self)

        return bind


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments, stream=None: self.kernel.started.append((grid, *arguments))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(backend, "_INTERPRETED", False)
    replay.forget()
    yield Kernel()
    replay.forget()


def launcher_of(kernel, in_between=lambda out: None):
    def launcher(x, amount, out):
        between = torch.empty(100, dtype=torch.float32)
        launch(kernel, (3,), x, between, out, amount, BLOCK=32, num_warps=4)
        in_between(out)

    return launcher


def fill(kernel, x, amount=5, **options):
    out = torch.empty_like(x)
    replay.fill("op", "triton", launcher_of(kernel, **options), [x, amount], (out,))
    return out


def test_second_call_is_direct(kernel):
    fill(kernel, torch.zeros(64))
    x = torch.ones(64)
    out = fill(kernel, x)
    assert kernel.bound == 1
    grid, x_address, between, out_address, *constants = kernel.started[-1]
    assert (grid, x_address, out_address, constants) == ((3, 1, 1), x.data_ptr(), out.data_ptr(), [5, 32])
    assert between not in (x_address, out_address)


@pytest.mark.parametrize(
    "change",
    [
        {"amount": 6},
        {"amount": 5.0},
        {"x": torch.zeros(65)},
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(65)[1:]},
        {"x": torch.zeros(128)[::2]},
    ],
    ids=["number", "kind of number", "shape", "type", "alignment", "strides"],
)
def test_what_makes_another_call(change, kernel):
    fill(kernel, torch.zeros(64))
    fill(kernel, **{"x": torch.zeros(64), **change})
    assert kernel.bound == 2


@pytest.mark.parametrize("stray", [lambda out: out.zero_(), lambda out: out + 1], ids=["in place", "new"])
def test_what_torch_does_besides_is_never_left_out(stray, kernel):
    for _ in range(3):
        fill(kernel, torch.zeros(64), in_between=stray)
    assert kernel.bound == 3


def test_shared_addresses_are_not_a_rule(kernel):
    """x and out are one tensor in the first call; in the second they are not."""
    x = torch.zeros(64)
    replay.fill("op", "triton", launcher_of(kernel), [x, 5], (x,))
    fill(kernel, x)
    assert kernel.bound == 2


def test_what_is_kept_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(replay, "MOST_PLANS", 3)
    for amount in range(10):
        fill(kernel, torch.zeros(64), amount)
    assert len(replay._plans) <= 3


def test_the_interpreter_records_nothing(kernel, monkeypatch):
    monkeypatch.setattr(backend, "_INTERPRETED", True)
    for _ in range(2):
        fill(kernel, torch.zeros(64))
    assert kernel.bound == 2
    assert not replay._plans


def public_of(kernel, checks):
    """Returns the first of two outputs."""

    def function(x, amount=5, *, backend=None):
        checks.append(x.shape)
        out, hidden = torch.empty_like(x), torch.empty(7)
        launcher = launcher_of(kernel)
        replay.fill("op", "triton", lambda x, amount, out, _: launcher(x, amount, out), [x, amount], (out, hidden))
        return out

    return replay.replayed(function)


def test_public_function_checks_once(kernel):
    checks = []
    function = public_of(kernel, checks)
    for _ in range(3):
        x = torch.zeros(64)
        out = function(x)
        assert kernel.started[-1][1] == x.data_ptr()
        assert kernel.started[-1][3] == out.data_ptr()
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert (len(checks), kernel.bound) == (1, 1)
    function(x, amount=5)
    function(x, 5)
    assert len(checks) == 3, "the same call, spelled otherwise, is another one"


@pytest.mark.parametrize("how", ["gradient", "subclass", "mode", "backend"])
def test_public_function_that_cannot_be_replayed(how, kernel):
    checks = []
    function = public_of(kernel, checks)
    for attempt in range(2):
        x = torch.zeros(64)
        if how == "gradient":
            function(x.requires_grad_())
        elif how == "subclass":
            function(torch.zeros(64).as_subclass(type("Own", (torch.Tensor,), {})))
        elif how == "mode":
            with torch.overrides.BaseTorchFunctionMode():
                function(x)
        else:
            with backend.use_backend(("triton", "tilelang")[attempt]):
                function(x)
    assert len(checks) == 2


def test_parameters_without_gradients_are_replayed(kernel):
    checks = []
    function = public_of(kernel, checks)
    for _ in range(2):
        with torch.no_grad():
            function(torch.nn.Parameter(torch.zeros(64)))
    assert len(checks) == 1
