"""How fast: device time beside eager, torch.compile, other libraries and a copy of the same bytes, in one run.

A kernel is checked against fp64 before it is timed. On a GPU every sample starts with a cold L2 (a buffer larger than
it is overwritten) and with the host ahead of the device, so that launches cost no device time; the median counts.
"""

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mhc_ops import HyperConnection

from . import accuracy, peers
from .cases import Tensors
from .conv_cases import AnyCase

SAMPLES = 20
FLUSHED_BYTES = 256 << 20
AHEAD_CYCLES = 10_000_000  # about 5 ms of waiting on the device, in which the host enqueues


@dataclass(frozen=True)
class Measurement:
    """One provider on one case. Times in µs; bandwidth in GB/s of the bytes that the op must move."""

    subject: str
    case: str
    provider: str
    direction: str  # "forward" (without gradients), "backward", or "both" (a training step: forward and backward)
    microseconds: float
    bandwidth: float
    copy_microseconds: float  # a copy that moves the same bytes, read and written
    host_microseconds: float | None  # what the call takes on the host, without gradients; forward only
    peak_megabytes: float | None  # of a training step, above the inputs; "both" only

    @property
    def of_copy(self) -> float:
        """1 means: as fast as a copy of the same bytes."""
        return self.copy_microseconds / self.microseconds

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "of_copy": self.of_copy}


Call = Callable[..., tuple[Tensor, ...]]


def measure(case: AnyCase, providers: list[str], device: torch.device) -> Iterator[Measurement]:
    """Each provider (a backend's name, "eager", "torch.compile", a peer's name); one that lacks the op is left out."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        copies = {direction: copy_time(size, device) for direction, size in case.bytes_moved().items()}
        tensors = case.inputs(device)
        for provider in providers:
            prepared = prepare(case, provider, tensors, device)
            if prepared is not None:
                yield from _time_provider(case, provider, *prepared, copies, device)


def why_no_compiler() -> str | None:
    """torch.compile needs a C++ compiler."""
    return None if shutil.which("g++") or shutil.which("clang++") else "there is no C++ compiler (g++ or clang++)"


def prepare(case: AnyCase, provider: str, tensors: Tensors, device: torch.device) -> tuple[Tensors, Call] | None:
    """The provider's own tensors, and `call(**tensors)`; None where it lacks the op."""
    call = case.subject.call
    for peer in peers.PEERS:
        if provider == peer.name:
            prepared = peer.prepare(case.subject.name, tensors)
            return None if prepared is None else (prepared.tensors, prepared.call)
    if provider == "eager":
        return tensors, partial(call, backend="reference")
    if provider == "torch.compile":
        torch.compiler.reset()
        return tensors, partial(torch.compile(call, dynamic=False, fullgraph=True), backend="reference")
    failed = [row for row in accuracy.measure(case.smaller(), provider, device) if not row.passed]
    if failed:
        raise AssertionError(f"{provider} is wrong, so it is not timed: {failed}")
    return tensors, partial(call, backend=provider)


def _time_provider(
    case: AnyCase,
    provider: str,
    tensors: Tensors,
    call: Call,
    copies: dict[str, float],
    device: torch.device,
) -> Iterator[Measurement]:
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    wanted = [tensor for tensor in leaves.values() if tensor.requires_grad]
    differentiable = len(case.subject.differentiable)
    moved = case.bytes_moved()

    def row(direction: str, time: float, host: float | None = None, peak: float | None = None) -> Measurement:
        name, bandwidth = case.subject.name, moved[direction] / time / 1e3
        return Measurement(name, str(case), provider, direction, time, bandwidth, copies[direction], host, peak)

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return call(**plain)

    def graph() -> list[Tensor]:
        return list(call(**leaves))[:differentiable]

    def backward(outputs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, wanted, cotangents)

    yield row("forward", device_time(forward, device), host=host_time(forward, device))
    if not differentiable:
        return
    cotangents = [torch.randn_like(output) for output in graph()]
    yield row("backward", device_time(backward, device, prepare=lambda: (graph(),)))
    both = device_time(lambda: backward(graph()), device)
    yield row("both", both, peak=peak_memory(lambda: backward(graph()), device))


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

        peaks["with checkpoint" if checkpoint else "without"] = peak_memory(step, device)
    return peaks
