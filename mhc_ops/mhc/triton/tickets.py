"""Kernels whose last program to arrive goes on, or all of them once it has: each draws a ticket, a count in memory,
when it has stored its part.

Counts are zero when a kernel starts, and the program that drew the last ticket sets its count back. Two launches that
may run at the same time must not share counts. Launches of one stream follow one another, so every stream has a set.
A captured graph may be replayed on any stream, so it has sets of its own, one for each stream that it was captured on:
launches that were captured on one stream follow one another in the graph, and replays of a graph follow one another.

Sets come out of a reserve, so that nothing is allocated in a capture. A graph that is gone gives its sets back. One of
its replays may still run then, so they are used again only after the GPU has been waited for: when the reserve is empty
and as many have come back as a reserve has. Waiting would end a capture of another thread, so it must be rare. Where a
capture finds it empty, its launches have counts in the graph's own memory, which the graph zeroes. A torch that cannot
name the graph (before 2.13) takes a set for each captured launch and keeps it.
"""

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import private
from ...core.launch import Start, starter

SET = 64  # counts of a launch, at most
RESERVED = 4096  # sets that are allocated at once: 1 MB

Sets = dict[tuple[int, Any], Tensor]  # by GPU and stream

_of_streams: Sets = {}
_of_graphs: weakref.WeakKeyDictionary[Any, Sets] = weakref.WeakKeyDictionary()
_reserves: dict[int, list[Tensor]] = {}
_returned: dict[int, deque[Tensor]] = {}  # of graphs that are gone; other threads may add while one takes
_short: set[int] = set()  # GPUs whose reserve a capture has found empty


# How many programs have drawn, this one included. What it stored happens before that: all its threads have stored at
# the barrier, and the ticket releases what the thread that draws it has seen. Who finds that all have drawn acquires
# what they released, and its threads read after that, as they wait for the ticket at a barrier.
@triton.jit
def draw(count_ptr):
    tl.debug_barrier()
    return tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") + 1


def tickets(index: int, stream: Any) -> Tensor:
    """A set of counts for a launch on this stream of the GPU `index`, the current one; −1 is the CPU."""
    if index >= 0 and private.is_capturing():
        return _of_graph(index, stream)
    if index in _short:
        _short.discard(index)
        _reserves.setdefault(index, []).extend(_filled(index))
    found = _of_streams.get((index, stream))
    if found is None:
        found = _of_streams[index, stream] = _taken(index)
    return found


def _of_graph(index: int, stream: Any) -> Tensor:
    graph = private.capturing_graph()
    sets = _of_graphs.get(graph) if graph is not None else {}
    if sets is None:
        sets = _of_graphs[graph] = {}
        weakref.finalize(graph, _give_back, sets).atexit = False
    found = sets.get((index, stream))
    if found is not None:
        return found
    if not _reserves.get(index):
        if graph is not None:
            _short.add(index)
        return _in_graph(index)
    found = sets[index, stream] = _taken(index)
    return found


def _give_back(sets: Sets) -> None:
    """Called by any thread, also in a capture: it may only note them."""
    for (index, _), counts in sets.items():
        _returned.setdefault(index, deque()).append(counts)


def _taken(index: int) -> Tensor:
    """A set for one user."""
    reserve = _reserves.setdefault(index, [])
    if not reserve:
        reserve += _filled(index)
    return reserve.pop()


def _in_graph(index: int) -> Tensor:
    """Counts that live as long as their launch. The graph sets them to zero before the kernel runs."""
    with private.disable_modes():
        return torch.zeros(SET, dtype=torch.int32, device=index)


def _filled(index: int) -> list[Tensor]:
    if index < 0:
        with private.disable_modes():  # modes that record calls must not see this
            return [torch.zeros(SET, dtype=torch.int32)]
    # By a thread of its own: what this one allocates may belong to a pool, as in the warm-up of torch.compile's CUDA
    # graphs, which want all of it back.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_reserved, index).result()


def _reserved(index: int) -> list[Tensor]:
    returned = _returned.get(index, deque())
    if len(returned) >= RESERVED:
        sets = [returned.popleft() for _ in range(RESERVED)]
        torch.cuda.synchronize(index)  # a replay of a graph that is gone may run until now
        for counts in sets:
            counts.zero_()
    else:
        sets = list(torch.zeros(RESERVED, SET, dtype=torch.int32, device=index))
    torch.cuda.current_stream(index).synchronize()  # other streams will use them
    return sets


class Ticketed:
    """A kernel as `launch` takes it, without its first argument, tickets_ptr: that is found anew at every start, also
    when a call is replayed on another stream."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.__name__ = kernel.__name__
        first, *self.arg_names = kernel.arg_names
        assert first == "tickets_ptr"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*values: Any, **options: Any) -> Any:
            device = next(value.device for value in values if isinstance(value, Tensor))
            if device.type == "meta":
                return self.kernel[grid](like_tickets(device), *values, **options)
            index = -1 if device.type == "cpu" else device.index
            stream = private.raw_stream(index) if index >= 0 else None
            return Compiled(self.kernel[grid](tickets(index, stream), *values, **options), index)

        return run

    def warmup(self, *values: Any, **options: Any) -> Any:
        device = next(value.device for value in values if isinstance(value, Tensor))
        return self.kernel.warmup(like_tickets(device), *values, **options)


def like_tickets(device: torch.device) -> Tensor:
    """To compile for."""
    with private.disable_modes():
        return torch.empty(SET, dtype=torch.int32, device=device)


class Compiled:
    """What `launch` records."""

    def __init__(self, kernel: Any, index: int) -> None:
        self.kernel, self.index = kernel, index

    def starter(self, grid: tuple[int, int, int]) -> Start:
        start, index = starter(self.kernel, grid), self.index

        def run(stream: Any, arguments: Any) -> None:
            counts = tickets(index, stream)  # held until it is launched: it may be the graph's own memory
            start(stream, (counts.data_ptr(), *arguments))

        return run
