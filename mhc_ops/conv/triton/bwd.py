"""Causal conv1d, backward: one pass over x and dy; the sums over tokens are kept per program and added in order."""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .rows import cut, filtered, filtered_back, load_filter, load_id, load_row, rows_before, under_taps, walk
from .states import dinitial_state as fill_dinitial_state
from .states import sequence_ids, through_activation


# dfinal_state[sequence] where the final state holds x[t], else 0
@triton.jit
def kept_in_final_state(dfinal_ptr, bounds_ptr, sequence, t, S, L, D, d, present):
    end = L
    if bounds_ptr is not None:
        end = tl.load(bounds_ptr + sequence + 1, mask=sequence >= 0, other=0).to(tl.int32)
    s = t - (end - S)
    return load_row(dfinal_ptr, sequence * S + s, D, d, present & (s >= 0))


# g[t] = dy[t], behind SiLU dy[t]·σ(z)(1 + z(1 − σ(z)));  0 at padding
# dx[t] = Σ_k weight[k]·g[t + (W−1−k)·dilation], and dfinal_state where the final state holds x[t]
# partials[piece, k] = Σ_{t in piece} g[t]·x[t − (W−1−k)·dilation];  partials[piece, W] = Σ g[t]
@triton.jit(do_not_specialize=["L", "rows_each", "ranges", "dilation"])
def causal_conv1d_bwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ids_ptr,
    bounds_ptr,
    state_ptr,
    dy_ptr,
    dfinal_ptr,
    dx_ptr,
    partials_ptr,
    L,
    D,
    x_batch,
    x_row,
    rows_each,
    ranges,
    dilation,
    W: tl.constexpr,
    SILU: tl.constexpr,
    SUMS: tl.constexpr,  # W, and one more with a bias
    EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    HAS_IDS: tl.constexpr = ids_ptr is not None
    d, piece, b, phase, first, last, count = walk(L, D, rows_each, ranges, dilation, BLOCK_D)
    in_row = d < D if not EVEN_D else d >= 0
    x_ptr += b * x_batch
    dy_ptr += b * L * D
    dx_ptr += b * L * D
    if HAS_IDS:
        ids_ptr += b * L
    weight, bias = load_filter(weight_ptr, bias_ptr, d, in_row, W)
    window, ids = rows_before(
        x_ptr, x_row, ids_ptr, state_ptr, b, phase, first, dilation, L, D, d, in_row, bounds_ptr is not None, W
    )
    # dx of a row takes the g of W − 1 rows behind it, so the walk goes that far past its last row
    before, sums = (), ()
    for j in tl.static_range(W - 1):
        before = before + (tl.zeros([BLOCK_D], tl.float32),)
    for k in tl.static_range(SUMS):
        sums = sums + (tl.zeros([BLOCK_D], tl.float32),)
    for i in tl.range(first, last + W - 1, STEP, num_stages=STAGES):
        rows, all_ids, incoming = window, ids, ()
        for r in tl.static_range(STEP):
            t = phase + (i + r) * dilation
            present = in_row & (i + r < count)
            rows = rows + (load_row(x_ptr, t, x_row, d, present),)
            incoming = incoming + (load_row(dy_ptr, t, D, d, present),)
            if HAS_IDS:
                all_ids = all_ids + (load_id(ids_ptr, t, L),)
        gs = before
        for r in tl.static_range(STEP):
            t = phase + (i + r) * dilation
            taps = under_taps(rows, all_ids, r, state_ptr, bounds_ptr, t, dilation, D, d, in_row, HAS_IDS, W)
            g = through_activation(incoming[r], filtered(taps, weight, bias, W), SILU)
            if HAS_IDS:
                g = tl.where(all_ids[r + W - 1] >= 0, g, 0.0)
            gs = gs + (g,)
            own = tl.where(i + r < last, g, 0.0)
            new_sums = ()
            for k in tl.static_range(SUMS):
                new_sums = new_sums + (sums[k] + (own * taps[k] if k < W else own),)
            sums = new_sums
            # the row W − 1 before this one is complete
            u = i + r - (W - 1)
            t = phase + u * dilation
            reached = ()
            for j in tl.static_range(W):
                g = gs[r + j]
                reached = reached + (tl.where(all_ids[r + j] == all_ids[r], g, 0.0) if HAS_IDS else g,)
            dx = filtered_back(reached, weight, W)
            present = in_row & (u >= first) & (u < last)
            if dfinal_ptr is not None:
                sequence = all_ids[r].to(tl.int64) if HAS_IDS else b
                known = present & (sequence >= 0)
                dx += kept_in_final_state(dfinal_ptr, bounds_ptr, sequence, t, (W - 1) * dilation, L, D, d, known)
            tl.store(dx_ptr + t.to(tl.int64) * D + d, dx.to(dx_ptr.dtype.element_ty), mask=present)
        window = rows[STEP:]
        ids = all_ids[STEP:]
        before = gs[STEP:]
    for k in tl.static_range(SUMS):
        tl.store(partials_ptr + (piece * SUMS + k) * D + d, sums[k], mask=in_row)


# dweight[d, k] = Σ_piece partials[piece, k, d];  dbias[d] = Σ_piece partials[piece, W, d], of each stream
@triton.jit(do_not_specialize=["pieces"])
def causal_conv1d_sums_kernel(
    partials_ptr,
    dweight_ptr,
    dbias_ptr,
    pieces,  # of a stream
    D,
    W: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    k = tl.program_id(0) % SUMS
    d = tl.program_id(0) // SUMS * BLOCK_D + tl.arange(0, BLOCK_D)
    stream = tl.program_id(1).to(tl.int64)
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for first in range(0, pieces, BLOCK_P):
        piece = first + tl.arange(0, BLOCK_P)[:, None]
        at = ((stream * pieces + piece) * SUMS + k) * D + d[None, :]
        total += tl.load(partials_ptr + at, mask=(piece < pieces) & (d < D)[None, :], other=0.0)
    result = tl.sum(total, axis=0)
    channel = stream * D + d
    if k < W:
        tl.store(dweight_ptr + channel * W + k, result.to(dweight_ptr.dtype.element_ty), mask=d < D)
    elif dbias_ptr is not None:
        tl.store(dbias_ptr + channel, result.to(dbias_ptr.dtype.element_ty), mask=d < D)


def add_partials(partials, streams, dweight, dbias):
    """partials [streams·pieces, W or W + 1, D] to dweight [streams·D, W] and dbias [streams·D] or None."""
    pieces, count, D = partials.shape
    tile = configs.sums(device.kind(partials.device))
    launch(
        causal_conv1d_sums_kernel,
        (count * cdiv(D, tile.block_d), streams),
        partials,
        dweight,
        dbias,
        pieces // streams,
        D,
        W=dweight.shape[1],
        SUMS=count,
        BLOCK_P=tile.rows,
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )


def causal_conv1d_bwd(
    x,
    weight,
    bias,
    seq_idx,
    cu_seqlens,
    initial_state,
    dy,
    dfinal_state,
    silu,
    dilation,
    dx,
    dweight,
    dbias,
    dinitial_state,
):
    if dinitial_state.numel():
        places = (cu_seqlens, initial_state, dy, dfinal_state)
        fill_dinitial_state(x, weight, bias, *places, silu, dilation, dinitial_state)
    if not x.numel():
        dweight.zero_()
        dbias.zero_()
        return
    B, L, D = x.shape
    W = weight.shape[1]
    ids = seq_idx if cu_seqlens is None else sequence_ids(cu_seqlens, L)
    march, ranges, pieces, programs = cut(x, B, L, D, W, dilation, True, ids is not None)
    count = W if bias is None else W + 1
    partials = torch.empty((pieces, count, D), dtype=torch.float32, device=x.device)
    launch(
        causal_conv1d_bwd_kernel,
        (programs,),
        x,
        weight,
        bias,
        ids,
        cu_seqlens,
        initial_state,
        dy,
        dfinal_state,
        dx,
        partials,
        L,
        D,
        x.stride(0),
        x.stride(1),
        march.rows,
        ranges,
        dilation,
        W=W,
        SILU=silu,
        SUMS=count,
        EVEN_D=D % march.block_d == 0,
        BLOCK_D=march.block_d,
        STEP=march.step,
        STAGES=march.stages,
        num_warps=march.warps,
    )
    add_partials(partials, 1, dweight, None if bias is None else dbias)
