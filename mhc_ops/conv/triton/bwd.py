"""Causal conv1d, backward: one pass over x and dy. Each program sums over its tokens; a second kernel adds the sums in
order."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .states import fill_dinitial_state, packing
from .walk import (
    filtered,
    filtered_back,
    load_filter,
    load_id,
    load_row,
    partition_rows,
    piece_of,
    rows_before,
    through_activation,
    under_taps,
)


# dfinal_state[sequence] where the final state holds x[t], else 0
@triton.jit
def kept_in_final_state(dfinal_ptr, bounds_ptr, sequence, t, S, L, D, d, present):
    end = L
    if bounds_ptr is not None:
        end = tl.load(bounds_ptr + sequence + 1, mask=sequence >= 0, other=0)
    s = t - (end - S)
    return load_row(dfinal_ptr + (sequence * S + s) * D + d, present & (s >= 0))


class ConvAddresses(NamedTuple):
    """What a program reads and writes, at the first row of its piece. x_step, y_step: from one row to the next."""

    x_ptr: Any
    x_step: Any
    ids_ptr: Any
    bounds_ptr: Any
    state_ptr: Any
    dy_ptr: Any
    dfinal_ptr: Any
    dx_ptr: Any
    y_step: Any


# Go STEP rows on: g of these rows is added to the first SUMS sums, and dx of the rows W − 1 before them is stored
@triton.jit
def step_back(
    i,
    window,
    ids,
    before,
    sums,
    piece,
    at,
    weight,
    bias,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CUDA: tl.constexpr,
    SUMS: tl.constexpr,
    STEP: tl.constexpr,
):
    HAS_IDS: tl.constexpr = at.ids_ptr is not None
    rows, incoming = window, ()
    for r in tl.static_range(STEP):
        present = piece.in_row & (i + r < piece.left)
        rows = rows + (load_row(at.x_ptr + (i + r) * at.x_step, present),)
        incoming = incoming + (load_row(at.dy_ptr + (i + r) * at.y_step, present),)
        if HAS_IDS:
            ids = ids + (load_id(at.ids_ptr, piece.t + (i + r) * piece.dilation, piece.L),)
    gs = before
    for r in tl.static_range(STEP):
        time = piece.t + (i + r) * piece.dilation
        taps = under_taps(
            piece, rows=rows, ids=ids, r=r, state_ptr=at.state_ptr, bounds_ptr=at.bounds_ptr, t=time,
            HAS_IDS=HAS_IDS, W=W,
        )  # fmt: skip
        g = through_activation(incoming[r], filtered(taps, weight, bias, W), SILU, CUDA)
        if HAS_IDS:
            g = tl.where(ids[r + W - 1] >= 0, g, 0.0)
        gs = gs + (g,)
        if SUMS > 0:
            new_sums = ()
            for k in tl.static_range(SUMS):
                new_sums = new_sums + (sums[k] + (g * taps[k] if k < W else g),)
            sums = new_sums
        # the row W − 1 before this one is complete
        row = i + r - (W - 1)
        reached = ()
        for j in tl.static_range(W):
            g = gs[r + j]
            reached = reached + (tl.where(ids[r + j] == ids[r], g, 0.0) if HAS_IDS else g,)
        dx = filtered_back(reached, weight, W)
        present = piece.in_row & (row >= 0) & (row < piece.rows)
        if at.dfinal_ptr is not None:
            sequence = ids[r].to(tl.int64) if HAS_IDS else piece.sequence
            known, time = present & (sequence >= 0), piece.t + row * piece.dilation
            dx += kept_in_final_state(
                dfinal_ptr=at.dfinal_ptr, bounds_ptr=at.bounds_ptr, sequence=sequence, t=time,
                S=(W - 1) * piece.dilation, L=piece.L, D=piece.D, d=piece.d, present=known,
            )  # fmt: skip
        tl.store(at.dx_ptr + row * at.y_step, dx.to(at.dx_ptr.dtype.element_ty), mask=present)
    return rows[STEP:], ids[STEP:], gs[STEP:], sums


# g[t] = dy[t], with SiLU dy[t]·σ(z)(1 + z(1 − σ(z)));  0 at padding
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
    CUDA: tl.constexpr,
    SUMS: tl.constexpr,  # W, and one more with a bias
    EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    piece = piece_of(L=L, D=D, rows_each=rows_each, ranges=ranges, dilation=dilation, EVEN_D=EVEN_D, BLOCK_D=BLOCK_D)
    b, t, d, in_row = piece.sequence, piece.t, piece.d, piece.in_row
    wide, by = t.to(tl.int64), dilation.to(tl.int64)
    x_ptr += b * x_batch + wide * x_row + d
    dy_ptr += b * L * D + wide * D + d
    dx_ptr += b * L * D + wide * D + d
    x_step, y_step = by * x_row, by * D
    if ids_ptr is not None:
        ids_ptr += b * L
    weight, bias = load_filter(weight_ptr, bias_ptr, d, in_row, W)
    window, ids = rows_before(
        piece, x_ptr=x_ptr, x_step=x_step, ids_ptr=ids_ptr, state_ptr=state_ptr, PACKED=bounds_ptr is not None, W=W
    )
    at = ConvAddresses(
        x_ptr=x_ptr, x_step=x_step, ids_ptr=ids_ptr, bounds_ptr=bounds_ptr, state_ptr=state_ptr, dy_ptr=dy_ptr,
        dfinal_ptr=dfinal_ptr, dx_ptr=dx_ptr, y_step=y_step,
    )  # fmt: skip
    before, sums = (), ()
    for j in tl.static_range(W - 1):
        before = before + (tl.zeros([BLOCK_D], tl.float32),)
    for k in tl.static_range(SUMS):
        sums = sums + (tl.zeros([BLOCK_D], tl.float32),)
    for i in tl.range(0, rows_each, STEP, num_stages=STAGES):
        window, ids, before, sums = step_back(
            i=i, window=window, ids=ids, before=before, sums=sums, piece=piece, at=at, weight=weight, bias=bias,
            W=W, SILU=SILU, CUDA=CUDA, SUMS=SUMS, STEP=STEP,
        )  # fmt: skip
    # dx of the last rows takes g of the W − 1 rows after them, which belong to the sums of the next range
    step_back(
        i=rows_each, window=window, ids=ids, before=before, sums=sums, piece=piece, at=at, weight=weight, bias=bias,
        W=W, SILU=SILU, CUDA=CUDA, SUMS=0, STEP=W - 1,
    )  # fmt: skip
    for k in tl.static_range(SUMS):
        tl.store(partials_ptr + (piece.number * SUMS + k) * D + d, sums[k], mask=in_row)


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


def add_partials(*, partials: Tensor, streams: int, dweight: Tensor, dbias: Tensor | None) -> None:
    """Adds partials [streams·pieces, W or W + 1, D] up to dweight [streams·D, W] and dbias [streams·D]."""
    pieces, count, D = partials.shape
    tile = configs.sums(device.of(partials.device))
    launch(
        causal_conv1d_sums_kernel,
        (count * cdiv(D, tile.block_d), streams),
        partials_ptr=partials,
        dweight_ptr=dweight,
        dbias_ptr=dbias,
        pieces=pieces // streams,
        D=D,
        W=dweight.shape[1],
        SUMS=count,
        BLOCK_P=tile.rows,
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )


def causal_conv1d_bwd(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    dilation: int,
    dy: Tensor,
    dfinal_state: Tensor | None,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    dinitial_state: Tensor,
) -> None:
    B, L, D = x.shape
    ids, bounds = (seq_idx, None) if cu_seqlens is None else packing(cu_seqlens, L)
    dfinal = None if dfinal_state is None else dfinal_state.transpose(1, 2).contiguous()  # channels side by side
    if dinitial_state.numel():
        fill_dinitial_state(
            x=x,
            weight=weight,
            bias=bias,
            seq_idx=seq_idx,
            bounds=bounds,
            initial_state=initial_state,
            dy=dy,
            dfinal=dfinal,
            silu=silu,
            dilation=dilation,
            dinitial_state=dinitial_state,
        )
    if not x.numel():
        dweight.zero_()
        dbias.zero_()
        return
    W = weight.shape[1]
    with_states = dfinal_state is not None or (bounds is not None and initial_state is not None)
    kernel = configs.Kernel.BACKWARD if ids is None else configs.Kernel.BACKWARD_WITH_IDS
    if with_states:
        kernel = configs.Kernel.BACKWARD_WITH_STATES
    pieces = partition_rows(x, kernel=kernel, sequences=B, L=L, D=D, W=W, dilation=dilation)
    count = W if bias is None else W + 1
    partials = torch.empty((pieces.total, count, D), dtype=torch.float32, device=x.device)
    launch(
        causal_conv1d_bwd_kernel,
        (pieces.programs,),
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        ids_ptr=ids,
        bounds_ptr=bounds,
        state_ptr=initial_state,
        dy_ptr=dy,
        dfinal_ptr=dfinal,
        dx_ptr=dx,
        partials_ptr=partials,
        L=L,
        D=D,
        x_batch=x.stride(0),
        x_row=x.stride(1),
        dilation=dilation,
        W=W,
        SILU=silu,
        CUDA=device.of(x.device).kind == "cuda",
        SUMS=count,
        **pieces.arguments(D),
    )
    add_partials(partials=partials, streams=1, dweight=dweight, dbias=None if bias is None else dbias)
