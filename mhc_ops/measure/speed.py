"""How fast: device time beside eager, torch.compile, other libraries and a copy of the same bytes, in one run.

On a GPU every sample starts with a cold L2 (a larger buffer is overwritten first) and with the host ahead of the
device, so that launches cost no device time. The median counts; the interquartile range says how far to trust it.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..testing.cases import Call, Tensors
from ..testing.conv_cases import AnyCase

SAMPLES = 20
DEPTHS = 12, 4  # connections of the two stacks whose difference is a boundary
OF_A_BOUNDARY = ("microseconds", "host_microseconds", "peak_megabytes")
FLUSHED_BYTES = 256 << 20
# The device waits while the host enqueues: three times as long as that took once, in cycles of about 2 GHz, and at
# most 5 ms, since a run takes many thousands of samples.
CYCLES_PER_SECOND = 2e9
SHORTEST_WAIT, LONGEST_WAIT = 1e-3, 5e-3
QUARTILES_OF_NORMAL = 1.349  # interquartile range over standard deviation
RESOLUTION = 0.5 / 12**0.5  # µs: the standard deviation that an event's steps of 0.5 µs alone cause
DIRECTIONS = ("forward", "backward", "both")  # without gradients; the gradients alone; a training step
EAGER, COMPILED, GRAPHS = MODES = ("eager", "torch.compile", "graphs")  # of a model
PLAIN = "plain"  # residuals without streams

Function = Callable[..., Any]


@dataclass(frozen=True)
class Unit:
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


@dataclass(frozen=True)
class Measurement:
    """One provider on one case. Times in µs; bandwidth in GB/s of the bytes that the op must move."""

    subject: str
    case: str
    provider: str
    direction: str
    microseconds: float
    bandwidth: float
    copy_microseconds: float  # a copy that reads and writes the same bytes: the floor
    host_microseconds: float | None = None  # until the call returns; of "forward" and "both"
    peak_megabytes: float | None = None  # above the inputs; of "forward" (inference) and "both"
    group: str = "training"
    bytes: float | None = None  # that the op must move
    spread: float | None = None  # interquartile range of the samples, µs
    copy_spread: float | None = None
    samples: int | None = None

    @property
    def of_copy(self) -> float:
        """1 means as fast as a copy of the same bytes."""
        return self.copy_microseconds / self.microseconds


@dataclass(frozen=True)
class StepTime:
    """One provider at one size in one mode. milliseconds, spread: median and interquartile range from idle to idle.

    ratio: to plain residuals of the same round: the median, then its quartiles; in_a_row: the same for steps in a row
    rounds: of each the milliseconds from idle to idle and in a row. Files of before have neither these nor quartiles.
    """

    size: str
    provider: str
    mode: str
    milliseconds: float
    spread: float | None = None
    samples: int | None = None
    ratio: list[float] = field(default_factory=list)
    in_a_row: list[float] = field(default_factory=list)
    peak_megabytes: float | None = None  # above weights and input
    difference: float | None = None  # relative, to the reference: of the loss or of dx, whichever is larger
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def case(self) -> str:
        return name_of(self.size, self.mode)


def percent(ratio: Sequence[float]) -> str:
    """[1.067, 1.061, 1.072] -> "+6.7 (+6.1 to +7.2)\""""
    median, *quartiles = [f"{100 * (r - 1):+.1f}" for r in ratio] or [""]
    return f"{median} ({' to '.join(quartiles)})" if quartiles else median


def ratios(own: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> list[list[float]]:
    """Median and quartiles of own over plain in the same round: from idle to idle, and in a row."""
    of_rounds = zip(*([a / b for a, b in zip(*pair)] for pair in zip(own, plain)))
    quartiles = (statistics.quantiles(ratio, n=4, method="inclusive") for ratio in of_rounds)
    return [[median, lower, upper] for lower, median, upper in quartiles]


def name_of(what: object, mode: str) -> str:
    return f"{what}" if mode == EAGER else f"{mode} {what}"


def deviation(spread: float) -> float:
    """Standard deviation of a sample from the interquartile range; at least what the clock resolves."""
    return max(spread / QUARTILES_OF_NORMAL, RESOLUTION)


def why_no_compiler() -> str | None:
    """torch.compile needs a C++ compiler."""
    return None if shutil.which("g++") or shutil.which("clang++") else "there is no C++ compiler (g++ or clang++)"


@cache
def copy_time(size: int, device: torch.device) -> Timing:
    """The time of a copy that reads and writes so many bytes in all, measured once in a run."""
    source = torch.randint(0, 255, (max(1, size // 2),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return device_time(lambda: target.copy_(source), device)


def measure(
    unit: Unit, tensors: Tensors, call: Call, device: torch.device, *, parameters: Sequence[Tensor] = ()
) -> Iterator[Measurement]:
    """Times `call(**tensors)` forward, backward and both. parameters: further leaves."""
    case = unit.case
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    wanted = [*(tensor for tensor in leaves.values() if tensor.requires_grad), *parameters]
    differentiable = len(case.subject.differentiable)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return call(**plain)

    def graph() -> Sequence[Tensor]:
        return call(**leaves)[:differentiable]

    def backward(*outputs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, wanted, cotangents)

    def both() -> tuple[Tensor, ...]:
        return backward(*graph())

    def row(direction: str, timed: Function, prepare: Function = tuple) -> Measurement:
        timing, size = device_time(timed, device, prepare), case.bytes_moved()[direction]
        copy, whole_call = copy_time(int(size), device), direction != "backward"
        return Measurement(
            subject=case.subject.name,
            case=str(case),
            provider=unit.provider,
            direction=direction,
            **timing._asdict(),
            bandwidth=size / timing.microseconds / 1e3,
            copy_microseconds=copy.microseconds,
            host_microseconds=host_time(timed, device) if whole_call else None,
            peak_megabytes=peak_memory(timed, device) if whole_call else None,
            group=unit.group,
            bytes=size,
            copy_spread=copy.spread,
        )

    yield row("forward", forward)
    if differentiable:
        cotangents = [torch.randn_like(output) for output in graph()]
        yield row("backward", backward, graph)
        yield row("both", both)


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
        spread = math.hypot(many.spread or 0, few.spread or 0) / count
        bandwidth = many.bandwidth * many.microseconds / shares["microseconds"]
        yield replace(many, **shares, spread=spread, bandwidth=bandwidth)


def device_time(call: Function, device: torch.device, prepare: Function = tuple) -> Timing:
    """The time of call(*prepare()) on the device, without prepare; on a CPU, the time of the call."""
    enqueued = [_host_sample(call, device, prepare) / 1e6 for _ in range(3)][-1]
    if device.type != "cuda":
        return summary([_host_sample(call, device, prepare) for _ in range(SAMPLES)])
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)
    ahead = int(min(max(3 * enqueued, SHORTEST_WAIT), LONGEST_WAIT) * CYCLES_PER_SECOND)

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


def host_time(call: Function, device: torch.device) -> float | None:
    """Median µs until the call returns, from an idle device; None on a CPU, where call and work are one."""
    if device.type != "cuda":
        return None
    return summary([_host_sample(call, device) for _ in range(3 + SAMPLES)][3:]).microseconds


def _host_sample(call: Function, device: torch.device, prepare: Function = tuple) -> float:
    """The device is idle when the time begins."""
    prepared = prepare()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call(*prepared)
    return (time.perf_counter() - begin) * 1e6


def summary(samples: Sequence[float]) -> Timing:
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, upper - lower, len(samples))


def peak_memory(call: Function, device: torch.device) -> float | None:
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
