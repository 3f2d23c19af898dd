"""States and packing: final states, the gradient of initial states, where packed sequences begin and end."""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .rows import filtered, load_filter, load_row, load_state, through_activation

TOKENS = 512  # of a program that looks up sequences
BOUNDS = 128  # that it looks at at once, one per thread: 408 instructions on sm_90, 891 with 1024 tokens and 256 bounds


@triton.jit
def greater(one, other):
    return tl.maximum(one, other)


# bounds[i] = the greatest of cu_seqlens[0] to cu_seqlens[i], within 0 and L: in order, whatever is given
# ids[t] = the sequence of t, i where bounds[i] ≤ t < bounds[i + 1], −1 for tokens of none
@triton.jit(do_not_specialize=["L", "N"])
def packing_kernel(given_ptr, bounds_ptr, ids_ptr, L, N, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    first = tl.program_id(0) * BLOCK_T
    reached = tl.zeros([BLOCK_T], tl.int32)  # how many bounds are at a token; those before `first` are at `first`
    greatest = 0
    for begin in range(0, N + 1, BLOCK_N):
        i = begin + tl.arange(0, BLOCK_N)
        given = tl.load(given_ptr + i, mask=i <= N, other=0)
        within = tl.minimum(tl.maximum(given, 0), L).to(tl.int32)
        bound = tl.maximum(tl.associative_scan(within, 0, greater), greatest)
        greatest = tl.max(bound, axis=0)
        tl.store(bounds_ptr + i, bound, mask=(i <= N) & (first == 0))
        at = tl.maximum(bound - first, 0)
        reached += tl.histogram(at, BLOCK_T, mask=(i <= N) & (at < BLOCK_T))
    reached = tl.cumsum(reached, axis=0)  # how many are at most t
    t = first + tl.arange(0, BLOCK_T)
    tl.store(ids_ptr + t, tl.where(reached <= N, reached - 1, -1), mask=t < L)


def packing(cu_seqlens: torch.Tensor, L: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [L] and bounds [N + 1], of which every value is a place in x."""
    ids = torch.empty(L, dtype=torch.int32, device=cu_seqlens.device)
    bounds = torch.empty(cu_seqlens.shape, dtype=torch.int32, device=cu_seqlens.device)
    launch(
        packing_kernel,
        (max(1, cdiv(L, TOKENS)),),
        cu_seqlens,
        bounds,
        ids,
        L,
        cu_seqlens.shape[0] - 1,
        BLOCK_T=TOKENS,
        BLOCK_N=BOUNDS,
        num_warps=4,
    )
    return ids, bounds


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


def final_state(x, bounds, initial_state, final):
    N, S, D = final.shape
    block_d = configs.channels(D, device.of(x.device))
    launch(
        final_state_kernel,
        (N * S, cdiv(D, block_d)),
        x,
        bounds,
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


def dinitial_state(x, weight, bias, bounds, initial_state, dy, dfinal_state, silu, dilation, dinitial):
    N, S, D = dinitial.shape
    block_d = configs.channels(D, device.of(x.device))
    launch(
        dinitial_state_kernel,
        (N * S, cdiv(D, block_d)),
        x,
        weight,
        bias,
        bounds,
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
