"""Where the sequences of a server are: their rows in x, and their slots in the cache. Nothing is read on the host."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .states import greater

# How many boundaries a program looks at at once, one for each thread of four warps. Not measured.
BOUNDS = 128


class SlotTable(NamedTuple):
    """The slots of each sequence, as kernels see them."""

    ptr: Any
    row: Any
    column: Any
    columns: Any
    slots: Any
    pad_slot_id: Any


@triton.jit
def within(bound, L):
    return tl.minimum(tl.maximum(bound, 0), L).to(tl.int32)


# The sequence i of a piece, which of its pieces this one is, and where the sequence begins and ends in x. A piece has
# `each` rows. Sequence i has the numbers from begin // each + i + 1 on: each sequence is given a number more than the
# whole pieces it has, which is enough for a part of a piece at its end. i = −1 is the padding before the first
# sequence, i = N the padding after the last. There are L / each (rounded up) + N + 1 numbers. A boundary counts as the
# greatest up to it, within 0 and L.
@triton.jit
def sequence_of(number, bounds_ptr, each, L, N, BLOCK_N: tl.constexpr):
    sequence, begin, end = -1, 0, L
    greatest = 0
    for first in range(0, N + 1, BLOCK_N):
        i = first + tl.arange(0, BLOCK_N)
        given = within(tl.load(bounds_ptr + i, mask=i <= N, other=0), L)
        bound = tl.maximum(tl.associative_scan(given, 0, greater), greatest)
        greatest = tl.max(bound, axis=0)
        begun = (i <= N) & (bound // each + i + 1 <= number)
        sequence += tl.sum(begun.to(tl.int32), axis=0)
        begin = tl.maximum(begin, tl.max(tl.where(begun, bound, 0), axis=0))
        end = tl.minimum(end, tl.min(tl.where((i <= N) & (begun == 0), bound, L), axis=0))
    return sequence, number - begin // each - sequence - 1, begin, end


# Where sequence b of B begins and ends in x; b = B: the padding after the last one
@triton.jit
def rows_of(bounds_ptr, b, L, B, BLOCK_N: tl.constexpr):
    begin = 0
    for first in range(0, b + 1, BLOCK_N):
        i = first + tl.arange(0, BLOCK_N)
        begin = tl.maximum(begin, tl.max(within(tl.load(bounds_ptr + i, mask=i <= b, other=0), L), axis=0))
    end = within(tl.load(bounds_ptr + b + 1, mask=b < B, other=0), L)
    return begin, tl.where(b < B, tl.maximum(begin, end), L)


# The column of a sequence, 0 without a list of them
@triton.jit
def column_of(columns_ptr, sequence, present):
    column = sequence * 0
    if columns_ptr is not None:
        column = tl.load(columns_ptr + sequence, mask=present, other=0).to(tl.int64)
    return column


# The slot in this column of a sequence's row of the table, and whether the cache has it
@triton.jit
def slot_in(table, sequence, column, present):
    present &= (column >= 0) & (column < table.columns)
    slot = tl.load(table.ptr + sequence * table.row + column * table.column, mask=present, other=0).to(tl.int64)
    return slot, present & (slot >= 0) & (slot < table.slots) & (slot != table.pad_slot_id)
