"""Block sizes and threads, each chosen by a pure function of shape, type and device, beside its measurement.

Measured on an H200 (copy 4,200 GB/s), torch 2.11, tilelang 0.1.15, bf16, n = 4, cold L2: at T = 8192, D = 4096 and,
where a second figure stands, at T = 4096, D = 2560. No autotuning; the token count T is never compiled in. A device of
kind "cpu" is TileLang's CPU target, in the tests. The two kernels with matrix products take the first of their tiles,
in the order of their speed, that fit the shared memory of the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from ...core.device import Device
from ...core.sizes import cdiv, next_power_of_2
from .build import BF16, F32, ON_CPU, Threads, vector

ONE_GROUP, FOUR_GROUPS = Threads(1), Threads(4)


def per_token(on: Device) -> Threads:
    """A thread takes a token. 32 to a block, so that 8192 tokens are on all multiprocessors."""
    return ON_CPU if on.kind == "cpu" else ONE_GROUP


def per_group(on: Device) -> Threads:
    """A group of lanes takes a token. mhc_post_bwd without dx 165 µs and 59, dh_pre 87 and 35, for 1 to 8 groups."""
    return ON_CPU if on.kind == "cpu" else FOUR_GROUPS


def per_column(on: Device) -> Threads:
    """A thread takes a column of phi."""
    return ON_CPU if on.kind == "cpu" else FOUR_GROUPS


class Stream(NamedTuple):
    """A block takes channels of a token."""

    threads: Threads
    vectors: int  # of channels, that a thread takes


class Finish(NamedTuple):
    """As Stream."""

    threads: Threads
    vectors: int
    resident: int  # blocks that fit a multiprocessor


@cache
def stream(on: Device, D: int, *dtypes: str) -> Stream:
    """As few blocks of at most 8 groups as there can be, of the same size. mhc_post_fwd 147.1 µs with 8 groups and 50.2
    with 5 (8: 50.4; 4 with 4 vectors: 52.1)."""
    if on.kind == "cpu":
        return Stream(ON_CPU, vectors=2)
    channels = 2 * 32 * vector(Threads(1), D, *dtypes)  # of a group
    blocks = cdiv(D, 8 * channels)
    return Stream(Threads(cdiv(D, blocks * channels)), vectors=2)


@cache
def finish(on: Device, n: int, D: int, dtype: str) -> Finish:
    """As `stream`; at most 768 threads to a multiprocessor, so at least 85 registers each. pre's finishing kernel 86.2
    µs with 8 groups and 33.9 with 5 (8: 37.2); at T = 16384, D = 1280 60.7 with 3 groups (4: 65.3, and 91.4 with
    registers for 384 threads). More streams than 4 need more registers."""
    threads, vectors = stream(on, D, dtype)
    return Finish(threads, vectors, resident=768 // threads.block if n <= 4 else 1)


@dataclass(frozen=True)
class Arithmetic:
    """How a product with x is made exact: into how many parts of `dtype` x is split, and phi or dh_mix."""

    x_parts: int
    parts: int
    dtype: str = BF16


IN_FP32 = Arithmetic(1, 1, F32)
IN_PARTS = {BF16: Arithmetic(1, 2), "float16": Arithmetic(2, 3), F32: Arithmetic(3, 3)}


def arithmetic(x_dtype: str, on: Device) -> Arithmetic:
    """x is whole in one, two or three parts of bf16 (8, 11 or 24 bits). phi and dh_mix are good to 16 bits in two
    parts, 2.5e-6 in norm, which the rounding to bf16 hides; in fp16 single elements of dx would be off by more than
    their rounding, so they have three parts there too: 24 bits. A CPU multiplies fp32."""
    return IN_FP32 if on.kind == "cpu" else IN_PARTS[x_dtype]


@cache
def padded_maps(M: int) -> int:
    """M as a side of a matrix product: a power of two, at least 16."""
    return max(16, next_power_of_2(M))


def mix_columns(M: int, parts: int) -> int:
    """Columns of dh_mix's parts side by side, as a side of a matrix product: above 32 in multiples of 64, as wgmma
    takes them. Columns after the parts are padding; the rows of the product that they make are ignored."""
    columns = parts * padded_maps(M)
    return columns if columns <= 32 else cdiv(columns, 64) * 64


def phi_order(parts: int) -> tuple[int, ...]:
    """The parts of phi as they lie in dx's tile: for each order o of products, the largest last, what the first o + 1
    parts of dh_mix are multiplied with."""
    return tuple(order - p for order in reversed(range(parts)) for p in range(order + 1))


def factors(n: int, head: bool) -> int:
    """Numbers per token that dx is multiplied from: x_factor, h_pre[i], h_res[i, j]; in whole 16 bytes."""
    return cdiv(1 + n + (0 if head else n * n), 4) * 4


SIZES = {F32: 4, BF16: 2, "float16": 2}
KEPT = 1024  # bytes that CUDA keeps of each block's shared memory, and about what barriers and alignment take


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
        """Registers of a computing thread: what its loaders leave of the 64 K of a multiprocessor, in eights. A thread
        can have 255; no kernel here needs more than 240."""
        return min(240, (65536 // self.resident - self.loaders * LOADER_REGISTERS) // self.threads // 8 * 8)

    def shared(self, in_loop: int, after: int) -> int:
        """Bytes of tiles. Without threads that load, TileLang lays those of the end over those of the loop."""
        return in_loop + after if self.loaders else max(in_loop, after)


def loaders(row: int, on: Device) -> int:
    """Threads that load rows of so many 16-bit elements: the copies that run on their own (TMA) need rows that begin at
    multiples of 16 bytes. Hopper alone: Blackwell has them too, but not the products (wgmma) that read those tiles."""
    return LOADERS if on.kind == "cuda" and on.capability == (9, 0) and row % 8 == 0 else 0


def fits(on: Device, resident: int, tiles: int) -> bool:
    """Whether so many blocks with so many bytes of tiles find room on a multiprocessor."""
    return on.kind == "cpu" or resident * (tiles + KEPT) <= on.shared_memory


@dataclass(frozen=True)
class Project(Block):
    """A program takes block_t tokens and one slice of K, in blocks of block_k columns."""

    block_t: int
    block_k: int
    slice_k: int
    stages: int  # tiles that take turns

    def slices(self, K: int) -> int:
        return cdiv(K, self.slice_k)

    def tiles(self, M: int, dtype: str, exact: Arithmetic) -> int:
        """Bytes: x and the parts of phi for each stage, the parts of x; and the sums as they are stored."""
        x_tile, part = self.block_t * self.block_k, SIZES[exact.dtype]
        phi_tile = exact.parts * padded_maps(M) * self.block_k * part
        x_parts = exact.x_parts * x_tile * part if exact.x_parts > 1 else 0
        in_loop = self.stages * (x_tile * SIZES[dtype] + phi_tile) + x_parts
        return self.shared(in_loop, after=4 * self.block_t * padded_maps(M))


MOST_SLICES, SHORTEST_SLICE = 4, 1024


def split_k(K: int, block_k: int) -> int:
    """Columns of a slice of K, in whole blocks: a function of n and D alone, so a token's bits do not depend on the
    batch. At T = 16384, D = 1280 (K = 5120) two slices took 59.6 µs and four 65.2, but with fewer tokens two leave
    multiprocessors idle."""
    slices = max(1, min(MOST_SLICES, K // SHORTEST_SLICE))
    return cdiv(cdiv(K, slices), block_k) * block_k


@cache
def project(M: int, K: int, dtype: str, on: Device) -> Project:
    """64 tokens × 128 columns, 2 stages, two blocks to a multiprocessor: 84.2 µs and 34.7. TileLang's own pipeline took
    85.9 and 35.3, with 3 stages 86.3 and 36, one block of 128 × 128 92.9 and 36.7, 8 slices of K instead of 4 109 and
    45.3 (64 × 128, 4 stages, one block). Other types and more maps than 32 do not fit the registers twice; more than 64
    maps need those of 256 threads where the threads that compute also load."""
    small, ahead = dtype == BF16 and padded_maps(M) <= 32, loaders(K, on)
    exact = arithmetic(dtype, on)

    def choices() -> Iterable[Project]:
        for block_t, block_k, resident in ((64, 128, 2), (64, 64, 1), (64, 32, 1), (32, 32, 1)):
            if small or resident == 1:
                yield Project(
                    threads=128 if ahead or padded_maps(M) <= 64 else 256,
                    loaders=ahead,
                    resident=resident,
                    block_t=block_t,
                    block_k=block_k,
                    slice_k=split_k(K, block_k),
                    stages=2 if ahead else 1,
                )

    return next(config for config in choices() if fits(on, config.resident, config.tiles(M, dtype, exact)))


@dataclass(frozen=True)
class Dx(Block):
    """A program takes block_d channels of some streams, and steps through a slice of the tokens, block_t at a time."""

    block_t: int
    block_d: int
    streams: int  # divides n
    at_once: bool = False  # all parts of dh_mix in registers, for all streams; or each just before its product

    def tiles(self, n: int, M: int, dtype: str, exact: Arithmetic) -> int:
        """Bytes: x, dx_next of all streams, dh_in and dx in the widest type, the parts of x, dh_mix, factors, phi;
        and the sums as they are stored."""
        rows, columns, part = padded_maps(M), mix_columns(M, exact.parts), SIZES[exact.dtype]
        x_parts = exact.x_parts * part if exact.x_parts > 1 else 0
        of_element = (self.streams + n) * SIZES[dtype] + 4 + 4 + x_parts
        of_token = of_element * self.block_d + columns * part + 4 * factors(n, M == n)
        phi_tile = self.streams * len(phi_order(exact.parts)) * rows * self.block_d * part
        return self.shared(self.block_t * of_token + phi_tile, after=4 * columns * self.block_d)


@cache
def dx(n: int, D: int, M: int, dtype: str, on: Device) -> Dx:
    """64 tokens × 32 channels × 4 streams, two blocks to a multiprocessor: 220.6 µs and 82.3 with the residual
    gradient; in TileLang's own pipeline the same tiles took 249 and 93.

    More streams, three parts and rows that cannot be copied ahead need more registers: smaller tiles there, and only
    one or two streams at a time for n = 8, or for the latter two from n = 5 on."""
    three_parts, ahead, exact = dtype != BF16, loaders(D, on), arithmetic(dtype, on)
    few = n <= 4 and not three_parts

    def choices() -> Iterable[Dx]:
        if few and ahead:
            yield Dx(threads=128, loaders=ahead, resident=2, block_t=64, block_d=32, streams=n, at_once=n > 1)
        if few and on.kind == "hip":
            yield Dx(threads=128, loaders=0, resident=1, block_t=32, block_d=32, streams=n, at_once=n > 1)
        streams = n
        if n == 8 or (n > 4 and (three_parts or not ahead)):
            streams = 1 if n % 2 or (three_parts and n == 8) else 2
        at_once = streams > 1 and (few or ahead > 0)
        yield Dx(threads=128, loaders=ahead, resident=1, block_t=32, block_d=16, streams=streams, at_once=at_once)
        yield Dx(threads=64, loaders=0, resident=1, block_t=16, block_d=16, streams=1)

    for config in choices():
        if fits(on, config.resident, config.tiles(n, M, dtype, exact)):
            return config
    kilobytes = on.shared_memory >> 10
    raise NotImplementedError(
        f"tilelang: the gradients of {n} streams in {dtype} do not fit the {kilobytes} KB of shared memory of this GPU"
    )


MOST_TOKEN_SLICES = 8
START = 3  # blocks of tokens that a program could take in the time it needs to load phi and to store its sums


class Partition(NamedTuple):
    """The tokens in slices, each of which one program takes."""

    steps: int  # blocks of tokens in a slice
    slices: int


@lru_cache(maxsize=4096)
def partition_rows(T: int, n: int, D: int, config: Dx, processors: int) -> Partition:
    """The fewest waves of resident programs, times what each of them takes. µs with 1, 2, 3, 4 and 8 slices: T = 8192,
    D = 4096 328, 221, 269, 232, 245; T = 4096, D = 2560 165, 102, 82, 110, 94; T = 8192, D = 7168 410, 414, 431, 447,
    432."""
    programs = cdiv(D, config.block_d) * (n // config.streams)
    blocks = cdiv(T, config.block_t)

    def cost(slices: int) -> int:
        return cdiv(programs * slices, config.resident * processors) * (cdiv(blocks, slices) + START)

    steps = cdiv(blocks, min(range(1, min(blocks, MOST_TOKEN_SLICES) + 1), key=cost))
    return Partition(steps, slices=cdiv(blocks, steps))
