"""Where an output is wrong: which elements, and the streams, channels, tokens they lie in, as words."""

import re
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..accuracy import NORM_TOLERANCE, ROUNDING
from .layouts import Layout

FILLED = 0.5  # of the elements in a place must be wrong for the place to say anything
BLOCKED = ("channel", "token", "step")  # axes that kernels go through in blocks
FEW = 6  # indices that are listed one by one


@dataclass(frozen=True)
class Place:
    """words: "" where the error is everywhere or scattered. box: the elements meant, shaped as the output."""

    words: str
    several: bool  # whether the words are a plural
    box: Tensor
    filled: float  # share of the box that is wrong


def wrong_elements(result: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements further off than their type allows: one rounding, or the tolerance in norm as a share of the rms.

    Where the norm fails, some element is further off than the second, so that the mask is never empty.
    """
    error = (result - exact).abs()
    rms = exact.square().mean().sqrt()
    off = ~(error <= NORM_TOLERANCE[dtype] * rms)
    if dtype in ROUNDING:
        largest = exact.abs() if exact.dim() == 0 else exact.abs().amax(-1, keepdim=True)
        beyond = ~(error <= ROUNDING[dtype] * largest)
        off = beyond if bool(beyond.any()) else off
    return off


def everywhere(off: Tensor) -> Place:
    return Place("", False, torch.ones_like(off), float(off.double().mean()))


def place_of(off: Tensor, layout: Layout, sections: dict[str, range]) -> Place:
    """The smallest product of index sets that holds every wrong element."""
    view = off.reshape(tuple(layout.values()))
    box, words = torch.ones_like(view), []
    for axis, (name, size) in enumerate(layout.items()):
        others = [other for other in range(view.dim()) if other != axis]
        hit = view.amax(others) if others else view
        if bool(hit.all()):
            continue
        box &= hit.view([-1 if other == axis else 1 for other in range(view.dim())])
        words.append(index_words(hit.nonzero().flatten().tolist(), size, name, sections))
    filled = float(view.sum() / box.sum().clamp(min=1))
    if filled < FILLED:
        return everywhere(off)
    words.reverse()  # the innermost axis first: channels of streams of tokens
    plural = bool(words) and not re.match(r"the \w+ section\b|\w+ ?\w* \d+$", words[0])
    return Place(" of ".join(words), plural, box.reshape(off.shape), filled)


def index_words(indices: list[int], size: int, name: str, sections: dict[str, range]) -> str:
    """[1, 2, 3] of 4 streams -> "streams 1 to 3\""""
    if name == "row":
        whole = [section for section, rows in sections.items() if set(rows) <= set(indices)]
        if sum(len(sections[section]) for section in whole) == len(indices):
            return f"the {' and '.join(whole)} section{'s' * (len(whole) > 1)}"
    if name == "section":
        return " and ".join(f"section {section}" for k, section in enumerate(sections) if k in indices)
    if len(indices) == 1:
        return f"{name} {indices[0]}"
    first, last = indices[0], indices[-1]
    if last - first + 1 == len(indices):
        if last < size - 1 or name not in BLOCKED:
            return f"{name}s {first} to {last}"
        return f"{name}s {first} and up" + (", a last block that is not full," if _partial(first, size) else "")
    runs = _runs(indices)
    gaps = {after[0] - before[0] for before, after in pairwise(runs)}
    lengths = {len(run) for run in runs[:-1]}
    if len(gaps) == 1 and len(lengths) == 1 and len(runs) > 2 and len(runs[-1]) <= len(runs[0]):
        (gap,), length = gaps, len(runs[0])
        many = f"{length} {name}s" if length > 1 else f"one {name}"
        return f"{many} in every {gap}, from {name} {first} on,"
    if len(indices) <= FEW:
        return f"{name}s {', '.join(map(str, indices[:-1]))} and {last}"
    return f"{len(indices)} of {size} {name}s ({', '.join(map(str, indices[:3]))}, …)"


def _partial(first: int, size: int) -> bool:
    """Whether a block of a power of 2 that begins here does not end here."""
    block = first & -first
    return first > block and block > size - first


def _runs(indices: list[int]) -> list[list[int]]:
    runs = [[indices[0]]]
    for index in indices[1:]:
        if index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs
