"""What a server calls compiles once for each form of a kernel, and nothing after a warm-up."""

import random

import pytest
import torch

import mhc_ops
from mhc_ops.core.backend import _INTERPRETED

pytest.importorskip("triton")
import cross_compile

pytestmark = pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")
N, D = 4, 4096
# On Hopper the kernel for few tokens has three tiles in each of five forms. The others have a form for the maps of a
# layer and one for the head's, and the projection reads phi as it is or in parts.
MOST = 30


def on_meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def serve(T, layer_norm):
    """One random call of a server, on T tokens."""
    M, bf16 = N * N + 2 * N, torch.bfloat16
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


@pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942"])
@pytest.mark.parametrize("layer_norm", [False, True])
def test_200_random_calls(layer_norm, target, monkeypatch, capsys):
    sizes = {"tokens": 300, "layer_norm": layer_norm, "shifted": True, "training": False, "device": "meta"}
    with cross_compile.counting_for(target, monkeypatch) as asked, mhc_ops.use_backend("triton"), torch.no_grad():
        count = mhc_ops.warmup(N, D, **sizes)
        assert count == len(asked) == asked.total() <= MOST  # each kernel once, in every form
        assert f"warmup: {count} kernels in " in capsys.readouterr().err
        ahead = set(asked)
        random.seed(0)
        for _ in range(200):
            serve(random.randint(1, 300), layer_norm)
        assert asked.total() > 300
        assert set(asked) == ahead
