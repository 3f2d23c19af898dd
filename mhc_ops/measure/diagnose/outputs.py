"""One output beside its truth: which elements are wrong, where they lie, how the error is distributed."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...testing import accuracy
from ...testing.accuracy import NORM_TOLERANCE, ROUNDING, Exact, Row
from ...testing.cases import Case, Tensors
from ...testing.conv_cases import AnyCase

FILLED = 0.5  # of the elements in a place must be wrong for the place to say anything
BLOCKED = ("channel", "token")  # axes that kernels go through in blocks
MOST_BLOCKS = 32  # that the errors by axis are given for
MOST_GROUPS, MOST_ROWS = 4, 16  # of a map
FEW = 6  # indices that are listed one by one
WORTH_A_RATIO = 1e-3  # of the root mean square; below it a ratio says nothing
NEARLY_ALL = 0.75  # of the error must be gone, beside what is left being within the tolerance

NO_SECTIONS: Mapping[str, range] = {}
# The tensors that have these axes; a gradient has those of its tensor.
MHC = {"token, stream, channel": "x x_next x_after stored link", "token, channel": "h_in h_read h_out out"}
MHC |= {"token, stream": "h_pre h_post read", "token, old stream, new stream": "h_res logits", "token": "inv_rms"}
MHC |= {"row, stream, channel": "phi", "token, row": "h_mix z", "row": "bias", "section": "alpha"}
MHC |= {"stream, channel": "gamma", "channel": "layer_norm_weight"}
CONV = {"sequence, token, stream, channel": "x y z normed residual", "slot, channel, step": "conv_state"}
CONV |= {"sequence, channel, step": "initial_state final_state", "stream, channel, tap": "weight"}
CONV |= {"stream, channel": "gamma", "channel": "bias"}


def layout(case: AnyCase, name: str, shape: Sequence[int]) -> dict[str, int]:
    """The axes of a tensor and their sizes: all tokens are one axis, streams and channels are two."""
    tensor = name.split()[0].removeprefix("d")  # "h_out after" has the axes of h_out
    table = MHC if isinstance(case, Case) else CONV
    axes = next(axes for axes, tensors in table.items() if tensor in tensors.split())
    first, *others = [axis for axis in axes.split(", ") if axis != "stream" or case.n]
    sizes = {"channel": case.D, "row": sum(map(len, case.sections.values())), "step": (1, *shape)[-1]}
    sizes |= {} if isinstance(case, Case) else {"token": case.L, "tap": case.W}
    known = {axis: sizes.get(axis, case.n) for axis in others}
    return {first: math.prod(shape) // max(1, math.prod(known.values())), **known}


class Place(NamedTuple):
    """words: "" where the error is everywhere or scattered. box: the elements meant, shaped as the output."""

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
        hit = _along(view, axis).any(1)
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


def words_of(indices: Sequence[int], size: int, axis: str, sections: Mapping[str, range] = NO_SECTIONS) -> str:
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
    """Elements further off than their type allows: one rounding, or the tolerance in norm as a share of the rms.

    Where the norm fails, some element is further off than the second, so that the mask is never empty.
    """
    error = (result - exact).abs()
    largest = exact.abs() if exact.dim() == 0 or not exact.numel() else exact.abs().amax(-1, keepdim=True)
    by_rounding = ~(error <= ROUNDING.get(dtype, 0.0) * largest)
    in_norm = ~(error <= NORM_TOLERANCE[dtype] * exact.square().mean().sqrt())
    return by_rounding if dtype in ROUNDING and bool(by_rounding.any()) else in_norm


def coefficients(error: Tensor, terms: Tensors) -> dict[str, float]:
    """c of error ≈ Σ c · term by least squares; what is not finite has no say."""
    if not terms:
        return {}
    columns = torch.stack([tensor.flatten() for tensor in (error, *terms.values())], -1).nan_to_num(0.0, 0.0, 0.0).cpu()
    solved = torch.linalg.lstsq(columns[:, 1:], columns[:, :1], driver="gelsd")
    return dict(zip(terms, solved.solution.flatten().tolist()))


class Output:
    """An output or a gradient of a run (stored) and of the run before (first), its truth and the terms of that."""

    def __init__(self, case: AnyCase, row: Row, stored: Tensor, first: Tensor, truth: Exact, terms: Tensors) -> None:
        self.case, self.row, self.stored, self.first, self.truth = case, row, stored, first, truth
        self.name, self.passed, self.is_gradient = row.output, row.passed, row.output not in case.subject.outputs
        self.result, self.exact = stored.double(), truth.value
        self.error, self.rms = self.result - self.exact, float(self.exact.square().mean().sqrt())
        self.terms = {name: term.reshape(self.exact.shape) for name, term in terms.items()}
        self.axes = layout(case, self.name, self.exact.shape)
        excess = (self.error / (NORM_TOLERANCE[stored.dtype] * self.rms or 1.0)).abs().nan_to_num(torch.inf, torch.inf)
        self.excess = excess.reshape(tuple(self.axes.values()))  # as a multiple of what is allowed
        self.off = wrong_elements(self.result, self.exact, stored.dtype)

    @cached_property
    def place(self) -> Place:
        return place_of(self.off, self.axes, self.case.sections)

    @cached_property
    def fact(self) -> str:
        """What needs no explanation."""
        if not bool(self.exact.isfinite().all()):
            return "cannot be judged: the truth is not finite, as an input or an output stored before it is not"
        lost = ~self.result.isfinite()
        if bool(lost.any()):
            what = "NaN" if bool(self.result[lost].isnan().all()) else "NaN or infinite"
            only_now = int((lost & self.first.isfinite()).sum())
            unwritten = 2 * only_now > int(lost.sum())  # not all: old memory may hold NaN by chance
            return place_of(lost, self.axes, self.case.sections).are("never written" if unwritten else what)
        return "" if bool(self.result[self.off].any()) else self.place.are("zero: masked, or never added to")

    @property
    def race_and_place(self) -> str:
        """All that is left to say where nothing explains it."""
        race = "; different in each run: a race, or memory read before it is written"
        where = f"; wrong: {self.place.words}" if self.place.words else ""
        return f"{'' if self.close(self.first.double()) else race}{where}"

    def close(self, candidate: Tensor) -> bool:
        """Whether the result would pass if this were the truth."""
        truth = Exact(candidate.reshape(self.exact.shape), self.truth.terms)
        return accuracy.judge(self.case, self.row.backend, self.name, self.stored, truth).passed

    def share(self, candidate: Tensor) -> float:
        """How much of the error a candidate removes."""
        left = (self.result - candidate.reshape(self.exact.shape)).norm()
        return float(1 - left / self.error.norm()) if bool(left.isfinite()) else 0.0

    def explained_by(self, candidate: Tensor) -> bool:
        return self.share(candidate) >= NEARLY_ALL and self.close(candidate)

    def details(self) -> dict[str, Any]:
        """All that is shown of it. error: relative to the root mean square of the truth; ratio: result / truth where an
        element is wrong and its truth not tiny; decades: share of all elements by the power of ten of their error.
        """
        relative = self.error / (self.rms or 1.0)
        finite = relative[relative.isfinite()]
        powers, counts = finite.abs().log10().floor().clamp(-9, 1).unique(return_counts=True)
        worth = self.off & self.result.isfinite() & (self.exact.abs() > WORTH_A_RATIO * self.rms)
        statistics = {
            "error": _spread(finite),
            "ratio": _spread(self.result[worth] / self.exact[worth]),
            "decades": {f"1e{int(power)}": int(count) / relative.numel() for power, count in zip(powers, counts)},
            "nan": int((~self.result.isfinite()).sum()),
            "zero": int(((self.result == 0) & (self.exact != 0)).sum()),
        }
        inside = {name: term[self.place.box] for name, term in self.terms.items()}
        largest = {axis: in_blocks(_along(self.excess, k).amax(1), 0, MOST_BLOCKS) for k, axis in enumerate(self.axes)}
        return {
            "output": self.name,
            "axes": self.axes,
            "statistics": statistics,
            "place": self.place.words or "everywhere",
            "filled": self.place.filled,
            "coefficients of terms": coefficients(self.error[self.place.box], inside),
            "largest error by block, of what is allowed": {
                axis: {str(block[0]): value for block, value in zip(blocks, values.tolist())}
                for axis, (values, blocks) in largest.items()
            },
        }


def _spread(values: Tensor) -> dict[str, float]:
    """Nothing of no values."""
    if not values.numel():
        return {}
    found = {"min": values.min(), "max": values.max(), "mean": values.mean(), "std": values.std(correction=0)}
    return {name: float(value) for name, value in found.items()}


def _along(values: Tensor, axis: int) -> Tensor:
    """[size of the axis, all others]"""
    return values.movedim(axis, 0).reshape(values.shape[axis], -1)


def in_blocks(values: Tensor, axis: int, most: int) -> tuple[Tensor, list[range]]:
    """The largest of each block of an axis, and these blocks; a power of two long, as kernels have them."""
    size = values.shape[axis]
    length = 1 << max(0, math.ceil(math.log2(size / most)))
    largest = torch.stack([block.amax(axis) for block in values.split(length, axis)], axis)
    return largest, [range(size)[first : first + length] for first in range(0, size, length)]


def map_of(excess: Tensor, axes: dict[str, int], columns: int) -> Iterator[tuple[str, str]]:
    """Labels, and what stands right of them: a shade per block; streams side by side, lines that look alike joined."""
    *above, last = axes
    beside = above.pop() if len(above) > 1 and above[-1].endswith("stream") else ""
    outer, inner = ["", "", *above][-2:]
    streams = axes.get(beside, 1)
    largest = excess.reshape([axes.get(axis, 1) for axis in (outer, inner, beside, last)])
    largest, groups = in_blocks(largest, 0, MOST_GROUPS)
    largest, rows = in_blocks(largest, 1, MOST_ROWS)
    largest, cells = in_blocks(largest, 3, max(1, columns // streams - 1))
    if beside:
        yield beside, "│".join(str(k).center(len(cells)) for k in range(streams)).rstrip()
    for group, lines in zip(groups, largest.tolist()):
        if outer:
            yield words_of(group, axes[outer], outer), ""
        drawn = ["│".join("".join(map(shade, part)) for part in line) for line in lines]
        for line, alike in groupby(zip(drawn, rows), key=lambda pair: pair[0]):
            yield words_of([k for _, row in alike for k in row], axes[inner], inner) if inner else "", line
    yield "", f"{last}s 0 to {axes[last] - 1}{f' of each {beside}' if beside else ''}, {len(cells[0])} per character"


def shade(excess: float) -> str:
    """· what is allowed, then a decade beyond it each, N not finite"""
    return "N" if math.isinf(excess) else "·░▒▓█"[bisect_left((1, 10, 100, 1000), excess)]
