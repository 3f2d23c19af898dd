"""The reference of the convolution against one token and one tap at a time, and what it alone promises."""

from dataclasses import replace

import pytest
import torch
from conv_oracle import CASES, IDS, PADDED, WITH_BOUNDS, WITH_IDS, Looping, assert_accurate

import mhc_ops
from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import CACHE, PLACES, ConvCase

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def test_every_option():
    for case in CASES:
        assert_accurate(case, "reference")


SMALL = Looping(1, 5, 2, W=3, dilation=2, residual=True)
SMALLER = Looping(1, 3, 2, W=2, residual=True)
# SiLU is smooth at 0, where a filter that starts at zero is.
ZEROS = [("x", "initial_state"), ("weight", "bias"), ("x", "weight", "bias", "residual")]
SHORT = ConvCase(1, 6, 3, 3, torch.float64, dilation=2, n=2, parameter_dtype=torch.float64)
# At zero, an eps of 1e-5 bends too sharply for finite differences.
SHORTER = replace(SHORT, L=3, D=2, W=2, dilation=1, residual=True, norm_eps=0.1)
RANDOM = [
    replace(SMALL, B=2, L=3, places="states"), replace(SMALL, places=WITH_BOUNDS, cu=(0, 1, 1, 4)), SHORT,
    replace(SMALL, places="seq_idx", ids=((0, 0, -1, 0, 1),)), replace(SHORT, residual=True),
    replace(SMALL, places=WITH_IDS, ids=((0, 1, 0, 0, 1),)),
]  # fmt: skip
AT_ZERO = [replace(SMALLER, residual=False), replace(SMALLER, places="states")]
AT_ZERO += [replace(SMALLER, L=4, places=WITH_BOUNDS, cu=(0, 1, 3))]
AT_ZERO += [replace(SMALLER, L=4, places="seq_idx", ids=((0, 0, -1, 1),))]
GRADCHECK = [*((case, [()]) for case in RANDOM), *((case, ZEROS) for case in AT_ZERO)]
GRADCHECK += [(SHORTER, [("x",), ("weight",), ("x", "gamma", "weight")])]


@pytest.mark.parametrize(("case", "zeros"), GRADCHECK, ids=str)
def test_gradcheck(case, zeros):
    for zero in zeros:
        tensors = {name: torch.zeros_like(t) if name in zero else t for name, t in case.inputs().items()}
        leaves = {name: t.requires_grad_() for name, t in tensors.items() if t.is_floating_point()}

        def call(*values, names=tuple(leaves), tensors=tensors):
            return case.subject.call(**tensors | dict(zip(names, values)), backend="reference")

        assert torch.autograd.gradcheck(call, list(leaves.values()))
        assert torch.autograd.gradgradcheck(call, list(leaves.values()))


MORE = [Looping(residual=True), Looping(ids=IDS), Looping(1, cu=PADDED), ConvCase(2, 9, 5, n=2)]


@pytest.mark.parametrize("case", MORE, ids=["plain", "seq_idx", "cu_seqlens", "short_conv"])
def test_more_dilation_than_tokens(case):
    """Taps that are all before the first token take no memory."""
    far, near = (accuracy.run_case(replace(case, dilation=d), "reference").results for d in (2**40, case.L))
    assert far.keys() == near.keys() and all(torch.equal(far[name], near[name]) for name in near)


EVERY = [ConvCase(1, 9, 5, places=places, residual=True) for places in ("", *PLACES)]
EVERY += [ConvCase(1, 9, 5, places=CACHE), ConvCase(2, 9, 5, n=2)]
EVERY += [ConvCase(3, L, 5, places=p, update=True) for L in (1, 2) for p in ("", "ring", "slots", "drafts")]


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_meta_and_autocast(case):
    """On meta, shapes and types alone, as torch has it for its own functions. Autocast changes nothing."""
    for dtype in (torch.bfloat16, torch.float32):
        tensors = replace(case, dtype=dtype).inputs()
        expected = accuracy.run(case.subject, tensors, "reference")
        for name, output in case.subject.run({name: t.to("meta") for name, t in tensors.items()}, None).items():
            same = [(o.shape, o.dtype, o.stride()) for o in (output, expected[name])]
            assert output.is_meta and same[0] == same[1], name
        with torch.autocast("cpu", torch.bfloat16):
            found = accuracy.run(case.subject, tensors, "reference")
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("B", "places"), [(1, "states"), (2, "states"), (1, "cu_seqlens states")])
def test_final_state_is_a_tensor_of_its_own(B, places, dtype):
    """It keeps nothing else in memory, and decoding goes on in it, in place, before the backward of y."""
    tensors = Looping(B, places=places, state=False, dtype=dtype).inputs()
    leaves = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in tensors.items()}
    y, state = mhc_ops.causal_conv1d(**leaves, activation="silu", output_final_state=True, backend="reference")
    assert state.untyped_storage().nbytes() == state.numel() * state.element_size()
    wanted = [leaves[name] for name in ("x", "weight", "bias")]
    expected = torch.autograd.grad(y.sum() + state.sum(), wanted, retain_graph=True)
    token = leaves["x"][0, : len(state)].detach()
    y_of_token = mhc_ops.causal_conv1d_update(token, state, *wanted[1:], activation="silu", backend="reference")
    assert torch.equal(state[..., -1], token) and not y_of_token.requires_grad
    assert all(map(torch.equal, torch.autograd.grad(y.sum() + state.sum(), wanted), expected))


def test_update_of_little():
    for B, T, D in ((0, None, 5), (2, 0, 5), (2, None, 1), (2, 3, 0)):
        x = torch.randn(B, D) if T is None else torch.randn(B, T, D)
        state = torch.randn(B, D, 4)
        before = state.clone()
        y = mhc_ops.causal_conv1d_update(x, state, torch.randn(D, 4).requires_grad_(), backend="reference")
        assert y.shape == x.shape and not y.requires_grad and not state.requires_grad
        new = x[..., None] if T is None else x.mT
        assert torch.equal(state, torch.cat([before, new], -1)[..., new.shape[-1] :])
