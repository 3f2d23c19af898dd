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


# Kernels that hold more per channel than the others: how often the channels of a thread are halved for it. Without
# that they spill.
CROWDED = {"forward with states": 1, "backward with ids": 1, "backward with states": 2, "short backward": 1}


@lru_cache(maxsize=4096)
def march(kernel: str, rows: int, D: int, W: int, itemsize: int, aligned: bool, kind: str, processors: int) -> March:
    """`rows` of D channels in all. 16 bytes a thread (forward: 8), up to 4 warps side by side.

    Forward, with SiLU: 142.2 µs at 8×4096×4096 (91 % of a copy) and 28.8 at 4×2048×2560, with 512 channels, 8 rows a
    step, 3 stages, 64 rows; 16 bytes a thread 149.3 and 34.4, 4 stages 148.0 and 29.7, none 147.0 and 30.6, 128 rows
    146.0 and 31.0, 4 rows a step 144.4 and 29.7.
    Backward, with SiLU: 208.3 µs (92 %) with 512 channels, 4 rows a step, 3 stages, 512 rows; 256 rows 216.1, 4 stages
    215.7, 2 stages 257.3, 8 bytes a thread 256.5. At 4×2048×2560 that would leave multiprocessors idle: 8 bytes a
    thread and 128 rows take 54.5 (4 stages 53.1, and 51.3 with 64 rows).
    ShortConv at 2×4096×4×4096: forward 219.2 µs with 512 channels, 8 rows a step, 4 stages, 128 rows; 3 stages and 64
    rows 220.5. Backward 560.9 with 128 channels, 3 stages, 128 rows; 256 channels 577.9, 64 rows 592.9."""
    forward = kernel in ("forward", "short forward") and kind != "hip"
    step = 8 if forward or W > 5 else 4  # at least W − 1
    if kind == "cpu":
        return March(min(4096, next_power_of_2(D)), 16, step, 4, 1)
    threads = 64 if kind == "hip" else 32
    lane = 16 // itemsize >> CROWDED.get(kernel, 0) + (not aligned) + (0 if forward else (W > 4) + (W > 6))
    most = {"forward": 64, "backward": 512}.get(kernel, 128)
    if kernel == "forward" and itemsize == 2:
        lane //= 2
    elif kernel == "backward" and rows_each(rows * cdiv(D, threads * lane), most, processors) < 128:
        lane, most = lane // 2, 128
    width = threads * max(1, lane)
    each = rows_each(rows * cdiv(D, width), most, processors)
    stages = 4 if kernel == "short forward" else 3
    if D < width:
        return March(max(32, next_power_of_2(D)), each, step, 1, stages)
    blocks = D // width
    abreast = 1 if D % width or kernel == "short backward" else min(4, max(1, 512 // width), blocks & -blocks)
    return March(width * abreast, each, step, abreast, stages)


def rows_each(rows: int, most: int, processors: int) -> int:
    """Rows of a program: a power of two from 16 to `most` that gives every multiprocessor 7 programs."""
    return max(16, min(most, floor_power_of_2(rows // (7 * processors))))


def channels(D: int, kind: str) -> int:
    """Of a program in the small kernels: states and decoding."""
    return min(4096 if kind == "cpu" else 128, max(32, next_power_of_2(D)))


# One warp on 128 channels: 4.2 µs at B = 1 and 14.9 at B = 256, D = 4096; 512 channels with 4 warps 4.7 and 15.7.
UPDATE_WARPS = 1


@lru_cache
def sums(kind: str) -> March:
    """The sum of the programs' partial sums, `rows` of them at a time: 8.2 µs for 128 pieces of 4096 channels; 32
    of them at a time 8.4, 8 warps 8.6."""
    return March(4096, 64, 1, 4, 1) if kind == "cpu" else March(32, 64, 1, 4, 1)


@lru_cache
def inv_rms(D: int, kind: str) -> March:
    """`rows` at a time. 1 row × 1024 channels, 2 warps: 70 µs for 32768 rows of D = 4096 (268 MB)."""
    if kind == "cpu":
        return March(min(4096, next_power_of_2(D)), 64, 1, 4, 1)
    return March(min(1024, max(32, next_power_of_2(D))), 1, 1, 2 if D > 256 else 1, 1)


ADD_DOTS = March(0, 64, 1, 4, 1)
