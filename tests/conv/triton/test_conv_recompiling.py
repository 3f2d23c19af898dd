"""What a server calls compiles once for each form of a kernel, and nothing after a warm-up: not for another number of
tokens, sequences, slots or drafts, nor for other strides."""

import random

import pytest
import torch

import mhc_ops
from mhc_ops.compat import sglang, vllm
from mhc_ops.core.backend import _INTERPRETED

pytest.importorskip("triton")
import cross_compile

pytestmark = pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")
D, W, SPARE = 4096, 4, 5


def on_meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape):
    return on_meta(*shape, dtype=torch.int32)


def serve(weight):
    """One random call of a server: a chunk within wider rows, single tokens, or drafts."""
    B, slots, T = random.randint(1, 64), random.randint(64, 500), random.randint(1, 4)
    length = W - 1 + random.randint(T - 1, SPARE)
    state = random.choice([on_meta(slots, length, D).transpose(1, 2), on_meta(slots, D, length)])
    wide = on_meta(random.randint(1, 3000), D + 16 * random.randint(0, 9))[:, :D]
    lengths = {"query_start_loc": ints(B + 1), "max_query_len": T}
    accepted = {"num_accepted_tokens": ints(B)}
    drafts = on_meta(B, T, D).transpose(1, 2)
    windows = {"intermediate_conv_window": on_meta(B, 4, D, W - 1), "intermediate_state_indices": ints(B)}
    tree = {"retrieve_next_token": ints(B, T), "retrieve_next_sibling": ints(B, T), "retrieve_parent_token": ints(B, T)}
    random.choice(
        [
            lambda: vllm.causal_conv1d_fn(wide.T, weight, None, state, ints(B + 1), ints(B), on_meta(B).bool()),
            lambda: vllm.causal_conv1d_update(on_meta(B, D), state, weight, None, True, ints(B)),
            lambda: vllm.causal_conv1d_update(drafts, state, weight, None, True, ints(B), **accepted),
            lambda: vllm.causal_conv1d_update(wide, state, weight, None, True, ints(B), **accepted, **lengths),
            lambda: sglang.causal_conv1d_update(on_meta(B, D), state, weight, None, True, None, ints(B)),
            lambda: sglang.causal_conv1d_update(drafts, state, weight, None, True, None, ints(B), **windows),
            lambda: sglang.causal_conv1d_update(drafts, state, weight, None, True, None, ints(B), **windows, **tree),
        ]
    )()


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_200_random_calls(target, monkeypatch, capsys):
    weight = on_meta(D, W)
    with cross_compile.counting_for(target, monkeypatch) as asked, mhc_ops.use_backend("triton"), torch.no_grad():
        count = mhc_ops.conv_warmup(D, W, tokens=3000, device="meta")
        assert count == len(asked) == asked.total()
        assert f"conv_warmup: {count} kernels in " in capsys.readouterr().err
        ahead = set(asked)
        random.seed(0)
        for _ in range(200):
            serve(weight)
        assert asked.total() == count + 200
        assert set(asked) <= ahead


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"tokens": (4, 0)}, ValueError, "tokens must be at least 1, got 0"),
        ({"W": 0}, ValueError, "W must be at least 1, got 0"),
        ({"activation": "relu"}, ValueError, "activation must be"),
        ({"index_dtype": "int32"}, TypeError, "index_dtype must be a torch.dtype, got str"),
        ({"verbose": 1}, TypeError, "verbose must be a bool, got int"),
    ],
)
def test_wrong_use(given, error, message):
    with pytest.raises(error, match=f"^conv_warmup: {message}"):
        mhc_ops.conv_warmup(**{"D": 8, "device": "cpu", **given})
    assert mhc_ops.conv_warmup(8, device="cpu", backend="reference") == 0
