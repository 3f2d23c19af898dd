"""mHC pre, forward, last step: the partial sums of the projection become the maps, and the streams h_in."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from ..records import Pre
from . import configs
from .exact_products import alpha_of_row, sum_neighbours
from .sinkhorn import matrices, sinkhorn


# Σ_pieces partials[piece, t, column]: pieces are added in order to their bundle, bundles to their group, groups to the
# total
@triton.jit
def sum_pieces(
    partials_ptr,
    t,
    column,
    present,
    T,
    M: tl.constexpr,
    PIECES: tl.constexpr,
    BUNDLE_PIECES: tl.constexpr,
    GROUP_PIECES: tl.constexpr,
):
    at = partials_ptr + t * (M + 1) + column
    total = tl.zeros(at.shape, tl.float32)
    for first in tl.static_range(0, PIECES, GROUP_PIECES):
        group = tl.zeros(at.shape, tl.float32)
        for start in tl.static_range(first, min(first + GROUP_PIECES, PIECES), BUNDLE_PIECES):
            bundle = tl.zeros(at.shape, tl.float32)
            for piece in tl.static_range(start, min(start + BUNDLE_PIECES, PIECES)):
                bundle += tl.load(at + piece * T.to(tl.int64) * (M + 1), mask=present, other=0.0)
            group += bundle
        total += group
    return total


# h_mix of the rows that a sigmoid follows, inv_rms, and that sigmoid, of the tokens t
@triton.jit
def gates_of(
    partials_ptr,
    alpha_ptr,
    bias_ptr,
    t,
    in_batch,
    T,
    D,
    norm_eps,
    n: tl.constexpr,
    M: tl.constexpr,
    PIECES: tl.constexpr,
    BUNDLE_PIECES: tl.constexpr,
    GROUP_PIECES: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    GATES: tl.constexpr = n if M == n else 2 * n
    g = tl.arange(0, BLOCK_G)[None, :]
    column = tl.where(g < GATES, g, M)  # and after them Σ x²
    present = in_batch[:, None] & (g <= GATES)
    mix = sum_pieces(partials_ptr, t[:, None], column, present, T, M, PIECES, BUNDLE_PIECES, GROUP_PIECES)
    squares = tl.sum(tl.where(g == GATES, mix, 0.0), axis=1)
    inv_rms = tl.rsqrt(squares / (n * D) + norm_eps)
    bias = tl.load(bias_ptr + g, mask=g < GATES, other=0.0).to(tl.float32)
    return mix, inv_rms, tl.sigmoid(mix * inv_rms[:, None] * alpha_of_row(alpha_ptr, g, GATES, n) + bias)


# h_pre, where it is wanted, and h_post of the tokens t, and what the gradient reads
@triton.jit
def store_gates(
    mix,
    inv_rms,
    gate,
    h_post_ptr,
    inv_rms_ptr,
    h_mix_ptr,
    h_pre_ptr,
    t,
    in_batch,
    hc_eps,
    post_mult,
    post_eps,
    n: tl.constexpr,
    M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    GATES: tl.constexpr = n if M == n else 2 * n
    rows = t[:, None]
    g = tl.arange(0, BLOCK_G)[None, :]
    is_gate = in_batch[:, None] & (g < GATES)
    tl.store(inv_rms_ptr + t, inv_rms, mask=in_batch)
    tl.store(h_mix_ptr + rows * M + g, mix, mask=is_gate)
    if h_pre_ptr is not None:
        tl.store(h_pre_ptr + rows * n + g, gate + hc_eps, mask=is_gate & (g < n))
    if M > n:
        tl.store(h_post_ptr + rows * n + (g - n), post_mult * gate + post_eps, mask=is_gate & (g >= n))


# h_res of the tokens t, Sinkhorn included, where there is one, and its rows of h_mix
@triton.jit
def store_h_res(
    partials_ptr,
    alpha_ptr,
    bias_ptr,
    h_res_ptr,
    h_mix_ptr,
    inv_rms,
    t,
    T,
    iters,
    sinkhorn_eps,
    n: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    PIECES: tl.constexpr,
    BUNDLE_PIECES: tl.constexpr,
    GROUP_PIECES: tl.constexpr,
):
    if M > 2 * n:
        at, is_res = matrices(t, T, n, N)
        token = t[:, None, None]
        m = 2 * n + at - token * (n * n)
        mix = sum_pieces(partials_ptr, token, m, is_res, T, M, PIECES, BUNDLE_PIECES, GROUP_PIECES)
        tl.store(h_mix_ptr + token * M + m, mix, mask=is_res)
        bias = tl.load(bias_ptr + m, mask=is_res, other=0.0).to(tl.float32)
        h_res = mix * inv_rms[:, None, None] * tl.load(alpha_ptr + 2).to(tl.float32) + bias
        if iters > 0:
            h_res = sinkhorn(h_res, iters, sinkhorn_eps, n, N)
        tl.store(h_res_ptr + at, h_res, mask=is_res)


# x[i] of these channels, for each stream
@triton.jit
def load_streams(x_ptr, rows, d, in_batch, D, n: tl.constexpr):
    x = ()
    for i in tl.static_range(n):
        x = x + (tl.load(x_ptr + (rows * n + i) * D + d, mask=in_batch[:, None] & (d < D), other=0.0),)
    return x


# Σ_i h_pre[i]·x[i], of columns [tokens, 1] and tiles [tokens, channels]
@triton.jit
def weigh(x, h_pre, n: tl.constexpr):
    h_in = tl.zeros(x[0].shape, tl.float32)
    for i in tl.static_range(n):
        h_in += h_pre[i] * x[i].to(tl.float32)
    return h_in


# What h_in is read with, as [tokens, BLOCK_G]: `read` where that is given, else h_pre
@triton.jit
def read_weights(read_ptr, gate, hc_eps, rows, in_batch, n: tl.constexpr, BLOCK_G: tl.constexpr):
    if read_ptr is None:
        weights = gate + hc_eps
    else:
        g = tl.arange(0, BLOCK_G)[None, :]
        weights = tl.load(read_ptr + rows * n + g, mask=in_batch[:, None] & (g < n), other=0.0).to(tl.float32)
    return weights


# h_in of these channels; h_pre as [tokens, BLOCK_G]
@triton.jit
def read(x_ptr, rows, d, in_batch, h_pre, D, n: tl.constexpr, BLOCK_G: tl.constexpr):
    g = tl.arange(0, BLOCK_G)[None, :]
    weights = ()
    for i in tl.static_range(n):
        weights = weights + (tl.sum(tl.where(g == i, h_pre, 0.0), axis=1, keep_dims=True),)
    return weigh(load_streams(x_ptr, rows, d, in_batch, D, n), weights, n)


# Σ h_in² of each row, in an order that neither layouts nor fused multiplications change
@triton.jit
def sum_squares(h_in, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if COLUMNS == 1:
        squares = h_in * h_in
    else:
        even, odd = tl.split(tl.reshape(h_in, [ROWS, COLUMNS // 2, 2]))
        squares = sum_neighbours(tl.fma(even, even, odd * odd), ROWS, COLUMNS // 2, 1)
    return tl.reshape(squares, [ROWS])


# h_in of these channels or, with a weight, weight ⊙ h_in · factor
@triton.jit
def store_h_in(h_in_ptr, layer_norm_weight_ptr, h_in, factor, rows, d, in_batch, D):
    if layer_norm_weight_ptr is not None:
        weight = tl.load(layer_norm_weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        h_in = weight * (h_in * factor[:, None])
    tl.store(h_in_ptr + rows * D + d, h_in.to(h_in_ptr.dtype.element_ty), mask=in_batch[:, None] & (d < D))


# h_mix, Σ x² = Σ partials;  inv_rms = rsqrt(Σ x² / K + norm_eps);  z = alpha·h_mix·inv_rms + bias
# h_pre = σ(z_pre) + hc_eps;  h_post = post_mult·σ(z_post) + post_eps;  h_res = sinkhorn(z_res), or z_res where iters is
# 0, or absent where M is 2n;  h_in = Σ_i h_pre[i]·x[i], or of read[i] where that is given, if it is asked for
@triton.jit(do_not_specialize=["T", "blocks_each", "iters"])
def mhc_pre_finish_kernel(
    x_ptr,
    partials_ptr,
    alpha_ptr,
    bias_ptr,
    read_ptr,
    h_in_ptr,
    h_post_ptr,
    h_res_ptr,
    inv_rms_ptr,
    h_mix_ptr,
    h_pre_ptr,
    T,
    D,
    blocks_each,  # blocks of channels per program
    norm_eps,
    hc_eps,
    post_mult,
    post_eps,
    iters,
    sinkhorn_eps,
    n: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,  # n in the head
    PIECES: tl.constexpr,
    BUNDLE_PIECES: tl.constexpr,
    GROUP_PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Last tokens first: some of them are still in the L2 cache.
    t = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = t < T
    rows = t[:, None]

    mix, inv_rms, gate = gates_of(
        partials_ptr=partials_ptr,
        alpha_ptr=alpha_ptr,
        bias_ptr=bias_ptr,
        t=t,
        in_batch=in_batch,
        T=T,
        D=D,
        norm_eps=norm_eps,
        n=n,
        M=M,
        PIECES=PIECES,
        BUNDLE_PIECES=BUNDLE_PIECES,
        GROUP_PIECES=GROUP_PIECES,
        BLOCK_G=BLOCK_G,
    )
    weights = read_weights(read_ptr, gate, hc_eps, rows, in_batch, n, BLOCK_G)

    if h_in_ptr is not None:
        begin = tl.program_id(1) * blocks_each
        for block in range(begin, tl.minimum(begin + blocks_each, tl.cdiv(D, BLOCK_D))):
            d = block * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            h_in = read(x_ptr, rows, d, in_batch, weights, D, n, BLOCK_G)
            store_h_in(h_in_ptr, None, h_in, None, rows, d, in_batch, D)

    if tl.program_id(1) == 0:
        store_gates(
            mix=mix,
            inv_rms=inv_rms,
            gate=gate,
            h_post_ptr=h_post_ptr,
            inv_rms_ptr=inv_rms_ptr,
            h_mix_ptr=h_mix_ptr,
            h_pre_ptr=h_pre_ptr,
            t=t,
            in_batch=in_batch,
            hc_eps=hc_eps,
            post_mult=post_mult,
            post_eps=post_eps,
            n=n,
            M=M,
            BLOCK_G=BLOCK_G,
        )
        store_h_res(
            partials_ptr=partials_ptr,
            alpha_ptr=alpha_ptr,
            bias_ptr=bias_ptr,
            h_res_ptr=h_res_ptr,
            h_mix_ptr=h_mix_ptr,
            inv_rms=inv_rms,
            t=t,
            T=T,
            iters=iters,
            sinkhorn_eps=sinkhorn_eps,
            n=n,
            N=N,
            M=M,
            PIECES=PIECES,
            BUNDLE_PIECES=BUNDLE_PIECES,
            GROUP_PIECES=GROUP_PIECES,
        )


# h_in = Σ_i h_pre[i]·x[i];  weight ⊙ h_in · rsqrt(mean(h_in²) + layer_norm_eps)
@triton.jit(do_not_specialize=["T"])
def mhc_pre_normed_read_kernel(
    x_ptr,
    h_pre_ptr,
    layer_norm_weight_ptr,
    h_in_ptr,
    T,
    D,
    layer_norm_eps,
    n: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,  # a block has all channels
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Last tokens first: some of them are still in the L2 cache.
    t = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = t < T
    rows = t[:, None]
    h_pre = ()
    for i in tl.static_range(n):
        h_pre = h_pre + (tl.load(h_pre_ptr + rows * n + i, mask=in_batch[:, None], other=0.0).to(tl.float32),)
    if WHOLE_ROWS:
        d = tl.arange(0, BLOCK_D)[None, :]
        h_in = weigh(load_streams(x_ptr, rows, d, in_batch, D, n), h_pre, n)
        factor = tl.rsqrt(sum_squares(h_in, BLOCK_T, BLOCK_D) / D + layer_norm_eps)
        store_h_in(h_in_ptr, layer_norm_weight_ptr, h_in, factor, rows, d, in_batch, D)
    else:
        squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)[None, :]
            h_in = weigh(load_streams(x_ptr, rows, d, in_batch, D, n), h_pre, n)
            squares += h_in * h_in
        factor = tl.rsqrt(tl.sum(squares, axis=1) / D + layer_norm_eps)
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)[None, :]
            h_in = weigh(load_streams(x_ptr, rows, d, in_batch, D, n), h_pre, n)
            store_h_in(h_in_ptr, layer_norm_weight_ptr, h_in, factor, rows, d, in_batch, D)


def finish(pre: Pre, partials: Tensor, split: configs.SplitK) -> None:
    """From the sums of `project`. With the layer's norm, h_in has a kernel of its own: the norm needs several warps per
    token, Sinkhorn is fastest with one."""
    n, D = pre.x.shape[-2:]
    T, options, on = partials.shape[1], pre.options, device.of(pre.x.device)
    normed = pre.layer_norm_weight is not None
    h_pre = pre.h_pre
    if normed and h_pre is None and pre.read is None:
        h_pre = torch.empty((T, n), dtype=torch.float32, device=pre.x.device)
    tile = configs.finish(D, on)
    token_blocks, channel_blocks = cdiv(T, tile.block_t), cdiv(D, tile.block_d)
    maps_only = normed or pre.h_in is None
    blocks_each = (
        channel_blocks if maps_only else configs.channel_blocks_each(channel_blocks, token_blocks, on.processors)
    )
    launch(
        mhc_pre_finish_kernel,
        (token_blocks, cdiv(channel_blocks, blocks_each)),
        x_ptr=pre.x,
        partials_ptr=partials,
        alpha_ptr=pre.alpha,
        bias_ptr=pre.bias,
        read_ptr=None if maps_only else pre.read,
        h_in_ptr=None if normed else pre.h_in,
        h_post_ptr=pre.h_post,
        h_res_ptr=pre.h_res,
        inv_rms_ptr=pre.inv_rms,
        h_mix_ptr=pre.h_mix,
        h_pre_ptr=h_pre,
        T=T,
        D=D,
        blocks_each=blocks_each,
        norm_eps=options.norm_eps,
        hc_eps=options.hc_eps,
        post_mult=options.post_mult,
        post_eps=options.post_eps,
        iters=options.sinkhorn_iters,
        sinkhorn_eps=options.sinkhorn_eps or None,
        n=n,
        N=next_power_of_2(n),
        M=partials.shape[2] - 1,
        PIECES=split.pieces,
        BUNDLE_PIECES=split.bundle_pieces,
        GROUP_PIECES=split.group_pieces,
        BLOCK_T=tile.block_t,
        BLOCK_G=next_power_of_2(2 * n + 1),
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )
    if normed:
        normed_read(pre, T, h_pre if pre.read is None else pre.read)


def normed_read(pre: Pre, T: int, weights: Tensor | None) -> None:
    """h_in, read with these weights, and the layer's norm."""
    n, D = pre.x.shape[-2:]
    tile = configs.normed_read(n, D, device.of(pre.x.device))
    launch(
        mhc_pre_normed_read_kernel,
        (cdiv(T, tile.block_t),),
        x_ptr=pre.x,
        h_pre_ptr=weights,
        layer_norm_weight_ptr=pre.layer_norm_weight,
        h_in_ptr=pre.h_in,
        T=T,
        D=D,
        layer_norm_eps=pre.options.layer_norm_eps,
        n=n,
        WHOLE_ROWS=tile.block_d >= D,
        BLOCK_T=tile.block_t,
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )
