"""Exact products on matrix units: a factor is cut into parts that the units multiply without loss."""

import torch
import triton
import triton.language as tl

from . import configs


# value = Σ_p part_of(value, p): for two bf16 parts the high 8 bits and the next 8, for one fp32 part the value itself
@triton.jit
def part_of(value, p: tl.constexpr, dtype: tl.constexpr):
    for _ in tl.static_range(p):
        value -= value.to(dtype).to(tl.float32)
    return value.to(dtype)


# what the parts leave out: value − Σ_p part_of(value, p)
@triton.jit
def rest_of(value, PARTS: tl.constexpr, dtype: tl.constexpr):
    for _ in tl.static_range(PARTS):
        value -= value.to(dtype).to(tl.float32)
    return value


# parts[p, m, k] of gamma[k]·phi[m, k], zero where m ≥ M or k ≥ K
@triton.jit
def phi_parts_kernel(
    phi_ptr,
    gamma_ptr,
    parts_ptr,
    K,
    K_padded,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    k = (tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    value = tl.load(phi_ptr + m * K + k, mask=(m < M) & (k < K), other=0.0).to(tl.float32)
    if gamma_ptr is not None:
        value *= tl.load(gamma_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    for p in tl.static_range(PARTS):
        tl.store(parts_ptr + (p * BLOCK_M + m) * K_padded + k, part_of(value, p, parts_ptr.dtype.element_ty))


def phi_parts(phi: torch.Tensor, gamma: torch.Tensor | None, n: int, exact: configs.Arithmetic) -> torch.Tensor:
    """gamma ⊙ phi as [parts, padded_maps, K rounded up], made anew in each call."""
    K, M, tile = phi.shape[1], configs.padded_maps(n), configs.phi_parts(n)
    K_padded = configs.cdiv(K, configs.LONGEST_BLOCK_K) * configs.LONGEST_BLOCK_K
    parts = phi.new_empty((exact.parts, M, K_padded), dtype=exact.dtype)
    phi_parts_kernel[(K_padded // tile.block_d,)](
        phi,
        gamma,
        parts,
        K,
        K_padded,
        M=configs.maps(n),
        PARTS=exact.parts,
        BLOCK_M=M,
        BLOCK_K=tile.block_d,
        num_warps=tile.warps,
    )
    return parts
