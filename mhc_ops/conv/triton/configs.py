"""Block sizes, warps and stages, each chosen by a pure function of shape and device, with the measurement behind it.

Measured on an H200, torch 2.11, triton 3.6, bf16, W = 4, cold L2, unless a line says otherwise. L and B are never
compiled in. `kind` is "cuda", "hip" or "cpu" (the interpreter, which wants few, large programs).
"""

from dataclasses import dataclass
from functools import lru_cache

from ...core.sizes import cdiv, floor_power_of_2, next_power_of_2


@dataclass(frozen=True)
class March:
    """A program walks `rows` tokens of `block_d` channels, `step` of them at a time."""

    block_d: int
    rows: int
    step: int
    warps: int
    stages: int


@lru_cache(maxsize=4096)
def march(tokens: int, D: int, W: int, itemsize: int, backward: bool, ids: bool, kind: str, processors: int) -> March:
    """To be measured."""
    step = 4 if W <= 5 else 8  # a window longer than a step is not pipelined
    if kind == "cpu":
        return March(min(4096, next_power_of_2(D)), 16, step, 4, 1)
    lane = 16 // itemsize  # channels that a thread loads at once
    if backward and (ids or W > 4):
        lane = max(2, lane // 2)
    block_d = min(32 * lane, max(32, next_power_of_2(D)))
    return March(block_d, rows_each(tokens * cdiv(D, block_d), 256, processors), step, 1, 3)


def rows_each(rows: int, most: int, processors: int) -> int:
    """Rows of a program: a power of two from 16 to `most` that gives every multiprocessor 16 programs."""
    return max(16, min(most, floor_power_of_2(rows // (16 * processors))))


def channels(D: int, kind: str) -> int:
    """Of a program in the small kernels: states, sums and decoding."""
    return min(4096 if kind == "cpu" else 256, max(32, next_power_of_2(D)))


UPDATE_WARPS = 1


@lru_cache
def sums(kind: str) -> March:
    """The sum of the programs' partial sums: `rows` of them at a time."""
    return March(4096, 64, 1, 4, 1) if kind == "cpu" else March(64, 32, 1, 4, 1)


@lru_cache
def inv_rms(D: int, kind: str) -> March:
    """To be measured."""
    if kind == "cpu":
        return March(min(4096, next_power_of_2(D)), 64, 1, 4, 1)
    return March(min(1024, max(32, next_power_of_2(D))), 1, 1, 4 if D > 512 else 1, 1)
