"""mHC pre, backward, last step: sums in fixed order become the gradients of parameters and, at a boundary, of the maps
of the sublayer before.

One launch, whose programs have one of three tasks:

    slices   a block of columns of phi: A added up over slices of the tokens, and dphi, dgamma made of it
    tokens   the sums of the per-token kernel: dbias and, up to what the parts of phi leave out, dalpha
    dots     of a boundary: what each of its programs made of its channels for dh_post, dh_res and dread

What the parts of phi leave out comes from the slices. The last of these programs and the tokens' to draw a ticket adds
it to dalpha.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .exact_products import alpha_of_row, rest_of, rounded_product
from .tickets import Ticketed, draw


# A = Σ_slices A[slice], in order;  dphi = alpha·A ⊙ gamma;  dgamma = Σ_M alpha·phi ⊙ A
# dlayer_norm_weight = Σ_slices dweight[slice], in order; 0 without dweight
# missing[block, m] = Σ_{k of the block} rest[m, k]·A[m, k], where rest is what the parts of gamma ⊙ phi leave out
@triton.jit
def sum_slices(
    block,
    A_ptr,
    phi_ptr,
    gamma_ptr,
    alpha_ptr,
    dphi_ptr,
    dgamma_ptr,
    of_norm,  # dweight_ptr, dlayer_norm_weight_ptr
    missing_ptr,
    slices,
    K,
    n: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    dweight_ptr, dlayer_norm_weight_ptr = of_norm
    if dlayer_norm_weight_ptr is not None:
        D = K // n
        total = tl.zeros([BLOCK_K], tl.float32)
        if dweight_ptr is not None:
            of_slice = dweight_ptr + k
            for _ in range(slices):
                total += tl.load(of_slice, mask=k < D, other=0.0)
                of_slice += D
        tl.store(dlayer_norm_weight_ptr + k, total.to(dlayer_norm_weight_ptr.dtype.element_ty), mask=k < D)
    present = (m < M)[:, None] & (k < K)[None, :]
    at = m.to(tl.int64)[:, None] * K + k[None, :]
    A = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    of_slice = A_ptr + at
    slice_size = tl.full((), M, tl.int64) * K
    for _ in tl.range(0, slices, loop_unroll_factor=4):  # several loads in flight
        A += tl.load(of_slice, mask=present, other=0.0)
        of_slice += slice_size
    phi = tl.load(phi_ptr + at, mask=present, other=0.0).to(tl.float32)
    scaled = alpha_of_row(alpha_ptr, m, M, n)[:, None] * A
    if gamma_ptr is None:
        dphi = scaled
    else:
        gamma = tl.load(gamma_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
        dphi = scaled * gamma
        tl.store(dgamma_ptr + k, tl.sum(phi * scaled, axis=0).to(dgamma_ptr.dtype.element_ty), mask=k < K)
        phi = rounded_product(phi, gamma)
    tl.store(dphi_ptr + at, dphi.to(dphi_ptr.dtype.element_ty), mask=present)
    if PARTS > 1:
        missing = tl.sum(rest_of(phi, PARTS, tl.bfloat16) * A, axis=1)
        tl.store(missing_ptr + block * M + m, missing, mask=m < M)


# Σ_rows of a [rows, M] table, in order: BLOCK_R running sums, then those
@triton.jit
def column_sums(
    table_ptr, rows, row_stride: tl.constexpr, M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr
):
    m = tl.arange(0, BLOCK_M)[None, :]
    sums = tl.zeros([BLOCK_R, BLOCK_M], tl.float32)
    for start in range(0, rows, BLOCK_R):
        row = (start + tl.arange(0, BLOCK_R))[:, None]
        sums += tl.load(table_ptr + row.to(tl.int64) * row_stride + m, mask=(row < rows) & (m < M), other=0.0)
    return tl.sum(sums, axis=0)


# dbias = Σ_t dz;  by_row[m] = Σ_t dz·m
@triton.jit
def sum_tokens(sums_ptr, dbias_ptr, programs, M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr):
    m = tl.arange(0, BLOCK_M)
    dbias = column_sums(sums_ptr, programs, 2 * M, M, BLOCK_R, BLOCK_M)
    tl.store(dbias_ptr + m, dbias.to(dbias_ptr.dtype.element_ty), mask=m < M)
    return column_sums(sums_ptr + M, programs, 2 * M, M, BLOCK_R, BLOCK_M)


# dalpha[section] = Σ_{m in section} by_row[m]
@triton.jit
def store_dalpha(dalpha_ptr, by_row, n: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr):
    m = tl.arange(0, BLOCK_M)
    section = (m >= n).to(tl.int32) + (m >= 2 * n).to(tl.int32)
    for s in tl.static_range(3 if M > 2 * n else 2 if M > n else 1):
        dalpha = tl.sum(tl.where((section == s) & (m < M), by_row, 0.0), axis=0)
        tl.store(dalpha_ptr + s, dalpha.to(dalpha_ptr.dtype.element_ty))


# Where m was made from parts of phi, it lacks rest·v·inv_rms, and Σ_t dz·(rest·v·inv_rms) = Σ_k rest·A. In missing_ptr,
# the row after those of the blocks is by_row.
@triton.jit
def add_missing(
    missing_ptr,
    dalpha_ptr,
    blocks,
    n: tl.constexpr,
    M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)
    by_row = tl.load(missing_ptr + blocks * M + m, mask=m < M, other=0.0)
    by_row += column_sums(missing_ptr, blocks, M, M, BLOCK_R, BLOCK_M)
    store_dalpha(dalpha_ptr, by_row, n, M, BLOCK_M)


# dh_post[t, j], dh_res[t, i, j], dread[t, i] = Σ_block dots[block, t], in a fixed order
@triton.jit
def sum_dots(
    program,
    dots_ptr,
    dh_post_ptr,
    dh_res_ptr,
    dread_ptr,
    T,
    blocks,
    n: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    RES: tl.constexpr = 0 if dh_res_ptr is None else n * n
    WIDTH: tl.constexpr = n + RES + (0 if dread_ptr is None else n)
    e = program.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    size = tl.multiple_of(T.to(tl.int64) * WIDTH, WIDTH & -WIDTH)  # so that 16 bytes are loaded at a time
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, blocks, ROWS):
        block = start + tl.arange(0, ROWS)[:, None]
        present = (block < blocks) & (e < size)[None, :]
        total += tl.sum(tl.load(dots_ptr + block * size + e[None, :], mask=present, other=0.0), axis=0)
    t, c = e // WIDTH, e % WIDTH
    in_post = (e < size) & (c < n)
    tl.store(dh_post_ptr + t * n + c, total.to(dh_post_ptr.dtype.element_ty), mask=in_post)
    if dh_res_ptr is not None:
        ij = c - n
        in_res = (e < size) & (ij >= 0) & (ij < n * n)
        place = ij % n * n + ij // n if TRANSPOSED else ij
        tl.store(dh_res_ptr + t * (n * n) + place, total.to(dh_res_ptr.dtype.element_ty), mask=in_res)
    if dread_ptr is not None:
        i = c - (n + RES)
        tl.store(dread_ptr + t * n + i, total.to(dread_ptr.dtype.element_ty), mask=(e < size) & (i >= 0))


@triton.jit(do_not_specialize=["slices", "programs", "T", "dots_blocks"])
def mhc_pre_sums_kernel(
    tickets_ptr,  # zero, also when the kernel has ended; None where mhc_pre_dalpha_kernel follows, or PARTS is 1
    A_ptr,
    sums_ptr,
    phi_ptr,
    gamma_ptr,
    alpha_ptr,
    dphi_ptr,
    dgamma_ptr,
    dalpha_ptr,
    dbias_ptr,
    dweight_ptr,
    dlayer_norm_weight_ptr,
    missing_ptr,
    dots_ptr,
    dh_post_ptr,
    dh_res_ptr,
    dread_ptr,
    slices,
    K,
    programs,
    T,
    dots_blocks,
    n: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program, blocks = tl.program_id(0), tl.cdiv(K, BLOCK_K)
    if program == 0:  # it has the most to do, one row after the other
        by_row = sum_tokens(sums_ptr, dbias_ptr, programs, M, BLOCK_R, BLOCK_M)
        if PARTS > 1:
            m = tl.arange(0, BLOCK_M)
            tl.store(missing_ptr + blocks * M + m, by_row, mask=m < M)
        else:
            store_dalpha(dalpha_ptr, by_row, n, M, BLOCK_M)
    if (program > 0) & (program <= blocks):
        sum_slices(
            block=program - 1,
            A_ptr=A_ptr,
            phi_ptr=phi_ptr,
            gamma_ptr=gamma_ptr,
            alpha_ptr=alpha_ptr,
            dphi_ptr=dphi_ptr,
            dgamma_ptr=dgamma_ptr,
            of_norm=(dweight_ptr, dlayer_norm_weight_ptr),
            missing_ptr=missing_ptr,
            slices=slices,
            K=K,
            n=n,
            M=M,
            PARTS=PARTS,
            BLOCK_M=BLOCK_M,
            BLOCK_K=BLOCK_K,
        )
    if dots_ptr is not None:  # noqa: SIM102 (known when compiling, then when running)
        if program > blocks:
            of_dots = program - blocks - 1
            sum_dots(
                program=of_dots,
                dots_ptr=dots_ptr,
                dh_post_ptr=dh_post_ptr,
                dh_res_ptr=dh_res_ptr,
                dread_ptr=dread_ptr,
                T=T,
                blocks=dots_blocks,
                n=n,
                TRANSPOSED=TRANSPOSED,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
            )
    if PARTS > 1 and tickets_ptr is not None:  # noqa: SIM102 (known when compiling, then when running)
        if program <= blocks:
            drawn = draw(tickets_ptr)
            if drawn == blocks + 1:
                tl.store(tickets_ptr, 0)
                add_missing(missing_ptr, dalpha_ptr, blocks, n, M, BLOCK_R, BLOCK_M)


@triton.jit(do_not_specialize=["blocks"])
def mhc_pre_dalpha_kernel(
    missing_ptr,
    dalpha_ptr,
    blocks,
    n: tl.constexpr,
    M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    add_missing(missing_ptr, dalpha_ptr, blocks, n, M, BLOCK_R, BLOCK_M)


KERNEL = Ticketed(mhc_pre_sums_kernel)


class Dots(NamedTuple):
    """Dots [blocks, T, columns] of a boundary that are still to be added up, and the outputs for their sums."""

    dots: Tensor
    dh_post: Tensor
    dh_res: Tensor | None
    dread: Tensor | None
    transposed: bool


def sum_gradients(
    *,
    A: Tensor,
    sums: Tensor,
    phi: Tensor,
    gamma: Tensor | None,
    alpha: Tensor,
    n: int,
    parts: int,
    dphi: Tensor,
    dgamma: Tensor,
    dalpha: Tensor,
    dbias: Tensor,
    dweight: Tensor | None,
    dlayer_norm_weight: Tensor | None,
    dots: Dots | None,
) -> None:
    """A: [slices, M, K]   sums: [programs, 2, M], Σ dz and Σ dz·m of each program of the per-token kernel
    dweight: [slices, D], or None where nothing used h_in   dots: of a boundary, or None"""
    slices, M, K = A.shape
    on = device.of(A.device)
    tile = configs.sums(M, on)
    blocks = cdiv(K, tile.block_d)
    missing = torch.empty((blocks + 1, M), dtype=torch.float32, device=A.device)
    of_dots = {f"{name}_ptr": getattr(dots, name, None) for name in ("dots", "dh_post", "dh_res", "dread")}
    dots_blocks, tokens, columns = (0, 0, 0) if dots is None else dots.dots.shape
    ticketed = parts > 1 and configs.has_tickets(on)
    launch(
        KERNEL if ticketed else mhc_pre_sums_kernel,
        (1 + blocks + cdiv(tokens * columns, configs.DOTS_COLUMNS),),
        **({} if ticketed else {"tickets_ptr": None}),
        A_ptr=A,
        sums_ptr=sums,
        phi_ptr=phi,
        gamma_ptr=gamma,
        alpha_ptr=alpha,
        dphi_ptr=dphi,
        dgamma_ptr=dgamma,
        dalpha_ptr=dalpha,
        dbias_ptr=dbias,
        dweight_ptr=dweight,
        dlayer_norm_weight_ptr=dlayer_norm_weight,
        missing_ptr=missing,
        **of_dots,
        slices=slices,
        K=K,
        programs=sums.shape[0],
        T=tokens,
        dots_blocks=dots_blocks,
        n=n,
        M=M,
        PARTS=parts,
        TRANSPOSED=dots is not None and dots.transposed,
        BLOCK_M=configs.padded_maps(M),
        BLOCK_K=tile.block_d,
        BLOCK_R=tile.block_t,
        ROWS=configs.DOTS_BLOCKS,
        COLUMNS=configs.DOTS_COLUMNS,
        num_warps=tile.warps,
        **tile.options,
    )
    if parts > 1 and not ticketed:
        launch(
            mhc_pre_dalpha_kernel,
            (1,),
            missing_ptr=missing,
            dalpha_ptr=dalpha,
            blocks=blocks,
            n=n,
            M=M,
            BLOCK_R=tile.block_t,
            BLOCK_M=configs.padded_maps(M),
            num_warps=tile.warps,
        )
