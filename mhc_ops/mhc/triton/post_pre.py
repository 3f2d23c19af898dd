"""mHC post and the next layer's pre in one call.

Forward: the kernel that makes x_next also projects it, tile by tile, so that the projection costs no read; then pre's
finishing kernel. Backward: pre's, with the gradient of x_next that came from elsewhere added in its second pass; its
dx_next stays in fp32, because post's backward, which reads it, rounds once more.
"""

import torch
import triton
import triton.language as tl

from ...core import device
from . import configs
from .parts import phi_parts
from .post import load_maps, mhc_post_bwd, mix
from .pre_bwd import mhc_pre_bwd
from .pre_fwd import finish, flush_sums


# x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i]
# partials[piece, t, m] = Σ_{d in piece} Σ_j x_next[t, j, d]·phi[m, j, d];  partials[piece, t, M] = Σ x_next²
@triton.jit(do_not_specialize=["T", "slice_steps", "piece_steps", "steps", "splits"])
def mhc_post_project_kernel(
    x_ptr,
    h_out_ptr,
    h_post_ptr,
    h_res_ptr,
    parts_ptr,
    x_next_ptr,
    partials_ptr,
    T,
    D,
    K_padded,
    slice_steps,  # blocks of channels, of all streams, per slice
    piece_steps,  # per piece: of a slice, or of a group
    steps,  # per program, whole pieces
    splits,  # programs per block of tokens
    n: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    split = tl.program_id(0) % splits
    t = (tl.program_id(0) // splits).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = t[:, None]
    in_batch = rows < T
    row = tl.arange(0, PARTS * BLOCK_M)  # the parts of phi, one below the other
    parts = parts_ptr + row.to(tl.int64)[:, None] * K_padded
    is_map = (row % BLOCK_M < M)[:, None]
    if n <= 4:  # more do not fit the registers
        h_post, h_res = load_maps(h_post_ptr, h_res_ptr, rows, in_batch, n)

    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(D, BLOCK_D))
    minus_mix = tl.zeros([BLOCK_T, PARTS * BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    piece_mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    piece_squares = tl.zeros([BLOCK_T], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        d = (step * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
        in_tile = in_batch if EVEN_D else in_batch & (d < D)
        in_parts = is_map if EVEN_D else is_map & (d < D)
        if n > 4:
            h_post, h_res = load_maps(h_post_ptr, h_res_ptr, rows, in_batch, n)
        x = ()
        for i in tl.static_range(n):
            x = x + (tl.load(x_ptr + (rows * n + i) * D + d, mask=in_tile, other=0.0).to(tl.float32),)
        h_out = tl.load(h_out_ptr + rows * D + d, mask=in_tile, other=0.0).to(tl.float32)
        for j in tl.static_range(n):
            x_next = mix(x, h_out, h_post, h_res, j, n).to(x_next_ptr.dtype.element_ty)
            tl.store(x_next_ptr + (rows * n + j) * D + d, x_next, mask=in_tile)
            part = tl.load(parts + j * D + d, mask=in_parts, other=0.0)
            wide = x_next.to(tl.float32)
            minus_mix -= tl.dot(x_next if PARTS == 2 else wide, part.T, input_precision=PRECISION)
            squares += tl.sum(wide * wide, axis=1)
        minus_mix, squares, piece_mix, piece_squares = flush_sums(
            minus_mix,
            squares,
            piece_mix,
            piece_squares,
            partials_ptr,
            t,
            T,
            step,
            last,
            slice_steps,
            piece_steps,
            M,
            PARTS,
            BLOCK_T,
            BLOCK_M,
        )


def mhc_post_pre_fwd(
    x,
    h_out,
    h_post,
    h_res,
    phi,
    alpha,
    bias,
    gamma,
    norm_eps,
    hc_eps,
    post_mult,
    sinkhorn_iters,
    sinkhorn_eps,
    x_next,
    *outputs,
):
    n, D = x.shape[-2:]
    M, K = phi.shape
    T = x.numel() // K
    if T == 0:
        return
    kind, processors = device.kind(x.device), device.multiprocessors(x.device)
    exact = configs.arithmetic(x.dtype, kind)
    parts = phi_parts(phi, gamma, None, n, exact)
    tile = configs.post_project(n, D, exact.parts == 1, kind)
    token_blocks = configs.cdiv(T, tile.block_t)
    cut = configs.cut(K, n * tile.block_d, token_blocks, processors)
    partials = torch.empty((cut.pieces, T, M + 1), dtype=torch.float32, device=x.device)
    mhc_post_project_kernel[(token_blocks * cut.splits,)](
        x,
        h_out,
        h_post,
        h_res,
        parts,
        x_next,
        partials,
        T,
        D,
        parts.shape[2],
        cut.slice_steps,
        cut.piece_steps,
        cut.steps,
        cut.splits,
        n=n,
        M=M,
        PARTS=exact.parts,
        PRECISION=exact.precision,
        EVEN_D=D % tile.block_d == 0,
        BLOCK_T=tile.block_t,
        BLOCK_M=configs.padded_maps(M),
        BLOCK_D=tile.block_d,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    options = (norm_eps, hc_eps, post_mult, sinkhorn_iters, sinkhorn_eps)
    finish(x_next, partials, cut, alpha, bias, *options, *outputs, None)


def mhc_post_pre_bwd(
    x,
    h_out,
    h_post,
    h_res,
    phi,
    alpha,
    bias,
    gamma,
    x_next,
    inv_rms,
    h_mix,
    dx_next,
    dh_in,
    dh_post_next,
    dh_res_next,
    hc_eps,
    post_mult,
    sinkhorn_iters,
    sinkhorn_eps,
    dx,
    dh_out,
    dh_post,
    dh_res,
    *of_parameters,
):
    whole = torch.empty_like(x, dtype=torch.float32)
    maps = (inv_rms, h_mix, dh_in, dh_post_next, dh_res_next)
    options = (hc_eps, post_mult, sinkhorn_iters, sinkhorn_eps)
    mhc_pre_bwd(x_next, phi, alpha, bias, gamma, *maps, dx_next, *options, whole, *of_parameters, mixed=False)
    mhc_post_bwd(x, h_out, h_post, h_res, whole, True, dx, dh_out, dh_post, dh_res)
