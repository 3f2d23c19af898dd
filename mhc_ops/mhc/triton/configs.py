"""Block sizes, warps and stages, each chosen by a pure function of shape and device, beside its measurement.

Measured on an H200 (copy 4,200 GB/s), torch 2.11, triton 3.6, bf16, n = 4, cold L2, unless a line says otherwise. No
autotuning: results must not depend on what ran before, and the first call must not stall. The token count T is never
compiled in. The interpreter (kind "cpu") wants few, large programs. What is chosen for other GPUs than Hopper's is
compiled for them (docs/gpus.md), without spills and within their shared memory, but was not timed there.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from ...core.device import Device
from ...core.sizes import cdiv, next_power_of_2

LARGE_SHARED_MEMORY = 200 * 1024  # bytes
HOPPER, RTX_50 = (9, 0), (12, 0)


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
def project(M: int, D: int, wide: bool, on: Device) -> Tile:
    """64 tokens × 128 channels of a stream, 4 warps, 3 stages: 79.7 µs at T = 8192, D = 4096 (the same loads without a
    product: 76) and 31.8 at T = 4096, D = 2560; 64 × 64 77.4 and 38.4, 128 × 64 with 8 warps 80, 128 × 128 with 2
    stages 107. Timed when the blocks of K came stream by stream; they are as long and as many now.

    `wide`: x is not bf16. Rows of phi in parts fill the registers as n grows, addresses do where rows are unaligned."""
    if on.kind == "cpu":
        return Tile(128, min(128, max(16, next_power_of_2(D))), 4, 1)  # Hopper's order of K
    rows = padded_maps(M) * (1 if wide else 2)
    small = wide or rows > 128 or not aligned(D)
    cramped = rows > 128 if on.kind == "hip" else M == maps(8) and not aligned(D)
    # 32 channels spill 8 bytes at n = 8 in bf16, and 16 bytes on RTX 50 at n = 2 in fp32.
    least = not aligned(D) and on.kind == "cuda" and (on.capability >= RTX_50 if wide else cramped)
    fewer = rows > 64 or (rows == 32 and compact(on))  # 128 channels spill 8 bytes in the head at n = 5 on RTX 50
    block_d = min(16 if least else 32 if small else 64 if fewer else 128, max(16, next_power_of_2(D)))
    if compact(on):
        many = padded_maps(M) > 32
        # 64 tokens spill from n = 5 on; with triton 3.6, 32 do at n = 8 on RTX 50, 2 stages at n = 5 in fp32
        block_t = 16 if rows > 128 and on.capability >= RTX_50 else 32 if many else 64
        return Tile(block_t, block_d, 8, 3 if wide and many else 2)
    spilling = rows == 32 and not wide and on.kind == "cuda" and on.capability > HOPPER  # 16 bytes with 4 warps
    warps = 8 if rows > 64 or spilling else 4
    return Tile(32 if cramped else 64, block_d, warps, 2 if on.kind == "hip" else 3)


# Up to this many blocks of tokens the projection cuts phi into parts itself. That saves a launch, about 10 µs on the
# host; on the device 0.7 µs at T = 1 and 0.9 at T = 256, D = 4096 (1.1 µs more at D = 7168). At T = 512 it costs 2.
FEW_TOKEN_BLOCKS = 4


def aligned(row: int) -> bool:
    """Whether rows of this many elements are read 16 bytes at a time. Triton knows of a size if 16 divides it."""
    return row % 16 == 0


@dataclass(frozen=True)
class SplitK:
    """K as slices, bundles of slices, groups of bundles, and pieces (one of these), each of which one program sums and
    stores."""

    slice_steps: int  # blocks of K per slice
    bundle_steps: int  # blocks of K per bundle
    steps: int  # blocks of K per piece
    pieces: int
    bundle_pieces: int  # pieces per bundle
    group_pieces: int  # pieces per group


MOST_SLICES, SHORTEST_SLICE, BUNDLE, MOST_GROUPS, SHORTEST_GROUP = 64, 512, 256, 4, 16


@cache
def levels_of_k(n: int, D: int, block_d: int) -> tuple[int, int, int]:
    """Blocks of channels per slice, bundle and group: a function of n and D alone. Slices: up to 64 (of 8 streams 32:
    the sums of 64 spill in the finishing kernel), none shorter than 512 columns. Bundles: 256 channels of all streams,
    what the boundary's kernel sums. Groups: up to 4 of at least 16 steps (fewer do not fill the pipeline)."""
    blocks = cdiv(D, block_d)
    in_slice = max(cdiv(SHORTEST_SLICE, n * block_d), cdiv(blocks, min(MOST_SLICES, 256 // n)))
    in_bundle = in_slice * max(1, BUNDLE // (in_slice * block_d))
    bundles = cdiv(blocks, in_bundle)
    groups = max(1, min(MOST_GROUPS, n * blocks // SHORTEST_GROUP))
    return in_slice, in_bundle, cdiv(bundles, groups) * in_bundle


def split_k_in(n: int, D: int, block_d: int, in_piece: int) -> SplitK:
    """in_piece: one of the levels"""
    in_slice, in_bundle, in_group = levels_of_k(n, D, block_d)
    return SplitK(
        slice_steps=n * in_slice,
        bundle_steps=n * in_bundle,
        steps=n * in_piece,
        pieces=cdiv(cdiv(D, block_d), in_piece),
        bundle_pieces=max(1, in_bundle // in_piece),
        group_pieces=in_group // in_piece,
    )


@lru_cache(maxsize=4096)
def split_k(n: int, D: int, block_d: int, token_blocks: int, processors: int) -> SplitK:
    """Pieces are groups where that gives every multiprocessor a program, else bundles, else slices: 16 stored pieces
    cost 3 µs in each of the two kernels at T = 8192, D = 4096; one token at D = 7168 takes 17.8 µs with 32 slices, 22.5
    with 16 (with the 56 that it has now it was not timed)."""
    in_slice, in_bundle, in_group = levels_of_k(n, D, block_d)
    blocks = cdiv(D, block_d)
    fitting = (level for level in (in_group, in_bundle) if token_blocks * cdiv(blocks, level) >= processors)
    return split_k_in(n, D, block_d, next(fitting, in_slice))


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
def normed_read(n: int, D: int, on: Device) -> Tile:
    """Whole tokens, so that h_in is in registers until its norm is known; in blocks, h_in is made twice. 2 tokens, 8
    warps: 80.5 µs at T = 8192, D = 4096 (a copy of as many bytes 80), 28.9 at T = 4096, D = 2560, 140 at D = 7168; with
    4 warps 51.6 at T = 16384, D = 1280. 1 token 80.1, 31.2, 143 and 59.6; 4 tokens 93, 35, 175 and 61; in blocks of
    1024 149 at the first size, 253 at D = 7168."""
    if on.kind == "cpu":
        return finish(D, on)
    width = next_power_of_2(D)
    if n > 4 or D > 8192:
        return Tile(1, min(1024, width), 8 if n == 8 else 4)  # 4 warps spill 8 bytes there
    return Tile(2, width, min(8, max(1, width // 512)))


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
def normed_dh_pre(n: int, D: int, on: Device) -> Tile:
    """1 token × 256 channels, 1 warp: 82.9 µs at T = 8192, D = 4096 (without the norm 75.1), 28.5 (26.0) at T = 4096,
    D = 2560, 54.0 (53.7) at T = 16384, D = 1280, 137 (130) at D = 7168; 512 channels with 1 or 2 warps 83 to 84, 29 to
    31, 58 to 59 and 137 to 139; 2 tokens 90 and more, 1024 channels 86 and more at the first size."""
    if on.kind == "cpu":
        return Tile(64, max(8, min(1024, next_power_of_2(D))), 4)
    return Tile(1, max(8, min(256, next_power_of_2(D))), 1 if n <= 4 else 2)


@cache
def read_bwd(n: int, D: int, on: Device) -> Tile:
    """Twice the channels spill 8 bytes (sm_90 at n = 4, sm_100 at n = 8). Not timed."""
    if on.kind == "cpu":
        return Tile(64, min(1024, next_power_of_2(D)), 4)
    return Tile(1, min(512 if n <= 4 else 256, next_power_of_2(D)), 4)


@dataclass(frozen=True)
class Limited(Tile):
    registers: int | None = None  # of a thread at most; None: as the compiler likes

    @property
    def options(self) -> dict[str, int]:
        """What a launch says of it."""
        return {} if self.registers is None else {"maxnreg": self.registers}


@cache
def dmaps(n: int, on: Device, without_eps: bool = False) -> Limited:
    """32 tokens, 1 warp: 13.8 µs at T = 8192 with 20 Sinkhorn iterations (no token's sums cross a warp); 64 tokens with
    2 warps 15.2, 32 with 4 warps 28. Without Sinkhorn's eps, which needs more registers, 32 tokens spill 216 bytes at
    n = 3 on Hopper; and at n = 8, on sm_80, 16 bytes spill for the reason given in sums."""
    if on.kind == "cpu":
        return Limited(64, 0, 4)
    if n > 4:
        return Limited(8, 0, 2, registers=168 if without_eps and on.kind == "cuda" else None)
    blackwell = on.kind == "cuda" and on.capability > HOPPER  # 32 tokens spill 8 bytes there with triton 3.6
    return Limited(16 if compact(on) or blackwell or without_eps else 32, 0, 1)


@dataclass(frozen=True)
class Dx(Tile):
    streams: int = 1  # of one program: a power of two that divides n
    a_last: bool = False  # A's product after dx, not before


@cache
def dx(n: int, D: int, wide: bool, residual: bool, on: Device) -> Dx:
    """With the residual gradient, 32 tokens × 32 channels × 4 streams, 4 warps, 3 stages: 252 µs at T = 8192, D = 4096
    (3,470 GB/s); 16 × 64 261, 32 × 64 with 2 stages 272, 64 × 32 with 2 stages 293, 8 warps 297 and more. Without it,
    64 × 32: 170 µs (3,550 GB/s); 16 × 64 189, 32 × 32 196, 32 × 64 210. A's product last instead of first, in one run:
    with the residual 253 µs against 259, and 92.5 against 95.1 at T = 4096, D = 2560; without it 186 against 176.

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
    a_last = n == 4 and residual and on.capability == HOPPER
    return Dx(64 if n == 4 and not residual else 32, columns // streams, 4, 3 if n <= 4 else 2, streams, a_last)


@cache
def normed_dx(n: int, D: int, wide: bool, on: Device) -> Dx:
    """As dx with up to 4 aligned streams. T = 8192, D = 4096 without a residual: 241 µs with A last, 275 with A first,
    with 2 stages 337; T = 4096, D = 2560 88, 99, 123, and 116, 126, 152 with the residual; 32 × 16 140, 16 × 32 126,
    64 × 16 107, 8 warps 143, all with A first. Else fewer channels, as h_in, its gradient and the weight's sums take
    registers too, and more warps for many streams: not timed."""
    # With A first, triton 3.6 spills 40 bytes at n = 4 and at n = 6 on Hopper; with A last, 3.7 does elsewhere.
    tile = replace(dx(n, D, wide, True, on), a_last=on.kind == "cuda" and on.capability == HOPPER)
    if on.kind == "cpu" or (tile.block_t > 16 and n in (1, 2, 4)):  # 3 spill 8 bytes
        return tile
    if on.kind == "cuda" and n == 8:
        return replace(tile, block_t=16, block_d=16, warps=8, stages=2, streams=2)
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
def sums(M: int, on: Device) -> Limited:
    """block_d: columns of phi, block_t: rows of what programs summed up. As kernels apart at T = 8192, D = 4096: 64
    columns with 8 warps 6.6 µs, 32 with 4 warps 8.2; 128 rows with 8 warps 7.4, 256 rows 8.9, with 4 warps 11.6.

    With many maps, and on Blackwell, the compiler takes as few registers as let one more program run, and spills 8 or
    16 bytes for that, here or there with every tile tried: told how many it may take, it does not."""
    many, blackwell = padded_maps(M) > 32, on.capability > HOPPER
    registers = 128 if on.kind == "cuda" and (many or blackwell) else None
    return Limited(128, 16 if many else 64, 4 if compact(on) and not many else 8, registers=registers)


def has_tickets(on: Device) -> bool:
    """Whether a program can tell that it is the last to arrive: on AMD GPUs a barrier of triton's does not wait for
    stores to memory, so that a ticket would say nothing about those of other warps."""
    return on.kind != "hip"


@cache
def post_fwd(n: int, D: int, wide: bool, on: Device) -> Tile:
    """A whole token, 16 channels a thread: 146.6 µs at T = 8192, D = 4096 (99 % of a copy), 251 at D = 7168; in blocks
    of 2048 channels 150 and 263, of 1024 channels 152 and 263, with 8 channels a thread 163 (D = 4096)."""
    if on.kind == "cpu":
        return Tile(64, min(1024, next_power_of_2(D)), 4)
    return Tile(1, min(1024, next_power_of_2(D)), 4) if wide else whole_token(n, D)


@cache
def post_bwd(n: int, D: int, wide: bool, mixed: bool, on: Device) -> Tile:
    """256 channels, 1 warp, 3 stages: 167 µs at T = 8192, D = 4096 (4,000 GB/s); 512 channels with 2 warps 173, 1024
    with 4 warps 188. `wide`: x or dx_next is fp32; `mixed`: there is an h_res (without it, 2 warps spill on sm_100)."""
    if on.kind == "cpu":
        return Tile(64, max(8, min(1024, next_power_of_2(D))), 4)
    if n > 4:
        return Tile(1, max(8, min(128 if wide else 256, next_power_of_2(D))), 2 if mixed else 4, 2)
    return Tile(1, max(8, min(256, next_power_of_2(D))), 1, 3)


FEW_TOKENS, FEW_STREAMS, FEW_DTYPE = 64, 4, torch.bfloat16
FEW_TOGETHER = 4, 8, 16  # tokens of a program where all programs run at once: 32 spill
FEW_APART = 32  # tokens of one launch, where its programs do not all run at once
FEW_MAPS = 32  # rows of phi in a product: in two parts the 64 that Hopper's matrix units take, also if there are fewer


@dataclass(frozen=True)
class Few(Tile):
    """block_t: tokens of a product; block_d: channels of h_in at a time"""

    block_k: int = 0  # channels of a product
    tokens: int = 1  # of a program
    together: bool = False  # all programs run at once, and wait for one another
    finished: int = 1  # tokens that one program finishes


@lru_cache(maxsize=4096)
def few(n: int, D: int, T: int, on: Device) -> Few | None:
    """How one launch takes T tokens; None where several take them: more tokens; n > 4, where another tile adds up the
    sums of Sinkhorn in another order; more channels than the finishing kernel norms at once, as it then adds otherwise;
    more than FEW_APART tokens whose programs do not all run at once.

    A program reads 48 KB of phi at n = 4, about what a multiprocessor gets while memory takes to answer, and all of it
    is asked for at once (5 stages). Boundary with its norm on an H200, µs in a CUDA graph of launches, phi in the L2
    cache; where the programs run at once, by the tokens of each, and where the last to arrive finishes a group:

        D = 4096 (32 slices)  4     8     16    last to arrive
        4 tokens              9.4   9.5   -     10.7
        16 tokens             9.7   9.7   11.2  13.7
        64 tokens             -     -     11.2  24.6
        D = 7168 (56 slices)
        16 tokens             -     10.1  11.5  23.6
        64 tokens             -     -     -     37.6

    Several launches take 128 tokens of D = 7168 in 23.2 µs. They also take 64 where the programs of one launch do not
    all run at once. FEW_APART lies between 16 and 64 tokens; none between them was timed.

    8 warps instead of 4: 11.3 to 11.7 for 4 and for 16 tokens. One token alone in a program 9.3, two 9.2.

    A product has 16 tokens: with 8, the least that Hopper's matrix units take, triton compiles for those of its
    predecessors, and the projection's bits would be others."""
    if T > FEW_TOKENS or n > FEW_STREAMS or not has_tickets(on) or normed_read(n, D, on).block_d < D:
        return None
    block_k, pieces = project(maps(n), D, False, on).block_d, split_k_few(n, D, on).pieces
    if on.kind == "cpu":
        return Few(128, min(256, next_power_of_2(D)), 8, 1, block_k=block_k, tokens=32, finished=32)
    fitting = [tokens for tokens in FEW_TOGETHER if cdiv(T, tokens) * pieces <= on.processors]
    together = bool(fitting) and pieces > 1
    if not together and pieces > 1 and T > FEW_APART:
        return None
    if together:
        tokens = fitting[0]
        finished = next_power_of_2(cdiv(2 * tokens, pieces))  # half of the programs make h_in, half make maps
    else:
        tokens = finished = 1 if T * pieces <= on.processors else 2 if cdiv(T, 2) * pieces <= 4 * on.processors else 4
    return Few(
        block_t=16,
        block_d=min(next_power_of_2(D), 8192 // finished),
        warps=8 if compact(on) else 4,  # 4 spill there
        stages=3 if compact(on) else 5,
        block_k=block_k,
        tokens=tokens,
        together=together,
        finished=finished,
    )


@cache
def same_blocks_of_k(n: int, M: int, D: int, on: Device) -> bool:
    """Whether the projection of bf16 has the same order of K with M maps as with all of them."""
    return project(M, D, False, on).block_d == project(maps(n), D, False, on).block_d


@cache
def split_k_few(n: int, D: int, on: Device) -> SplitK:
    """Pieces are slices."""
    block_d = project(maps(n), D, False, on).block_d
    return split_k_in(n, D, block_d, levels_of_k(n, D, block_d)[0])


BOUNDARY_STREAMS = 4  # of the boundary's kernels
BOUNDARY_DTYPE, MAPS_DTYPE = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class BoundaryFwd(Tile):
    registers: int = 0  # a thread, before the warp that only copies gives its own away


# 32 tokens × 128 channels, 8 warps, 3 stages: 168 µs at T = 8192, D = 4096 (a copy of as many bytes 145), 53 at T =
# 4096, D = 2560 (48), 108 at T = 16384, D = 1280, 294 at T = 8192, D = 7168 (252). A first version of it took 172, 60
# and 302 at D = 4096, 2560 and 7168; with two groups of 16 tokens 174, 61 and 301; with 64 channels, whose rows are
# half as long, 177 and more; with 256 channels of 16 tokens 191. 168 registers are what 12 warps can have: 8, and 4 of
# which one copies.
BOUNDARY_FWD = BoundaryFwd(32, 128, 8, 3, registers=168)
FEWEST_ITEMS = 4


@lru_cache(maxsize=4096)
def boundary_fwd(n: int, D: int, T: int, on: Device) -> BoundaryFwd | None:
    """None where there is no fused kernel: off Hopper, and for other sizes. A bundle of K is 256 channels in two slices
    of 128, which slices are up to D = 8192. With 4 (block of tokens, bundle) a multiprocessor, the parts of phi are a
    third of the bytes that it reads; below that two kernels are taken, which was not timed."""
    tile = BOUNDARY_FWD
    fits = n == BOUNDARY_STREAMS and D % BUNDLE == 0 and cdiv(D, tile.block_d) <= MOST_SLICES
    items = cdiv(T, tile.block_t) * (D // BUNDLE)
    there = on.kind == "cuda" and on.capability == HOPPER
    return tile if fits and items >= FEWEST_ITEMS * on.processors and there else None


@cache
def split_k_in_bundles(n: int, D: int) -> SplitK:
    """What the boundary's kernel sums."""
    block_d = BOUNDARY_FWD.block_d
    return split_k_in(n, D, block_d, levels_of_k(n, D, block_d)[1])


def table_columns(n: int, M: int) -> int:
    """Columns of a boundary's table: h_res, if there is one, h_pre, x_factor and the factors of the layer's norm."""
    return max(16, next_power_of_2(M - n + 3))


# 16 tokens × 64 channels × 4 streams, 4 warps that compute, one that copies, 3 stages, two programs a multiprocessor:
# 292 µs at T = 8192, D = 4096, 105 at T = 4096, D = 2560, 184 at T = 16384, D = 1280, 503 at T = 8192, D = 7168; with
# the norm 302, 109, 191 and 526 (pass B and post's backward apart, without it: 412, 145, 265 and 763). Of a first
# version, which took 298, 109 and 511: its copies alone 264; 2 stages with two tiles for the results 306; both parts of
# phi in shared memory 319 to 324, both in registers 341; two groups of warps a program, with 6 stages, 301.
BOUNDARY_BWD = Tile(16, 64, 4, 3)
# Registers of a thread when a program starts: half a multiprocessor's. Computing warps then get 232, the copying 24.
BOUNDARY_REGISTERS = 128
# Blocks of channels × dots that one program of `sums` adds. All sums of a boundary at T = 8192, D = 4096 and at
# T = 4096, D = 2560: 19.2 and 11.3 µs; 64 × 128 25.6 and 13.3, 64 × 64 21.3 and 11.9, 16 × 256 22.4 and 11.3. As three
# kernels one after the other they took 26.3 and 14.5, and two gaps between launches.
DOTS_BLOCKS, DOTS_COLUMNS = 32, 256
# With fewer a program has less than 16 blocks of them at D = 4096, to spread what it does once over. Not timed.
BOUNDARY_TOKENS = 1024


@cache
def boundary_bwd(n: int, D: int, x_dtype: torch.dtype, enough_tokens: bool, on: Device) -> Tile | None:
    """None if there is no such kernel or two launches are faster: pass B, then post's backward."""
    there = on.kind == "cuda" and on.capability == HOPPER and n == BOUNDARY_STREAMS and x_dtype == BOUNDARY_DTYPE
    return BOUNDARY_BWD if there and enough_tokens and D % BOUNDARY_BWD.block_d == 0 else None
