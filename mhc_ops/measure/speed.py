"""How fast: device time forward and backward beside eager, torch.compile and a copy of the same bytes, in one run.

A kernel is checked against fp64 before it is timed. On a GPU every sample starts with a cold L2 (a buffer larger than
it is overwritten) and with the host ahead of the device, so that launches cost no device time; the median counts.
"""

import contextlib
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import accuracy
from .cases import Case, Subject, Tensors

SAMPLES = 20
CHECKED_TOKENS = 256
FLUSHED_BYTES = 256 << 20
AHEAD_CYCLES = 10_000_000  # about 5 ms of waiting on the device, in which the host enqueues


@dataclass(frozen=True)
class Measurement:
    """One provider on one case. Times in µs; bandwidth in GB/s of the bytes that the op must move."""

    subject: str
    case: str
    provider: str
    direction: str  # "forward" or "backward"
    microseconds: float
    bandwidth: float
    copy_microseconds: float  # a copy that moves the same bytes, read and written
    host_microseconds: float | None  # what the call takes on the host, without gradients; forward only
    peak_megabytes: float | None  # of forward and backward together, above the inputs

    @property
    def of_copy(self) -> float:
        """1 means: as fast as a copy of the same bytes."""
        return self.copy_microseconds / self.microseconds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "of_copy": self.of_copy}


def measure(case: Case, providers: list[str], device: torch.device) -> Iterator[Measurement]:
    """Forward and backward of each provider: a backend's name, "eager" or "torch.compile"."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield from _measure(case, providers, device)


def why_no_compiler() -> str | None:
    """torch.compile needs a C++ compiler."""
    return None if shutil.which("g++") or shutil.which("clang++") else "there is no C++ compiler (g++ or clang++)"


def _measure(case: Case, providers: list[str], device: torch.device) -> Iterator[Measurement]:
    copies = {direction: copy_time(size, device) for direction, size in case.bytes_moved().items()}
    tensors = case.inputs(device)
    for provider in providers:
        subject, backend = as_provider(case.subject, provider)
        if provider == backend:
            checked = replace(case, outer=(min(CHECKED_TOKENS, math.prod(case.outer)),))
            failed = [row for row in accuracy.measure(checked, backend, device) if not row.passed]
            if failed:
                raise AssertionError(f"{provider} is wrong, so it is not timed: {failed}")
        yield from _time_provider(case, subject, provider, backend, tensors, copies, device)


def as_provider(subject: Subject, provider: str) -> tuple[Subject, str]:
    if provider == "eager":
        return subject, "reference"
    if provider == "torch.compile":
        torch.compiler.reset()
        return replace(subject, call=torch.compile(subject.call, dynamic=False, fullgraph=True)), "reference"
    return subject, provider


def _time_provider(
    case: Case,
    subject: Subject,
    provider: str,
    backend: str,
    tensors: Tensors,
    copies: dict[str, float],
    device: torch.device,
) -> Iterator[Measurement]:
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    moved = case.bytes_moved()

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return subject.call(**plain, backend=backend)

    host = host_time(forward, device)
    microseconds = device_time(forward, device)
    yield _row(case, provider, "forward", microseconds, moved, copies, host, None)

    def graph() -> tuple[list[Tensor], list[Tensor]]:
        outputs = list(subject.call(**leaves, backend=backend))[: len(subject.outputs) - subject.intermediates]
        return outputs, [torch.randn_like(output) for output in outputs]

    def backward(outputs: list[Tensor], cotangents: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, list(leaves.values()), cotangents)

    peak = peak_memory(lambda: backward(*graph()), device)
    microseconds = device_time(backward, device, prepare=graph)
    yield _row(case, provider, "backward", microseconds, moved, copies, None, peak)


def _row(
    case: Case,
    provider: str,
    direction: str,
    microseconds: float,
    moved: dict[str, float],
    copies: dict[str, float],
    host: float | None,
    peak: float | None,
) -> Measurement:
    bandwidth = moved[direction] / microseconds / 1e3
    return Measurement(
        case.subject.name, str(case), provider, direction, microseconds, bandwidth, copies[direction], host, peak
    )


def copy_time(size: float, device: torch.device) -> float:
    """µs of a copy that reads and writes `size` bytes in all."""
    source = torch.randint(0, 255, (max(1, int(size) // 2),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return device_time(lambda: target.copy_(source), device)


def device_time(call: Callable[..., Any], device: torch.device, prepare: Callable[[], Any] = tuple) -> float:
    """Median µs of call(*prepare()) on the device, without what prepare takes; on a CPU, of the call itself."""
    for _ in range(3):
        call(*prepare())
    if device.type != "cuda":
        return statistics.median(_host_samples(call, prepare))
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    samples = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        prepared = prepare()
        flushed.zero_()
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        call(*prepared)
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(samples)


def host_time(call: Callable[[], Any], device: torch.device) -> float | None:
    """Median µs until the call returns, the device idle before it; None on a CPU, where call and work are one."""
    if device.type != "cuda":
        return None
    for _ in range(3):
        call()

    def idle() -> tuple[()]:
        torch.cuda.synchronize()
        return ()

    return statistics.median(_host_samples(call, idle))


def _host_samples(call: Callable[..., Any], prepare: Callable[[], Any]) -> list[float]:
    samples = []
    for _ in range(SAMPLES):
        prepared = prepare()
        begin = time.perf_counter()
        call(*prepared)
        samples.append((time.perf_counter() - begin) * 1e6)
    return samples


def peak_memory(call: Callable[[], Any], device: torch.device) -> float | None:
    """Megabytes that a call takes at its peak above what was there before; None on a CPU."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6
