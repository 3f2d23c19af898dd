"""Causal conv1d, forward."""

import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from . import configs
from .states import fill_final_state, packing
from .walk import filtered, load_filter, load_id, load_row, partition_rows, piece_of, rows_before, sigmoid, under_taps


# y[t] = act(bias + Σ_k weight[k]·x[t − (W−1−k)·dilation]) + residual[t];  0 at padding
@triton.jit(do_not_specialize=["L", "rows_each", "ranges", "dilation"])
def causal_conv1d_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    ids_ptr,
    bounds_ptr,
    state_ptr,
    y_ptr,
    L,
    D,
    x_batch,
    x_row,
    residual_batch,
    residual_row,
    rows_each,
    ranges,
    dilation,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CUDA: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    HAS_IDS: tl.constexpr = ids_ptr is not None
    piece = piece_of(L=L, D=D, rows_each=rows_each, ranges=ranges, dilation=dilation, EVEN_D=EVEN_D, BLOCK_D=BLOCK_D)
    b, t, d, in_row = piece.sequence, piece.t, piece.d, piece.in_row
    wide, by = t.to(tl.int64), dilation.to(tl.int64)
    x_ptr += b * x_batch + wide * x_row + d
    y_ptr += b * L * D + wide * D + d
    x_step, y_step, residual_step = by * x_row, by * D, by * residual_row
    if residual_ptr is not None:
        residual_ptr += b * residual_batch + wide * residual_row + d
    if HAS_IDS:
        ids_ptr += b * L
    weight, bias = load_filter(weight_ptr, bias_ptr, d, in_row, W)
    window, ids = rows_before(
        piece, x_ptr=x_ptr, x_step=x_step, ids_ptr=ids_ptr, state_ptr=state_ptr, PACKED=bounds_ptr is not None, W=W
    )
    for i in tl.range(0, rows_each, STEP, num_stages=STAGES):
        rows, all_ids = window, ids
        for r in tl.static_range(STEP):
            rows = rows + (load_row(x_ptr + (i + r) * x_step, in_row & (i + r < piece.rows)),)
            if HAS_IDS:
                all_ids = all_ids + (load_id(ids_ptr, t + (i + r) * dilation, L),)
        for r in tl.static_range(STEP):
            time = t + (i + r) * dilation
            taps = under_taps(
                piece, rows=rows, ids=all_ids, r=r, state_ptr=state_ptr, bounds_ptr=bounds_ptr, t=time,
                HAS_IDS=HAS_IDS, W=W,
            )  # fmt: skip
            y = filtered(taps, weight, bias, W)
            if SILU:
                y *= sigmoid(y, CUDA)
            present = in_row & (i + r < piece.rows)
            if residual_ptr is not None:
                y += load_row(residual_ptr + (i + r) * residual_step, present)
            if HAS_IDS:
                y = tl.where(all_ids[r + W - 1] >= 0, y, 0.0)
            tl.store(y_ptr + (i + r) * y_step, y.to(y_ptr.dtype.element_ty), mask=present)
        window = rows[STEP:]
        ids = all_ids[STEP:]


def causal_conv1d_fwd(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    dilation: int,
    output_final_state: bool,
    y: Tensor,
    final_state: Tensor,
) -> None:
    B, L, D = x.shape
    ids, bounds = (seq_idx, None) if cu_seqlens is None else packing(cu_seqlens, L)
    if output_final_state and final_state.numel():
        fill_final_state(x=x, bounds=bounds, initial_state=initial_state, final_state=final_state)
    if not x.numel():
        return
    W = weight.shape[1]
    plain = bounds is None or initial_state is None
    kernel = configs.Kernel.FORWARD if plain else configs.Kernel.FORWARD_WITH_STATES
    pieces = partition_rows(x, kernel=kernel, sequences=B, L=L, D=D, W=W, dilation=dilation)
    launch(
        causal_conv1d_fwd_kernel,
        (pieces.programs,),
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=bias,
        residual_ptr=residual,
        ids_ptr=ids,
        bounds_ptr=bounds,
        state_ptr=initial_state,
        y_ptr=y,
        L=L,
        D=D,
        x_batch=x.stride(0),
        x_row=x.stride(1),
        residual_batch=0 if residual is None else residual.stride(0),
        residual_row=0 if residual is None else residual.stride(1),
        dilation=dilation,
        W=W,
        SILU=silu,
        CUDA=device.of(x.device).kind == "cuda",
        **pieces.arguments(D),
    )
