"""Exact products on matrix units: factors are split into parts of bf16, which the units multiply without loss.

part 0 = bf16(value), part 1 = bf16(value − part 0), ...: two parts hold 16 bits of a value, three all 24 of fp32. A
product of values is the sum over the pairs of their parts; pairs of the smallest order are left out.
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from ...core import device
from . import configs
from .build import F32, TYPES, grid, kernel, thread


def pairs(left: int, right: int) -> tuple[tuple[int, int], ...]:
    """The pairs of parts that are multiplied, largest products last: 8 bits lie between the orders i + j = 0, 1, 2."""
    kept = [(i, j) for i in range(left) for j in range(right) if i + j < 3]
    return tuple(sorted(kept, key=sum, reverse=True))


def section(m: Any, n: int, head: bool) -> Any:
    """Which alpha is row m's: pre, post or res; the head has one."""
    return 0 if head else T.if_then_else(m < n, 0, T.if_then_else(m < 2 * n, 1, 2))


def tiles(count: int, shape: tuple[int, ...], dtype: str) -> tuple[Any, ...]:
    return tuple(T.alloc_shared(shape, dtype) for _ in range(count))


def fragments(count: int, shape: tuple[int, ...], dtype: str) -> tuple[Any, ...]:
    return tuple(T.alloc_fragment(shape, dtype) for _ in range(count))


def parts_of(value: Any, count: int, dtype: str) -> list[Any]:
    parts: list[Any] = []
    for _ in range(count):
        parts.append(T.cast(value, dtype))
        value = value - T.cast(parts[-1], F32)
    return parts


@T.macro
def split_bf16(values, parts):
    """Split values into tiles, one for each part. The values are not overwritten: TileLang reuses the cast of a vector
    as long as its address is the same, also where its values have changed."""
    for r, c in T.Parallel(*values.shape):
        for p in tuple(range(len(parts))):
            parts[p][r, c] = parts_of(T.cast(values[r, c], F32), len(parts), parts[p].dtype)[p]


def fetch(source: Any, tile: Any, loaded: Any) -> Any:
    """Copy to a tile: at once, or with a barrier that learns how many bytes to expect. The loading threads arrive at it
    when all copies of a phase have begun."""
    return T.copy(source, tile) if loaded is None else T.tma_copy(source, tile, barrier=loaded)


@T.macro
def release(free):
    """Tell the loading threads that this thread has read the tile of `free`. Its reads may still be under way when it
    arrives, and the copies that overwrite the tile do not wait for them: the fence does."""
    T.fence_proxy_async()
    T.barrier_arrive(free)


def weighted(phi: Tensor, gamma: Tensor | None) -> Tensor:
    """gamma ⊙ phi in fp32, or phi without gamma. Rounded, by torch: a kernel that cuts the product into parts may fuse
    it with what is subtracted from it, and another kernel may not."""
    return phi.float() if gamma is None else phi.float() * gamma.float().flatten()


# out[c·rows + m, k] = part order[c] of alpha[section of m]·phi[m, k], zero from row M on
@kernel
def phi_parts_kernel(*, n, M, K, order, dtype, scaled, threads):
    """`scaled`: with alpha."""
    rows = configs.padded_maps(M)
    numbered, numbered_places = tuple(range(max(order) + 1)), tuple(range(len(order)))

    @T.prim_func
    def mhc_phi_parts(
        phi: T.Tensor((M, K), F32),
        alpha: T.Tensor(((3 if M > n else 1) if scaled else 0,), F32),
        out: T.Tensor((len(order) * rows, K), dtype),
    ):
        with grid(T.ceildiv(K, threads.block), rows, threads=threads) as (block, m):
            k = block * threads.block + thread(threads)
            value = T.alloc_local((1,), F32)
            part = T.alloc_local((1,), dtype)
            if k < K:
                value[0] = 0.0
                if m < M:
                    value[0] = phi[m, k]
                    if scaled:
                        value[0] *= alpha[section(m, n, M == n)]
                for p in numbered:
                    part[0] = T.cast(value[0], dtype)
                    for c in numbered_places:
                        if order[c] == p:
                            out[c * rows + m, k] = part[0]
                    value[0] -= T.cast(part[0], F32)

    return mhc_phi_parts


def phi_parts(*, phi: Tensor, alpha: Tensor | None, n: int, order: tuple[int, ...], dtype: str) -> Tensor:
    """The parts `order` of phi, which is `weighted`, times alpha where that is given, as [len(order)·padded_maps, K];
    made anew in each call."""
    M, K = phi.shape
    out = torch.empty((len(order) * configs.padded_maps(M), K), dtype=TYPES[dtype], device=phi.device)
    threads = configs.per_column(device.of(phi.device))
    launch = phi_parts_kernel(n=n, M=M, K=K, order=order, dtype=dtype, scaled=alpha is not None, threads=threads)
    launch(phi=phi, alpha=phi.new_empty(0) if alpha is None else alpha, out=out)
    return out
