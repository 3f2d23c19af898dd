"""The meaning of what servers call, in plain torch: prefill and decoding on a cache of states by slot, dilation 1.

x [rows, D] holds packed sequences, state [slots, length, D] the cache. All inputs are gathered from one list of rows:
nothing (zeros), the places of the cache, the tokens. Nothing is read on the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.precision import accumulate, without_autocast
from .reference import filtered


class Rows(NamedTuple):
    """Zeros, the places of all slots, then x; what is gathered is found by its number in this list."""

    rows: Tensor
    first_token: int
    slots: int
    length: int

    @staticmethod
    def of(x: Tensor, state: Tensor) -> "Rows":
        slots, length, D = state.shape
        return Rows(torch.cat([x.new_zeros(1, D), state.flatten(0, 1), x]), 1 + slots * length, slots, length)

    def past(self, slot: Tensor, place: Tensor | int) -> Tensor:
        """The number of a place of a slot; 0 where there is no such slot."""
        return torch.where(slot < self.slots, 1 + slot * self.length + place, 0)

    def at(self, time: Tensor, begin: Tensor, past: Tensor) -> Tensor:
        """The inputs at these times of sequences whose token 0 is x[begin] and whose window ends before `past`."""
        return self.rows[self.numbers(time, begin, past)]

    def numbers(self, time: Tensor, begin: Tensor, past: Tensor) -> Tensor:
        before = torch.where(past > 0, past + time, 0)
        return torch.where(time >= 0, self.first_token + begin + time, before)


class Tokens(NamedTuple):
    """Where sequences begin and end; of each token its sequence, its time in it, and whether it has one."""

    begin: Tensor
    end: Tensor
    sequence: Tensor
    time: Tensor
    real: Tensor

    @staticmethod
    def of(cu_seqlens: Tensor, count: int, most: int | None = None) -> "Tokens":
        """most: of the tokens of a sequence; the ones after them are padding."""
        bounds = cu_seqlens.long().clamp(0, count).cummax(0).values
        begin, end = bounds[:-1], bounds[1:]
        if most is not None:
            end = torch.minimum(end, begin + most)
        t = torch.arange(count, device=bounds.device)
        sequence = torch.searchsorted(bounds, t, right=True) - 1
        real = (sequence >= 0) & (sequence < len(begin))
        sequence = torch.where(real, sequence, 0)
        if not len(begin):
            return Tokens(begin, end, sequence, t, real)
        return Tokens(begin, end, sequence, t - begin[sequence], real & (t < end[sequence]))


def slots_in(table: Tensor | None, columns: Tensor | None, N: int, slots: int, pad_slot_id: int, x: Tensor) -> Tensor:
    """The slots [N, K] in these columns [N, K] of the table [N, blocks]; `slots` where there is none.

    Without columns, the first one. Without a table, slot i for sequence i.
    """
    if table is None:
        return torch.arange(N, device=x.device)[:, None]
    if columns is None:
        columns = table.new_zeros(N, 1)
    columns = columns.long()
    there = (columns >= 0) & (columns < table.shape[1])
    found = table.long().gather(1, torch.where(there, columns, 0))
    return torch.where(there & (found >= 0) & (found < slots) & (found != pad_slot_id), found, slots)


def causal_conv1d_prefill(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    table: Tensor,
    has_initial_state: Tensor | None,
    read_columns: Tensor | None,
    write_columns: Tensor | None,
    first_columns: Tensor | None,
    tokens_before: Tensor | None,
    block_size: int,
    silu: bool,
    pad_slot_id: int,
) -> tuple[Tensor, Tensor]:
    """y, and what state is after it: the last W − 1 inputs of a sequence, in places 0 to W − 2 of the slot it writes.

    With block_size, the inputs up to each multiple of it (counted from the sequence's first token, tokens_before
    this x) go to the slots in columns first_columns, first_columns + 1, ...
    """
    N, S = len(table), weight.shape[1] - 1
    rows, tokens = Rows.of(x, state), Tokens.of(cu_seqlens, len(x))

    def slots(columns: Tensor | None) -> Tensor:
        return slots_in(table, columns, N, rows.slots, pad_slot_id, x)

    def column(columns: Tensor | None) -> Tensor | None:
        return None if columns is None else columns[:, None]

    read = slots(column(read_columns))[:, 0]
    real = (read < rows.slots) & (tokens.end > tokens.begin)
    past = rows.past(read, S)
    past = torch.where(has_initial_state, past, 0) if has_initial_state is not None else torch.zeros_like(past)
    length = tokens.end - tokens.begin
    ends, written = length[:, None], slots(column(write_columns))
    if block_size:
        assert first_columns is not None and tokens_before is not None
        k = torch.arange(len(x) // block_size + 1, device=x.device)
        multiples = block_size - tokens_before.long().clamp(min=0)[:, None] % block_size + k * block_size
        blocks = slots(first_columns.long()[:, None] + k)
        ends = torch.cat([multiples, ends], 1)
        written = torch.cat([torch.where(multiples <= length[:, None], blocks, rows.slots), written], 1)
    y = taps_to_y(x, rows, tokens, real, past, weight, bias, silu)[0]
    written = torch.where(real[:, None], written, rows.slots)
    times = torch.minimum(ends, length[:, None])[..., None] - S + torch.arange(S, device=x.device)
    states = rows.at(times, tokens.begin[:, None, None], past[:, None, None])
    after = torch.cat([state, state.new_zeros(1, *state.shape[1:])])  # what is not written goes to a spare slot
    for i in range(written.shape[1]):
        after[written[:, i], :S] = states[:, i]
    return y, after[: rows.slots]


def taps_to_y(
    x: Tensor,
    rows: Rows,
    tokens: Tokens,
    real: Tensor,
    past: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    parents: Tensor | None = None,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """y; what lies under each of the W taps of each token; and which tokens are no padding."""
    if not len(real):
        return x.new_zeros(x.shape), [], tokens.real
    W, is_real = weight.shape[1], tokens.real & real[tokens.sequence]
    begin, past = tokens.begin[tokens.sequence], past[tokens.sequence]
    time, taps = tokens.time, list[Tensor]()
    for _ in range(W):  # the newest first
        taps.insert(0, torch.where(is_real[:, None], rows.at(time, begin, past), 0))
        time = time - 1 if parents is None else before(time, parents[tokens.sequence])
    with without_autocast(x):
        y = torch.where(is_real[:, None], filtered([accumulate(tap) for tap in taps], weight, bias, silu), 0)
    return y.to(x.dtype), taps, is_real


def before(time: Tensor, parents: Tensor) -> Tensor:
    """The time of the input before this one in a tree of tokens; before its root −1, −2, ..."""
    at = time.clamp(min=0)
    parent = parents.long().gather(1, at[:, None])[:, 0]
    parent = torch.where((parent >= 0) & (parent < at), parent, -1)
    return torch.where(time >= 0, parent, time - 1)


class SteppedState(NamedTuple):
    """y; state and windows after it; which rows of x are no padding."""

    y: Tensor
    state: Tensor
    windows: Tensor | None
    real: Tensor


def causal_conv1d_step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    table: Tensor | None,
    read_columns: Tensor | None,
    write_columns: Tensor | None,
    num_accepted_tokens: Tensor | None,
    windows: Tensor | None,
    window_indices: Tensor | None,
    parents: Tensor | None,
    max_seqlen: int,
    silu: bool,
    pad_slot_id: int,
) -> SteppedState:
    """A few tokens of each sequence. windows [lines, steps, D, W − 1].

    Without num_accepted_tokens the newest input is last in a slot and older ones shift out. With it, the window of a
    slot begins at place num_accepted_tokens − 1, and a slot then holds, from place 0, the last W − 2 inputs before
    these tokens, and the tokens. With parents no slot changes.
    """
    N, S = len(cu_seqlens) - 1, weight.shape[1] - 1
    rows, tokens = Rows.of(x, state), Tokens.of(cu_seqlens, len(x), max_seqlen)

    def slots(columns: Tensor | None) -> Tensor:
        return slots_in(table, None if columns is None else columns[:, None], N, rows.slots, pad_slot_id, x)[:, 0]

    read = slots(read_columns)
    real = (read < rows.slots) & (tokens.end > tokens.begin)
    begin_of_window = torch.full_like(read, rows.length - S)
    if num_accepted_tokens is not None:
        begin_of_window = num_accepted_tokens.long() - 1
        real = real & (begin_of_window >= 0) & (begin_of_window <= rows.length - S)
    past = rows.past(torch.where(real, read, rows.slots), begin_of_window + S)
    y, taps, is_real = taps_to_y(x, rows, tokens, real, past, weight, bias, silu, parents)
    if parents is None:
        written = torch.where(real, slots(write_columns), rows.slots)
        count = (tokens.end - tokens.begin)[:, None]
        place = torch.arange(rows.length, device=x.device)
        time = count - rows.length + place if num_accepted_tokens is None else place - (S - 1)
        after = torch.cat([state, state.new_zeros(1, *state.shape[1:])])
        new = rows.at(torch.minimum(time, count - 1), tokens.begin[:, None], past[:, None])
        after[written] = torch.where((time < count)[..., None], new, after[written])
        state = after[: rows.slots]
    if windows is not None:
        lines = torch.arange(N, device=x.device) if window_indices is None else window_indices.long()
        line = lines[tokens.sequence] if N else tokens.sequence
        there = is_real & (line >= 0) & (line < len(windows))
        spare = torch.cat([windows, windows.new_zeros(1, *windows.shape[1:])])
        if taps:
            spare[torch.where(there, line, len(windows)), torch.where(there, tokens.time, 0)] = torch.stack(
                taps[1:], -1
            )
        windows = spare[:-1]
    return SteppedState(y, state, windows, is_real)
