"""mHC pre, backward, last step: the sums over tokens, in fixed order, become dphi, dgamma, dalpha and dbias."""

import tilelang.language as T
import torch
from torch import Tensor

from ...core import device
from ...core.sizes import cdiv
from . import configs
from .build import F32, grid, in_fp32, kernel, lane_sum, thread
from .exact_products import section


# A = Σ_slices A[slice], in order;  dphi = alpha·A ⊙ gamma;  dgamma = Σ_M alpha·phi ⊙ A
# missing[m, group] = Σ_{k of the group} rest[m, k]·A[m, k], where rest is what the parts of gamma ⊙ phi leave out
@kernel
def mhc_pre_dphi_kernel(*, n, M, K, parts, dtype, weighted, threads):
    """A thread takes a column k. `weighted`: with gamma."""
    slices = T.dynamic("slices")

    @T.prim_func
    def mhc_pre_dphi(
        A: T.Tensor((slices, M, K), F32),
        phi: T.Tensor((M, K), F32),
        gamma: T.Tensor((K if weighted else 0,), F32),
        weighted_phi: T.Tensor((M if weighted else 0, K), F32),
        alpha: T.Tensor((1 if M == n else 3,), F32),
        dphi: T.Tensor((M, K), F32),
        dgamma: T.Tensor((K if weighted else 0,), F32),
        missing: T.Tensor((M, cdiv(K, threads.lanes)), F32),
    ):
        with grid(T.ceildiv(K, threads.block), threads=threads) as block:
            k = block * threads.block + thread(threads)
            total = T.alloc_local((M,), F32)
            weight = T.alloc_local((1,), F32)
            dweight = T.alloc_local((1,), F32)
            rest = T.alloc_local((1,), F32)
            scaled = T.alloc_local((1,), F32)
            weight[0] = 1.0
            dweight[0] = 0.0
            for m in T.unroll(M):
                total[m] = 0.0
            if k < K:
                if weighted:
                    weight[0] = gamma[k]
                for token_slice in T.serial(slices):
                    for m in T.unroll(M):
                        total[m] += A[token_slice, m, k]
            for m in T.unroll(M):
                rest[0] = 0.0
                if k < K:
                    rest[0] = phi[m, k]
                    scaled[0] = alpha[section(m, n, M == n)] * total[m]
                    dweight[0] += rest[0] * scaled[0]
                    dphi[m, k] = weight[0] * scaled[0]
                    if weighted:
                        rest[0] = weighted_phi[m, k]
                    for _ in T.unroll(parts):
                        rest[0] -= T.cast(T.cast(rest[0], dtype), F32)
                rest[0] = lane_sum(rest[0] * total[m], threads)
                if k < K and k % threads.lanes == 0:
                    missing[m, k // threads.lanes] = rest[0]
            if weighted and k < K:
                dgamma[k] = dweight[0]

    return mhc_pre_dphi


# dbias[m] = Σ_t dz;  by_row[m] = Σ_t dz·m
# Where m was made from parts of phi, it lacks rest·v·inv_rms, and Σ_t dz·(rest·v·inv_rms) = Σ_k rest·A.
@kernel
def mhc_pre_dbias_kernel(*, M, threads):
    """A group of lanes takes a row."""
    groups, columns = T.dynamic("groups, columns")

    @T.prim_func
    def mhc_pre_dbias(
        sums: T.Tensor((2, M, groups), F32),
        missing: T.Tensor((M, columns), F32),
        dbias: T.Tensor((M,), F32),
        by_row: T.Tensor((M,), F32),
    ):
        with grid(M, threads=threads) as m:
            lane = thread(threads)
            total = T.alloc_local((2,), F32)
            total[0] = 0.0
            total[1] = 0.0
            for step in T.serial(T.ceildiv(groups, threads.lanes)):
                if step * threads.lanes + lane < groups:
                    total[0] += sums[0, m, step * threads.lanes + lane]
                    total[1] += sums[1, m, step * threads.lanes + lane]
            for step in T.serial(T.ceildiv(columns, threads.lanes)):
                if step * threads.lanes + lane < columns:
                    total[1] += missing[m, step * threads.lanes + lane]
            total[0] = lane_sum(total[0], threads)
            total[1] = lane_sum(total[1], threads)
            if lane == 0:
                dbias[m] = total[0]
                by_row[m] = total[1]

    return mhc_pre_dbias


# dalpha[section] = Σ_{m in section} by_row[m]
@kernel
def mhc_pre_dalpha_kernel(*, n, M, threads):
    sections = ((0, n), (n, 2 * n), (2 * n, M)) if M > n else ((0, n),)

    @T.prim_func
    def mhc_pre_dalpha(by_row: T.Tensor((M,), F32), dalpha: T.Tensor((len(sections),), F32)):
        with grid(1, threads=threads):
            total = T.alloc_local((1,), F32)
            if thread(threads) == 0:
                for section, (begin, end) in enumerate(sections):
                    total[0] = 0.0
                    for m in T.unroll(begin, end):
                        total[0] += by_row[m]
                    dalpha[section] = total[0]

    return mhc_pre_dalpha


def sum_gradients(
    *,
    A: Tensor,
    sums: Tensor,
    phi: Tensor,
    gamma: Tensor | None,
    weighted_phi: Tensor,
    alpha: Tensor,
    n: int,
    exact: configs.Arithmetic,
    dphi: Tensor,
    dgamma: Tensor,
    dalpha: Tensor,
    dbias: Tensor,
) -> None:
    """A: [slices, M, K]   sums: [2, M, groups], Σ dz and Σ dz·m of each group of tokens"""
    _, M, K = A.shape
    on = device.of(A.device)
    threads, weighted = configs.per_column(on), gamma is not None
    missing = torch.empty((M, cdiv(K, threads.lanes)), dtype=torch.float32, device=A.device)
    by_row = torch.empty(M, dtype=torch.float32, device=A.device)
    launch_dphi = mhc_pre_dphi_kernel(
        n=n, M=M, K=K, parts=exact.parts, dtype=exact.dtype, weighted=weighted, threads=threads
    )
    launch_dbias = mhc_pre_dbias_kernel(M=M, threads=configs.per_token(on))
    launch_dalpha = mhc_pre_dalpha_kernel(n=n, M=M, threads=configs.per_token(on))
    with in_fp32(dphi=dphi, dgamma=dgamma, dalpha=dalpha, dbias=dbias) as wide:
        launch_dphi(
            A=A,
            phi=phi,
            gamma=A.new_empty(0) if gamma is None else gamma.view(K),
            weighted_phi=weighted_phi if weighted else A.new_empty(0, K),
            alpha=alpha,
            dphi=wide["dphi"],
            dgamma=wide["dgamma"].view(-1),
            missing=missing,
        )
        launch_dbias(sums=sums, missing=missing, dbias=wide["dbias"], by_row=by_row)
        launch_dalpha(by_row=by_row, dalpha=wide["dalpha"].view(-1))
