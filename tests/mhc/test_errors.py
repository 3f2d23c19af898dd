"""Every message for bad input, raised before any launch."""

import inspect
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import zeros

import mhc_ops
from mhc_ops import HyperConnection, HyperStack
from mhc_ops.core import backend as backends
from mhc_ops.core.op import Op
from mhc_ops.mhc import contracts, prepare
from mhc_ops.mhc.options import DEFAULTS
from mhc_ops.testing import cases

N, D = 4, 16
M = N * N + 2 * N
NAN = float("nan")
A_FLOAT = "must be bfloat16, float16, float32 or float64, got"
DENSE = "must be a dense (strided) tensor, got"
NO_MEANING = "has no meaning with residual="
SHAPE = "must be [..., n, D] with n and D at least 1, got"


def tensors_of(subject):
    return cases.Case(subject, (2, 3), N, D, torch.float32).inputs()


def of_backward():
    tensors = tensors_of(cases.MHC_FORWARD_PRE)
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = mhc_ops.mhc_forward_pre(**tensors, outflag=True)
    tensors |= {"inv_rms": inv_rms, "h_mix": h_mix, "h_pre": h_pre, "h_post": h_post}
    return {**tensors, "dh_in": h_in, "dh_post": h_post, "dh_res": h_res}


def carried():
    own = tensors_of(cases.MHC_PRE_NORMED)
    h_out, carry = mhc_ops.mhc_enter(**own)
    del own["x"]
    return {"carry": carry, "h_out": h_out, **own}


def wrong_tensors(given):
    """What may be wrong with any of them: its class, type, layout, device or shape."""
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    first = "x" if "carry" in given else next(iter(tensors), None)
    for name, tensor in tensors.items():
        yield {name: [1.0]}, TypeError, f"{name} must be a torch.Tensor, got list"
        yield {name: tensor.int()}, TypeError, f"{name} {A_FLOAT} int32"
        yield {name: tensor.to_sparse()}, TypeError, f"{name} {DENSE} sparse_coo"
        if name != first:
            shape = "[1] or []" if tensor.shape == (1,) else list(tensor.shape)
            yield {name: tensor.to("meta")}, ValueError, f"{name} must be on cpu as {first} is, got meta"
            yield {name: tensor[None]}, ValueError, f"{name} must be {shape}, got {[1, *tensor.shape]}"


def wrong_eps(*names):
    wrong = [(value, ValueError, f"finite and 0 or more, got {value}") for value in (NAN, -1e-6)]
    wrong += [(value, TypeError, f"a number, got {type(value).__name__}") for value in (True, None, "1e-6")]
    return [({name: value}, error, f"{name} must be {message}") for name in names for value, error, message in wrong]


X = [
    ({"x": None}, TypeError, "x must be a torch.Tensor, got NoneType"),
    ({"x": zeros(D)}, ValueError, f"x {SHAPE} [16]"),
    ({"x": zeros(2, 0, D)}, ValueError, f"x {SHAPE} [2, 0, 16]"),
    ({"x": torch.nested.nested_tensor([zeros(3, N, D)])}, TypeError, f"x {DENSE} nested"),
]
FORWARD = [*X, ({"outflag": "no"}, TypeError, "outflag must be a bool, got str")]
POST = [
    *X,
    ({"transposed": 1}, TypeError, "transposed must be a bool, got int"),
    ({"h_res": None, "transposed": True}, ValueError, "transposed=True has no meaning without h_res"),
]
OPTIONS = [
    ({"sinkhorn_iters": 0}, ValueError, "sinkhorn_iters must be at least 1, got 0"),
    ({"sinkhorn_iters": 20.0}, TypeError, "sinkhorn_iters must be an int, got float"),
    ({"post_mult": NAN}, ValueError, "post_mult must be finite, got nan"),
    ({"post_mult": -math.inf}, ValueError, "post_mult must be finite, got -inf"),
    ({"transposed": None}, TypeError, "transposed must be a bool, got NoneType"),
    ({"residual": None}, TypeError, "residual must be a str, got NoneType"),
    ({"residual": "none"}, ValueError, "residual must be 'sinkhorn', 'identity' or 'logits', got 'none'"),
    *(({"residual": "identity", name: value}, ValueError, f"{name}={value} {NO_MEANING}'identity'")
      for name, value in (("sinkhorn_iters", 3), ("sinkhorn_eps", 0.0), ("transposed", True))),
]  # fmt: skip
NO_LOGITS = "residual='logits' is not a map to mix streams with; mhc_pre returns it"
PRE = [
    *OPTIONS,
    ({"residual": "identity"}, ValueError, "phi must be [8, 64], got [24, 64]"),
    ({"residual": "logits", "sinkhorn_iters": 3}, ValueError, f"sinkhorn_iters=3 {NO_MEANING}'logits'"),
    ({"residual": "logits", "sinkhorn_eps": 0.0}, ValueError, f"sinkhorn_eps=0.0 {NO_MEANING}'logits'"),
]
NO_LAYER = ({"layer": None}, TypeError, "layer must be callable, got NoneType")
LAYER = [NO_LAYER, ({"residual": "logits"}, ValueError, NO_LOGITS)]
SINKHORN = [
    ({"logits": zeros(2, 3)}, ValueError, "logits must be [..., n, n] with n at least 1, got [2, 3]"),
    ({"iters": 0}, ValueError, "iters must be at least 1, got 0"),
]
CARRY = [({"carry": zeros(2, 3)}, TypeError, "carry must be what mhc_enter or mhc_next returned, got Tensor")]
ENTER = [
    ({"read": zeros(2, 3, N)}, ValueError, "read has no meaning without shifted=True"),
    ({"read": zeros(N), "shifted": True}, ValueError, "read must be [2, 3, 4], got [4]"),
    ({"shifted": "yes"}, TypeError, "shifted must be a bool, got str"),
]
EXPAND = [
    ({"n": 2.5}, TypeError, "n must be an int, got float"),
    ({"n": 0}, ValueError, "n must be at least 1, got 0"),
    ({"x": zeros(())}, ValueError, "x must be [..., D], got []"),
]

# A flag is True or False: anything else has a truth of its own, which may not be what was meant.
SIZES = [({"n": 0}, ValueError, "n must be at least 1, got 0"), ({"D": 8.0}, TypeError, "D must be an int, got float")]
HEAD = [*SIZES, ({"gamma": "no"}, TypeError, "gamma must be a bool, got str")]
CONNECTION = [*HEAD, *OPTIONS, NO_LAYER]
CONNECTION += [
    ({"layer_norm": []}, TypeError, "layer_norm must be a bool, got list"),
    ({"checkpoint": torch.ones(())}, TypeError, "checkpoint must be a bool, got Tensor"),
    ({"post_mult": 0}, ValueError, "post_mult must be above 0, got 0.0"),
    ({"post_eps": 1.0}, ValueError, "post_eps must be below 1, got 1.0"),
    ({"hc_eps": 1.5}, ValueError, "hc_eps must be below 1, got 1.5"),
    ({"residual": "logits"}, ValueError, "residual='logits' is no map to mix streams with; MHCBlock returns it"),
]
CALLS = {
    "mhc_forward_pre": (partial(tensors_of, cases.MHC_FORWARD_PRE), FORWARD),
    "mhc_backward": (of_backward, X),
    "mhc_pre": (partial(tensors_of, cases.MHC_PRE_NORMED), X + PRE),
    "mhc_post": (partial(tensors_of, cases.MHC_POST), POST),
    "mhc_post_pre": (partial(tensors_of, cases.MHC_POST_PRE_NORMED), POST + PRE),
    "mhc_layer": (lambda: {**tensors_of(cases.MHC_PRE_NORMED), "layer": torch.tanh}, X + PRE + LAYER),
    "mhc_head": (partial(tensors_of, cases.MHC_HEAD), X),
    "mhc_enter": (partial(tensors_of, cases.MHC_PRE_NORMED), X + PRE + ENTER),
    "mhc_next": (carried, CARRY + PRE),
    "mhc_leave": (lambda: {name: carried()[name] for name in ("carry", "h_out")}, CARRY),
    "mhc_maps": (partial(tensors_of, cases.MHC_PRE), X + PRE),
    "mhc_read": (partial(tensors_of, cases.MHC_READ), X),
    "mhc_mean": (partial(tensors_of, cases.MHC_MEAN), X),
    "sinkhorn": (partial(tensors_of, cases.SINKHORN), SINKHORN),
    "mhc_expand": (lambda: {"x": zeros(2, 3, D), "n": N}, EXPAND),
    "MHCBlock": (lambda: {"n": 2, "D": 8}, SIZES),
    "HyperHead": (lambda: {"n": 2, "D": 8}, HEAD),
    "HyperConnection": (lambda: {"n": 2, "D": 8, "layer": torch.tanh}, CONNECTION),
}


def assert_said(call, error, message, **arguments):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(**arguments)


@pytest.mark.parametrize("name", CALLS)
def test_functions_and_modules(name):
    function, (good, wrong) = getattr(mhc_ops, name), CALLS[name]
    of_eps = wrong_eps(*(each for each in inspect.signature(function).parameters if each.endswith("eps")))
    for changes, error, message in (*wrong_tensors(good()), *of_eps, *wrong):
        assert_said(function, error, f"{name}: {message}", **{**good(), **changes})
    if name[0].isupper():
        for x, error, message in (
            ([1.0], TypeError, "x must be a torch.Tensor, got list"),
            (zeros(3, 4, 8), ValueError, "x must be [..., 2, 8], got [3, 4, 8]"),
        ):
            assert_said(partial(function(**good()), x), error, f"{name}: {message}")
    elif name not in ("mhc_read", "mhc_mean", "mhc_leave", "mhc_expand"):
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'norm_ep'"):
            function(**good(), norm_ep=1)  # Python 3.13 adds a question


def connection(layer=torch.tanh, n=2, D=8):
    return HyperConnection(layer, n, D)


def with_a_hook(hook):
    """A stack; the hook is on what the last connection returns."""
    stack = HyperStack(connection(), connection())
    stack[-1].register_forward_hook(lambda module, inputs, carry: hook(carry))
    return stack


def test_stacks():
    one, other, x, linear = connection(), connection(n=4), zeros(3, 2, 8), torch.nn.Linear(8, 8)
    another, nothing, wide = connection(), connection(lambda h: None), connection(lambda h: h[:, None].expand(3, 2, 8))
    later = HyperStack(one, shifted=True, first=False)
    for call, error, message in (
        (lambda: HyperStack(one, other), ValueError, "HyperStack: connection 1 has n=4, D=8"),
        (lambda: HyperStack(one, another).__setitem__(1, other), ValueError, "HyperStack: connection 1 has n=4, D=8"),
        (lambda: HyperStack(linear), TypeError, "HyperStack: connection 0 must be a HyperConnection"),
        (lambda: HyperStack(one).insert(0, linear), TypeError, "HyperStack: connection 0 must be a HyperConnection"),
        (lambda: HyperStack(one, recompute=-1), ValueError, "HyperStack: recompute must be 0 or more"),
        (lambda: HyperStack(one, recompute=True), TypeError, "HyperStack: recompute must be an int"),
        (lambda: HyperStack(one, shifted=1), TypeError, "HyperStack: shifted must be a bool"),
        (lambda: HyperStack(one, first=False), ValueError, "HyperStack: first=False has no meaning"),
        (lambda: HyperStack(one, last=False), ValueError, "HyperStack: last=False has no meaning"),
        (lambda: HyperStack(one) + HyperStack(one, shifted=True), ValueError, "HyperStack: a shifted stack and one"),
        (lambda: later(x), TypeError, "HyperStack: with first=False the input must be (x, p)"),
        (lambda: later(x, zeros(3, 4)), ValueError, "mhc_enter: read must be [3, 2]"),
        (lambda: HyperStack(other, recompute=2)(x), ValueError, "HyperConnection: x must be [..., 4, 8]"),
        (lambda: HyperStack(nothing)(x), TypeError, "mhc_leave: h_out must be a torch.Tensor"),
        (lambda: nothing(x), TypeError, "mhc_layer: h_out must be a torch.Tensor"),
        (lambda: wide(x), ValueError, "mhc_layer: h_out must be [3, 8]"),
        (lambda: with_a_hook(lambda carry: carry.norm())(x), AttributeError, "a carry of a HyperStack has no norm"),
        (lambda: with_a_hook(lambda carry: carry.x)(x), TypeError, "HyperStack: connection 1 must return its carry"),
        (lambda: mhc_ops.metrics(linear).__enter__(), ValueError, "metrics: there is no HyperConnection"),
        (lambda: mhc_ops.metrics([]).__enter__(), TypeError, "metrics: model must be an nn.Module"),
    ):
        with pytest.raises(error, match=f"^{re.escape(message)}"):
            call()


@pytest.mark.parametrize("checked", [prepare.check_kernel_limits, pytest.param(None, marks=pytest.mark.interpreted)])
def test_limits_of_kernels(checked):
    """The check raises them, and so does a call on its way to the kernels. The reference takes any n."""
    for n, dtype, error, message in (
        (4, torch.float64, TypeError, "x must be bfloat16, float16 or float32 for backend 'triton', got float64"),
        (9, torch.float32, ValueError, "n must be 1 to 8 for backend 'triton', got 9"),
    ):
        tensors = {k: t.to(dtype) for k, t in cases.Case(cases.MHC_FORWARD_PRE, (2,), n, 3).inputs().items()}
        call = partial(checked, "mhc_forward_pre", tensors["x"], "triton") if checked else mhc_ops.mhc_forward_pre
        given = {} if checked else {**tensors, "backend": "triton"}
        assert_said(call, error, f"mhc_forward_pre: {message}", **given)
        assert mhc_ops.mhc_forward_pre(**tensors, backend="reference")[2].shape == (2, n, n)


def test_tilelang_says_what_it_lacks():
    """Nothing runs on another backend instead."""
    x, weight, h_res = zeros(2, 4, 16), torch.ones(16), torch.ones(1)
    for check, given, words in (
        (prepare.check_kernels, (x, weight), "mhc_pre with layer_norm_weight"),
        (prepare.check_kernel_options, (DEFAULTS._replace(post_eps=0.5),), "mhc_pre with post_eps=0.5"),
        (prepare.check_kernel_options, (DEFAULTS._replace(residual="identity"),), "mhc_pre with residual='identity'"),
        (prepare.check_kernel_options, (DEFAULTS._replace(transposed=True),), "mhc_pre with transposed=True"),
        (prepare.check_kernel_residual, (None, False), "mhc_post without h_res"),
        (prepare.check_kernel_residual, (h_res, True), "mhc_post with transposed=True"),
    ):
        call = partial(check, words.split()[0], *given)
        message = f"{words}: backend 'tilelang' does not have it, 'triton' and 'reference' do"
        assert_said(partial(call, "tilelang"), NotImplementedError, message)
        call("triton")
    source = {name: inspect.getsource(function) for name, function in inspect.getmembers(prepare, inspect.isfunction)}
    functions = {f"mhc_{name}" for name, text in source.items() if "check_not_tilelang(function, name)" in text}
    exported = re.findall(r'"(\w+)",', Path(prepare.__file__).with_name("tilelang").joinpath("__init__.py").read_text())
    ops = {name for name, op in vars(contracts).items() if isinstance(op, Op)}
    assert {name.rpartition("_")[0] for name in ops - {*exported}} == functions
    lacking = {"layer_norm", "shifted", *prepare.NOT_IN_TILELANG, *functions}
    for name, lacks in (("README.md", "TileLang lacks"), ("README.zh.md", "TileLang 没有")):
        text = (Path(mhc_ops.__file__).parents[1] / name).read_text(encoding="utf-8")
        (line,) = re.findall(rf"^- \*\*{lacks}.*?(?=^- )", text, re.MULTILINE | re.DOTALL)
        assert {word.split("=")[0] for word in re.findall(r"`([^`]+)`", line)} == lacking, name


def test_warmup(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for where in ({}, {"device": "cpu"}, {"device": "cuda", "backend": "reference"}):
        assert mhc_ops.warmup(4, 64, torch.bfloat16, **where) == 0, "the same program runs on a laptop and on a GPU"
    with monkeypatch.context() as patch:
        patch.setattr(backends, "_INTERPRETED", False)
        for given, error, message in (
            ({"device": "cuda:0"}, ValueError, ": device must be there, got cuda:0"),
            ({"device": "cuda:0", "backend": "triton"}, ValueError, ": device must be there, got cuda:0"),
            ({"backend": "triton"}, RuntimeError, ": backend 'triton' cannot run here: "),
            ({"dtype": "bfloat16"}, TypeError, ": dtype must be a torch.dtype"),
            ({"parameter_dtype": "bfloat16"}, TypeError, ": parameter_dtype must be a torch.dtype"),
            ({"tokens": [8, 0]}, ValueError, ": tokens must be at least 1"),
            ({"tokens": []}, ValueError, ": tokens must be a count or a list of them"),
            ({"training": 1}, TypeError, ": training must be a bool"),
            ({"sinkhorn_iter": 3}, TypeError, "() got an unexpected keyword argument 'sinkhorn_iter'"),
        ):
            with pytest.raises(error, match=f"^warmup{re.escape(message)}"):
                mhc_ops.warmup(4, 64, **given)
    monkeypatch.setattr(mhc_ops.mhc.warmup, "choose", lambda *_: "tilelang")
    with pytest.raises(NotImplementedError, match=r"^warmup with layer_norm: backend 'tilelang' does not have it"):
        mhc_ops.warmup(4, 24, layer_norm=True, device="cpu")
