"""Kernels compiled ahead are those that a step launches."""

import pytest
import torch
from torch import nn

import mhc_ops
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


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize("tokens", [5, 300])
def test_what_is_compiled_is_what_a_step_launches(tokens, gamma, layer_norm, launched, kernel_device, monkeypatch):
    compiled = []
    monkeypatch.setattr(mhc_ops.mhc.warmup, "ThreadPoolExecutor", lambda count: Ahead(compiled))
    sizes = {"tokens": tokens, "gamma": gamma, "layer_norm": layer_norm, "device": kernel_device}
    assert mhc_ops.warmup(4, 24, **sizes, backend="triton") == len(compiled) > 5
    ahead = set(launched)
    assert len(compiled) == len(ahead)  # each once, whichever ops it is of
    launched.clear()
    monkeypatch.setattr(launching, "launch", lambda *_, **arguments: None)  # nobody reads what the step computes
    stack = stack_of(4, 24, gamma=gamma, layer_norm=layer_norm, backend="triton", device=kernel_device)
    x = torch.randn(tokens, 4, 24, dtype=torch.bfloat16, device=kernel_device, requires_grad=True)
    stack(x).sum().backward()
    with torch.no_grad():
        stack(x)
    assert set(launched) == ahead


def stack_of(n, D, **options):
    """The kernels of a connection alone are among its."""
    return mhc_ops.HyperStack(*(mhc_ops.HyperConnection(nn.Identity(), n, D, **options) for _ in range(3)))


def test_the_boundary_of_a_stack_is_compiled(kernel_device, monkeypatch):
    """Its own launchers run, whatever they are made of on this device: with gradients, backward, and without."""
    asked, load = [], backends.load

    def seen(family, backend, name, device):
        launcher = load(family, backend, name, device)
        return lambda **tensors: asked.append((name, tensors.get("linked"))) or launcher(**tensors)

    monkeypatch.setattr(backends, "load", seen)
    monkeypatch.setattr(mhc_ops.mhc.warmup, "ThreadPoolExecutor", lambda count: Ahead([]))
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


class Ahead:
    """In place of threads: nothing is compiled."""

    def __init__(self, compiled):
        self.compiled = compiled

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def map(self, function, compilations):
        self.compiled += compilations
        return []


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("where", [{}, {"device": "cpu"}, {"device": "cuda", "backend": "reference"}], ids=str)
def test_without_kernels_there_is_nothing_to_compile(where, no_gpu):
    """The same line of a program does for a laptop and for a GPU."""
    assert mhc_ops.warmup(4, 64, torch.bfloat16, **where) == 0


@pytest.mark.parametrize("backend", [None, "triton"])
def test_a_gpu_that_is_not_there_is_said(backend, no_gpu):
    with pytest.raises(ValueError, match=r"^warmup: device must be there, got cuda:0 and torch sees no GPU; without "):
        mhc_ops.warmup(4, 64, device="cuda:0", backend=backend)


def test_triton_without_a_gpu_is_said(no_gpu, monkeypatch):
    monkeypatch.setattr(backends, "_INTERPRETED", False)
    with pytest.raises(RuntimeError, match=r"^warmup: backend 'triton' cannot run here: "):
        mhc_ops.warmup(4, 64, backend="triton")


@pytest.mark.parametrize("name", ["dtype", "parameter_dtype"])
def test_a_type_that_is_none_is_named(name):
    with pytest.raises(TypeError, match=rf"^warmup: {name} must be a torch.dtype, got str$"):
        mhc_ops.warmup(4, 64, **{name: "bfloat16"})


def test_what_tilelang_lacks_is_said(monkeypatch):
    monkeypatch.setattr(mhc_ops.mhc.warmup, "choose", lambda *_: "tilelang")
    with pytest.raises(NotImplementedError, match=r"^warmup with layer_norm: backend 'tilelang' does not have it"):
        mhc_ops.warmup(4, 24, layer_norm=True, device="cpu")


def test_a_typo_is_named():
    with pytest.raises(TypeError, match=r"warmup\(\) got an unexpected keyword argument 'sinkhorn_iter'"):
        mhc_ops.warmup(4, 24, device="cpu", backend="reference", sinkhorn_iter=3)


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
