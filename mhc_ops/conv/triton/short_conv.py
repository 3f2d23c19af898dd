"""ShortConv: RMSNorm of each stream, causal convolution, SiLU and residual, without storing anything in between.

Forward: one kernel for inv_rms, one that marches as the convolution does and normalises each row as it comes. Backward,
dx of a token needs Σ_d over its whole stream, which no program sees: a first walk leaves the sums of each block of
channels, a second one adds them up and writes dx. With v̂ = x·inv_rms:

  z[t] = Σ_k weight[k]·gamma·v̂[t − (W−1−k)·dilation]    g = dy·silu'(z)    dv[t] = Σ_k weight[k]·g[t + (W−1−k)·dilation]
  dx = inv_rms·(gamma·dv − v̂·mean_d(gamma·dv·v̂)), + dy    dgamma = Σ_t dv·v̂    dweight[k] = gamma·Σ_t g[t]·v̂[t − …]
"""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from . import configs
from .bwd import add_partials
from .rows import cut, filtered, filtered_back, load_filter, load_row, walk
from .states import through_activation


# inv_rms[row] = rsqrt(Σ_d x[row, d]² / D + norm_eps)
@triton.jit(do_not_specialize=["rows"])
def inv_rms_kernel(x_ptr, inv_rms_ptr, rows, D, norm_eps, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    squares = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for begin in range(0, D, BLOCK_D):
        d = begin + tl.arange(0, BLOCK_D)[None, :]
        x = tl.load(x_ptr + row[:, None] * D + d, mask=(row < rows)[:, None] & (d < D), other=0.0).to(tl.float32)
        squares += x * x
    tl.store(inv_rms_ptr + row, tl.rsqrt(tl.sum(squares, axis=1) / D + norm_eps), mask=row < rows)


# v̂[t] = x[t]·inv_rms[t] of one stream, and x[t]; both 0 where t is not `present`
@triton.jit
def load_normed(x_ptr, inv_rms_ptr, t, n, D, d, in_row, present):
    x = load_row(x_ptr, t, n * D, d, in_row & present)
    return x * tl.load(inv_rms_ptr + t.to(tl.int64) * n, mask=present, other=0.0), x


# The W − 1 normalised rows before row i
@triton.jit
def normed_before(x_ptr, inv_rms_ptr, n, phase, i, dilation, D, d, in_row, W: tl.constexpr):
    window = ()
    for j in tl.static_range(W - 1):
        t = phase + (i - (W - 1) + j) * dilation
        row, _ = load_normed(x_ptr, inv_rms_ptr, t, n, D, d, in_row, t >= 0)
        window = window + (row,)
    return window


# weight[k]·gamma for each k
@triton.jit
def scaled(weight, gamma, W: tl.constexpr):
    products = ()
    for k in tl.static_range(W):
        products = products + (weight[k] * gamma,)
    return products


# What lies under the taps of the row at index r + W − 1
@triton.jit
def taps_of(rows, r: tl.constexpr, W: tl.constexpr):
    taps = ()
    for k in tl.static_range(W):
        taps = taps + (rows[r + k],)
    return taps


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
    EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    d, _, sequence, phase, first, last, _ = walk(L, D, rows_each, ranges, dilation, BLOCK_D)
    stream, b = sequence // B, sequence % B
    in_row = d < D if not EVEN_D else d >= 0
    x_ptr += (b * L * n + stream) * D
    y_ptr += (b * L * n + stream) * D
    inv_rms_ptr += b * L * n + stream
    gamma = tl.load(gamma_ptr + stream * D + d, mask=in_row, other=0.0).to(tl.float32)
    weight, none = load_filter(weight_ptr + stream * D * W, None, d, in_row, W)
    weight = scaled(weight, gamma, W)
    window = normed_before(x_ptr, inv_rms_ptr, n, phase, first, dilation, D, d, in_row, W)
    for i in tl.range(first, last, STEP, num_stages=STAGES):
        rows, raw = window, ()
        for r in tl.static_range(STEP):
            row, x = load_normed(x_ptr, inv_rms_ptr, phase + (i + r) * dilation, n, D, d, in_row, i + r < last)
            rows, raw = rows + (row,), raw + (x,)
        for r in tl.static_range(STEP):
            y = filtered(taps_of(rows, r, W), weight, none, W)
            y *= tl.sigmoid(y)
            if RESIDUAL:
                y += raw[r]
            at = (phase + (i + r) * dilation).to(tl.int64) * n * D
            tl.store(y_ptr + at + d, y.to(y_ptr.dtype.element_ty), mask=in_row & (i + r < last))
        window = rows[STEP:]


# Without dx: dots[t, block] = Σ_{d in block} gamma·dv[t]·v̂[t]. With it: dx, and
# partials[piece, k] = Σ_{t in piece} g[t]·v̂[t − (W−1−k)·dilation];  partials[piece, W] = Σ_{t in piece} dv[t]·v̂[t]
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
    BLOCKS: tl.constexpr,  # of channels, rounded up to a power of two
    EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    d, piece, sequence, phase, first, last, count = walk(L, D, rows_each, ranges, dilation, BLOCK_D)
    stream, b = sequence // B, sequence % B
    in_row = d < D if not EVEN_D else d >= 0
    x_ptr += (b * L * n + stream) * D
    dy_ptr += (b * L * n + stream) * D
    inv_rms_ptr += b * L * n + stream
    dots_ptr += (b * L * n + stream) * BLOCKS
    gamma = tl.load(gamma_ptr + stream * D + d, mask=in_row, other=0.0).to(tl.float32)
    weight, none = load_filter(weight_ptr + stream * D * W, None, d, in_row, W)
    of_taps = scaled(weight, gamma, W)
    window = normed_before(x_ptr, inv_rms_ptr, n, phase, first, dilation, D, d, in_row, W)
    before, before_dy, sums = (), (), ()
    for j in tl.static_range(W - 1):
        before = before + (tl.zeros([BLOCK_D], tl.float32),)
        before_dy = before_dy + (tl.zeros([BLOCK_D], tl.float32),)
    for k in tl.static_range(W + 1):
        sums = sums + (tl.zeros([BLOCK_D], tl.float32),)
    for i in tl.range(first, last + W - 1, STEP, num_stages=STAGES):
        rows, incoming = window, before_dy
        for r in tl.static_range(STEP):
            t = phase + (i + r) * dilation
            row, _x = load_normed(x_ptr, inv_rms_ptr, t, n, D, d, in_row, i + r < count)
            rows = rows + (row,)
            incoming = incoming + (load_row(dy_ptr, t, n * D, d, in_row & (i + r < count)),)
        gs = before
        for r in tl.static_range(STEP):
            taps = taps_of(rows, r, W)
            g = through_activation(incoming[r + W - 1], filtered(taps, of_taps, none, W), True)
            gs = gs + (g,)
            # the row W − 1 before this one is complete
            u = i + r - (W - 1)
            mine = (u >= first) & (u < last)
            token = (phase + u * dilation).to(tl.int64)
            dv = filtered_back(taps_of(gs, r, W), weight, W)
            if dx_ptr is None:
                block = tl.program_id(0) % tl.cdiv(D, BLOCK_D)
                tl.store(dots_ptr + token * n * BLOCKS + block, tl.sum(gamma * dv * taps[0], axis=0), mask=mine)
            else:
                own = tl.where(i + r < last, g, 0.0)
                new_sums = ()
                for k in tl.static_range(W):
                    new_sums = new_sums + (sums[k] + own * taps[k],)
                sums = new_sums + (sums[W] + tl.where(mine, dv * taps[0], 0.0),)
                block = tl.arange(0, BLOCKS)
                there = mine & (block < tl.cdiv(D, BLOCK_D))
                dot = tl.sum(tl.load(dots_ptr + token * n * BLOCKS + block, mask=there, other=0.0), axis=0)
                inv_rms = tl.load(inv_rms_ptr + token * n, mask=mine, other=0.0)
                dx = inv_rms * (gamma * dv - taps[0] * (dot / D))
                if RESIDUAL:
                    dx += incoming[r]
                at = dx_ptr + (b * L * n + stream) * D + token * n * D + d
                tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=in_row & mine)
        window = rows[STEP:]
        before = gs[STEP:]
        before_dy = incoming[STEP:]
    if dx_ptr is not None:
        for k in tl.static_range(W + 1):
            scale = gamma if k < W else 1.0
            tl.store(partials_ptr + (piece * (W + 1) + k) * D + d, sums[k] * scale, mask=in_row)


def short_conv_fwd(x, gamma, weight, norm_eps, dilation, residual, y, inv_rms):
    if not x.numel():
        return
    D, rows = x.shape[3], inv_rms.numel()
    tile = configs.inv_rms(D, device.kind(x.device))
    launch(
        inv_rms_kernel,
        (cdiv(rows, tile.rows),),
        x,
        inv_rms,
        rows,
        D,
        norm_eps,
        BLOCK_R=tile.rows,
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )
    _, grid, sizes, constants = walk_of(x, weight, dilation, residual, backward=False)
    launch(short_conv_fwd_kernel, grid, x, gamma, weight, inv_rms, y, *sizes, **constants)


def short_conv_bwd(x, gamma, weight, inv_rms, dy, dilation, residual, dx, dgamma, dweight):
    if not x.numel():
        dgamma.zero_()
        dweight.zero_()
        return
    n, D = x.shape[2:]
    march, grid, sizes, constants = walk_of(x, weight, dilation, residual, backward=True)
    blocks = next_power_of_2(cdiv(D, march.block_d))
    dots = torch.empty((*inv_rms.shape, blocks), dtype=torch.float32, device=x.device)
    pieces = grid[0] // cdiv(D, march.block_d)
    partials = torch.empty((pieces, weight.shape[1] + 1, D), dtype=torch.float32, device=x.device)
    inputs = (x, gamma, weight, inv_rms, dy, dots)
    for outputs in ((None, None), (dx, partials)):
        launch(short_conv_bwd_kernel, grid, *inputs, *outputs, *sizes, **constants, BLOCKS=blocks)
    add_partials(partials, n, dweight, dgamma)


def walk_of(x, weight, dilation, residual, backward):
    """What the marching kernels share: the march, the grid, sizes and constants. Sequences are [stream, batch]."""
    B, L, n, D = x.shape
    W = weight.shape[1]
    march, ranges, _, programs = cut(x, n * B, L, D, W, dilation, backward, ids=False)
    constants = {
        "W": W,
        "RESIDUAL": residual,
        "EVEN_D": D % march.block_d == 0,
        "BLOCK_D": march.block_d,
        "STEP": march.step,
        "STAGES": march.stages,
        "num_warps": march.warps,
    }
    return march, (programs,), (B, L, n, D, march.rows, ranges, dilation), constants
