"""mHC pre, forward: a projection of x, then one kernel that finishes each token.

1. project   partials[piece, t, :] = x[t] · phiᵀ and Σ x², per piece of K = nD
2. finish    add the pieces in order, make the maps, sum the streams to h_in

How K is cut into slices, and slices into groups, depends on n and D only. A slice is summed from zero by one program;
slices are added in order to their group, groups in order to the total. With many tokens a program walks whole groups
and a piece is a group; with few it takes less than a group, a piece is a slice, and the finishing kernel adds the
groups up: the same sums in the same order, so a token's bits do not depend on the batch.
"""

import torch
import triton
import triton.language as tl

from ...core import device
from . import configs
from .parts import alpha_of_row, phi_parts


# partials[piece, t, m] = Σ_{k in piece} x[t, k]·phi[m, k];  partials[piece, t, M] = Σ_{k in piece} x[t, k]²
@triton.jit(do_not_specialize=["T", "slice_steps", "piece_steps", "steps", "splits"])
def mhc_pre_project_kernel(
    x_ptr,
    parts_ptr,
    partials_ptr,
    T,
    K,
    K_padded,
    slice_steps,  # blocks of K per slice
    piece_steps,  # blocks of K per piece: of a slice, or of a group
    steps,  # blocks of K per program, whole pieces
    splits,  # programs per block of tokens
    M: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    split = tl.program_id(0) % splits
    t = (tl.program_id(0) // splits).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = t < T
    m = tl.arange(0, BLOCK_M)
    row = tl.arange(0, PARTS * BLOCK_M)  # the parts of phi, one below the other
    parts = parts_ptr + row.to(tl.int64)[:, None] * K_padded
    is_map = (row % BLOCK_M < M)[:, None]

    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))
    minus_mix = tl.zeros([BLOCK_T, PARTS * BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    piece_mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    piece_squares = tl.zeros([BLOCK_T], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        k = (step * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        in_tile = in_batch[:, None] if EVEN_K else in_batch[:, None] & (k < K)
        x = tl.load(x_ptr + t[:, None] * K + k, mask=in_tile, other=0.0)
        part = tl.load(parts + k, mask=is_map, other=0.0)
        wide = x.to(tl.float32)
        # Subtracted, because triton folds an addition into the product's own accumulator and then lets the next loads
        # overwrite x while the asynchronous product still reads it: errors of 1e-2, new ones in each run (3.6, Hopper).
        minus_mix -= tl.dot(x if PARTS == 2 else wide, part.T, input_precision=PRECISION)
        squares += tl.sum(wide * wide, axis=1)
        if ((step + 1) % slice_steps == 0) | (step + 1 == last):
            piece_mix -= tl.sum(tl.reshape(minus_mix, [BLOCK_T, PARTS, BLOCK_M]), axis=1)
            piece_squares += squares
            minus_mix = tl.zeros([BLOCK_T, PARTS * BLOCK_M], tl.float32)
            squares = tl.zeros([BLOCK_T], tl.float32)
            if ((step + 1) % piece_steps == 0) | (step + 1 == last):
                out = partials_ptr + (step // piece_steps * T.to(tl.int64) + t) * (M + 1)
                tl.store(out[:, None] + m[None, :], piece_mix, mask=in_batch[:, None] & (m < M)[None, :])
                tl.store(out + M, piece_squares, mask=in_batch)
                piece_mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
                piece_squares = tl.zeros([BLOCK_T], tl.float32)


# h_mix, Σ x² = Σ partials;  inv_rms = rsqrt(Σ x² / K + norm_eps);  z = alpha·h_mix·inv_rms + bias
# h_pre = σ(z_pre) + hc_eps;  h_post = 2σ(z_post);  h_res = z_res;  h_in = Σ_i h_pre[i]·x[i]
@triton.jit(do_not_specialize=["T", "blocks_each"])
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
    n: tl.constexpr,
    PIECES: tl.constexpr,
    GROUP_PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Last tokens first: some of them are still in the L2 cache.
    t = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = t < T
    M: tl.constexpr = n * n + 2 * n
    m = tl.arange(0, BLOCK_M)
    in_maps = in_batch[:, None] & (m < M)[None, :]

    total = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for first in tl.static_range(0, PIECES, GROUP_PIECES):
        group = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        for piece in tl.static_range(first, min(first + GROUP_PIECES, PIECES)):
            row = (piece * T.to(tl.int64) + t) * (M + 1)
            present = in_batch[:, None] & (m <= M)[None, :]
            group += tl.load(partials_ptr + row[:, None] + m[None, :], mask=present, other=0.0)
        total += group
    squares = tl.sum(tl.where((m == M)[None, :], total, 0.0), axis=1)
    inv_rms = tl.rsqrt(squares / (n * D) + norm_eps)
    scale = tl.where(m < M, alpha_of_row(alpha_ptr, m, n), 0.0)
    bias = tl.load(bias_ptr + m, mask=m < M, other=0.0).to(tl.float32)
    z = total * inv_rms[:, None] * scale[None, :] + bias[None, :]
    gate = tl.sigmoid(z)
    h_pre = gate + hc_eps

    if tl.program_id(1) == 0:
        pre, post, res = (m < n)[None, :], ((m >= n) & (m < 2 * n))[None, :], (m >= 2 * n)[None, :]
        tl.store(inv_rms_ptr + t, inv_rms, mask=in_batch)
        tl.store(h_mix_ptr + t[:, None] * M + m[None, :], total, mask=in_maps)
        tl.store(h_pre_ptr + t[:, None] * n + m[None, :], h_pre, mask=in_maps & pre)
        tl.store(h_post_ptr + t[:, None] * n + (m - n)[None, :], 2.0 * gate, mask=in_maps & post)
        tl.store(h_res_ptr + t[:, None] * (n * n) + (m - 2 * n)[None, :], z, mask=in_maps & res)

    begin = tl.program_id(1) * blocks_each
    for block in range(begin, tl.minimum(begin + blocks_each, tl.cdiv(D, BLOCK_D))):
        d = block * BLOCK_D + tl.arange(0, BLOCK_D)
        in_tile = in_batch[:, None] & (d < D)[None, :]
        h_in = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for i in tl.static_range(n):
            weight = tl.sum(tl.where((m == i)[None, :], h_pre, 0.0), axis=1)
            x = tl.load(x_ptr + (t[:, None] * n + i) * D + d[None, :], mask=in_tile, other=0.0)
            h_in += weight[:, None] * x.to(tl.float32)
        tl.store(h_in_ptr + t[:, None] * D + d[None, :], h_in.to(h_in_ptr.dtype.element_ty), mask=in_tile)


def mhc_pre_fwd(x, phi, alpha, bias, gamma, norm_eps, hc_eps, h_in, h_post, h_res, inv_rms, h_mix, h_pre):
    n, D = x.shape[-2:]
    T, K, M = inv_rms.numel(), n * D, configs.maps(n)
    if T == 0:
        return
    kind, processors = device.kind(x.device), device.multiprocessors(x.device)
    exact = configs.arithmetic(x.dtype, kind)
    parts = phi_parts(phi, gamma, None, n, exact)

    project = configs.project(n, D, exact.parts == 1, kind)
    token_blocks = configs.cdiv(T, project.block_t)
    cut = configs.cut(K, project.block_k, token_blocks, processors)
    partials = torch.empty((cut.pieces, T, M + 1), dtype=torch.float32, device=x.device)
    mhc_pre_project_kernel[(token_blocks * cut.splits,)](
        x,
        parts,
        partials,
        T,
        K,
        parts.shape[2],
        cut.slice_steps,
        cut.piece_steps,
        cut.steps,
        cut.splits,
        M=M,
        PARTS=exact.parts,
        PRECISION=exact.precision,
        EVEN_K=K % project.block_k == 0,
        BLOCK_T=project.block_t,
        BLOCK_M=configs.padded_maps(n),
        BLOCK_K=project.block_k,
        STAGES=project.stages,
        num_warps=project.warps,
    )

    finish = configs.finish(D, kind)
    token_blocks, channel_blocks = configs.cdiv(T, finish.block_t), configs.cdiv(D, finish.block_d)
    blocks_each = configs.channel_blocks_each(channel_blocks, token_blocks, processors)
    mhc_pre_finish_kernel[(token_blocks, configs.cdiv(channel_blocks, blocks_each))](
        x,
        partials,
        alpha,
        bias,
        h_in,
        h_post,
        h_res,
        inv_rms,
        h_mix,
        h_pre,
        T,
        D,
        blocks_each,
        norm_eps,
        hc_eps,
        n=n,
        PIECES=cut.pieces,
        GROUP_PIECES=cut.group_pieces,
        BLOCK_T=finish.block_t,
        BLOCK_M=configs.next_power_of_2(M + 1),
        BLOCK_D=finish.block_d,
        num_warps=finish.warps,
    )
