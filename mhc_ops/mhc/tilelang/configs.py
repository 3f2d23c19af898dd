"""Block sizes and threads, each chosen by a pure function of shape, type and device, with the measurement behind it.

Measured on an H200 (copy 4,200 GB/s), torch 2.11, tilelang 0.1.15, bf16, n = 4, cold L2: at T = 8192, D = 4096 and,
where a second figure stands, at T = 4096, D = 2560. No autotuning; the token count T is never compiled in. `kind` is
"cuda", "hip" or "cpu" (TileLang's CPU target, in the tests).
"""

from dataclasses import dataclass
from functools import cache, lru_cache

from ...core.sizes import cdiv, next_power_of_2
from .build import BF16, F32, ON_CPU, Threads, vector


@cache
def per_token(kind: str) -> Threads:
    """A thread takes a token. 32 to a block, so that 8192 tokens are on all multiprocessors."""
    return ON_CPU if kind == "cpu" else Threads(1)


@cache
def per_group(kind: str) -> Threads:
    """A group of lanes takes a token. mhc_post_bwd without dx 165 µs and 59, dh_pre 87 and 35, for 1 to 8 groups."""
    return ON_CPU if kind == "cpu" else Threads(4)


@cache
def per_column(kind: str) -> Threads:
    """A thread takes a column of phi."""
    return ON_CPU if kind == "cpu" else Threads(4)


@cache
def stream(kind: str, D: int, *dtypes: str) -> tuple[Threads, int]:
    """Threads that take the channels of a token, and how many vectors of channels each of them takes. 8 groups with 2
    vectors: mhc_post_fwd 145.5 µs and 48.4, pre's finishing kernel 85.5 and 35.7; 4 groups with 4 vectors 146.7 and
    50.3, 85.8 and 37.7; 4 groups with 2 150 and 51.3, 104 and 44.9."""
    if kind == "cpu":
        return ON_CPU, 2
    groups = cdiv(D, 2 * 32 * vector(Threads(1), D, *dtypes))
    return Threads(max(1, min(8, next_power_of_2(groups)))), 2


@dataclass(frozen=True)
class Arithmetic:
    """How a product with x is made exact: into how many parts of `dtype` x is cut, and phi or dh_mix."""

    x_parts: int
    parts: int
    dtype: str = BF16


@cache
def arithmetic(x_dtype: str, kind: str) -> Arithmetic:
    """x is whole in one, two or three parts of bf16 (8, 11 or 24 bits); phi and dh_mix are good to 16 bits in two
    parts, 2.5e-6 in norm, and to 24 in three. A CPU multiplies fp32."""
    if kind == "cpu":
        return Arithmetic(1, 1, F32)
    return {BF16: Arithmetic(1, 2), "float16": Arithmetic(2, 2), F32: Arithmetic(3, 3)}[x_dtype]


@cache
def padded_maps(M: int) -> int:
    """M as a side of a matrix product: a power of two, at least 16."""
    return max(16, next_power_of_2(M))


def aligned(D: int) -> bool:
    """Whether rows of D 16-bit channels begin at multiples of 16 bytes."""
    return D % 8 == 0


@dataclass(frozen=True)
class Project:
    """A program takes block_t tokens and one slice of K, in blocks of block_k columns."""

    block_t: int
    block_k: int
    slice_k: int
    stages: int  # of the software pipeline
    threads: int
    resident: int  # blocks of threads that fit a multiprocessor: registers are limited to that

    def slices(self, K: int) -> int:
        return cdiv(K, self.slice_k)


MOST_SLICES, SHORTEST_SLICE = 4, 1024


@cache
def project(M: int, K: int, dtype: str, kind: str) -> Project:
    """64 tokens × 128 columns, 2 stages, two blocks to a multiprocessor: 85.9 µs and 35.3; 3 stages 86.3 and 36; one
    block of 128 × 128 92.9 and 36.7; 8 slices of K instead of 4 109 and 45.3 (64 × 128, 4 stages, one block).

    Other types and more maps than 32 do not fit the registers twice. AMD's 64 KB of shared memory take less."""
    small = dtype == BF16 and padded_maps(M) <= 32
    slices = max(1, min(MOST_SLICES, K // SHORTEST_SLICE))

    def cut(block_t: int, block_k: int, stages: int, resident: int) -> Project:
        return Project(block_t, block_k, cdiv(cdiv(K, slices), block_k) * block_k, stages, 128, resident)

    if kind == "hip":
        return cut(64, 64, 1, 1) if small else cut(32, 32, 1, 1)
    return cut(64, 128, 2, 2) if small else cut(64, 64, 2, 1)


@dataclass(frozen=True)
class Dx:
    """A program takes block_d channels of some streams, and steps through a slice of the tokens, block_t at a time."""

    block_t: int
    block_d: int
    streams: int  # divides n
    stages: int  # of the software pipeline; 0: a plain loop
    threads: int
    resident: int = 1


@cache
def dx(n: int, D: int, M: int, dtype: str, kind: str) -> Dx:
    """64 tokens × 32 channels × 4 streams, a pipeline of 1 stage (warps that load, warps that compute), two blocks to a
    multiprocessor: 455 µs and 180 with the residual gradient; 2 stages, one block 506 and 175; 32 × 32 with two blocks
    547; 64 × 64 664; plain loops 587 and more. In the way: only four or eight warps compute on a multiprocessor.

    With rows that are not aligned, copies of both kinds meet in one pipeline, and the GPU reports an illegal
    instruction: a plain loop there. One or two streams at a time where all would not fit registers (A of n = 8) or the
    227 KB of shared memory (fp32 from n = 5 on). AMD's 64 KB take less."""
    wide = dtype == F32
    if kind == "hip":
        if wide and padded_maps(M) > 64:
            raise NotImplementedError("tilelang: on AMD GPUs the gradients of 8 streams of float32 do not fit")
        return Dx(32, 32, n, 0, 128) if n <= 4 and not wide else Dx(16, 16, 1, 0, 64)
    stages = 1 if aligned(D) else 0
    if n <= 4 and not wide:
        return Dx(64, 32, n, stages, 128, 2 if stages else 1)
    few = n == 8 or (wide and n > 4)
    return Dx(32, 32, 2 - n % 2 if few else n, stages, 128)


MOST_TOKEN_SLICES = 8


@lru_cache(maxsize=4096)
def token_slices(T: int, n: int, D: int, config: Dx, processors: int) -> tuple[int, int]:
    """Blocks of tokens that a program takes, and slices: programs along the tokens. Waves of resident programs times
    their blocks count: T = 4096, D = 2560 took 201 µs with 2 waves of 16 blocks (4 slices), 180 with 3 of 8 (8 slices);
    T = 8192, D = 4096 455 to 465 with 2, 4 and 8 slices, which are 64 blocks each."""
    programs = cdiv(D, config.block_d) * (n // config.streams)
    blocks = cdiv(T, config.block_t)

    def cost(slices: int) -> int:
        return cdiv(programs * slices, config.resident * processors) * cdiv(blocks, slices)

    steps = cdiv(blocks, min(range(1, min(blocks, MOST_TOKEN_SLICES) + 1), key=cost))
    return steps, cdiv(blocks, steps)
