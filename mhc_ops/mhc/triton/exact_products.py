"""Exact products on matrix units: a factor is cut into parts that the units multiply without loss."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import is_hip

from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs

LANE = tl.constexpr(8)  # columns that a thread loads at once
MOST_LEVELS = tl.constexpr(13)  # of sum_neighbours: a row has at most 2^13 columns
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


# left·right in fp32, rounded before anything is subtracted from it. A plain product and that subtraction become one
# fma in some kernels and not in others, as the compiler finds them: a token's bits would depend on its kernel.
@triton.jit
def rounded_product(left, right):
    if INTERPRETED:  # numpy fuses nothing, and runs no assembly
        product = left * right
    elif is_hip():
        product = tl.inline_asm_elementwise("v_mul_f32 $0, $1, $2", "=v,v,v", [left, right], tl.float32, True, 1)
    else:
        product = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], tl.float32, True, 1)
    return product


# Σ over the columns that one thread holds: [rows, columns] to [rows, columns / LANE]
@triton.jit
def own_sums(products, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.sum(tl.reshape(products, [ROWS, COLUMNS // LANE, LANE]), axis=2)


# Σ over the columns down to `TO` of them, each with its neighbour, then pairs with pairs: an order that no layout
# changes, as a sum of two has but one.
@triton.jit
def sum_neighbours(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TO: tl.constexpr):
    for level in tl.static_range(MOST_LEVELS):
        if (COLUMNS >> level) > TO:
            values = tl.sum(tl.reshape(values, [ROWS, COLUMNS >> (level + 1), 2]), axis=2)
    return values


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


# Rows of a matrix product with all parts of phi: the parts of 8 maps, then of the next 8. On matrix units the parts of
# a map are then in one thread, which adds them up.
@triton.jit
def stacked_rows(PARTS: tl.constexpr, BLOCK_M: tl.constexpr):
    row = tl.arange(0, PARTS * BLOCK_M)
    return row // (8 * PARTS) * 8 + row % 8, row // 8 % PARTS  # map, part


# [rows, PARTS·BLOCK_M] of stacked columns to [rows, BLOCK_M]
@triton.jit
def sum_parts(stacked, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr):
    return tl.reshape(tl.sum(tl.reshape(stacked, [ROWS, BLOCK_M // 8, PARTS, 8]), axis=2), [ROWS, BLOCK_M])


# alpha[section of m]: alpha of the pre, post and res rows; 0 from row M on
@triton.jit
def alpha_of_row(alpha_ptr, m, M: tl.constexpr, n: tl.constexpr):
    section = (m >= n).to(tl.int32) + (m >= 2 * n).to(tl.int32)
    return tl.load(alpha_ptr + section, mask=m < M, other=0.0).to(tl.float32)


# gamma[k]·phi[m, k] in fp32, rounded; zero where m ≥ M or k is not present
@triton.jit
def load_phi(phi_ptr, gamma_ptr, m, k, present, K, M: tl.constexpr):
    value = tl.load(phi_ptr + m * K + k, mask=(m < M) & present, other=0.0).to(tl.float32)
    if gamma_ptr is not None:
        value = rounded_product(value, tl.load(gamma_ptr + k, mask=present, other=0.0).to(tl.float32))
    return value


# parts[p, m, k] of gamma[k]·phi[m, k], times alpha[section of m] where that is given; zero where m ≥ M or k ≥ K
# Columns k = i·D + d as in phi or, where BLOCK_D > 0, in the order of the projection: BLOCK_D channels of each stream,
# then the next channels; zero where d ≥ D.
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
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.arange(0, BLOCK_M)[:, None].to(tl.int64)
    to = (tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    if BLOCK_D > 0:
        D = K // n
        d = to // (n * BLOCK_D) * BLOCK_D + to % BLOCK_D
        value = load_phi(phi_ptr, gamma_ptr, m, to // BLOCK_D % n * D + d, d < D, K, M)
    else:
        value = load_phi(phi_ptr, gamma_ptr, m, to, to < K, K, M)
    if alpha_ptr is not None:
        alpha = alpha_of_row(alpha_ptr, m, M, n)
        # Without gamma the compiler may fuse: no other kernel makes these parts.
        value = value * alpha if gamma_ptr is None else rounded_product(value, alpha)
    for p in tl.static_range(PARTS):
        tl.store(parts_ptr + (p * BLOCK_M + m) * K_padded + to, part_of(value, p, parts_ptr.dtype.element_ty))


def phi_parts(
    phi: Tensor,
    gamma: Tensor | None,
    alpha: Tensor | None,
    n: int,
    exact: configs.Arithmetic,
    block_d: int = 0,
) -> Tensor:
    """gamma ⊙ phi, times alpha where that is given, as [parts, padded_maps, K rounded up]; made anew in each call.

    block_d: where it is given, columns come in the order of the projection, in blocks of so many channels."""
    M, K = phi.shape
    padded, tile = configs.padded_maps(M), configs.phi_parts(M)
    columns = cdiv(K // n, block_d) * block_d * n if block_d else K
    K_padded = cdiv(columns, configs.PADDED_K) * configs.PADDED_K
    parts = torch.empty((exact.parts, padded, K_padded), dtype=exact.dtype, device=phi.device)
    launch(
        phi_parts_kernel,
        (K_padded // tile.block_d,),
        phi_ptr=phi,
        gamma_ptr=gamma,
        alpha_ptr=alpha,
        parts_ptr=parts,
        K=K,
        K_padded=K_padded,
        n=n,
        M=M,
        BLOCK_D=block_d,
        PARTS=exact.parts,
        BLOCK_M=padded,
        BLOCK_K=tile.block_d,
        num_warps=tile.warps,
    )
    return parts
