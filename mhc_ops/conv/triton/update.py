"""Causal conv1d, one decoding step: a few tokens per sequence, in place on the state."""

import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .walk import sigmoid


# y[t] = act(bias + Σ_k weight[k]·input[t − (W−1−k)·dilation]). Inputs before these T tokens are in the state: the one
# `back` tokens before the first of them at length − back or, in a ring, at (cache_seqlens − back) modulo length.
@triton.jit(do_not_specialize=["slots", "T", "length", "dilation", "pad_slot_id"])
def causal_conv1d_update_kernel(
    x_ptr,
    state_ptr,
    weight_ptr,
    bias_ptr,
    before_ptr,
    slots_ptr,
    y_ptr,
    slots,
    T,
    D,
    length,
    x_batch,
    x_row,
    x_channel,
    state_slot,
    state_row,
    state_channel,
    dilation,
    pad_slot_id,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CUDA: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = d < D
    none = b * 0  # in 64 bits: offsets are
    slot = b
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + b).to(tl.int64)
        in_use = (slot >= 0) & (slot < slots) & (slot != pad_slot_id)
    else:
        in_use = slot >= 0
    newest = none + length  # where the first of these tokens would be
    if before_ptr is not None:
        before = tl.load(before_ptr + b).to(tl.int64)
        in_use &= before >= 0
        newest = before % length
    written = in_row & in_use
    x_ptr += b * x_batch + d.to(tl.int64) * x_channel
    state_ptr += tl.where(in_use, slot, 0) * state_slot + d.to(tl.int64) * state_channel
    bias = tl.zeros([BLOCK_D], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + d, mask=in_row, other=0.0).to(tl.float32)
    for t in range(T):
        z = bias
        for k in tl.static_range(W):
            back = none + (W - 1 - k) * dilation - t  # how far the tap is before the first of these tokens
            at = newest - back
            if before_ptr is not None:
                at = tl.where(at < 0, at + length, at)
            weight = tl.load(weight_ptr + d.to(tl.int64) * W + k, mask=in_row, other=0.0).to(tl.float32)
            old = tl.load(state_ptr + at * state_row, mask=written & (back > 0), other=0.0)
            new = tl.load(x_ptr - back * x_row, mask=written & (back <= 0), other=0.0)
            z += weight * tl.where(back > 0, old, new).to(tl.float32)
        if SILU:
            z *= sigmoid(z, CUDA)
        y = tl.where(in_use, z, 0.0).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + (b * T + t) * D + d, y, mask=in_row)
    tl.debug_barrier()  # all threads read their taps before one writes the state
    if before_ptr is not None:
        for t in range(tl.maximum(T - length, 0), T):
            row = tl.load(x_ptr + (none + t) * x_row, mask=written, other=0.0)
            tl.store(state_ptr + (newest + t) % length * state_row, row, mask=written)
    else:
        for s in range(length):
            later = none + s + T
            old = tl.load(state_ptr + later * state_row, mask=written & (later < length), other=0.0)
            new = tl.load(x_ptr + (later - length) * x_row, mask=written & (later >= length), other=0.0)
            tl.store(state_ptr + (later - T) * state_row, tl.where(later < length, old, new), mask=written)


def causal_conv1d_update_(
    *,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    silu: bool,
    dilation: int,
    pad_slot_id: int,
    y: Tensor,
) -> None:
    if not x.numel():
        return
    B, D = x.shape[0], x.shape[-1]
    T, x_row = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    slots, _, length = conv_state.shape
    state_slot, state_channel, state_row = conv_state.stride()
    on = device.of(x.device)
    block_d = configs.channels(D, on)
    launch(
        causal_conv1d_update_kernel,
        (B, cdiv(D, block_d)),
        x_ptr=x,
        state_ptr=conv_state,
        weight_ptr=weight,
        bias_ptr=bias,
        before_ptr=cache_seqlens,
        slots_ptr=conv_state_indices,
        y_ptr=y,
        slots=slots,
        T=T,
        D=D,
        length=length,
        x_batch=x.stride(0),
        x_row=x_row,
        x_channel=x.stride(-1),
        state_slot=state_slot,
        state_row=state_row,
        state_channel=state_channel,
        dilation=dilation,
        pad_slot_id=pad_slot_id,
        W=weight.shape[1],
        SILU=silu,
        CUDA=on.kind == "cuda",
        BLOCK_D=block_d,
        num_warps=configs.UPDATE_WARPS,
    )
