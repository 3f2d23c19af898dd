"""A small map of an error: the largest in each block, over the axes of the output."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .layouts import Layout

ROWS, COLUMNS = 16, 64
OUTER_ROWS = 4  # sequences, where sequences and tokens share the rows
SIDE_BY_SIDE = ("stream", "old stream")  # axes whose maps stand beside each other
STEPS = (1.0, 10.0, 100.0, 1000.0)  # what is allowed, and decades beyond it


@dataclass(frozen=True)
class Block:
    """Indices first to last of an axis."""

    first: int
    last: int

    @property
    def slice(self) -> slice:
        return slice(self.first, self.last + 1)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"


Levels = list[list[int]]  # [group][column]


@dataclass(frozen=True)
class Heat:
    """levels [row][group][column]: 0 within the tolerance, then one per decade beyond; -1: NaN.

    Neighbouring rows that look the same are one. groups: maps beside each other, one per index of their axis.
    """

    rows: list[str]
    group_axis: str
    column_axis: str
    columns: list[Block]
    levels: list[Levels]


def blocks_of(size: int, most: int) -> list[Block]:
    """Equal blocks, of a power of two: that is how kernels cut."""
    length = 1 << max(0, math.ceil(math.log2(max(1, size) / most)))
    return [Block(first, min(size, first + length) - 1) for first in range(0, size, length)]


def heat(error: Tensor, layout: Layout, columns: int = COLUMNS) -> Heat:
    """error: as a multiple of what is allowed, shaped by the layout."""
    *above, column_axis = layout
    group_axis = above.pop() if len(above) > 1 and above[-1] in SIDE_BY_SIDE else ""
    outer_axis, inner_axis = ["", "", *above][-2:]
    outer, inner, groups, wide = (layout.get(axis, 1) for axis in (outer_axis, inner_axis, group_axis, column_axis))
    cube = error.nan_to_num(torch.inf, torch.inf).reshape(outer, inner, groups, wide)
    column_blocks = blocks_of(wide, max(1, columns // groups - 1))

    rows: list[str] = []
    levels: list[Levels] = []
    for outer_block in blocks_of(outer, OUTER_ROWS):
        begun: Block | None = None  # the row that this one continues where it looks the same
        for block in blocks_of(inner, ROWS // 2 if outer > 1 else ROWS):
            part = cube[outer_block.slice, block.slice].amax((0, 1))
            here = [[_level(part[g, b.slice].max().item()) for b in column_blocks] for g in range(groups)]
            if begun is not None and levels[-1] == here:
                block = Block(begun.first, block.last)
                rows.pop()
                levels.pop()
            begun = block
            rows.append(
                f"{outer_axis} {outer_block}: {block}" if outer_axis else f"{inner_axis} {block}" * bool(inner_axis)
            )
            levels.append(here)
    return Heat(rows, group_axis, column_axis, column_blocks, levels)


def profile(error: Tensor, layout: Layout) -> dict[str, dict[str, float]]:
    """The largest error in each block of each axis, as a multiple of what is allowed."""
    found = {}
    cube = error.nan_to_num(torch.inf, torch.inf)
    for axis, (name, size) in enumerate(layout.items()):
        others = [other for other in range(cube.dim()) if other != axis]
        largest = cube.amax(others) if others else cube
        found[name] = {str(b): largest[b.slice].max().item() for b in blocks_of(size, ROWS)}
    return found


def _level(excess: float) -> int:
    return -1 if excess == math.inf else sum(excess > step for step in STEPS)
