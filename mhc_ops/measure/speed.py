"""How fast: device time beside eager, torch.compile, other libraries and a copy of the same bytes, in one run.

On a GPU every sample starts with a cold L2 (a buffer larger than it is overwritten) and with the host ahead of the
device, so that launches cost no device time; the median counts, and the interquartile range says how far to trust it.
"""

import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mhc_ops import HyperConnection

from .cases import Tensors
from .conv_cases import AnyCase

SAMPLES = 20
FEWEST_SAMPLES = 5  # when time is short: the fewest that have quartiles of their own
FLUSHED_BYTES = 256 << 20
# The device waits while the host enqueues: three times as long as that took once, in cycles of about 2 GHz, and at
# most 5 ms, since a run takes many thousands of samples.
CYCLES_PER_SECOND = 2e9
SHORTEST_WAIT, LONGEST_WAIT = 1e-3, 5e-3
QUARTILES_OF_NORMAL = 1.349  # interquartile range over standard deviation
RESOLUTION = 0.5 / 12**0.5  # µs: the standard deviation that an event's steps of 0.5 µs alone cause


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
    direction: str  # "forward" (without gradients), "backward", or "both" (a training step: forward and backward)
    microseconds: float
    bandwidth: float
    copy_microseconds: float  # a copy that moves the same bytes, read and written: the floor
    host_microseconds: float | None = None  # what the call takes on the host, without gradients; forward only
    peak_megabytes: float | None = None  # above the inputs; of "forward" (inference) and "both" (a training step)
    group: str = "training"  # or "decode" (small sizes), or "sweep" (only there to see how time grows)
    bytes: float | None = None  # that the op must move
    spread: float | None = None  # interquartile range of the samples, µs
    copy_spread: float | None = None
    samples: int | None = None
    error: float | None = None  # largest relative error against fp64 in the same run: of outputs, of gradients, of both

    @property
    def of_copy(self) -> float:
        """1 means: as fast as a copy of the same bytes."""
        return self.copy_microseconds / self.microseconds

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "of_copy": self.of_copy}


def deviation(spread: float) -> float:
    """Standard deviation of a sample, from the interquartile range; not below what the clock resolves."""
    return max(spread / QUARTILES_OF_NORMAL, RESOLUTION)


Call = Callable[..., tuple[Tensor, ...]]


class Copies:
    """Times of copies, each size measured once in a run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: dict[int, Timing] = {}

    def __call__(self, size: float) -> Timing:
        """A copy that reads and writes `size` bytes in all."""
        half = max(1, int(size) // 2)
        if half not in self._times:
            source = torch.randint(0, 255, (half,), dtype=torch.uint8, device=self._device)
            target = torch.empty_like(source)
            self._times[half] = device_time(lambda: target.copy_(source), self._device)
        return self._times[half]


def why_no_compiler() -> str | None:
    """torch.compile needs a C++ compiler."""
    return None if shutil.which("g++") or shutil.which("clang++") else "there is no C++ compiler (g++ or clang++)"


def measure(
    case: AnyCase,
    provider: str,
    tensors: Tensors,
    call: Call,
    copies: Copies,
    device: torch.device,
    group: str = "training",
    errors: dict[str, float] | None = None,
    until: float = math.inf,
) -> Iterator[Measurement]:
    """`call(**tensors)` forward, backward and both. errors: by direction; until: from then on few samples do."""
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    wanted = [tensor for tensor in leaves.values() if tensor.requires_grad]
    differentiable = len(case.subject.differentiable)
    moved = case.bytes_moved()

    def row(direction: str, timing: Timing, host: float | None = None, peak: float | None = None) -> Measurement:
        size, copy = moved[direction], copies(moved[direction])
        return Measurement(
            case.subject.name,
            str(case),
            provider,
            direction,
            timing.microseconds,
            size / timing.microseconds / 1e3,
            copy.microseconds,
            host,
            peak,
            group,
            size,
            timing.spread,
            copy.spread,
            timing.samples,
            (errors or {}).get(direction),
        )

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return call(**plain)

    def graph() -> list[Tensor]:
        return list(call(**leaves))[:differentiable]

    def backward(outputs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, wanted, cotangents)

    timing = device_time(forward, device, until=until)
    yield row("forward", timing, host_time(forward, device, until), peak_memory(forward, device))
    if not differentiable:
        return
    cotangents = [torch.randn_like(output) for output in graph()]
    yield row("backward", device_time(backward, device, lambda: (graph(),), until))
    timing = device_time(lambda: backward(graph()), device, until=until)
    yield row("both", timing, peak=peak_memory(lambda: backward(graph()), device))


def device_time(
    call: Callable[..., Any], device: torch.device, prepare: Callable[[], Any] = tuple, until: float = math.inf
) -> Timing:
    """Of call(*prepare()) on the device, without what prepare takes; on a CPU, of the call itself."""
    if device.type != "cuda":
        for _ in range(3):
            call(*prepare())
        return _timing(lambda: _host_sample(call, prepare), until)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def settled() -> Any:
        prepared = prepare()
        torch.cuda.synchronize()
        return prepared

    enqueued = [_host_sample(call, settled) / 1e6 for _ in range(3)][-1]
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

    return _timing(sample, until)


def host_time(call: Callable[[], Any], device: torch.device, until: float = math.inf) -> float | None:
    """Median µs until the call returns, the device idle before it; None on a CPU, where call and work are one."""
    if device.type != "cuda":
        return None
    for _ in range(3):
        call()

    def idle() -> tuple[()]:
        torch.cuda.synchronize()
        return ()

    return _timing(lambda: _host_sample(call, idle), until).microseconds


def _timing(sample: Callable[[], float], until: float) -> Timing:
    samples: list[float] = []
    while len(samples) < (SAMPLES if time.perf_counter() < until else FEWEST_SAMPLES):
        samples.append(sample())
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, upper - lower, len(samples))


def _host_sample(call: Callable[..., Any], prepare: Callable[[], Any]) -> float:
    prepared = prepare()
    begin = time.perf_counter()
    call(*prepared)
    return (time.perf_counter() - begin) * 1e6


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


STACKED_LAYERS = 8


def stack_peaks(T: int, n: int, D: int, device: torch.device) -> dict[str, float | None]:
    """Peak megabytes of a training step of eight HyperConnections in bf16 around one linear layer each, above weights
    and input: as they are, and with checkpoint=True."""
    peaks = {}
    x = torch.randn(T, n, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    for checkpoint in (False, True):
        layers = [torch.nn.Linear(D, D, bias=False, device=device, dtype=x.dtype) for _ in range(STACKED_LAYERS)]
        wrapped = (HyperConnection(layer, n, D, checkpoint=checkpoint, device=device) for layer in layers)
        stack = torch.nn.Sequential(*wrapped)

        def step(stack: torch.nn.Sequential = stack) -> None:
            torch.autograd.grad(stack(x).sum(), [x, *stack.parameters()])

        peaks["with checkpoint" if checkpoint else "without checkpoint"] = peak_memory(step, device)
    return peaks
