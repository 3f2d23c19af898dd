"""Every message for bad input, raised before any launch."""

import re

import pytest
import torch

import mhc_ops
from mhc_ops.mhc import prepare
from mhc_ops.testing import cases

N, D = 4, 16
M = N * N + 2 * N


def arguments(**changes):
    tensors = cases.Case(cases.MHC_FORWARD_PRE, (2, 3), N, D, torch.float32).inputs()
    return {**tensors, **changes}


def backward_arguments(**changes):
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = mhc_ops.mhc_forward_pre(**arguments(), outflag=True)
    tensors = {**arguments(), "inv_rms": inv_rms, "h_mix": h_mix, "h_pre": h_pre, "h_post": h_post}
    return {**tensors, "dh_in": h_in, "dh_post": h_post, "dh_res": h_res, **changes}


FORWARD = [
    ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
    ({"gamma": 1.0}, TypeError, "gamma must be a torch.Tensor, got float"),
    ({"x": torch.zeros(2, 3, N, D, dtype=torch.int64)}, TypeError,
     "x must be bfloat16, float16, float32 or float64, got int64"),
    ({"phi": torch.zeros(M, N * D, dtype=torch.bool)}, TypeError,
     "phi must be bfloat16, float16, float32 or float64, got bool"),
    ({"x": torch.zeros(D)}, ValueError, "x must be [..., n, D] with n and D at least 1, got [16]"),
    ({"x": torch.zeros(2, 0, D)}, ValueError, "x must be [..., n, D] with n and D at least 1, got [2, 0, 16]"),
    ({"phi": torch.zeros(M, D)}, ValueError, "phi must be [24, 64], got [24, 16]"),
    ({"alpha": torch.zeros(4)}, ValueError, "alpha must be [3], got [4]"),
    ({"bias": torch.zeros(M, 1)}, ValueError, "bias must be [24], got [24, 1]"),
    ({"gamma": torch.zeros(D, N)}, ValueError, "gamma must be [4, 16], got [16, 4]"),
    ({"bias": torch.zeros(M, device="meta")}, ValueError, "bias must be on cpu as x is, got meta"),
    ({"x": torch.zeros(2, 3, N, D).to_sparse()}, TypeError, "x must be a dense (strided) tensor, got sparse_coo"),
    ({"phi": torch.zeros(M, N * D).to_sparse_csr()}, TypeError,
     "phi must be a dense (strided) tensor, got sparse_csr"),
    ({"phi": torch.zeros(M, N * D).to_mkldnn()}, TypeError, "phi must be a dense (strided) tensor, got mkldnn"),
    ({"x": torch.nested.nested_tensor([torch.zeros(3, N, D)])}, TypeError,
     "x must be a dense (strided) tensor, got nested"),
    ({"x": torch.zeros(2, 3, N, D, dtype=torch.complex64)}, TypeError,
     "x must be bfloat16, float16, float32 or float64, got complex64"),
]  # fmt: skip
NAN, INF = float("nan"), float("inf")
EPS = [
    ({eps: value}, error, f"{eps} must be {message}")
    for eps in ("norm_eps", "hc_eps")
    for value, error, message in (
        (NAN, ValueError, "finite and 0 or more, got nan"),
        (-1e-6, ValueError, "finite and 0 or more, got -1e-06"),
        (INF, ValueError, "finite and 0 or more, got inf"),
        (True, TypeError, "a number, got bool"),
        (None, TypeError, "a number, got NoneType"),
    )
]
FORWARD += EPS
BACKWARD = [
    ({"inv_rms": torch.zeros(2)}, ValueError, "inv_rms must be [2, 3], got [2]"),
    ({"h_mix": torch.zeros(2, 3, N)}, ValueError, "h_mix must be [2, 3, 24], got [2, 3, 4]"),
    ({"h_pre": torch.zeros(2, 3, 5)}, ValueError, "h_pre must be [2, 3, 4], got [2, 3, 5]"),
    ({"h_post": torch.zeros(N)}, ValueError, "h_post must be [2, 3, 4], got [4]"),
    ({"dh_in": torch.zeros(2, 3, N, D)}, ValueError, "dh_in must be [2, 3, 16], got [2, 3, 4, 16]"),
    ({"dh_post": torch.zeros(2, 3)}, ValueError, "dh_post must be [2, 3, 4], got [2, 3]"),
    ({"dh_res": torch.zeros(2, 3, 16)}, ValueError, "dh_res must be [2, 3, 4, 4], got [2, 3, 16]"),
    ({"inv_rms": None}, TypeError, "inv_rms must be a torch.Tensor, got NoneType"),
    ({"dh_res": 0.0}, TypeError, "dh_res must be a torch.Tensor, got float"),
    ({"dh_in": torch.zeros(2, 3, D, device="meta")}, ValueError, "dh_in must be on cpu as x is, got meta"),
    *EPS,
]


@pytest.mark.parametrize(("changes", "error", "message"), FORWARD, ids=[message for *_, message in FORWARD])
def test_forward(changes, error, message):
    with pytest.raises(error, match=f"^mhc_forward_pre: {re.escape(message)}$"):
        mhc_ops.mhc_forward_pre(**arguments(**changes))


@pytest.mark.parametrize(("changes", "error", "message"), BACKWARD, ids=[message for *_, message in BACKWARD])
def test_backward(changes, error, message):
    with pytest.raises(error, match=f"^mhc_backward: {re.escape(message)}$"):
        mhc_ops.mhc_backward(**backward_arguments(**changes))


def test_kernels_take_no_fp64():
    message = "f: x must be bfloat16, float16 or float32 for backend 'triton', got float64"
    with pytest.raises(TypeError, match=f"^{message}$"):
        prepare.check_kernel_limits("f", torch.zeros(1, 4, 4, dtype=torch.float64), "triton")


@pytest.mark.parametrize("n", [9, 20])
def test_kernels_take_eight_streams(n):
    with pytest.raises(ValueError, match=f"^f: n must be 1 to 8 for backend 'triton', got {n}$"):
        prepare.check_kernel_limits("f", torch.zeros(1, n, 4), "triton")


@pytest.mark.interpreted
def test_limits_are_checked_on_the_way_to_the_kernels():
    tensors = {name: tensor.double() for name, tensor in arguments().items()}
    with pytest.raises(TypeError, match="for backend 'triton', got float64"):
        mhc_ops.mhc_forward_pre(**tensors, backend="triton")
    with pytest.raises(ValueError, match="n must be 1 to 8 for backend 'triton', got 9"):
        mhc_ops.mhc_forward_pre(**cases.Case(cases.MHC_FORWARD_PRE, (2,), 9, 3).inputs(), backend="triton")


def test_reference_takes_any_n():
    h_in, _, h_res = mhc_ops.mhc_forward_pre(**cases.Case(cases.MHC_FORWARD_PRE, (2,), 9, 3).inputs())
    assert h_in.shape == (2, 3)
    assert h_res.shape == (2, 9, 9)


POST = [
    ({"h_out": torch.zeros(2, 3, N, D)}, ValueError, "h_out must be [2, 3, 16], got [2, 3, 4, 16]"),
    ({"h_post": torch.zeros(2, 3)}, ValueError, "h_post must be [2, 3, 4], got [2, 3]"),
    ({"h_res": torch.zeros(2, 3, N, 3)}, ValueError, "h_res must be [2, 3, 4, 4], got [2, 3, 4, 3]"),
    ({"h_res": 1.0}, TypeError, "h_res must be a torch.Tensor, got float"),
    ({"h_post": None}, TypeError, "h_post must be a torch.Tensor, got NoneType"),
    ({"transposed": 1}, TypeError, "transposed must be a bool, got int"),
    ({"h_res": None, "transposed": True}, ValueError, "transposed=True has no meaning without h_res"),
    ({"h_out": torch.zeros(2, 3, D, dtype=torch.int32)}, TypeError,
     "h_out must be bfloat16, float16, float32 or float64, got int32"),
    ({"h_post": torch.zeros(2, 3, N, device="meta")}, ValueError, "h_post must be on cpu as x is, got meta"),
    ({"x": torch.zeros(D)}, ValueError, "x must be [..., n, D] with n and D at least 1, got [16]"),
]  # fmt: skip
PRE = [case for case in FORWARD if "x" not in case[0]] + [
    ({"sinkhorn_iters": 0}, ValueError, "sinkhorn_iters must be at least 1, got 0"),
    ({"sinkhorn_iters": 20.0}, TypeError, "sinkhorn_iters must be an int, got float"),
    ({"sinkhorn_iters": True}, TypeError, "sinkhorn_iters must be an int, got bool"),
    ({"post_mult": None}, TypeError, "post_mult must be a number, got NoneType"),
    ({"norm_eps": "1e-6"}, TypeError, "norm_eps must be a number, got str"),
    ({"sinkhorn_eps": -1.0}, ValueError, "sinkhorn_eps must be finite and 0 or more, got -1.0"),
    ({"sinkhorn_eps": NAN}, ValueError, "sinkhorn_eps must be finite and 0 or more, got nan"),
    ({"post_mult": NAN}, ValueError, "post_mult must be finite, got nan"),
    ({"post_mult": -INF}, ValueError, "post_mult must be finite, got -inf"),
    ({"post_mult": False}, TypeError, "post_mult must be a number, got bool"),
    ({"post_eps": -1.0}, ValueError, "post_eps must be finite and 0 or more, got -1.0"),
    ({"transposed": None}, TypeError, "transposed must be a bool, got NoneType"),
    ({"residual": None}, TypeError, "residual must be a str, got NoneType"),
    ({"residual": "none"}, ValueError, "residual must be 'sinkhorn', 'identity' or 'logits', got 'none'"),
    ({"residual": "identity"}, ValueError, "phi must be [8, 64], got [24, 64]"),
    *(({"residual": residual, name: value}, ValueError, f"{name}={value} has no meaning with residual={residual!r}")
      for residual, name, value in (
          ("identity", "sinkhorn_iters", 3), ("identity", "sinkhorn_eps", 0.0), ("identity", "transposed", True),
          ("logits", "sinkhorn_iters", 3), ("logits", "sinkhorn_eps", 0.0))),
]  # fmt: skip
LAYER = [
    *PRE,
    ({"layer": None}, TypeError, "layer must be callable, got NoneType"),
    ({"residual": "logits"}, ValueError,
     "residual='logits' is no map that streams could be mixed with; mhc_pre returns it"),
]  # fmt: skip
HEAD = [
    ({"phi": torch.zeros(M, N * D)}, ValueError, "phi must be [4, 64], got [24, 64]"),
    ({"alpha": torch.zeros(3)}, ValueError, "alpha must be [1] or [], got [3]"),
    ({"bias": torch.zeros(M)}, ValueError, "bias must be [4], got [24]"),
    ({"gamma": torch.zeros(D, N)}, ValueError, "gamma must be [4, 16], got [16, 4]"),
    *EPS,
]
SINKHORN = [
    ({"logits": torch.zeros(2, 3)}, ValueError, "logits must be [..., n, n] with n at least 1, got [2, 3]"),
    ({"logits": torch.zeros(4)}, ValueError, "logits must be [..., n, n] with n at least 1, got [4]"),
    ({"logits": 1.0}, TypeError, "logits must be a torch.Tensor, got float"),
    ({"iters": 0}, ValueError, "iters must be at least 1, got 0"),
    ({"eps": None}, TypeError, "eps must be a number, got NoneType"),
    ({"eps": NAN}, ValueError, "eps must be finite and 0 or more, got nan"),
    ({"logits": torch.zeros(2, 4, 4).to_sparse()}, TypeError,
     "logits must be a dense (strided) tensor, got sparse_coo"),
]  # fmt: skip
EXPAND = [
    ({"n": 2.5}, TypeError, "n must be an int, got float"),
    ({"n": 0}, ValueError, "n must be at least 1, got 0"),
    ({"x": torch.zeros(())}, ValueError, "x must be [..., D], got []"),
]
CALLS = {
    "mhc_pre": (cases.MHC_PRE, PRE),
    "mhc_post": (cases.MHC_POST, POST),
    "mhc_post_pre": (cases.MHC_POST_PRE, POST + PRE),
    "mhc_layer": (cases.MHC_PRE, LAYER),
    "mhc_head": (cases.MHC_HEAD, HEAD),
    "sinkhorn": (cases.SINKHORN, SINKHORN),
    "mhc_expand": (None, EXPAND),
}
EVERY = [(name, *bad) for name, (_, bads) in CALLS.items() for bad in bads]


@pytest.mark.parametrize(("name", "changes", "error", "message"), EVERY, ids=[f"{e[0]}-{e[3]}" for e in EVERY])
def test_layer_functions(name, changes, error, message):
    subject = CALLS[name][0]
    good = {"x": torch.zeros(2, 3, D), "n": N}
    if subject is not None:
        good = cases.Case(subject, (2, 3), N, D, torch.float32).inputs()
    if name == "mhc_layer":
        good["layer"] = torch.tanh
    with pytest.raises(error, match=f"^{name}: {re.escape(message)}$"):
        getattr(mhc_ops, name)(**{**good, **changes})


FLAGS = {
    "outflag": lambda flag: mhc_ops.mhc_forward_pre(**arguments(), outflag=flag),
    "gamma": lambda flag: mhc_ops.HyperHead(N, D, gamma=flag),
    "layer_norm": lambda flag: mhc_ops.HyperConnection(torch.nn.Identity(), N, D, layer_norm=flag),
    "checkpoint": lambda flag: mhc_ops.HyperConnection(torch.nn.Identity(), N, D, checkpoint=flag),
}


@pytest.mark.parametrize("value", ["yes", 1, [], torch.ones(())], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(name, value):
    """Anything else has a truth of its own, which may not be what was meant: "no" is true."""
    with pytest.raises(TypeError, match=f"{name} must be a bool"):
        FLAGS[name](value)
