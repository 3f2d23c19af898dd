"""Which piece of a sequence a rank has, and how the rows before each piece come to it and their gradients go back.

A sequence of world·L tokens lies on the ranks of a group in pieces of one length. "contiguous": rank r has piece r.
"zigzag": there are 2·world pieces, and rank r has pieces r and 2·world − 1 − r, one behind the other, as ring attention
shares out causal work. A convolution needs the S rows before each piece, its history: they are the last rows of the
piece before, or of several where pieces are shorter than S, and fewer than S near the begin of the sequence.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional  # it tells torch.compile that none may be dropped
from torch.distributed.device_mesh import DeviceMesh

from ..core.check import check_word
from .agree import LAYOUTS, Call, agreed


class Plan(NamedTuple):
    """What a rank has, gives and takes. Rows are counted in its own x, unless another place is named."""

    length: int  # of a piece
    reach: int  # S: how many rows before a piece are needed
    starts: tuple[int, ...]  # of its pieces in the whole sequence
    histories: tuple[int, ...]  # how many rows before each of them are needed
    given: tuple[tuple[int, int], ...]  # ranges of rows that others need, by rank
    give: tuple[int, ...]  # how many rows each rank is given
    taken: tuple[tuple[tuple[int, int], ...], ...]  # for each piece, where its history is in what was taken
    message: tuple[int, ...]  # which of those parts is the first in what was taken, the second and so on
    take: tuple[int, ...]  # how many rows are taken from each rank

    @property
    def short(self) -> bool:
        """Pieces have no rows but those that a call with their history computes."""
        return self.length <= 2 * self.reach

    @property
    def window(self) -> int:
        """The rows of a piece that such a call takes in the backward."""
        return min(self.length, 2 * self.reach)

    def local(self, cu_seqlens: Tensor) -> Tensor:
        """How many of this rank's rows are before each position of the whole sequence."""
        before = [(cu_seqlens - start).clamp(0, self.length) for start in self.starts]
        return sum(before[1:], before[0])


def pieces_of(rank: int, world: int, layout: str) -> tuple[int, ...]:
    return (rank,) if layout == "contiguous" else (rank, 2 * world - 1 - rank)


def plan(rank: int, world: int, layout: str, length: int, S: int) -> Plan:
    """length: of a piece; S: how many rows before a piece are needed."""
    return (_plan if torch.compiler.is_compiling() else _kept_plan)(rank, world, layout, length, S)


def _plan(rank: int, world: int, layout: str, length: int, S: int) -> Plan:
    mine = pieces_of(rank, world, layout)
    given: list[tuple[int, int]] = []
    give, take = [], []
    taken: list[list[tuple[int, int, tuple[int, int]]]] = [
        [] for _ in mine
    ]  # source, which in the message, where in it
    position = count = 0
    for other in range(world):
        theirs = pieces_of(other, world, layout)
        before = len(given)
        for i, _, first, rows in _needed(mine, theirs, length, S):
            given.append((i * length + first, i * length + first + rows))
        give.append(sum(last - first for first, last in given[before:]))
        start = position
        for i, j, _, rows in _needed(theirs, mine, length, S):
            taken[j].append((theirs[i], count, (position, position + rows)))
            position, count = position + rows, count + 1
        take.append(position - start)
    in_time = [sorted(parts, key=lambda part: part[0]) for parts in taken]
    numbers = [number for parts in in_time for _, number, _ in parts]
    starts = tuple(piece * length for piece in mine)
    return Plan(
        length=length,
        reach=S,
        starts=starts,
        histories=tuple(min(S, start) for start in starts),
        given=tuple(given),
        give=tuple(give),
        taken=tuple(tuple(rows for _, _, rows in parts) for parts in in_time),
        message=tuple(numbers.index(number) for number in range(count)),
        take=tuple(take),
    )


_kept_plan = lru_cache(maxsize=1024)(_plan)


def _needed(sources: Sequence[int], targets: Sequence[int], length: int, S: int) -> Iterator[tuple[int, int, int, int]]:
    """Of which source i which rows, from `first` of the piece on, are in the history of target j: i, j, first, rows."""
    for j, target in enumerate(targets):
        for i, source in enumerate(sources):
            first = source * length
            begin, end = max(first, target * length - S), min(first + length, target * length)
            if begin < end:
                yield i, j, begin - first, end - begin


class Exchange:
    """Rows on their way: begun by the constructor, awaited by `result`. The way back is that of their gradients."""

    def __init__(self, rows: Tensor, give: Sequence[int], take: Sequence[int], group: dist.ProcessGroup):
        # One collective with a share for each rank, most of them empty: to NCCL that is a send and a receive, and
        # torch.compile knows it, while a pair of isend and irecv it does not.
        self.rows = rows.contiguous()
        self.pending = torch.ops._c10d_functional.all_to_all_single(self.rows, list(take), list(give), group.group_name)

    def result(self) -> Tensor:
        return functional.wait_tensor(self.pending)


def all_sum(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    pending = torch.ops._c10d_functional.all_reduce(share.contiguous(), "sum", group.group_name)
    return functional.wait_tensor(pending)


def send_tails(x: Tensor, plan: Plan, group: dist.ProcessGroup, none: Tensor) -> Exchange:
    """x: [B, rows, ...]   none: no rows of it, as `agreed` returns them"""
    rows = torch.cat([none, *[x[:, first:last] for first, last in plan.given]], 1)
    return Exchange(rows.transpose(0, 1), plan.give, plan.take, group)


def histories(exchange: Exchange, plan: Plan) -> list[Tensor]:
    """The rows before each piece, [B, rows, ...]"""
    taken = exchange.result().transpose(0, 1)
    return [torch.cat([taken[:, :0], *[taken[:, first:last] for first, last in parts]], 1) for parts in plan.taken]


def send_back(dhistories: Sequence[Tensor], plan: Plan, call: Call) -> Exchange:
    """The gradients of histories, to where the rows came from. call: that of the backward"""
    parts: list[Tensor] = []
    for ranges, dhistory in zip(plan.taken, dhistories):
        lengths = [last - first for first, last in ranges]
        parts += dhistory.split(lengths, 1) if lengths else ()
    rows = [parts[i] for i in plan.message]
    rows.insert(0, agreed(call, dhistories[0]))
    return Exchange(torch.cat(rows, 1).transpose(0, 1), plan.take, plan.give, call.group)


def add_tails(dx: Tensor, exchange: Exchange, plan: Plan) -> None:
    """The gradients that came back, to dx of the rows that were given, in place."""
    came = exchange.result().transpose(0, 1)
    position = 0
    for first, last in plan.given:
        dx[:, first:last] += came[:, position : position + last - first]
        position += last - first


def tail_bytes(
    shape: Sequence[int],
    itemsize: int,
    width: int,
    *,
    dilation: int = 1,
    rank: int,
    world: int,
    layout: str = "contiguous",
    seq_idx: bool = False,
) -> tuple[int, int]:
    """How many bytes one call sends from this rank to others, forward and backward.

    shape: of x on a rank, [B, L, D] or [B, L, n, D]; itemsize: of its type; width: W; seq_idx: whether it is given.
    With output_final_state an all-reduce of the final state comes on top, forward and backward.
    """
    here = plan(rank, world, layout, shape[1] // len(pieces_of(rank, world, layout)), (width - 1) * dilation)
    row = shape[0] * itemsize
    for size in shape[2:]:
        row *= size
    sent = sum(rows for other, rows in enumerate(here.give) if other != rank)
    back = sum(rows for other, rows in enumerate(here.take) if other != rank)
    return sent * (row + (4 * shape[0] if seq_idx else 0)), back * row


class Ranks(NamedTuple):
    group: dist.ProcessGroup
    rank: int
    world: int
    layout: str


def ranks(function: str, group: Any, layout: str) -> Ranks:
    check_word(function, "layout", layout, LAYOUTS)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{function}: group must be one dimension of the mesh, as mesh['context'], got {group}")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        kind = type(group).__name__
        raise TypeError(f"{function}: group must be a ProcessGroup that this rank is in or a DeviceMesh, got {kind}")
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group), layout)


def check_length(call: Call, ranks: Ranks) -> int:
    """The length of a piece, by what all ranks agreed on."""
    L = call.value("L")
    if L == 0:
        raise ValueError(f"{call.function}: every rank must have tokens")
    if ranks.layout == "zigzag" and L % 2:
        raise ValueError(f"{call.function}: a rank must have an even number of tokens with layout='zigzag', got {L}")
    return L // len(pieces_of(ranks.rank, ranks.world, ranks.layout))


def shard_sequence(x: Tensor, *, group: Any, layout: str = "contiguous", dim: int = 1) -> Tensor:
    """This rank's tokens of a whole sequence: of x along `dim`, which the pieces of the layout must divide."""
    here = ranks("shard_sequence", group, layout)
    pieces = pieces_of(here.rank, here.world, layout)
    count = here.world * len(pieces)
    if x.shape[dim] % count or not x.shape[dim]:
        raise ValueError(f"shard_sequence: {count} pieces do not divide a sequence of {x.shape[dim]} tokens: pad it")
    whole = x.unflatten(dim, (count, x.shape[dim] // count))
    dim %= x.dim()
    return torch.cat([whole.select(dim, piece) for piece in pieces], dim)
