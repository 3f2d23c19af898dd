"""mHC pre, forward: a projection of x, then one kernel that finishes each token.

1. project   partials[piece, t, :] = x[t] · phiᵀ and Σ x², per piece of K = nD
2. finish    add the pieces in order, make the maps (Sinkhorn included), sum the streams to h_in

The head is the same with the pre rows of phi alone.

How K is cut into slices, and slices into groups, depends on n and D only. A slice is summed from zero by one program;
slices are added in order to their group, groups in order to the total. With many tokens a program takes a group, and a
piece is a group; with few it takes a slice, and the finishing kernel adds the groups up: the same sums in the same
order, so a token's bits do not depend on the batch.
"""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from ..options import PreOptions
from . import configs
from .parts import LANE, alpha_of_row, load_phi, own_sums, phi_parts, rest_of, stacked_rows, sum_parts
from .sinkhorn import matrices, sinkhorn


# partials[piece, begin + t, m] = piece_mix[t, m];  partials[piece, begin + t, M] = piece_squares[t]
@triton.jit
def store_piece(
    piece_mix,
    piece_squares,
    partials_ptr,
    piece,
    begin,
    T,
    M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    m, local = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, BLOCK_T)
    in_batch = local < T - begin
    out = partials_ptr + (piece * T.to(tl.int64) + begin) * (M + 1)
    tl.store(out + (local[:, None] * (M + 1) + m), piece_mix, mask=in_batch[:, None] & (m < M))
    tl.store(out + (local * (M + 1) + M), piece_squares, mask=in_batch)


# partials[piece, t, m] = Σ_{k in piece} x[t, k]·phi[m, k];  partials[piece, t, M] = Σ_{k in piece} x[t, k]²
@triton.jit(do_not_specialize=["T", "steps", "pieces"])
def mhc_pre_project_kernel(
    x_ptr,
    parts_ptr,  # phi in parts, or None: then it is cut here
    phi_ptr,
    gamma_ptr,
    partials_ptr,
    T,
    K,
    K_padded,
    steps,  # blocks of K per piece
    pieces,
    SLICE_STEPS: tl.constexpr,  # blocks of K per slice
    M: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    piece = tl.program_id(0) % pieces
    begin = (tl.program_id(0) // pieces).to(tl.int64) * BLOCK_T
    local = tl.arange(0, BLOCK_T)[:, None]
    in_batch = local < T - begin
    row, p = stacked_rows(PARTS, BLOCK_M)
    row, p = row.to(tl.int64)[:, None], p[:, None]

    first = piece * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))
    minus_mix = tl.zeros([BLOCK_T, PARTS * BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_K // LANE], tl.float32)  # summed over its columns at the end of a slice
    piece_mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    piece_squares = tl.zeros([BLOCK_T], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        k = (step * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        in_tile = in_batch if EVEN_K else in_batch & (k < K)
        x = tl.load(x_ptr + begin * K + (local * K + k), mask=in_tile, other=0.0)
        if parts_ptr is not None:
            part = tl.load(parts_ptr + (p * BLOCK_M + row) * K_padded + k, mask=row < M, other=0.0)
        else:
            part = load_phi(phi_ptr, gamma_ptr, row, k, K, M)
            if PARTS == 2:
                part = tl.where(p == 0, part, rest_of(part, 1, x.dtype)).to(x.dtype)
        wide = x.to(tl.float32)
        # Subtracted, because triton folds an addition into the product's own accumulator and then lets the next loads
        # overwrite x while the asynchronous product still reads it: errors of 1e-2, new ones in each run (3.6, Hopper).
        minus_mix -= tl.dot(x if PARTS == 2 else wide, part.T, input_precision=PRECISION)
        squares += own_sums(wide * wide, BLOCK_T, BLOCK_K)
        if (step + 1) % SLICE_STEPS == 0:
            piece_mix -= sum_parts(minus_mix, BLOCK_T, PARTS, BLOCK_M)
            piece_squares += tl.sum(squares, axis=1)
            minus_mix = tl.zeros(minus_mix.shape, tl.float32)
            squares = tl.zeros(squares.shape, tl.float32)
    piece_mix -= sum_parts(minus_mix, BLOCK_T, PARTS, BLOCK_M)  # of a last, short slice
    piece_squares += tl.sum(squares, axis=1)
    store_piece(piece_mix, piece_squares, partials_ptr, piece, begin, T, M, BLOCK_T, BLOCK_M)


# Σ_pieces partials[piece, t, column]: pieces are added to their group in order, groups in order to the total
@triton.jit
def sum_pieces(partials_ptr, t, column, present, T, M: tl.constexpr, PIECES: tl.constexpr, GROUP_PIECES: tl.constexpr):
    at = partials_ptr + t * (M + 1) + column
    total = tl.zeros(at.shape, tl.float32)
    for first in tl.static_range(0, PIECES, GROUP_PIECES):
        group = tl.zeros(at.shape, tl.float32)
        for piece in tl.static_range(first, min(first + GROUP_PIECES, PIECES)):
            group += tl.load(at + piece * T.to(tl.int64) * (M + 1), mask=present, other=0.0)
        total += group
    return total


# h_mix, Σ x² = Σ partials;  inv_rms = rsqrt(Σ x² / K + norm_eps);  z = alpha·h_mix·inv_rms + bias
# h_pre = σ(z_pre) + hc_eps;  h_post = post_mult·σ(z_post);  h_res = sinkhorn(z_res), or z_res where iters is 0
# h_in = Σ_i h_pre[i]·x[i]
@triton.jit(do_not_specialize=["T", "blocks_each", "iters"])
def mhc_pre_finish_kernel(
    x_ptr,
    partials_ptr,
    alpha_ptr,
    bias_ptr,
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
    iters,
    sinkhorn_eps,
    n: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,  # n in the head
    PIECES: tl.constexpr,
    GROUP_PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Last tokens first: some of them are still in the L2 cache.
    t = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = t < T
    rows = t[:, None]

    GATES: tl.constexpr = n if M == n else 2 * n  # rows of phi that a sigmoid follows
    g = tl.arange(0, BLOCK_G)[None, :]
    is_gate = in_batch[:, None] & (g < GATES)
    column = tl.where(g < GATES, g, M)  # and behind them Σ x²
    present = in_batch[:, None] & (g <= GATES)
    mix = sum_pieces(partials_ptr, rows, column, present, T, M, PIECES, GROUP_PIECES)
    squares = tl.sum(tl.where(g == GATES, mix, 0.0), axis=1)
    inv_rms = tl.rsqrt(squares / (n * D) + norm_eps)
    bias = tl.load(bias_ptr + g, mask=g < GATES, other=0.0).to(tl.float32)
    gate = tl.sigmoid(mix * inv_rms[:, None] * alpha_of_row(alpha_ptr, g, GATES, n) + bias)
    h_pre = gate + hc_eps

    begin = tl.program_id(1) * blocks_each
    for block in range(begin, tl.minimum(begin + blocks_each, tl.cdiv(D, BLOCK_D))):
        d = block * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        in_tile = in_batch[:, None] & (d < D)
        h_in = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for i in tl.static_range(n):
            weight = tl.sum(tl.where(g == i, h_pre, 0.0), axis=1)
            x = tl.load(x_ptr + (rows * n + i) * D + d, mask=in_tile, other=0.0)
            h_in += weight[:, None] * x.to(tl.float32)
        tl.store(h_in_ptr + rows * D + d, h_in.to(h_in_ptr.dtype.element_ty), mask=in_tile)

    if tl.program_id(1) == 0:
        tl.store(inv_rms_ptr + t, inv_rms, mask=in_batch)
        tl.store(h_mix_ptr + rows * M + g, mix, mask=is_gate)
        if h_pre_ptr is not None:
            tl.store(h_pre_ptr + rows * n + g, h_pre, mask=is_gate & (g < n))
        if M > n:
            tl.store(h_post_ptr + rows * n + (g - n), post_mult * gate, mask=is_gate & (g >= n))
            at, is_res = matrices(t, T, n, N)
            token = t[:, None, None]
            m = 2 * n + at - token * (n * n)
            res_mix = sum_pieces(partials_ptr, token, m, is_res, T, M, PIECES, GROUP_PIECES)
            tl.store(h_mix_ptr + token * M + m, res_mix, mask=is_res)
            res_bias = tl.load(bias_ptr + m, mask=is_res, other=0.0).to(tl.float32)
            h_res = res_mix * inv_rms[:, None, None] * tl.load(alpha_ptr + 2).to(tl.float32) + res_bias
            if iters > 0:
                h_res = sinkhorn(h_res, iters, sinkhorn_eps, n, N)
            tl.store(h_res_ptr + at, h_res, mask=is_res)


def finish(*, x, partials, split, alpha, bias, options, h_in, inv_rms, h_mix, h_post=None, h_res=None, h_pre=None):
    """From the sums of `project`. A head has neither h_post nor h_res; h_pre where somebody wants it."""
    n, D = x.shape[-2:]
    T, M = partials.shape[1], partials.shape[2] - 1
    on = device.of(x.device)
    tile = configs.finish(D, on)
    token_blocks, channel_blocks = cdiv(T, tile.block_t), cdiv(D, tile.block_d)
    blocks_each = configs.channel_blocks_each(channel_blocks, token_blocks, on.processors)
    launch(
        mhc_pre_finish_kernel,
        (token_blocks, cdiv(channel_blocks, blocks_each)),
        x_ptr=x,
        partials_ptr=partials,
        alpha_ptr=alpha,
        bias_ptr=bias,
        h_in_ptr=h_in,
        h_post_ptr=h_post,
        h_res_ptr=h_res,
        inv_rms_ptr=inv_rms,
        h_mix_ptr=h_mix,
        h_pre_ptr=h_pre,
        T=T,
        D=D,
        blocks_each=blocks_each,
        norm_eps=options.norm_eps,
        hc_eps=options.hc_eps,
        post_mult=options.post_mult,
        iters=options.sinkhorn_iters,
        sinkhorn_eps=options.sinkhorn_eps,
        n=n,
        N=next_power_of_2(n),
        M=M,
        PIECES=split.pieces,
        GROUP_PIECES=split.group_pieces,
        BLOCK_T=tile.block_t,
        BLOCK_G=next_power_of_2(2 * n + 1),
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )


def project(x, phi, gamma):
    """The partial sums [pieces, T, M + 1], and how K was split."""
    n = x.shape[-2]
    M, K = phi.shape
    T = x.numel() // K
    on = device.of(x.device)
    exact = configs.arithmetic(x.dtype, on)
    tile = configs.project(M, K, exact.parts == 1, on)
    token_blocks = cdiv(T, tile.block_t)
    split = configs.split_k(K, tile.block_d, token_blocks, on.processors)
    parts = phi_parts(phi, gamma, None, n, exact) if token_blocks > configs.FEW_TOKEN_BLOCKS else None
    partials = torch.empty((split.pieces, T, M + 1), dtype=torch.float32, device=x.device)
    launch(
        mhc_pre_project_kernel,
        (token_blocks * split.pieces,),
        x_ptr=x,
        parts_ptr=parts,
        phi_ptr=phi,
        gamma_ptr=gamma,
        partials_ptr=partials,
        T=T,
        K=K,
        K_padded=0 if parts is None else parts.shape[2],
        steps=split.steps,
        pieces=split.pieces,
        SLICE_STEPS=split.slice_steps,
        M=M,
        PARTS=exact.parts,
        PRECISION=exact.precision,
        EVEN_K=K % tile.block_d == 0,
        BLOCK_T=tile.block_t,
        BLOCK_M=configs.padded_maps(M),
        BLOCK_K=tile.block_d,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return partials, split


def mhc_pre_fwd(*, x, phi, alpha, bias, gamma, options, **outputs):
    """outputs: h_in, inv_rms, h_mix and, where they are wanted, h_post, h_res, h_pre"""
    if x.numel():
        partials, split = project(x, phi, gamma)
        finish(x=x, partials=partials, split=split, alpha=alpha, bias=bias, options=options, **outputs)


def mhc_layer_pre(*, link, **arguments):
    """Nobody reads the link."""
    mhc_pre_fwd(**arguments)


def mhc_head_fwd(*, norm_eps, hc_eps, out, **arguments):
    mhc_pre_fwd(**arguments, options=PreOptions(norm_eps=norm_eps, hc_eps=hc_eps, sinkhorn_iters=0), h_in=out)
