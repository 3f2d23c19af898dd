"""What the host does for a call whose launches do nothing: it is counted and held.

The counts are of this package alone, so they depend on neither the machine nor torch. They hold for Python 3.11; later
ones make fewer calls, because a comprehension is none there.
"""

import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from no_launches import no_launches  # noqa: F401 (a fixture)
from torch import nn

import mhc_ops
from mhc_ops import HyperConnection, HyperStack
from mhc_ops.core import native

pytest.importorskip("triton")
PACKAGE = str(Path(mhc_ops.__file__).parent)
T, n, D = 1024, 4, 256  # the boundary's own kernels take these
ALLOCATE = ("_empty_strided_cpu", "empty", "empty_like", "new_empty", "empty_strided", "zeros")


def counted(function):
    """Python calls of this package's functions; C calls that they make, and among these allocations and look-ups; and
    attributes that modules look for in Python."""
    counts = Counter()

    def see(frame, event, value):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counts["Python calls"] += 1
        elif event == "call":
            counts["attributes"] += frame.f_code is nn.Module.__getattr__.__code__
        elif event == "c_call":
            if value.__name__ in ALLOCATE:
                counts["allocations"] += 1
            if frame.f_code.co_filename.startswith(PACKAGE):
                counts["C calls"] += 1
                counts["look-ups"] += isinstance(getattr(value, "__self__", None), dict)

    for _ in range(3):
        function()  # prepares, records, replays
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts


def step(module, x):
    """Forward and backward."""
    leaves, dy = [x, *module.parameters()], torch.zeros_like(x)
    return lambda: torch.autograd.grad(module(x), leaves, dy)


def stack(depth, **options):
    return HyperStack(*(HyperConnection(nn.Identity(), n, D, backend="triton") for _ in range(depth)), **options)


def streams(**options):
    return torch.zeros(T, n, D, dtype=torch.bfloat16, **options)


KINDS = ("Python calls", "C calls", "look-ups", "allocations", "attributes")
# At most as many of each kind, in C and in Python. A boundary: of a stack, forward and backward, with 9 launches.
HELD = {
    "mhc_pre": ((7, 7, 0, 4, 0), (17, 32, 3, 4, 0)),
    "mhc_post": ((7, 7, 0, 1, 0), (14, 27, 3, 1, 0)),
    "mhc_layer": ((16, 22, 2, 6, 0), (33, 71, 8, 6, 0)),
    "HyperConnection": ((33, 43, 6, 16, 0), (72, 133, 14, 16, 0)),
    "a boundary": ((26, 32, 4, 16, 0), (52, 105, 8, 16, 0)),
    "causal_conv1d": ((12, 13, 1, 4, 0), (30, 38, 5, 4, 0)),
    "causal_conv1d_update": ((10, 10, 1, 1, 0), (17, 30, 5, 1, 0)),
}
MOST = {way: {name: of[way == "in Python"] for name, of in HELD.items()} for way in ("in C", "in Python")}


@pytest.fixture(params=MOST)
def way(request, monkeypatch):
    """How calls are replayed."""
    if request.param == "in Python":
        monkeypatch.setattr(native, "load", lambda: None)
        monkeypatch.setattr(native, "code", None)
    elif native.why_not():
        pytest.skip(f"native.c is not compiled here: {native.why_not()}")
    return request.param


@pytest.fixture
def calls(way, no_launches):  # noqa: F811
    x, grad = streams(), streams(requires_grad=True)
    connection = HyperConnection(nn.Identity(), n, D, backend="triton")
    maps = [parameter.detach() for parameter in (connection.phi, connection.alpha, connection.bias)]
    of_post = (torch.zeros(T, D, dtype=torch.bfloat16), torch.zeros(T, n), torch.zeros(T, n, n))
    rows, weight, state = torch.zeros(2, 512, D, requires_grad=True), torch.zeros(D, 4), torch.zeros(8, D, 3)
    token, drows = torch.zeros(8, D), torch.zeros(2, 512, D)
    conv = partial(mhc_ops.causal_conv1d, weight=weight, backend="triton")
    return {
        "mhc_pre": lambda: mhc_ops.mhc_pre(x, *maps, backend="triton"),
        "mhc_post": lambda: mhc_ops.mhc_post(x, *of_post, backend="triton"),
        "mhc_layer": lambda: mhc_ops.mhc_layer(x, lambda h: h, *maps, backend="triton"),
        "HyperConnection": step(connection, grad),
        "a stack of 2": step(stack(2), grad),
        "a stack of 3": step(stack(3), grad),
        "causal_conv1d": lambda: torch.autograd.grad(conv(rows), rows, drows),
        "causal_conv1d_update": lambda: mhc_ops.causal_conv1d_update(token, state, weight, backend="triton"),
    }


def test_what_a_call_does_is_counted(calls, way):
    found = {name: counted(call) for name, call in calls.items()}
    found["a boundary"] = found.pop("a stack of 3") - found.pop("a stack of 2")
    most = MOST[way]
    assert found.keys() == most.keys()
    assert [
        f"{name}: {kind}" for name in most for kind, count in zip(KINDS, most[name]) if found[name][kind] > count
    ] == []
