"""mHC pre, backward, pass B: dx, and the sums over tokens that dphi and dgamma are made of."""

import functools
import operator
from enum import Enum, auto

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from . import configs
from .build import F32, kernel
from .exact_products import fetch, fragments, release, split_bf16, tiles


class DxNext(Enum):
    """How dx_next, the gradient of what x becomes, is part of dx."""

    NONE = auto()
    MIXED = auto()  # by h_res
    ADDED = auto()  # as it is


# dx[t, i] = Σ_m dh_mix[t, m]·alpha[m]·gamma[i]·phi[m, i] + x_factor[t]·x[t, i] + h_pre[t, i]·dh_in[t]
#            + Σ_j h_res[t, i, j]·dx_next[t, j] where residual is MIXED, + dx_next[t, i] where it is ADDED
# A[slice, m, i] = Σ_{t in slice} dh_mix[t, m]·x[t, i]
@kernel
def mhc_pre_dx_kernel(*, n, D, M, dtype, in_dtype, dx_dtype, residual, exact, config):
    """in_dtype: the type of dh_in, None without dh_in"""
    tokens, slices = T.dynamic("tokens, slices")
    K, rows, head = n * D, configs.padded_maps(M), M == n
    x_parts, parts, part = exact.x_parts, exact.parts, exact.dtype
    block_t, block_d = config.block_t, config.block_d
    streams = tuple(range(config.streams))
    mixed, added = residual is DxNext.MIXED, residual is DxNext.ADDED
    needed = tuple(range(n)) if mixed else streams if added else ()  # streams of dx_next
    from_in, read_dtype = in_dtype is not None, in_dtype or dtype
    columns = configs.mix_columns(M, parts)
    x_numbered, numbered = tuple(range(x_parts)), tuple(range(parts))
    depth = len(configs.phi_order(parts)) * rows
    orders = tuple((o, depth - (o + 1) * (o + 2) // 2 * rows) for o in reversed(numbered))

    def sum_of_parts(tile, m, d):
        """Smallest first."""
        return functools.reduce(operator.add, [tile[p * rows + m, d] for p in reversed(numbered)])

    @T.macro
    def load_x(t0, first, d0, *, x, dh_mix, x_tile, mix_tile, loaded):
        for s in streams:
            fetch(x[t0, (first + s) * D + d0], x_tile[s], loaded)
        fetch(dh_mix[t0, 0], mix_tile, loaded)

    @T.macro
    def load_rest(t0, first, d0, *, factor, dh_in, dx_next, factor_tile, in_tile, next_tile, loaded):
        fetch(factor[t0, 0], factor_tile, loaded)
        if from_in:
            fetch(dh_in[t0, d0], in_tile, loaded)
        for j in needed:
            fetch(dx_next[t0, ((first if added else 0) + j) * D + d0], next_tile[j], loaded)

    @T.macro
    def multiply(*, x_tile, mix_tile, phi_tile, x_part, mix_own, product, sums, total):
        """sums += dh_mixᵀ·x and total = dh_mix·phi"""
        if config.at_once:
            for o in numbered:
                T.copy(mix_tile[:, 0 : (o + 1) * rows], mix_own[o])
        for s in streams:
            if x_parts > 1:
                split_bf16(x_tile[s], x_part)
            # A fresh product per step: matrix units truncate as they accumulate.
            T.clear(product)
            for p in reversed(x_numbered):
                T.gemm(mix_tile, x_part[p] if x_parts > 1 else x_tile[s], product, transpose_A=True)
            for m, d in T.Parallel(columns, block_d):
                sums[s][m, d] += product[m, d]
            T.clear(total[s])
            for o, place in orders:
                if not config.at_once:
                    T.copy(mix_tile[:, 0 : (o + 1) * rows], mix_own[o])
                T.gemm(mix_own[o], phi_tile[s][place : place + (o + 1) * rows, :], total[s])

    @T.macro
    def add_x(factor_tile, x_tile, total):
        for s in streams:
            for t, d in T.Parallel(block_t, block_d):
                total[s][t, d] += factor_tile[t, 0] * T.cast(x_tile[s][t, d], F32)

    @T.macro
    def add_rest(first, *, factor_tile, in_tile, next_tile, own, total):
        if from_in:
            for t, d in T.Parallel(block_t, block_d):
                own[t, d] = T.cast(in_tile[t, d], F32)
            for s in streams:
                for t, d in T.Parallel(block_t, block_d):
                    total[s][t, d] += factor_tile[t, 1 + first + s] * own[t, d]
        for j in needed:
            for t, d in T.Parallel(block_t, block_d):
                own[t, d] = T.cast(next_tile[j][t, d], F32)
            if mixed:
                for s in streams:
                    for t, d in T.Parallel(block_t, block_d):
                        total[s][t, d] += factor_tile[t, 1 + n + (first + s) * n + j] * own[t, d]
            else:
                for t, d in T.Parallel(block_t, block_d):
                    total[j][t, d] += own[t, d]

    @T.macro
    def store(t0, first, d0, *, total, out_tile, dx):
        for s in streams:
            T.copy(total[s], out_tile)
            for t, d in T.Parallel(block_t, block_d):
                if t0 + t < tokens and d0 + d < D:
                    dx[t0 + t, (first + s) * D + d0 + d] = out_tile[t, d]

    @T.macro
    def store_sums(token_slice, first, d0, *, sums, sums_tile, A):
        for s in streams:
            T.copy(sums[s], sums_tile)
            for m, d in T.Parallel(rows, block_d):
                if m < M and d0 + d < D:
                    A[token_slice, m, (first + s) * D + d0 + d] = sum_of_parts(sums_tile, m, d)

    @T.prim_func
    def mhc_pre_dx(
        x: T.Tensor((tokens, K), dtype),
        dh_in: T.Tensor((tokens if from_in else 0, D), read_dtype),
        dx_next: T.Tensor((tokens if mixed or added else 0, K), dtype),
        dh_mix: T.Tensor((tokens, columns), part),
        phi: T.Tensor((depth, K), part),
        factor: T.Tensor((tokens, configs.factors(n, head)), F32),
        dx: T.Tensor((tokens, K), dx_dtype),
        A: T.Tensor((slices, M, K), F32),
        steps: T.int32,
    ):
        with T.Kernel(T.ceildiv(D, block_d), n // config.streams, slices, threads=config.all_threads) as (
            block,
            group,
            token_slice,
        ):
            T.annotate_min_blocks_per_sm(config.resident)
            x_tile = tiles(config.streams, (block_t, block_d), dtype)
            x_part = tiles(x_parts if x_parts > 1 else 0, (block_t, block_d), part)
            next_tile = tiles(len(needed), (block_t, block_d), dtype)
            in_tile = T.alloc_shared((block_t, block_d), read_dtype)
            out_tile = T.alloc_shared((block_t, block_d), dx_dtype)
            mix_tile = T.alloc_shared((block_t, columns), part)
            phi_tile = tiles(config.streams, (depth, block_d), part)
            factor_tile = T.alloc_shared((block_t, configs.factors(n, head)), F32)
            sums_tile = T.alloc_shared((columns, block_d), F32)
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in (*next_tile, in_tile, out_tile)})
            own = T.alloc_fragment((block_t, block_d), F32)
            total = fragments(config.streams, (block_t, block_d), F32)
            # The first o + 1 parts of dh_mix, for each order o of products: a product takes a fragment as a whole.
            mix_own = tuple(T.alloc_fragment((block_t, (o + 1) * rows), part) for o in numbered)
            product = T.alloc_fragment((columns, block_d), F32)
            sums = fragments(config.streams, (columns, block_d), F32)
            d0, first = block * block_d, group * config.streams
            if not config.loaders:
                for s in streams:
                    T.copy(phi[0, (first + s) * D + d0], phi_tile[s])
                    T.clear(sums[s])
                for step in T.serial(steps):
                    t0 = (token_slice * steps + step) * block_t
                    load_x(t0, first, d0, x=x, dh_mix=dh_mix, x_tile=x_tile, mix_tile=mix_tile, loaded=None)
                    load_rest(
                        t0,
                        first,
                        d0,
                        factor=factor,
                        dh_in=dh_in,
                        dx_next=dx_next,
                        factor_tile=factor_tile,
                        in_tile=in_tile,
                        next_tile=next_tile,
                        loaded=None,
                    )
                    multiply(
                        x_tile=x_tile,
                        mix_tile=mix_tile,
                        phi_tile=phi_tile,
                        x_part=x_part,
                        mix_own=mix_own,
                        product=product,
                        sums=sums,
                        total=total,
                    )
                    add_x(factor_tile, x_tile, total)
                    add_rest(first, factor_tile=factor_tile, in_tile=in_tile, next_tile=next_tile, own=own, total=total)
                    store(t0, first, d0, total=total, out_tile=out_tile, dx=dx)
                store_sums(token_slice, first, d0, sums=sums, sums_tile=sums_tile, A=A)
            else:
                x_loaded, rest_loaded = T.alloc_barrier(config.loaders), T.alloc_barrier(config.loaders)
                x_free, rest_free = T.alloc_barrier(config.threads), T.alloc_barrier(config.threads)
                if T.get_thread_binding() >= config.threads:
                    T.dec_max_nreg(configs.LOADER_REGISTERS)
                    for s in streams:
                        fetch(phi[0, (first + s) * D + d0], phi_tile[s], x_loaded)  # awaited with the first x
                    for step in T.serial(steps):
                        t0 = (token_slice * steps + step) * block_t
                        # The first waits end at once: of a fresh barrier, the odd phase counts as over.
                        T.barrier_wait(x_free, (step + 1) % 2)
                        load_x(t0, first, d0, x=x, dh_mix=dh_mix, x_tile=x_tile, mix_tile=mix_tile, loaded=x_loaded)
                        T.barrier_arrive(x_loaded)
                        T.barrier_wait(rest_free, (step + 1) % 2)
                        load_rest(
                            t0,
                            first,
                            d0,
                            factor=factor,
                            dh_in=dh_in,
                            dx_next=dx_next,
                            factor_tile=factor_tile,
                            in_tile=in_tile,
                            next_tile=next_tile,
                            loaded=rest_loaded,
                        )
                        T.barrier_arrive(rest_loaded)
                else:
                    T.inc_max_nreg(config.registers)
                    for s in streams:
                        T.clear(sums[s])
                    for step in T.serial(steps):
                        t0 = (token_slice * steps + step) * block_t
                        T.barrier_wait(x_loaded, step % 2)
                        multiply(
                            x_tile=x_tile,
                            mix_tile=mix_tile,
                            phi_tile=phi_tile,
                            x_part=x_part,
                            mix_own=mix_own,
                            product=product,
                            sums=sums,
                            total=total,
                        )
                        T.barrier_wait(rest_loaded, step % 2)
                        add_x(factor_tile, x_tile, total)
                        release(x_free)
                        add_rest(
                            first,
                            factor_tile=factor_tile,
                            in_tile=in_tile,
                            next_tile=next_tile,
                            own=own,
                            total=total,
                        )
                        release(rest_free)
                        store(t0, first, d0, total=total, out_tile=out_tile, dx=dx)
                    store_sums(token_slice, first, d0, sums=sums, sums_tile=sums_tile, A=A)

    return mhc_pre_dx
