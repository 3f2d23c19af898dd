"""How fast: device time beside eager, torch.compile, other libraries and a copy of the same bytes, in one run; and how
time grows with a size.

On a GPU every sample starts with a cold L2 (a buffer larger than it is overwritten) and with the host ahead of the
device, so that launches cost no device time; the median counts, and the interquartile range says how far to trust it.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from mhc_ops import HyperConnection

from ..testing.cases import Call, Sweep, Tensors
from ..testing.conv_cases import AnyCase

SAMPLES = 20
FEWEST_SAMPLES = 5  # when time is short: the fewest that have quartiles of their own
STACKED_LAYERS = 8
DEPTHS = 12, 4  # connections of the two stacks that a boundary is the difference of
OF_A_BOUNDARY = ("microseconds", "host_microseconds", "peak_megabytes")
FEWEST_POINTS = 3  # of a line: two make any line fit
FLUSHED_BYTES = 256 << 20
# The device waits while the host enqueues: three times as long as that took once, in cycles of about 2 GHz, and at
# most 5 ms, since a run takes many thousands of samples.
CYCLES_PER_SECOND = 2e9
SHORTEST_WAIT, LONGEST_WAIT = 1e-3, 5e-3
QUARTILES_OF_NORMAL = 1.349  # interquartile range over standard deviation
RESOLUTION = 0.5 / 12**0.5  # µs: the standard deviation that an event's steps of 0.5 µs alone cause

Direction = Literal["forward", "backward", "both"]  # without gradients; the gradients alone; a training step
Group = Literal["training", "decode", "sweep"]  # decode: small sizes; sweep: only there to see how time grows
Function = Callable[..., Any]
Sample = TypeVar("Sample")


@dataclass(frozen=True)
class Unit:
    """What is measured in one go."""

    case: AnyCase
    provider: str
    group: Group

    def __str__(self) -> str:
        return f"{self.provider} {self.case}"


@dataclass(frozen=True)
class Timing:
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
    direction: Direction
    microseconds: float
    bandwidth: float
    copy_microseconds: float  # a copy that moves the same bytes, read and written: the floor
    host_microseconds: float | None = None  # what the call takes on the host; of "forward" and "both"
    peak_megabytes: float | None = None  # above the inputs; of "forward" (inference) and "both"
    group: Group = "training"
    bytes: float | None = None  # that the op must move
    spread: float | None = None  # interquartile range of the samples, µs
    copy_spread: float | None = None
    samples: int | None = None
    error: float | None = None  # largest relative error against fp64 in the same run: of outputs, of gradients, of both

    @property
    def of_copy(self) -> float:
        """1 means: as fast as a copy of the same bytes."""
        return self.copy_microseconds / self.microseconds

    @property
    def copy_bandwidth(self) -> float:
        return self.bandwidth * self.microseconds / self.copy_microseconds


@dataclass(frozen=True)
class Growth:
    """How the time of one provider and direction grows along one axis: overhead + cost per byte · bytes. Points in the
    order of the sizes; times in µs."""

    subject: str
    axis: str
    at: str
    provider: str
    direction: Direction
    sizes: list[int]
    cases: list[str]
    megabytes: list[float]
    microseconds: list[float]
    copy_microseconds: list[float]
    overhead: float  # µs
    per_megabyte: float  # µs
    copy_per_megabyte: float
    noise: float  # standard deviation of per_megabyte over copy_per_megabyte, relative

    @property
    def along(self) -> str:
        return f"{self.axis} at {self.at}"

    @property
    def over_copy(self) -> float:
        """What a byte more costs, in times of what it costs a copy."""
        return self.per_megabyte / self.copy_per_megabyte


def deviation(spread: float) -> float:
    """Standard deviation of a sample, from the interquartile range; not below what the clock resolves."""
    return max(spread / QUARTILES_OF_NORMAL, RESOLUTION)


def why_no_compiler() -> str | None:
    """torch.compile needs a C++ compiler."""
    return None if shutil.which("g++") or shutil.which("clang++") else "there is no C++ compiler (g++ or clang++)"


@cache
def copy_time(size: int, device: torch.device) -> Timing:
    """Of a copy that reads and writes so many bytes in all, measured once in a run."""
    source = torch.randint(0, 255, (max(1, size // 2),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return device_time(lambda: target.copy_(source), device)


def measure(
    unit: Unit,
    tensors: Tensors,
    call: Call,
    device: torch.device,
    errors: Mapping[str, float],
    until: float = math.inf,
    *,
    parameters: Sequence[Tensor] = (),
) -> Iterator[Measurement]:
    """`call(**tensors)` forward, backward and both. errors: by direction; until: from then on few samples do;
    parameters: further leaves."""
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

    def row(direction: Direction, timed: Function, prepare: Function = tuple) -> Measurement:
        timing, size = device_time(timed, device, prepare, until), case.bytes_moved()[direction]
        copy, whole_call = copy_time(int(size), device), direction != "backward"
        return Measurement(
            subject=case.subject.name,
            case=str(case),
            provider=unit.provider,
            direction=direction,
            **asdict(timing),
            bandwidth=size / timing.microseconds / 1e3,
            copy_microseconds=copy.microseconds,
            host_microseconds=host_time(timed, device, until) if whole_call else None,
            peak_megabytes=peak_memory(timed, device) if whole_call else None,
            group=unit.group,
            bytes=size,
            copy_spread=copy.spread,
            error=errors.get(direction),
        )

    yield row("forward", forward)
    if differentiable:
        cotangents = [torch.randn_like(output) for output in graph()]
        yield row("backward", backward, graph)
        yield row("both", both)


def measure_stack(unit: Unit, tensors: Tensors, build: Function, *more: Any) -> Iterator[Measurement]:
    """As `measure`, of one boundary: what a stack takes beyond a shorter one, by the boundaries that it has more."""

    def rows(depth: int) -> list[Measurement]:
        stack = build(depth)
        return list(measure(unit, tensors, lambda x: (stack(x),), *more, parameters=list(stack.parameters())))

    count = DEPTHS[0] - DEPTHS[1]
    for many, few in zip(*map(rows, DEPTHS)):
        pairs = {name: (getattr(many, name), getattr(few, name)) for name in OF_A_BOUNDARY}
        shares = {name: None if None in pair else (pair[0] - pair[1]) / count for name, pair in pairs.items()}
        if (shares["microseconds"] or 0) <= 0:
            raise RuntimeError(f"{DEPTHS} connections took {many.microseconds}, {few.microseconds} µs, which is noise")
        spread = math.hypot(many.spread or 0, few.spread or 0) / count
        bandwidth = many.bandwidth * many.microseconds / shares["microseconds"]
        yield replace(many, **shares, spread=spread, bandwidth=bandwidth)


def device_time(call: Function, device: torch.device, prepare: Function = tuple, until: float = math.inf) -> Timing:
    """Of call(*prepare()) on the device, without what prepare takes; on a CPU, of the call itself."""
    enqueued = [_host_sample(call, device, prepare) / 1e6 for _ in range(3)][-1]
    if device.type != "cuda":
        return summary(samples(lambda: _host_sample(call, device, prepare), until))
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

    return summary(samples(sample, until))


def host_time(call: Function, device: torch.device, until: float = math.inf) -> float | None:
    """Median µs until the call returns, the device idle before it; None on a CPU, where call and work are one."""
    if device.type != "cuda":
        return None
    for _ in range(3):
        call()
    return summary(samples(lambda: _host_sample(call, device), until)).microseconds


def _host_sample(call: Function, device: torch.device, prepare: Function = tuple) -> float:
    """The device is idle when it begins."""
    prepared = prepare()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call(*prepared)
    return (time.perf_counter() - begin) * 1e6


def samples(sample: Callable[[], Sample], until: float) -> list[Sample]:
    """Few of them from `until` on."""
    found: list[Sample] = []
    while len(found) < (SAMPLES if time.perf_counter() < until else FEWEST_SAMPLES):
        found.append(sample())
    return found


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


def stack_peaks(T: int, n: int, D: int, device: torch.device) -> dict[str, float | None]:
    """Peak megabytes of a training step of eight HyperConnections in bf16 around one linear layer each, above weights
    and input: as they are, and with checkpoint=True."""
    x = torch.randn(T, n, D, device=device, dtype=torch.bfloat16, requires_grad=True)

    def peak(checkpoint: bool) -> float | None:
        layers = [torch.nn.Linear(D, D, bias=False, device=device, dtype=x.dtype) for _ in range(STACKED_LAYERS)]
        wrapped = (HyperConnection(layer, n, D, checkpoint=checkpoint, device=device) for layer in layers)
        stack = torch.nn.Sequential(*wrapped)
        return peak_memory(lambda: torch.autograd.grad(stack(x).sum(), [x, *stack.parameters()]), device)

    return {"without checkpoint": peak(False), "with checkpoint": peak(True)}


def fit(sweeps: Sequence[Sweep], measurements: Sequence[Measurement]) -> list[Growth]:
    """Of what was measured of the sweeps: a line for each provider and direction that has enough points."""
    measured: dict[tuple[str, Direction], dict[str, Measurement]] = {}
    for m in measurements:
        measured.setdefault((m.provider, m.direction), {})[m.case] = m
    found = []
    for sweep in sweeps:
        for of in measured.values():
            points = {size: of[str(case)] for size, case in sweep.cases.items() if str(case) in of}
            found += [_growth(sweep, points)] if len(points) >= FEWEST_POINTS else []
    return found


def _growth(sweep: Sweep, found: dict[int, Measurement]) -> Growth:
    first, *_ = points = list(found.values())
    megabytes = [(point.bytes or 0) / 1e6 for point in points]
    times, copies = [p.microseconds for p in points], [p.copy_microseconds for p in points]
    overhead, slope, noise = fit_line(megabytes, times, [deviation(p.spread or 0) for p in points])
    _, copy_slope, copy_noise = fit_line(megabytes, copies, [deviation(p.copy_spread or 0) for p in points])
    return Growth(
        subject=first.subject,
        axis=sweep.axis,
        at=sweep.at,
        provider=first.provider,
        direction=first.direction,
        sizes=list(found),
        cases=[p.case for p in points],
        megabytes=megabytes,
        microseconds=times,
        copy_microseconds=copies,
        overhead=overhead,
        per_megabyte=slope,
        copy_per_megabyte=copy_slope,
        noise=math.hypot(noise / slope, copy_noise / copy_slope),
    )


def fit_line(sizes: Sequence[float], times: Sequence[float], deviations: Sequence[float]) -> tuple[float, float, float]:
    """time = overhead + slope · size by relative residuals, so that small sizes count as much as large ones; and the
    standard deviation of the slope: what the deviation of each time alone makes of it, added up in squares."""
    x, t, d = (torch.tensor(values, dtype=torch.float64) for values in (sizes, times, deviations))
    weighted = torch.stack([torch.ones_like(x), x], 1) / t[:, None]
    right = torch.cat([torch.ones_like(t)[:, None], torch.diag(d / t)], 1)  # the times, then each deviation alone
    overhead, slope = torch.linalg.lstsq(weighted, right).solution.unbind()
    return overhead[0].item(), slope[0].item(), slope[1:].norm().item()
