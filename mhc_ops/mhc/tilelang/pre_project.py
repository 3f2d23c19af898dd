"""mHC pre, forward, first step: the projection of x on phi, and Σ x², per slice of K = nD.

How K is split into slices depends on n and D only, so a token's bits do not depend on the batch.
"""

from typing import Any, NamedTuple

import tilelang.language as T
import torch
from torch import Tensor

from ...core import device
from . import configs
from .build import F32, NAMES, kernel
from .exact_products import fetch, pairs, phi_parts, release, split_bf16, tiles, weighted


class Held(NamedTuple):
    """What a block adds up, and the tiles that it needs for that."""

    x_part: Any
    own: Any
    squares: Any
    square: Any
    product: Any
    mix: Any
    mix_tile: Any


# partials[slice, m, t] = Σ_{k in slice} phi[m, k]·x[t, k];  partials[slice, M, t] = Σ_{k in slice} x[t, k]²
@kernel
def mhc_pre_project_kernel(*, M, K, dtype, exact, config):
    tokens = T.dynamic("tokens")
    rows, x_parts = configs.padded_maps(M), exact.x_parts
    products = pairs(x_parts, exact.parts)
    block_t, block_k, slice_k = config.block_t, config.block_k, config.slice_k
    slices = config.slices(K)
    steps, slots = slice_k // block_k, tuple(range(config.stages))

    @T.macro
    def load(program, step, x, phi, x_tile, phi_tile, loaded):
        k0 = program % slices * slice_k + step * block_k
        fetch(x[program // slices * block_t, k0], x_tile, loaded)
        fetch(phi[0, k0], phi_tile, loaded)

    @T.macro
    def add(x_tile, phi_tile, held):
        # A fresh product per step: matrix units truncate as they accumulate.
        T.clear(held.product)
        for t, k in T.Parallel(block_t, block_k):
            held.own[t, k] = T.cast(x_tile[t, k], F32)
            held.squares[t, k] += held.own[t, k] * held.own[t, k]
        if x_parts > 1:
            split_bf16(held.own, held.x_part)
        for i, j in products:
            T.gemm(
                held.x_part[i] if x_parts > 1 else x_tile,
                phi_tile[j * rows : (j + 1) * rows, :],
                held.product,
                transpose_B=True,
            )
        for t, m in T.Parallel(block_t, rows):
            held.mix[t, m] += held.product[t, m]

    @T.macro
    def store(program, held, partials):
        k_slice, t0 = program % slices, program // slices * block_t
        T.reduce_sum(held.squares, held.square, dim=1)
        T.copy(held.mix, held.mix_tile)
        for m, t in T.Parallel(M, block_t):
            if t0 + t < tokens:
                partials[k_slice, m, t0 + t] = held.mix_tile[t, m]
        for t in T.Parallel(block_t):
            if t0 + t < tokens:
                partials[k_slice, M, t0 + t] = held.square[t]

    @T.prim_func
    def mhc_pre_project(
        x: T.Tensor((tokens, K), dtype),
        phi: T.Tensor((exact.parts * rows, K), exact.dtype),
        partials: T.Tensor((slices, M + 1, tokens), F32),
    ):
        with T.Kernel(slices * T.ceildiv(tokens, block_t), threads=config.all_threads) as program:
            T.annotate_min_blocks_per_sm(config.resident)
            x_tile = tiles(config.stages, (block_t, block_k), dtype)
            phi_tile = tiles(config.stages, (exact.parts * rows, block_k), exact.dtype)
            x_part = tiles(x_parts if x_parts > 1 else 0, (block_t, block_k), exact.dtype)
            own = T.alloc_fragment((block_t, block_k), F32)
            squares = T.alloc_fragment((block_t, block_k), F32)
            square = T.alloc_fragment((block_t,), F32)
            product = T.alloc_fragment((block_t, rows), F32)
            mix = T.alloc_fragment((block_t, rows), F32)
            mix_tile = T.alloc_shared((block_t, rows), F32)
            held = Held(x_part, own, squares, square, product, mix, mix_tile)
            if not config.loaders:
                T.clear(mix)
                T.clear(squares)
                for step in T.serial(steps):
                    load(program, step, x, phi, x_tile[0], phi_tile[0], loaded=None)
                    add(x_tile[0], phi_tile[0], held)
                store(program, held, partials)
            else:
                loaded = tuple(T.alloc_barrier(config.loaders) for _ in slots)
                free = tuple(T.alloc_barrier(config.threads) for _ in slots)
                if T.get_thread_binding() >= config.threads:
                    T.dec_max_nreg(configs.LOADER_REGISTERS)
                    for turn in T.serial(T.ceildiv(steps, config.stages)):
                        for slot in slots:
                            if turn * config.stages + slot < steps:
                                # The first wait ends at once: of a fresh barrier, the odd phase counts as over.
                                T.barrier_wait(free[slot], (turn + 1) % 2)
                                step = turn * config.stages + slot
                                load(program, step, x, phi, x_tile[slot], phi_tile[slot], loaded=loaded[slot])
                                T.barrier_arrive(loaded[slot])
                else:
                    T.inc_max_nreg(config.registers)
                    T.clear(mix)
                    T.clear(squares)
                    for turn in T.serial(T.ceildiv(steps, config.stages)):
                        for slot in slots:
                            if turn * config.stages + slot < steps:
                                T.barrier_wait(loaded[slot], turn % 2)
                                add(x_tile[slot], phi_tile[slot], held)
                                release(free[slot])
                    store(program, held, partials)

    return mhc_pre_project


def project(x: Tensor, phi: Tensor, gamma: Tensor | None) -> Tensor:
    """The partial sums [slices, M + 1, T]."""
    M, K = phi.shape
    T, dtype = x.numel() // K, NAMES[x.dtype]
    on = device.of(x.device)
    exact, config = configs.arithmetic(dtype, on), configs.project(M, K, dtype, on)
    partials = torch.empty((config.slices(K), M + 1, T), dtype=torch.float32, device=x.device)
    parts = phi_parts(
        phi=weighted(phi, gamma),
        alpha=None,
        n=x.shape[-2],
        order=tuple(range(exact.parts)),
        dtype=exact.dtype,
    )
    launch = mhc_pre_project_kernel(M=M, K=K, dtype=dtype, exact=exact, config=config)
    launch(x=x.view(T, K), phi=parts, partials=partials)
    return partials
