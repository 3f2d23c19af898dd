"""How fast a call and a copy of the same bytes are; docs/measure.md, "bench", says how a sample is taken."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..testing.cases import Call, Tensors
from ..testing.conv_cases import AnyCase
from .results import Measurement

SAMPLES = 20
WARM_UP = 3
DEPTHS = 12, 4  # connections of the two stacks whose difference is a boundary
OF_A_BOUNDARY = ("microseconds", "host_microseconds", "peak_megabytes")
FLUSHED_BYTES = 256 << 20
# The device waits while the host enqueues: three times as long as that took once, in cycles of about 2 GHz, and at
# most 5 ms, since a run takes many thousands of samples.
CYCLES_PER_SECOND = 2e9
SHORTEST_WAIT, LONGEST_WAIT = 1e-3, 5e-3

Function = Callable[..., Any]


class Unit(NamedTuple):
    """A provider on a case, measured at once. group: "training" or "decode", which has small sizes."""

    case: AnyCase
    provider: str
    group: str

    def __str__(self) -> str:
        return f"{self.provider} {self.case}"


class Timing(NamedTuple):
    """Median and interquartile range of the samples, in µs."""

    microseconds: float
    spread: float
    samples: int


def measure(
    unit: Unit, tensors: Tensors, call: Call, device: torch.device, *, parameters: Sequence[Tensor] = ()
) -> Iterator[Measurement]:
    """Times `call(**tensors)` forward, backward and both. parameters: further leaves."""
    case = unit.case
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    wanted = [*(tensor for tensor in leaves.values() if tensor.requires_grad), *parameters]
    differentiable = len(case.subject.differentiable)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return call(**tensors)

    def graph() -> Sequence[Tensor]:
        return call(**leaves)[:differentiable]

    def backward(*outputs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, wanted, cotangents)

    def row(direction: str, timed: Function, prepare: Function = tuple) -> Measurement:
        size = case.bytes_moved()[direction]
        timing, copy = device_time(timed, device, prepare), copy_time(int(size), device)
        own: dict[str, Any] = {"group": unit.group, **timing._asdict(), "bytes": size, "copy_spread": copy.spread}
        if direction != "backward" and device.type == "cuda":  # on a CPU, call and work are one
            host = summary([_host_sample(timed, device) for _ in range(SAMPLES)])
            own |= {"host_microseconds": host.microseconds, "peak_megabytes": peak_memory(timed)}
        return Measurement(str(case), unit.provider, direction, copy_microseconds=copy.microseconds, **own)

    yield row("forward", forward)
    if differentiable:
        cotangents = [torch.randn_like(output) for output in graph()]
        yield row("backward", backward, graph)
        yield row("both", lambda: backward(*graph()))


def measure_stack(unit: Unit, tensors: Tensors, build: Function, device: torch.device) -> Iterator[Measurement]:
    """As `measure`, for one boundary: the difference of two stacks over the boundaries that the longer has more."""

    def rows(depth: int) -> list[Measurement]:
        stack = build(depth)
        return list(measure(unit, tensors, lambda x: (stack(x),), device, parameters=list(stack.parameters())))

    count = DEPTHS[0] - DEPTHS[1]
    for many, few in zip(*map(rows, DEPTHS)):
        pairs = {name: (getattr(many, name), getattr(few, name)) for name in OF_A_BOUNDARY}
        shares = {name: None if None in pair else (pair[0] - pair[1]) / count for name, pair in pairs.items()}
        if (shares["microseconds"] or 0) <= 0:
            raise RuntimeError(f"{DEPTHS} connections took {many.microseconds}, {few.microseconds} µs, which is noise")
        yield replace(many, **shares, spread=math.hypot(many.spread or 0, few.spread or 0) / count)


@cache
def copy_time(size: int, device: torch.device) -> Timing:
    """The time of a copy that reads and writes so many bytes in all, measured once in a run."""
    source = torch.randint(0, 255, (max(1, size // 2),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return device_time(lambda: target.copy_(source), device)


def device_time(call: Function, device: torch.device, prepare: Function = tuple) -> Timing:
    """The time of call(*prepare()) on the device, without prepare; on a CPU, the time of the call."""
    *_, enqueued = (_host_sample(call, device, prepare) for _ in range(WARM_UP))
    if device.type != "cuda":
        return summary([_host_sample(call, device, prepare) for _ in range(SAMPLES)])
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    ahead = int(min(max(3 * enqueued / 1e6, SHORTEST_WAIT), LONGEST_WAIT) * CYCLES_PER_SECOND)

    def sample() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        prepared = prepare()
        flushed.zero_()
        torch.cuda._sleep(ahead)
        begin.record()
        call(*prepared)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    return summary([sample() for _ in range(SAMPLES)])


def _host_sample(call: Function, device: torch.device, prepare: Function = tuple) -> float:
    """µs until the call returns, from an idle device."""
    prepared = prepare()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call(*prepared)
    return (time.perf_counter() - begin) * 1e6


def quartiles(samples: Sequence[float]) -> list[float]:
    """The median, the lower and the upper quartile."""
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return [median, lower, upper]


def summary(samples: Sequence[float]) -> Timing:
    median, lower, upper = quartiles(samples)
    return Timing(median, upper - lower, len(samples))


def peak_memory(call: Function) -> float:
    """Megabytes that a call takes on a GPU at its peak above what was there before."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6
