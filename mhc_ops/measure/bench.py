"""What `mhc-ops bench` runs, and in which order: the most important first, saved after every unit.

Training steps come before kernels, then other libraries, then eager; torch.compile is last, because it takes longer
than all the others. An interruption therefore leaves out what matters least.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..testing import accuracy, conv_cases
from ..testing.cases import Call, Stack, Tensors
from ..testing.conv_cases import AnyCase
from . import peers, report, selection, speed, training_step
from .results import Results
from .selection import KERNELS, OF_TORCH, NotMeasured
from .speed import GRAPHS, MODES, PLAIN, Unit
from .training_step import Race, Training

LONGEST_REASON = 300  # characters that a table shows of what a compiler says
PROVIDERS = (*KERNELS, *(peer.name for peer in peers.PEERS), *OF_TORCH)


@dataclass(frozen=True)
class Options:
    """providers: only these, if any are given; case: a part of the name."""

    device: torch.device
    providers: Sequence[str] = ()
    peers: bool = False
    case: str = ""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def groups(self) -> dict[str, Sequence[AnyCase]]:
        training, decode = (selection.BENCH, selection.DECODE) if self.on_gpu else (selection.BENCH_CPU, ())
        return {"training": training, "decode": decode}

    def asks_for(self, provider: str) -> bool:
        return provider in self.providers or not self.providers


def run(options: Options, results: Results, save: Callable[[], object]) -> None:
    """Fills the results and saves after every unit. KeyboardInterrupt passes, with all that was measured kept; Refused
    if no case has the name that was asked for."""
    kernels = [case for group in options.groups.values() for case in group]
    selection.named(options.case, [*training_step.named("", options.device), *kernels])
    asked = {"providers": options.providers, "case": [options.case] if options.case else []}
    results.selection = {name: list(words) for name, words in asked.items() if words}
    left = plan(options, find_providers(options, results))
    if not options.on_gpu and any(isinstance(unit, Race) for unit in left):
        results.not_measured.append(NotMeasured("training_step", GRAPHS, "CUDA graphs need a GPU"))
    checked: dict[Any, list[accuracy.Row]] = {}
    try:
        with torch.cuda.device(options.device) if options.on_gpu else contextlib.nullcontext():
            for unit in report.progress(list(left), "bench"):
                measure(unit, options.device, results, checked)
                left.remove(unit)
                save()
        results.complete = True
    finally:
        results.not_measured += [NotMeasured(str(unit.case), unit.provider, "interrupted") for unit in left]
        save()


@contextlib.contextmanager
def failures_of(where: str, provider: str, results: Results) -> Iterator[None]:
    """A failure is named in the results, and the next unit runs."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, selection.Wrong) else f"{type(error).__name__}: {error}"
        results.not_measured.append(NotMeasured(where, provider, " ".join(reason.split())[:LONGEST_REASON], True))


def prepare(case: AnyCase, provider: str, tensors: Tensors) -> tuple[Tensors, Call] | None:
    """The provider's own tensors and `call(**tensors)`, for a stack what builds it; None if the provider lacks it."""
    if isinstance(case, Stack):
        build: Any = partial(training_step.build, case, provider, device=tensors["x"].device)
        return None if build(1) is None else ({"x": tensors["x"]}, build)
    call, peer = case.subject.call, peers.by_name(provider)
    if peer is not None:
        prepared = peer.prepare(case.subject.name, tensors)
        return None if prepared is None else (prepared.tensors, prepared.call)
    if provider == "torch.compile":
        torch.compiler.reset()
        call = torch.compile(call, dynamic=False, fullgraph=True)
    return tensors, partial(call, backend="reference" if provider in OF_TORCH else provider)


def measure(unit: Unit | Race, device: torch.device, results: Results, checked: dict[Any, list[accuracy.Row]]) -> None:
    """checked: what is known of cases that are the same when small."""
    if isinstance(unit, Race):
        training, steps = Training(unit.size, unit.mode, device), {}
        for provider in (PLAIN, *unit.providers):
            with failures_of(unit.case, provider, results):
                steps[provider] = training.checked(provider)
        with failures_of(unit.case, PLAIN, results):
            results.steps += training.measure(steps)
        return
    case, provider = unit.case, unit.provider
    with failures_of(str(case), provider, results):
        prepared = prepare(case, provider, case.inputs(device, drawn_on=device))
        if prepared is None:
            return
        key = case.smaller(), provider
        if key not in checked:
            checked[key] = selection.check(case, provider, device)
            results.accuracy += checked[key]
        selection.refuse_if_wrong(provider, checked[key])
        timed = speed.measure_stack if isinstance(case, Stack) else speed.measure
        for found in timed(unit, *prepared, device):
            results.measurements.append(found)


def find_providers(options: Options, results: Results) -> list[str]:
    """The providers that were asked for and are there; the results name the others."""
    kernels = [backend for backend in KERNELS if options.asks_for(backend)]
    results.not_measured += selection.absent(kernels, options.device)
    wanted = [p for p in peers.PEERS if p.name in options.providers or (options.peers and options.asks_for(p.name))]
    reasons = {peer.name: peers.why_not(peer) for peer in wanted}
    results.precision |= {peer.name: peer.precision for peer in wanted if reasons[peer.name] is None}
    reasons |= {"eager": None, "torch.compile": speed.why_no_compiler()}
    asked = {name: reason for name, reason in reasons.items() if name not in OF_TORCH or options.asks_for(name)}
    results.not_measured += [NotMeasured("", name, reason) for name, reason in asked.items() if reason is not None]
    return [*kernels, *(name for name, reason in asked.items() if reason is None)]


def plan(options: Options, present: Sequence[str]) -> list[Unit | Race]:
    """The units in the order in which they are measured."""

    def units(group: str, provider: str) -> list[Unit]:
        runs = conv_cases.runs if provider in KERNELS else lambda case, provider, _: case.runs_on(provider)
        there = [case for case in options.groups[group] if runs(case, provider, options.device)]
        return [Unit(case, provider, group) for case in there if options.case in str(case)]

    kernels = [p for p in present if p in KERNELS]
    beside = [p for p in present if peers.by_name(p) is not None]
    planned = [unit for group in options.groups for p in kernels for unit in units(group, p)]
    planned += [unit for group in options.groups for p in beside for unit in units(group, p)]
    planned += [unit for p in OF_TORCH if p in present for unit in units("training", p)]
    eager, compiled, graphs = (training_step.plan(options.case, present, options.device, mode) for mode in MODES)
    return [*eager, *graphs, *planned, *compiled]
