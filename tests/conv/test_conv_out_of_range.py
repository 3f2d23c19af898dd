"""Boundaries, slots and lengths that no tensor has: nothing outside is read or written, the same in every backend."""

from functools import partial
from itertools import product

import pytest
import torch

import mhc_ops
from mhc_ops.compat.causal_conv1d import causal_conv1d_varlen_states

NAN = float("nan")
L, D, W = 9, 20, 3


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def normals(device, *shapes):
    return [normal(*shape).to(device) for shape in shapes]


def among_nan(tensor, device, margin=7):
    """The tensor in the midst of NaN, and all of it: rows of the first dimension before and after."""
    whole = torch.full((2 * margin + len(tensor), *tensor.shape[1:]), NAN, device=device)
    whole[margin : margin + len(tensor)] = tensor
    return whole[margin : margin + len(tensor)], whole


# what is given, what it counts as
BOUNDARIES = [
    ([-3, 2, 99], [0, 2, 9]),
    ([0, 4, 10], [0, 4, 9]),
    ([-9, -2], [0, 0]),
    ([10, 20, 30], [9, 9, 9]),
    ([0, 6, 3, 9], [0, 6, 6, 9]),
    ([4, 1, 0], [4, 4, 4]),
    ([7, 2, 8, 5], [7, 7, 8, 8]),
    ([0, 100, -100, 5], [0, 9, 9, 9]),
    ([-(2**31), 3, 2**31 - 1, 4], [0, 3, 9, 9]),
    ([2**31 - 1], [9]),
]


def packed(where, boundaries, dtype):
    """Outputs and gradients; tokens and states lie amidst NaN."""
    backend, device = where
    x, residual = (among_nan(normal(L, D, seed=seed), device)[0][None] for seed in (0, 1))
    state = among_nan(normal(len(boundaries) - 1, D, (W - 1) * 2), device)[0]
    leaves = [x, normal(D, W).to(device), normal(D).to(device), residual, state]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    x, weight, bias, residual, state = leaves
    bounds = torch.tensor(boundaries, dtype=dtype, device=device)
    options = {"activation": "silu", "dilation": 2, "output_final_state": True, "backend": backend}
    states = {"initial_state": state, "cu_seqlens": bounds}
    outputs = mhc_ops.causal_conv1d(x, weight, bias, residual=residual, **states, **options)
    cotangents = [normal(*output.shape, seed=2).to(device) for output in outputs]
    return [tensor.detach().cpu() for tensor in (*outputs, *torch.autograd.grad(outputs, leaves, cotangents))]


@pytest.mark.parametrize(("given", "meant"), BOUNDARIES, ids=[str(given) for given, _ in BOUNDARIES])
def test_boundaries(given, meant, where):
    """A boundary counts as within 0 and L, and as no smaller than those before it. What no sequence has is padding."""
    dtype = torch.int32 if len(given) % 2 else torch.int64
    results, expected = packed(where, given, dtype), packed(("reference", "cpu"), meant, dtype)
    for one, other in zip(results, expected):
        torch.testing.assert_close(one, other)
    y, _, dx, _, _, dresidual, _ = results
    t = torch.arange(L)
    padding = (t < meant[0]) | (t >= meant[-1])
    assert not any(tensor[:, padding].any() for tensor in (y, dx, dresidual))


def test_boundaries_of_64_bits(where):
    backend, device = where
    x, weight = normals(device, (1, L, D), (D, W))
    run = partial(mhc_ops.causal_conv1d, x, weight, backend=backend)
    given = torch.tensor([-(2**63), 3, 2**40, 2**63 - 1], device=device)
    assert torch.equal(run(cu_seqlens=given), run(cu_seqlens=torch.tensor([0, 3, 9, 9], device=device)))


def test_nothing_is_written_outside(where):
    """The launchers themselves, on outputs amidst NaN."""
    backend, device = where
    if backend == "reference":
        pytest.skip("torch allocates its outputs")
    from mhc_ops.conv import triton as launchers

    inputs = {
        "x": normal(1, L, D).to(device),
        "weight": normal(D, W).to(device),
        "bias": None,
        "seq_idx": None,
        "cu_seqlens": torch.tensor([4, -2, 100, 3, 50], device=device),
        "initial_state": normal(4, W - 1, D).to(device).mT,
        "silu": True,
        "dilation": 1,
    }
    y, around_y = among_nan(torch.zeros(1, L, D), device)
    last, around_last = among_nan(torch.zeros(4, W - 1, D), device)
    launchers.causal_conv1d_fwd(**inputs, residual=None, output_final_state=True, y=y, final_state=last.mT)
    dx, around_dx = among_nan(torch.zeros(1, L, D), device)
    dstate, around_dstate = among_nan(torch.zeros(4, W - 1, D), device)
    launchers.causal_conv1d_bwd(
        **inputs,
        dy=torch.ones_like(y),
        dfinal_state=last.mT.contiguous(),
        dx=dx,
        dweight=torch.empty_like(inputs["weight"]),
        dbias=y.new_empty(0),
        dinitial_state=dstate.mT,  # channels side by side
    )
    for inner, around in (y, around_y), (last, around_last), (dx, around_dx), (dstate, around_dstate):
        assert not inner.isnan().any()
        assert around.isnan().sum() == around.numel() - inner.numel()


# which slots, which lengths, which of the sequences take part
UPDATES = [
    ([6, 1, -2, 3], None, [1, 3]),
    ([4, -1, 2, -5], None, [2]),
    ([2**31 - 1, -(2**31), 0, 1], None, [2, 3]),
    (None, [3, -1, 0, -(2**31)], [0, 2]),
    ([5, 1, 0, 2], [-1, -7, 8, 2], [2, 3]),
    ([-2, 4, 9, -9], [1, 2, 3, 4], []),
]


@pytest.mark.parametrize(("slots", "lengths", "real"), UPDATES, ids=str)
def test_update(slots, lengths, real, where):
    """A slot that is not there and a negative length are padding: y is zero, and no state is touched."""
    backend, device = where
    for dtype, shape in ((torch.int32, (4, D)), (torch.int64, (4, 6, D))):
        x, weight, expected = normals(device, shape, (D, W), (4, D, 4))
        state, around = among_nan(expected, device)

        def index(values, dtype=dtype):
            return None if values is None else torch.tensor(values, dtype=dtype, device=device)

        update = partial(mhc_ops.causal_conv1d_update, weight=weight, activation="silu", backend=backend)
        y = update(x, state, cache_seqlens=index(lengths), conv_state_indices=index(slots))
        assert not y[[b for b in range(4) if b not in real]].any()
        used = real if slots is None else [slots[b] for b in real]
        alone = expected[used]
        of_real = None if lengths is None else index([lengths[b] for b in real])
        assert torch.equal(y[real], update(x[real], alone, cache_seqlens=of_real))
        expected[used] = alone
        assert torch.equal(state, expected)
        assert around.isnan().sum() == around.numel() - state.numel()


def test_update_of_lengths_past_32_bits(where):
    """Only the length modulo that of the ring matters. And pad_slot_id is about conv_state_indices alone."""
    backend, device = where
    x, weight, state = normals(device, (3, D), (D, W), (3, D, 4))
    other = state.clone()
    update = partial(mhc_ops.causal_conv1d_update, x, weight=weight, backend=backend)
    assert torch.equal(update(conv_state=state.clone(), pad_slot_id=1), update(conv_state=state.clone()))
    y = update(conv_state=state, cache_seqlens=torch.tensor([2**63 - 1, 2**40 + 2, 5], device=device))
    assert torch.equal(y, update(conv_state=other, cache_seqlens=torch.tensor([3, 2, 1], device=device)))
    assert torch.equal(state, other)


def test_varlen_states():
    x, _ = among_nan(normal(L, D), "cpu")
    for dtype, two in product((torch.int32, torch.int64), BOUNDARIES):
        states = [causal_conv1d_varlen_states(x, torch.tensor(bounds, dtype=dtype), 4) for bounds in two]
        assert torch.equal(*states) and not states[0].isnan().any(), two
