"""Block sizes, warps and stages, each chosen by a pure function of shape and device, with the measurement behind it.

Measured on an H200 (copy 4,200 GB/s), torch 2.11, triton 3.6, bf16, n = 4, cold L2, unless a line says otherwise. No
autotuning: results must not depend on what ran before, and the first call must not stall. The token count T is never
compiled in. The interpreter (kind "cpu") wants few, large programs. What is chosen for other GPUs than Hopper's is
compiled for them (docs/gpus.md), without spills and within their shared memory, but was not timed there.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from ...core.device import Device
from ...core.sizes import cdiv, floor_power_of_2, next_power_of_2

LARGE_SHARED_MEMORY = 200 * 1024  # bytes
HOPPER = (9, 0)


def compact(on: Device) -> bool:
    """Whether tiles are small: on NVIDIA GPUs with less shared memory a program than Hopper and its successors have
    (227 KB). On those before Hopper, and on RTX 50, products also take their operands from registers, which the large
    tiles overflow."""
    return on.kind == "cuda" and on.shared_memory < LARGE_SHARED_MEMORY


def maps(n: int) -> int:
    """M: rows of phi, except in the head."""
    return n * n + 2 * n


@cache
def padded_maps(M: int) -> int:
    """M as a side of a matrix product: a power of two, at least 16."""
    return max(16, next_power_of_2(M))


@dataclass(frozen=True)
class Arithmetic:
    """How a product is made exact. Values are cut into `parts` of `dtype`; products use `precision`."""

    parts: int
    dtype: torch.dtype
    precision: str


@cache
def arithmetic(x_dtype: torch.dtype, on: Device) -> Arithmetic:
    """bf16 x: the other side in two bf16 parts, 16 bits, 2.5e-6 in norm (a third part: 4e-7, 7 % slower). fp16 and fp32
    x: three tf32 products (CUDA) or plain fp32 ones (HIP), as fp16 parts lack the range and single tf32 is 3e-4 off."""
    if x_dtype == torch.bfloat16:
        return Arithmetic(2, torch.bfloat16, "ieee")
    return Arithmetic(1, torch.float32, "tf32x3" if on.kind == "cuda" else "ieee")


@dataclass(frozen=True)
class Tile:
    """A kernel's block of tokens (or rows) × channels (or columns of K), its warps and software-pipeline stages."""

    block_t: int
    block_d: int
    warps: int
    stages: int = 1


@cache
def sinkhorn(n: int, on: Device) -> Tile:
    if on.kind == "cpu":
        return Tile(256, 0, 4)
    return Tile(64 if n <= 2 else 32 if n <= 4 else 8, 0, 4)


PADDED_K = 256  # columns of phi in parts come in multiples of this: whole blocks of any kernel


@cache
def phi_parts(M: int) -> Tile:
    """Between 4.7 and 5.3 µs at n = 4, D = 4096 for 32 to 128 columns and 1 to 4 warps: what a launch takes."""
    return Tile(0, 128 if padded_maps(M) <= 32 else 32, 4)


@cache
def project(M: int, K: int, wide: bool, on: Device) -> Tile:
    """64 tokens × 128 of K, 4 warps, 3 stages: 79.7 µs at T = 8192, D = 4096 (the same loads without a product: 76) and
    31.8 at T = 4096, D = 2560; 64 × 64 77.4 and 38.4, 128 × 64 with 8 warps 80, 128 × 128 with 2 stages 107.

    `wide`: x is not bf16. Rows of phi in parts fill the registers as n grows, addresses do where rows are unaligned."""
    if on.kind == "cpu":
        return Tile(128, 64, 4, 1)
    rows = padded_maps(M) * (1 if wide else 2)
    small = wide or rows > 128 or not aligned(K)
    block_k = 32 if small else 128 if rows <= 64 else 64
    if compact(on):
        return Tile(32 if padded_maps(M) > (32 if wide else 64) else 64, block_k, 8, 2)
    cramped = rows > 128 if on.kind == "hip" else M == maps(8) and not aligned(K)
    return Tile(32 if cramped else 64, block_k, 4 if rows <= 64 else 8, 2 if on.kind == "hip" else 3)


# Up to this many blocks of tokens the projection cuts phi into parts itself. That saves a launch, about 10 µs on the
# host; on the device 0.7 µs at T = 1 and 0.9 at T = 256, D = 4096 (1.1 µs more at D = 7168). At T = 512 it costs 2.
FEW_TOKEN_BLOCKS = 4


def aligned(row: int) -> bool:
    """Whether rows of this many elements are read 16 bytes at a time. Triton knows of a size if 16 divides it."""
    return row % 16 == 0


@dataclass(frozen=True)
class SplitK:
    """K as slices, groups of slices, and pieces (slices or groups), each of which one program sums and stores."""

    slice_steps: int  # blocks of K per slice
    steps: int  # blocks of K per piece
    pieces: int
    group_pieces: int  # pieces per group


MOST_SLICES, SHORTEST_SLICE, MOST_GROUPS, SHORTEST_GROUP = 32, 512, 4, 16


@lru_cache(maxsize=4096)
def split_k(K: int, block_k: int, token_blocks: int, processors: int) -> SplitK:
    """Slices and groups are a function of n and D alone: up to 32 slices, none shorter than 512 columns, in up to 4
    groups of at least 16 blocks (fewer do not fill the pipeline). Pieces are groups where that gives every
    multiprocessor a program: 16 stored slices cost 3 µs in each of the two kernels at T = 8192, D = 4096.
    One token at D = 7168 takes 17.8 µs with 32 slices, 22.5 with 16."""
    steps = cdiv(K, block_k)
    slice_steps = cdiv(steps, min(MOST_SLICES, floor_power_of_2(K // SHORTEST_SLICE)))
    slices = cdiv(steps, slice_steps)
    group_slices = cdiv(slices, max(1, min(MOST_GROUPS, steps // SHORTEST_GROUP)))
    piece_slices = group_slices if token_blocks * cdiv(slices, group_slices) >= processors else 1
    return SplitK(slice_steps, piece_slices * slice_steps, cdiv(slices, piece_slices), group_slices // piece_slices)


def whole_token(n: int, D: int) -> Tile:
    """All channels of a token, 16 a thread; in blocks where streams are many or long."""
    if n > 4 or D > 8192:
        return Tile(1, min(1024, next_power_of_2(D)), 4)
    return Tile(1, next_power_of_2(D), min(16, max(1, next_power_of_2(D) // 512)))


@cache
def finish(D: int, on: Device) -> Tile:
    """2 tokens × 256 channels, 1 warp: 85.8 µs at T = 8192, D = 4096 with 20 Sinkhorn iterations, which one warp does
    once; 512 channels with 2 warps 86.7, 1024 with 4 warps 88, 4 tokens 99."""
    if on.kind == "cpu":
        return Tile(64, min(1024, next_power_of_2(D)), 4)
    return Tile(2, min(256, next_power_of_2(D)), 1)


@cache
def normed_finish(n: int, D: int, on: Device) -> Tile:
    """A whole token, so that h_in is in registers until its norm is known; in blocks, h_in is made twice. Not timed."""
    if on.kind == "cpu":
        return finish(D, on)
    return replace(whole_token(n, D), warps=8) if n == 8 else whole_token(n, D)  # 4 warps spill 8 bytes there


def channel_blocks_each(channel_blocks: int, token_blocks: int, processors: int) -> int:
    """Blocks of channels per program of the finishing kernel: all when the tokens fill the device, else a share."""
    splits = min(channel_blocks, cdiv(4 * processors, token_blocks))
    return cdiv(channel_blocks, splits)


@cache
def dh_pre(n: int, D: int, wide: bool, on: Device) -> Tile:
    """1 token × 2048 channels, 4 warps: 84.5 µs at T = 8192, D = 4096 (3,970 GB/s); 1024 channels 86.5."""
    if on.kind == "cpu":
        return Tile(64, min(1024, next_power_of_2(D)), 4)
    block_d = 2048 if D % 2048 == 0 and n <= 4 and not wide else 1024 if not wide else 512
    return Tile(1, min(block_d, next_power_of_2(D)), 4)


@cache
def normed_dh_pre(n: int, D: int, wide: bool, on: Device) -> Tile:
    """Half the channels of dh_pre, as there are twice the sums. Not timed."""
    if on.kind == "cpu":
        return dh_pre(n, D, wide, on)
    block_d = 1024 if n <= 4 and not wide else 512
    return Tile(1, min(block_d, next_power_of_2(D)), 4)


@cache
def read_bwd(n: int, D: int, on: Device) -> Tile:
    """Twice the channels spill 8 bytes (sm_90 at n = 4, sm_100 at n = 8). Not timed."""
    if on.kind == "cpu":
        return Tile(64, min(1024, next_power_of_2(D)), 4)
    return Tile(1, min(512 if n <= 4 else 256, next_power_of_2(D)), 4)


@cache
def dmaps(n: int, on: Device) -> Tile:
    """32 tokens, 1 warp: 13.8 µs at T = 8192 with 20 Sinkhorn iterations (no token's sums cross a warp); 64 tokens with
    2 warps 15.2, 32 with 4 warps 28."""
    if on.kind == "cpu":
        return Tile(64, 0, 4)
    if n > 4:
        return Tile(8, 0, 2)
    return Tile(16 if compact(on) else 32, 0, 1)


@dataclass(frozen=True)
class Dx(Tile):
    streams: int = 1  # of one program: a power of two that divides n


@cache
def dx(n: int, D: int, wide: bool, residual: bool, on: Device) -> Dx:
    """With the residual gradient, 32 tokens × 32 channels × 4 streams, 4 warps, 3 stages: 252 µs at T = 8192, D = 4096
    (3,470 GB/s); 16 × 64 261, 32 × 64 with 2 stages 272, 64 × 32 with 2 stages 293, 8 warps 297 and more. Without it,
    64 × 32: 170 µs (3,550 GB/s); 16 × 64 189, 32 × 32 196, 32 × 64 210.

    Channels per program shrink as n grows: A takes streams·block_d·padded_maps registers."""
    streams = n & -n
    if on.kind == "cpu":
        return Dx(64, 64, 4, streams=streams)
    columns = 128 if n <= 4 else 64
    if on.kind == "hip":
        return Dx(16, 16, 4, 2, 4) if n == 8 else Dx(16, max(16, columns // streams), 4, 2, streams)
    uneven = wide or not aligned(D)
    if n == 8:
        return Dx(16, 16, 8, 2, 2) if uneven else Dx(16, 16, 4, 2, 4 if on.capability == HOPPER else 2)
    if uneven:
        share = 4 if n == 1 and compact(on) else 2
        return Dx(16, max(16, columns // share // streams), 4, 2, streams)
    if n <= 4 and compact(on):
        return Dx(16, columns // streams, 4, 3, streams)
    return Dx(64 if n == 4 and not residual else 32, columns // streams, 4, 3 if n <= 4 else 2, streams)


@cache
def normed_dx(n: int, D: int, wide: bool, on: Device) -> Dx:
    """Fewer tokens, or fewer channels where those are few already, and more warps for many streams: h_in, its gradient
    and the weight's sums take registers too. Not timed."""
    tile = dx(n, D, wide, True, on)
    if on.kind == "cpu":
        return tile
    if on.kind == "cuda" and n == 8:
        return Dx(16, 16, 8, 2, 2)
    warps = 8 if on.kind == "cuda" and n > 4 else tile.warps
    if tile.block_t > 16:
        return replace(tile, block_t=16, warps=warps)
    return replace(tile, block_d=max(tile.block_d // 2, 16 // tile.streams), warps=warps)


@lru_cache(maxsize=4096)
def partition_rows(T: int, M: int, blocks: int, tile: Dx, processors: int) -> int:
    """Into how many slices pass B cuts the tokens: whole waves of two programs per multiprocessor, against the traffic
    of A, 8·M bytes per column and slice beside 4.5·T. T = 8192, D = 7168: 7 slices 333 µs, 2 slices 375."""
    resident = 2 * processors

    def cost(slices: int) -> float:
        waves = cdiv(blocks * slices, resident)
        return waves / slices * (1 + slices * 2 * 8 * M / (4.5 * T))

    return min(range(1, min(16, cdiv(T, tile.block_t)) + 1), key=cost)


@cache
def dphi(M: int, on: Device) -> Tile:
    """64 columns, 8 warps: 6.6 µs at T = 8192, D = 4096; 32 columns with 4 warps 8.2."""
    if padded_maps(M) > 32:
        return Tile(0, 16, 4)
    return Tile(0, 64, 4 if compact(on) else 8)


# 128 rows, 8 warps: 7.4 µs at T = 8192, D = 4096; 256 rows 8.9, 4 warps 11.6.
DALPHA = Tile(128, 0, 8)


@cache
def post_fwd(n: int, D: int, wide: bool, on: Device) -> Tile:
    """A whole token, 16 channels a thread: 146.6 µs at T = 8192, D = 4096 (99 % of a copy), 251 at D = 7168; in blocks
    of 2048 channels 150 and 263, of 1024 channels 152 and 263, with 8 channels a thread 163 (D = 4096)."""
    if on.kind == "cpu":
        return Tile(64, min(1024, next_power_of_2(D)), 4)
    return Tile(1, min(1024, next_power_of_2(D)), 4) if wide else whole_token(n, D)


@cache
def post_bwd(n: int, D: int, wide: bool, on: Device) -> Tile:
    """256 channels, 1 warp, 3 stages: 167 µs at T = 8192, D = 4096 (4,000 GB/s); 512 channels with 2 warps 173, 1024
    with 4 warps 188. `wide`: x or dx_next is fp32."""
    if on.kind == "cpu":
        return Tile(64, max(8, min(1024, next_power_of_2(D))), 4)
    if n > 4:
        return Tile(1, max(8, min(128 if wide else 256, next_power_of_2(D))), 2, 2)
    return Tile(1, max(8, min(256, next_power_of_2(D))), 1, 3)


@cache
def post_project(n: int, D: int, wide: bool, on: Device) -> Tile | None:
    """64 tokens × 64 channels of 4 streams, 8 warps, 3 stages: 186 µs at T = 8192, D = 4096; 32 × 32 with 4 warps and 4
    stages 221 (the parts of phi are read once per block of tokens), 64 × 32 with 4 warps 230, 128 × 32 with 8 warps
    235, 2 stages 242.

    None where the maps, streams and parts of phi do not fit the registers: two kernels are faster then."""
    if on.kind == "cpu":
        return Tile(128, min(64, PADDED_K // next_power_of_2(n)), 4)
    if D < 16 or (n > 4 and (wide or on.kind == "hip")):
        return None
    if n > 4:
        return Tile(16, 16, 8, 2)
    if wide or not aligned(D):
        return Tile(16, 16, 8 if compact(on) else 4, 2)
    if compact(on):
        return Tile(32, 32, 8, 3)
    return Tile(32, 32, 4, 2) if on.kind == "hip" else Tile(64, 64, 8, 3)


BOUNDARY_STREAMS = 4  # what a boundary's kernels on Hopper are written for
TABLE = 32  # columns of a boundary's table of tokens: h_res, h_pre, x_factor and the factors of the layer's norm
# 16 tokens × 64 channels × 4 streams, 4 warps that compute, one that copies, 3 stages, two programs a multiprocessor:
# 298 µs at T = 8192, D = 4096, 109 at T = 4096, D = 2560, 511 at T = 8192, D = 7168. These and the following are of a
# prototype of the same structure without the norm (its copies alone: 264 at the first size; pass B and post's backward
# apart: 425, 153 and 761). 2 stages with two tiles for the results 306; both parts of phi in shared memory 319 to 324,
# both in registers 341; two groups of warps a program, with 6 stages, 301.
BOUNDARY_BWD = Tile(16, 64, 4, 3)
# Of a thread when a program starts: half a multiprocessor's. Those that compute then get 232, those that copy keep 24.
BOUNDARY_REGISTERS = 128
# Blocks of channels × dots that one program adds: 16.4 µs at T = 8192, D = 4096 (of that prototype too); 64 × 64 with
# 4 warps 19, 16 × 256 with 4 warps 17.6.
BOUNDARY_DOTS = Tile(64, 32, 2)
# With fewer a program has less than 16 blocks of them at D = 4096, to spread what it does once over. Not timed.
BOUNDARY_TOKENS = 1024


@cache
def boundary_bwd(n: int, D: int, x_dtype: torch.dtype, enough_tokens: bool, on: Device) -> Tile | None:
    """None where there is no kernel for it, or the composition is to be taken: pass B and post's backward apart."""
    there = on.kind == "cuda" and on.capability == HOPPER and n == BOUNDARY_STREAMS and x_dtype == torch.bfloat16
    return BOUNDARY_BWD if there and enough_tokens and D % BOUNDARY_BWD.block_d == 0 else None
