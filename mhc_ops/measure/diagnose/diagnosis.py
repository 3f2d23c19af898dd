"""Run an op, compare it with fp64, and explain what is off."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import accuracy
from ..accuracy import Row
from ..cases import Case, Subject, Tensors
from ..conv_cases import AnyCase
from . import conv_hypotheses, conv_model, mhc_hypotheses, mhc_model, terms, trace
from .layouts import Layout, layout, section_names
from .places import place_of, wrong_elements
from .statistics import Statistics, statistics
from .trace import Hypothesis, Trace
from .verdict import Finding, Output, findings

PER_TOKEN = ("x", "h_out", "h_post", "h_res", "logits")  # inputs of mHC whose leading dimensions are tokens
ENOUGH_FOR_THREADS = 1 << 20  # elements
SPARE = 4  # freed pieces of memory of each size
# The order of the dataflow; what is not here comes after, in the order of the op.
FORWARD = ("inv_rms", "h_mix", "h_pre", "h_post", "h_res", "h_in", "x_next")


@dataclass(frozen=True)
class Detail:
    """What is known of one wrong output."""

    name: str
    layout: Layout
    statistics: Statistics
    place: str
    filled: float
    coefficients: dict[str, float]  # of error ≈ Σ c · term, in that place
    error: Tensor  # |error| as a multiple of what is allowed, shaped by the layout; NaN stays


@dataclass(frozen=True)
class Diagnosis:
    case: AnyCase
    backend: str
    rows: list[Row]
    findings: list[Finding]
    details: list[Detail]

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
    cotangents, plain = _run(case, subject, tensors, backend, None)
    with _fresh_memory_is_nan():
        _, results = _run(case, subject, tensors, backend, cotangents)
    exact = accuracy.truth(case.subject, tensors, cotangents, results)
    names = sorted(exact, key=lambda name: _rank(name, case.subject))
    rows = [accuracy.judge(case, backend, name, results[name], exact[name]) for name in names]
    if all(row.passed for row in rows):
        return Diagnosis(case, backend, rows, [], [])

    with threads_that_pay(tensors):
        model = Model(case, tensors, cotangents, results)
        right = model.run()
        outputs = [_output(case, row, results, plain, exact, right) for row in rows]
        details = [_detail(case, output, results[output.name].dtype) for output in outputs if not output.passed]
        found = findings(outputs, model.hypotheses(right), model.run, right, _sizes(case))
    return Diagnosis(case, backend, rows, found, details)


def _run(
    case: AnyCase, subject: Subject, tensors: Tensors, backend: str, cotangents: list[Tensor | None] | None
) -> tuple[list[Tensor | None], Tensors]:
    if cotangents is None:
        outputs = accuracy.run(subject, tensors, backend)
        cotangents = accuracy.random_cotangents(subject, outputs, case.seed, case.unused)
        _leave_zeros(*outputs.values(), *tensors.values())
    results = accuracy.run(subject, tensors, backend, cotangents)
    return cotangents, {name: accuracy.as_computed(case, result) for name, result in results.items()}


def _leave_zeros(*like: Tensor) -> None:
    """What is allocated next, for outputs and gradients, is then memory without a NaN of an earlier run."""
    zeros = [torch.zeros_like(tensor) for tensor in like for _ in range(SPARE)]
    del zeros


@contextlib.contextmanager
def _fresh_memory_is_nan() -> Iterator[None]:
    """An element that is never written shows, even where the memory still holds the right value of another run."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about algorithms that are not deterministic: nobody asked for that here
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
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


def _output(
    case: AnyCase, row: Row, results: Tensors, plain: Tensors, exact: dict[str, accuracy.Exact], right: Trace
) -> Output:
    name, result, truth, terms = row.output, results[row.output], exact[row.output].value, exact[row.output].terms

    def close(candidate: Tensor) -> bool:
        return accuracy.judge(case, row.backend, name, result, accuracy.Exact(candidate, terms)).passed

    return Output(
        name=name,
        result=result.double(),
        exact=truth,
        passed=row.passed,
        off=wrong_elements(result.double(), truth, result.dtype),
        unwritten=result.isnan() & ~plain[name].isnan(),
        close=close,
        locate=partial(place_of, layout=layout(case, name, tuple(truth.shape)), sections=section_names(case)),
        terms={term: value.reshape(truth.shape) for term, value in right.terms(name).items()},
        is_gradient=name not in case.subject.outputs,
        repeats=close(plain[name].double()),
    )


def _detail(case: AnyCase, output: Output, dtype: torch.dtype) -> Detail:
    error, place = output.result - output.exact, output.place
    allowed = accuracy.NORM_TOLERANCE[dtype] * float(output.exact.square().mean().sqrt())
    axes = layout(case, output.name, tuple(output.exact.shape))
    inside = {name: term[place.box] for name, term in output.terms.items()}
    return Detail(
        name=output.name,
        layout=axes,
        statistics=statistics(output.result, output.exact, output.off),
        place=place.words,
        filled=place.filled,
        coefficients=terms.coefficients(error[place.box], inside) if len(inside) > 1 else {},
        error=(error.abs() / (allowed or 1.0)).reshape(tuple(axes.values())).cpu(),  # read cell by cell
    )


def _rank(name: str, subject: Subject) -> tuple[int, int]:
    """Outputs as they are computed, then gradients: those nearest to the cotangents first, dx last."""
    if name in subject.outputs:
        return 0, (FORWARD.index(name) if name in FORWARD else len(FORWARD) + subject.outputs.index(name))
    return 1, (1 if name == "dx" else 0)


def _sizes(case: AnyCase) -> dict[str, int]:
    """Numbers that a wrong count may be."""
    if isinstance(case, Case):
        return {"n²": case.n**2, "n": case.n, "n² + 2n": case.n**2 + 2 * case.n, "T": math.prod(case.outer)}
    return {"W": case.W, "B": case.B, **({"n": case.n} if case.n else {}), "L": case.L}


class Model:
    """The model of a case, on its inputs and cotangents in fp64."""

    def __init__(self, case: AnyCase, tensors: Tensors, cotangents: list[Tensor | None], results: Tensors) -> None:
        self.case = case
        self.tensors = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        pairs = zip(case.subject.differentiable, cotangents)
        self.cotangents = {name: c.double() for name, c in pairs if c is not None}
        self.model: Any
        if isinstance(case, Case):
            outer = len(case.outer)
            flat = {name: _tokens(self.tensors[name], outer) for name in PER_TOKEN if name in self.tensors}
            self.tensors |= flat
            self.cotangents = {name: _tokens(c, outer) for name, c in self.cotangents.items()}
            if case.subject.name == "mhc_post_pre":
                self.tensors["stored x_next"] = _tokens(results["x_next"].double(), outer)
            self.model = mhc_model.MODELS[case.subject.name]
        else:
            self.model = conv_model.MODELS[case.subject.name.split()[0]](case)

    def run(self, hypothesis: Hypothesis | None = None, last: str | None = None) -> Trace:
        return trace.run(self.model, self.tensors, self.cotangents, hypothesis.edits if hypothesis else {}, last)

    def hypotheses(self, right: Trace) -> list[Hypothesis]:
        if isinstance(self.case, Case):
            return mhc_hypotheses.hypotheses(right)
        return conv_hypotheses.hypotheses(right, self.tensors)


def _tokens(tensor: Tensor, outer: int) -> Tensor:
    return tensor.flatten(0, outer - 1) if outer else tensor[None]
