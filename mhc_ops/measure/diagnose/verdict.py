"""From what is wrong to a sentence: facts about places, then hypotheses, then terms, then a factor; or none of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..cases import Tensors
from . import terms
from .places import Place, everywhere
from .trace import Edit, Hypothesis, Trace

NEARLY_ALL = 0.75  # of the error must be gone, beside what is left being within the tolerance
WORTH_SAYING = 0.9  # a share of the error that is worth a sentence although the rest is beyond the tolerance


@dataclass(frozen=True)
class Output:
    """One output, or one gradient, of a run beside its truth; tensors in fp64."""

    name: str
    result: Tensor
    exact: Tensor
    passed: bool
    off: Tensor  # the elements that are wrong
    unwritten: Tensor  # those that are NaN only because fresh memory was filled with it
    close: Callable[[Tensor], bool]  # whether the result would pass if this were the truth
    locate: Callable[[Tensor], Place]
    terms: Tensors
    is_gradient: bool
    repeats: bool  # whether another run gave the same, up to rounding

    @property
    def place(self) -> Place:
        return self.locate(self.off)

    @property
    def places(self) -> list[Place]:
        """Everywhere, then the place that is wrong: an element of a wrong tensor may be right by chance."""
        return [everywhere(self.off), *([self.place] if self.place.words else [])]

    def share(self, candidate: Tensor) -> float:
        """How much of the error a candidate removes."""
        error, left = (self.result - self.exact).norm(), (self.result - candidate).norm()
        return float(1 - left / error) if bool(left.isfinite()) else 0.0

    def explained_by(self, candidate: Tensor) -> bool:
        return self.share(candidate) >= NEARLY_ALL and self.close(candidate)


@dataclass(frozen=True)
class Finding:
    """One cause and the outputs that it explains, the earliest in the dataflow first."""

    sentence: str
    outputs: tuple[str, ...]
    share: float  # of the error of the first output
    explained: bool = True

    def __str__(self) -> str:
        shown = ", ".join(self.outputs[:3]) + (f" and {len(self.outputs) - 3} more" if len(self.outputs) > 3 else "")
        return f"{shown}: {self.sentence}"


class Run(Protocol):
    """Runs the model with a fault, up to a step."""

    def __call__(self, hypothesis: Hypothesis, last: str | None = None) -> Trace: ...


def findings(
    outputs: Sequence[Output], hypotheses: Sequence[Hypothesis], run: Run, right: Trace, sizes: dict[str, int]
) -> list[Finding]:
    """Outputs come in the order of the dataflow; a finding takes the first that has none, and all it explains.

    right: the run without a fault. sizes: numbers that a wrong count may be.
    """
    steps = list(right.values)
    wrong = [output for output in outputs if not output.passed]
    found: list[Finding] = []
    while wrong:
        lead = wrong[0]
        before = set(steps[: steps.index(lead.name) + 1])
        able = [hypothesis for hypothesis in hypotheses if not before.isdisjoint(hypothesis.edits)]
        finding = (
            _fact(lead, wrong)
            or _hypothesis(wrong, outputs, _followed(lead, outputs), run)
            or _hypothesis(wrong, outputs, able, run)
            or _terms(lead, sizes)
            or _factor(lead, sizes)
            or _mostly(lead, able, run)
        )
        found.append(finding)
        wrong = [output for output in wrong if output.name not in finding.outputs]
    return found


def _fact(lead: Output, wrong: Sequence[Output]) -> Finding | None:
    """Never written, NaN, zero: what needs no explanation. Others of the same pass with the same words are the same."""

    def words(output: Output) -> str | None:
        if not bool(output.exact.isfinite().all()):
            return "cannot be judged: the truth is not finite, as an input or an output stored before it is not"
        lost = ~output.result.isfinite()
        if bool(lost.any()):
            if 2 * int(output.unwritten.sum()) > int(lost.sum()):  # not all: old memory may hold NaN by chance
                return _subject(output.locate(lost), "never written")
            return _subject(
                output.locate(lost), "NaN" if bool(output.result[lost].isnan().all()) else "NaN or infinite"
            )
        if bool((output.result[output.off] == 0).all()):
            return _subject(output.place, "zero: masked, or never added to")
        return None

    sentence = words(lead)
    if sentence is None:
        return None
    alike = [output for output in wrong if output.is_gradient == lead.is_gradient and words(output) == sentence]
    return Finding(sentence, tuple(output.name for output in alike), 1.0)


def _subject(place: Place, what: str) -> str:
    return f"{place.words or 'everything'} {'are' if place.several else 'is'} {what}"


def _followed(lead: Output, outputs: Sequence[Output]) -> list[Hypothesis]:
    """The lead is right, given what an earlier output was."""
    return [
        Hypothesis(f"follows from {output.name}", {output.name: _as_stored(output)})
        for output in outputs[: outputs.index(lead)]
        if not (output.passed or output.is_gradient) and bool(output.result.isfinite().all())
    ]


def _as_stored(output: Output) -> Edit:
    return lambda value, _: output.result.reshape(value.shape)


def _hypothesis(
    wrong: Sequence[Output], outputs: Sequence[Output], hypotheses: Sequence[Hypothesis], run: Run
) -> Finding | None:
    """The one that explains most of what is wrong and contradicts least of what is right; the first of equals. Then one
    that is true only in the place where the lead is wrong, as a kernel may be right in other blocks.
    """
    lead = wrong[0]
    able, in_place, place = [], [], lead.place
    for hypothesis in hypotheses:
        candidate = _candidate(lead, run(hypothesis, lead.name))
        if lead.explained_by(candidate):
            able.append(hypothesis)
        elif place.words and lead.explained_by(torch.where(place.box, candidate, lead.exact)):
            in_place.append(hypothesis)
    if able:
        runs = [(hypothesis, run(hypothesis)) for hypothesis in able]
        best, trace = max(runs, key=lambda pair: _score(wrong, outputs, pair[1]))
        names = tuple(output.name for output in wrong if output.explained_by(_candidate(output, trace)))
        return Finding(best.sentence, names, lead.share(_candidate(lead, trace)))
    if in_place:
        candidate = torch.where(place.box, _candidate(lead, run(in_place[0], lead.name)), lead.exact)
        return Finding(f"{in_place[0].sentence}, in {place.words}", (lead.name,), lead.share(candidate))
    return None


def _candidate(output: Output, trace: Trace) -> Tensor:
    return trace.values[output.name].reshape(output.exact.shape)


def _score(wrong: Sequence[Output], outputs: Sequence[Output], trace: Trace) -> int:
    explained = sum(output.explained_by(_candidate(output, trace)) for output in wrong)
    return explained - sum(not output.close(_candidate(output, trace)) for output in outputs if output.passed)


def _terms(lead: Output, sizes: dict[str, int]) -> Finding | None:
    """One or two terms that are left out or count more than once."""
    if len(lead.terms) < 2:
        return None
    for place in lead.places:
        for fit in terms.fits(lead.result - lead.exact, lead.exact, lead.terms, place.box):
            if lead.explained_by(fit.candidate):
                where = f", in {place.words}" if place.words else ""
                return Finding(fit.words(sizes) + where, (lead.name,), lead.share(fit.candidate))
    return None


def _factor(lead: Output, sizes: dict[str, int]) -> Finding | None:
    """The right numbers, times another."""
    for place in lead.places:
        factor, candidate = terms.scaled(lead.result, lead.exact, place.box)
        if lead.explained_by(candidate):
            return Finding(_scaled_words(place, factor, sizes), (lead.name,), lead.share(candidate))
    return None


def _scaled_words(place: Place, factor: float, sizes: dict[str, int]) -> str:
    times = f"{terms.number(factor, sizes)} times what {'they' if place.several else 'it'} should be"
    words = {0.0: "zero but for rounding", -1.0: "right but for the sign"}.get(factor, times)
    often = ": accumulated too often" if factor == round(factor) and factor > 1 else ""
    return _subject(place, words) + often


def _mostly(lead: Output, hypotheses: Sequence[Hypothesis], run: Run) -> Finding:
    where = f"; wrong: {lead.place.words}" if lead.place.words else ""
    share, sentence = 0.0, ""
    for hypothesis in hypotheses:
        own = lead.share(_candidate(lead, run(hypothesis, lead.name)))
        if own > share:
            share, sentence = own, hypothesis.sentence
    if share >= WORTH_SAYING:
        words = f"perhaps {sentence}, but that leaves an error beyond the tolerance{where}"
        return Finding(words, (lead.name,), share, explained=False)
    if not lead.repeats:
        where = f"; different in each run: a race, or memory read before it is written{where}"
    return Finding(f"no simple explanation{where}", (lead.name,), 0.0, explained=False)
