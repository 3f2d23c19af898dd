"""ShortConv: RMSNorm of each stream, causal convolution, SiLU and residual, without storing anything in between.

Forward: one kernel for inv_rms, one that marches as the convolution does and normalises each row as it comes. Backward,
dx of a token needs a mean over its whole stream, which no program sees: a first launch stores the sum over each block
of channels, a second one adds these up, and a third writes dx. With v = x·inv_rms:

  z[t] = Σ_k weight[k]·gamma·v[t − (W−1−k)·dilation]    g = dy·silu'(z)    dv[t] = Σ_k weight[k]·g[t + (W−1−k)·dilation]
  dx = inv_rms·(gamma·dv − v·mean_d(gamma·dv·v)), + dy    dgamma = Σ_t dv·v    dweight[k] = gamma·Σ_t g[t]·v[t − …]
"""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from . import configs
from .bwd import add_partials
from .walk import filtered, filtered_back, load_filter, load_row, partition_rows, sigmoid, through_activation, walk


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


# The W − 1 normalised rows before time t
@triton.jit
def normed_before(x_ptr, inv_rms_ptr, x_step, inv_step, t, dilation, L, in_row, W: tl.constexpr):
    window = ()
    for j in tl.static_range(W - 1):
        back = W - 1 - j
        time = t - back * dilation
        there = (time >= 0) & (time < L)
        x = load_row(x_ptr - back * x_step, in_row & there)
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
    d, _, sequence, t, rows_here, _ = walk(
        L=L, D=D, rows_each=rows_each, ranges=ranges, dilation=dilation, BLOCK_D=BLOCK_D
    )
    stream, b = sequence // B, sequence % B
    in_row = d < D if not EVEN_D else d >= 0
    token = (b * L + t) * n + stream
    inv_step = dilation.to(tl.int64) * n
    x_step = inv_step * D
    x_ptr += token * D + d
    y_ptr += token * D + d
    inv_rms_ptr += token
    gamma = load_row(gamma_ptr + stream * D + d, in_row)
    weight, none = load_filter(weight_ptr + stream * D * W, None, d, in_row, W)
    weight = scaled(weight, gamma, W)
    window = normed_before(
        x_ptr=x_ptr, inv_rms_ptr=inv_rms_ptr, x_step=x_step, inv_step=inv_step, t=t, dilation=dilation, L=L,
        in_row=in_row, W=W,
    )  # fmt: skip
    for i in tl.range(0, rows_each, STEP, num_stages=STAGES):
        rows, raw = window, ()
        for r in tl.static_range(STEP):
            there = i + r < rows_here
            x = load_row(x_ptr + (i + r) * x_step, in_row & there)
            raw = raw + (x,)
            rows = rows + (x * load_row(inv_rms_ptr + (i + r) * inv_step, there),)
        for r in tl.static_range(STEP):
            y = filtered(rows[r : r + W], weight, none, W)
            y *= sigmoid(y, CUDA)
            if RESIDUAL:
                y += raw[r]
            tl.store(y_ptr + (i + r) * x_step, y.to(y_ptr.dtype.element_ty), mask=in_row & (i + r < rows_here))
        window = rows[STEP:]


# Go STEP rows on. Without dx_ptr, Σ_d gamma·dv·v of the rows W − 1 before them is stored, over this block of channels;
# with it, their dx, and g of these rows is added to the sums unless SUMS is 0.
@triton.jit
def short_step_back(
    i,
    window,
    before,
    before_dy,
    sums,
    x_ptr,
    dy_ptr,
    dx_ptr,
    inv_rms_ptr,
    dots_ptr,
    x_step,
    inv_step,
    dots_step,
    weight,
    of_taps,
    none,
    gamma,
    rows_here,
    left,
    D,
    in_row,
    W: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CUDA: tl.constexpr,
    SUMS: tl.constexpr,
    STEP: tl.constexpr,
):
    rows, incoming, gs = window, before_dy, before
    for r in tl.static_range(STEP):
        there = i + r < left
        x = load_row(x_ptr + (i + r) * x_step, in_row & there)
        rows = rows + (x * load_row(inv_rms_ptr + (i + r) * inv_step, there),)
        incoming = incoming + (load_row(dy_ptr + (i + r) * x_step, in_row & there),)
    for r in tl.static_range(STEP):
        taps = rows[r : r + W]
        g = through_activation(incoming[r + W - 1], filtered(taps, of_taps, none, W), True, CUDA)
        gs = gs + (g,)
        # the row W − 1 before this one is complete
        row = i + r - (W - 1)
        mine = (row >= 0) & (row < rows_here)
        v, dv = taps[0], filtered_back(gs[r : r + W], weight, W)
        if dx_ptr is None:
            dot = tl.sum(tl.where(in_row, gamma * dv * v, 0.0), axis=0)
            tl.store(dots_ptr + row * dots_step, dot, mask=mine)
        else:
            if SUMS > 0:
                new_sums = ()
                for k in tl.static_range(W):
                    new_sums = new_sums + (sums[k] + g * taps[k],)
                sums = new_sums + (sums[W],)
            sums = sums[:W] + (sums[W] + tl.where(mine, dv * v, 0.0),)
            dot = load_row(dots_ptr + row * inv_step, mine)
            dx = load_row(inv_rms_ptr + row * inv_step, mine) * (gamma * dv - v * (dot / D))
            if RESIDUAL:
                dx += incoming[r]
            tl.store(dx_ptr + row * x_step, dx.to(dx_ptr.dtype.element_ty), mask=in_row & mine)
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
    d, piece, sequence, t, rows_here, left = walk(
        L=L, D=D, rows_each=rows_each, ranges=ranges, dilation=dilation, BLOCK_D=BLOCK_D
    )
    stream, b = sequence // B, sequence % B
    in_row = d < D if not EVEN_D else d >= 0
    token = (b * L + t) * n + stream
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
    window = normed_before(
        x_ptr=x_ptr, inv_rms_ptr=inv_rms_ptr, x_step=x_step, inv_step=inv_step, t=t, dilation=dilation, L=L,
        in_row=in_row, W=W,
    )  # fmt: skip
    before, before_dy, sums = (), (), ()
    for j in tl.static_range(W - 1):
        before = before + (tl.zeros([BLOCK_D], tl.float32),)
        before_dy = before_dy + (tl.zeros([BLOCK_D], tl.float32),)
    for k in tl.static_range(W + 1):
        sums = sums + (tl.zeros([BLOCK_D], tl.float32),)
    for i in tl.range(0, rows_each, STEP, num_stages=STAGES):
        window, before, before_dy, sums = short_step_back(
            i=i, window=window, before=before, before_dy=before_dy, sums=sums, x_ptr=x_ptr, dy_ptr=dy_ptr,
            dx_ptr=dx_ptr, inv_rms_ptr=inv_rms_ptr, dots_ptr=dots_ptr, x_step=x_step, inv_step=inv_step,
            dots_step=dots_step, weight=weight, of_taps=of_taps, none=none, gamma=gamma, rows_here=rows_here, left=left,
            D=D, in_row=in_row, W=W, RESIDUAL=RESIDUAL, CUDA=CUDA, SUMS=W + 1, STEP=STEP,
        )  # fmt: skip
    window, before, before_dy, sums = short_step_back(
        i=rows_each, window=window, before=before, before_dy=before_dy, sums=sums, x_ptr=x_ptr, dy_ptr=dy_ptr,
        dx_ptr=dx_ptr, inv_rms_ptr=inv_rms_ptr, dots_ptr=dots_ptr, x_step=x_step, inv_step=inv_step,
        dots_step=dots_step, weight=weight, of_taps=of_taps, none=none, gamma=gamma, rows_here=rows_here, left=left,
        D=D, in_row=in_row, W=W, RESIDUAL=RESIDUAL, CUDA=CUDA, SUMS=0, STEP=W - 1,
    )  # fmt: skip
    if dx_ptr is not None:
        for k in tl.static_range(W + 1):
            total = sums[k] * gamma if k < W else sums[k]
            tl.store(partials_ptr + (piece * (W + 1) + k) * D + d, total, mask=in_row)


# dots[row] = Σ_block partials[row, block]
@triton.jit(do_not_specialize=["rows"])
def add_dots_kernel(partials_ptr, dots_ptr, rows, blocks, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    block = tl.arange(0, BLOCK_B)[None, :]
    there = (row < rows)[:, None] & (block < blocks)
    total = tl.sum(load_row(partials_ptr + row[:, None] * blocks + block, there), axis=1)
    tl.store(dots_ptr + row, total, mask=row < rows)


def short_conv_fwd(*, x, gamma, weight, norm_eps, dilation, residual, y, inv_rms):
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
    partition = partition_streams(x, weight, dilation, configs.Kernel.SHORT_FORWARD)
    launch(
        short_conv_fwd_kernel,
        (partition.programs,),
        x_ptr=x,
        gamma_ptr=gamma,
        weight_ptr=weight,
        inv_rms_ptr=inv_rms,
        y_ptr=y,
        **shared_arguments(x, weight, dilation, residual, partition),
    )


def short_conv_bwd(*, x, gamma, weight, dilation, residual, inv_rms, dy, dx, dgamma, dweight):
    if not x.numel():
        dgamma.zero_()
        dweight.zero_()
        return
    (_, _, n, D), W, rows = x.shape, weight.shape[1], inv_rms.numel()
    partition = partition_streams(x, weight, dilation, configs.Kernel.SHORT_BACKWARD)
    arguments = {
        "x_ptr": x,
        "gamma_ptr": gamma,
        "weight_ptr": weight,
        "inv_rms_ptr": inv_rms,
        "dy_ptr": dy,
        **shared_arguments(x, weight, dilation, residual, partition),
    }
    grid, blocks = (partition.programs,), partition.blocks
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
    partials = torch.empty((partition.pieces, W + 1, D), dtype=torch.float32, device=x.device)
    launch(short_conv_bwd_kernel, grid, dots_ptr=dots, dx_ptr=dx, partials_ptr=partials, **arguments)
    add_partials(partials=partials, streams=n, dweight=dweight, dbias=dgamma)


def partition_streams(x, weight, dilation, kernel):
    """Sequences are [stream, batch]."""
    B, L, n, D = x.shape
    return partition_rows(x, kernel=kernel, sequences=n * B, L=L, D=D, W=weight.shape[1], dilation=dilation)


def shared_arguments(x, weight, dilation, residual, partition):
    """What forward and backward kernel take alike."""
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
        **partition.arguments(D),
    }
