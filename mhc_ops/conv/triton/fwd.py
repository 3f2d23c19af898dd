"""Causal conv1d, forward."""

import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from . import configs
from .states import fill_final_state, packing
from .walk import filtered, load_filter, load_id, load_row, partition_rows, rows_before, sigmoid, under_taps, walk


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
    d, _, b, t, rows_here, _ = walk(L=L, D=D, rows_each=rows_each, ranges=ranges, dilation=dilation, BLOCK_D=BLOCK_D)
    in_row = d < D if not EVEN_D else d >= 0
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
        x_ptr=x_ptr, x_step=x_step, ids_ptr=ids_ptr, state_ptr=state_ptr, sequence=b, t=t, dilation=dilation, L=L, D=D,
        d=d, in_row=in_row, PACKED=bounds_ptr is not None, W=W,
    )  # fmt: skip
    for i in tl.range(0, rows_each, STEP, num_stages=STAGES):
        rows, all_ids = window, ids
        for r in tl.static_range(STEP):
            rows = rows + (load_row(x_ptr + (i + r) * x_step, in_row & (i + r < rows_here)),)
            if HAS_IDS:
                all_ids = all_ids + (load_id(ids_ptr, t + (i + r) * dilation, L),)
        for r in tl.static_range(STEP):
            time = t + (i + r) * dilation
            taps = under_taps(
                rows=rows, ids=all_ids, r=r, state_ptr=state_ptr, bounds_ptr=bounds_ptr, t=time, dilation=dilation, D=D,
                d=d, in_row=in_row, HAS_IDS=HAS_IDS, W=W,
            )  # fmt: skip
            y = filtered(taps, weight, bias, W)
            if SILU:
                y *= sigmoid(y, CUDA)
            present = in_row & (i + r < rows_here)
            if residual_ptr is not None:
                y += load_row(residual_ptr + (i + r) * residual_step, present)
            if HAS_IDS:
                y = tl.where(all_ids[r + W - 1] >= 0, y, 0.0)
            tl.store(y_ptr + (i + r) * y_step, y.to(y_ptr.dtype.element_ty), mask=present)
        window = rows[STEP:]
        ids = all_ids[STEP:]


def causal_conv1d_fwd(
    *,
    x,
    weight,
    bias,
    residual,
    seq_idx,
    cu_seqlens,
    initial_state,
    silu,
    dilation,
    output_final_state,
    y,
    final_state,
):
    B, L, D = x.shape
    ids, bounds = (seq_idx, None) if cu_seqlens is None else packing(cu_seqlens, L)
    if output_final_state and final_state.numel():
        fill_final_state(x=x, bounds=bounds, initial_state=initial_state, final_state=final_state)
    if not x.numel():
        return
    W = weight.shape[1]
    plain = bounds is None or initial_state is None
    kernel = configs.Kernel.FORWARD if plain else configs.Kernel.FORWARD_WITH_STATES
    partition = partition_rows(x, kernel=kernel, sequences=B, L=L, D=D, W=W, dilation=dilation)
    launch(
        causal_conv1d_fwd_kernel,
        (partition.programs,),
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
        **partition.arguments(D),
    )
