"""Block sizes and threads, each chosen by a pure function of shape, type and device, with the measurement behind it.

Measured on an H200 (copy 4,200 GB/s), torch 2.11, tilelang 0.1.15, bf16, n = 4, cold L2: at T = 8192, D = 4096 and,
where a second figure stands, at T = 4096, D = 2560. No autotuning; the token count T is never compiled in. `kind` is
"cuda", "older" (NVIDIA before Hopper), "hip" or "cpu" (TileLang's CPU target, in the tests).
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
    """Threads that take the channels of a token, and how many vectors of channels each of them takes: as few blocks of
    at most 8 groups as there can be, of the same size. mhc_post_fwd 147.1 µs with 8 groups and 50.2 with 5 (8: 50.4; 4
    with 4 vectors: 52.1)."""
    if kind == "cpu":
        return ON_CPU, 2
    channels = 2 * 32 * vector(Threads(1), D, *dtypes)  # of a group
    blocks = cdiv(D, 8 * channels)
    return Threads(cdiv(D, blocks * channels)), 2


@cache
def finish(kind: str, n: int, D: int, dtype: str) -> tuple[Threads, int, int]:
    """As `stream`, and the blocks that fit a multiprocessor: at most 768 threads, so at least 85 registers each. pre's
    finishing kernel 86.2 µs with 8 groups and 33.9 with 5 (8: 37.2); at T = 16384, D = 1280 60.7 with 3 groups (4:
    65.3, and 91.4 with registers for 384 threads). More streams than 4 need more registers."""
    threads, vectors = stream(kind, D, dtype)
    return threads, vectors, 768 // threads.block if n <= 4 else 1


@dataclass(frozen=True)
class Arithmetic:
    """How a product with x is made exact: into how many parts of `dtype` x is cut, and phi or dh_mix."""

    x_parts: int
    parts: int
    dtype: str = BF16


@cache
def arithmetic(x_dtype: str, kind: str) -> Arithmetic:
    """x is whole in one, two or three parts of bf16 (8, 11 or 24 bits). phi and dh_mix are good to 16 bits in two
    parts, 2.5e-6 in norm, which the rounding to bf16 hides; in fp16 single elements of dx would be off by more than
    their rounding, so they have three parts there too: 24 bits. A CPU multiplies fp32."""
    if kind == "cpu":
        return Arithmetic(1, 1, F32)
    return {BF16: Arithmetic(1, 2), "float16": Arithmetic(2, 3), F32: Arithmetic(3, 3)}[x_dtype]


@cache
def padded_maps(M: int) -> int:
    """M as a side of a matrix product: a power of two, at least 16."""
    return max(16, next_power_of_2(M))


def mix_columns(M: int, parts: int) -> int:
    """Columns of dh_mix's parts side by side, as a side of a matrix product: above 32 in multiples of 64, as wgmma
    takes them. What stands beyond the parts is not defined, nor are the rows of the product that come of it."""
    columns = parts * padded_maps(M)
    return columns if columns <= 32 else cdiv(columns, 64) * 64


# Four warps, since registers change hands between groups of four; with the fewest registers that can be asked for.
LOADERS, LOADER_REGISTERS = 128, 24


@dataclass(frozen=True)
class Block:
    """The threads of a block: some compute; others, where there are any, copy tiles ahead of them."""

    threads: int  # that compute
    loaders: int  # without any, all copy and then all compute
    resident: int  # blocks that fit a multiprocessor: registers are limited to that

    @property
    def all_threads(self) -> int:
        return self.threads + self.loaders

    @property
    def registers(self) -> int:
        """Of a thread that computes: what its loaders leave of the 64 K of a multiprocessor, in eights; a thread can
        have 255, and no kernel here needs more than 240."""
        return min(240, (65536 // self.resident - self.loaders * LOADER_REGISTERS) // self.threads // 8 * 8)


def loaders(row: int, kind: str) -> int:
    """Threads that load rows of so many 16-bit elements: the copies that run on their own (TMA) need rows that begin at
    multiples of 16 bytes, and a GPU from Hopper on."""
    return LOADERS if kind == "cuda" and row % 8 == 0 else 0


@dataclass(frozen=True)
class Project(Block):
    """A program takes block_t tokens and one slice of K, in blocks of block_k columns."""

    block_t: int
    block_k: int
    slice_k: int
    stages: int  # tiles that take turns

    def slices(self, K: int) -> int:
        return cdiv(K, self.slice_k)


# At T = 16384, D = 1280 (K = 5120) two slices took 59.6 µs and four 65.2, but with fewer tokens two leave
# multiprocessors idle.
MOST_SLICES, SHORTEST_SLICE = 4, 1024


@cache
def project(M: int, K: int, dtype: str, kind: str) -> Project:
    """64 tokens × 128 columns, 2 stages, two blocks to a multiprocessor: 84.2 µs and 34.7. TileLang's own pipeline took
    85.9 and 35.3, with 3 stages 86.3 and 36, one block of 128 × 128 92.9 and 36.7, 8 slices of K instead of 4 109 and
    45.3 (64 × 128, 4 stages, one block).

    Other types and more maps than 32 do not fit the registers twice. AMD's 64 KB of shared memory take less."""
    small = dtype == BF16 and padded_maps(M) <= 32
    slices = max(1, min(MOST_SLICES, K // SHORTEST_SLICE))

    def cut(block_t: int, block_k: int, resident: int) -> Project:
        ahead = loaders(K, kind)
        return Project(
            threads=128,
            loaders=ahead,
            resident=resident,
            block_t=block_t,
            block_k=block_k,
            slice_k=cdiv(cdiv(K, slices), block_k) * block_k,
            stages=2 if ahead else 1,
        )

    if kind == "hip":
        return cut(64, 64, 1) if small else cut(32, 32, 1)
    return cut(64, 128, 2) if small else cut(64, 64, 1)


@dataclass(frozen=True)
class Dx(Block):
    """A program takes block_d channels of some streams, and steps through a slice of the tokens, block_t at a time."""

    block_t: int
    block_d: int
    streams: int  # divides n


@cache
def dx(n: int, D: int, M: int, dtype: str, kind: str) -> Dx:
    """64 tokens × 32 channels × 4 streams, two blocks to a multiprocessor: 220.6 µs and 82.3 with the residual
    gradient; in TileLang's own pipeline the same tiles took 249 and 93.

    More streams, three parts and rows that cannot be copied ahead need more registers: smaller tiles there, and only
    one or two streams at a time for n = 8, or for three parts from n = 5 on. AMD's 64 KB of shared memory take less."""
    three_parts, ahead = dtype != BF16, loaders(D, kind)
    if kind == "hip":
        if three_parts and padded_maps(M) > 64:
            raise NotImplementedError("tilelang: on AMD GPUs the gradients of 8 streams fit in bfloat16 alone")
        if n <= 4 and not three_parts:
            return Dx(threads=128, loaders=0, resident=1, block_t=32, block_d=32, streams=n)
        return Dx(threads=64, loaders=0, resident=1, block_t=16, block_d=16, streams=1)
    if n <= 4 and not three_parts and ahead:
        return Dx(threads=128, loaders=ahead, resident=2, block_t=64, block_d=32, streams=n)
    streams = n
    if n == 8 or (three_parts and n > 4):
        streams = 1 if n % 2 or (three_parts and n == 8) else 2
    return Dx(threads=128, loaders=ahead, resident=1, block_t=32, block_d=16, streams=streams)


MOST_TOKEN_SLICES = 8
START = 3  # blocks of tokens that a program could take in the time it needs to load phi and to store its sums


@lru_cache(maxsize=4096)
def token_slices(T: int, n: int, D: int, config: Dx, processors: int) -> tuple[int, int]:
    """Blocks of tokens that a program takes, and slices: programs along the tokens. Waves of resident programs count,
    times what each of them takes. µs with 1, 2, 3, 4 and 8 slices: T = 8192, D = 4096 328, 221, 269, 232, 245;
    T = 4096, D = 2560 165, 102, 82, 110, 94; T = 8192, D = 7168 410, 414, 431, 447, 432."""
    programs = cdiv(D, config.block_d) * (n // config.streams)
    blocks = cdiv(T, config.block_t)

    def cost(slices: int) -> int:
        return cdiv(programs * slices, config.resident * processors) * (cdiv(blocks, slices) + START)

    steps = cdiv(blocks, min(range(1, min(blocks, MOST_TOKEN_SLICES) + 1), key=cost))
    return steps, cdiv(blocks, steps)
