"""What `mhc-ops bench` runs, in which order, and for how long: the most important first, kept as it comes.

Training steps come before kernels, those before other libraries, then eager, and torch.compile last, which costs more
than all the others; so what a short budget or an interruption leaves out is what matters or yields least.
"""

import contextlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from ..testing import accuracy, conv_cases
from ..testing.cases import Call, Stack, Sweep, Tensors
from ..testing.conv_cases import AnyCase
from . import peers, report, selection, speed, training_step
from .results import Results
from .selection import KERNELS, OF_TORCH, NotMeasured
from .speed import Unit
from .training_step import Race

LATE, INTERRUPTED = "out of time", "interrupted"
LONGEST_REASON = 300  # characters: compilers say more than anybody reads in a table
STACK = (8192, 4, 4096)  # T, n, D for which the memory of a stack of layers is measured
PROVIDERS = (*KERNELS, *(peer.name for peer in peers.PEERS), *OF_TORCH)


@dataclass(frozen=True)
class Request:
    """What was asked for; providers: only these, where any are given; case: in the name; skip: "provider case"."""

    device: torch.device
    providers: Sequence[str] = ()
    peers: bool = False
    case: str = ""
    skip: Sequence[str] = ()
    budget: float = math.inf

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def sweeps(self) -> Sequence[Sweep]:
        return selection.SCALING if self.on_gpu else selection.SCALING_CPU

    @property
    def groups(self) -> dict[speed.Group, Sequence[AnyCase]]:
        training, decode = (selection.BENCH, selection.DECODE) if self.on_gpu else (selection.BENCH_CPU, ())
        sweep = [case for sweep in self.sweeps for case in sweep.cases.values()]
        return {"training": training, "decode": decode, "sweep": sweep}

    def asks_for(self, provider: str) -> bool:
        return provider in self.providers or not self.providers


def run(request: Request, results: Results, save: Callable[[], object]) -> None:
    """Fill the results with what they lack and save after every unit. KeyboardInterrupt passes, with all that was
    measured kept; Refused where no case has the name that was asked for."""
    kernels = [case for group in request.groups.values() for case in group]
    selection.named(request.case, [*training_step.named("", request.device), *kernels])
    deadline = time.perf_counter() + request.budget
    results.budget_seconds = request.budget if math.isfinite(request.budget) else None
    asked = {"providers": request.providers, "case": [request.case] if request.case else [], "skip": request.skip}
    results.selection = {name: list(words) for name, words in asked.items() if words}
    before, results.not_measured = results.not_measured, []
    present = find_providers(request, results)
    planned, every = plan(request, present), plan(replace(request, skip=()), present)
    results.not_measured += [_unmeasured(unit, "left out (--skip)") for unit in every if unit not in planned]
    units = _missing(planned, before, results)
    session = Session(request.device, results)
    took: dict[str, list[float]] = defaultdict(list)
    done = 0
    try:
        with torch.cuda.device(request.device) if request.on_gpu else contextlib.nullcontext():
            if results.add_microseconds is None:
                one = torch.ones(1, device=request.device)
                results.add_microseconds = speed.host_time(lambda: torch.add(one, one), request.device)
            for done, unit in enumerate(report.progress(units, "bench")):
                begin = time.perf_counter()
                if deadline - begin <= statistics.median(took[unit.provider] or [0]):
                    results.not_measured.append(_unmeasured(unit, f"{LATE} (--budget {request.budget:g})"))
                    continue
                session.measure(unit, begin + (deadline - begin) / (len(units) - done))
                took[unit.provider].append(time.perf_counter() - begin)
                results.scaling = speed.fit(request.sweeps, results.measurements)
                save()
            done = len(units)
            if request.on_gpu and "triton" in present and not request.case:
                with failures_of("a stack of layers", "triton", results):
                    results.stack_megabytes = speed.stack_peaks(*STACK, request.device)
        results.complete = not any(entry.reason.startswith((LATE, INTERRUPTED)) for entry in results.not_measured)
    finally:
        results.not_measured += [_unmeasured(unit, INTERRUPTED) for unit in units[done:]]
        save()


def _missing(units: Sequence[Unit | Race], unmeasured: Sequence[NotMeasured], results: Results) -> list[Unit | Race]:
    """Those that an earlier run did not come to the end of; it may have begun with them. What it did not measure of all
    others stays named."""
    there = {(m.case, m.provider) for m in results.measurements}
    there |= {(training_step.name_of(step.size, step.compiled), step.provider) for step in results.steps}
    there -= {(entry.where, entry.provider) for entry in unmeasured}
    missing = {(str(u.case), u.provider): u for u in units if (str(u.case), u.provider) not in there}
    results.measurements = [m for m in results.measurements if (m.case, m.provider) not in missing]
    named = {*missing, *((entry.where, entry.provider) for entry in results.not_measured)}
    results.not_measured += [entry for entry in unmeasured if (entry.where, entry.provider) not in named]
    return list(missing.values())


def _unmeasured(unit: Unit | Race, reason: str) -> NotMeasured:
    return NotMeasured(str(unit.case), unit.provider, reason)


@contextlib.contextmanager
def failures_of(where: str, provider: str, results: Results) -> Iterator[None]:
    """What fails is named in the results, and the next one runs."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, selection.Wrong) else f"{type(error).__name__}: {error}"
        results.not_measured.append(NotMeasured(where, provider, " ".join(reason.split())[:LONGEST_REASON], True))


def prepare(case: AnyCase, provider: str, tensors: Tensors) -> tuple[Tensors, Call] | None:
    """The provider's own tensors, and `call(**tensors)`; None where it lacks the op. Of a stack: what builds it."""
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


class Session:
    """Measures units into the results."""

    def __init__(self, device: torch.device, results: Results) -> None:
        self._device, self._results = device, results
        self._training = lru_cache(maxsize=1)(partial(training_step.Training, device=device))
        self._checked: dict[tuple[AnyCase, str], list[accuracy.Row]] = {}

    def measure(self, unit: Unit | Race, until: float) -> None:
        with failures_of(str(unit.case), unit.provider, self._results):
            if isinstance(unit, Race):
                plain, step = self._training(unit.size, unit.compiled).measure(unit.provider, until)
                known = {(s.size, s.compiled) for s in self._results.steps}
                self._results.steps += [step] if (step.size, step.compiled) in known else [plain, step]
            else:
                self._measure(unit, until)

    def _measure(self, unit: Unit, until: float) -> None:
        case, provider, device = unit.case, unit.provider, self._device
        prepared = prepare(case, provider, case.inputs(device, drawn_on=device))
        if prepared is None:
            return
        key = case.smaller(), provider
        if key not in self._checked:  # once for cases that are the same when small
            self._checked[key] = selection.check(case, provider, device)
            self._results.accuracy += self._checked[key]
        selection.refuse_if_wrong(provider, self._checked[key])
        errors = selection.worst_errors(case.subject, self._checked[key])
        measure = speed.measure_stack if isinstance(case, Stack) else speed.measure
        for found in measure(unit, *prepared, device, errors, until):
            self._results.measurements.append(found)


def find_providers(request: Request, results: Results) -> list[str]:
    """Those that were asked for and are there; the others are named in the results."""
    kernels = [backend for backend in KERNELS if request.asks_for(backend)]
    results.not_measured += selection.absent(kernels, request.device)
    wanted = [p for p in peers.PEERS if p.name in request.providers or (request.peers and request.asks_for(p.name))]
    reasons = {peer.name: peers.why_not(peer) for peer in wanted}
    results.precision |= {peer.name: peer.precision for peer in wanted if reasons[peer.name] is None}
    reasons |= {"eager": None, "torch.compile": speed.why_no_compiler()}
    asked = {name: reason for name, reason in reasons.items() if name not in OF_TORCH or request.asks_for(name)}
    results.not_measured += [NotMeasured("", name, reason) for name, reason in asked.items() if reason is not None]
    return [*kernels, *(name for name, reason in asked.items() if reason is None)]


def plan(request: Request, present: Sequence[str]) -> list[Unit | Race]:
    """The most important first."""
    training, decode, sweep = request.groups.values()
    group_of = {case: group for group, cases in reversed(request.groups.items()) for case in cases}

    def units(cases: Sequence[AnyCase], provider: str) -> list[Unit]:
        runs = conv_cases.runs if provider in KERNELS else lambda case, provider, _: case.runs_on(provider)
        there = [case for case in cases if runs(case, provider, request.device)]
        return [Unit(case, provider, group_of[case]) for case in there if request.case in str(case)]

    kernels = [p for p in present if p in KERNELS]
    beside = [p for p in present if peers.by_name(p) is not None]
    planned = [unit for cases in (training, decode) for p in kernels for unit in units(cases, p)]
    for case in sweep:
        ours = [unit for p in kernels for unit in units([case], p)]
        planned += ours or units([case], "eager") * ("eager" in present)
    planned += [unit for case in (*training, *decode) for p in beside for unit in units([case], p)]
    planned += [unit for p in OF_TORCH if p in present for unit in units(training, p)]
    races = partial(training_step.plan, request.case, present, request.device)
    every: list[Unit | Race] = [*races(compiled=False), *dict.fromkeys(planned), *races(compiled=True)]
    return [unit for unit in every if not any(text in str(unit) for text in request.skip)]
