"""The drop-in for the causal-conv1d package: bit for bit the functions of mhc_ops, which tests/conv holds to fp64."""

from itertools import pairwise

import pytest
import torch
from stack_results import assert_equal, gradients

import mhc_ops
from mhc_ops.compat import causal_conv1d as compat
from mhc_ops.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states

B, D, L = 2, 5, 23
LAYOUTS = ["channel-last", "channel-first"]


def ours(x, weight, bias=None, ids=None, initial=None, has_final=False, activation=None):
    """out [B, D, L] and, where wanted, the final states. swish is SiLU."""
    given = {"seq_idx": ids, "initial_state": initial, "output_final_state": has_final}
    result = mhc_ops.causal_conv1d(x.mT, weight, bias, activation=activation and "silu", **given)
    return (result[0].mT, result[1]) if has_final else (result.mT,)


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


# has_initial, has_final, has_bias, packed, activation; and b, d, length, W
FORMS = [(False, False, True, False, None), (True, False, False, False, "silu"), (False, True, True, False, "swish")]
FORMS += [(True, True, False, False, None), (False, False, True, True, "silu"), (True, False, False, True, "silu")]
SIZES = [(B, D, L, 4), (2, 7, 23, 5), (1, 1, 9, 2), (2, 3, 1, 8), (3, 8, 2, 1), (0, 4, 5, 3), (2, 4, 0, 3)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("has_initial", "has_final", "has_bias", "packed", "activation"), FORMS)
@pytest.mark.parametrize(("b", "d", "length", "W"), SIZES)
def test_fn(b, d, length, W, has_initial, has_final, has_bias, packed, activation, dtype, layout):
    """Widths and channels that the package refuses are here too, and sequences shorter than the filter. Packed with
    padding, id −1; initial states come before the first sequence of each row."""
    torch.manual_seed(0)
    x = leaf(sliced(layout, B=b, D=d, L=length, dtype=dtype))
    weight, bias = leaf(torch.randn(d, W)), leaf(torch.randn(d)) if has_bias else None
    initial = leaf(torch.randn(b, W - 1, d).to(dtype).mT) if has_initial else None
    ids = torch.tensor([0, 0, *[1] * (L - 5), -1, -1, -1], dtype=torch.int32)[:length].repeat(b, 1) if packed else None
    leaves = [leaf for leaf in (x, weight, bias, initial) if leaf is not None]
    out = causal_conv1d_fn(x, weight, bias, ids, initial, has_final, activation=activation)
    outputs, expected = out if has_final else (out,), ours(x, weight, bias, ids, initial, has_final, activation)
    assert {output.dtype for output in outputs} == {dtype} and is_dense(outputs[0], layout)
    assert not has_final or outputs[1].stride(1) == 1 or W == 1
    assert_equal(gradients(outputs, leaves), gradients(expected, leaves))


@pytest.mark.parametrize("layout", [*LAYOUTS, "every second token"])
def test_out_can_be_added_to_in_place(layout, each_backend):
    """The package's own test does this before its backward. out is contiguous where x has neither layout."""
    torch.manual_seed(0)
    x, weight = leaf(sliced(layout)), leaf(torch.randn(D, 4))
    out, final = causal_conv1d_fn(x, weight, return_final_states=True, activation="silu")
    assert is_dense(out, layout)
    out += torch.sigmoid(final).sum(-1, keepdim=True)
    exact, exact_final = ours(x, weight, has_final=True, activation="silu")
    exact = exact + torch.sigmoid(exact_final).sum(-1, keepdim=True)
    found, expected = (gradients([y], [x, weight]) for y in (out, exact))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_final_states_out(layout, each_backend):
    """A buffer is written to and returned; with gradients its memory, without a graph, so that it serves again."""
    torch.manual_seed(0)
    x, weight, buffer = sliced("channel-last"), torch.randn(D, 4), sliced(layout, L=3)
    strides, memory, leaves = buffer.stride(), buffer.data_ptr(), (leaf(x), leaf(weight))
    into_it = {"return_final_states": True, "final_states_out": buffer}
    assert causal_conv1d_fn(x, weight, **into_it)[1] is buffer and torch.equal(buffer, x[..., -3:])
    assert (buffer.stride(), buffer.data_ptr()) == (strides, memory)
    for _ in range(2):
        buffer.fill_(float("nan"))
        outputs = causal_conv1d_fn(*leaves, **into_it)
        assert outputs[1].data_ptr() == memory and not buffer.requires_grad
        assert torch.equal(buffer, x[..., -3:])
        assert_equal(gradients(outputs, leaves), gradients(ours(*leaves, has_final=True), leaves))
    kept = buffer.fill_(1).clone()
    out = causal_conv1d_fn(x, weight, final_states_out=buffer)  # ignored, as no state is asked for
    assert torch.equal(out, causal_conv1d_fn(x, weight)) and torch.equal(buffer, kept)


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
    assert states.dtype == dtype and states.stride() == torch.empty(5, state_len, D).mT.stride()
    assert not states.requires_grad
    assert torch.equal(causal_conv1d_varlen_states(torch.ones(0, 3), torch.tensor([0, 0]), 2), torch.zeros(1, 3, 2))
    assert causal_conv1d_varlen_states(torch.ones(4, 3), torch.tensor([0]), 2).shape == (0, 3, 2)


X, WEIGHT, STATE = torch.zeros(B, D, L), torch.zeros(D, 4), torch.zeros(B, D, 3)
CU = torch.zeros(3, dtype=torch.int32)
GOOD = {
    "causal_conv1d_fn": {"x": X, "weight": WEIGHT, "return_final_states": True},
    "causal_conv1d_update": {"x": X[..., 0], "conv_state": STATE, "weight": WEIGHT},
    "causal_conv1d_varlen_states": {"x": X[0].mT, "cu_seqlens": CU, "state_len": 3},
}
WRONG = [  # what the functions of mhc_ops refuse stands in tests/conv/test_conv_errors.py
    ("causal_conv1d_fn", "activation", NotImplementedError, ["gelu"]),
    ("causal_conv1d_fn", "x", TypeError, [[1.0]]),
    ("causal_conv1d_fn", "x", ValueError, [X[0]]),
    ("causal_conv1d_fn", "final_states_out", TypeError, [STATE.half()]),
    ("causal_conv1d_fn", "final_states_out", ValueError, [STATE[:1], STATE.to("meta")]),
    ("causal_conv1d_update", "activation", NotImplementedError, ["relu"]),
    ("causal_conv1d_update", "x", ValueError, [X[0, 0]]),
    ("causal_conv1d_update", "conv_state", ValueError, [STATE[..., 1:]]),
    ("causal_conv1d_varlen_states", "x", TypeError, [None]),
    ("causal_conv1d_varlen_states", "x", ValueError, [X]),
    ("causal_conv1d_varlen_states", "cu_seqlens", TypeError, [[0, 1], CU.float()]),
    ("causal_conv1d_varlen_states", "cu_seqlens", ValueError, [CU[:0], CU.to("meta")]),
    ("causal_conv1d_varlen_states", "state_len", TypeError, [3.0]),
    ("causal_conv1d_varlen_states", "state_len", ValueError, [-1]),
]


@pytest.mark.parametrize(("name", "argument", "error", "values"), WRONG)
def test_errors(name, argument, error, values):
    getattr(compat, name)(**GOOD[name])
    for value in values:
        with pytest.raises(error, match=f"^{name}: {argument} must be "):
            getattr(compat, name)(**{**GOOD[name], argument: value})
