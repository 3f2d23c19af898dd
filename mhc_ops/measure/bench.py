"""What `mhc-ops bench` runs, in which order, and for how long: the most important first, kept as it comes.

Training steps come before kernels, those before other libraries, then eager, and torch.compile last, which costs more
than all the others; so what a short budget or an interruption leaves out is what matters or yields least.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..core import backend as backends
from . import peers, providers, report, scaling, selection, speed, training_step
from .accuracy import Row
from .cases import Sweep
from .conv_cases import AnyCase
from .results import NotMeasured, Results
from .training_step import Race

LONGEST = 300  # characters of a reason: compilers say more than anybody reads in a table
STACK = (8192, 4, 4096)  # T, n, D for which the memory of a stack of layers is measured
OTHERS = ("eager", "torch.compile")
PROVIDERS = (
    *(backend for backend in backends.BACKENDS if backend != "reference"),
    *(peer.name for peer in peers.PEERS),
    *OTHERS,
)


@dataclass(frozen=True)
class Request:
    """What was asked for; providers: only these, where any are given; case: in the name; skip: "provider case"."""

    device: torch.device
    providers: Sequence[str] = ()
    peers: bool = False
    case: str = ""
    skip: Sequence[str] = ()
    budget: float = math.inf


@dataclass(frozen=True)
class Unit:
    """What is measured in one go."""

    case: AnyCase
    provider: str
    group: str

    def __str__(self) -> str:
        return f"{self.provider} {self.case}"


def run(request: Request, results: Results, save: Callable[[], None]) -> None:
    """Fill the results and save after every unit. KeyboardInterrupt passes, with all that was measured kept; Refused
    where no case has the name that was asked for."""
    if not training_step.named(request.case, request.device):
        selection.named(request.case, [case for group in chosen_cases(request) for case in group])
    deadline = time.perf_counter() + request.budget
    results.budget_seconds = request.budget if math.isfinite(request.budget) else None
    asked = {"providers": request.providers, "case": [request.case] if request.case else [], "skip": request.skip}
    results.selection = {name: list(words) for name, words in asked.items() if words}
    present = find_providers(request, results)
    sweeps = chosen_sweeps(request)
    units = plan(request, present)
    results.not_measured += skipped(request, present)
    session = Session(request.device, results)
    took: dict[str, list[float]] = {}
    done = late = 0
    try:
        with torch.cuda.device(request.device) if request.device.type == "cuda" else contextlib.nullcontext():
            for done, unit in enumerate(report.progress(units, "bench")):
                begin = time.perf_counter()
                if deadline - begin <= statistics.median(took.get(unit.provider, [0])):
                    reason = f"out of time (--budget {request.budget:g})"
                    results.not_measured.append(NotMeasured(str(unit.case), unit.provider, reason))
                    late += 1
                    continue
                session.measure(unit, begin + (deadline - begin) / (len(units) - done))
                took.setdefault(unit.provider, []).append(time.perf_counter() - begin)
                results.scaling = scaling.fit(sweeps, results.measurements)
                save()
            done = len(units)
            if request.device.type == "cuda" and "triton" in present and not request.case:
                with failures_of("a stack of layers", "triton", results):
                    results.stack_megabytes = speed.stack_peaks(*STACK, request.device)
        results.complete = not late
    finally:
        left = units[done:]
        results.not_measured += [NotMeasured(str(unit.case), unit.provider, "interrupted") for unit in left]
        save()


@contextlib.contextmanager
def failures_of(where: str, provider: str, results: Results) -> Iterator[None]:
    """What fails is named in the results, and the next one runs."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, providers.Wrong) else f"{type(error).__name__}: {error}"
        results.not_measured.append(NotMeasured(where, provider, " ".join(reason.split())[:LONGEST], True))


class Session:
    """Measures units into the results."""

    def __init__(self, device: torch.device, results: Results) -> None:
        self._device = device
        self._results = results
        self._copies = speed.Copies(device)
        self._checked: dict[tuple[AnyCase, str], list[Row]] = {}

    def measure(self, unit: Unit | Race, until: float) -> None:
        if isinstance(unit, Race):
            with failures_of(unit.case, unit.provider, self._results):
                noted = partial(failures_of, results=self._results)
                self._results.steps += training_step.measure(unit, self._device, until, noted)
            return
        case, provider = unit.case, unit.provider
        with failures_of(str(case), provider, self._results):
            prepared = providers.prepare(case, provider, case.inputs(self._device, drawn_on=self._device))
            if prepared is None:
                return
            rows = self._check(case, provider)
            providers.refuse_if_wrong(provider, rows)
            errors = providers.worst_errors(case.subject, rows)
            timed = speed.measure(case, provider, *prepared, self._copies, self._device, unit.group, errors, until)
            for measurement in timed:
                self._results.measurements.append(measurement)

    def _check(self, case: AnyCase, provider: str) -> list[Row]:
        """Once for cases that are the same when small."""
        key = (case.smaller(), provider)
        if key not in self._checked:
            self._checked[key] = providers.check(case, provider, self._device)
            self._results.accuracy += self._checked[key]
        return self._checked[key]


def find_providers(request: Request, results: Results) -> list[str]:
    """Those that were asked for and are there; the others are named in the results."""

    def asked(provider: str) -> bool:
        return provider in request.providers or not request.providers

    kernels = [backend for backend in backends.BACKENDS if backend != "reference" and asked(backend)]
    results.not_measured += selection.absent(kernels, request.device)
    found = list(kernels)
    for peer in peers.PEERS:
        if peer.name in request.providers or (request.peers and asked(peer.name)):
            reason = peers.why_not(peer)
            if reason is None:
                found.append(peer.name)
                results.precision[peer.name] = peer.precision
            else:
                results.not_measured.append(NotMeasured("", peer.name, reason))
    reason = speed.why_no_compiler()
    if reason is not None and asked("torch.compile"):
        results.not_measured.append(NotMeasured("", "torch.compile", reason))
    return found + [other for other in OTHERS if asked(other) and not (other == "torch.compile" and reason)]


def chosen_sweeps(request: Request) -> Sequence[Sweep]:
    return selection.SCALING if request.device.type == "cuda" else selection.SCALING_CPU


def chosen_cases(request: Request) -> tuple[Sequence[AnyCase], Sequence[AnyCase], Sequence[AnyCase]]:
    """Of training, of decoding and of sweeps, for this device."""
    on_gpu = request.device.type == "cuda"
    training, decode = (selection.BENCH, selection.DECODE) if on_gpu else (selection.BENCH_CPU, ())
    return training, decode, [case for sweep in chosen_sweeps(request) for case in sweep.cases]


def plan(request: Request, present: Sequence[str]) -> list[Unit | Race]:
    """The most important first."""
    training, decode, sweep = chosen_cases(request)

    def runs(case: AnyCase, provider: str) -> bool:
        return provider not in backends.BACKENDS or selection.runs(case, provider, request.device)

    def units(cases: Sequence[AnyCase], provider: str) -> list[Unit]:
        group = dict.fromkeys(sweep, "sweep") | dict.fromkeys(decode, "decode") | dict.fromkeys(training, "training")
        return [Unit(case, provider, group[case]) for case in cases if runs(case, provider)]

    kernels = [p for p in present if p in backends.BACKENDS]
    beside = [p for p in present if peers.by_name(p) is not None]
    planned = [unit for cases in (training, decode) for p in kernels for unit in units(cases, p)]
    for case in sweep:
        fastest = [unit for p in kernels for unit in units([case], p)]
        planned += fastest or units([case], "eager") * ("eager" in present)
    planned += [unit for case in (*training, *decode) for p in beside for unit in units([case], p)]
    planned += [unit for p in OTHERS if p in present for unit in units(training, p)]
    kept = [
        unit
        for unit in dict.fromkeys(planned)
        if request.case in str(unit.case) and not any(text in str(unit) for text in request.skip)
    ]
    races = [race.split(request.skip)[0] for race in training_step.plan(request.case, present, request.device)]
    eager, compiled = ([race for race in races if race.providers and race.compiled == c] for c in (False, True))
    return [*eager, *kept, *compiled]


def skipped(request: Request, present: Sequence[str]) -> list[NotMeasured]:
    """What would have been measured but for --skip."""
    kept = set(plan(request, present))
    every = plan(replace(request, skip=()), present)
    left = [unit.split(request.skip)[1] if isinstance(unit, Race) else unit for unit in every if unit not in kept]
    return [NotMeasured(str(unit.case), unit.provider, "left out (--skip)") for unit in left]
