"""After a warm-up a server compiles nothing, for any number of tokens, sequences, slots and drafts, and any strides."""

import random
from functools import partial

import pytest
import torch

import mhc_ops
from mhc_ops.compat import sglang, vllm
from mhc_ops.core.backend import _INTERPRETED
from mhc_ops.core.check import name_of
from mhc_ops.testing.cases import SEED

pytest.importorskip("triton")
import cross_compile

pytestmark = pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")
D, W, SPARE = 4096, 4, 5


def on_meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape):
    return on_meta(*shape, dtype=torch.int32)


def serve(weight, bias):
    """One random call of a server, and how many kernels it takes: a chunk within wider rows, with and without blocks of
    states, single tokens, or drafts."""
    B, slots, T = random.randint(1, 512), random.randint(513, 4000), random.randint(1, 6)
    length = W - 1 + random.randint(T - 1, SPARE)
    state = random.choice([on_meta(slots, length, D).transpose(1, 2), on_meta(slots, D, length)])
    wide = on_meta(random.randint(1, 40_000), D + 16 * random.randint(0, 200))[:, :D]
    lengths = {"query_start_loc": ints(B + 1), "max_query_len": T}
    accepted, table = {"num_accepted_tokens": ints(B)}, ints(B, 5 + B % 7)
    columns = {"block_idx_last_scheduled_token": ints(B), "initial_state_idx": ints(B)}
    blocks = {"block_idx_first_scheduled_token": ints(B), "num_computed_tokens": ints(B)}
    blocks["block_size_to_align"] = random.randint(1, 2000)
    one, drafts = on_meta(B, D), on_meta(B, T, D).transpose(1, 2)
    windows = {"intermediate_conv_window": on_meta(B, 6, D, W - 1), "intermediate_state_indices": ints(B)}
    tree = {"retrieve_next_token": ints(B, T), "retrieve_next_sibling": ints(B, T), "retrieve_parent_token": ints(B, T)}
    prefill = partial(vllm.causal_conv1d_fn, wide.T, weight, bias, state, ints(B + 1))
    of_vllm = partial(vllm.causal_conv1d_update, conv_state=state, weight=weight, bias=bias, activation=True)
    of_sglang = partial(sglang.causal_conv1d_update, conv_state=state, weight=weight, bias=bias, activation=True)
    goes_on, slot, slots_of = on_meta(B).bool(), {"conv_state_indices": ints(B)}, {"conv_state_indices": table}
    kernels, call = random.choice(
        [
            (1, lambda: prefill(ints(B), goes_on)),
            (2, lambda: prefill(table, goes_on, **columns, **blocks)),
            (1, lambda: of_vllm(one, **slot)),
            (1, lambda: of_vllm(drafts, **slot, **accepted)),
            (1, lambda: of_vllm(wide, **slot, **accepted, **lengths)),
            (1, lambda: of_vllm(wide, **slots_of, **accepted, **lengths, **columns)),
            (1, lambda: of_sglang(one, **slot)),
            (1, lambda: of_sglang(drafts, **slot, **windows)),
            (1, lambda: of_sglang(drafts, **slot, **windows, **tree)),
        ]
    )
    call()
    return kernels


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32], ids=name_of)
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_200_random_calls(target, parameters, monkeypatch, capsys):
    """The bias is in fp32, or there is none."""
    weight, with_bias = on_meta(D, W, dtype=parameters), parameters == torch.float32
    bias = on_meta(D, dtype=parameters) if with_bias else None
    with cross_compile.counting_for(target, monkeypatch) as asked, mhc_ops.use_backend("triton"), torch.no_grad():
        types = {"bias": with_bias, "parameter_dtype": parameters}
        count = mhc_ops.conv_warmup(D, W, tokens=40_000, **types, device="meta")
        assert count == len(asked) == asked.total()
        assert f"conv_warmup: {count} kernels in " in capsys.readouterr().err
        ahead = set(asked)
        random.seed(SEED)
        launched = sum(serve(weight, bias) for _ in range(200))
        assert asked.total() == count + launched and set(asked) <= ahead


def test_wrong_use():
    wrong = {"tokens": (4, 0), "W": 0, "activation": "relu", "index_dtype": "int32", "verbose": 1}
    for name, value in wrong.items():
        error = TypeError if name in ("index_dtype", "verbose") else ValueError
        with pytest.raises(error, match=f"^conv_warmup: {name} must be "):
            mhc_ops.conv_warmup(**{"D": 8, "device": "cpu", name: value})
    assert mhc_ops.conv_warmup(8, device="cpu", backend="reference") == 0
