"""The reference of decoding, token by token, against the whole sequence."""

from itertools import product

import pytest
import torch
from conv_oracle import conv

import mhc_ops

NAN = float("nan")


def update(*tensors, **options):
    return mhc_ops.causal_conv1d_update(*tensors, **options, backend="reference")


def inputs(B=2, L=9, D=5, W=4, dtype=torch.float64):
    """x, weight, bias"""
    generator = torch.Generator().manual_seed(0)
    shapes = (B, L, D), (D, W), (D,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


# T (None: [B, D]), a ring, slots, how much longer the state is than it must be, dilation, W
UPDATES = [
    (None, False, False, 0, 1, 4),
    (None, True, False, 0, 1, 4),
    (None, True, True, 3, 2, 3),
    (None, False, False, 2, 1, 1),
    (1, False, True, 2, 1, 4),
    (2, False, False, 0, 3, 2),
    (3, True, False, 0, 1, 4),
    (4, False, False, 1, 1, 3),
    (4, True, True, 1, 2, 3),
    (6, False, True, 0, 1, 3),
    (6, True, True, 1, 1, 3),
]


@pytest.mark.parametrize(("T", "ring", "with_slots", "extra", "dilation", "W"), UPDATES)
def test_update_is_the_whole_sequence(T, ring, with_slots, extra, dilation, W):
    """Bitwise, as is the state at the end; also for more tokens at once than the state is long."""
    B, L, D, length = 3, 12, 7, (W - 1) * dilation + extra
    slots = torch.tensor([4, 0, 2], dtype=torch.int32) if with_slots else None
    used = torch.arange(B) if slots is None else slots.long()
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, bias = inputs(B, L, D, W, dtype)
        state = torch.full((5 if with_slots else B, D, length), NAN, dtype=dtype)
        state[used] = 0
        tokens, options = [], {"activation": "silu", "dilation": dilation}
        for t in range(0, L, T or 1):
            places = {"cache_seqlens": torch.full((B,), t, dtype=torch.int32) if ring else None}
            places["conv_state_indices"] = slots
            y = update(x[:, t] if T is None else x[:, t : t + T], state, weight, bias, **options, **places)
            tokens.append(y[:, None] if T is None else y)
        assert torch.equal(torch.cat(tokens, 1), conv(x, weight, bias, **options))
        newest = torch.cat([torch.zeros(B, length, D, dtype=dtype), x], 1)[:, L:]
        if ring:  # time t is at t modulo length
            newest = newest[:, [(p - L) % length for p in range(length)]]
        assert torch.equal(state[used], newest.mT)
        assert state[[slot for slot in range(len(state)) if slot not in used]].isnan().all()


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("pad_slot_id", [-1, -7, 1])
def test_pad_slots(pad_slot_id, ring):
    """Zeros, even from NaN, and no state is touched; 1 is a slot like the others that is declared to be padding."""
    x, weight, bias = inputs(B=4, L=2)
    x[1] = x[3] = NAN
    state = torch.randn(3, 5, 4, dtype=torch.float64)
    before = state.clone()
    slots = torch.tensor([2, pad_slot_id, 0, pad_slot_id])
    lengths = torch.tensor([3, 1, 9, 2]) if ring else None
    y = update(x, state, weight, bias, conv_state_indices=slots, cache_seqlens=lengths, pad_slot_id=pad_slot_id)
    assert not y[[1, 3]].any()
    assert torch.equal(state[1], before[1])
    alone = before[[2, 0]]
    lengths = lengths[[0, 2]] if ring else None
    assert torch.equal(y[[0, 2]], update(x[[0, 2]], alone, weight, bias, cache_seqlens=lengths))
    assert torch.equal(state[[2, 0]], alone)


def test_update_of_little():
    for B, T, D in ((0, None, 5), (2, 0, 5), (2, None, 1), (2, 3, 0)):
        x = torch.randn(B, D) if T is None else torch.randn(B, T, D)
        state = torch.randn(B, D, 4)
        before = state.clone()
        assert update(x, state, torch.randn(D, 4)).shape == x.shape
        new = x[..., None] if T is None else x.mT
        assert torch.equal(state, torch.cat([before, new], -1)[..., new.shape[-1] :])


def test_update_carries_no_gradient():
    x, weight, bias = (t.requires_grad_() for t in inputs())
    state = torch.zeros(2, 5, 3, dtype=torch.float64)
    assert not update(x[:, 0], state, weight, bias).requires_grad
    assert not state.requires_grad


def test_meta():
    """Shapes and types alone, as torch has it for its own functions."""
    for shape, places in product(((3, 5), (3, 2, 5)), ((), ("cache_seqlens",), ("conv_state_indices",))):
        x, state = (torch.empty(s, device="meta", dtype=torch.bfloat16) for s in (shape, (3, 5, 4)))
        indices = {name: torch.empty(3, device="meta", dtype=torch.int32) for name in places}
        y = mhc_ops.causal_conv1d_update(x, state, torch.empty(5, 4, device="meta"), **indices)
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
