"""One output beside its truth: which elements are wrong, and where they lie."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...testing import accuracy
from ...testing.accuracy import NORM_TOLERANCE, ROUNDING, Exact, Row
from ...testing.cases import Case, Tensors
from ...testing.conv_cases import AnyCase

FILLED = 0.5  # of the elements in a place must be wrong for the place to say anything
BLOCKED = ("channel", "token")  # axes that kernels go through in blocks
FEW = 6  # indices that are listed one by one
LEAST_TERM = 5e-4  # coefficient that is shown
WORTH_A_RATIO = 1e-3  # of the root mean square; below it a ratio says nothing
NEARLY_ALL = 0.75  # of the error that an explanation must remove; the rest must be within the tolerance

# Axes, and the tensors that have them; a gradient has the axes of its tensor.
MHC = {"token, stream, channel": "x x_next x_after stored link", "token, channel": "h_in h_read h_out out"}
MHC |= {"token, stream": "h_pre h_post read", "token, old stream, new stream": "h_res logits", "token": "inv_rms"}
MHC |= {"row, stream, channel": "phi", "token, row": "h_mix z", "row": "bias", "section": "alpha"}
MHC |= {"stream, channel": "gamma", "channel": "layer_norm_weight"}
CONV = {"sequence, token, stream, channel": "x y z normed residual", "slot, channel, step": "conv_state"}
CONV |= {"sequence, channel, step": "initial_state final_state", "stream, channel, tap": "weight"}
CONV |= {"stream, channel": "gamma", "channel": "bias"}


def layout(case: AnyCase, name: str, shape: Sequence[int]) -> dict[str, int]:
    """The axes of a tensor and their sizes. All tokens are one axis; streams and channels are two."""
    tensor = name.split()[0].removeprefix("d")  # "h_out after" has the axes of h_out
    table = MHC if isinstance(case, Case) else CONV
    axes = next(axes for axes, tensors in table.items() if tensor in tensors.split())
    first, *others = [axis for axis in axes.split(", ") if axis != "stream" or case.n]
    sizes = {"channel": case.D, "row": sum(map(len, case.sections.values())), "step": (1, *shape)[-1]}
    sizes |= {} if isinstance(case, Case) else {"token": case.L, "tap": case.W}
    known = {axis: sizes.get(axis, case.n) for axis in others}
    return {first: math.prod(shape) // max(1, math.prod(known.values())), **known}


class Place(NamedTuple):
    """words: "" if the error is everywhere or scattered. box: the elements meant, shaped as the output."""

    words: str
    several: bool  # whether the words are a plural
    box: Tensor
    filled: float  # share of the box that is wrong

    def are(self, what: str) -> str:
        return f"{self.words or 'everything'} {'are' if self.several else 'is'} {what}"


def place_of(off: Tensor, axes: dict[str, int], sections: Mapping[str, range]) -> Place:
    """The smallest product of index sets that holds every wrong element."""
    view = off.reshape(tuple(axes.values()))
    box, words, several = torch.ones_like(view), "", False
    for axis, (name, size) in enumerate(axes.items()):
        hit = view.movedim(axis, 0).reshape(size, -1).any(1)
        if not bool(hit.all()):
            box &= hit.reshape(size, *[1] * (view.dim() - axis - 1))
            indices = hit.nonzero().flatten().tolist()
            here = words_of(indices, size, name, sections)
            words = f"{here} of {words}" if words else here  # channels of streams of tokens
            several = len(indices) > 1 and not here.endswith(" section")
    filled = float(view.sum() / box.sum().clamp(min=1))
    if filled < FILLED:
        return Place("", False, torch.ones_like(off), float(off.double().mean()))
    return Place(words, several, box.reshape(off.shape), filled)


def words_of(indices: Sequence[int], size: int, axis: str, sections: Mapping[str, range]) -> str:
    """[1, 2, 3] of 4 streams -> "streams 1 to 3\""""
    first, last, many = indices[0], indices[-1], len(indices)
    if axis == "section":
        return " and ".join(f"section {name}" for k, name in enumerate(sections) if k in indices)
    whole = [name for name, rows in sections.items() if axis == "row" and set(rows) <= set(indices)]
    if whole and sum(len(sections[name]) for name in whole) == many:
        return f"the {' and '.join(whole)} section{'s' * (len(whole) > 1)}"
    if many == 1:
        return f"{axis} {first}"
    if last - first + 1 == many:
        return f"{axis}s {first} {'and up' if last == size - 1 and axis in BLOCKED else f'to {last}'}"
    begins = [i for i in indices if i - 1 not in indices]
    period, run = begins[1] - first, indices.index(begins[1])
    if len(begins) > 2 and indices == [i for i in range(first, last + 1) if (i - first) % period < run]:
        return f"{f'{run} {axis}s' if run > 1 else f'one {axis}'} in every {period}, from {axis} {first} on,"
    if many <= FEW:
        return f"{axis}s {', '.join(map(str, indices[:-1]))} and {last}"
    return f"{many} of {size} {axis}s ({', '.join(map(str, indices[:3]))}, …)"


def wrong_elements(result: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements further off than their type allows: one rounding, or the tolerance in norm as a share of the rms. If the
    norm fails, some element exceeds the second, so the mask is never empty."""
    error = (result - exact).abs()
    largest = exact.abs() if exact.dim() == 0 or not exact.numel() else exact.abs().amax(-1, keepdim=True)
    by_rounding = ~(error <= ROUNDING.get(dtype, 0.0) * largest)
    in_norm = ~(error <= NORM_TOLERANCE[dtype] * exact.square().mean().sqrt())
    return by_rounding if dtype in ROUNDING and bool(by_rounding.any()) else in_norm


def coefficients(error: Tensor, terms: Tensors) -> dict[str, float]:
    """c of error ≈ Σ c · term by least squares; elements that are not finite count as 0."""
    if not terms:
        return {}
    columns = torch.stack([tensor.flatten() for tensor in (error, *terms.values())], -1).nan_to_num(0.0, 0.0, 0.0).cpu()
    solved = torch.linalg.lstsq(columns[:, 1:], columns[:, :1], driver="gelsd")
    return dict(zip(terms, solved.solution.flatten().tolist()))


class Output:
    """An output or a gradient of a run (stored) and of the run before (first), its truth and the truth's terms."""

    def __init__(self, case: AnyCase, row: Row, stored: Tensor, first: Tensor, truth: Exact, terms: Tensors) -> None:
        self.case, self.row, self.stored, self.first, self.truth = case, row, stored, first, truth
        self.name, self.passed, self.is_gradient = row.output, row.passed, row.output not in case.subject.outputs
        self.result, self.exact = stored.double(), truth.value
        self.error, self.rms = self.result - self.exact, float(self.exact.square().mean().sqrt())
        self.terms = {name: term.reshape(self.exact.shape) for name, term in terms.items()}
        self.axes = layout(case, self.name, self.exact.shape)
        self.off = wrong_elements(self.result, self.exact, stored.dtype)

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
            return place_of(lost, self.axes, self.case.sections).are("never written" if unwritten else what)
        return "" if bool(self.result[self.off].any()) else self.place.are("zero: masked, or never added to")

    @property
    def race_and_place(self) -> str:
        """All that is known of an unexplained error."""
        race = "; different in each run: a race, or memory read before it is written"
        return race * (not self.close(self.first.double())) + f"; wrong: {self.place.words}" * bool(self.place.words)

    def close(self, candidate: Tensor) -> bool:
        """Whether the result passes with the candidate as the truth."""
        truth = Exact(candidate.reshape(self.exact.shape), self.truth.terms)
        return accuracy.judge(self.case, self.row.backend, self.name, self.stored, truth).passed

    def share(self, candidate: Tensor) -> float:
        """How much of the error a candidate removes."""
        left = (self.result - candidate.reshape(self.exact.shape)).norm()
        return float(1 - left / self.error.norm()) if bool(left.isfinite()) else 0.0

    def explained_by(self, candidate: Tensor) -> bool:
        return self.share(candidate) >= NEARLY_ALL and self.close(candidate)

    def details(self) -> dict[str, str]:
        """What is known beyond the verdict: the place, result / truth where elements are wrong, and the terms."""
        worth = self.off & self.result.isfinite() & (self.exact.abs() > WORTH_A_RATIO * self.rms)
        ratio, box = (self.result / self.exact)[worth], self.place.box
        found = {"place": f"{self.place.words or 'everywhere'}, {self.place.filled:.1%} of it wrong"}
        if ratio.numel():
            (std, mean), ends = torch.std_mean(ratio, correction=0), f"{ratio.min():.4g} to {ratio.max():.4g}"
            kind = "constant" if std <= 0.01 * abs(mean) else "varying"
            found["result / truth"] = f"{kind}: mean {mean:.4g}, std {std:.2g}, {ends}"
        terms = coefficients(self.error[box], {name: term[box] for name, term in self.terms.items()})
        if named := [f"{c:+.3g} · {term}" for term, c in terms.items() if abs(c) >= LEAST_TERM]:
            found["error ≈ Σ c · term"] = ", ".join(named)
        return found
