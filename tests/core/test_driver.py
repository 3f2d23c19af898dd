"""A replayed call tells the CUDA driver to launch what Triton's own launch told it."""

import shutil
from functools import partial
from itertools import repeat

import pytest
import torch
from processes import run_alone
from torch import nn
from written_driver import launches

from mhc_ops import HyperConnection, HyperStack, causal_conv1d, causal_conv1d_update
from mhc_ops.testing import accuracy, cases, conv_cases

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is a real one here"),
    pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="there is no C compiler"),
]
n, D = 4, 256


def step_of_stack(tokens, depth=2, compiled=False, layer_norm=False, **options):
    own = {"layer_norm": layer_norm, "backend": "triton"}
    connections = [HyperConnection(nn.Identity(), n, D, **own) for _ in range(depth)]
    stack = HyperStack(*connections, **options)
    run = torch.compile(stack) if compiled else stack
    x = torch.zeros(tokens, n, D, dtype=torch.bfloat16, requires_grad=True)
    dout = torch.zeros_like(x[:, 0] if stack.shifted else x)
    leaves = [x, *stack.parameters()]

    def step():
        torch.autograd.grad(run(x), leaves, dout)

    return step


def convolutions():
    """A training step, and a step of decoding, which writes to its state."""
    x, weight, bias = torch.zeros(2, 300, D, requires_grad=True), torch.zeros(D, 4), torch.zeros(D)
    dy, token, state = torch.zeros(2, 300, D), torch.zeros(2, D), torch.zeros(2, D, 3)

    def step():
        y = causal_conv1d(x, weight, bias, activation="silu", backend="triton")
        torch.autograd.grad(y, x, dy)
        causal_conv1d_update(token, state, weight, bias, backend="triton")

    return step


def each_op():
    """Forward and backward. The reference says what shapes the cotangents have."""
    conv = partial(conv_cases.ConvCase, 1, 100, D)
    every = [cases.Case(subject, (100,), n, D, torch.bfloat16) for subject in cases.ALL]
    every += [conv(), conv(places="seq_idx"), conv(places=conv_cases.CACHE), conv(n=n), conv(update=True)]
    given = [case.inputs() for case in every]
    made = [case.subject.run(dict(tensors), "reference") for case, tensors in zip(every, given)]
    cotangents = [accuracy.random_cotangents(case.subject, outputs) for case, outputs in zip(every, made)]

    def step():
        return [accuracy.run(case.subject, *rest) for case, *rest in zip(every, given, repeat("triton"), cotangents)]

    return step


STEPS = {
    "a stack": partial(step_of_stack, 100),
    "its fused boundary": partial(step_of_stack, 1024, layer_norm=True),  # with descriptors
    "few tokens": partial(step_of_stack, 16),  # all programs at once
    "shifted, made again": partial(step_of_stack, 1024, depth=4, shifted=True, recompute=2),
    "convolutions": convolutions,
    "each op": each_op,
    "compiled": partial(step_of_stack, 100, compiled=True),
}


@pytest.mark.parametrize("in_python", [False, True], ids=["in C", "in Python"])
@pytest.mark.parametrize("name", STEPS)
def test_replays_launch_what_triton_does(name, in_python):
    own, *replayed = run_alone(launches, STEPS[name], in_python)
    assert len(own) >= 3 and replayed == [own] * 3


def test_compiled_code_launches_what_eager_calls_do():
    assert run_alone(launches, STEPS["compiled"], False) == run_alone(launches, STEPS["a stack"], False)
