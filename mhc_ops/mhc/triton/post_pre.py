"""mHC post and the next layer's pre in one call.

Forward: the kernel that makes x_next also projects it, tile by tile, so that the projection costs no read; then pre's
finishing kernel. Backward: one after the other.
"""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from ..composed import next_fwd, post_pre_bwd
from . import configs
from .parts import LANE, own_sums, phi_parts, stacked_rows, sum_parts
from .post import load_maps, mhc_post_bwd, mhc_post_fwd, mix
from .pre_bwd import mhc_pre_bwd
from .pre_finish import finish
from .pre_fwd import mhc_pre_fwd, project, store_piece


# One tile [tokens, channels·N] of the tiles of N streams, the streams of a channel side by side
@triton.jit
def interleave(x, N: tl.constexpr):
    if N == 1:
        joined = x[0]
    elif N == 2:
        joined = tl.join(x[0], x[1])
    elif N == 4:
        joined = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    else:
        even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
        joined = tl.join(even, tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7])))
    return tl.reshape(joined, [x[0].shape[0], x[0].shape[1] * N])


# x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i]
# partials[piece, t, m] = Σ_{d in piece} Σ_j x_next[t, j, d]·phi[m, j, d];  partials[piece, t, M] = Σ x_next²
@triton.jit(do_not_specialize=["T", "steps", "pieces"])
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
    steps,  # blocks of channels, of all streams, per piece
    pieces,
    SLICE_STEPS: tl.constexpr,
    n: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    piece = tl.program_id(0) % pieces
    begin = (tl.program_id(0) // pieces).to(tl.int64) * BLOCK_T
    # Addresses are 64 bits of the block's first token and 32 bits from there: half the registers.
    local = tl.arange(0, BLOCK_T)[:, None]
    in_batch = local < T - begin
    x_ptr += begin * n * D
    x_next_ptr += begin * n * D
    h_out_ptr += begin * D
    row, p = stacked_rows(PARTS, BLOCK_M)
    rows = (p * BLOCK_M + row)[:, None] * K_padded
    is_map = (row < M)[:, None]
    if n <= 4:  # more do not fit the registers
        h_post, h_res = load_maps(h_post_ptr, h_res_ptr, begin + local, in_batch, n)

    first = piece * steps
    last = tl.minimum(first + steps, tl.cdiv(D, BLOCK_D))
    minus_mix = tl.zeros([BLOCK_T, PARTS * BLOCK_M], tl.float32)
    k = tl.arange(0, BLOCK_D * N)[None, :]
    squares = tl.zeros([BLOCK_T, BLOCK_D * N // LANE], tl.float32)  # summed over its columns at the end of a slice
    piece_mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    piece_squares = tl.zeros([BLOCK_T], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        at = step * BLOCK_D
        d = tl.arange(0, BLOCK_D)[None, :]
        in_tile = in_batch if EVEN_D else in_batch & (d < D - at)
        if n > 4:
            h_post, h_res = load_maps(h_post_ptr, h_res_ptr, begin + local, in_batch, n)
        x = ()
        for i in tl.static_range(n):
            x = x + (tl.load(x_ptr + at + ((local * n + i) * D + d), mask=in_tile, other=0.0).to(tl.float32),)
        h_out = tl.load(h_out_ptr + at + (local * D + d), mask=in_tile, other=0.0).to(tl.float32)
        all_next = ()
        for j in tl.static_range(N):
            if j < n:
                x_next = mix(x, h_out, h_post, h_res, j, n).to(x_next_ptr.dtype.element_ty)
                tl.store(x_next_ptr + at + ((local * n + j) * D + d), x_next, mask=in_tile)
            else:
                x_next = tl.zeros([BLOCK_T, BLOCK_D], x_next_ptr.dtype.element_ty)
            all_next = all_next + (x_next,)
        x_next = interleave(all_next, N)
        wide = x_next.to(tl.float32)
        part = tl.load(parts_ptr + at * N + (rows + k), mask=is_map, other=0.0)
        # Transposed, so that x_next goes to the product through shared memory: as its left side it would be computed
        # a second time, in the layout of that side.
        minus_mix -= tl.dot(part, (x_next if PARTS == 2 else wide).T, input_precision=PRECISION).T
        squares += own_sums(wide * wide, BLOCK_T, BLOCK_D * N)
        if (step + 1) % SLICE_STEPS == 0:
            piece_mix -= sum_parts(minus_mix, BLOCK_T, PARTS, BLOCK_M)
            piece_squares += tl.sum(squares, axis=1)
            minus_mix = tl.zeros(minus_mix.shape, tl.float32)
            squares = tl.zeros(squares.shape, tl.float32)
    piece_mix -= sum_parts(minus_mix, BLOCK_T, PARTS, BLOCK_M)  # of a last, short slice
    piece_squares += tl.sum(squares, axis=1)
    store_piece(piece_mix, piece_squares, partials_ptr, piece, begin, T, M, BLOCK_T, BLOCK_M)


def mhc_post_pre_fwd(
    *,
    x,
    h_out,
    h_post,
    h_res,
    phi,
    gamma,
    x_next,
    h_post_next,
    h_res_next,
    **of_finish,
):
    """of_finish: what else pre's finishing kernel takes and fills, of the next layer"""
    if x.numel() == 0:
        return
    tile = configs.post_project(x.shape[-2], x.shape[-1], x.dtype != torch.bfloat16, device.of(x.device))
    if tile is None:
        mhc_post_fwd(x=x, h_out=h_out, h_post=h_post, h_res=h_res, x_next=x_next)
        partials, split = project(x_next, phi, gamma)
    else:
        partials, split = post_project(
            x=x, h_out=h_out, h_post=h_post, h_res=h_res, phi=phi, gamma=gamma, x_next=x_next, tile=tile
        )
    finish(x=x_next, partials=partials, split=split, h_post=h_post_next, h_res=h_res_next, **of_finish)


def post_project(*, x, h_out, h_post, h_res, phi, gamma, x_next, tile):
    """Fills x_next; returns the partial sums [pieces, T, M + 1], and how K was split."""
    n, D = x.shape[-2:]
    M, K = phi.shape
    T, N = x.numel() // K, next_power_of_2(n)
    on = device.of(x.device)
    exact = configs.arithmetic(x.dtype, on)
    parts = phi_parts(phi, gamma, None, n, exact, stride=N)
    token_blocks = cdiv(T, tile.block_t)
    split = configs.split_k(K, n * tile.block_d, token_blocks, on.processors)
    partials = torch.empty((split.pieces, T, M + 1), dtype=torch.float32, device=x.device)
    launch(
        mhc_post_project_kernel,
        (token_blocks * split.pieces,),
        x_ptr=x,
        h_out_ptr=h_out,
        h_post_ptr=h_post,
        h_res_ptr=h_res,
        parts_ptr=parts,
        x_next_ptr=x_next,
        partials_ptr=partials,
        T=T,
        D=D,
        K_padded=parts.shape[2],
        steps=split.steps,
        pieces=split.pieces,
        SLICE_STEPS=split.slice_steps,
        n=n,
        N=N,
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
    return partials, split


mhc_post_pre_bwd = post_pre_bwd(mhc_pre_bwd, mhc_post_bwd)
mhc_next_fwd = next_fwd(mhc_post_fwd, mhc_pre_fwd)
