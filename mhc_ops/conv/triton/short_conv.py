"""ShortConv: RMSNorm of each stream, causal convolution, SiLU and residual, with nothing stored in between.

Forward: one kernel computes inv_rms, a second walks as the convolution does and normalises each row it loads. Backward:
dx of a token needs a mean over its whole stream, which no program sees. A first launch stores the sum over each block
of channels, a second adds these, a third writes dx. With v = x·inv_rms:

  z[t] = Σ_k weight[k]·gamma·v[t − (W−1−k)·dilation]    g = dy·silu'(z)    dv[t] = Σ_k weight[k]·g[t + (W−1−k)·dilation]
  dx = inv_rms·(gamma·dv − v·mean_d(gamma·dv·v)), + dy    dgamma = Σ_t dv·v    dweight[k] = gamma·Σ_t g[t]·v[t − …]
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from . import configs
from .bwd import add_partials
from .walk import (
    Pieces,
    filtered,
    filtered_back,
    load_filter,
    load_row,
    partition_rows,
    piece_of,
    sigmoid,
    through_activation,
)


# inv_rms[row] = rsqrt(Σ_d x[row, d]² / D + norm_eps)
@triton.jit(do_not_specialize=["rows"])
def inv_rms_kernel(x_ptr, inv_rms_ptr, rows, D, norm_eps, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    squares = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for begin in range(0, D, BLOCK_D):
        d = begin + tl.arange(0, BLOCK_D)[None, :]
        x = load_row(x_ptr + row[:, None] * D + d, (row < rows)[:, None] & (d < D))
        squares += x * x
    tl.store(inv_rms_ptr + row, tl.rsqrt(tl.sum(squares, axis=1) / D + norm_eps), mask=row < rows)


# The W − 1 normalised rows before the piece
@triton.jit
def normed_before(piece, x_ptr, inv_rms_ptr, x_step, inv_step, W: tl.constexpr):
    window = ()
    for j in tl.static_range(W - 1):
        back = W - 1 - j
        time = piece.t - back * piece.dilation
        there = (time >= 0) & (time < piece.L)
        x = load_row(x_ptr - back * x_step, piece.in_row & there)
        window = window + (x * load_row(inv_rms_ptr - back * inv_step, there),)
    return window


# weight[k]·gamma for each k
@triton.jit
def scaled(weight, gamma, W: tl.constexpr):
    products = ()
    for k in tl.static_range(W):
        products = products + (weight[k] * gamma,)
    return products


# y[t] = silu(z[t]), + x[t]
@triton.jit(do_not_specialize=["L", "rows_each", "ranges", "dilation"])
def short_conv_fwd_kernel(
    x_ptr,
    gamma_ptr,
    weight_ptr,
    inv_rms_ptr,
    y_ptr,
    B,
    L,
    n,
    D,
    rows_each,
    ranges,
    dilation,
    W: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CUDA: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    piece = piece_of(L=L, D=D, rows_each=rows_each, ranges=ranges, dilation=dilation, EVEN_D=EVEN_D, BLOCK_D=BLOCK_D)
    d, in_row, stream, b = piece.d, piece.in_row, piece.sequence // B, piece.sequence % B
    token = (b * L + piece.t) * n + stream
    inv_step = dilation.to(tl.int64) * n
    x_step = inv_step * D
    x_ptr += token * D + d
    y_ptr += token * D + d
    inv_rms_ptr += token
    gamma = load_row(gamma_ptr + stream * D + d, in_row)
    weight, none = load_filter(weight_ptr + stream * D * W, None, d, in_row, W)
    weight = scaled(weight, gamma, W)
    window = normed_before(piece, x_ptr=x_ptr, inv_rms_ptr=inv_rms_ptr, x_step=x_step, inv_step=inv_step, W=W)
    for i in tl.range(0, rows_each, STEP, num_stages=STAGES):
        rows, raw = window, ()
        for r in tl.static_range(STEP):
            there = i + r < piece.rows
            x = load_row(x_ptr + (i + r) * x_step, in_row & there)
            raw = raw + (x,)
            rows = rows + (x * load_row(inv_rms_ptr + (i + r) * inv_step, there),)
        for r in tl.static_range(STEP):
            y = filtered(rows[r : r + W], weight, none, W)
            y *= sigmoid(y, CUDA)
            if RESIDUAL:
                y += raw[r]
            tl.store(y_ptr + (i + r) * x_step, y.to(y_ptr.dtype.element_ty), mask=in_row & (i + r < piece.rows))
        window = rows[STEP:]


class ShortConvAddresses(NamedTuple):
    """What a program reads and writes, at the first row of its piece, and the steps from one row to the next."""

    x_ptr: Any
    inv_rms_ptr: Any
    dy_ptr: Any
    dots_ptr: Any
    dx_ptr: Any
    x_step: Any
    inv_step: Any
    dots_step: Any


# Go STEP rows on. Without dx_ptr, Σ_d gamma·dv·v of the rows W − 1 before them is stored, over this block of channels;
# with it, their dx, and g of these rows is added to the sums unless SUMS is 0.
@triton.jit
def short_step_back(
    i,
    window,
    before,
    before_dy,
    sums,
    piece,
    at,
    weight,
    of_taps,
    none,
    gamma,
    W: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CUDA: tl.constexpr,
    SUMS: tl.constexpr,
    STEP: tl.constexpr,
):
    rows, incoming, gs = window, before_dy, before
    for r in tl.static_range(STEP):
        there = i + r < piece.left
        x = load_row(at.x_ptr + (i + r) * at.x_step, piece.in_row & there)
        rows = rows + (x * load_row(at.inv_rms_ptr + (i + r) * at.inv_step, there),)
        incoming = incoming + (load_row(at.dy_ptr + (i + r) * at.x_step, piece.in_row & there),)
    for r in tl.static_range(STEP):
        taps = rows[r : r + W]
        g = through_activation(incoming[r + W - 1], filtered(taps, of_taps, none, W), True, CUDA)
        gs = gs + (g,)
        # the row W − 1 before this one is complete
        row = i + r - (W - 1)
        mine = (row >= 0) & (row < piece.rows)
        v, dv = taps[0], filtered_back(gs[r : r + W], weight, W)
        if at.dx_ptr is None:
            dot = tl.sum(tl.where(piece.in_row, gamma * dv * v, 0.0), axis=0)
            tl.store(at.dots_ptr + row * at.dots_step, dot, mask=mine)
        else:
            if SUMS > 0:
                new_sums = ()
                for k in tl.static_range(W):
                    new_sums = new_sums + (sums[k] + g * taps[k],)
                sums = new_sums + (sums[W],)
            sums = sums[:W] + (sums[W] + tl.where(mine, dv * v, 0.0),)
            dot = load_row(at.dots_ptr + row * at.inv_step, mine)
            dx = load_row(at.inv_rms_ptr + row * at.inv_step, mine) * (gamma * dv - v * (dot / piece.D))
            if RESIDUAL:
                dx += incoming[r]
            tl.store(at.dx_ptr + row * at.x_step, dx.to(at.dx_ptr.dtype.element_ty), mask=piece.in_row & mine)
    return rows[STEP:], gs[STEP:], incoming[STEP:], sums


# Without dx_ptr: dots[t, block] = Σ_{d in block} gamma·dv[t]·v[t]. With it, dots[t] is given, their sum; dx, and
# partials[piece, k] = gamma·Σ_{t in piece} g[t]·v[t − (W−1−k)·dilation];  partials[piece, W] = Σ dv[t]·v[t]
@triton.jit(do_not_specialize=["L", "rows_each", "ranges", "dilation"])
def short_conv_bwd_kernel(
    x_ptr,
    gamma_ptr,
    weight_ptr,
    inv_rms_ptr,
    dy_ptr,
    dots_ptr,
    dx_ptr,
    partials_ptr,
    B,
    L,
    n,
    D,
    rows_each,
    ranges,
    dilation,
    W: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CUDA: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    piece = piece_of(L=L, D=D, rows_each=rows_each, ranges=ranges, dilation=dilation, EVEN_D=EVEN_D, BLOCK_D=BLOCK_D)
    d, in_row, stream, b = piece.d, piece.in_row, piece.sequence // B, piece.sequence % B
    token = (b * L + piece.t) * n + stream
    inv_step = dilation.to(tl.int64) * n
    x_step, dots_step = inv_step * D, inv_step * tl.cdiv(D, BLOCK_D)
    x_ptr += token * D + d
    dy_ptr += token * D + d
    inv_rms_ptr += token
    if dx_ptr is None:
        dots_ptr += token * tl.cdiv(D, BLOCK_D) + tl.program_id(0) % tl.cdiv(D, BLOCK_D)
    else:
        dots_ptr += token
        dx_ptr += token * D + d
    gamma = load_row(gamma_ptr + stream * D + d, in_row)
    weight, none = load_filter(weight_ptr + stream * D * W, None, d, in_row, W)
    of_taps = scaled(weight, gamma, W)
    window = normed_before(piece, x_ptr=x_ptr, inv_rms_ptr=inv_rms_ptr, x_step=x_step, inv_step=inv_step, W=W)
    at = ShortConvAddresses(
        x_ptr=x_ptr, inv_rms_ptr=inv_rms_ptr, dy_ptr=dy_ptr, dots_ptr=dots_ptr, dx_ptr=dx_ptr,
        x_step=x_step, inv_step=inv_step, dots_step=dots_step,
    )  # fmt: skip
    before, before_dy, sums = (), (), ()
    for j in tl.static_range(W - 1):
        before = before + (tl.zeros([BLOCK_D], tl.float32),)
        before_dy = before_dy + (tl.zeros([BLOCK_D], tl.float32),)
    for k in tl.static_range(W + 1):
        sums = sums + (tl.zeros([BLOCK_D], tl.float32),)
    for i in tl.range(0, rows_each, STEP, num_stages=STAGES):
        window, before, before_dy, sums = short_step_back(
            i=i, window=window, before=before, before_dy=before_dy, sums=sums, piece=piece, at=at, weight=weight,
            of_taps=of_taps, none=none, gamma=gamma, W=W, RESIDUAL=RESIDUAL, CUDA=CUDA, SUMS=W + 1, STEP=STEP,
        )  # fmt: skip
    window, before, before_dy, sums = short_step_back(
        i=rows_each, window=window, before=before, before_dy=before_dy, sums=sums, piece=piece, at=at, weight=weight,
        of_taps=of_taps, none=none, gamma=gamma, W=W, RESIDUAL=RESIDUAL, CUDA=CUDA, SUMS=0, STEP=W - 1,
    )  # fmt: skip
    if dx_ptr is not None:
        for k in tl.static_range(W + 1):
            total = sums[k] * gamma if k < W else sums[k]
            tl.store(partials_ptr + (piece.number * (W + 1) + k) * D + d, total, mask=in_row)


# dots[row] = Σ_block partials[row, block]
@triton.jit(do_not_specialize=["rows"])
def add_dots_kernel(partials_ptr, dots_ptr, rows, blocks, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    block = tl.arange(0, BLOCK_B)[None, :]
    there = (row < rows)[:, None] & (block < blocks)
    total = tl.sum(load_row(partials_ptr + row[:, None] * blocks + block, there), axis=1)
    tl.store(dots_ptr + row, total, mask=row < rows)


def short_conv_fwd(
    *,
    x: Tensor,
    gamma: Tensor,
    weight: Tensor,
    norm_eps: float,
    dilation: int,
    residual: bool,
    y: Tensor,
    inv_rms: Tensor,
) -> None:
    if not x.numel():
        return
    D, rows = x.shape[3], inv_rms.numel()
    tile = configs.inv_rms(D, device.of(x.device))
    launch(
        inv_rms_kernel,
        (cdiv(rows, tile.rows),),
        x_ptr=x,
        inv_rms_ptr=inv_rms,
        rows=rows,
        D=D,
        norm_eps=norm_eps,
        BLOCK_R=tile.rows,
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )
    pieces = partition_streams(x, weight, dilation, configs.Kernel.SHORT_FORWARD)
    launch(
        short_conv_fwd_kernel,
        (pieces.programs,),
        x_ptr=x,
        gamma_ptr=gamma,
        weight_ptr=weight,
        inv_rms_ptr=inv_rms,
        y_ptr=y,
        **shared_arguments(x, weight, dilation, residual, pieces),
    )


def short_conv_bwd(
    *,
    x: Tensor,
    gamma: Tensor,
    weight: Tensor,
    dilation: int,
    residual: bool,
    inv_rms: Tensor,
    dy: Tensor,
    dx: Tensor,
    dgamma: Tensor,
    dweight: Tensor,
) -> None:
    if not x.numel():
        dgamma.zero_()
        dweight.zero_()
        return
    (_, _, n, D), W, rows = x.shape, weight.shape[1], inv_rms.numel()
    pieces = partition_streams(x, weight, dilation, configs.Kernel.SHORT_BACKWARD)
    arguments = {
        "x_ptr": x,
        "gamma_ptr": gamma,
        "weight_ptr": weight,
        "inv_rms_ptr": inv_rms,
        "dy_ptr": dy,
        **shared_arguments(x, weight, dilation, residual, pieces),
    }
    grid, blocks = (pieces.programs,), pieces.blocks
    of_blocks = torch.empty((rows, blocks), dtype=torch.float32, device=x.device)
    launch(short_conv_bwd_kernel, grid, dots_ptr=of_blocks, dx_ptr=None, partials_ptr=None, **arguments)
    dots = torch.empty_like(inv_rms)
    tile = configs.ADD_DOTS
    launch(
        add_dots_kernel,
        (cdiv(rows, tile.rows),),
        partials_ptr=of_blocks,
        dots_ptr=dots,
        rows=rows,
        blocks=blocks,
        BLOCK_R=tile.rows,
        BLOCK_B=next_power_of_2(blocks),
        num_warps=tile.warps,
    )
    partials = torch.empty((pieces.total, W + 1, D), dtype=torch.float32, device=x.device)
    launch(short_conv_bwd_kernel, grid, dots_ptr=dots, dx_ptr=dx, partials_ptr=partials, **arguments)
    add_partials(partials=partials, streams=n, dweight=dweight, dbias=dgamma)


def partition_streams(x: Tensor, weight: Tensor, dilation: int, kernel: configs.Kernel) -> Pieces:
    """The pieces of all streams. Sequences are [stream, batch]."""
    B, L, n, D = x.shape
    return partition_rows(x, kernel=kernel, sequences=n * B, L=L, D=D, W=weight.shape[1], dilation=dilation)


def shared_arguments(x: Tensor, weight: Tensor, dilation: int, residual: bool, pieces: Pieces) -> dict[str, Any]:
    """The arguments that the forward and the backward kernel share."""
    B, L, n, D = x.shape
    return {
        "B": B,
        "L": L,
        "n": n,
        "D": D,
        "dilation": dilation,
        "W": weight.shape[1],
        "RESIDUAL": residual,
        "CUDA": device.of(x.device).kind == "cuda",
        **pieces.arguments(D),
    }
