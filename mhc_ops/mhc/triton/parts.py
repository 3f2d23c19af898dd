"""Exact products on matrix units: a factor is cut into parts that the units multiply without loss."""

import torch
import triton
import triton.language as tl

from . import configs


# what the first `parts` parts of a value leave out
@triton.jit
def rest_of(value, parts: tl.constexpr, dtype: tl.constexpr):
    for _ in tl.static_range(parts):
        value -= value.to(dtype).to(tl.float32)
    return value


# value = Σ_p part_of(value, p): for two bf16 parts the high 8 bits and the next 8, for one fp32 part the value itself
@triton.jit
def part_of(value, p: tl.constexpr, dtype: tl.constexpr):
    return rest_of(value, p, dtype).to(dtype)


# alpha[section of m]: alpha of the pre, post and res rows; 0 from row M on
@triton.jit
def alpha_of_row(alpha_ptr, m, M: tl.constexpr, n: tl.constexpr):
    section = (m >= n).to(tl.int32) + (m >= 2 * n).to(tl.int32)
    return tl.load(alpha_ptr + section, mask=m < M, other=0.0).to(tl.float32)


# parts[p, m, k] of gamma[k]·phi[m, k], times alpha[section of m] where that is given; zero where m ≥ M or k ≥ K
@triton.jit
def phi_parts_kernel(
    phi_ptr,
    gamma_ptr,
    alpha_ptr,
    parts_ptr,
    K,
    K_padded,
    n: tl.constexpr,
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
    if alpha_ptr is not None:
        value *= alpha_of_row(alpha_ptr, m, M, n)
    for p in tl.static_range(PARTS):
        tl.store(parts_ptr + (p * BLOCK_M + m) * K_padded + k, part_of(value, p, parts_ptr.dtype.element_ty))


def phi_parts(
    phi: torch.Tensor, gamma: torch.Tensor | None, alpha: torch.Tensor | None, n: int, exact: configs.Arithmetic
) -> torch.Tensor:
    """gamma ⊙ phi, times alpha where that is given, as [parts, padded_maps, K rounded up]; made anew in each call."""
    M, K = phi.shape
    padded, tile = configs.padded_maps(M), configs.phi_parts(M)
    K_padded = configs.cdiv(K, configs.LONGEST_BLOCK_K) * configs.LONGEST_BLOCK_K
    parts = torch.empty((exact.parts, padded, K_padded), dtype=exact.dtype, device=phi.device)
    phi_parts_kernel[(K_padded // tile.block_d,)](
        phi,
        gamma,
        alpha,
        parts,
        K,
        K_padded,
        n=n,
        M=M,
        PARTS=exact.parts,
        BLOCK_M=padded,
        BLOCK_K=tile.block_d,
        num_warps=tile.warps,
    )
    return parts
