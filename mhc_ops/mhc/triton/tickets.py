"""Kernels whose last program to arrive goes on, or all of them once it has: each draws a ticket, a count in memory,
when it has stored its part.

Counts are zero when a kernel starts, and the program that drew the last ticket sets its count back. Two launches that
may run at the same time must not share counts: every stream has a set of its own, and so has every launch that a CUDA
graph captures, since that may be replayed on any stream. Sets come out of a reserve, so that nothing is allocated in a
capture.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...core import private
from ...core.launch import starter

SET = 64  # counts of a launch, at most
RESERVED = 4096  # sets that are allocated at once: 1 MB

_of_streams: dict[tuple[int, Any], Tensor] = {}
_reserves: dict[int, list[Tensor]] = {}


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
        return _taken(index)
    found = _of_streams.get((index, stream))
    if found is None:
        found = _of_streams[index, stream] = _taken(index)
    return found


def _taken(index: int) -> Tensor:
    """A set for one user. It is never given back: a graph may be replayed at any time."""
    reserve = _reserves.setdefault(index, [])
    if not reserve:
        reserve += _zeros(index)
    return reserve.pop()


def _zeros(index: int) -> list[Tensor]:
    with _disable_current_modes():  # modes that record calls must not see this
        if index < 0:
            return [torch.zeros(SET, dtype=torch.int32)]
        if private.is_capturing():  # then the graph itself sets them to zero before the kernel runs
            return [torch.zeros(SET, dtype=torch.int32, device=index)]
    # By a thread of its own: what this one allocates may belong to a pool, as in the warm-up of torch.compile's CUDA
    # graphs, which want all of it back.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_reserved, index).result()


def _reserved(index: int) -> list[Tensor]:
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
    with _disable_current_modes():
        return torch.empty(SET, dtype=torch.int32, device=device)


class Compiled:
    """What `launch` records."""

    def __init__(self, kernel: Any, index: int) -> None:
        self.kernel, self.index = kernel, index

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        start, index = starter(self.kernel, grid), self.index

        def run(*arguments: Any, stream: Any) -> None:
            start(stream, (tickets(index, stream).data_ptr(), *arguments))

        return run
