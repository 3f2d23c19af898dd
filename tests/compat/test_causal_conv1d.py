"""The drop-in for the causal-conv1d package, the way that package tests itself: against torch's convolution."""

import inspect
import re
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import mhc_ops
from mhc_ops.compat import causal_conv1d as compat
from mhc_ops.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from mhc_ops.testing import accuracy

B, D, L = 2, 5, 23
DTYPES = [torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = ["channel-last", "channel-first"]


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpreted)])
def each_backend(request):
    with mhc_ops.use_backend(request.param):
        yield


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
    """Of dense tensors in the same order of dimensions; that of size 1 has no place in it."""
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
    "causal_conv1d_fn": "x weight bias=None seq_idx=None initial_states=None return_final_states=False "
    "final_states_out=None activation=None",
    "causal_conv1d_update": "x conv_state weight bias=None activation=None cache_seqlens=None conv_state_indices=None",
    "causal_conv1d_varlen_states": "x cu_seqlens state_len",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_come_in_the_same_order(name):
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    words = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert words == SIGNATURES[name].split()
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_bias", "activation"), [(False, None), (True, None), (False, "silu"), (True, "swish")])
@pytest.mark.parametrize(("has_initial", "has_final"), [(False, False), (True, False), (False, True), (True, True)])
def test_fn(has_initial, has_final, has_bias, activation, dtype, layout):
    torch.manual_seed(0)
    W = 4
    x = leaf(sliced(layout, dtype=dtype))
    weight, bias = leaf(torch.randn(D, W)), leaf(torch.randn(D)) if has_bias else None
    initial = leaf(torch.randn(B, W - 1, D).to(dtype).mT) if has_initial else None
    leaves = [x, weight, bias, initial]
    out = causal_conv1d_fn(
        x, weight, bias, initial_states=initial, return_final_states=has_final, activation=activation
    )
    outputs = out if has_final else (out,)
    exact_leaves = [None if t is None else leaf(t.double()) for t in leaves]
    exact = oracle(*exact_leaves, activation)[: len(outputs)]
    assert {output.dtype for output in outputs} == {dtype}
    assert same_layout(outputs[0], x)
    assert outputs[0].is_contiguous() or outputs[0].mT.is_contiguous()
    assert close(outputs, exact)
    if has_final:
        assert torch.equal(outputs[1].double(), exact[1])
        assert outputs[1].stride(1) == 1
    assert close(gradients(outputs, leaves), gradients(exact, exact_leaves))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("W", [1, 2, 5, 8])
@pytest.mark.parametrize(("b", "d", "length"), [(2, 7, 23), (1, 1, 9), (2, 3, 1), (3, 8, 2), (0, 4, 5), (2, 4, 0)])
def test_any_size(b, d, length, W, layout):
    """Widths and channels that the package refuses; sequences shorter than the filter."""
    torch.manual_seed(0)
    x = leaf(sliced(layout, B=b, D=d, L=length, dtype=torch.float64))
    weight, initial = (leaf(torch.randn(*shape, dtype=torch.float64)) for shape in ((d, W), (b, d, W - 1)))
    outputs = causal_conv1d_fn(x, weight, None, None, initial, True, None, "silu")
    leaves = [x, weight, initial]
    if b * length == 0:  # torch's convolution takes no such tensor
        assert [tuple(output.shape) for output in outputs] == [(b, d, length), (b, d, W - 1)]
        assert torch.equal(outputs[1], initial)
        return
    exact = oracle(x, weight, None, initial, "silu")
    assert same_layout(outputs[0], x)
    assert close(outputs, exact)
    assert close(gradients(outputs, leaves), gradients(exact, leaves))


@pytest.mark.usefixtures("each_backend")
def test_strides_that_are_neither():
    """As in the package, out is then laid out as [B, D, L] is."""
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

    def arguments(self, requires_grad):
        torch.manual_seed(0)
        tensors = [sliced("channel-last"), torch.randn(D, 4)]
        return [tensor.detach().requires_grad_(requires_grad) for tensor in tensors]

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_is_what_is_returned(self, layout):
        x, weight = self.arguments(False)
        buffer = sliced(layout, L=3)
        strides, memory = buffer.stride(), buffer.data_ptr()
        _, final = causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=buffer)
        assert final is buffer
        assert (buffer.stride(), buffer.data_ptr()) == (strides, memory)
        assert torch.equal(buffer, x[..., -3:])

    def test_carries_gradients(self):
        """The same memory; and the buffer keeps no graph, so that it can serve the next step too."""
        x, weight = self.arguments(True)
        buffer = torch.full((B, D, 3), float("nan"))
        for _ in range(2):
            outputs = causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=buffer)
            assert outputs[1].data_ptr() == buffer.data_ptr()
            assert torch.equal(buffer, x[..., -3:])
            assert not buffer.requires_grad
            assert close(gradients(outputs, [x, weight]), gradients(oracle(x, weight), [x, weight]))

    def test_in_the_place_of_the_initial_states(self):
        x, weight = self.arguments(False)
        state = torch.zeros(B, D, 3)
        whole = causal_conv1d_fn(x, weight)
        pieces = [
            causal_conv1d_fn(piece, weight, None, None, state, True, state)[0] for piece in x.split([7, 2, 14], -1)
        ]
        assert torch.equal(torch.cat(pieces, -1), whole)
        assert torch.equal(state, x[..., -3:])

    def test_is_ignored_where_no_state_is_asked_for(self):
        x, weight = self.arguments(False)
        buffer = torch.ones(B, D, 3)
        out = causal_conv1d_fn(x, weight, final_states_out=buffer)
        assert torch.equal(out, causal_conv1d_fn(x, weight))
        assert torch.equal(buffer, torch.ones_like(buffer))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("padding", [0, 3])
def test_seq_idx(padding, activation, dtype, layout):
    """A loop over the sequences; padding, id −1, is zero and gives no gradient."""
    torch.manual_seed(0)
    x, weight, bias = leaf(sliced(layout, dtype=dtype)), leaf(torch.randn(D, 4)), leaf(torch.randn(D))
    lengths = [[5, 1, 2, 15 - padding], [20, 3 - padding]]
    ids = [[i for i, length in enumerate(row) for _ in range(length)] + [-1] * padding for row in lengths]
    out = causal_conv1d_fn(x, weight, bias, torch.tensor(ids, dtype=torch.int32), activation=activation)
    leaves = [x, weight, bias]
    wide = [leaf(t.double()) for t in leaves]
    rows = []
    for b, row in enumerate(lengths):
        sequences = wide[0][b : b + 1, :, : L - padding].split(row, -1)
        parts = [oracle(one, *wide[1:], activation=activation)[0] for one in sequences if one.shape[-1]]
        rows.append(F.pad(torch.cat(parts, -1), (0, padding)))
    exact = torch.cat(rows)
    assert same_layout(out, x)
    assert close([out], [exact])
    grads = gradients([out], leaves)
    assert close(grads, gradients([exact], wide))
    assert not grads[0][..., L - padding :].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_seq_idx_with_initial_states(layout):
    """The states are before the first sequence of each row; the others begin with nothing."""
    torch.manual_seed(0)
    leaves = [sliced(layout), torch.randn(D, 4), torch.randn(D), torch.randn(B, D, 3)]
    x, weight, bias, states = leaves = [leaf(t) for t in leaves]
    ids = torch.tensor([[0] * 2 + [1] * (L - 2), [4] * (L - 1) + [5]], dtype=torch.int32)
    out = causal_conv1d_fn(x, weight, bias, ids, states, activation="silu")
    wide = [leaf(t.double()) for t in leaves]
    rows = []
    for b, first in enumerate((2, L - 1)):
        head, rest = wide[0][b : b + 1].split([first, L - first], -1)
        before = oracle(head, wide[1], wide[2], wide[3][b : b + 1], "silu")[0]
        rows.append(torch.cat([before, oracle(rest, wide[1], wide[2], None, "silu")[0]], -1))
    exact = torch.cat(rows)
    assert close([out], [exact])
    assert close(gradients([out], leaves), gradients([exact], wide))


def update_oracle(x, state, weight, bias, activation, lengths):
    """out and the new state in fp64: one sequence, one token at a time."""
    x, state, weight = x.double(), state.double().clone(), weight.double()
    W, length, outs = weight.shape[1], state.shape[-1], []
    for b in range(len(x)):
        for t in range(x.shape[-1]):
            if lengths is None:
                window = torch.cat([state[b], x[b, :, t : t + 1]], -1)
                state[b] = window[:, 1:]
                window = window[:, length + 1 - W :]
            else:
                now = int(lengths[b]) + t
                past = [state[b, :, (now - back) % length] for back in range(W - 1, 0, -1)]
                window = torch.stack([*past, x[b, :, t]], -1)
                state[b, :, now % length] = x[b, :, t]
            z = (window * weight).sum(-1) + (0 if bias is None else bias.double())
            outs.append(F.silu(z) if activation else z)
    return torch.stack(outs).view(len(x), x.shape[-1], -1).mT, state


@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.bfloat16, True), (torch.float16, False), (torch.float32, True)])
@pytest.mark.parametrize("slots", [None, (5, 0, 3, 6)], ids=["all", "gather"])
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
    used = torch.arange(4) if slots is None else torch.tensor(slots)
    expected = state.double().clone()
    exact, expected[used] = update_oracle(x, state[used], weight, bias, activation, lengths)
    indices = None if slots is None else used.int()
    tokens = x if T else x[..., 0]
    out = causal_conv1d_update(tokens, state, weight, bias, activation, lengths, indices)
    assert (out.shape, out.dtype) == (tokens.shape, dtype)
    assert same_layout(out, tokens) or T is None
    assert accuracy.close(out, exact if T else exact[..., 0])
    assert torch.equal(state.double(), expected), "in place, and no other slot"


@pytest.mark.usefixtures("each_backend")
def test_update_with_padding():
    """Slot −1: zeros, and nothing is written."""
    torch.manual_seed(0)
    x, state, weight = torch.randn(4, D, 2), torch.randn(3, D, 5), torch.randn(D, 4)
    before = state.clone()
    out = causal_conv1d_update(x, state, weight, conv_state_indices=torch.tensor([1, -1, 0, -1], dtype=torch.int32))
    exact, after = update_oracle(x[[0, 2]], before[[1, 0]], weight, None, None, None)
    assert not out[[1, 3]].any()
    assert accuracy.close(out[[0, 2]], exact)
    assert torch.equal(state, torch.stack([after[1].float(), after[0].float(), before[2]]))


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


def test_varlen_states_of_nothing():
    assert torch.equal(causal_conv1d_varlen_states(torch.ones(0, 3), torch.tensor([0, 0]), 2), torch.zeros(1, 3, 2))
    assert causal_conv1d_varlen_states(torch.ones(4, 3), torch.tensor([0]), 2).shape == (0, 3, 2)


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
IDS = torch.zeros(B, L, dtype=torch.int32)
CU = torch.zeros(3, dtype=torch.int32)
ERRORS = [
    (causal_conv1d_fn, {"activation": "gelu"}, NotImplementedError,
     "causal_conv1d_fn: activation must be None, silu, or swish, got 'gelu'"),
    (causal_conv1d_update, {"activation": "relu"}, NotImplementedError,
     "causal_conv1d_update: activation must be None, silu, or swish, got 'relu'"),
    (causal_conv1d_fn, {"x": [1.0]}, TypeError, "causal_conv1d_fn: x must be a torch.Tensor, got list"),
    (causal_conv1d_fn, {"x": X[0]}, ValueError, "causal_conv1d_fn: x must be [B, D, L], got [5, 23]"),
    (causal_conv1d_fn, {"weight": WEIGHT.mT}, ValueError,
     "causal_conv1d: weight must be [5, W] with W at least 1, got [4, 5]"),
    (causal_conv1d_fn, {"initial_states": STATE.mT}, ValueError,
     "causal_conv1d: initial_state must be [2, 5, 3], got [2, 3, 5]"),
    (causal_conv1d_fn, {"seq_idx": IDS, "return_final_states": True}, ValueError,
     "causal_conv1d: seq_idx and output_final_state exclude each other"),
    (causal_conv1d_fn, {"return_final_states": True, "final_states_out": STATE[:1]}, ValueError,
     "causal_conv1d_fn: final_states_out must be [2, 5, 3], got [1, 5, 3]"),
    (causal_conv1d_fn, {"return_final_states": True, "final_states_out": STATE.half()}, TypeError,
     "causal_conv1d_fn: final_states_out must be float32 as x is, got float16"),
    (causal_conv1d_fn, {"return_final_states": True, "final_states_out": STATE.to("meta")}, ValueError,
     "causal_conv1d_fn: final_states_out must be on cpu as x is, got meta"),
    (causal_conv1d_update, {"x": X[0, 0]}, ValueError,
     "causal_conv1d_update: x must be [B, D] or [B, D, T], got [23]"),
    (causal_conv1d_update, {"conv_state": STATE[..., 1:]}, ValueError,
     "causal_conv1d_update: conv_state must be [slots, 5, length] with length at least 3, got [2, 5, 2]"),
    (causal_conv1d_varlen_states, {"x": None}, TypeError,
     "causal_conv1d_varlen_states: x must be a torch.Tensor, got NoneType"),
    (causal_conv1d_varlen_states, {"x": X}, ValueError,
     "causal_conv1d_varlen_states: x must be [total, D], got [2, 5, 23]"),
    (causal_conv1d_varlen_states, {"cu_seqlens": [0, 1]}, TypeError,
     "causal_conv1d_varlen_states: cu_seqlens must be a torch.Tensor, got list"),
    (causal_conv1d_varlen_states, {"cu_seqlens": CU.float()}, TypeError,
     "causal_conv1d_varlen_states: cu_seqlens must be int32 or int64, got float32"),
    (causal_conv1d_varlen_states, {"cu_seqlens": CU[:0]}, ValueError,
     "causal_conv1d_varlen_states: cu_seqlens must be [N + 1], got [0]"),
    (causal_conv1d_varlen_states, {"cu_seqlens": CU.to("meta")}, ValueError,
     "causal_conv1d_varlen_states: cu_seqlens must be on cpu as x is, got meta"),
    (causal_conv1d_varlen_states, {"state_len": 3.0}, TypeError,
     "causal_conv1d_varlen_states: state_len must be an int, got float"),
    (causal_conv1d_varlen_states, {"state_len": -1}, ValueError,
     "causal_conv1d_varlen_states: state_len must be at least 0, got -1"),
]  # fmt: skip
GOOD = {
    causal_conv1d_fn: {"x": X, "weight": WEIGHT},
    causal_conv1d_update: {"x": X[..., 0], "conv_state": STATE, "weight": WEIGHT},
    causal_conv1d_varlen_states: {"x": X[0].mT, "cu_seqlens": CU, "state_len": 3},
}


@pytest.mark.parametrize(("function", "changes", "error", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_errors(function, changes, error, message):
    function(**GOOD[function])
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        function(**{**GOOD[function], **changes})
