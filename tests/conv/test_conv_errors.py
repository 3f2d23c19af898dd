"""Every message of the convolution for bad input, raised before any launch."""

import re

import pytest
import torch

import mhc_ops
from mhc_ops.conv import prepare

B, L, D, W = 2, 6, 8, 4


def integers(*shape, dtype=torch.int32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


FILTER = [
    ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
    ({"weight": None}, TypeError, "weight must be a torch.Tensor, got NoneType"),
    ({"bias": 1.0}, TypeError, "bias must be a torch.Tensor, got float"),
    ({"weight": integers(D, W)}, TypeError, "weight must be bfloat16, float16, float32 or float64, got int32"),
    ({"bias": torch.zeros(D, dtype=torch.bool)}, TypeError,
     "bias must be bfloat16, float16, float32 or float64, got bool"),
    ({"weight": torch.zeros(D, W, device="meta")}, ValueError, "weight must be on cpu as x is, got meta"),
    ({"bias": torch.zeros(D, device="meta")}, ValueError, "bias must be on cpu as x is, got meta"),
    ({"weight": torch.zeros(D)}, ValueError, "weight must be [8, W] with W at least 1, got [8]"),
    ({"weight": torch.zeros(W, D)}, ValueError, "weight must be [8, W] with W at least 1, got [4, 8]"),
    ({"weight": torch.zeros(D, 0)}, ValueError, "weight must be [8, W] with W at least 1, got [8, 0]"),
    ({"weight": torch.zeros(D, 1, W)}, ValueError,
     "weight must be [8, W] with W at least 1, got [8, 1, 4]: "
     "pass weight.squeeze(1), nn.Conv1d has one dimension more"),
    ({"weight": torch.zeros(D, 2, W)}, ValueError, "weight must be [8, W] with W at least 1, got [8, 2, 4]"),
    ({"bias": torch.zeros(D, 1)}, ValueError, "bias must be [8], got [8, 1]"),
    ({"activation": "gelu"}, ValueError, "activation must be None, 'silu' or 'swish', got 'gelu'"),
    ({"activation": True}, ValueError, "activation must be None, 'silu' or 'swish', got True"),
    ({"dilation": 0}, ValueError, "dilation must be at least 1, got 0"),
    ({"dilation": 1.0}, TypeError, "dilation must be an int, got float"),
    ({"dilation": True}, TypeError, "dilation must be an int, got bool"),
    ({"backend": "cuda"}, ValueError, "backend must be one of reference, triton, tilelang, hip, got 'cuda'"),
]  # fmt: skip
STATE = torch.zeros(B, D, W - 1)
CONV = [
    *FILTER,
    ({"x": integers(B, L, D)}, TypeError, "x must be bfloat16, float16, float32 or float64, got int32"),
    ({"x": torch.zeros(L, D)}, ValueError, "x must be [B, L, D], got [6, 8]"),
    ({"x": torch.zeros(B, L, 2, D)}, ValueError, "x must be [B, L, D], got [2, 6, 2, 8]"),
    ({"x": torch.zeros(B, D, L)}, ValueError,
     "x must be [B, L, D] with D = 8 as weight is [8, 4], got [2, 8, 6]: pass x.mT"),
    ({"x": torch.zeros(B, D, L), "weight": torch.zeros(D, 1, W)}, ValueError,
     "x must be [B, L, D] with D = 8 as weight is [8, 1, 4], got [2, 8, 6]: pass x.mT"),
    ({"residual": 0.0}, TypeError, "residual must be a torch.Tensor, got float"),
    ({"residual": integers(B, L, D)}, TypeError, "residual must be bfloat16, float16, float32 or float64, got int32"),
    ({"residual": torch.zeros(B, D, L)}, ValueError, "residual must be [2, 6, 8], got [2, 8, 6]"),
    ({"residual": torch.zeros(B, L, D, device="meta")}, ValueError, "residual must be on cpu as x is, got meta"),
    ({"seq_idx": integers(B, L), "cu_seqlens": integers(2)}, ValueError, "seq_idx and cu_seqlens exclude each other"),
    ({"seq_idx": integers(B, L), "output_final_state": True}, ValueError,
     "seq_idx and output_final_state exclude each other"),
    ({"seq_idx": [[0] * L] * B}, TypeError, "seq_idx must be a torch.Tensor, got list"),
    ({"seq_idx": integers(B, L, dtype=torch.int64)}, TypeError, "seq_idx must be int32, got int64"),
    ({"seq_idx": integers(B, L, device="meta")}, ValueError, "seq_idx must be on cpu as x is, got meta"),
    ({"seq_idx": integers(L)}, ValueError, "seq_idx must be [2, 6], got [6]"),
    ({"seq_idx": integers(B, L).to_sparse()}, TypeError,
     "seq_idx must be a dense (strided) tensor, got sparse_coo"),
    ({"cu_seqlens": integers(2).to_sparse(), "x": torch.zeros(1, L, D)}, TypeError,
     "cu_seqlens must be a dense (strided) tensor, got sparse_coo"),
    ({"cu_seqlens": [0, L]}, TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    ({"cu_seqlens": torch.zeros(2)}, TypeError, "cu_seqlens must be int32 or int64, got float32"),
    ({"cu_seqlens": integers(2, device="meta")}, ValueError, "cu_seqlens must be on cpu as x is, got meta"),
    ({"cu_seqlens": torch.nested.nested_tensor(list(integers(2, 1))), "x": torch.zeros(1, L, D)}, TypeError,
     "cu_seqlens must be a dense (strided) tensor, got nested"),
    ({"output_final_state": 1}, TypeError, "output_final_state must be a bool, got int"),
    ({"output_final_state": torch.ones(1)}, TypeError, "output_final_state must be a bool, got Tensor"),
    ({"cu_seqlens": integers(1, 2)}, ValueError, "cu_seqlens must be [N + 1], got [1, 2]"),
    ({"cu_seqlens": integers(0)}, ValueError, "cu_seqlens must be [N + 1], got [0]"),
    ({"cu_seqlens": integers(2)}, ValueError, "x must be [1, L, D] with cu_seqlens, got [2, 6, 8]"),
    ({"initial_state": 0.0}, TypeError, "initial_state must be a torch.Tensor, got float"),
    ({"initial_state": STATE.half()}, TypeError, "initial_state must be float32 as x is, got float16"),
    ({"initial_state": STATE.to("meta")}, ValueError, "initial_state must be on cpu as x is, got meta"),
    ({"initial_state": STATE.mT}, ValueError, "initial_state must be [2, 8, 3], got [2, 3, 8]"),
    ({"initial_state": STATE, "dilation": 2}, ValueError, "initial_state must be [2, 8, 6], got [2, 8, 3]"),
    ({"initial_state": STATE, "x": torch.zeros(1, L, D), "cu_seqlens": integers(4)}, ValueError,
     "initial_state must be [3, 8, 3], got [2, 8, 3]"),
]  # fmt: skip
UPDATE = [
    *FILTER,
    ({"x": integers(B, D)}, TypeError, "x must be bfloat16, float16, float32 or float64, got int32"),
    ({"x": torch.zeros(D)}, ValueError, "x must be [B, D] or [B, T, D], got [8]"),
    ({"x": torch.zeros(B, 1, 1, D)}, ValueError, "x must be [B, D] or [B, T, D], got [2, 1, 1, 8]"),
    ({"x": torch.zeros(B, D, 3)}, ValueError,
     "x must be [B, D] or [B, T, D] with D = 8 as weight is [8, 4], got [2, 8, 3]: pass x.mT"),
    ({"weight": torch.zeros(1, W)}, ValueError, "weight must be [8, W] with W at least 1, got [1, 4]"),
    ({"conv_state": None}, TypeError, "conv_state must be a torch.Tensor, got NoneType"),
    ({"conv_state": STATE.to("meta")}, ValueError, "conv_state must be on cpu as x is, got meta"),
    ({"conv_state": STATE.double()}, TypeError, "conv_state must be float32 as x is, got float64"),
    ({"conv_state": STATE[0]}, ValueError, "conv_state must be [slots, 8, length] with length at least 3, got [8, 3]"),
    ({"conv_state": STATE.mT}, ValueError,
     "conv_state must be [slots, 8, length] with length at least 3, got [2, 3, 8]"),
    ({"conv_state": STATE[..., 1:]}, ValueError,
     "conv_state must be [slots, 8, length] with length at least 3, got [2, 8, 2]"),
    ({"dilation": 2}, ValueError, "conv_state must be [slots, 8, length] with length at least 6, got [2, 8, 3]"),
    ({"conv_state": STATE[:1]}, ValueError, "conv_state must have a slot for each of 2 sequences, got 1"),
    ({"conv_state": torch.zeros(3, D, W)}, ValueError, "conv_state must have a slot for each of 2 sequences, got 3"),
    ({"conv_state": STATE[..., :0], "weight": torch.zeros(D, 1), "cache_seqlens": integers(B)}, ValueError,
     "conv_state must have a length of at least 1 with cache_seqlens, got 0"),
    ({"cache_seqlens": 3}, TypeError, "cache_seqlens must be a torch.Tensor, got int"),
    ({"cache_seqlens": torch.zeros(B)}, TypeError, "cache_seqlens must be int32 or int64, got float32"),
    ({"cache_seqlens": integers(B, device="meta")}, ValueError, "cache_seqlens must be on cpu as x is, got meta"),
    ({"cache_seqlens": integers(B, 1)}, ValueError, "cache_seqlens must be [2], got [2, 1]"),
    ({"cache_seqlens": integers(B).to_sparse()}, TypeError,
     "cache_seqlens must be a dense (strided) tensor, got sparse_coo"),
    ({"conv_state_indices": integers(B).to_sparse()}, TypeError,
     "conv_state_indices must be a dense (strided) tensor, got sparse_coo"),
    ({"conv_state_indices": [0, 1]}, TypeError, "conv_state_indices must be a torch.Tensor, got list"),
    ({"conv_state_indices": integers(B, dtype=torch.int16)}, TypeError,
     "conv_state_indices must be int32 or int64, got int16"),
    ({"conv_state_indices": integers(B, device="meta")}, ValueError,
     "conv_state_indices must be on cpu as x is, got meta"),
    ({"conv_state_indices": integers(3)}, ValueError, "conv_state_indices must be [2], got [3]"),
    ({"pad_slot_id": None}, TypeError, "pad_slot_id must be an int, got NoneType"),
    ({"pad_slot_id": -1.0}, TypeError, "pad_slot_id must be an int, got float"),
    ({"pad_slot_id": True}, TypeError, "pad_slot_id must be an int, got bool"),
    ({"pad_slot_id": 2**63}, ValueError, "pad_slot_id must fit 64 bits, got 9223372036854775808"),
    ({"pad_slot_id": 10**30}, ValueError, "pad_slot_id must fit 64 bits, got one of 100 bits"),
    ({"dilation": 10**400}, ValueError, "dilation must fit 64 bits, got one of 1329 bits"),
    ({"x": torch.zeros(B, D).to_sparse_csr()}, TypeError, "x must be a dense (strided) tensor, got sparse_csr"),
    ({"x": torch.zeros(B, D).to_mkldnn()}, TypeError, "x must be a dense (strided) tensor, got mkldnn"),
    ({"cache_seqlens": torch.nested.nested_tensor(list(integers(B, 1)))}, TypeError,
     "cache_seqlens must be a dense (strided) tensor, got nested"),
    ({"conv_state": STATE[:1].expand(B, D, W - 1)}, ValueError,
     "conv_state must have memory of its own for each element: pass conv_state.contiguous()"),
]  # fmt: skip
SHORT = [
    ({"x": 1}, TypeError, "x must be a torch.Tensor, got int"),
    ({"gamma": None}, TypeError, "gamma must be a torch.Tensor, got NoneType"),
    ({"weight": None}, TypeError, "weight must be a torch.Tensor, got NoneType"),
    ({"gamma": integers(2, D)}, TypeError, "gamma must be bfloat16, float16, float32 or float64, got int32"),
    ({"gamma": torch.zeros(2, D, device="meta")}, ValueError, "gamma must be on cpu as x is, got meta"),
    ({"weight": torch.zeros(2 * D, W, device="meta")}, ValueError, "weight must be on cpu as x is, got meta"),
    ({"x": torch.zeros(B, L, D)}, ValueError, "x must be [B, L, n, D] with n and D at least 1, got [2, 6, 8]"),
    ({"x": torch.zeros(B, L, 0, D)}, ValueError, "x must be [B, L, n, D] with n and D at least 1, got [2, 6, 0, 8]"),
    ({"x": torch.zeros(B, L, 2, 0)}, ValueError, "x must be [B, L, n, D] with n and D at least 1, got [2, 6, 2, 0]"),
    ({"gamma": torch.zeros(D)}, ValueError, "gamma must be [2, 8], got [8]"),
    ({"weight": torch.zeros(D, W)}, ValueError, "weight must be [16, W] with W at least 1, got [8, 4]"),
    ({"weight": torch.zeros(2 * D, 0)}, ValueError, "weight must be [16, W] with W at least 1, got [16, 0]"),
    ({"weight": torch.zeros(2, D, W)}, ValueError, "weight must be [16, W] with W at least 1, got [2, 8, 4]"),
    ({"weight": torch.zeros(2 * D, 1, W)}, ValueError,
     "weight must be [16, W] with W at least 1, got [16, 1, 4]: "
     "pass weight.squeeze(1), nn.Conv1d has one dimension more"),
    ({"dilation": -1}, ValueError, "dilation must be at least 1, got -1"),
    ({"dilation": "1"}, TypeError, "dilation must be an int, got str"),
    ({"residual": torch.ones(2)}, TypeError, "residual must be a bool, got Tensor"),
    ({"residual": 1}, TypeError, "residual must be a bool, got int"),
    ({"norm_eps": 10**400}, ValueError, "norm_eps must be finite and 0 or more, got one of 1329 bits"),
    ({"norm_eps": None}, TypeError, "norm_eps must be a number, got NoneType"),
    ({"norm_eps": -1e-5}, ValueError, "norm_eps must be finite and 0 or more, got -1e-05"),
    ({"norm_eps": float("nan")}, ValueError, "norm_eps must be finite and 0 or more, got nan"),
    ({"norm_eps": float("inf")}, ValueError, "norm_eps must be finite and 0 or more, got inf"),
    ({"backend": "cuda"}, ValueError, "backend must be one of reference, triton, tilelang, hip, got 'cuda'"),
]  # fmt: skip
GOOD = {
    "causal_conv1d": {"x": torch.zeros(B, L, D), "weight": torch.zeros(D, W), "bias": torch.zeros(D)},
    "causal_conv1d_update": {"x": torch.zeros(B, D), "conv_state": STATE, "weight": torch.zeros(D, W)},
    "short_conv": {"x": torch.zeros(B, L, 2, D), "gamma": torch.zeros(2, D), "weight": torch.zeros(2 * D, W)},
}
BAD = {"causal_conv1d": CONV, "causal_conv1d_update": UPDATE, "short_conv": SHORT}
EVERY = [(name, *bad) for name, bads in BAD.items() for bad in bads]


@pytest.mark.parametrize("name", GOOD)
def test_good(name):
    """Otherwise the messages below could have another cause."""
    assert getattr(mhc_ops, name)(**GOOD[name]).shape == GOOD[name]["x"].shape


@pytest.mark.parametrize(("name", "changes", "error", "message"), EVERY, ids=[f"{e[0]}-{e[3]}" for e in EVERY])
def test_bad(name, changes, error, message):
    with pytest.raises(error, match=f"^{name}: {re.escape(message)}$"):
        getattr(mhc_ops, name)(**{**GOOD[name], **changes})


def test_a_refused_update_leaves_the_state_alone():
    state = torch.ones(B, D, W)
    with pytest.raises(ValueError, match="activation must be"):
        mhc_ops.causal_conv1d_update(torch.zeros(B, D), state, torch.zeros(D, W), activation="gelu")
    with pytest.raises(TypeError, match="pad_slot_id must be"):
        mhc_ops.causal_conv1d_update(torch.zeros(B, D), state, torch.zeros(D, W), pad_slot_id="none")
    assert torch.equal(state, torch.ones(B, D, W))


def test_kernels_take_no_fp64():
    message = "f: x must be bfloat16, float16 or float32 for backend 'triton', got float64"
    with pytest.raises(TypeError, match=f"^{message}$"):
        prepare._check_kernel_limits("f", torch.zeros(1, 4, 4, dtype=torch.float64), torch.zeros(4, 4), "triton")


@pytest.mark.parametrize("width", [9, 20])
def test_kernels_take_eight_taps(width):
    with pytest.raises(ValueError, match=f"^f: the width of weight must be 1 to 8 for backend 'triton', got {width}$"):
        prepare._check_kernel_limits("f", torch.zeros(1, 4, 4), torch.zeros(4, width), "triton")


@pytest.mark.interpreted
@pytest.mark.parametrize("name", GOOD)
def test_limits_are_checked_on_the_way_to_the_kernels(name):
    doubles = {key: tensor.double() for key, tensor in GOOD[name].items()}
    with pytest.raises(TypeError, match=f"^{name}: x must be .* for backend 'triton', got float64$"):
        getattr(mhc_ops, name)(**doubles, backend="triton")
    wide = torch.zeros(len(GOOD[name]["weight"]), 9)
    state = {"conv_state": torch.zeros(B, D, 8)} if name == "causal_conv1d_update" else {}
    with pytest.raises(ValueError, match=f"^{name}: the width of weight must be 1 to 8 for backend 'triton', got 9$"):
        getattr(mhc_ops, name)(**{**GOOD[name], "weight": wide, **state}, backend="triton")


@pytest.mark.parametrize("name", GOOD)
def test_backend_that_is_not_there(name):
    with pytest.raises(RuntimeError, match=f"^{name}: backend 'tilelang' cannot run here: "):
        getattr(mhc_ops, name)(**GOOD[name], backend="tilelang")


def test_reference_takes_any_width():
    x, weight = torch.randn(B, 20, D), torch.randn(D, 13)
    assert mhc_ops.causal_conv1d(x, weight).shape == x.shape
    state = torch.zeros(B, D, 12)
    assert mhc_ops.causal_conv1d_update(x[:, 0], state, weight).shape == (B, D)
