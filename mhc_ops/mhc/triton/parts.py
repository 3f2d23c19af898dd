"""Exact products on matrix units: a factor is cut into parts that the units multiply without loss."""

import torch
import triton
import triton.language as tl

from .configs import Arithmetic, maps, padded_maps

COLUMNS = 128  # of K per program of the cut; also what K is padded to


# value = Σ_p parts[p]: for two bf16 parts the high 8 bits and the next 8, for one fp32 part the value itself
@triton.jit
def part_of(value, p: tl.constexpr, dtype: tl.constexpr):
    high = value.to(dtype)
    if p == 0:
        return high
    return (value - high.to(tl.float32)).to(dtype)


# parts[p, m, k] of gamma[k]·phi[m, k], zero where m ≥ M or k ≥ K
@triton.jit
def phi_parts_kernel(
    phi_ptr, gamma_ptr, parts_ptr, K, K_padded, M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr
):
    m = tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    k = (tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    value = tl.load(phi_ptr + m * K + k, mask=(m < M) & (k < K), other=0.0).to(tl.float32)
    if gamma_ptr is not None:
        value *= tl.load(gamma_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    for p in tl.static_range(PARTS):
        tl.store(parts_ptr + (p * BLOCK_M + m) * K_padded + k, part_of(value, p, parts_ptr.dtype.element_ty))


def phi_parts(phi: torch.Tensor, gamma: torch.Tensor | None, n: int, exact: Arithmetic) -> torch.Tensor:
    """gamma ⊙ phi as [parts, padded_maps, K rounded up]; recomputed on each call, 3 bytes per byte of phi."""
    K, M = phi.shape[1], padded_maps(n)
    blocks = triton.cdiv(K, COLUMNS)
    parts = phi.new_empty((exact.parts, M, blocks * COLUMNS), dtype=exact.dtype)
    phi_parts_kernel[(blocks,)](
        phi, gamma, parts, K, blocks * COLUMNS, M=maps(n), BLOCK_M=M, BLOCK_K=COLUMNS, PARTS=exact.parts, num_warps=4
    )
    return parts
