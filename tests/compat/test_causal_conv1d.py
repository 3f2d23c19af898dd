"""The drop-in for the causal-conv1d package, the way that package tests itself: against torch's convolution."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from compat_oracle import says

import mhc_ops
from mhc_ops.compat import causal_conv1d as compat
from mhc_ops.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from mhc_ops.testing import accuracy

B, D, L = 2, 5, 23
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
    step = 1 if layout == "channel-first" else 2
    return torch.randn(B, D + 9, step * L).to(dtype)[:, 4 : 4 + D, ::step]


def is_dense(out, layout):
    return (out.mT if layout == "channel-last" else out).is_contiguous()


def leaf(tensor):
    return None if tensor is None else tensor.detach().requires_grad_()


def close(results, exact):
    return all(accuracy.close(result.detach(), truth.detach()) for result, truth in zip(results, exact, strict=True))


def gradients(outputs, leaves):
    """For cotangents that are the same values for every type of outputs."""
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(output.shape, generator=generator).bfloat16().to(output.dtype) for output in outputs]
    return torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], cotangents)


# has_initial, has_final, has_bias, activation; and b, d, length, W
FORMS = [
    (False, False, True, None),
    (True, False, False, "silu"),
    (False, True, True, "swish"),
    (True, True, False, None),
]
SIZES = [(B, D, L, 4), (2, 7, 23, 5), (1, 1, 9, 2), (2, 3, 1, 8), (3, 8, 2, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("has_initial", "has_final", "has_bias", "activation"), FORMS)
@pytest.mark.parametrize(("b", "d", "length", "W"), SIZES)
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
    assert is_dense(outputs[0], layout)
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


@pytest.mark.parametrize("layout", [*LAYOUTS, "every second token"])
def test_out_can_be_added_to_in_place(layout, each_backend):
    """The package's own test does this before its backward. out is contiguous where x has neither layout."""
    torch.manual_seed(0)
    x, weight = leaf(sliced(layout)), leaf(torch.randn(D, 4))
    out, final = causal_conv1d_fn(x, weight, return_final_states=True, activation="silu")
    assert is_dense(out, layout)
    out += torch.sigmoid(final).sum(-1, keepdim=True)
    exact, exact_final = oracle(x, weight, activation="silu")
    exact = exact + torch.sigmoid(exact_final).sum(-1, keepdim=True)
    assert close([out, *gradients([out], [x, weight])], [exact, *gradients([exact], [x, weight])])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_final_states_out(layout, each_backend):
    """A buffer for the final states: written to and returned. With gradients its memory is returned, and it keeps no
    graph, so that it can serve the next step too."""
    torch.manual_seed(0)
    x, weight, buffer = sliced("channel-last"), torch.randn(D, 4), sliced(layout, L=3)
    strides, memory, leaves = buffer.stride(), buffer.data_ptr(), (leaf(x), leaf(weight))
    assert causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=buffer)[1] is buffer
    assert (buffer.stride(), buffer.data_ptr()) == (strides, memory)
    assert torch.equal(buffer, x[..., -3:])
    for _ in range(2):
        buffer.fill_(float("nan"))
        outputs = causal_conv1d_fn(*leaves, return_final_states=True, final_states_out=buffer)
        assert outputs[1].data_ptr() == memory and not buffer.requires_grad
        assert torch.equal(buffer, x[..., -3:])
        assert close(gradients(outputs, leaves), gradients(oracle(*leaves), leaves))
    kept = buffer.fill_(1).clone()
    out = causal_conv1d_fn(x, weight, final_states_out=buffer)  # ignored, as no state is asked for
    assert torch.equal(out, causal_conv1d_fn(x, weight)) and torch.equal(buffer, kept)


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
    assert is_dense(out, layout)
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
    assert is_dense(out, layout) or T is None
    assert torch.equal(out, expected if T else expected[..., 0])
    assert torch.equal(state, expected_state), "in place"


def test_a_prompt_in_pieces_and_then_token_by_token(each_backend):
    """The final states take the place of the initial ones. Those of packed prompts are the same."""
    torch.manual_seed(0)
    x, weight, bias, state = sliced("channel-last"), torch.randn(D, 4), torch.randn(D), torch.zeros(B, D, 3)
    given, pieces = (weight, bias, None, state, True, state, "silu"), x[..., :20].split([7, 2, 11], -1)
    out = [causal_conv1d_fn(piece, *given)[0] for piece in pieces]
    packed = causal_conv1d_varlen_states(x[..., :20].mT.flatten(0, 1), torch.tensor([0, 20, 40]), 3)
    assert torch.equal(packed, state) and torch.equal(state, x[..., 17:20])
    out += [causal_conv1d_update(x[..., t], state, weight, bias, "silu")[..., None] for t in range(20, L)]
    assert torch.equal(torch.cat(out, -1), causal_conv1d_fn(x, weight, bias, activation="silu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("state_len", [0, 1, 3, 20])
def test_varlen_states(state_len, index, dtype):
    boundaries, wide = [0, 4, 4, 5, 30, 33], torch.randn(35, D + 3).to(dtype)
    wide[33:] = float("nan")
    x = leaf(wide[:, 1 : 1 + D])
    states = causal_conv1d_varlen_states(x, torch.tensor(boundaries, dtype=index), state_len)
    padded = [torch.cat([wide.new_zeros(20, D), x[begin:end].detach()]) for begin, end in pairwise(boundaries)]
    assert torch.equal(states, torch.stack([sequence[len(sequence) - state_len :].T for sequence in padded]))
    assert states.dtype == dtype
    assert states.stride() == torch.empty(5, state_len, D).mT.stride()
    assert not states.requires_grad


X, WEIGHT, STATE = torch.zeros(B, D, L), torch.zeros(D, 4), torch.zeros(B, D, 3)
IDS, CU = torch.zeros(B, L, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
FN, UPDATE, VARLEN = "causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"
FINAL, ACTIVATION = "final_states_out", "activation must be None, silu, or swish, got"
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
        with says(error, message):
            function(**{**GOOD[name], **wanted, **changes})
