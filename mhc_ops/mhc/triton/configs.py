"""Block sizes, warps and stages, each chosen by a pure function of shape and device, with the measurement behind it.

Measured on an H200 (copy 4,250 GB/s), torch 2.11, triton 3.6, bf16, n = 4, unless a line says otherwise. No autotuning:
results must not depend on what ran before, and the first call must not stall. The token count T is never compiled in.
`kind` is "cuda", "hip" or "cpu" (the interpreter, which wants few, large programs).
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton


def maps(n: int) -> int:
    """M: rows of phi."""
    return n * n + 2 * n


def padded_maps(n: int) -> int:
    """M as a side of a matrix product: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(maps(n)))


@dataclass(frozen=True)
class Arithmetic:
    """How a product is made exact. Values are cut into `parts` of `dtype`; products use `precision`."""

    parts: int
    dtype: torch.dtype
    precision: str


def arithmetic(x_dtype: torch.dtype, kind: str) -> Arithmetic:
    """bf16 x: the other side in two bf16 parts, 16 bits, 2e-6 in norm. fp16 and fp32 x: three tf32 products (CUDA) or
    plain fp32 ones (HIP), as fp16 parts lack the range and single tf32 is 3e-4 off."""
    if x_dtype == torch.bfloat16:
        return Arithmetic(2, torch.bfloat16, "ieee")
    return Arithmetic(1, torch.float32, "tf32x3" if kind == "cuda" else "ieee")


@dataclass(frozen=True)
class Project:
    """The projection GEMM. K is cut into slices of `slice_steps` blocks and groups of `group_slices` slices, which
    depend on n and D only, so that a token's sum is added in the same order in every batch."""

    block_t: int
    block_k: int
    slice_steps: int
    group_slices: int
    warps: int
    stages: int


@lru_cache(maxsize=None)
def project(n: int, wide: bool, kind: str) -> Project:
    """128 tokens × 64 of K is the one tile that was never seen wrong on Hopper with triton 3.6: tiles of 64 tokens, and
    128 × 128, give changing results where the x tile also feeds the sum of squares. 4 warps, 4 stages."""
    many_maps = padded_maps(n) >= 64  # no registers for the sums of a group beside those of a slice
    block_k = 64 if not wide else 32 if n < 8 else 16
    slice_steps, group_slices = (2048 // block_k, 1) if many_maps else (512 // block_k, 4)
    stages = 2 if kind == "hip" else 3 if many_maps else 4
    return Project(128, block_k, slice_steps, group_slices, warps=8 if wide or many_maps else 4, stages=stages)


@dataclass(frozen=True)
class Stream:
    """A kernel that streams tokens × channels."""

    block_t: int
    block_d: int
    warps: int
    stages: int = 1


@lru_cache(maxsize=None)
def finish(D: int, kind: str) -> Stream:
    block_d = min(1024, triton.next_power_of_2(D))
    if kind == "cpu":
        return Stream(64, block_d, 4)
    return Stream(2, block_d, 4)


@lru_cache(maxsize=None)
def dh_pre(D: int, kind: str) -> Stream:
    """One token, 1024 channels, 4 warps: 87 µs at T = 8192, D = 4096, 3,854 GB/s."""
    block_d = min(1024, triton.next_power_of_2(D))
    if kind == "cpu":
        return Stream(64, block_d, 4)
    return Stream(1, block_d, 4)


@lru_cache(maxsize=None)
def dmaps(n: int, kind: str) -> Stream:
    return Stream(64 if n <= 4 else 16, 0, 4)


@dataclass(frozen=True)
class Dx(Stream):
    streams: int = 1


@lru_cache(maxsize=None)
def dx(n: int, wide: bool, kind: str) -> Dx:
    """Channels per program shrink as n grows: the sums of A and the parts of phi take 2·n·padded_maps·block_d registers."""
    if kind == "cpu":
        return Dx(64, 64, 4, streams=n)
    if n == 8:
        return Dx(16, 16, 4, 2, streams=2) if kind == "hip" else Dx(16, 32, 8, 2, streams=2)
    if kind == "hip" and n == 7:
        return Dx(16, 64, 4, 2, streams=1)
    if kind == "hip":
        block_t, block_d = (16, 128) if n <= 3 else (16, 32) if n == 4 else (32, 16)
        return Dx(block_t, block_d, 4, 2, streams=n)
    if n <= 4:
        return Dx(16, 128 if n <= 2 or (n == 3 and not wide) else 64, 4, 3, streams=n)
    return Dx(16, 16 if n == 7 and wide else 32, 8, 3, streams=n)


@lru_cache(maxsize=None)
def dphi(n: int, kind: str) -> Stream:
    return Stream(0, 64 if padded_maps(n) <= 32 else 32, 4)


@dataclass(frozen=True)
class ProjectionPlan:
    """How the slices of K are spread over programs: `splits` programs per block of tokens, `steps` blocks of K each,
    `pieces` partial sums per token."""

    by_slice: bool
    steps: int
    splits: int
    pieces: int


@lru_cache(maxsize=4096)
def plan_projection(T: int, K: int, project: Project, processors: int) -> ProjectionPlan:
    """One slice per program while that does not fill the device, else whole groups, as few splits as fill it."""
    steps = triton.cdiv(K, project.block_k)
    group_steps = project.slice_steps * project.group_slices
    slices, groups = triton.cdiv(steps, project.slice_steps), triton.cdiv(steps, group_steps)
    token_blocks = triton.cdiv(T, project.block_t)
    resident = 2 * processors
    if token_blocks * groups < processors:
        return ProjectionPlan(True, project.slice_steps, slices, slices)
    groups_each = max(1, groups * token_blocks // resident)
    return ProjectionPlan(False, groups_each * group_steps, triton.cdiv(groups, groups_each), groups)


def channel_blocks_each(channel_blocks: int, token_blocks: int, processors: int) -> int:
    """Blocks of channels per program of the finishing kernel: all when the tokens fill the device, else a share."""
    splits = min(channel_blocks, triton.cdiv(4 * processors, token_blocks))
    return triton.cdiv(channel_blocks, splits)


def token_slices(T: int, blocks: int, stream: Stream, processors: int) -> int:
    """Into how many slices pass B cuts the tokens: two programs per multiprocessor, and at most 8192 tokens a slice, as
    the matrix units' sums of A truncate."""
    filling = 2 * processors // blocks
    return max(1, min(triton.cdiv(T, stream.block_t), max(filling, triton.cdiv(T, 8192))))
