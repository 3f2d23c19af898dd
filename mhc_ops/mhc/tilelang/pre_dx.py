"""mHC pre, backward, pass B: dx, and the sums over tokens that dphi and dgamma are made of."""

import tilelang.language as T

from ...core.sizes import cdiv
from . import configs
from .build import F32, kernel
from .parts import fragments, pairs, tiles


def factors(n: int, head: bool) -> int:
    """Numbers per token that pass B multiplies with: x_factor, h_pre[i], h_res[i, j]; in whole 16 bytes."""
    return cdiv(1 + n + (0 if head else n * n), 4) * 4


# dx[t, i] = Σ_m dh_mix[t, m]·alpha[m]·gamma[i]·phi[m, i] + x_factor[t]·x[t, i] + h_pre[t, i]·dh_in[t]
#            + Σ_j h_res[t, i, j]·dx_next[t, j] where residual is "mixed", + dx_next[t, i] where it is "added"
# A[slice, m, i] = Σ_{t in slice} dh_mix[t, m]·x[t, i]
@kernel
def mhc_pre_dx_kernel(n, D, M, dtype, in_dtype, dx_dtype, residual, exact, config):
    """in_dtype: of dh_in, "" where there is none."""
    tokens, slices = T.dynamic("tokens, slices")
    K, rows, head = n * D, configs.padded_maps(M), M == n
    x_parts, parts, part = exact.x_parts, exact.parts, exact.dtype
    block_t, block_d = config.block_t, config.block_d
    own = tuple(range(config.streams))
    needed = tuple(range(n)) if residual == "mixed" else own if residual == "added" else ()
    numbered, read_dtype = tuple(range(x_parts)), in_dtype or dtype
    for_sums, depth = pairs(x_parts, parts), len(pairs(parts, parts, parts)) * rows

    @T.prim_func
    def mhc_pre_dx(
        x: T.Tensor((tokens, K), dtype),
        dh_in: T.Tensor((tokens if in_dtype else 0, D), read_dtype),
        dx_next: T.Tensor((tokens if residual else 0, K), dtype),
        dh_mix: T.Tensor((tokens, depth), part),
        phi: T.Tensor((depth, K), part),
        factor: T.Tensor((tokens, factors(n, head)), F32),
        dx: T.Tensor((tokens, K), dx_dtype),
        A: T.Tensor((slices, M, K), F32),
        steps: T.int32,
    ):
        with T.Kernel(T.ceildiv(D, block_d), n // config.streams, slices, threads=config.threads) as (
            block,
            streams,
            piece,
        ):
            T.annotate_min_blocks_per_sm(config.resident)
            if config.resident > 1:
                T.disable_warp_group_reg_alloc()
            x_tile = tiles(config.streams, (block_t, block_d), dtype)
            x_part = tiles(x_parts if x_parts > 1 else 0, (block_t, block_d), part)
            next_tile = tiles(len(needed), (block_t, block_d), dtype)
            in_tile = T.alloc_shared((block_t, block_d), read_dtype)
            mix_tile = T.alloc_shared((block_t, depth), part)
            phi_tile = tiles(config.streams, (depth, block_d), part)
            factor_tile = T.alloc_shared((block_t, factors(n, head)), F32)
            out_tile = T.alloc_shared((block_t, block_d), dx_dtype)
            total = T.alloc_fragment((block_t, block_d), F32)
            rest = T.alloc_fragment((block_t, block_d), F32)
            sums = fragments(config.streams, (block_d, rows), F32)
            product = T.alloc_fragment((block_d, rows), F32)
            d0 = block * block_d
            first = streams * config.streams
            for s in own:
                T.copy(phi[0, (first + s) * D + d0], phi_tile[s])
                T.clear(sums[s])
            for step in T.Pipelined(steps, num_stages=config.stages) if config.stages else T.serial(steps):
                t0 = (piece * steps + step) * block_t
                for s in own:
                    T.copy(x[t0, (first + s) * D + d0], x_tile[s])
                for j in needed:
                    T.copy(dx_next[t0, ((first if residual == "added" else 0) + j) * D + d0], next_tile[j])
                if in_dtype:
                    T.copy(dh_in[t0, d0], in_tile)
                T.copy(dh_mix[t0, 0], mix_tile)
                T.copy(factor[t0, 0], factor_tile)
                for s in own:
                    if x_parts > 1:
                        for t, d in T.Parallel(block_t, block_d):
                            rest[t, d] = T.cast(x_tile[s][t, d], F32)
                        for p in numbered:
                            for t, d in T.Parallel(block_t, block_d):
                                x_part[p][t, d] = T.cast(rest[t, d], part)
                                rest[t, d] -= T.cast(T.cast(rest[t, d], part), F32)
                    T.clear(product)
                    for i, j in for_sums:
                        T.gemm(
                            x_part[i] if x_parts > 1 else x_tile[s],
                            mix_tile[:, j * rows : (j + 1) * rows],
                            product,
                            transpose_A=True,
                        )
                    for d, m in T.Parallel(block_d, rows):
                        sums[s][d, m] += product[d, m]
                    T.clear(total)
                    T.gemm(mix_tile, phi_tile[s], total)
                    for t, d in T.Parallel(block_t, block_d):
                        total[t, d] += factor_tile[t, 0] * T.cast(x_tile[s][t, d], F32)
                    if in_dtype:
                        for t, d in T.Parallel(block_t, block_d):
                            total[t, d] += factor_tile[t, 1 + first + s] * T.cast(in_tile[t, d], F32)
                    if residual == "mixed":
                        for j in needed:
                            for t, d in T.Parallel(block_t, block_d):
                                total[t, d] += factor_tile[t, 1 + n + (first + s) * n + j] * T.cast(
                                    next_tile[j][t, d], F32
                                )
                    if residual == "added":
                        for t, d in T.Parallel(block_t, block_d):
                            total[t, d] += T.cast(next_tile[s][t, d], F32)
                    T.copy(total, out_tile)
                    for t, d in T.Parallel(block_t, block_d):
                        if t0 + t < tokens and d0 + d < D:
                            dx[t0 + t, (first + s) * D + d0 + d] = out_tile[t, d]
            for s in own:
                for d, m in T.Parallel(block_d, rows):
                    if m < M and d0 + d < D:
                        A[piece, m, (first + s) * D + d0 + d] = sums[s][d, m]

    return mhc_pre_dx
