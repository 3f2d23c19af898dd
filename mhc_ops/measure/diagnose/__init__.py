"""Where an error comes from: run an op, compare it with fp64, and explain what is off."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import accuracy
from ..accuracy import Cotangents, Row
from ..cases import Case, Tensors
from ..conv_cases import AnyCase
from . import conv, mhc
from .explain import Finding, Hypothesis, Model, findings
from .outputs import Output

ENOUGH_FOR_THREADS = 1 << 20  # elements
SPARE = 4  # freed pieces of memory of each size


@dataclass(frozen=True)
class Diagnosis:
    """rows: what `check` says of every output, in the order of the dataflow. wrong: those that do not pass."""

    case: AnyCase
    backend: str
    rows: list[Row]
    findings: list[Finding]
    wrong: list[Output]

    @property
    def passed(self) -> bool:
        return not self.findings


def diagnose(
    case: AnyCase,
    backend: str = "reference",
    device: torch.device | str = "cpu",
    tensors: Tensors | None = None,
    call: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Diagnosis:
    """tensors: instead of the case's own. call: what to examine instead of the op, called as Subject.call is."""
    subject = case.subject if call is None else replace(case.subject, call=call)
    tensors = case.inputs(device) if tensors is None else tensors

    def run(cotangents: Cotangents | None = None) -> Tensors:
        results = accuracy.run(subject, tensors, backend, cotangents)
        return {name: accuracy.as_computed(case, result) for name, result in results.items()}

    outputs = run()
    cotangents = accuracy.random_cotangents(subject, outputs, case.seed, case.unused)
    _leave_zeros(*outputs.values(), *tensors.values())
    first = run(cotangents)
    with _fresh_memory_is_nan():
        results = run(cotangents)
    exact = accuracy.truth(case.subject, tensors, cotangents, results)
    rows = {name: accuracy.judge(case, backend, name, results[name], exact[name]) for name in exact}
    if all(row.passed for row in rows.values()):
        return Diagnosis(case, backend, list(rows.values()), [], [])

    with threads_that_pay(tensors):
        model = model_of(case, tensors, cotangents, results)
        right = model.run()
        names = [name for name in right if name in rows] or list(rows)
        judged = [
            Output(case, rows[name], results[name], first[name], exact[name], model.terms(name, right))
            for name in names
        ]
        found = findings(judged, model, hypotheses_of(case, model, right), sizes_of(case))
    wrong = [output for output in judged if not output.passed]
    return Diagnosis(case, backend, [output.row for output in judged], found, wrong)


def model_of(case: AnyCase, tensors: Tensors, cotangents: Cotangents, results: Tensors) -> Model:
    """In fp64; without a cotangent, that is zero."""

    def wide(tensors: Tensors) -> Tensors:
        return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}

    pairs = zip(case.subject.differentiable, cotangents)
    given = {name: torch.zeros_like(results[name]) if c is None else c for name, c in pairs}
    if isinstance(case, Case):
        return mhc.model(case, wide(tensors), wide(given), wide(results))
    return conv.model(case, wide(tensors), wide(given))


def hypotheses_of(case: AnyCase, model: Model, right: dict[str, Any]) -> list[Hypothesis]:
    every = mhc.hypotheses(case, model, right) if isinstance(case, Case) else conv.hypotheses(case, model, right)
    names = model.names()
    return [hypothesis for hypothesis in every if names.issuperset(hypothesis.changes)]


def sizes_of(case: AnyCase) -> dict[str, int]:
    """Numbers that a wrong count may be."""
    if isinstance(case, Case):
        return {"n²": case.n**2, "n": case.n, "n² + 2n": case.n**2 + 2 * case.n, "T": math.prod(case.outer)}
    return {"W": case.W, "B": case.B, **({"n": case.n} if case.n else {}), "L": case.L}


def _leave_zeros(*like: Tensor) -> None:
    """What is allocated next, for outputs and gradients, is then memory without a NaN of an earlier run."""
    zeros = [torch.zeros_like(tensor) for tensor in like for _ in range(SPARE)]
    del zeros


@contextlib.contextmanager
def _fresh_memory_is_nan() -> Iterator[None]:
    """An element that is never written shows, even where the memory still holds the right value of another run."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills it, unless told not to
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about algorithms that are not deterministic: nobody asked for that here
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def threads_that_pay(tensors: Tensors) -> Iterator[None]:
    """One for small tensors: hundreds of models are run, and on a busy CPU threads that wait for each other take six
    times as long.
    """
    before = torch.get_num_threads()
    if max(tensor.numel() for tensor in tensors.values()) < ENOUGH_FOR_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
