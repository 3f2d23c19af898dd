"""One output beside its truth: which elements are wrong, where they lie, how the error is distributed."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import accuracy
from ..accuracy import NORM_TOLERANCE, ROUNDING, Exact, Row
from ..cases import Case, Tensors
from ..conv_cases import AnyCase

Layout = dict[str, int]  # axis -> size; their product is the size of the tensor

FILLED = 0.5  # of the elements in a place must be wrong for the place to say anything
BLOCKED = ("channel", "token", "step")  # axes that kernels go through in blocks
FEW = 6  # indices that are listed one by one
WORTH_A_RATIO = 1e-3  # of the root mean square; below it a ratio says nothing
CONSTANT = 1e-2  # a spread of the ratio below this is rounding
DECADES = -9, 1  # the smallest stands for all below it
NEARLY_ALL = 0.75  # of the error must be gone, beside what is left being within the tolerance

# The axes of a tensor; where a name is not here, it is d and one that is.
MHC = {
    **dict.fromkeys(("x", "x_next", "stored"), "token stream channel"),
    **dict.fromkeys(("h_in", "h_out", "out"), "token channel"),
    **dict.fromkeys(("h_pre", "h_post"), "token stream"),
    **dict.fromkeys(("h_res", "logits"), "token old_stream new_stream"),
    **dict.fromkeys(("h_mix", "z"), "token row"),
    "inv_rms": "token",
    "phi": "row stream channel",
    "alpha": "section",
    "bias": "row",
    "gamma": "stream channel",
}
CONV = {
    **dict.fromkeys(("x", "y", "g"), "sequence token stream channel"),
    **dict.fromkeys(("initial_state", "final_state"), "sequence channel step"),
    "conv_state": "slot channel step",
    "residual": "sequence token channel",
    "everything": "row stream channel",
    "weight": "stream channel tap",
    "bias": "channel",
    "gamma": "stream channel",
}


def layout(case: AnyCase, name: str, shape: tuple[int, ...]) -> Layout:
    table = MHC if isinstance(case, Case) else CONV
    axes = (table[name] if name in table else table[name.removeprefix("d")]).split()
    sizes = {"stream": case.n, "old_stream": case.n, "new_stream": case.n, "channel": case.D}
    if isinstance(case, Case):
        rows = sections(case)
        sizes |= {"token": math.prod(case.outer), "row": sum(map(len, rows.values())), "section": len(rows)}
    else:
        sizes |= {"token": case.L, "tap": case.W, "step": (1, *shape)[-1]}
        sizes |= dict.fromkeys(("sequence", "slot", "row"), (*shape, 1)[0])
    return {axis.replace("_", " "): sizes[axis] for axis in axes if axis != "stream" or case.n}


def sections(case: AnyCase) -> dict[str, range]:
    """The rows of each section of phi, bias and h_mix; a convolution has none."""
    n = case.n
    every = {"pre": range(n), "post": range(n, 2 * n), "res": range(2 * n, 2 * n + n * n)}
    wanted = ("pre",) if case.subject.name == "mhc_head" else every if isinstance(case, Case) else ()
    return {name: every[name] for name in wanted}


@dataclass(frozen=True)
class Place:
    """words: "" where the error is everywhere or scattered. box: the elements meant, shaped as the output."""

    words: str
    several: bool  # whether the words are a plural
    box: Tensor
    filled: float  # share of the box that is wrong

    def are(self, what: str) -> str:
        return f"{self.words or 'everything'} {'are' if self.several else 'is'} {what}"


def everywhere(off: Tensor) -> Place:
    return Place("", False, torch.ones_like(off), float(off.double().mean()))


def place_of(off: Tensor, layout: Layout, sections: Mapping[str, range]) -> Place:
    """The smallest product of index sets that holds every wrong element."""
    view = off.reshape(tuple(layout.values()))
    box, words = torch.ones_like(view), []
    for axis, (name, size) in enumerate(layout.items()):
        others = [other for other in range(view.dim()) if other != axis]
        hit = view.amax(others, keepdim=True) if others else view
        if not bool(hit.all()):
            box &= hit
            words.append(index_words(hit.flatten().nonzero().flatten().tolist(), size, name, sections))
    filled = float(view.sum() / box.sum().clamp(min=1))
    if filled < FILLED:
        return everywhere(off)
    words.reverse()  # the innermost axis first: channels of streams of tokens
    plural = bool(words) and not re.match(r"the \w+ section\b|\w+ ?\w* \d+$", words[0])
    return Place(" of ".join(words), plural, box.reshape(off.shape), filled)


def index_words(indices: list[int], size: int, name: str, sections: Mapping[str, range]) -> str:
    """[1, 2, 3] of 4 streams -> "streams 1 to 3\""""
    every, first, last = set(indices), indices[0], indices[-1]
    whole = [section for section, rows in sections.items() if name == "row" and every.issuperset(rows)]
    if whole and sum(len(sections[section]) for section in whole) == len(indices):
        return f"the {' and '.join(whole)} section{'s' * (len(whole) > 1)}"
    if name == "section":
        return " and ".join(f"section {section}" for k, section in enumerate(sections) if k in every)
    if len(indices) == 1:
        return f"{name} {first}"
    if last - first + 1 == len(indices):
        return f"{name}s {first} {'and up' if last == size - 1 and name in BLOCKED else f'to {last}'}"
    begins, ends = [i for i in indices if i - 1 not in every], [i for i in indices if i + 1 not in every]
    lengths = [end - begin + 1 for begin, end in zip(begins, ends)]
    distances = {after - before for before, after in pairwise(begins)}
    if len(begins) > 2 and len(distances) == 1 and len(set(lengths[:-1])) == 1 and lengths[-1] <= lengths[0]:
        many = f"{lengths[0]} {name}s" if lengths[0] > 1 else f"one {name}"
        return f"{many} in every {distances.pop()}, from {name} {first} on,"
    if len(indices) <= FEW:
        return f"{name}s {', '.join(map(str, indices[:-1]))} and {last}"
    return f"{len(indices)} of {size} {name}s ({', '.join(map(str, indices[:3]))}, …)"


def wrong_elements(result: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements further off than their type allows: one rounding, or the tolerance in norm as a share of the rms.

    Where the norm fails, some element is further off than the second, so that the mask is never empty.
    """
    error = (result - exact).abs()
    if dtype in ROUNDING:
        largest = exact.abs() if exact.dim() == 0 else exact.abs().amax(-1, keepdim=True)
        beyond = ~(error <= ROUNDING[dtype] * largest)
        if bool(beyond.any()):
            return beyond
    return ~(error <= NORM_TOLERANCE[dtype] * exact.square().mean().sqrt())


def coefficients(error: Tensor, terms: Tensors) -> dict[str, float]:
    """c of error ≈ Σ c · term by least squares; what is not finite has no say."""
    columns = torch.stack([tensor.flatten() for tensor in (error, *terms.values())], -1).nan_to_num(0.0, 0.0, 0.0).cpu()
    solved = torch.linalg.lstsq(columns[:, 1:], columns[:, :1], driver="gelsd")
    return dict(zip(terms, solved.solution.flatten().tolist()))


class Output:
    """An output or a gradient of a run (stored) and of the run before (first), its truth and the terms of that."""

    def __init__(
        self, case: AnyCase, row: Row, stored: Tensor, first: Tensor, truth: Exact, terms: Tensors | None = None
    ) -> None:
        self.case, self.row, self.stored, self.first, self.truth = case, row, stored, first, truth
        self.name, self.passed, self.is_gradient = row.output, row.passed, row.output not in case.subject.outputs
        self.result, self.exact = stored.double(), truth.value
        self.error = self.result - self.exact
        self.terms = {name: term.reshape(self.exact.shape) for name, term in (terms or {}).items()}
        self.layout = layout(case, self.name, tuple(self.exact.shape))
        self.off = wrong_elements(self.result, self.exact, stored.dtype)
        self.place = everywhere(self.off) if self.passed else self.locate(self.off)

    def locate(self, off: Tensor) -> Place:
        return place_of(off, self.layout, sections(self.case))

    def close(self, candidate: Tensor) -> bool:
        """Whether the result would pass if this were the truth."""
        truth = Exact(candidate, self.truth.terms)
        return accuracy.judge(self.case, self.row.backend, self.name, self.stored, truth).passed

    def share(self, candidate: Tensor) -> float:
        """How much of the error a candidate removes."""
        left = (self.result - candidate).norm()
        return float(1 - left / self.error.norm()) if bool(left.isfinite()) else 0.0

    def explained_by(self, candidate: Tensor) -> bool:
        return self.share(candidate) >= NEARLY_ALL and self.close(candidate)

    @property
    def excess(self) -> Tensor:
        """|error| as a multiple of what is allowed, shaped by the layout; NaN stays."""
        allowed = NORM_TOLERANCE[self.stored.dtype] * float(self.exact.square().mean().sqrt())
        return (self.error.abs() / (allowed or 1.0)).reshape(tuple(self.layout.values())).cpu()

    @property
    def coefficients(self) -> dict[str, float]:
        """c of error ≈ Σ c · term, in the place that is wrong."""
        inside = {name: term[self.place.box] for name, term in self.terms.items()}
        return coefficients(self.error[self.place.box], inside) if inside else {}

    @property
    def statistics(self) -> dict[str, Any]:
        """Errors relative to the root mean square of the truth, and result / truth where an element is wrong and its
        truth not tiny. decades: share of all elements by the power of ten of their error.
        """
        result, exact = self.result, self.exact
        scale = float(exact.square().mean().sqrt()) or 1.0
        error = self.error / scale
        finite = error[error.isfinite()]
        powers, counts = finite.abs().log10().floor().clamp(*DECADES).unique(return_counts=True)
        names = [f"1e{int(power)}" if power > DECADES[0] else f"below 1e{DECADES[0] + 1}" for power in powers]
        finite = finite if finite.numel() else error.new_zeros(1)
        worth = self.off & result.isfinite() & (exact.abs() > WORTH_A_RATIO * scale)
        ratio = result[worth] / exact[worth] if bool(worth.any()) else exact.new_ones(1)
        spread, flipped = float(ratio.std(correction=0)), float((ratio < 0).double().mean())
        varying = f"varying, sign flipped in {flipped:.0%}" if flipped > 0.01 else "varying"
        words = "constant" if spread <= CONSTANT * abs(float(ratio.mean())) else varying
        found: dict[str, Any] = {"max": finite.abs().max(), "mean": finite.mean(), "std": finite.std(correction=0)}
        found |= {"ratio_mean": ratio.mean(), "ratio_std": spread, "ratio_min": ratio.min(), "ratio_max": ratio.max()}
        return {
            **{name: float(value) for name, value in found.items()},
            "decades": {name: int(count) / error.numel() for name, count in zip(names, counts)},
            "ratio": words if bool(worth.any()) else "",
            "nan": int((~result.isfinite()).sum()),
            "zero": int(((result == 0) & (exact != 0)).sum()),
        }
