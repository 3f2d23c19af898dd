"""mHC pre, forward: a projection of x, then one kernel that finishes each token.

1. project   partials[piece, t, :] = x[t] · phiᵀ and Σ x², per piece of K = nD
2. pre_finish.py: add the pieces in order, make the maps (Sinkhorn included), sum the streams to h_in and norm it

The head is the same with the pre rows of phi alone.

One order of K for this projection and for the boundary's (boundary_fwd.py): blocks of channels one after the other, and
of each block one stream after the other. A step is a block of channels of one stream: its product starts from zero.

How steps are cut into slices, slices into bundles and bundles into groups depends on n and D only. A slice is summed
from zero by one program; slices are added in order to their bundle, bundles to their group, groups to the total. With
many tokens a program takes a group, and a piece is a group; with few it takes a bundle or a slice, and the finishing
kernel adds the rest up: the same sums in the same order, so a token's bits do not depend on the batch, nor on which
kernel projected it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from ..options import PreOptions
from ..records import Pre
from . import configs, few_tokens
from .exact_products import LANE, load_phi, phi_parts, rest_of, stacked_rows, sum_neighbours, sum_parts
from .pre_finish import finish


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
    parts_ptr,  # phi in parts, in the order of the steps, or None: then it is cut here
    phi_ptr,
    gamma_ptr,
    partials_ptr,
    T,
    D,
    K_padded,
    steps,  # per piece
    pieces,
    SLICE_STEPS: tl.constexpr,
    BUNDLE_STEPS: tl.constexpr,
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
    LANES: tl.constexpr = BLOCK_D // LANE
    K = n * D
    piece = tl.program_id(0) % pieces
    begin = (tl.program_id(0) // pieces).to(tl.int64) * BLOCK_T
    local = tl.arange(0, BLOCK_T)[:, None]
    in_batch = local < T - begin
    row, p = stacked_rows(PARTS, BLOCK_M)
    row, p = row.to(tl.int64)[:, None], p[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]

    first = piece * steps
    last = tl.minimum(first + steps, tl.cdiv(D, BLOCK_D) * n)
    minus_mix = tl.zeros([BLOCK_T, PARTS * BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_T, LANES], tl.float32)  # summed over its columns at the end of a slice
    bundle_mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    bundle_squares = tl.zeros([BLOCK_T], tl.float32)
    piece_mix = tl.zeros([BLOCK_T, BLOCK_M], tl.float32)
    piece_squares = tl.zeros([BLOCK_T], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        d = step // n * BLOCK_D + column
        k = step % n * D + d
        in_tile = in_batch if EVEN_D else in_batch & (d < D)
        x = tl.load(x_ptr + begin * K + (local * K + k), mask=in_tile, other=0.0)
        if parts_ptr is not None:
            at = parts_ptr + (p * BLOCK_M + row) * K_padded + (step * BLOCK_D + column)
            part = tl.load(at, mask=row < M, other=0.0)
        else:
            part = load_phi(phi_ptr, gamma_ptr, row, k, d < D, K, M)
            if PARTS == 2:
                part = tl.where(p == 0, part, rest_of(part, 1, x.dtype)).to(x.dtype)
        wide = x.to(tl.float32)
        # Subtracted, because triton folds an addition into the product's own accumulator and then lets the next loads
        # overwrite x while the asynchronous product still reads it: errors of 1e-2, new ones in each run (3.6, Hopper).
        minus_mix -= tl.dot(x if PARTS == 2 else wide, part.T, input_precision=PRECISION)
        squares += sum_neighbours(wide * wide, BLOCK_T, BLOCK_D, LANES)
        if (step + 1) % SLICE_STEPS == 0:
            bundle_mix -= sum_parts(minus_mix, BLOCK_T, PARTS, BLOCK_M)
            bundle_squares += tl.reshape(sum_neighbours(squares, BLOCK_T, LANES, 1), [BLOCK_T])
            minus_mix = tl.zeros(minus_mix.shape, tl.float32)
            squares = tl.zeros(squares.shape, tl.float32)
            if (step + 1) % BUNDLE_STEPS == 0:
                piece_mix += bundle_mix
                piece_squares += bundle_squares
                bundle_mix = tl.zeros(bundle_mix.shape, tl.float32)
                bundle_squares = tl.zeros(bundle_squares.shape, tl.float32)
    # of a last, short slice, and of a piece that is a slice or ends with a short bundle
    bundle_mix -= sum_parts(minus_mix, BLOCK_T, PARTS, BLOCK_M)
    bundle_squares += tl.reshape(sum_neighbours(squares, BLOCK_T, LANES, 1), [BLOCK_T])
    piece_mix += bundle_mix
    piece_squares += bundle_squares
    store_piece(piece_mix, piece_squares, partials_ptr, piece, begin, T, M, BLOCK_T, BLOCK_M)


def project(x: Tensor, phi: Tensor, gamma: Tensor | None) -> tuple[Tensor, configs.SplitK]:
    """The partial sums [pieces, T, M + 1], and how K was split."""
    n, D = x.shape[-2:]
    M, K = phi.shape
    T = x.numel() // K
    on = device.of(x.device)
    exact = configs.arithmetic(x.dtype, on)
    tile = configs.project(M, D, exact.parts == 1, on)
    token_blocks = cdiv(T, tile.block_t)
    split = configs.split_k(n, D, tile.block_d, token_blocks, on.processors)
    is_cut_here = token_blocks <= configs.FEW_TOKEN_BLOCKS
    parts = None if is_cut_here else phi_parts(phi, gamma, None, n, exact, tile.block_d)
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
        D=D,
        K_padded=0 if parts is None else parts.shape[2],
        steps=split.steps,
        pieces=split.pieces,
        SLICE_STEPS=split.slice_steps,
        BUNDLE_STEPS=split.bundle_steps,
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
    return partials, split


def pre_fwd(pre: Pre) -> None:
    """In one launch where there are few tokens, else by a projection and the finishing kernel."""
    T = pre.x.numel() // pre.phi.shape[1]
    if T == 0:
        return
    tile = few_tokens.chosen(pre.x, T, pre.phi.shape[0])
    if tile is not None:
        few_tokens.few_fwd(tile, pre)
        return
    partials, split = project(pre.x, pre.phi, pre.gamma)
    finish(pre, partials, split)


def mhc_pre_fwd(**arguments: Any) -> None:
    pre_fwd(Pre(**arguments))


def mhc_maps_fwd(**arguments: Any) -> None:
    pre_fwd(Pre(**arguments, h_in=None))


def mhc_layer_pre(*, link: Tensor, read: Tensor | None, h_pre: Tensor, **arguments: Any) -> None:
    """The link is not read."""
    pre_fwd(Pre(**arguments, read=read, h_pre=None if read is None else h_pre))


def mhc_head_fwd(*, norm_eps: float, hc_eps: float, out: Tensor, **arguments: Any) -> None:
    options = PreOptions(norm_eps=norm_eps, hc_eps=hc_eps, sinkhorn_iters=0)
    pre_fwd(Pre(**arguments, options=options, h_in=out))
