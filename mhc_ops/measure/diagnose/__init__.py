"""Where an error comes from: an op is run, compared with fp64, and what is off is explained.

An output is explained by the first of these that leaves an error within its tolerance: a fact (never written, NaN,
zero); an earlier output that is wrong; a hypothesis; the terms that it is a sum of; a factor.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.steps import Computation, always
from ...testing import accuracy
from ...testing.accuracy import Cotangents, Row
from ...testing.cases import Case, Tensors
from ...testing.conv_cases import AnyCase
from .ops import Hypothesis, hypotheses, model_of, terms_of
from .outputs import Output, coefficients

ENOUGH_FOR_THREADS = 1 << 20  # elements
SPARE = 4  # freed pieces of memory of each size
SMALL = 0.02  # of the error, that a term may add to it by rounding
WHOLE = 2e-3  # a factor this close to a whole number is taken as it
MOST_TERMS = 2  # that an explanation may name


@dataclass(frozen=True)
class Finding:
    """One cause and the outputs that it explains, the earliest in the dataflow first."""

    sentence: str
    outputs: tuple[str, ...]
    share: float  # of the error of the first output; 0 if there is no explanation


@dataclass(frozen=True)
class Diagnosis:
    """rows: the verdict of `check` on every output, in the order of the dataflow. wrong: those that fail."""

    rows: list[Row]
    findings: list[Finding]
    wrong: list[Output]


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

    with contextlib.ExitStack() as afterwards:
        if max(tensor.numel() for tensor in tensors.values()) < ENOUGH_FOR_THREADS:
            # Hundreds of models run; on a busy CPU, threads that wait for each other take ten times as long.
            afterwards.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        outputs = run()
        cotangents = accuracy.random_cotangents(subject, outputs, case.seed, case.unused)
        zeros = [torch.zeros_like(tensor) for tensor in (*outputs.values(), *tensors.values()) for _ in range(SPARE)]
        del zeros  # the memory that is taken next holds no NaN of an earlier run
        first = run(cotangents)
        with _fresh_memory_is_nan():
            results = run(cotangents)
        exact = accuracy.truth(case.subject, tensors, cotangents, results)
        rows = {name: accuracy.judge(case, backend, name, results[name], exact[name]) for name in exact}
        if all(row.passed for row in rows.values()):
            return Diagnosis(list(rows.values()), [], [])
        model = model_of(case, tensors, cotangents, results)
        names = [name for name in model.right if name in rows]
        terms = {name: {} if rows[name].passed else terms_of(case, model, name) for name in names}
        judged = [Output(case, rows[name], results[name], first[name], exact[name], terms[name]) for name in names]
        found = findings(judged, model, list(hypotheses(case, model)))
    return Diagnosis([rows[name] for name in names], found, [o for o in judged if not o.passed])


@contextlib.contextmanager
def _fresh_memory_is_nan() -> Iterator[None]:
    """An element that is never written shows, even where the memory still holds the right value of another run."""
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills it, unless told not to
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of algorithms that are not deterministic
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


def findings(outputs: Sequence[Output], model: Computation, every: Sequence[Hypothesis]) -> list[Finding]:
    """Each finding explains the first output without one, in the order of the dataflow, and others with it."""
    wrong = [output for output in outputs if not output.passed]
    found: list[Finding] = []
    while wrong:
        lead = wrong[0]
        before = [o for o in outputs[: outputs.index(lead)] if not o.passed and not o.is_gradient]
        given = [(f"follows from {o.name}", {o.name: always(o.result)}) for o in before]
        alike = tuple(o.name for o in wrong if o.is_gradient == lead.is_gradient and o.fact == lead.fact)
        finding = (
            (Finding(lead.fact, alike, 1.0) if lead.fact else None)
            or _hypothesis(wrong, outputs, given, model)
            or _hypothesis(wrong, outputs, every, model)
            or _fit(lead)
            or Finding(f"no simple explanation{lead.race_and_place}", (lead.name,), 0.0)
        )
        found.append(finding)
        wrong = [output for output in wrong if output.name not in finding.outputs]
    return found


def _hypothesis(
    wrong: Sequence[Output], outputs: Sequence[Output], every: Sequence[Hypothesis], model: Computation
) -> Finding | None:
    """The hypothesis that explains most wrong outputs and contradicts fewest right ones; the first of equals."""
    lead, best, most = wrong[0], None, -math.inf
    for sentence, changes in every:
        candidate = model.value(lead.name, changes)
        if candidate is not model.right[lead.name] and lead.explained_by(candidate):
            values = model.run(changes)
            names = [output.name for output in wrong if output.explained_by(values[output.name])]
            score = len(names) - sum(not o.close(values[o.name]) for o in outputs if o.passed)
            if score > most:
                best, most = Finding(sentence, tuple(names), lead.share(values[lead.name])), score
    return best


def _fit(lead: Output) -> Finding | None:
    """Terms that are left out or count more than once; as the last resort, a factor of the whole place."""
    whole: Tensors = {}
    for name, term in lead.terms.items():  # "a of p" and "a of q" as a
        group = name.split(" of ")[0]
        whole[group] = term + whole.get(group, 0)
    for terms in (whole, lead.terms, {"": lead.exact * lead.place.box}):
        solved = coefficients(lead.error, terms)
        involved = [name for name in terms if abs(solved[name]) * terms[name].norm() > SMALL * lead.error.norm()]
        times = {name: _rounded(1 + solved[name]) for name in involved}
        candidate = lead.exact + sum((factor - 1) * terms[name] for name, factor in times.items())
        if 0 < len(times) <= MOST_TERMS and lead.explained_by(candidate):
            words = {name: _counted(factor, lead.case) for name, factor in times.items()}
            sentences = [f"{name} is {counted}" if name else lead.place.are(counted) for name, counted in words.items()]
            return Finding(" and ".join(sentences), (lead.name,), lead.share(candidate))
    return None


def _rounded(factor: float) -> float:
    """Rounds to a whole number, but not to 1, which is no fault."""
    whole = round(factor)
    return float(whole) if whole != 1 and abs(factor - whole) <= WHOLE * max(1.0, abs(factor)) else factor


def _counted(factor: float, case: AnyCase) -> str:
    """16 -> "counted 16 (n²) times" where n is 4"""
    n = case.n
    sizes = {"n²": n * n, "n² + 1": n * n + 1, "n": n, "n² + 2n": n * n + 2 * n}
    sizes |= {"T": math.prod(case.outer)} if isinstance(case, Case) else {"W": case.W, "B": case.B, "L": case.L}
    known = [f" ({name})" for name, size in sizes.items() if size == factor > 2]
    words = {0.0: "left out", -1.0: "of the wrong sign"}
    return words.get(factor, f"counted {factor:.4g}{known[0] if known else ''} times")
