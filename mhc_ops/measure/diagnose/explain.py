"""What explains an error: a model of the op whose steps can be done wrong, and how an explanation is chosen.

An output is explained by the first of these that leaves an error within its tolerance: a fact (never written, NaN,
zero); an output before it that is wrong; a hypothesis; one or two of the terms that it is a sum of; a factor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from ...core.steps import Change, Steps, Values, evaluate
from ..cases import Tensors
from .outputs import BLOCKED, Layout, Output, Place, coefficients, everywhere, index_words

WORTH_SAYING = 0.9  # a share of the error that is worth a sentence although the rest is beyond the tolerance
ALL = ""  # the name of an output as the only term of itself
WHOLE = 2e-3  # a factor this close to a whole number is taken as it
SUMMED_OR_STORED = ("token", "sequence", "stream", "channel")  # axes of which a kernel may read only the first part
SMALLEST_BLOCK = 8


@dataclass(frozen=True)
class Hypothesis:
    """What may be wrong, as a sentence, and the values that are then others (see core/steps.py)."""

    sentence: str
    changes: Mapping[str, Change]


@dataclass(frozen=True)
class Model:
    """An op as named steps, forward and backward, on the tensors and cotangents of one case.

    parts: of a step that is itself a sum, which of its arguments holds the summands, and by the name of each summand
    the mask that leaves only it. words: what sentences call a value.
    """

    steps: Steps
    inputs: Values
    parts: Mapping[str, tuple[int, Tensors]]
    words: Mapping[str, str]

    def run(self, hypothesis: Hypothesis | None = None, last: str | None = None) -> Values:
        with torch.no_grad():
            return evaluate(self.steps, self.inputs, hypothesis.changes if hypothesis else {}, last)

    def say(self, name: str) -> str:
        return self.words.get(name, name)

    def output_of(self, step: str) -> str:
        """Of a term, the sum it belongs to."""
        return next((s.name for s in self.steps if s.is_sum and step in s.reads), self.say(step))

    def names(self, last: str | None = None) -> set[str]:
        """All that a hypothesis can change on the way to the step `last`."""
        found: set[str] = set()
        for step in self.steps:
            found |= {step.name, *step.reads, *(f"{read} for {step.name}" for read in step.reads)}
            if step.name == last:
                break
        return found

    def terms(self, output: str, values: Values) -> Tensors:
        """What adds up to an output, by its words: its terms, in parts where they are sums. None where it is one."""
        sums = {step.name: step.reads for step in self.steps if step.is_sum}
        found: Tensors = {}
        for step in self.steps:
            if step.name in sums.get(output, (output,)):
                summand, masks = self.parts.get(step.name, (0, {}))
                for part, mask in masks.items():
                    read = [values[name] * mask if k == summand else values[name] for k, name in enumerate(step.reads)]
                    found[f"{self.say(step.name)} of {part}"] = step.compute(*read)
                found |= {} if masks else {self.say(step.name): values[step.name]}
        return found if len(found) > 1 else {}


def always(value: object) -> Change:
    return lambda right, values: value


def ones(right: Tensor, values: Values) -> Tensor:
    return torch.ones_like(right)


def block_ends(size: int, smallest: int = SMALLEST_BLOCK) -> list[int]:
    """Where a kernel may stop: after its first block, or before a last one that is not full. Blocks: powers of two."""
    blocks = [1 << k for k in range(smallest.bit_length() - 1, size.bit_length()) if 1 << k < size]
    return sorted({end for block in blocks for end in (block, size // block * block) if end < size})


def partial_reads(model: Model, tensor: str, layout: Layout, words: str = "") -> Iterator[Hypothesis]:
    """The tensor is read up to some index only, by one of the steps that read it or by all."""
    readers = [step.name for step in model.steps if tensor in step.reads]
    for group in dict.fromkeys([*((reader,) for reader in readers), tuple(readers)]):
        names = [f"{tensor} for {reader}" for reader in group]
        into = " and ".join(", ".join(dict.fromkeys(map(model.output_of, group))).rsplit(", ", 1))
        for axis, (word, size) in enumerate(layout.items()):
            ends = block_ends(size) if word in BLOCKED else range(1, size)
            for end in ends if word in SUMMED_OR_STORED else ():
                which = index_words(list(range(end, size)), size, word, {})
                are = "is" if end == size - 1 else "are"
                sentence = f"{which} of {words or model.say(tensor)} {are} read as zero for {into}"
                yield Hypothesis(sentence, dict.fromkeys(names, _zero_from(end, axis, layout)))


def _zero_from(end: int, axis: int, layout: Layout) -> Change:
    def change(value: Tensor, _: Values) -> Tensor:
        kept = value.reshape(tuple(layout.values())).clone()
        kept.narrow(axis, end, kept.shape[axis] - end).zero_()
        return kept.reshape(value.shape)

    return change


@dataclass(frozen=True)
class Finding:
    """One cause and the outputs that it explains, the earliest in the dataflow first."""

    sentence: str
    outputs: tuple[str, ...]
    share: float  # of the error of the first output
    explained: bool = True


def findings(
    outputs: Sequence[Output], model: Model, hypotheses: Sequence[Hypothesis], sizes: Mapping[str, int]
) -> list[Finding]:
    """Outputs come in the order of the dataflow; a finding takes the first that has none, and all it explains.

    sizes: numbers that a wrong count may be.
    """
    wrong = [output for output in outputs if not output.passed]
    found: list[Finding] = []
    while wrong:
        lead = wrong[0]
        names = model.names(lead.name)
        followed, able = (
            [hypothesis for hypothesis in every if not names.isdisjoint(hypothesis.changes)]
            for every in (_followed(lead, outputs), hypotheses)
        )
        finding = (
            _fact(lead, wrong)
            or _hypothesis(wrong, outputs, followed, model)
            or _hypothesis(wrong, outputs, able, model)
            or _fit(lead, sizes)
            or _mostly(lead, able, model)
        )
        found.append(finding)
        wrong = [output for output in wrong if output.name not in finding.outputs]
    return found


def _fact(lead: Output, wrong: Sequence[Output]) -> Finding | None:
    """What needs no explanation. Other outputs of the same pass of which the same is true are the same fact."""
    sentence = _fact_words(lead)
    if sentence is None:
        return None
    alike = [o.name for o in wrong if o.is_gradient == lead.is_gradient and _fact_words(o) == sentence]
    return Finding(sentence, tuple(alike), 1.0)


def _fact_words(output: Output) -> str | None:
    if not bool(output.exact.isfinite().all()):
        return "cannot be judged: the truth is not finite, as an input or an output stored before it is not"
    lost = ~output.result.isfinite()
    if bool(lost.any()):
        what = "NaN" if bool(output.result[lost].isnan().all()) else "NaN or infinite"
        only_now = int((lost & output.first.isfinite()).sum())
        unwritten = 2 * only_now > int(lost.sum())  # not all: old memory may hold NaN by chance
        return output.locate(lost).are("never written" if unwritten else what)
    if bool((output.result[output.off] == 0).all()):
        return output.place.are("zero: masked, or never added to")
    return None


def _followed(lead: Output, outputs: Sequence[Output]) -> list[Hypothesis]:
    """The lead is right, given what an earlier output was."""
    return [
        Hypothesis(f"follows from {output.name}", {output.name: _as_stored(output)})
        for output in outputs[: outputs.index(lead)]
        if not (output.passed or output.is_gradient) and bool(output.result.isfinite().all())
    ]


def _as_stored(output: Output) -> Change:
    return lambda value, _: output.result.reshape(value.shape)


def _hypothesis(
    wrong: Sequence[Output], outputs: Sequence[Output], hypotheses: Sequence[Hypothesis], model: Model
) -> Finding | None:
    """The one that explains most of what is wrong and contradicts least of what is right; the first of equals. Then one
    that is true only in the place where the lead is wrong, as a kernel may be right in other blocks.
    """
    lead = wrong[0]
    able, in_place, place = [], [], lead.place
    for hypothesis in hypotheses:
        candidate = _of(lead, model.run(hypothesis, lead.name))
        only_there = torch.where(place.box, candidate, lead.exact)
        if lead.explained_by(candidate):
            able.append((hypothesis, model.run(hypothesis)))
        elif place.words and lead.explained_by(only_there):
            in_place.append(Finding(f"{hypothesis.sentence}, in {place.words}", (lead.name,), lead.share(only_there)))

    def score(pair: tuple[Hypothesis, Values]) -> int:
        explained = sum(output.explained_by(_of(output, pair[1])) for output in wrong)
        return explained - sum(not output.close(_of(output, pair[1])) for output in outputs if output.passed)

    if able:
        best, values = max(able, key=score)
        names = tuple(output.name for output in wrong if output.explained_by(_of(output, values)))
        return Finding(best.sentence, names, lead.share(_of(lead, values)))
    return in_place[0] if in_place else None


def _of(output: Output, values: Values) -> Tensor:
    return values[output.name].reshape(output.exact.shape)


def _fit(lead: Output, sizes: Mapping[str, int]) -> Finding | None:
    """One or two terms that are left out or count more than once; or all of it, times a number."""
    for terms in (lead.terms, {ALL: lead.exact}):
        for place in (everywhere(lead.off), lead.place):
            for times, candidate in fits(lead.error, lead.exact, terms, place.box):
                if lead.explained_by(candidate):
                    words = _factor_words(times[ALL], place, sizes) if ALL in times else term_words(times, place, sizes)
                    return Finding(words, (lead.name,), lead.share(candidate))
    return None


def fits(error: Tensor, exact: Tensor, terms: Tensors, box: Tensor) -> Iterator[tuple[dict[str, float], Tensor]]:
    """How often a term is taken instead of once, and what the output then is: single terms first, then pairs. Only
    elements in the box are wrong.
    """
    inside = {name: term * box for name, term in _with_groups(terms).items() if bool((term * box).any())}
    for together in (1, 2):
        for names in combinations(inside, together):
            solved = coefficients(error * box, {name: inside[name] for name in names})
            times = {name: _rounded(1 + c) for name, c in solved.items()}
            yield times, exact + sum((factor - 1) * inside[name] for name, factor in times.items())


def _with_groups(terms: Tensors) -> Tensors:
    """ "a of p" and "a of q" are also a; the group of all terms is the output itself, and left out."""
    groups: dict[str, list[Tensor]] = {}
    for name, term in terms.items():
        groups.setdefault(name.split(" of ")[0], []).append(term)
    sums = {name: torch.stack(parts).sum(0) for name, parts in groups.items() if 1 < len(parts) < len(terms)}
    return {**sums, **terms}


def _rounded(factor: float) -> float:
    """Not to 1: that would be no fault."""
    whole = round(factor)
    return float(whole) if whole != 1 and abs(factor - whole) <= WHOLE * max(1.0, abs(factor)) else factor


def term_words(times: Mapping[str, float], place: Place, sizes: Mapping[str, int]) -> str:
    special = {0.0: "is left out", -1.0: "has the wrong sign"}
    words = [f"{name} {special.get(t, f'counts {_number(t, sizes)} times')}" for name, t in times.items()]
    return " and ".join(words) + f", in {place.words}" * bool(place.words)


def _number(value: float, sizes: Mapping[str, int]) -> str:
    """16 -> "16 (n²)" where n is 4"""
    named = [name for name, size in sizes.items() if size == value]
    named += [f"{name} + 1" for name, size in sizes.items() if size + 1 == value]
    return f"{value:.4g}" + (f" ({named[0]})" if named and value > 2 else "")


def _factor_words(factor: float, place: Place, sizes: Mapping[str, int]) -> str:
    often = ": accumulated too often" if factor == round(factor) and factor > 1 else ""
    times = f"{_number(factor, sizes)} times what {'they' if place.several else 'it'} should be{often}"
    return place.are({0.0: "zero but for rounding", -1.0: "right but for the sign"}.get(factor, times))


def _mostly(lead: Output, hypotheses: Sequence[Hypothesis], model: Model) -> Finding:
    where = f"; wrong: {lead.place.words}" if lead.place.words else ""
    shares = {h.sentence: lead.share(_of(lead, model.run(h, lead.name))) for h in hypotheses}
    best = max(shares, key=lambda sentence: shares[sentence], default="")
    if shares.get(best, 0.0) >= WORTH_SAYING:
        words = f"perhaps {best}, but that leaves an error beyond the tolerance{where}"
        return Finding(words, (lead.name,), shares[best], explained=False)
    if not lead.close(lead.first.double()):
        where = f"; different in each run: a race, or memory read before it is written{where}"
    return Finding(f"no simple explanation{where}", (lead.name,), 0.0, explained=False)
