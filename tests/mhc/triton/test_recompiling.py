"""After a warm-up nothing is compiled: not by a training step, and not by a server, whatever the number of tokens."""

import itertools
import random

import pytest
import torch
from torch import nn

import mhc_ops
from mhc_ops.core.backend import _INTERPRETED

pytest.importorskip("triton")
import cross_compile
from mhc_kernels import bf16, fp32

compiled_only = pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")
by_target = pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942"])
by_norm = pytest.mark.parametrize("layer_norm", [False, True])
N, D = 4, 4096


def on_meta(*shape, dtype=fp32):
    return torch.empty(shape, dtype=dtype, device="meta")


def warmed_up(asked, **sizes):
    count = mhc_ops.warmup(N, D, **sizes, device="meta")
    assert 5 < count == len(asked) == asked.total()
    ahead = set(asked)
    asked.clear()
    return ahead


def serve(T, layer_norm):
    M = N * N + 2 * N
    x, h_out = on_meta(T, N, D, dtype=bf16), on_meta(T, D, dtype=bf16)
    own = {"phi": on_meta(M, N * D), "alpha": on_meta(3), "bias": on_meta(M)}
    if layer_norm:
        own["layer_norm_weight"] = on_meta(D)
    of_post = on_meta(T, N), on_meta(T, N, N)
    of_head = on_meta(N, N * D), on_meta(1), on_meta(N)
    carry = mhc_ops.Carry(x, *of_post, read=on_meta(T, N))
    random.choice(
        [
            lambda: mhc_ops.mhc_pre(x, **own),
            lambda: mhc_ops.mhc_post(x, h_out, *of_post),
            lambda: mhc_ops.mhc_post_pre(x, h_out, *of_post, **own),
            lambda: mhc_ops.mhc_head(x, *of_head),
            lambda: mhc_ops.mhc_enter(x, shifted=True, read=on_meta(T, N), **own),
            lambda: mhc_ops.mhc_next(carry, h_out, **own),
            lambda: mhc_ops.mhc_read(x, on_meta(T, N)),
        ]
    )()


@compiled_only
@by_target
@by_norm
def test_200_random_calls(layer_norm, target, monkeypatch, capsys):
    sizes = {"tokens": 300, "layer_norm": layer_norm, "shifted": True, "training": False}
    with cross_compile.counting_for(target, monkeypatch) as asked, mhc_ops.use_backend("triton"), torch.no_grad():
        ahead = warmed_up(asked, **sizes)
        assert f"warmup: {len(ahead)} kernels in " in capsys.readouterr().err
        random.seed(0)
        for _ in range(200):
            serve(random.randint(1, 300), layer_norm)
        assert asked.total() >= 200 and set(asked) <= ahead


def train(n, D, tokens, shifted=False, device="meta", **options):
    connections = (mhc_ops.HyperConnection(nn.Identity(), n, D, **options, device=device) for _ in range(3))
    stack = mhc_ops.HyperStack(*connections, shifted=shifted)
    x = torch.zeros(tokens, n, D, dtype=bf16, device=device, requires_grad=True)
    stack(x).sum().backward()
    with torch.no_grad():
        stack(x)


@compiled_only
@by_target
@by_norm
@pytest.mark.parametrize("tokens", [5, 300, 8192])
def test_a_training_step(tokens, layer_norm, target, monkeypatch):
    """A stack launches just what is compiled, a shifted one no more than that."""
    boundary, fused = {"mhc_boundary_fwd_kernel", "mhc_boundary_bwd_kernel"}, (target, tokens) == ("sm_90", 8192)
    for gamma, shifted in itertools.product((False, True), repeat=2):
        options = {"tokens": tokens, "gamma": gamma, "layer_norm": layer_norm, "shifted": shifted}
        with cross_compile.counting_for(target, monkeypatch) as asked, mhc_ops.use_backend("triton"):
            ahead = warmed_up(asked, **options)
            train(N, D, **options)
        assert set(asked) <= ahead if shifted else set(asked) == ahead, options
        assert boundary & {name for name, *_ in ahead} == (boundary if fused else set())


@pytest.mark.interpreted
def test_in_the_interpreter():
    """It counts the kernels and compiles none."""
    assert mhc_ops.warmup(4, 24, tokens=(5, 300), device="cpu", backend="triton") > 5


@pytest.mark.gpu
def test_the_first_step_compiles_nothing(monkeypatch, tmp_path):
    """On a GPU, with an empty cache: after the warm-up, no kernel is compiled any more."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert mhc_ops.warmup(3, 48, tokens=300) > 5
    monkeypatch.setattr(triton.compiler, "compile", None)
    monkeypatch.setattr(triton.runtime.jit, "compile", None, raising=False)
    train(3, 48, 300, device="cuda")
