"""What `mhc-ops bench` runs: the most important first, torch.compile, which takes longest, last."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from ..core import backend as backends
from ..testing.cases import Call, Stack, Tensors
from ..testing.conv_cases import AnyCase, runs
from . import peers, report, selection, speed, training_step
from .results import COMPILED, GRAPHS, NotMeasured, Results
from .selection import KERNELS, OF_TORCH
from .speed import Unit
from .training_step import Race

PROVIDERS = (*KERNELS, *(peer.name for peer in peers.PEERS), *OF_TORCH)


def run(options: Namespace, results: Results, save: Callable[[], object]) -> None:
    """Fills the results and saves after every unit; KeyboardInterrupt passes. Refused if no case has the name."""
    device = options.device
    kernels = [case for group in cases_on(device).values() for case in group]
    selection.named(options.case, [*training_step.sizes_on(device), *kernels])
    asked = {"providers": options.providers, "case": [options.case] if options.case else []}
    results.selection = {name: list(words) for name, words in asked.items() if words}
    left = plan(options.case, find_providers(options, results), device)
    if device.type != "cuda" and any(isinstance(unit, Race) for unit in left):
        results.not_measured.append(NotMeasured("training_step", GRAPHS, "CUDA graphs need a GPU"))
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            for unit in report.progress(list(left), "bench"):
                unit.measure(device, results) if isinstance(unit, Race) else measure(unit, device, results)
                left.remove(unit)
                save()
        results.complete = True
    finally:
        results.not_measured += [NotMeasured(str(unit.case), unit.provider, "interrupted") for unit in left]
        save()


def cases_on(device: torch.device) -> dict[str, Sequence[AnyCase]]:
    if device.type == "cuda":
        return {"training": selection.BENCH, "decode": selection.DECODE}
    return {"training": selection.BENCH_CPU, "decode": ()}


def find_providers(options: Namespace, results: Results) -> list[str]:
    """The providers that were asked for and are there; the results name the others."""
    asked = options.providers or [p for p in PROVIDERS if options.peers or not peers.by_name(p)]
    wanted = list(dict.fromkeys(asked))  # a name that is given twice is measured once
    libraries = {name: peer for name in wanted if (peer := peers.by_name(name))}
    reasons = {name: peers.why_not(peer) for name, peer in libraries.items()}
    reasons |= {COMPILED: "there is no C++ compiler"} if COMPILED in wanted and not backends.CXX else {}
    results.not_measured += selection.absent([name for name in wanted if name in KERNELS], options.device)
    results.not_measured += [NotMeasured("", name, reason) for name, reason in reasons.items() if reason is not None]
    results.precision = {name: peer.precision for name, peer in libraries.items() if reasons[name] is None}
    return [name for name in wanted if reasons.get(name) is None]


def plan(text: str, present: Sequence[str], device: torch.device) -> list[Unit | Race]:
    """What is measured with this text in its name, in this order."""
    of_ours, of_torch = ([p for p in present if p in names] for names in (KERNELS, OF_TORCH))
    libraries = [p for p in present if p not in (*of_ours, *of_torch)]
    units: list[Unit | Race] = [*training_step.plan(text, present, device)]
    for providers, group in (*product((of_ours, libraries), ("training", "decode")), (of_torch, "training")):
        for provider, case in product(providers, cases_on(device)[group]):
            there = runs(case, provider, device) if provider in of_ours else case.runs_on(provider)
            units += [Unit(case, provider, group)] if there and text in str(case) else []
    return sorted(units, key=lambda unit: COMPILED in str(unit))


def measure(unit: Unit, device: torch.device, results: Results) -> None:
    case, provider = unit.case, unit.provider
    with results.failures_of(case, provider):
        prepared = prepare(case, provider, case.inputs(device, drawn_on=device), device)
        if prepared is None:
            return
        selection.check(case, provider, device, results.accuracy)
        timed = speed.measure_stack if isinstance(case, Stack) else speed.measure
        for found in timed(unit, *prepared, device):
            results.measurements.append(found)


def prepare(case: AnyCase, provider: str, tensors: Tensors, device: torch.device) -> tuple[Tensors, Call] | None:
    """The provider's own tensors and `call(**tensors)`, for a stack what builds it; None if the provider lacks it."""
    if isinstance(case, Stack):
        stack = partial(training_step.connect, provider, case=case, device=device)
        build: Any = lambda depth: stack([torch.nn.Identity()] * depth)  # noqa: E731
        return ({"x": tensors["x"]}, build) if training_step.connects(provider, case, device) else None
    call, peer = case.subject.call, peers.by_name(provider)
    if peer is not None:
        prepared = peer.prepare(case.subject.name, tensors)
        return None if prepared is None else (prepared.tensors, prepared.call)
    if provider == COMPILED:
        torch.compiler.reset()
        call = torch.compile(call, dynamic=False, fullgraph=True)
    return tensors, partial(call, backend="reference" if provider in OF_TORCH else provider)
