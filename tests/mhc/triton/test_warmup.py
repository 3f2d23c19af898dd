"""Kernels compiled ahead are those that a step launches."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mhc_ops
from mhc_ops.core import ahead
from mhc_ops.core import backend as backends
from mhc_ops.core import launch as launching
from mhc_ops.mhc.triton import exact_products, few_tokens, post, pre_bwd, pre_finish, pre_fwd, pre_norm, pre_sums

MODULES = (exact_products, few_tokens, post, pre_bwd, pre_finish, pre_fwd, pre_norm, pre_sums)
CONSTANTS = ("PARTS", "PIECES", "SLICE_STEPS", "n", "M", "BLOCK_T", "BLOCK_D", "BLOCK_K", "STAGES", "num_warps")


@pytest.fixture
def launched(monkeypatch):
    """(kernel, what it is compiled for) of every launch, also by threads of autograd."""
    found = []

    def seen(kernel, grid, **arguments):
        missing = tuple(sorted(name for name, value in arguments.items() if value is None))
        found.append((kernel.__name__, missing, *(arguments.get(name) for name in CONSTANTS)))
        launching.launch(kernel, grid, **arguments)

    for module in MODULES:
        monkeypatch.setattr(module, "launch", seen)
    return found


@pytest.fixture
def compiled(monkeypatch):
    """What warmup would compile; nothing is."""
    found = []
    pool = SimpleNamespace(map=lambda function, compilations: found.extend(compilations) or [])
    monkeypatch.setattr(ahead, "ThreadPoolExecutor", lambda count: nullcontext(pool))
    return found


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize("tokens", [5, 300])
def test_what_is_compiled_is_what_a_step_launches(
    tokens, gamma, layer_norm, launched, compiled, kernel_device, monkeypatch
):
    sizes = {"tokens": tokens, "gamma": gamma, "layer_norm": layer_norm, "device": kernel_device}
    assert mhc_ops.warmup(4, 24, **sizes, backend="triton") == len(compiled) > 5
    ahead = set(launched)
    assert len(compiled) == len(ahead)  # each once, whichever ops it is of
    launched.clear()
    monkeypatch.setattr(launching, "launch", lambda *_, **arguments: None)  # what the step computes is not read
    stack = stack_of(4, 24, gamma=gamma, layer_norm=layer_norm, backend="triton", device=kernel_device)
    x = torch.randn(tokens, 4, 24, dtype=torch.bfloat16, device=kernel_device, requires_grad=True)
    stack(x).sum().backward()
    with torch.no_grad():
        stack(x)
    assert set(launched) == ahead


def stack_of(n, D, **options):
    """The kernels of a connection alone are among its."""
    return mhc_ops.HyperStack(*(mhc_ops.HyperConnection(nn.Identity(), n, D, **options) for _ in range(3)))


def test_the_boundary_of_a_stack_is_compiled(compiled, kernel_device, monkeypatch):
    """Its own launchers run, whatever they are made of on this device: with gradients, backward, and without."""
    asked, load = [], backends.load

    def seen(family, backend, name, device):
        launcher = load(family, backend, name, device)
        return lambda **tensors: asked.append((name, tensors.get("linked"))) or launcher(**tensors)

    monkeypatch.setattr(backends, "load", seen)
    mhc_ops.warmup(2, 40, tokens=3, device=kernel_device, backend="triton")
    boundary = {("mhc_next_fwd", True), ("mhc_next_fwd", False), ("mhc_next_bwd", None)}
    assert boundary <= set(asked)
    asked.clear()
    x = torch.randn(3, 2, 40, dtype=torch.bfloat16, device=kernel_device, requires_grad=True)
    stack = stack_of(2, 40, backend="triton", device=kernel_device)
    stack(x).sum().backward()
    with torch.no_grad():
        stack(x)
    assert {(name, linked) for name, linked in asked if "next" in name} == boundary


@pytest.mark.gpu
def test_the_first_step_compiles_nothing(monkeypatch, tmp_path):
    """On a GPU, with an empty cache: after the warm-up, no kernel is compiled any more."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert mhc_ops.warmup(3, 48, tokens=300) > 5
    monkeypatch.setattr(triton.compiler, "compile", None)
    monkeypatch.setattr(triton.runtime.jit, "compile", None, raising=False)
    stack = stack_of(3, 48, device="cuda")
    x = torch.randn(300, 3, 48, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    stack(x).sum().backward()
