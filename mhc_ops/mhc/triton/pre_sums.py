"""mHC pre, backward, last step: the sums over tokens, in fixed order, become the gradients of parameters."""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .parts import alpha_of_row, rest_of


# A = Σ_slices A[slice], in order;  dphi = alpha·A ⊙ gamma;  dgamma = Σ_M alpha·phi ⊙ A
# dlayer_norm_weight = Σ_slices dweight[slice], in order; 0 without dweight
# missing[program, m] = Σ_{k of the program} rest[m, k]·A[m, k], where rest is what the parts of gamma ⊙ phi leave out
@triton.jit(do_not_specialize=["slices"])
def mhc_pre_dphi_kernel(
    A_ptr,
    phi_ptr,
    gamma_ptr,
    alpha_ptr,
    dphi_ptr,
    dgamma_ptr,
    dweight_ptr,
    dlayer_norm_weight_ptr,
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
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
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
        phi *= gamma
    tl.store(dphi_ptr + at, dphi.to(dphi_ptr.dtype.element_ty), mask=present)
    if PARTS > 1:
        missing = tl.sum(rest_of(phi, PARTS, tl.bfloat16) * A, axis=1)
        tl.store(missing_ptr + tl.program_id(0) * M + m, missing, mask=m < M)


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


# dbias = Σ_t dz;  dalpha[section] = Σ_{m in section} Σ_t dz·m
# Where m was made from parts of phi, it lacks rest·v·inv_rms, and Σ_t dz·(rest·v·inv_rms) = Σ_k rest·A.
@triton.jit(do_not_specialize=["programs", "blocks"])
def mhc_pre_dalpha_kernel(
    sums_ptr,
    missing_ptr,
    dalpha_ptr,
    dbias_ptr,
    programs,
    blocks,
    n: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)
    dbias = column_sums(sums_ptr, programs, 2 * M, M, BLOCK_R, BLOCK_M)
    tl.store(dbias_ptr + m, dbias.to(dbias_ptr.dtype.element_ty), mask=m < M)
    by_row = column_sums(sums_ptr + M, programs, 2 * M, M, BLOCK_R, BLOCK_M)
    if PARTS > 1:
        by_row += column_sums(missing_ptr, blocks, M, M, BLOCK_R, BLOCK_M)
    section = (m >= n).to(tl.int32) + (m >= 2 * n).to(tl.int32)
    for s in tl.static_range(3 if M > 2 * n else 2 if M > n else 1):
        dalpha = tl.sum(tl.where((section == s) & (m < M), by_row, 0.0), axis=0)
        tl.store(dalpha_ptr + s, dalpha.to(dalpha_ptr.dtype.element_ty))


def sum_gradients(*, A, sums, phi, gamma, alpha, n, parts, dphi, dgamma, dalpha, dbias, dweight, dlayer_norm_weight):
    """A: [slices, M, K]   sums: [programs, 2, M], Σ dz and Σ dz·m of each program of the per-token kernel
    dweight: [slices, D], or None where nothing used h_in"""
    slices, M, K = A.shape
    tile = configs.dphi(M, device.of(A.device))
    blocks = cdiv(K, tile.block_d)
    missing = torch.empty((blocks, M), dtype=torch.float32, device=A.device)
    launch(
        mhc_pre_dphi_kernel,
        (blocks,),
        A_ptr=A,
        phi_ptr=phi,
        gamma_ptr=gamma,
        alpha_ptr=alpha,
        dphi_ptr=dphi,
        dgamma_ptr=dgamma,
        dweight_ptr=dweight,
        dlayer_norm_weight_ptr=dlayer_norm_weight,
        missing_ptr=missing,
        slices=slices,
        K=K,
        n=n,
        M=M,
        PARTS=parts,
        BLOCK_M=configs.padded_maps(M),
        BLOCK_K=tile.block_d,
        num_warps=tile.warps,
    )
    launch(
        mhc_pre_dalpha_kernel,
        (1,),
        sums_ptr=sums,
        missing_ptr=missing,
        dalpha_ptr=dalpha,
        dbias_ptr=dbias,
        programs=sums.shape[0],
        blocks=blocks,
        n=n,
        M=M,
        PARTS=parts,
        BLOCK_R=configs.DALPHA.block_t,
        BLOCK_M=configs.padded_maps(M),
        num_warps=configs.DALPHA.warps,
    )
