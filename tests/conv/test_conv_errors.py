"""Every message of the convolution for bad input, raised before any launch."""

import re

import pytest
import torch
from torch import zeros

import mhc_ops

B, L, D, W = 2, 6, 8, 4
STATE = zeros(B, D, W - 1)
GOOD = {
    "causal_conv1d": {"x": zeros(B, L, D), "weight": zeros(D, W), "bias": zeros(D)},
    "causal_conv1d_update": {"x": zeros(B, D), "conv_state": STATE, "weight": zeros(D, W)},
    "causal_conv1d_prefill": {
        "x": zeros(L, D),
        "conv_state": zeros(5, D, W),
        "weight": zeros(D, W),
        "cu_seqlens": zeros(B + 1, dtype=torch.int32),
        "conv_state_indices": zeros(B, 3, dtype=torch.int32),
    },
    "short_conv": {"x": zeros(B, L, 2, D), "gamma": zeros(2, D), "weight": zeros(2 * D, W)},
}
TENSOR = "must be a torch.Tensor, got"
DENSE = "must be a dense (strided) tensor, got"
FLOATS = "must be bfloat16, float16, float32 or float64, got"
ELSEWHERE = "must be on cpu as x is, got meta"
OWN_MEMORY = "must have memory of its own for each element: pass"
WITHOUT_TABLE = "must be None without conv_state_indices [N, blocks]"
SLOT_OF_EACH = "conv_state must have a slot for each of 2 sequences, got"
TABLE = "conv_state_indices must be [2] or [2, blocks] with blocks at least 1, got"
OF_WINDOWS = "windows must be [lines, steps, 8, 3] with steps at least 1, got"
ONE_MORE = ": pass weight.squeeze(1), nn.Conv1d has one dimension more"
# After "must be" a wrong type is told by one of these; every other message is that of a ValueError.
OF_TYPE = re.compile(r"\w+ must be (an? |bool|bfloat16|u?int\d|float\d)")


def integers(*shape, dtype=torch.int32):
    return zeros(*shape, dtype=dtype)


IDS, CU = integers(B, L), integers(2)
OPTIONAL = {
    "causal_conv1d": {"residual": zeros(B, L, D), "initial_state": STATE, "seq_idx": IDS, "cu_seqlens": CU},
    "causal_conv1d_update": {"bias": zeros(D), "cache_seqlens": integers(B), "conv_state_indices": integers(B)},
    "causal_conv1d_prefill": {
        "bias": zeros(D),
        "has_initial_state": zeros(B, dtype=torch.bool),
        "read_columns": integers(B),
        "write_columns": integers(B),
    },
    "short_conv": {},
}


def of_any_tensor(name):
    """What is refused of each tensor: other objects, sparse tensors, another device, and for floats integers."""
    for argument, good in {**GOOD[name], **OPTIONAL[name]}.items():
        kind = FLOATS if good.is_floating_point() else "must be int32" + " or int64" * (argument != "seq_idx") + ", got"
        kind = "must be bool, got" if good.dtype is torch.bool else kind
        other = good.int() if good.is_floating_point() else good.float()
        yield {argument: [1.0]}, f"{argument} {TENSOR} list"
        yield {argument: good.to_sparse()}, f"{argument} {DENSE} sparse_coo"
        yield {argument: torch.nested.nested_tensor(list(good[:, None]))}, f"{argument} {DENSE} nested"
        yield {argument: other}, f"{argument} {kind} {str(other.dtype).removeprefix('torch.')}"
        if argument != "x":
            yield {argument: good.to("meta")}, f"{argument} {ELSEWHERE}"
        if argument in GOOD[name] and argument != "bias":
            yield {argument: None}, f"{argument} {TENSOR} NoneType"


FILTER = [
    ({"weight": zeros(D)}, "weight must be [8, W] with W at least 1, got [8]"),
    ({"weight": zeros(W, D)}, "weight must be [8, W] with W at least 1, got [4, 8]"),
    ({"weight": zeros(D, 0)}, "weight must be [8, W] with W at least 1, got [8, 0]"),
    ({"weight": zeros(D, 1, W)}, f"weight must be [8, W] with W at least 1, got [8, 1, 4]{ONE_MORE}"),
    ({"weight": zeros(D, 2, W)}, "weight must be [8, W] with W at least 1, got [8, 2, 4]"),
    ({"bias": zeros(D, 1)}, "bias must be [8], got [8, 1]"),
    ({"activation": "gelu"}, "activation must be None, 'silu' or 'swish', got 'gelu'"),
    ({"activation": True}, "activation must be None, 'silu' or 'swish', got True"),
    ({"dilation": 0}, "dilation must be at least 1, got 0"),
    ({"dilation": 1.0}, "dilation must be an int, got float"),
    ({"dilation": True}, "dilation must be an int, got bool"),
    ({"backend": "cuda"}, "backend must be one of reference, triton, tilelang, hip, got 'cuda'"),
]
ONE = zeros(1, L, D)  # for cu_seqlens
CONV = [
    ({"x": zeros(L, D)}, "x must be [B, L, D], got [6, 8]"),
    ({"x": zeros(B, L, 2, D)}, "x must be [B, L, D], got [2, 6, 2, 8]"),
    ({"x": ONE.mT}, "x must be [B, L, D] with D = 8 as weight is [8, 4], got [1, 8, 6]: pass x.mT"),
    ({"x": ONE.mT, "weight": zeros(D, 1, W)},
     "x must be [B, L, D] with D = 8 as weight is [8, 1, 4], got [1, 8, 6]: pass x.mT"),
    ({"residual": zeros(B, D, L)}, "residual must be [2, 6, 8], got [2, 8, 6]"),
    ({"seq_idx": integers(B, L), "cu_seqlens": integers(2)}, "seq_idx and cu_seqlens exclude each other"),
    ({"seq_idx": integers(B, L), "output_final_state": True}, "seq_idx and output_final_state exclude each other"),
    ({"seq_idx": integers(B, L, dtype=torch.int64)}, "seq_idx must be int32, got int64"),
    ({"seq_idx": integers(L)}, "seq_idx must be [2, 6], got [6]"),
    ({"cu_seqlens": integers(1, 2)}, "cu_seqlens must be [N + 1], got [1, 2]"),
    ({"cu_seqlens": integers(0)}, "cu_seqlens must be [N + 1], got [0]"),
    ({"cu_seqlens": integers(2)}, "x must be [1, L, D] with cu_seqlens, got [2, 6, 8]"),
    ({"output_final_state": 1}, "output_final_state must be a bool, got int"),
    ({"initial_state": STATE.half()}, "initial_state must be float32 as x is, got float16"),
    ({"initial_state": STATE.mT}, "initial_state must be [2, 8, 3], got [2, 3, 8]"),
    ({"initial_state": STATE, "dilation": 2}, "initial_state must be [2, 8, 6], got [2, 8, 3]"),
    ({"initial_state": STATE, "x": ONE, "cu_seqlens": integers(4)}, "initial_state must be [3, 8, 3], got [2, 8, 3]"),
]  # fmt: skip
SLOTS = "conv_state must be [slots, 8, length] with length at least"
UPDATE = [
    ({"x": zeros(D)}, "x must be [B, D] or [B, T, D], got [8]"),
    ({"x": zeros(B, 1, 1, D)}, "x must be [B, D] or [B, T, D], got [2, 1, 1, 8]"),
    ({"x": zeros(B, D, 3)}, "x must be [B, D] or [B, T, D] with D = 8 as weight is [8, 4], got [2, 8, 3]: pass x.mT"),
    ({"x": zeros(B, D).to_sparse_csr()}, f"x {DENSE} sparse_csr"),
    ({"x": zeros(B, D).to_mkldnn()}, f"x {DENSE} mkldnn"),
    ({"conv_state": STATE.double()}, "conv_state must be float32 as x is, got float64"),
    ({"conv_state": STATE[0]}, f"{SLOTS} 3, got [8, 3]"),
    ({"conv_state": STATE.mT}, f"{SLOTS} 3, got [2, 3, 8]"),
    ({"conv_state": STATE[..., 1:]}, f"{SLOTS} 3, got [2, 8, 2]"),
    ({"dilation": 2}, f"{SLOTS} 6, got [2, 8, 3]"),
    ({"conv_state": STATE[:1]}, f"{SLOT_OF_EACH} 1"),
    ({"conv_state": zeros(3, D, W)}, f"{SLOT_OF_EACH} 3"),
    ({"conv_state": STATE[..., :0], "weight": zeros(D, 1), "cache_seqlens": integers(B)},
     "conv_state must have a length of at least 1 with cache_seqlens, got 0"),
    ({"conv_state": STATE[:1].expand(B, D, W - 1)}, f"conv_state {OWN_MEMORY} conv_state.contiguous()"),
    ({"cache_seqlens": integers(B, 1)}, "cache_seqlens must be [2], got [2, 1]"),
    ({"conv_state_indices": integers(B, dtype=torch.int16)}, "conv_state_indices must be int32 or int64, got int16"),
    ({"conv_state_indices": integers(3)}, "conv_state_indices must be [2], got [3]"),
    ({"pad_slot_id": None}, "pad_slot_id must be an int, got NoneType"),
    ({"pad_slot_id": 2**63}, "pad_slot_id must fit 64 bits, got 9223372036854775808"),
    ({"pad_slot_id": 10**30}, "pad_slot_id must fit 64 bits, got one of 100 bits"),
    ({"dilation": 10**400}, "dilation must fit 64 bits, got one of 1329 bits"),
]  # fmt: skip
COLUMNS = {"conv_state_indices": integers(B, 2), "conv_state": zeros(4, D, W)}
ACCEPTED = {"num_accepted_tokens": integers(B)}
WINDOWS = zeros(B, 1, D, W - 1)
PACKED = {"cu_seqlens": integers(B + 1), "max_seqlen": 2}
TREE = zeros(B, 2, D)
# What only servers pass
STEP = [
    ({"dilation": 2, **ACCEPTED}, "dilation must be 1 with num_accepted_tokens, got 2"),
    ({"dilation": 2, **COLUMNS}, "dilation must be 1 with conv_state_indices [B, blocks], got 2"),
    ({"cache_seqlens": integers(B), "windows": WINDOWS}, "cache_seqlens must be None with windows"),
    ({"weight": zeros(D, 1), **ACCEPTED}, "weight must have a width of at least 2 on a cache, got 1"),
    ({"num_accepted_tokens": integers(3)}, "num_accepted_tokens must be [2], got [3]"),
    ({"num_accepted_tokens": zeros(B)}, "num_accepted_tokens must be int32 or int64, got float32"),
    ({"x": zeros(B, 3, D), **ACCEPTED}, f"{SLOTS} 5 for 3 tokens with num_accepted_tokens, got [2, 8, 3]"),
    ({"x": zeros(4, D), **PACKED, **ACCEPTED}, f"{SLOTS} 4 for 2 tokens with num_accepted_tokens, got [2, 8, 3]"),
    ({"cu_seqlens": integers(B + 1)}, "max_seqlen must be an int, got NoneType"),
    ({**PACKED, "max_seqlen": 0}, "max_seqlen must be at least 1, got 0"),
    ({**PACKED, "cu_seqlens": integers(0)}, "cu_seqlens must be [N + 1], got [0]"),
    ({**PACKED, "x": zeros(B, 1, D)}, "x must be [tokens, D] with cu_seqlens, got [2, 1, 8]"),
    ({"max_seqlen": 2}, "max_seqlen must be None without cu_seqlens, got 2"),
    ({"conv_state_indices": integers(B, 0)}, f"{TABLE} [2, 0]"),
    ({"conv_state_indices": integers(B, 1, 1), **ACCEPTED}, f"{TABLE} [2, 1, 1]"),
    ({"conv_state": zeros(3, D, W), **ACCEPTED}, f"{SLOT_OF_EACH} 3"),
    ({"conv_state": zeros(B, D, W).half(), **ACCEPTED}, "conv_state must be float32 as x is, got float16"),
    ({"read_columns": integers(B)}, f"read_columns {WITHOUT_TABLE}"),
    ({"write_columns": integers(B), "conv_state_indices": integers(B)}, f"write_columns {WITHOUT_TABLE}"),
    ({**COLUMNS, "write_columns": integers(3)}, "write_columns must be [2], got [3]"),
    ({"out": zeros(B, D).half()}, "out must be float32 as x is, got float16"),
    ({"out": zeros(B, 1, D)}, "out must be [2, 8], got [2, 1, 8]"),
    ({"out": zeros(1, D).expand(B, D)}, f"out {OWN_MEMORY} out.contiguous()"),
    ({"out": STATE[..., 0]}, "conv_state and out must not share memory"),
    ({"windows": WINDOWS.half()}, "windows must be float32 as x is, got float16"),
    ({"windows": WINDOWS[..., 1:]}, f"{OF_WINDOWS} [2, 1, 8, 2]"),
    ({"windows": WINDOWS[:, :0]}, f"{OF_WINDOWS} [2, 0, 8, 3]"),
    ({"windows": WINDOWS[:1]}, "windows must have a line for each of 2 sequences, got 1"),
    ({"windows": WINDOWS, "window_indices": integers(1)}, "window_indices must be [2], got [1]"),
    ({"window_indices": integers(B)}, "window_indices must be None without windows"),
    ({"parents": integers(B)}, "parents must be [2, 1], got [2]"),
    ({"parents": integers(B, 2), "x": TREE, "out": TREE}, "out must not be x with parents: later tokens read x"),
    ({"parents": integers(B, 1), **PACKED}, "cu_seqlens and parents exclude each other"),
    ({"parents": integers(B, 1), **ACCEPTED}, "num_accepted_tokens and parents exclude each other"),
    ({"parents": integers(B, 1), "write_columns": integers(B), **COLUMNS},
     "write_columns and parents exclude each other"),
]  # fmt: skip
BLOCKS = {"first_columns": integers(B), "tokens_before": integers(B), "block_size": 4}
PREFILL = [
    *[(changes, message) for changes, message in FILTER if "dilation" not in changes],
    ({"x": zeros(1, L, D)}, "x must be [tokens, D], got [1, 6, 8]"),
    ({"x": zeros(D, L)}, "x must be [tokens, D] with D = 8 as weight is [8, 4], got [8, 6]: pass x.mT"),
    ({"weight": zeros(D, 1)}, "weight must have a width of at least 2 on a cache, got 1"),
    ({"conv_state": zeros(5, D, 2)}, f"{SLOTS} 3, got [5, 8, 2]"),
    ({"conv_state": zeros(1, D, W).expand(5, D, W)}, f"conv_state {OWN_MEMORY} conv_state.contiguous()"),
    ({"cu_seqlens": integers(1, 3)}, "cu_seqlens must be [N + 1], got [1, 3]"),
    ({"conv_state_indices": integers(3)}, f"{TABLE} [3]"),
    ({"has_initial_state": zeros(3, dtype=torch.bool)}, "has_initial_state must be [2], got [3]"),
    ({"read_columns": integers(B, 1)}, "read_columns must be [2], got [2, 1]"),
    *(({**BLOCKS, name: None}, f"first_columns, tokens_before, block_size must be given together, got no {name}")
      for name in BLOCKS),
    ({**BLOCKS, "block_size": 0}, "block_size must be at least 1, got 0"),
    ({"pad_slot_id": None}, "pad_slot_id must be an int, got NoneType"),
]  # fmt: skip
STREAMS = "x must be [B, L, n, D] with n and D at least 1, got"
SHORT = [
    *(({"x": zeros(shape)}, f"{STREAMS} {list(shape)}") for shape in ((B, L, D), (B, L, 0, D), (B, L, 2, 0))),
    ({"gamma": zeros(D)}, "gamma must be [2, 8], got [8]"),
    ({"weight": zeros(D, W)}, "weight must be [16, W] with W at least 1, got [8, 4]"),
    ({"weight": zeros(2 * D, 1, W)}, f"weight must be [16, W] with W at least 1, got [16, 1, 4]{ONE_MORE}"),
    ({"dilation": -1}, "dilation must be at least 1, got -1"),
    ({"dilation": "1"}, "dilation must be an int, got str"),
    ({"residual": 1}, "residual must be a bool, got int"),
    ({"norm_eps": None}, "norm_eps must be a number, got NoneType"),
    ({"norm_eps": 10**400}, "norm_eps must be finite and 0 or more, got one of 1329 bits"),
    *(({"norm_eps": float(e)}, f"norm_eps must be finite and 0 or more, got {e}") for e in ("-1e-05", "nan", "inf")),
    ({"backend": "cuda"}, "backend must be one of reference, triton, tilelang, hip, got 'cuda'"),
]  # fmt: skip
BAD = {
    "causal_conv1d": FILTER + CONV,
    "causal_conv1d_update": FILTER + UPDATE + STEP,
    "causal_conv1d_prefill": PREFILL,
    "short_conv": SHORT,
}


@pytest.mark.parametrize("name", GOOD)
def test_bad(name):
    function, good = getattr(mhc_ops, name), GOOD[name]
    assert function(**good).shape == good["x"].shape, "else the messages below could have another cause"
    for changes, message in (*of_any_tensor(name), *BAD[name]):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: {re.escape(message)}$") as error:
            function(**{**good, **changes})
        assert error.type is (TypeError if OF_TYPE.match(message) else ValueError), message
    with pytest.raises(RuntimeError, match=f"^{name}: backend 'tilelang' cannot run here: "):
        function(**good, backend="tilelang")


def test_the_reference_takes_any_width():
    x, weight = torch.randn(B, 20, D), torch.randn(D, 13)
    assert mhc_ops.causal_conv1d(x, weight).shape == x.shape
    assert mhc_ops.causal_conv1d_update(x[:, 0], zeros(B, D, 12), weight).shape == (B, D)


@pytest.mark.interpreted
@pytest.mark.parametrize("name", GOOD)
def test_limits_are_checked_on_the_way_to_the_kernels(name):
    doubles = {key: t.double() if t.is_floating_point() else t for key, t in GOOD[name].items()}
    with pytest.raises(TypeError, match=f"^{name}: x must be .* for backend 'triton', got float64$"):
        getattr(mhc_ops, name)(**doubles, backend="triton")
    wide = zeros(len(GOOD[name]["weight"]), 9)
    state = {"conv_state": zeros(B, D, 8)} if "conv_state" in GOOD[name] else {}
    with pytest.raises(ValueError, match=f"^{name}: the width of weight must be 1 to 8 for backend 'triton', got 9$"):
        getattr(mhc_ops, name)(**{**GOOD[name], "weight": wide, **state}, backend="triton")
