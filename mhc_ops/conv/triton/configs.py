"""Block sizes, warps and stages, each chosen by a pure function of shape and device, beside its measurement.

Measured on an H200, torch 2.11, triton 3.6, bf16, W = 4, cold L2, unless a line says otherwise. L and B are never
compiled in. The interpreter (kind "cpu") is fastest with few, large programs. Tests compile the configs of other GPUs,
without spills and within their shared memory; they were not timed.
"""

import enum
from dataclasses import dataclass
from functools import lru_cache

from ...core.device import Device
from ...core.sizes import cdiv, floor_power_of_2, next_power_of_2


@dataclass(frozen=True)
class March:
    """A program walks `rows` tokens of `block_d` channels, `step` of them at a time."""

    block_d: int
    rows: int
    step: int
    warps: int
    stages: int


class Kernel(enum.Enum):
    """The kernels that walk. WITH_IDS: a token knows its sequence. WITH_STATES: a tap may lie in a state."""

    FORWARD = enum.auto()
    FORWARD_WITH_STATES = enum.auto()
    BACKWARD = enum.auto()
    BACKWARD_WITH_IDS = enum.auto()
    BACKWARD_WITH_STATES = enum.auto()
    SHORT_FORWARD = enum.auto()
    SHORT_BACKWARD = enum.auto()


# How often the channels of a thread are halved, because the kernel holds more per channel and would spill
HALVINGS = {
    Kernel.FORWARD: 0,
    Kernel.FORWARD_WITH_STATES: 1,
    Kernel.BACKWARD: 0,
    Kernel.BACKWARD_WITH_IDS: 1,
    Kernel.BACKWARD_WITH_STATES: 2,
    Kernel.SHORT_FORWARD: 0,
    Kernel.SHORT_BACKWARD: 1,
}
# Each tap has loads of its own here, and Triton's coalescing pass follows each load through all that depends on it, so
# rows per step decide the time to compile. On sm_90, forward and backward:
#   W = 4: 4 rows 49 s, 2 rows 2 s          W = 8: 8 rows 6 minutes (forward), 4 rows 17 s, 2 rows 11 s
# 2 rows also run faster. 4 → 2 rows, packed sequences with states, forward and with the backward:
#   32768×2560: 323 → 222 µs, 1059 → 661    8192×4096, W = 8: 349 → 359, 883 → 880
WITH_STATES = (Kernel.FORWARD_WITH_STATES, Kernel.BACKWARD_WITH_STATES)
# The most rows that one program walks through
MOST_ROWS = dict.fromkeys(Kernel, 128) | {Kernel.FORWARD: 64, Kernel.BACKWARD: 512}
# These keep little in registers: on NVIDIA GPUs wide filters and more rows per step fit too.
SMALL_KERNELS = (Kernel.FORWARD, Kernel.SHORT_FORWARD)


@lru_cache(maxsize=4096)
def march(*, kernel: Kernel, rows: int, D: int, W: int, itemsize: int, aligned: bool, on: Device) -> March:
    """`rows` of D channels in all. 16 bytes per thread (forward: 8), up to 4 warps side by side. Measured, in µs:

    forward with SiLU, 512 channels, 8 rows per step, 3 stages, 64 rows: 142.2 at 8×4096×4096 (91 % of a copy), 28.8 at
      4×2048×2560. 16 bytes per thread 149.3 and 34.4, 4 stages 148.0 and 29.7, no stages 147.0 and 30.6, 128 rows 146.0
      and 31.0, 4 rows per step 144.4 and 29.7.
    backward with SiLU, 512 channels, 4 rows per step, 3 stages, 512 rows: 208.3 (92 %). 256 rows 216.1, 4 stages 215.7,
      2 stages 257.3, 8 bytes per thread 256.5. At 4×2048×2560 that leaves multiprocessors idle: 8 bytes per thread and
      128 rows take 54.5 (4 stages 53.1, and 51.3 with 64 rows).
    ShortConv at 2×4096×4×4096: forward 219.2 with 512 channels, 8 rows per step, 4 stages, 128 rows; 3 stages and 64
      rows 220.5. Backward 560.9 with 128 channels, 3 stages, 128 rows; 256 channels 577.9, 64 rows 592.9."""
    roomy = kernel in SMALL_KERNELS and on.kind != "hip"
    step = 8 if roomy or W > 5 else 4  # at least W − 1, to be copied ahead
    if kernel in WITH_STATES:
        step = 2
    if on.kind == "cpu":
        return March(block_d=min(4096, next_power_of_2(D)), rows=16, step=step, warps=4, stages=1)
    of_warp = on.warp * channels_of_thread(kernel, W=W, itemsize=itemsize, aligned=aligned, roomy=roomy)
    each = rows_each(rows * cdiv(D, of_warp), most=MOST_ROWS[kernel], processors=on.processors)
    if kernel is Kernel.BACKWARD and each < 128:  # more programs of fewer channels keep multiprocessors busy
        of_warp = max(on.warp, of_warp // 2)
        each = rows_each(rows * cdiv(D, of_warp), most=128, processors=on.processors)
    stages = 4 if kernel is Kernel.SHORT_FORWARD else 3
    if D < of_warp:
        return March(block_d=max(32, next_power_of_2(D)), rows=each, step=step, warps=1, stages=stages)
    warps = 1
    if D % of_warp == 0 and kernel is not Kernel.SHORT_BACKWARD:
        warps = min(4, max(1, 512 // of_warp), power_of_2_in(D // of_warp))
    return March(block_d=of_warp * warps, rows=each, step=step, warps=warps, stages=stages)


def channels_of_thread(kernel: Kernel, *, W: int, itemsize: int, aligned: bool, roomy: bool) -> int:
    """As many as one load takes, halved for each reason to spill; at least one."""
    channels = 4 if kernel is Kernel.FORWARD else 16 // itemsize
    halvings = HALVINGS[kernel]
    if not aligned:  # an address for each channel
        halvings += 1
    if not roomy:
        halvings += 2 if W > 6 else 1 if W > 4 else 0
    return max(1, channels // 2**halvings)


def power_of_2_in(number: int) -> int:
    """The greatest power of two that divides it."""
    return number & -number


def rows_each(rows: int, *, most: int, processors: int) -> int:
    """Rows of a program: a power of two from 16 to `most` that gives every multiprocessor 7 programs.

    rows: those of all programs, counted per block of channels."""
    return max(16, min(most, floor_power_of_2(rows // (7 * processors))))


def channels(D: int, on: Device) -> int:
    """Channels of a program in the small kernels: states and decoding."""
    return min(4096 if on.kind == "cpu" else 128, max(32, next_power_of_2(D)))


# One warp on 128 channels: 4.2 µs at B = 1 and 14.9 at B = 256, D = 4096; 512 channels with 4 warps 4.7 and 15.7.
UPDATE_WARPS = 1


@lru_cache
def sums(on: Device) -> March:
    """Adds the programs' partial sums, `rows` at a time: 8.2 µs for 128 pieces of 4096 channels; 32 rows 8.4, 8 warps
    8.6."""
    return March(block_d=4096 if on.kind == "cpu" else 32, rows=64, step=1, warps=4, stages=1)


@lru_cache
def inv_rms(D: int, on: Device) -> March:
    """`rows` at a time. 1 row × 1024 channels, 2 warps: 70 µs for 32768 rows of D = 4096 (268 MB)."""
    if on.kind == "cpu":
        return March(block_d=min(4096, next_power_of_2(D)), rows=64, step=1, warps=4, stages=1)
    block_d = min(1024, max(32, next_power_of_2(D)))
    return March(block_d=block_d, rows=1, step=1, warps=2 if D > 256 else 1, stages=1)


ADD_DOTS = March(block_d=0, rows=64, step=1, warps=4, stages=1)
