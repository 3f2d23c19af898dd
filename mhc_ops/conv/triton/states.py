"""States and packing: final states, the gradient of initial states, where packed sequences begin and end.

A state [N, D, S] has its channels side by side: kernels see [N, S, D].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .walk import filtered, load_filter, load_id, load_row, load_state, through_activation

# A program finds the sequences of 512 tokens and compares them with 128 bounds at a time, one for each thread: 408
# instructions on sm_90, against 891 with 1024 tokens and 256 bounds.
TOKENS = 512
BOUNDS = 128


@triton.jit
def greater(one, other):
    return tl.maximum(one, other)


# bounds[i] = the greatest of cu_seqlens[0] to cu_seqlens[i], within 0 and L: they never decrease
# ids[t] = the sequence i of token t, bounds[i] ≤ t < bounds[i + 1]; −1 for padding
@triton.jit(do_not_specialize=["L", "N"])
def packing_kernel(given_ptr, bounds_ptr, ids_ptr, L, N, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr):
    first = tl.program_id(0) * BLOCK_T
    reached = tl.zeros([BLOCK_T], tl.int32)  # bounds at each token; those before `first` count as at `first`
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
    reached = tl.cumsum(reached, axis=0)  # bounds at or before each token
    t = first + tl.arange(0, BLOCK_T)
    tl.store(ids_ptr + t, tl.where(reached <= N, reached - 1, -1), mask=t < L)


def packing(cu_seqlens: Tensor, L: int) -> tuple[Tensor, Tensor]:
    """ids [L] and bounds [N + 1], as defined above the kernel."""
    ids = torch.empty(L, dtype=torch.int32, device=cu_seqlens.device)
    bounds = torch.empty(cu_seqlens.shape, dtype=torch.int32, device=cu_seqlens.device)
    launch(
        packing_kernel,
        (max(1, cdiv(L, TOKENS)),),
        given_ptr=cu_seqlens,
        bounds_ptr=bounds,
        ids_ptr=ids,
        L=L,
        N=cu_seqlens.shape[0] - 1,
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
        state = load_state(state_ptr, sequence=b, back=begin - time, S=S, D=D, d=d, present=present)
        row = tl.where(time >= begin, row, state)
    return row


# final_state[b, s] = x[end − S + s]; where that is before the begin, the initial state
@triton.jit(do_not_specialize=["L", "S"])
def final_state_kernel(x_ptr, bounds_ptr, state_ptr, final_ptr, L, D, x_batch, x_row, S, BLOCK_D: tl.constexpr):
    b, s = (tl.program_id(0) // S).to(tl.int64), tl.program_id(0) % S
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin, end = span(bounds_ptr, b, L)
    x_ptr += b * x_batch if bounds_ptr is None else 0
    row = at_time(
        x_ptr=x_ptr, x_row=x_row, state_ptr=state_ptr, b=b, begin=begin, time=end - S + s, S=S, D=D, d=d, present=d < D
    )
    tl.store(final_ptr + (b * S + s) * D + d, row.to(final_ptr.dtype.element_ty), mask=d < D)


def fill_final_state(*, x: Tensor, bounds: Tensor | None, initial_state: Tensor | None, final_state: Tensor) -> None:
    N, D, S = final_state.shape
    block_d = configs.channels(D, device.of(x.device))
    launch(
        final_state_kernel,
        (N * S, cdiv(D, block_d)),
        x_ptr=x,
        bounds_ptr=bounds,
        state_ptr=initial_state,
        final_ptr=final_state,
        L=x.shape[1],
        D=D,
        x_batch=x.stride(0),
        x_row=x.stride(1),
        S=S,
        BLOCK_D=block_d,
        num_warps=4,
    )


# dinitial_state[b, s] = Σ_k weight[k]·g[s − S + (W−1−k)·dilation], + dfinal_state[b, s − length] where s ≥ length: the
# final state of a sequence shorter than S holds a part of the initial one. With ids, only tokens of the sequence of
# token 0 count.
@triton.jit(do_not_specialize=["L", "dilation"])
def dinitial_state_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
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
    if ids_ptr is not None:
        ids_ptr += b * L
        own = load_id(ids_ptr, b * 0, L)
    weight, bias = load_filter(weight_ptr, bias_ptr, d, in_row, W)
    total = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(W):
        t = begin + s - S + (W - 1 - k) * dilation
        present = in_row & (t >= begin) & (t < end)
        if ids_ptr is not None:
            present &= (own >= 0) & (load_id(ids_ptr, t, L) == own)
        g = load_row(dy_ptr + t * D + d, present)
        if SILU:
            taps = ()
            for j in tl.static_range(W):
                time = t - (W - 1 - j) * dilation
                tap = at_time(
                    x_ptr=x_ptr, x_row=x_row, state_ptr=state_ptr, b=b, begin=begin, time=time, S=S, D=D, d=d,
                    present=present,
                )  # fmt: skip
                if ids_ptr is not None:
                    tap = tl.where(load_id(ids_ptr, tl.maximum(time, 0), L) == own, tap, 0.0)
                taps = taps + (tap,)
            g = through_activation(g, filtered(taps, weight, bias, W), SILU, CUDA)
        total += tl.where(present, weight[k] * g, 0.0)
    if dfinal_ptr is not None:
        shifted = s - (end - begin)
        total += load_row(dfinal_ptr + (b * S + shifted) * D + d, in_row & (shifted >= 0))
    tl.store(dinitial_ptr + (b * S + s) * D + d, total.to(dinitial_ptr.dtype.element_ty), mask=in_row)


def fill_dinitial_state(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    bounds: Tensor | None,
    initial_state: Tensor | None,
    dy: Tensor,
    dfinal: Tensor | None,
    silu: bool,
    dilation: int,
    dinitial_state: Tensor,
) -> None:
    """dfinal: [N, S, D]"""
    N, D, S = dinitial_state.shape
    block_d = configs.channels(D, device.of(x.device))
    launch(
        dinitial_state_kernel,
        (N * S, cdiv(D, block_d)),
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        ids_ptr=seq_idx,
        bounds_ptr=bounds,
        state_ptr=initial_state,
        dy_ptr=dy,
        dfinal_ptr=dfinal,
        dinitial_ptr=dinitial_state,
        L=x.shape[1],
        D=D,
        x_batch=x.stride(0),
        x_row=x.stride(1),
        dilation=dilation,
        W=weight.shape[1],
        SILU=silu,
        CUDA=device.of(x.device).kind == "cuda",
        BLOCK_D=block_d,
        num_warps=4,
    )
