"""The drop-in for the causal-conv1d package, the way that package tests itself: against torch's convolution."""

import inspect
import operator
import re
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from compat_oracle import signature

import mhc_ops
from mhc_ops.compat import causal_conv1d as compat
from mhc_ops.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from mhc_ops.testing import accuracy

B, D, L = 2, 5, 23
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = ["channel-last", "channel-first"]


def oracle(x, weight, bias=None, initial_states=None, activation=None):
    """out [B, D, L] and the final states, in fp64."""
    x, weight, bias, before = (None if t is None else t.double() for t in (x, weight, bias, initial_states))
    W = weight.shape[1]
    everything = F.pad(x, (W - 1, 0)) if before is None else torch.cat([before, x], -1)
    filters = torch.diag_embed(weight.mT).permute(1, 2, 0)  # groups=D, which is slow in fp64
    out = F.conv1d(everything, filters, bias)
    return F.silu(out) if activation else out, everything[..., everything.shape[-1] - (W - 1) :]


def sliced(layout, *, B=B, D=D, L=L, dtype=torch.float32):
    """x [B, D, L] out of a wider tensor, so that strides matter."""
    if layout == "channel-last":
        return torch.randn(B, L, D + 9).to(dtype)[..., 4 : 4 + D].mT
    return torch.randn(B, D + 9, L).to(dtype)[:, 4 : 4 + D]


def same_layout(one, other):
    """Whether two dense tensors have the same order of dimensions, without those of size 1."""
    order = [[d for d in sorted(range(t.dim()), key=t.stride, reverse=True) if t.shape[d] > 1] for t in (one, other)]
    return order[0] == order[1]


def leaf(tensor):
    return None if tensor is None else tensor.detach().requires_grad_()


def close(results, exact):
    return all(accuracy.close(result.detach(), truth.detach()) for result, truth in zip(results, exact, strict=True))


def gradients(outputs, leaves, seed=1):
    """For cotangents that are the same values for every type of outputs."""
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(output.shape, generator=generator).bfloat16().to(output.dtype) for output in outputs]
    return torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], cotangents)


SIGNATURES = {
    "causal_conv1d_interface.causal_conv1d_fn": "x weight bias=None seq_idx=None initial_states=None "
    "return_final_states=False final_states_out=None activation=None",
    "causal_conv1d_interface.causal_conv1d_update": "x conv_state weight bias=None activation=None cache_seqlens=None "
    "conv_state_indices=None",
    "causal_conv1d_interface.causal_conv1d_ref": "x weight bias=None initial_states=None return_final_states=False "
    "final_states_out=None activation=None seq_idx=None",
    "causal_conv1d_interface.causal_conv1d_update_ref": "x conv_state weight bias=None activation=None "
    "cache_seqlens=None",
    "causal_conv1d_varlen.causal_conv1d_varlen_states": "x cu_seqlens state_len",
    "causal_conv1d_varlen.causal_conv1d_varlen_states_ref": "x cu_seqlens state_len",
    "cpp_functions.causal_conv1d_fwd_function": "x weight bias seq_idx initial_states final_states_out silu_activation",
    "cpp_functions.causal_conv1d_bwd_function": "x weight bias dout seq_idx initial_states dfinal_states dx "
    "return_dinitial_states silu_activation",
    "cpp_functions.causal_conv1d_update_function": "x conv_state weight bias silu_activation cache_seqlens "
    "conv_state_indices",
}


def test_arguments_come_in_the_same_order():
    for path, expected in SIGNATURES.items():
        function = operator.attrgetter(path)(compat)
        assert signature(function) == expected, path
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}, path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("has_initial", "has_final", "has_bias", "activation"),
    [(False, False, True, None), (True, False, False, "silu"), (False, True, True, "swish"), (True, True, False, None)],
)
@pytest.mark.parametrize(
    ("b", "d", "length", "W"), [(B, D, L, 4), (2, 7, 23, 5), (1, 1, 9, 2), (2, 3, 1, 8), (3, 8, 2, 1)]
)
def test_fn(b, d, length, W, has_initial, has_final, has_bias, activation, dtype, layout):
    """Also widths and channels that the package refuses, and sequences shorter than the filter."""
    torch.manual_seed(0)
    x = leaf(sliced(layout, B=b, D=d, L=length, dtype=dtype))
    weight, bias = leaf(torch.randn(d, W)), leaf(torch.randn(d)) if has_bias else None
    initial = leaf(torch.randn(b, W - 1, d).to(dtype).mT) if has_initial else None
    leaves = [x, weight, bias, initial]
    out = causal_conv1d_fn(x, weight, bias, None, initial, has_final, activation=activation)
    outputs = out if has_final else (out,)
    exact_leaves = [None if t is None else leaf(t.double()) for t in leaves]
    exact = oracle(*exact_leaves, activation)[: len(outputs)]
    assert {output.dtype for output in outputs} == {dtype}
    assert same_layout(outputs[0], x)
    assert outputs[0].is_contiguous() or outputs[0].mT.is_contiguous()
    assert close(outputs, exact)
    if has_final:
        assert torch.equal(outputs[1].double(), exact[1])
        assert outputs[1].stride(1) == 1 or W == 1
    assert close(gradients(outputs, leaves), gradients(exact, exact_leaves))


def test_no_tokens():
    for b, length in ((0, 5), (2, 0)):
        x, initial = torch.randn(b, 4, length), torch.randn(b, 4, 2)
        out, final = causal_conv1d_fn(x, torch.randn(4, 3), None, None, initial, True, None, "silu")
        assert out.shape == x.shape and torch.equal(final, initial)
    assert torch.equal(causal_conv1d_varlen_states(torch.ones(0, 3), torch.tensor([0, 0]), 2), torch.zeros(1, 3, 2))
    assert causal_conv1d_varlen_states(torch.ones(4, 3), torch.tensor([0]), 2).shape == (0, 3, 2)


@pytest.mark.usefixtures("each_backend")
def test_strides_that_are_neither():
    """out is then contiguous, as in the package."""
    x = torch.randn(B, D, 2 * L)[..., ::2]
    weight = torch.randn(D, 4)
    out = causal_conv1d_fn(x, weight)
    assert out.is_contiguous()
    assert accuracy.close(out, oracle(x, weight)[0])


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_can_be_added_to_in_place(layout):
    """The package's own test does this before its backward."""
    torch.manual_seed(0)
    x, weight = leaf(sliced(layout)), leaf(torch.randn(D, 4))
    out, final = causal_conv1d_fn(x, weight, return_final_states=True, activation="silu")
    out += torch.sigmoid(final).sum(-1, keepdim=True)
    exact, exact_final = oracle(x, weight, activation="silu")
    exact = exact + torch.sigmoid(exact_final).sum(-1, keepdim=True)
    assert close([out], [exact])
    assert close(gradients([out], [x, weight]), gradients([exact], [x, weight]))


@pytest.mark.usefixtures("each_backend")
class TestFinalStatesOut:
    """A buffer for the final states: written to and returned."""

    @pytest.fixture
    def given(self):
        torch.manual_seed(0)
        return sliced("channel-last"), torch.randn(D, 4)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_is_what_is_returned(self, layout, given):
        x, weight = given
        buffer = sliced(layout, L=3)
        strides, memory = buffer.stride(), buffer.data_ptr()
        _, final = causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=buffer)
        assert final is buffer
        assert (buffer.stride(), buffer.data_ptr()) == (strides, memory)
        assert torch.equal(buffer, x[..., -3:])
        kept = buffer.fill_(1).clone()
        out = causal_conv1d_fn(x, weight, final_states_out=buffer)  # ignored, as no state is asked for
        assert torch.equal(out, causal_conv1d_fn(x, weight)) and torch.equal(buffer, kept)

    def test_carries_gradients(self, given):
        """The same memory; and the buffer keeps no graph, so that it can serve the next step too."""
        x, weight = map(leaf, given)
        buffer = torch.full((B, D, 3), float("nan"))
        for _ in range(2):
            outputs = causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=buffer)
            assert outputs[1].data_ptr() == buffer.data_ptr()
            assert torch.equal(buffer, x[..., -3:])
            assert not buffer.requires_grad
            assert close(gradients(outputs, [x, weight]), gradients(oracle(x, weight), [x, weight]))

    def test_in_the_place_of_the_initial_states(self, given):
        (x, weight), state = given, torch.zeros(B, D, 3)
        pieces = x.split([7, 2, 14], -1)
        pieces = [causal_conv1d_fn(piece, weight, None, None, state, True, state)[0] for piece in pieces]
        assert torch.equal(torch.cat(pieces, -1), causal_conv1d_fn(x, weight))
        assert torch.equal(state, x[..., -3:])


# What follows is held to the functions of mhc_ops, which tests/conv holds to fp64.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_initial", [False, True])
def test_seq_idx(has_initial, dtype, layout):
    """Also with padding, id −1; initial states come before the first sequence of each row."""
    torch.manual_seed(0)
    x, weight, bias = leaf(sliced(layout, dtype=dtype)), leaf(torch.randn(D, 4)), leaf(torch.randn(D))
    states = leaf(torch.randn(B, D, 3).to(dtype)) if has_initial else None
    ids = torch.tensor([[0] * 2 + [1] * (L - 5) + [-1] * 3, [4] * (L - 1) + [5]], dtype=torch.int32)
    out = causal_conv1d_fn(x, weight, bias, ids, states, activation="silu")
    expected = mhc_ops.causal_conv1d(x.mT, weight, bias, activation="silu", seq_idx=ids, initial_state=states).mT
    assert same_layout(out, x)
    leaves = [x, weight, bias, states]
    found = [out, *gradients([out], leaves)]
    assert all(map(torch.equal, found, [expected, *gradients([expected], leaves)]))


@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.bfloat16, True), (torch.float16, False), (torch.float32, True)])
@pytest.mark.parametrize("slots", [None, (5, 0, 3, 6), (1, -1, 0, -1)], ids=["all", "gather", "padding"])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("T", [None, 1, 4, 5])
@pytest.mark.parametrize(("W", "extra", "layout"), [(4, 0, LAYOUTS[0]), (3, 5, LAYOUTS[0]), (2, 1, LAYOUTS[1])])
def test_update(W, extra, layout, T, ring, slots, dtype, has_bias):
    torch.manual_seed(0)
    activation = "silu" if has_bias else None
    x = sliced(layout, B=4, L=T or 1, dtype=dtype)
    state = sliced(layout, B=4 if slots is None else 7, L=W - 1 + extra, dtype=dtype)
    weight, bias = torch.randn(D, W), torch.randn(D) if has_bias else None
    lengths = torch.randint(0, 1000, (4,), dtype=torch.int32) if ring else None
    indices = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    tokens, expected_state = x if T else x[..., 0], state.clone()
    places = {"cache_seqlens": lengths, "conv_state_indices": indices}
    expected = mhc_ops.causal_conv1d_update(x.mT, expected_state, weight, bias, activation=activation, **places).mT
    out = causal_conv1d_update(tokens, state, weight, bias, activation, lengths, indices)
    assert (out.shape, out.dtype) == (tokens.shape, dtype)
    assert same_layout(out, tokens) or T is None
    assert torch.equal(out, expected if T else expected[..., 0])
    assert torch.equal(state, expected_state), "in place"


@pytest.mark.usefixtures("each_backend")
def test_update_continues_fn():
    torch.manual_seed(0)
    x, weight, bias = sliced("channel-last"), torch.randn(D, 4), torch.randn(D)
    whole = causal_conv1d_fn(x, weight, bias, activation="silu")
    state = torch.empty(B, D, 3)
    out, _ = causal_conv1d_fn(x[..., :20], weight, bias, None, None, True, state, "silu")
    steps = [causal_conv1d_update(x[..., t], state, weight, bias, "silu") for t in range(20, L)]
    assert torch.equal(torch.cat([out, torch.stack(steps, -1)], -1), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("state_len", [0, 1, 3, 20])
def test_varlen_states(state_len, index, dtype):
    boundaries = [0, 4, 4, 5, 30, 33]
    wide = torch.randn(35, D + 3).to(dtype)
    wide[33:] = float("nan")
    x = leaf(wide[:, 1 : 1 + D])
    states = causal_conv1d_varlen_states(x, torch.tensor(boundaries, dtype=index), state_len)
    expected = torch.zeros(5, D, state_len, dtype=dtype)
    for i, (begin, end) in enumerate(pairwise(boundaries)):
        for back in range(1, min(state_len, end - begin) + 1):
            expected[i, :, state_len - back] = x[end - back].detach()
    assert torch.equal(states, expected)
    assert states.dtype == dtype
    assert states.stride() == torch.empty(5, state_len, D).mT.stride()
    assert not states.requires_grad


@pytest.mark.usefixtures("each_backend")
def test_varlen_states_continue_a_packed_prefill():
    """The states of packed prompts are those that decoding starts with."""
    torch.manual_seed(0)
    x, weight = torch.randn(12, D), torch.randn(D, 4)
    states = causal_conv1d_varlen_states(x, torch.tensor([0, 2, 11]), 3)
    new = torch.randn(2, D)
    out = causal_conv1d_update(new, states, weight)
    for i, sequence in enumerate((x[:2], x[2:11])):
        whole = causal_conv1d_fn(torch.cat([sequence, new[i : i + 1]]).T[None], weight)
        assert torch.equal(out[i], whole[0, :, -1])


X, WEIGHT, STATE = torch.zeros(B, D, L), torch.zeros(D, 4), torch.zeros(B, D, 3)
IDS, CU = torch.zeros(B, L, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
FN, UPDATE, VARLEN = "causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"
FINAL = "final_states_out"
ACTIVATION = "activation must be None, silu, or swish, got"
ERRORS = [
    (FN, {"activation": "gelu"}, NotImplementedError, f"{FN}: {ACTIVATION} 'gelu'"),
    (UPDATE, {"activation": "relu"}, NotImplementedError, f"{UPDATE}: {ACTIVATION} 'relu'"),
    (FN, {"x": [1.0]}, TypeError, f"{FN}: x must be a torch.Tensor, got list"),
    (FN, {"x": X[0]}, ValueError, f"{FN}: x must be [B, D, L], got [5, 23]"),
    (FN, {"weight": WEIGHT.mT}, ValueError, "causal_conv1d: weight must be [5, W] with W at least 1, got [4, 5]"),
    (FN, {"initial_states": STATE.mT}, ValueError, "causal_conv1d: initial_state must be [2, 5, 3], got [2, 3, 5]"),
    (FN, {"seq_idx": IDS, FINAL: None}, ValueError, "causal_conv1d: seq_idx and output_final_state exclude each other"),
    (FN, {FINAL: STATE[:1]}, ValueError, f"{FN}: {FINAL} must be [2, 5, 3], got [1, 5, 3]"),
    (FN, {FINAL: STATE.half()}, TypeError, f"{FN}: {FINAL} must be float32 as x is, got float16"),
    (FN, {FINAL: STATE.to("meta")}, ValueError, f"{FN}: {FINAL} must be on cpu as x is, got meta"),
    (UPDATE, {"x": X[0, 0]}, ValueError, f"{UPDATE}: x must be [B, D] or [B, D, T], got [23]"),
    (UPDATE, {"conv_state": STATE[..., 1:]}, ValueError,
     f"{UPDATE}: conv_state must be [slots, 5, length] with length at least 3, got [2, 5, 2]"),
    (VARLEN, {"x": None}, TypeError, f"{VARLEN}: x must be a torch.Tensor, got NoneType"),
    (VARLEN, {"x": X}, ValueError, f"{VARLEN}: x must be [total, D], got [2, 5, 23]"),
    (VARLEN, {"cu_seqlens": [0, 1]}, TypeError, f"{VARLEN}: cu_seqlens must be a torch.Tensor, got list"),
    (VARLEN, {"cu_seqlens": CU.float()}, TypeError, f"{VARLEN}: cu_seqlens must be int32 or int64, got float32"),
    (VARLEN, {"cu_seqlens": CU[:0]}, ValueError, f"{VARLEN}: cu_seqlens must be [N + 1], got [0]"),
    (VARLEN, {"cu_seqlens": CU.to("meta")}, ValueError, f"{VARLEN}: cu_seqlens must be on cpu as x is, got meta"),
    (VARLEN, {"state_len": 3.0}, TypeError, f"{VARLEN}: state_len must be an int, got float"),
    (VARLEN, {"state_len": -1}, ValueError, f"{VARLEN}: state_len must be at least 0, got -1"),
]  # fmt: skip
GOOD = {
    FN: {"x": X, "weight": WEIGHT},
    UPDATE: {"x": X[..., 0], "conv_state": STATE, "weight": WEIGHT},
    VARLEN: {"x": X[0].mT, "cu_seqlens": CU, "state_len": 3},
}


def test_errors():
    for name, changes, error, message in ERRORS:
        function, wanted = getattr(compat, name), {"return_final_states": True} if FINAL in changes else {}
        function(**GOOD[name])
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            function(**{**GOOD[name], **wanted, **changes})
