"""The reference of the convolution against one token and one tap at a time, in fp64."""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from conv_oracle import CASES, IDS, PADDED, Case, calls, conv, gradients

import mhc_ops
from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import FINAL, ConvCase

NAN = float("nan")


def assert_right(case, dtype=torch.float64):
    """Outputs and all gradients, those through the final state included, are one rounding of their types from fp64."""
    reference, oracle = calls(case)
    tensors = case.inputs(dtype)
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(o.shape, generator=generator).to(dtype) for o in reference(**tensors)]
    outputs, grads = gradients(reference, tensors, cotangents)
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    expected, exact = gradients(oracle, wide, [cotangent.double() for cotangent in cotangents])
    assert {output.dtype for output in (*outputs, *grads.values())} == {dtype}
    assert all(accuracy.close(one, other) for one, other in zip(outputs, expected)), case
    assert {name for name in exact if not accuracy.close(grads[name], exact[name])} == set(), case


def test_every_option():
    for case in CASES:
        assert_right(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_once(dtype):
    for places in ({"state": True}, {"ids": IDS}, {"B": 1, "cu": PADDED, "state": True}):
        assert_right(Case(residual=True, **places), dtype)


SMALL = Case(B=1, L=5, D=2, W=3, dilation=2, residual=True)
SMALLER = Case(B=1, L=4, D=2, W=2, residual=True)
# SiLU is smooth at 0, where a filter that starts at zero is.
ZEROS = [("x", "initial_state"), ("weight", "bias"), ("x", "weight", "bias", "residual")]


@pytest.mark.parametrize(
    ("case", "zeros"),
    [
        (replace(SMALL, B=2, L=3, state=True), [()]),
        (replace(SMALL, state=True, cu=(0, 1, 1, 4)), [()]),
        (replace(SMALL, ids=((0, 0, -1, 0, 1),)), [()]),
        (replace(SMALL, state=True, ids=((0, 1, 0, 0, 1),)), [()]),
        (replace(SMALLER, L=3, residual=False), ZEROS),
        (replace(SMALLER, L=3, state=True), ZEROS),
        (replace(SMALLER, state=True, cu=(0, 1, 3)), ZEROS),
        (replace(SMALLER, ids=((0, 0, -1, 1),)), ZEROS),
    ],
    ids=str,
)
def test_gradcheck(case, zeros):
    reference, _ = calls(case)
    for zero in zeros:
        tensors = {name: torch.zeros_like(t) if name in zero else t for name, t in case.inputs().items()}
        leaves = [tensor.requires_grad_() for tensor in tensors.values()]

        def call(*values, names=tuple(tensors)):
            return reference(**dict(zip(names, values)))

        assert torch.autograd.gradcheck(call, leaves)
        assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("W", range(1, 9))
def test_any_of_the_outputs_may_be_unused(W):
    types, unused = (torch.bfloat16, torch.float16, torch.float32), ("y", "final_state")
    for places, dtype, D, name in product(FINAL, types, (20, 64), unused):
        case = ConvCase(1, 9, D, W, dtype, dilation=1 + W // 7, places=places, unused=(name,))
        rows = accuracy.measure(case, "reference", "cpu")
        assert all(row.passed for row in rows), rows


def derivatives(function, z):
    """function(z) and its first two derivatives, elementwise"""
    leaf = z.clone().requires_grad_()
    y = function(leaf)
    (slope,) = torch.autograd.grad(y, leaf, torch.ones_like(y), create_graph=True)
    (bend,) = torch.autograd.grad(slope, leaf, torch.ones_like(slope))
    return y.detach(), slope.detach(), bend


def test_silu_of_any_number():
    """Up to the largest that there is, twice differentiated."""
    for dtype in (torch.float32, torch.float64):
        positive = [0, 1e-30, 1, 20, 100, 1e8, torch.finfo(dtype).max]
        z = torch.tensor([sign * number for sign in (-1.0, 1.0) for number in positive], dtype=dtype)
        results = derivatives(lambda z: conv(z[None, None], z.new_ones(len(z), 1), activation="silu")[0, 0], z)
        for one, exact in zip(results, derivatives(F.silu, z.double())):
            torch.testing.assert_close(one, exact.to(dtype))


@pytest.mark.parametrize("places", [{"ids": ((0,) * 4 + (1,) * 5,)}, {"cu": (0, 4, 9), "state": True}], ids=str)
def test_nan_stays_in_its_sequence(places):
    """Forward and in the gradients of everything that has one per sequence."""
    case = Case(B=1, residual=True, **places)
    reference, _ = calls(case)
    for bad, good in ((slice(0, 4), slice(4, 9)), (slice(4, 9), slice(0, 4))):
        tensors = case.inputs()
        clean, dclean = gradients(reference, tensors)
        tensors["x"][:, bad] = NAN
        outputs, dx = gradients(reference, tensors)
        assert outputs[0][:, bad].isnan().all()
        assert torch.equal(outputs[0][:, good], clean[0][:, good])
        assert torch.equal(dx["x"][:, good], dclean["x"][:, good])
        assert torch.equal(dx["residual"], dclean["residual"])
        if case.state:
            other = int(bad.start == 0)
            assert torch.equal(outputs[1][other], clean[1][other])
            assert torch.equal(dx["initial_state"][other], dclean["initial_state"][other])


def test_nan_of_a_state_stays_in_the_sequence_of_token_0():
    case = Case(B=2, W=8, ids=((0,) * 4 + (1,) * 5, (-1,) + (0,) * 8), state=True)
    tensors, options = case.inputs(), case.options()
    clean = conv(**tensors, **options)
    tensors["initial_state"][:] = NAN
    y = conv(**tensors, **options)
    assert y[0, :4].isnan().all()
    assert torch.equal(y[0, 4:], clean[0, 4:])
    assert torch.equal(y[1], clean[1]), "it is padding's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_pieces_have_the_bits_of_the_whole(dtype):
    for D, activation in product((1, 7, 65), (None, "silu")):
        case = Case(L=41, D=D, W=3, dilation=2, state=True, activation=activation)
        x, weight, bias, state = case.inputs(dtype).values()
        options = {**case.options(), "output_final_state": True}
        whole, last = conv(x, weight, bias, initial_state=state, **options)
        pieces = []
        for piece in x.split([1, 0, 2, 5, 3, 30], 1):
            y, state = conv(piece, weight, bias, initial_state=state, **options)
            pieces.append(y)
        assert torch.equal(torch.cat(pieces, 1), whole)
        assert torch.equal(state, last)
        rows = [conv(x[b : b + 1], weight, bias, **case.options()) for b in range(case.B)]
        assert torch.equal(torch.cat(rows), conv(x, weight, bias, **case.options())), "whatever the batch"


def test_packed_is_a_loop_over_sequences():
    case = Case(B=1, L=17, cu=(0, 6, 6, 7, 15), W=3, dilation=2, residual=True, state=True)
    tensors, options = case.inputs(), {"activation": "silu", "dilation": 2, "output_final_state": True}

    def packed(dtype, **tensors):
        return conv(**tensors, **options, cu_seqlens=torch.tensor(case.cu, dtype=dtype))

    def one_by_one(x, residual, initial_state, **filter):
        results = [
            conv(x=x[:, a:e], residual=residual[:, a:e], initial_state=initial_state[i : i + 1], **filter, **options)
            for i, (a, e) in enumerate(pairwise(case.cu))
        ]
        padding = torch.zeros_like(x[:, case.cu[-1] :])
        return torch.cat([y for y, _ in results] + [padding], 1), torch.cat([last for _, last in results])

    expected, exact = gradients(one_by_one, tensors)
    for dtype in (torch.int32, torch.int64):
        outputs, grads = gradients(partial(packed, dtype), tensors)
        assert all(torch.equal(one, other) for one, other in zip(outputs, expected))
        assert all(accuracy.close(grads[name], exact[name]) for name in exact)


@pytest.mark.parametrize("places", [{}, {"ids": IDS}, {"B": 1, "cu": PADDED}], ids=str)
def test_more_dilation_than_tokens(places):
    """Taps that are all before the first token take no memory."""
    case = Case(residual=True, **places)
    options = case.options()
    far, near = (
        gradients(lambda dilation=dilation, **t: (conv(**t, **{**options, "dilation": dilation}),), case.inputs())
        for dilation in (2**40, case.L)
    )
    assert torch.equal(far[0][0], near[0][0])
    assert all(torch.equal(far[1][name], near[1][name]) for name in near[1])


@pytest.mark.parametrize("case", [Case(state=True), Case(ids=IDS), Case(B=1, cu=PADDED, state=True)], ids=str)
def test_meta(case):
    """Shapes and types alone, as torch has it for its own functions."""
    reference, _ = calls(case)
    expected = reference(**case.inputs(torch.bfloat16))
    tensors = {name: tensor.to("meta") for name, tensor in case.inputs(torch.bfloat16).items()}
    options = {name: o.to("meta") if isinstance(o, torch.Tensor) else o for name, o in case.options().items()}
    outputs = conv(**tensors, **options, output_final_state=case.ids is None)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert [(o.shape, o.dtype, o.stride()) for o in outputs] == [(o.shape, o.dtype, o.stride()) for o in expected]


def test_any_layout_and_nothing_is_modified():
    case = Case(residual=True, state=True)
    tensors = case.inputs()
    expected = conv(**tensors, **case.options(), output_final_state=True)
    strided = {name: torch.stack([t, t], -1)[..., 0] for name, t in tensors.items()}
    channels_first = {**tensors, "x": tensors["x"].mT.contiguous().mT}
    before = {name: t.clone() for name, t in tensors.items()}
    for other in (strided, channels_first):
        for one, two in zip(conv(**other, **case.options(), output_final_state=True), expected):
            assert torch.equal(one, two)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    assert expected[1].stride(1) == 1, "a state has its channels side by side"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("places", [{"B": 1}, {"B": 2}, {"B": 1, "cu": (0, 4, 9)}], ids=str)
def test_final_state_is_a_tensor_of_its_own(places, dtype):
    """It keeps nothing else in memory, and decoding goes on in it, in place, before the backward of y."""
    case = Case(**places)
    x, weight, bias = (tensor.requires_grad_() for tensor in case.inputs(dtype).values())
    y, state = conv(x, weight, bias, **case.options(), output_final_state=True)
    assert state.untyped_storage().nbytes() == state.numel() * state.element_size()
    assert state.stride(1) == 1
    expected = torch.autograd.grad(y.sum() + state.sum(), (x, weight, bias), retain_graph=True)
    token = x[0, : len(state)].detach()
    mhc_ops.causal_conv1d_update(token, state, weight, bias, activation="silu", backend="reference")
    assert torch.equal(state[..., -1], token)
    assert all(map(torch.equal, torch.autograd.grad(y.sum() + state.sum(), (x, weight, bias)), expected))


def test_autocast_changes_nothing():
    case = Case(residual=True, state=True)
    tensors = case.inputs(torch.float32)
    plain = conv(**tensors, **case.options())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(conv(**tensors, **case.options()), plain)
