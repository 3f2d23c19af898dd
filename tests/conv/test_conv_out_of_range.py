"""Boundaries, slots and lengths that no tensor has: nothing outside is read or written, the same in every backend."""

from functools import partial

import pytest
import torch

import mhc_ops
from mhc_ops.compat.causal_conv1d import causal_conv1d_varlen_states
from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import ConvCase

NAN = float("nan")
L, D, W = 9, 20, 3


def normals(device, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def among_nan(tensor, margin=7):
    """The tensor in the midst of NaN, and all of it: rows of the first dimension before and after."""
    whole = tensor.new_full((2 * margin + len(tensor), *tensor.shape[1:]), NAN)
    whole[margin : margin + len(tensor)] = tensor
    return whole[margin : margin + len(tensor)], whole


# what is given, what it counts as
BOUNDARIES = [
    ([-3, 2, 99], [0, 2, 9]), ([0, 4, 10], [0, 4, 9]), ([-9, -2], [0, 0]), ([10, 20, 30], [9, 9, 9]),
    ([0, 6, 3, 9], [0, 6, 6, 9]), ([7, 2, 8, 5], [7, 7, 8, 8]), ([0, 100, -100, 5], [0, 9, 9, 9]),
    ([-(2**31), 3, 2**31 - 1, 4], [0, 3, 9, 9]), ([2**31 - 1], [9]), ([-(2**63), 3, 2**40, 2**63 - 1], [0, 3, 9, 9]),
]  # fmt: skip


def bounds_of(boundaries):
    return torch.tensor(boundaries, dtype=torch.int32 if len(boundaries) % 2 else torch.int64)


def packed(where, boundaries):
    backend, device = where
    case = ConvCase(1, L, D, W, torch.float32, dilation=2, residual=True, places="cu_seqlens states")
    tensors = case.inputs(device) | {"cu_seqlens": bounds_of(boundaries).to(device)}
    (state,) = normals(device, (len(boundaries) - 1, D, (W - 1) * 2))
    tensors |= {name: among_nan(tensors[name][0])[0][None] for name in ("x", "residual")}
    tensors["initial_state"] = among_nan(state)[0]
    cotangents = accuracy.random_cotangents(case.subject, case.subject.run(tensors, backend))
    return {name: t.cpu() for name, t in accuracy.run(case.subject, tensors, backend, cotangents).items()}


@pytest.mark.parametrize(("given", "meant"), BOUNDARIES, ids=[str(given) for given, _ in BOUNDARIES])
def test_boundaries(given, meant, where):
    """A boundary counts as within 0 and L, and as no smaller than those before it. What no sequence has is padding."""
    results, expected, t = packed(where, given), packed(("reference", "cpu"), meant), torch.arange(L)
    padding = (t < meant[0]) | (t >= meant[-1])
    for name, one in results.items():
        torch.testing.assert_close(one, expected[name])
    assert not any(results[name][:, padding].any() for name in ("y", "dx", "dresidual"))


def test_varlen_states():
    x, _ = among_nan(*normals("cpu", (L, D)))
    for two in BOUNDARIES:
        states = [causal_conv1d_varlen_states(x, bounds_of(bounds), 4) for bounds in two]
        assert torch.equal(*states) and not states[0].isnan().any(), two


def test_nothing_is_written_outside(where):
    """The launchers themselves, on outputs amidst NaN."""
    backend, device = where
    if backend == "reference":
        pytest.skip("torch allocates its outputs")
    from mhc_ops.conv import triton as launchers

    x, weight, state = normals(device, (1, L, D), (D, W), (4, W - 1, D))
    bounds = torch.tensor([4, -2, 100, 3, 50], device=device)
    inputs = {"x": x, "weight": weight, "bias": None, "seq_idx": None, "cu_seqlens": bounds}
    inputs |= {"initial_state": state.mT, "silu": True, "dilation": 1}
    (y, dx), (last, dstate) = ([among_nan(torch.zeros_like(like)) for _ in range(2)] for like in (x, state))
    forward = {"y": y[0], "final_state": last[0].mT}  # channels side by side
    launchers.causal_conv1d_fwd(**inputs, residual=None, output_final_state=True, **forward)
    backward = {"dx": dx[0], "dweight": torch.empty_like(weight), "dinitial_state": dstate[0].mT}
    backward["dbias"] = x.new_empty(0)
    launchers.causal_conv1d_bwd(**inputs, dy=torch.ones_like(x), dfinal_state=last[0].mT.contiguous(), **backward)
    for inner, around in (y, last, dx, dstate):
        assert not inner.isnan().any() and around.isnan().sum() == around.numel() - inner.numel()


# which slots, which lengths, which of the sequences take part, the slot that is declared to be padding
UPDATES = [
    ([6, 1, -2, 3], None, [1, 3], -1), ([4, -1, 2, -5], None, [2], -1), ([2**31 - 1, -(2**31), 0, 1], None, [2, 3], -1),
    (None, [3, -1, 0, -(2**31)], [0, 2], -1), ([5, 1, 0, 2], [-1, -7, 8, 2], [2, 3], -1),
    ([-2, 4, 9, -9], [1, 2, 3, 4], [], -1), ([2, -7, 0, -7], None, [0, 2], -7), ([2, 1, 0, 1], [3, 1, 9, 2], [0, 2], 1),
]  # fmt: skip


@pytest.mark.parametrize(("slots", "lengths", "real", "pad_slot_id"), UPDATES, ids=str)
def test_update(slots, lengths, real, pad_slot_id, where):
    """A slot that is not there and a negative length are padding: y is zero even from NaN, and no state is touched."""
    backend, device = where
    for dtype, shape in ((torch.int32, (4, D)), (torch.int64, (4, 6, D))):
        x, weight, expected = normals(device, shape, (D, W), (4, D, 4))
        state, around = among_nan(expected)
        padding = [b for b in range(4) if b not in real]
        x[padding] = NAN

        def index(values, dtype=dtype):
            return None if values is None else torch.tensor(values, dtype=dtype, device=device)

        update = partial(mhc_ops.causal_conv1d_update, weight=weight, activation="silu", backend=backend)
        places = {"cache_seqlens": index(lengths), "conv_state_indices": index(slots), "pad_slot_id": pad_slot_id}
        y = update(x, state, **places)
        assert not y[padding].any()
        used = real if slots is None else [slots[b] for b in real]
        alone = expected[used]
        of_real = None if lengths is None else index([lengths[b] for b in real])
        assert torch.equal(y[real], update(x[real], alone, cache_seqlens=of_real))
        expected[used] = alone
        assert torch.equal(state, expected) and around.isnan().sum() == around.numel() - state.numel()


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
