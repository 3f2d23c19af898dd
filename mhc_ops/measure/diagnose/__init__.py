"""Where an error comes from: an op is run, compared with fp64, and what is off is explained (docs/diagnose.md)."""

import contextlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.steps import Computation, always
from ...testing import accuracy
from ...testing.accuracy import NORM_TOLERANCE, ROUNDING, Exact
from ...testing.cases import Call, Case, Tensors
from ...testing.conv_cases import AnyCase
from .ops import Hypothesis, hypotheses, model_of, terms_of
from .places import Place, layout, place_of

ENOUGH_FOR_THREADS = 1 << 20  # elements
SPARE = 4  # freed pieces of memory of each size
NEARLY_ALL = 0.75  # of the error that an explanation must remove; the rest must be within the tolerance
SMALL = 0.02  # of the error, that a term may add to it by rounding
WHOLE = 2e-3  # a factor this close to a whole number is taken as it
MOST_TERMS = 2  # that an explanation may name


class Finding(NamedTuple):
    """One cause and the outputs that it explains, the earliest in the dataflow first."""

    sentence: str
    outputs: tuple[str, ...]
    share: float  # of the error of the first output; 0 if there is no explanation


@dataclass
class Output:
    """An output or a gradient of a run (stored) and of the run before (first), its truth and the truth's terms."""

    case: AnyCase
    name: str
    stored: Tensor
    first: Tensor
    truth: Exact
    terms: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.row = accuracy.judge(self.case, "", self.name, self.stored, self.truth)
        self.passed, self.is_gradient = self.row.passed, self.name not in self.case.subject.outputs
        self.result, self.exact = self.stored.double(), self.truth.value
        self.error, self.rms = self.result - self.exact, float(self.exact.square().mean().sqrt())

    @cached_property
    def axes(self) -> dict[str, int]:
        return layout(self.case, self.name, self.exact.shape)

    @cached_property
    def off(self) -> Tensor:
        """Elements further off than their type allows: one rounding, or the tolerance in norm as a share of the rms. If
        the norm fails, some element exceeds the second, so the mask is never empty."""
        size, dtype = self.error.abs(), self.stored.dtype
        by_rounding = ~(size <= ROUNDING.get(dtype, 0.0) * self.exact.abs().amax(-1, keepdim=True))
        in_norm = ~(size <= NORM_TOLERANCE[dtype] * self.rms)
        return by_rounding if dtype in ROUNDING and bool(by_rounding.any()) else in_norm

    @cached_property
    def place(self) -> Place:
        return place_of(self.off, self.axes, self.case.sections)

    @cached_property
    def fact(self) -> str:
        """Why an output is wrong, if that shows by itself; otherwise ""."""
        if not bool(self.exact.isfinite().all()):
            return "cannot be judged: the truth is not finite, because an input or an output stored before it is not"
        lost = ~self.result.isfinite()
        if bool(lost.any()):
            what = "NaN" if bool(self.result[lost].isnan().all()) else "NaN or infinite"
            only_now = int((lost & self.first.isfinite()).sum())
            unwritten = 2 * only_now > int(lost.sum())  # not all: old memory may hold NaN by chance
            return place_of(lost, self.axes, self.case.sections).has("never written" if unwritten else what)
        return "" if bool(self.result[self.off].any()) else self.place.has("zero (masked, or never added to)")

    @property
    def unexplained(self) -> str:
        """All that is known without a cause."""
        race = "" if self.close(self.first.double()) else "; different in each run: a race, or memory read too early"
        return "no simple explanation" + race + f"; wrong: {self.place.words}" * bool(self.place.words)

    def close(self, candidate: Tensor) -> bool:
        """Whether the result passes with the candidate as the truth."""
        truth = self.truth._replace(value=candidate.reshape(self.exact.shape))
        return accuracy.judge(self.case, "", self.name, self.stored, truth).passed

    def explained(self, candidate: Tensor) -> float:
        """How much of the error a candidate removes; 0 unless it is nearly all and the rest is within the tolerance."""
        left = (self.result - candidate.reshape(self.exact.shape)).norm()
        share = float(1 - left / self.error.norm()) if bool(left.isfinite()) else 0.0
        return share if share >= NEARLY_ALL and self.close(candidate) else 0.0


class Diagnosis(NamedTuple):
    """outputs: in the order of the dataflow if one of them is wrong."""

    outputs: list[Output]
    findings: list[Finding]


def diagnose(
    case: AnyCase, backend: str = "reference", device: torch.device | str = "cpu", call: Call | None = None
) -> Diagnosis:
    """call: what to examine instead of the op, called as Subject.call is."""
    subject, tensors = replace(case.subject, call=call or case.subject.call), case.inputs(device)
    run = partial(accuracy.run, subject, tensors, backend)
    with contextlib.ExitStack() as afterwards:
        if max(tensor.numel() for tensor in tensors.values()) < ENOUGH_FOR_THREADS:
            # Hundreds of models run; on a busy CPU, threads that wait for each other take ten times as long.
            afterwards.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        made = run()
        cotangents = accuracy.random_cotangents(subject, made, case.seed, case.unused)
        zeros = [torch.zeros_like(tensor) for tensor in (*made.values(), *tensors.values()) for _ in range(SPARE)]
        del zeros  # the memory that is taken next holds no NaN of an earlier run
        first = run(cotangents)
        # From here on fresh memory is NaN: what is never written shows, even where memory still holds the right value.
        afterwards.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of algorithms that are not deterministic
        afterwards.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        torch.use_deterministic_algorithms(True, warn_only=True)
        results = run(cotangents)
        exact = accuracy.truth(case.subject, tensors, cotangents, results)
        judged = {name: Output(case, name, results[name], first[name], exact[name]) for name in exact}
        if all(output.passed for output in judged.values()):
            return Diagnosis(list(judged.values()), [])
        model = model_of(case, tensors, cotangents, results)
        outputs = [judged[name] for name in model.right if name in judged]
        for output in outputs:
            terms = {} if output.passed else terms_of(case, model, output.name)
            output.terms = {words: term.reshape(output.exact.shape) for words, term in terms.items()}
        return Diagnosis(outputs, findings(outputs, model, list(hypotheses(case, model))))


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
            or Finding(lead.unexplained, (lead.name,), 0.0)
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
        if candidate is not model.right[lead.name] and (share := lead.explained(candidate)):
            values = model.run(changes)
            names = tuple(output.name for output in wrong if output.explained(values[output.name]))
            score = len(names) - sum(not o.close(values[o.name]) for o in outputs if o.passed)
            if score > most:
                best, most = Finding(sentence, names, share), score
    return best


def _fit(lead: Output) -> Finding | None:
    """Terms that are left out or count more than once, by least squares; at last a factor of the whole place."""
    whole: Tensors = {}
    for name, term in lead.terms.items():  # "a of p" and "a of q" as a
        group = name.split(" of ")[0]
        whole[group] = term + whole.get(group, 0)
    for terms in filter(None, (whole, lead.terms, {"": lead.exact * lead.place.box})):
        columns = torch.stack([t.flatten() for t in (lead.error, *terms.values())], -1).nan_to_num(0.0, 0.0, 0.0).cpu()
        solution = torch.linalg.lstsq(columns[:, 1:], columns[:, :1], driver="gelsd").solution
        solved = dict(zip(terms, solution.flatten().tolist()))
        involved = [name for name in terms if abs(solved[name]) * terms[name].norm() > SMALL * lead.error.norm()]
        times = {name: _rounded(1 + solved[name]) for name in involved}
        candidate = lead.exact + sum((factor - 1) * terms[name] for name, factor in times.items())
        if 0 < len(times) <= MOST_TERMS and (share := lead.explained(candidate)):
            words = {name: _counted(factor, lead.case) for name, factor in times.items()}
            sentences = [f"{name} is {counted}" if name else lead.place.has(counted) for name, counted in words.items()]
            return Finding(" and ".join(sentences), (lead.name,), share)
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
