"""Where in an output the errors lie, in words."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...testing.cases import Case
from ...testing.conv_cases import AnyCase

FILLED = 0.5  # of the elements in a place must be wrong for the place to say anything
BLOCKED = ("channel", "token")  # axes that kernels go through in blocks
FEW = 6  # indices that are listed

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
    box: Tensor
    filled: float  # share of the box that is wrong

    def has(self, what: str) -> str:
        return f"{what} {f'in {self.words}' if self.words else 'everywhere'}"


def place_of(off: Tensor, axes: dict[str, int], sections: Mapping[str, range]) -> Place:
    """The smallest product of index sets that holds every wrong element."""
    view = off.reshape(tuple(axes.values()))
    box, words = torch.ones_like(view), list[str]()
    for axis, (name, size) in enumerate(axes.items()):
        hit = view.movedim(axis, 0).reshape(size, -1).any(1)
        if not bool(hit.all()):
            box &= hit.reshape(size, *[1] * (view.dim() - axis - 1))
            words.insert(0, words_of(hit.nonzero().flatten().tolist(), size, name, sections))
    filled = float(view.sum() / box.sum().clamp(min=1))
    if filled < FILLED:
        return Place("", torch.ones_like(off), float(off.double().mean()))
    return Place(" of ".join(words), box.reshape(off.shape), filled)  # channels of streams of tokens


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
    return f"{many} of {size} {axis}s ({', '.join(map(str, indices[:FEW]))}{', …' * (many > FEW)})"
