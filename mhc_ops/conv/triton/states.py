"""States and packing: final states, the gradient of initial states, and which sequence a token belongs to."""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .rows import filtered, load_filter, load_row, load_state, through_activation

TOKENS = 1024  # of a program that looks up sequences


# ids[t] = the sequence of t, −1 for tokens of none
@triton.jit(do_not_specialize=["L", "N", "halvings"])
def sequence_ids_kernel(bounds_ptr, ids_ptr, L, N, halvings, BLOCK_T: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    low = tl.zeros([BLOCK_T], tl.int32)  # bounds below `low` are at most t, those from `high` on are greater
    high = tl.zeros([BLOCK_T], tl.int32) + N + 1
    for _ in range(halvings):
        middle = (low + high) // 2
        open = low < high
        reached = tl.load(bounds_ptr + middle, mask=open, other=0).to(tl.int64) <= t
        low = tl.where(open & reached, middle + 1, low)
        high = tl.where(open & (reached == 0), middle, high)
    tl.store(ids_ptr + t, tl.where(low <= N, low - 1, -1), mask=t < L)


def sequence_ids(cu_seqlens: torch.Tensor, L: int) -> torch.Tensor:
    ids = torch.empty(L, dtype=torch.int32, device=cu_seqlens.device)
    N = cu_seqlens.shape[0] - 1
    launch(
        sequence_ids_kernel,
        (cdiv(L, TOKENS),),
        cu_seqlens,
        ids,
        L,
        N,
        (N + 1).bit_length(),
        BLOCK_T=TOKENS,
        num_warps=4,
    )
    return ids


# Where sequence b begins and ends in x
@triton.jit
def span(bounds_ptr, b, L):
    begin, end = b * 0, b * 0 + L
    if bounds_ptr is not None:
        begin = tl.load(bounds_ptr + b).to(tl.int64)
        end = tl.load(bounds_ptr + b + 1).to(tl.int64)
    return begin, end


# x at `time` of a sequence that begins at `begin`; before it, its initial state
@triton.jit
def at_time(x_ptr, x_row, state_ptr, b, begin, time, S, D, d, present):
    row = load_row(x_ptr + time * x_row + d, present & (time >= begin))
    if state_ptr is not None:
        row = tl.where(time >= begin, row, load_state(state_ptr, b, begin - time, S, D, d, present))
    return row


# final_state[b, s] = x[end − S + s], before the begin initial_state
@triton.jit(do_not_specialize=["L", "S"])
def final_state_kernel(x_ptr, bounds_ptr, state_ptr, final_ptr, L, D, x_batch, x_row, S, BLOCK_D: tl.constexpr):
    b, s = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin, end = span(bounds_ptr, b, L)
    x_ptr += b * x_batch if bounds_ptr is None else 0
    row = at_time(x_ptr, x_row, state_ptr, b, begin, end - S + s, S, D, d, d < D)
    tl.store(final_ptr + (b * S + s) * D + d, row.to(final_ptr.dtype.element_ty), mask=d < D)


def final_state(x, cu_seqlens, initial_state, final):
    N, S, D = final.shape
    block_d = configs.channels(D, device.of(x.device))
    launch(
        final_state_kernel,
        (N * S, cdiv(D, block_d)),
        x,
        cu_seqlens,
        initial_state,
        final,
        x.shape[1],
        D,
        x.stride(0),
        x.stride(1),
        S,
        BLOCK_D=block_d,
        num_warps=4,
    )


# dinitial_state[b, s] = Σ_k weight[k]·g[s − S + (W−1−k)·dilation], and dfinal_state where the sequence is so short that
# the final state still holds initial state
@triton.jit(do_not_specialize=["L", "dilation"])
def dinitial_state_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    bounds_ptr,
    state_ptr,
    dy_ptr,
    dfinal_ptr,
    dinitial_ptr,
    L,
    D,
    x_batch,
    x_row,
    dilation,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CUDA: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    S = (W - 1) * dilation
    b, s = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = d < D
    begin, end = span(bounds_ptr, b, L)
    if bounds_ptr is None:
        x_ptr += b * x_batch
        dy_ptr += b * L * D
    weight, bias = load_filter(weight_ptr, bias_ptr, d, in_row, W)
    total = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(W):
        t = begin + s - S + (W - 1 - k) * dilation
        present = in_row & (t >= begin) & (t < end)
        g = load_row(dy_ptr + t * D + d, present)
        if SILU:
            taps = ()
            for j in tl.static_range(W):
                time = t - (W - 1 - j) * dilation
                taps = taps + (at_time(x_ptr, x_row, state_ptr, b, begin, time, S, D, d, present),)
            g = through_activation(g, filtered(taps, weight, bias, W), SILU, CUDA)
        total += tl.where(present, weight[k] * g, 0.0)
    if dfinal_ptr is not None:
        shifted = s - (end - begin)
        total += load_row(dfinal_ptr + (b * S + shifted) * D + d, in_row & (shifted >= 0))
    tl.store(dinitial_ptr + (b * S + s) * D + d, total.to(dinitial_ptr.dtype.element_ty), mask=in_row)


def dinitial_state(x, weight, bias, cu_seqlens, initial_state, dy, dfinal_state, silu, dilation, dinitial):
    N, S, D = dinitial.shape
    block_d = configs.channels(D, device.of(x.device))
    launch(
        dinitial_state_kernel,
        (N * S, cdiv(D, block_d)),
        x,
        weight,
        bias,
        cu_seqlens,
        initial_state,
        dy,
        dfinal_state,
        dinitial,
        x.shape[1],
        D,
        x.stride(0),
        x.stride(1),
        dilation,
        W=weight.shape[1],
        SILU=silu,
        CUDA=device.of(x.device).kind == "cuda",
        BLOCK_D=block_d,
        num_warps=4,
    )
