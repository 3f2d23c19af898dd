"""Every message for bad input, raised before any launch."""

import re
from functools import partial

import pytest
import torch

import mhc_ops
from mhc_ops import HyperConnection, HyperHead, HyperStack, MHCBlock
from mhc_ops.core import backend as backends
from mhc_ops.mhc import prepare
from mhc_ops.mhc.options import DEFAULTS, NOT_IN_TILELANG
from mhc_ops.testing import cases

N, D = 4, 16
M = N * N + 2 * N


def tensors_of(subject):
    return cases.Case(subject, (2, 3), N, D, torch.float32).inputs()


def of_backward():
    tensors = tensors_of(cases.MHC_FORWARD_PRE)
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = mhc_ops.mhc_forward_pre(**tensors, outflag=True)
    tensors |= {"inv_rms": inv_rms, "h_mix": h_mix, "h_pre": h_pre, "h_post": h_post}
    return {**tensors, "dh_in": h_in, "dh_post": h_post, "dh_res": h_res}


def carried():
    own = tensors_of(cases.MHC_PRE)
    h_out, carry = mhc_ops.mhc_enter(**own)
    del own["x"]
    return {"carry": carry, "h_out": h_out, **own}


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
WEIGHT = [
    ({"layer_norm_weight": torch.ones(3)}, ValueError, "layer_norm_weight must be [16], got [3]"),
    ({"layer_norm_weight": torch.ones(D, device="meta")}, ValueError,
     "layer_norm_weight must be on cpu as x is, got meta"),
    ({"layer_norm_weight": torch.ones(D, dtype=torch.int32)}, TypeError,
     "layer_norm_weight must be bfloat16, float16, float32 or float64, got int32"),
    ({"layer_norm_weight": 1.0}, TypeError, "layer_norm_weight must be a torch.Tensor, got float"),
]  # fmt: skip
PRE += WEIGHT
LAYER = [
    *PRE,
    ({"layer": None}, TypeError, "layer must be callable, got NoneType"),
    ({"residual": "logits"}, ValueError,
     "residual='logits' is not a map to mix streams with; mhc_pre returns it"),
]  # fmt: skip
HEAD = [
    ({"phi": torch.zeros(M, N * D)}, ValueError, "phi must be [4, 64], got [24, 64]"),
    ({"alpha": torch.zeros(3)}, ValueError, "alpha must be [1] or [], got [3]"),
    ({"bias": torch.zeros(M)}, ValueError, "bias must be [4], got [24]"),
    ({"gamma": torch.zeros(D, N)}, ValueError, "gamma must be [4, 16], got [16, 4]"),
    *EPS,
]
PRE_OF_MAPS = [case for case in PRE if not {"layer_norm_weight"} & {*case[0]}]
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
CARRY = [
    ({"carry": torch.zeros(2, 3, N, D)}, TypeError, "carry must be what mhc_enter or mhc_next returned, got Tensor"),
    ({"h_out": torch.zeros(2, 3, N, D)}, ValueError, "h_out must be [2, 3, 16], got [2, 3, 4, 16]"),
    ({"h_out": None}, TypeError, "h_out must be a torch.Tensor, got NoneType"),
]
ENTER = [
    ({"phi": torch.zeros(3)}, ValueError, "phi must be [24, 64], got [3]"),
    ({"read": torch.zeros(2, 3, N)}, ValueError, "read has no meaning without shifted=True"),
    ({"read": torch.zeros(N), "shifted": True}, ValueError, "read must be [2, 3, 4], got [4]"),
    ({"read": 1.0, "shifted": True}, TypeError, "read must be a torch.Tensor, got float"),
    ({"shifted": "yes"}, TypeError, "shifted must be a bool, got str"),
    *WEIGHT,
]
READ = [
    ({"h_pre": torch.zeros(2, 3)}, ValueError, "h_pre must be [2, 3, 4], got [2, 3]"),
    ({"h_pre": None}, TypeError, "h_pre must be a torch.Tensor, got NoneType"),
]
MEAN = [
    ({"x": None}, TypeError, "x must be a torch.Tensor, got NoneType"),
    ({"x": torch.zeros(7)}, ValueError, "x must be [..., n, D] with n and D at least 1, got [7]"),
]
EXPAND = [
    ({"n": 2.5}, TypeError, "n must be an int, got float"),
    ({"n": 0}, ValueError, "n must be at least 1, got 0"),
    ({"x": torch.zeros(())}, ValueError, "x must be [..., D], got []"),
]
CALLS = {
    "mhc_forward_pre": (partial(tensors_of, cases.MHC_FORWARD_PRE), FORWARD),
    "mhc_backward": (of_backward, BACKWARD),
    "mhc_pre": (partial(tensors_of, cases.MHC_PRE), PRE),
    "mhc_post": (partial(tensors_of, cases.MHC_POST), POST),
    "mhc_post_pre": (partial(tensors_of, cases.MHC_POST_PRE), POST + PRE),
    "mhc_layer": (lambda: {**tensors_of(cases.MHC_PRE), "layer": torch.tanh}, LAYER),
    "mhc_head": (partial(tensors_of, cases.MHC_HEAD), HEAD),
    "mhc_enter": (partial(tensors_of, cases.MHC_PRE), ENTER),
    "mhc_next": (carried, CARRY + WEIGHT),
    "mhc_leave": (lambda: {name: carried()[name] for name in ("carry", "h_out")}, CARRY),
    "mhc_maps": (partial(tensors_of, cases.MHC_PRE), PRE_OF_MAPS),
    "mhc_read": (partial(tensors_of, cases.MHC_READ), READ),
    "mhc_mean": (partial(tensors_of, cases.MHC_MEAN), MEAN),
    "sinkhorn": (partial(tensors_of, cases.SINKHORN), SINKHORN),
    "mhc_expand": (lambda: {"x": torch.zeros(2, 3, D), "n": N}, EXPAND),
}


def assert_said(call, error, message, **arguments):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(**arguments)


@pytest.mark.parametrize("name", CALLS)
def test_functions(name):
    function, (good, wrong) = getattr(mhc_ops, name), CALLS[name]
    for changes, error, message in wrong:
        assert_said(function, error, f"{name}: {message}", **{**good(), **changes})
    if name not in ("mhc_read", "mhc_mean", "mhc_leave", "mhc_expand"):
        assert_said(function, TypeError, f"{name}() got an unexpected keyword argument 'norm_ep'", **good(), norm_ep=1)


# The modules

CONNECTION = [
    ({"sinkhorn_iters": 0}, ValueError, "sinkhorn_iters must be at least 1, got 0"),
    ({"sinkhorn_iters": 2.5}, TypeError, "sinkhorn_iters must be an int, got float"),
    ({"post_mult": 0}, ValueError, "post_mult must be above 0, got 0.0"),
    ({"post_mult": "2"}, TypeError, "post_mult must be a number, got str"),
    ({"post_mult": NAN}, ValueError, "post_mult must be finite, got nan"),
    ({"post_eps": 1.0}, ValueError, "post_eps must be below 1, got 1.0"),
    ({"hc_eps": 1.5}, ValueError, "hc_eps must be below 1, got 1.5"),
    ({"hc_eps": -0.5}, ValueError, "hc_eps must be finite and 0 or more, got -0.5"),
    ({"norm_eps": -1e-6}, ValueError, "norm_eps must be finite and 0 or more, got -1e-06"),
    ({"norm_eps": "1e-6"}, TypeError, "norm_eps must be a number, got str"),
    ({"sinkhorn_eps": NAN}, ValueError, "sinkhorn_eps must be finite and 0 or more, got nan"),
    ({"sinkhorn_eps": True}, TypeError, "sinkhorn_eps must be a number, got bool"),
    ({"layer": None}, TypeError, "layer must be callable, got NoneType"),
    ({"residual": "logits"}, ValueError, "residual='logits' is no map to mix streams with; MHCBlock returns it"),
    ({"residual": "identity", "transposed": True}, ValueError,
     "transposed=True has no meaning with residual='identity'"),
]  # fmt: skip


def connection(layer=torch.tanh, n=2, D=8, **options):
    return HyperConnection(layer, n, D, **options)


def test_connections():
    for options, error, message in CONNECTION:
        assert_said(connection, error, f"HyperConnection: {message}", **options)


@pytest.mark.parametrize("module", [MHCBlock, HyperHead, connection])
def test_sizes_of_modules(module):
    name = "HyperConnection" if module is connection else module.__name__
    for sizes, error, message in (
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"n": None}, TypeError, "n must be an int, got NoneType"),
        ({"n": 2, "D": 8.0}, TypeError, "D must be an int, got float"),
        ({"n": 2, "norm_eps": NAN}, ValueError, "norm_eps must be finite and 0 or more, got nan"),
    ):
        assert_said(module, error, f"{name}: {message}", **{"D": 8} | sizes)
    for x, error, message in (
        ([1.0], TypeError, "x must be a torch.Tensor, got list"),
        (torch.zeros(3, 4, 8), ValueError, "x must be [..., 2, 8], got [3, 4, 8]"),
    ):
        assert_said(partial(module(n=2, D=8), x), error, f"{name}: {message}")


def with_a_hook(stack):
    """The last connection returns x instead of its carry."""
    stack[-1].register_forward_hook(lambda module, inputs, carry: carry.x)
    return stack


def test_stacks():
    one, other, x, linear = connection(), connection(n=4), torch.zeros(3, 2, 8), torch.nn.Linear(8, 8)
    another, nothing, wide = connection(), connection(lambda h: None), connection(lambda h: h[:, None].expand(3, 2, 8))
    later = HyperStack(one, shifted=True, first=False)
    unlike = "HyperStack: connection 1 has n=4, D=8, but connection 0 has n=2, D=8"
    linear_is_none = "HyperStack: connection 0 must be a HyperConnection, got Linear"
    for call, error, message in (
        (lambda: HyperStack(one, other), ValueError, unlike),
        (lambda: HyperStack(one).append(other), ValueError, unlike),
        (lambda: HyperStack(one, another).__setitem__(1, other), ValueError, unlike),
        (lambda: HyperStack(linear), TypeError, linear_is_none),
        (lambda: HyperStack(one).insert(0, linear), TypeError, linear_is_none),
        (lambda: HyperStack(one, recompute=-1), ValueError, "HyperStack: recompute must be 0 or more, got -1"),
        (lambda: HyperStack(one, recompute=True), TypeError, "HyperStack: recompute must be an int, got bool"),
        (lambda: HyperStack(one, shifted=1), TypeError, "HyperStack: shifted must be a bool, got int"),
        (lambda: HyperStack(one, first=False), ValueError,
         "HyperStack: first=False has no meaning without shifted=True"),
        (lambda: HyperStack(one, last=False), ValueError, "HyperStack: last=False has no meaning without shifted=True"),
        (lambda: HyperStack(one) + HyperStack(one, shifted=True), ValueError,
         "HyperStack: a shifted stack and one that is not cannot be joined"),
        (lambda: later(x), TypeError, "HyperStack: with first=False the input must be (x, p), got Tensor"),
        (lambda: later(x, torch.zeros(3, 4)), ValueError, "mhc_enter: read must be [3, 2], got [3, 4]"),
        (lambda: HyperStack(other, recompute=2)(x), ValueError,
         "HyperConnection: x must be [..., 4, 8], got [3, 2, 8]"),
        (lambda: HyperStack(one)([1.0]), TypeError, "HyperConnection: x must be a torch.Tensor, got list"),
        (lambda: HyperStack(nothing)(x), TypeError, "mhc_leave: h_out must be a torch.Tensor, got NoneType"),
        (lambda: nothing(x), TypeError, "mhc_layer: h_out must be a torch.Tensor, got NoneType"),
        (lambda: wide(x), ValueError, "mhc_layer: h_out must be [3, 8], got [3, 2, 8]"),
        (lambda: with_a_hook(HyperStack(connection(), connection()))(x), TypeError,
         "HyperStack: connection 1 must return its carry, got Tensor (of a hook?); hooks that take tensors go on the "
         "layer of a connection, or on the connections of nn.Sequential(*stack); a hook on a connection of the stack "
         "has x as carry.x"),
        (lambda: mhc_ops.metrics(linear).__enter__(), ValueError,
         "metrics: there is no HyperConnection in this Linear; a model of transformers is patched first, "
         "by mhc_ops.compat.transformers.patch"),
        (lambda: mhc_ops.metrics([]).__enter__(), TypeError, "metrics: model must be an nn.Module, got list"),
    ):  # fmt: skip
        assert_said(call, error, message)


FLAGS = {
    "outflag": lambda flag: mhc_ops.mhc_forward_pre(**tensors_of(cases.MHC_FORWARD_PRE), outflag=flag),
    "gamma": lambda flag: HyperHead(N, D, gamma=flag),
    "layer_norm": lambda flag: connection(layer_norm=flag),
    "checkpoint": lambda flag: connection(checkpoint=flag),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(name):
    """Anything else has a truth of its own, which may not be what was meant: "no" is true."""
    for value in ("yes", 1, [], torch.ones(())):
        with pytest.raises(TypeError, match=f"{name} must be a bool"):
            FLAGS[name](value)


# What kernels do not take


@pytest.mark.parametrize("checked", [prepare.check_kernel_limits, pytest.param(None, marks=pytest.mark.interpreted)])
def test_limits_of_kernels(checked):
    """By their check, and on the way to the kernels."""

    def call(n, dtype):
        tensors = {k: t.to(dtype) for k, t in cases.Case(cases.MHC_FORWARD_PRE, (2,), n, 3).inputs().items()}
        if checked is None:
            return mhc_ops.mhc_forward_pre(**tensors, backend="triton")
        return checked("mhc_forward_pre", tensors["x"], "triton")

    for n, dtype, error, message in (
        (4, torch.float64, TypeError, "x must be bfloat16, float16 or float32 for backend 'triton', got float64"),
        (9, torch.float32, ValueError, "n must be 1 to 8 for backend 'triton', got 9"),
        (20, torch.float32, ValueError, "n must be 1 to 8 for backend 'triton', got 20"),
    ):
        assert_said(call, error, f"mhc_forward_pre: {message}", n=n, dtype=dtype)


def test_reference_takes_any_n():
    h_in, _, h_res = mhc_ops.mhc_forward_pre(**cases.Case(cases.MHC_FORWARD_PRE, (2,), 9, 3).inputs())
    assert h_in.shape == (2, 3)
    assert h_res.shape == (2, 9, 9)


def test_tilelang_says_what_it_lacks():
    """Nothing runs on another backend instead."""
    options = [
        DEFAULTS._replace(**{k: v}) for k, v in (("post_eps", 0.5), ("residual", "identity"), ("transposed", True))
    ]
    assert {"post_eps", "residual", "transposed"} <= {*NOT_IN_TILELANG}
    x, weight, h_res = torch.zeros(2, 4, 16), torch.ones(16), torch.ones(1)
    for check, given, words in (
        (prepare.check_kernels, ("mhc_pre", x, weight), "mhc_pre with layer_norm_weight"),
        (prepare.check_kernel_options, ("mhc_pre", options[0]), "mhc_pre with post_eps=0.5"),
        (prepare.check_kernel_options, ("mhc_pre", options[1]), "mhc_pre with residual='identity'"),
        (prepare.check_kernel_options, ("mhc_pre", options[2]), "mhc_pre with transposed=True"),
        (prepare.check_kernel_residual, ("mhc_post", None, False), "mhc_post without h_res"),
        (prepare.check_kernel_residual, ("mhc_post", h_res, True), "mhc_post with transposed=True"),
    ):
        message = f"{words}: backend 'tilelang' does not have it, 'triton' and 'reference' do"
        assert_said(lambda: check(*given, "tilelang"), NotImplementedError, message)  # noqa: B023
        if check is prepare.check_kernel_options:
            check(*given, "triton")
    prepare.check_kernels("mhc_pre", x, None, "tilelang")


def test_warmup(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for where in ({}, {"device": "cpu"}, {"device": "cuda", "backend": "reference"}):
        assert mhc_ops.warmup(4, 64, torch.bfloat16, **where) == 0, "the same program runs on a laptop and on a GPU"
    with monkeypatch.context() as patch:
        patch.setattr(backends, "_INTERPRETED", False)
        no_gpu = "device must be there, got cuda:0 and torch sees no GPU; without "
        for given, error, message in (
            ({"device": "cuda:0"}, ValueError, f"warmup: {no_gpu}"),
            ({"device": "cuda:0", "backend": "triton"}, ValueError, f"warmup: {no_gpu}"),
            ({"backend": "triton"}, RuntimeError, "warmup: backend 'triton' cannot run here: "),
            ({"dtype": "bfloat16"}, TypeError, "warmup: dtype must be a torch.dtype, got str"),
            ({"parameter_dtype": "bfloat16"}, TypeError, "warmup: parameter_dtype must be a torch.dtype, got str"),
            ({"tokens": [8, 0]}, ValueError, "warmup: tokens must be at least 1, got 0"),
            ({"tokens": []}, ValueError, "warmup: tokens must be a count or a list of them, got an empty list"),
            ({"tokens": "8"}, TypeError, "warmup: tokens must be an int, got str"),
            ({"training": 1}, TypeError, "warmup: training must be a bool, got int"),
            ({"sinkhorn_iter": 3}, TypeError, "warmup() got an unexpected keyword argument 'sinkhorn_iter'"),
        ):
            with pytest.raises(error, match=f"^{re.escape(message)}"):
                mhc_ops.warmup(4, 64, **given)
    monkeypatch.setattr(mhc_ops.mhc.warmup, "choose", lambda *_: "tilelang")
    with pytest.raises(NotImplementedError, match=r"^warmup with layer_norm: backend 'tilelang' does not have it"):
        mhc_ops.warmup(4, 24, layer_norm=True, device="cpu")
