"""Bad input of the convolution is refused before any launch, by the names of the function and of the argument."""

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
        "x": zeros(L, D), "conv_state": zeros(5, D, W), "weight": zeros(D, W),
        "cu_seqlens": zeros(B + 1, dtype=torch.int32), "conv_state_indices": zeros(B, 3, dtype=torch.int32),
    },
    "short_conv": {"x": zeros(B, L, 2, D), "gamma": zeros(2, D), "weight": zeros(2 * D, W)},
}  # fmt: skip
# A message that names a type is that of a TypeError, every other one that of a ValueError.
OF_TYPE = re.compile(r": \w+ must be (an? |bool|bfloat16|u?int\d|float\d)")


def integers(*shape, dtype=torch.int32):
    return zeros(*shape, dtype=dtype)


IDS, CU = integers(B, L), integers(2)
OPTIONAL = {
    "causal_conv1d": {"residual": zeros(B, L, D), "initial_state": STATE, "seq_idx": IDS, "cu_seqlens": CU},
    "causal_conv1d_update": {"bias": zeros(D), "cache_seqlens": integers(B), "conv_state_indices": integers(B)},
    "causal_conv1d_prefill": {
        "bias": zeros(D), "has_initial_state": zeros(B).bool(),
        "read_columns": integers(B), "write_columns": integers(B),
    },
    "short_conv": {},
}  # fmt: skip


def each(argument, *values, **others):
    """The argument that is named, and what is given: the others, and one value of it after the other."""
    return [(argument, {**others, argument: value}) for value in values]


def of_any_tensor(name):
    """What is refused of each tensor: other objects, sparse tensors, another device, and for floats integers."""
    for argument, good in {**GOOD[name], **OPTIONAL[name]}.items():
        nested = torch.nested.nested_tensor(list(good[:, None]))
        other = good.int() if good.is_floating_point() else good.float()
        yield from each(argument, [1.0], good.to_sparse(), nested, other)
        if argument != "x":
            yield from each(argument, good.to("meta"))
        if argument in GOOD[name] and argument != "bias":
            yield from each(argument, None)


FILTER = [
    *each("weight", zeros(D), zeros(W, D), zeros(D, 0), zeros(D, 1, W), zeros(D, 2, W)), *each("bias", zeros(D, 1)),
    *each("activation", "gelu", True), *each("backend", "cuda"),
]  # fmt: skip
DILATION = each("dilation", 0, 1.0, True)
ONE = zeros(1, L, D)  # for cu_seqlens
CONV = [
    *each("x", zeros(L, D), zeros(B, L, 2, D), ONE.mT), *each("x", ONE.mT, weight=zeros(D, 1, W)),
    ("x", {"cu_seqlens": CU}), *each("residual", zeros(B, D, L)), *each("seq_idx", IDS.long(), integers(L)),
    *each("seq_idx", IDS, cu_seqlens=CU), *each("seq_idx", IDS, output_final_state=True),
    *each("cu_seqlens", integers(1, 2), integers(0)), *each("output_final_state", 1),
    *each("initial_state", STATE.half(), STATE.mT), *each("initial_state", STATE, dilation=2),
    *each("initial_state", STATE, x=ONE, cu_seqlens=integers(4)),
]  # fmt: skip
UPDATE = [
    *each("x", zeros(D), zeros(B, 1, 1, D), zeros(B, D, 3), zeros(B, D).to_sparse_csr(), zeros(B, D).to_mkldnn()),
    *each("conv_state", STATE.double(), STATE[0], STATE.mT, STATE[..., 1:], STATE[:1], zeros(3, D, W)),
    *each("conv_state", STATE[..., :0], weight=zeros(D, 1), cache_seqlens=integers(B)),
    *each("conv_state", STATE[:1].expand(B, D, W - 1)), ("conv_state", {"dilation": 2}),
    *each("cache_seqlens", integers(B, 1)), *each("conv_state_indices", integers(B, dtype=torch.int16), integers(3)),
    *each("pad_slot_id", None, 2**63, 10**30), *each("dilation", 10**400),
]  # fmt: skip
COLUMNS = {"conv_state_indices": integers(B, 2), "conv_state": zeros(4, D, W)}
ACCEPTED = {"num_accepted_tokens": integers(B)}
WINDOWS = zeros(B, 1, D, W - 1)
PACKED = {"cu_seqlens": integers(B + 1), "max_seqlen": 2}
TREE = zeros(B, 2, D)
# What only servers pass
STEP = [
    *each("dilation", 2, **ACCEPTED), *each("dilation", 2, **COLUMNS),
    *each("cache_seqlens", integers(B), windows=WINDOWS), *each("weight", zeros(D, 1), **ACCEPTED),
    *each("num_accepted_tokens", integers(3), zeros(B)), ("conv_state", {"x": zeros(B, 3, D), **ACCEPTED}),
    ("conv_state", {"x": zeros(4, D), **PACKED, **ACCEPTED}),
    *each("conv_state", zeros(3, D, W), zeros(B, D, W).half(), **ACCEPTED),
    ("max_seqlen", {"cu_seqlens": integers(B + 1)}), ("max_seqlen", {**PACKED, "max_seqlen": 0}),
    *each("max_seqlen", 2), *each("cu_seqlens", integers(0), max_seqlen=2), *each("x", zeros(B, 1, D), **PACKED),
    *each("conv_state_indices", integers(B, 0)), *each("conv_state_indices", integers(B, 1, 1), **ACCEPTED),
    *each("read_columns", integers(B)), *each("write_columns", integers(B), conv_state_indices=integers(B)),
    *each("write_columns", integers(3), **COLUMNS),
    *each("out", zeros(B, D).half(), zeros(B, 1, D), zeros(1, D).expand(B, D)),
    ("conv_state and out", {"out": STATE[..., 0]}),
    *each("windows", WINDOWS.half(), WINDOWS[..., 1:], WINDOWS[:, :0], WINDOWS[:1]),
    *each("window_indices", integers(1), windows=WINDOWS), *each("window_indices", integers(B)),
    *each("parents", integers(B)), ("out", {"parents": integers(B, 2), "x": TREE, "out": TREE}),
    ("cu_seqlens and parents", {"parents": integers(B, 1), **PACKED}),
    ("num_accepted_tokens and parents", {"parents": integers(B, 1), **ACCEPTED}),
    ("write_columns and parents", {"parents": integers(B, 1), "write_columns": integers(B), **COLUMNS}),
]  # fmt: skip
BLOCKS = {"first_columns": integers(B), "tokens_before": integers(B), "block_size": 4}
PREFILL = [
    *each("x", zeros(1, L, D), zeros(D, L)), *each("weight", zeros(D, 1)),
    *each("conv_state", zeros(5, D, 2), zeros(1, D, W).expand(5, D, W)), *each("cu_seqlens", integers(1, 3)),
    *each("conv_state_indices", integers(3)), *each("has_initial_state", zeros(3, dtype=torch.bool)),
    *each("read_columns", integers(B, 1)),
    *[(f"first_columns, tokens_before, block_size .* {name}", {**BLOCKS, name: None}) for name in BLOCKS],
    ("block_size", {**BLOCKS, "block_size": 0}), *each("pad_slot_id", None),
]  # fmt: skip
SHORT = [
    *each("x", zeros(B, L, D), zeros(B, L, 0, D), zeros(B, L, 2, 0)), *each("gamma", zeros(D)),
    *each("weight", zeros(D, W), zeros(2 * D, 1, W)), *each("dilation", -1, "1"), *each("residual", 1),
    *each("norm_eps", None, 10**400, -1e-05, float("nan"), float("inf")), *each("backend", "cuda"),
]  # fmt: skip
BAD = {
    "causal_conv1d": FILTER + DILATION + CONV,
    "causal_conv1d_update": FILTER + DILATION + UPDATE + STEP,
    "causal_conv1d_prefill": FILTER + PREFILL,
    "short_conv": SHORT,
}


@pytest.mark.parametrize("name", GOOD)
def test_bad(name):
    function, good = getattr(mhc_ops, name), GOOD[name]
    assert function(**good).shape == good["x"].shape, "else the messages below could have another cause"
    for argument, changes in (*of_any_tensor(name), *BAD[name]):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: {argument}\b") as error:
            function(**{**good, **changes})
        message = str(error.value)
        assert error.type is (TypeError if OF_TYPE.search(message) else ValueError), message
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
