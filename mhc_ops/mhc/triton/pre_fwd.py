"""mHC pre, forward: a projection GEMM over x, then one kernel that finishes each token.

1. project   partials[·, t, :] = x[t] · partsᵀ and Σ x², per group of K slices
2. finish    add the partials in fixed order, maps, h_in

A slice of K always starts from a fresh sum, slices are added in order to their group, groups in order to the total.
With few tokens a program takes one slice instead of a group or more, and the finishing kernel adds the slices: the same
sums in the same order, so a token's bits do not depend on the batch.
"""

import torch
import triton
import triton.language as tl

from ...core import device
from . import configs
from .parts import phi_parts


# partials[piece, t, m] = Σ_{k in piece} x[t, k]·phi[m, k];  partials[piece, t, M] = Σ_{k in piece} x[t, k]²
@triton.jit(do_not_specialize=["T", "steps", "splits"])
def mhc_pre_project_kernel(
    x_ptr,
    parts_ptr,
    partials_ptr,
    T,
    K,
    K_padded,
    steps,  # blocks of K per program: whole groups, or one slice if BY_SLICE
    splits,  # programs per block of tokens
    M: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BY_SLICE: tl.constexpr,
    SLICE_STEPS: tl.constexpr,
    GROUP_SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    split = tl.program_id(0) % splits
    t = (tl.program_id(0) // splits).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = t < T
    m = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + t[:, None] * K
    PIECE_STEPS: tl.constexpr = SLICE_STEPS if BY_SLICE else SLICE_STEPS * GROUP_SLICES

    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))
    mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    if PIECE_STEPS > SLICE_STEPS:
        group_mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        group_squares = tl.zeros([BLOCK_T], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        k = step * BLOCK_K + columns
        in_tile = in_batch[:, None] if EVEN_K else in_batch[:, None] & (k < K)[None, :]
        x = tl.load(x_rows + k[None, :], mask=in_tile, other=0.0)
        if PARTS == 1:
            x = x.to(tl.float32)
        for p in tl.static_range(PARTS):
            part = tl.load(parts_ptr + (p * BLOCK_M + m).to(tl.int64)[:, None] * K_padded + k[None, :])
            mix = tl.dot(x, part.T, mix, input_precision=PRECISION)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        if ((step + 1) % SLICE_STEPS == 0) | (step + 1 == last):
            if PIECE_STEPS > SLICE_STEPS:
                group_mix += mix
                group_squares += squares
            if ((step + 1) % PIECE_STEPS == 0) | (step + 1 == last):
                out = partials_ptr + (step // PIECE_STEPS * T.to(tl.int64) + t) * (M + 1)
                in_maps = in_batch[:, None] & (m < M)[None, :]
                tl.store(out[:, None] + m[None, :], group_mix if PIECE_STEPS > SLICE_STEPS else mix, mask=in_maps)
                tl.store(out + M, group_squares if PIECE_STEPS > SLICE_STEPS else squares, mask=in_batch)
                if PIECE_STEPS > SLICE_STEPS:
                    group_mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
                    group_squares = tl.zeros([BLOCK_T], tl.float32)
            mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
            squares = tl.zeros([BLOCK_T], tl.float32)


# alpha[section of m]: alpha of the pre, post and res rows
@triton.jit
def alpha_of_row(alpha_ptr, m, n: tl.constexpr):
    section = (m >= n).to(tl.int32) + (m >= 2 * n).to(tl.int32)
    return tl.load(alpha_ptr + section).to(tl.float32)


# h_mix, Σ x² = Σ partials;  inv_rms = rsqrt(Σ x² / K + norm_eps);  z = alpha·h_mix·inv_rms + bias
# h_pre = σ(z_pre) + hc_eps;  h_post = 2σ(z_post);  h_res = z_res;  h_in = Σ_i h_pre[i]·x[i]
@triton.jit(do_not_specialize=["T", "pieces", "blocks_each"])
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
    pieces,
    blocks_each,  # blocks of channels per program
    norm_eps,
    hc_eps,
    n: tl.constexpr,
    GROUP_PIECES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Last tokens first: they are what the projection left in the L2 cache.
    t = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = t < T
    M: tl.constexpr = n * n + 2 * n
    m = tl.arange(0, BLOCK_M)
    in_maps = in_batch[:, None] & (m < M)[None, :]

    total = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    for first in range(0, pieces, GROUP_PIECES):
        group = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
        for piece in tl.static_range(GROUP_PIECES):
            row = ((first + piece) * T.to(tl.int64) + t) * (M + 1)
            present = in_batch[:, None] & (m <= M)[None, :] & (first + piece < pieces)
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
    parts = phi_parts(phi, gamma, n, exact)

    project = configs.project(n, exact.parts == 1, kind)
    plan = configs.plan_projection(T, K, project, processors)
    partials = torch.empty((plan.pieces, T, M + 1), dtype=torch.float32, device=x.device)
    mhc_pre_project_kernel[(triton.cdiv(T, project.block_t) * plan.splits,)](
        x,
        parts,
        partials,
        T,
        K,
        parts.shape[2],
        plan.steps,
        plan.splits,
        M=M,
        PARTS=exact.parts,
        PRECISION=exact.precision,
        EVEN_K=K % project.block_k == 0,
        BY_SLICE=plan.by_slice,
        SLICE_STEPS=project.slice_steps,
        GROUP_SLICES=project.group_slices,
        BLOCK_T=project.block_t,
        BLOCK_M=configs.padded_maps(n),
        BLOCK_K=project.block_k,
        STAGES=project.stages,
        num_warps=project.warps,
    )

    finish = configs.finish(D, kind)
    token_blocks, channel_blocks = triton.cdiv(T, finish.block_t), triton.cdiv(D, finish.block_d)
    blocks_each = configs.channel_blocks_each(channel_blocks, token_blocks, processors)
    mhc_pre_finish_kernel[(token_blocks, triton.cdiv(channel_blocks, blocks_each))](
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
        plan.pieces,
        blocks_each,
        norm_eps,
        hc_eps,
        n=n,
        GROUP_PIECES=project.group_slices if plan.by_slice else 1,
        BLOCK_T=finish.block_t,
        BLOCK_M=triton.next_power_of_2(M + 1),
        BLOCK_D=finish.block_d,
        num_warps=finish.warps,
    )
