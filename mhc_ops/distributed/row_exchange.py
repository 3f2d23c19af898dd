"""Rows between ranks: which piece of a sequence a rank has, how it gets the rows before it and sends gradients back.

A sequence of world·L tokens lies on the ranks of a group in pieces of one length. "contiguous": rank r has piece r.
"zigzag": there are 2·world pieces, and rank r has pieces r and 2·world − 1 − r, in this order, which divides the work
of causal ring attention equally. A convolution needs the S rows before each piece, the piece's history. They are the
last rows of the piece before, or of several pieces shorter than S. Near the start of the sequence they are fewer.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional  # torch.compile may not drop these
from torch.distributed.device_mesh import DeviceMesh

from ..core.check import check_word
from .agree import LAYOUTS, Statement, agreed


class Routing(NamedTuple):
    """Which rows a rank has, gives to others and takes from them. Row numbers are those of its own x unless stated."""

    length: int  # of a piece
    reach: int  # S, the rows needed before a piece
    starts: tuple[int, ...]  # where its pieces start in the whole sequence
    histories: tuple[int, ...]  # length of the history of each piece
    given: tuple[tuple[int, int], ...]  # ranges of rows that other ranks need, in the order of the ranks
    give: tuple[int, ...]  # how many rows each rank is given
    taken: tuple[tuple[tuple[int, int], ...], ...]  # for each piece, the ranges of its history in the rows received
    message: tuple[int, ...]  # for each range in the order received, its index in `taken`, flattened
    take: tuple[int, ...]  # how many rows are taken from each rank

    @property
    def short(self) -> bool:
        """The call with the history takes all rows of a piece, so that no call without it is needed."""
        return self.length <= 2 * self.reach

    @property
    def window(self) -> int:
        """How many rows of a piece the backward computes together with the history."""
        return min(self.length, 2 * self.reach)

    def local(self, cu_seqlens: Tensor) -> Tensor:
        """The number of this rank's rows before each position of the whole sequence."""
        before = [(cu_seqlens - start).clamp(0, self.length) for start in self.starts]
        return sum(before[1:], before[0])


def pieces_of(rank: int, world: int, layout: str) -> tuple[int, ...]:
    return (rank,) if layout == "contiguous" else (rank, 2 * world - 1 - rank)


def routing(rank: int, world: int, layout: str, length: int, S: int) -> Routing:
    """The routing of a rank. length: of a piece   S: the rows needed before a piece"""
    return (_routing if torch.compiler.is_compiling() else _kept_routing)(rank, world, layout, length, S)


def _routing(rank: int, world: int, layout: str, length: int, S: int) -> Routing:
    mine = pieces_of(rank, world, layout)
    given: list[tuple[int, int]] = []
    give, take = [], []
    # for each piece: the piece a range comes from, its number in the message, and its rows there
    taken: list[list[tuple[int, int, tuple[int, int]]]] = [[] for _ in mine]
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
    return Routing(
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


_kept_routing = lru_cache(maxsize=1024)(_routing)


def _needed(sources: Sequence[int], targets: Sequence[int], length: int, S: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (i, j, first, rows): `rows` rows of source i, from its row `first`, are in the history of target j."""
    for j, target in enumerate(targets):
        for i, source in enumerate(sources):
            first = source * length
            begin, end = max(first, target * length - S), min(first + length, target * length)
            if begin < end:
                yield i, j, begin - first, end - begin


class Exchange:
    """Rows on their way: the constructor sends them, `result` waits. Gradients go back with give and take swapped."""

    def __init__(self, rows: Tensor, give: Sequence[int], take: Sequence[int], group: dist.ProcessGroup):
        # One collective with a share for each rank, most of them empty. For NCCL that is a send and a receive, and
        # torch.compile supports it, unlike isend and irecv.
        self.rows = rows.contiguous()
        self.pending = torch.ops._c10d_functional.all_to_all_single(self.rows, list(take), list(give), group.group_name)

    def result(self) -> Tensor:
        return functional.wait_tensor(self.pending)


def all_sum(share: Tensor, group: dist.ProcessGroup) -> Tensor:
    pending = torch.ops._c10d_functional.all_reduce(share.contiguous(), "sum", group.group_name)
    return functional.wait_tensor(pending)


def send_tails(x: Tensor, routing: Routing, group: dist.ProcessGroup, none: Tensor) -> Exchange:
    """Send the rows of x [B, rows, ...] that others need. none: the empty tensor of `agreed`"""
    rows = torch.cat([none, *[x[:, first:last] for first, last in routing.given]], 1)
    return Exchange(rows.transpose(0, 1), routing.give, routing.take, group)


def histories(exchange: Exchange, routing: Routing) -> list[Tensor]:
    """The rows before each piece, [B, rows, ...]"""
    taken = exchange.result().transpose(0, 1)
    return [torch.cat([taken[:, :0], *[taken[:, first:last] for first, last in parts]], 1) for parts in routing.taken]


def send_back(dhistories: Sequence[Tensor], routing: Routing, statement: Statement) -> Exchange:
    """Send the gradients of histories to the ranks that gave the rows. statement: about the backward"""
    parts: list[Tensor] = []
    for ranges, dhistory in zip(routing.taken, dhistories):
        lengths = [last - first for first, last in ranges]
        parts += dhistory.split(lengths, 1) if lengths else ()
    rows = [parts[i] for i in routing.message]
    rows.insert(0, agreed(statement, dhistories[0]))
    return Exchange(torch.cat(rows, 1).transpose(0, 1), routing.take, routing.give, statement.group)


def add_tails(dx: Tensor, exchange: Exchange, routing: Routing) -> None:
    """Add the gradients that came back to dx of the rows that were given, in place."""
    came = exchange.result().transpose(0, 1)
    position = 0
    for first, last in routing.given:
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
    """The bytes that one call sends from this rank to others: (forward, backward).

    shape: of x on a rank, [B, L, D] or [B, L, n, D]   itemsize: of its type   width: W   seq_idx: whether it is given
    Not counted: with output_final_state, an all-reduce of the final state in the forward and in the backward.
    """
    here = routing(rank, world, layout, shape[1] // len(pieces_of(rank, world, layout)), (width - 1) * dilation)
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


def check_length(statement: Statement, ranks: Ranks) -> int:
    """The length of a piece; an error if the L that all ranks agreed on cannot be divided."""
    L = statement.value("L")
    if L == 0:
        raise ValueError(f"{statement.function}: every rank must have tokens")
    if ranks.layout == "zigzag" and L % 2:
        raise ValueError(
            f"{statement.function}: a rank must have an even number of tokens with layout='zigzag', got {L}"
        )
    return L // len(pieces_of(ranks.rank, ranks.world, ranks.layout))


def shard_sequence(x: Tensor, *, group: Any, layout: str = "contiguous", dim: int = 1) -> Tensor:
    """This rank's tokens of a whole sequence x. The number of pieces must divide its length along `dim`."""
    here = ranks("shard_sequence", group, layout)
    pieces = pieces_of(here.rank, here.world, layout)
    count = here.world * len(pieces)
    if x.shape[dim] % count or not x.shape[dim]:
        raise ValueError(f"shard_sequence: {count} pieces do not divide a sequence of {x.shape[dim]} tokens: pad it")
    whole = x.unflatten(dim, (count, x.shape[dim] // count))
    dim %= x.dim()
    return torch.cat([whole.select(dim, piece) for piece in pieces], dim)
