"""Block sizes, warps and stages, each chosen by a pure function of shape and device, with the measurement behind it.

Measured on an H200, torch 2.11, triton 3.6, bf16, W = 4, cold L2, unless a line says otherwise. L and B are never
compiled in. `kind` is "cuda", "hip" or "cpu" (the interpreter, which wants few, large programs).
"""

from dataclasses import dataclass
from functools import lru_cache

from ...core.sizes import cdiv, floor_power_of_2, next_power_of_2


@dataclass(frozen=True)
class March:
    """A program walks `ranges` ranges of `rows` tokens of `block_d` channels, `step` of them at a time."""

    block_d: int
    rows: int
    step: int
    warps: int
    stages: int
    ranges: int = 1


# How often a kernel's registers force a thread's channels to be halved.
CROWDED = {"forward": 0, "backward": 0, "backward with ids": 1, "backward with states": 2, "short backward": 1}


@lru_cache(maxsize=4096)
def march(kernel: str, rows: int, D: int, W: int, itemsize: int, aligned: bool, kind: str, processors: int) -> March:
    """`rows` of D channels in all."""
    step = 4 if W <= 5 else 8  # at least W − 1
    if kind == "cpu":
        return March(min(4096, next_power_of_2(D)), step, step, 4, 1, 4)
    backward = kernel != "forward"
    lane = max(1, 16 // itemsize >> CROWDED[kernel] + (not aligned) + (backward and W > 4))
    threads = 64 if kind == "hip" else 32
    block_d = min(threads * lane, max(32, next_power_of_2(D)))
    return March(block_d, rows_each(rows * cdiv(D, block_d), 128, processors), step, 4, 3, 4)


def rows_each(rows: int, most: int, processors: int) -> int:
    """Rows of a range: a power of two from 16 to `most` that gives every multiprocessor 16 ranges."""
    return max(16, min(most, floor_power_of_2(rows // (16 * processors))))


def channels(D: int, kind: str) -> int:
    """Of a program in the small kernels: states and decoding."""
    return min(4096 if kind == "cpu" else 128, max(32, next_power_of_2(D)))


# One warp on 128 channels: 4.2 µs at B = 1 and 14.9 at B = 256, D = 4096; 512 channels with 4 warps 4.7 and 15.7.
UPDATE_WARPS = 1


@lru_cache
def sums(kind: str) -> March:
    """The sum of the programs' partial sums, `rows` of them at a time: 8.2 µs for 128 pieces of 4096 channels, 128
    channels a program 9 and more."""
    return March(4096, 64, 1, 4, 1) if kind == "cpu" else March(32, 64, 1, 4, 1)


@lru_cache
def inv_rms(D: int, kind: str) -> March:
    """`rows` at a time. 1 row × 1024 channels, 2 warps: 70 µs for 32768 rows of D = 4096 (268 MB)."""
    if kind == "cpu":
        return March(min(4096, next_power_of_2(D)), 64, 1, 4, 1)
    return March(min(1024, max(32, next_power_of_2(D))), 1, 1, 2 if D > 256 else 1, 1)


ADD_DOTS = March(0, 64, 1, 4, 1)
