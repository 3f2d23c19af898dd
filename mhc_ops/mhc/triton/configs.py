"""Block sizes, warps and stages, each chosen by a pure function of shape and device, with the measurement behind it.

Measured on an H200 (copy 4,200 GB/s), torch 2.11, triton 3.6, bf16, n = 4, cold L2, unless a line says otherwise. No
autotuning: results must not depend on what ran before, and the first call must not stall. The token count T is never
compiled in. `kind` is "cuda", "hip" or "cpu" (the interpreter, which wants few, large programs).
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch


# triton's own cdiv and next_power_of_2 take 6 µs a call on the host.
def cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()


def floor_power_of_2(value: int) -> int:
    return 1 << max(1, value).bit_length() - 1


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
def arithmetic(x_dtype: torch.dtype, kind: str) -> Arithmetic:
    """bf16 x: the other side in two bf16 parts, 16 bits, 2.5e-6 in norm (a third part: 4e-7, 7 % slower). fp16 and fp32
    x: three tf32 products (CUDA) or plain fp32 ones (HIP), as fp16 parts lack the range and single tf32 is 3e-4 off."""
    if x_dtype == torch.bfloat16:
        return Arithmetic(2, torch.bfloat16, "ieee")
    return Arithmetic(1, torch.float32, "tf32x3" if kind == "cuda" else "ieee")


@dataclass(frozen=True)
class Tile:
    """A kernel's block of tokens (or rows) × channels (or columns of K), its warps and software-pipeline stages."""

    block_t: int
    block_d: int
    warps: int
    stages: int = 1


@cache
def sinkhorn(n: int, kind: str) -> Tile:
    if kind == "cpu":
        return Tile(256, 0, 4)
    return Tile(64 if n <= 2 else 32 if n <= 4 else 8, 0, 4)


LONGEST_BLOCK_K = 128  # K of phi in parts is padded to whole blocks of any kernel


@cache
def phi_parts(M: int) -> Tile:
    """Between 4.7 and 5.3 µs at n = 4, D = 4096 for 32 to 128 columns and 1 to 4 warps: what a launch takes."""
    return Tile(0, 128 if padded_maps(M) <= 32 else 32, 4)


@dataclass(frozen=True)
class Project:
    block_t: int
    block_k: int
    warps: int
    stages: int


@cache
def project(M: int, K: int, wide: bool, kind: str) -> Project:
    """64 tokens × 128 of K, 4 warps, 3 stages: 83 µs at T = 8192, D = 4096 (the same loads without a product: 76);
    128 × 128 with 8 warps 83, 128 × 64 with 8 warps 88, 256 × 64 119.

    `wide`: x is not bf16. Rows of phi in parts fill the registers as n grows, addresses do where rows are unaligned."""
    if kind == "cpu":
        return Project(128, 64, 4, 1)
    rows = padded_maps(M) * (1 if wide else 2)
    small = wide or rows > 128 or not aligned(K)
    block_k = 32 if small else LONGEST_BLOCK_K if rows <= 64 else 64
    cramped = rows > 128 if kind == "hip" else M == maps(8) and not aligned(K)
    return Project(32 if cramped else 64, block_k, 4 if rows <= 64 else 8, 2 if kind == "hip" else 3)


def aligned(row: int) -> bool:
    """Whether rows of this many elements are read 16 bytes at a time. Triton knows of a size if 16 divides it."""
    return row % 16 == 0


@dataclass(frozen=True)
class Cut:
    """K cut into slices, groups of slices, pieces (slices or groups) that are stored, and shares of programs."""

    slice_steps: int  # blocks of K per slice
    piece_steps: int
    pieces: int
    group_pieces: int  # pieces per group
    steps: int  # per program
    splits: int  # programs per block of tokens


MOST_SLICES, SHORTEST_SLICE, GROUPS = 32, 512, 4


@lru_cache(maxsize=4096)
def cut(K: int, block_k: int, token_blocks: int, processors: int) -> Cut:
    """Slices and groups are a function of n and D alone: up to 32 slices, none shorter than 512, in 4 groups.

    Splits are a power of two, as many as keep the grid within two programs per multiprocessor. Pieces are groups where
    each program has at least one: 16 stored slices cost 3 µs in each of the two kernels at T = 8192, D = 4096.
    One token at D = 7168 takes 17.8 µs with 32 slices, 22.5 with 16."""
    steps = cdiv(K, block_k)
    slice_steps = cdiv(steps, min(MOST_SLICES, floor_power_of_2(K // SHORTEST_SLICE)))
    slices = cdiv(steps, slice_steps)
    group_slices = cdiv(slices, GROUPS)
    splits = min(next_power_of_2(slices), floor_power_of_2(2 * processors // token_blocks))
    piece_slices = group_slices if splits <= GROUPS else 1
    pieces = cdiv(slices, piece_slices)
    each = cdiv(pieces, splits) * piece_slices * slice_steps
    return Cut(slice_steps, piece_slices * slice_steps, pieces, group_slices // piece_slices, each, splits)


@cache
def finish(D: int, kind: str) -> Tile:
    """2 tokens × 1024 channels, 4 warps: 82 µs at T = 8192, D = 4096; 8 warps 94, 4 tokens 89, 1 token 83."""
    return Tile(64 if kind == "cpu" else 2, min(1024, next_power_of_2(D)), 4)


def channel_blocks_each(channel_blocks: int, token_blocks: int, processors: int) -> int:
    """Blocks of channels per program of the finishing kernel: all when the tokens fill the device, else a share."""
    splits = min(channel_blocks, cdiv(4 * processors, token_blocks))
    return cdiv(channel_blocks, splits)


@cache
def dh_pre(n: int, D: int, wide: bool, kind: str) -> Tile:
    """1 token × 2048 channels, 4 warps: 84.5 µs at T = 8192, D = 4096 (3,970 GB/s); 1024 channels 86.5."""
    if kind == "cpu":
        return Tile(64, min(1024, next_power_of_2(D)), 4)
    block_d = 2048 if D % 2048 == 0 and n <= 4 and not wide else 1024 if not wide else 512
    return Tile(1, min(block_d, next_power_of_2(D)), 4)


@cache
def dmaps(n: int, kind: str) -> Tile:
    """32 tokens, 4 warps: 6.0 µs at T = 8192; 128 tokens 9.2."""
    if kind == "cpu":
        return Tile(64, 0, 4)
    return Tile(32 if n <= 4 else 16, 0, 4)


@dataclass(frozen=True)
class Dx(Tile):
    streams: int = 1  # of one program; divides n


@cache
def dx(n: int, D: int, wide: bool, residual: bool, kind: str) -> Dx:
    """32 tokens × 64 channels × 4 streams, 4 warps, 3 stages: 189 µs at T = 8192, D = 4096 (3,190 GB/s); 16 tokens 215,
    2 stages 246, 8 warps 453, A as [maps, channels] (which keeps phi in registers) 324.

    Channels per program shrink as n grows: A takes n·padded_maps·block_d registers."""
    if kind == "cpu":
        return Dx(64, 64, 4, streams=n)
    if kind == "hip":
        if n >= 7:
            return Dx(16, 64 if n == 7 else 16, 4, 2, streams=1 if n == 7 else 2)
        block_t, block_d = (16, 128) if n <= 3 else (16, 32) if n == 4 else (32, 16)
        return Dx(block_t, block_d, 4, 2, streams=n)
    cramped = wide and (n >= 7 or not aligned(D))
    if n == 8:
        return Dx(16, 16 if cramped else 32, 8, 2, streams=2)
    if n > 4:
        return Dx(16, 16 if cramped else 32, 8, 3, streams=n)
    return Dx(16 if wide or D % 64 else 32, 64 if aligned(D) else 16 if wide else 32, 4, 3, streams=n)


@lru_cache(maxsize=4096)
def token_slices(T: int, M: int, blocks: int, tile: Dx, processors: int) -> int:
    """Into how many slices pass B cuts the tokens: whole waves of two programs per multiprocessor, against the traffic
    of A, 8·M bytes per column and slice beside 4.5·T. T = 8192, D = 7168: 7 slices 333 µs, 2 slices 375."""
    resident = 2 * processors

    def cost(slices: int) -> float:
        waves = cdiv(blocks * slices, resident)
        return waves / slices * (1 + slices * 2 * 8 * M / (4.5 * T))

    return min(range(1, min(16, cdiv(T, tile.block_t)) + 1), key=cost)


@cache
def dphi(M: int) -> Tile:
    """64 columns, 8 warps: 6.6 µs at T = 8192, D = 4096; 32 columns with 4 warps 8.2."""
    return Tile(0, 64, 8) if padded_maps(M) <= 32 else Tile(0, 16, 4)


# 128 rows, 8 warps: 7.4 µs at T = 8192, D = 4096; 256 rows 8.9, 4 warps 11.6.
DALPHA = Tile(128, 0, 8)


@cache
def post_fwd(n: int, D: int, itemsize: int, kind: str) -> Tile:
    if kind == "cpu":
        return Tile(64, min(1024, next_power_of_2(D)), 4)
    return Tile(1, min(1024 if n <= 4 else 512, next_power_of_2(D)), 4)


@cache
def post_bwd(n: int, D: int, itemsize: int, residual: bool, kind: str) -> Tile:
    if kind == "cpu":
        return Tile(64, max(8, min(1024, next_power_of_2(D))), 4)
    return Tile(1, max(8, min(512, next_power_of_2(D))), 2, 3)


@cache
def post_project(n: int, D: int, wide: bool, kind: str) -> Tile:
    if kind == "cpu":
        return Tile(128, 64, 4)
    return Tile(64, 32 if n <= 4 and not wide else 16, 4, 2 if kind == "hip" else 3)
