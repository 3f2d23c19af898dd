"""Replay the launches of a call that is like an earlier one.

What a launcher does follows from the shapes, strides, types and alignments of its tensors and from its numbers. The
first call records the compiled kernels, grids and arguments that it started and the tensors that it allocated. A like
call allocates its results and one workspace, and starts the same kernels on its own tensors. It checks nothing, asks no
config, and neither binds nor hashes arguments.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import count
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import native, private
from .launch import Start, record, starter

ALIGNMENT = 512  # bytes, as torch's allocators align on a GPU
MOST_PLANS = 64  # per function: one for each way in which its tensors are aligned

Tensors = Sequence[Tensor | None]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides
Function = Callable[[Tensors], Tensors]


def _empty(device: torch.device | str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


# Skips torch's dispatcher and takes a third of the time. Code that torch.compile generates allocates with it too.
_empty_cuda = private.empty_strided_cuda or partial(_empty, "cuda")


class Replay:
    """A function from tensors to tensors that does nothing but allocate and launch.

    Its tensors have the same shapes, strides and types in every call. Alignments may differ, and some may be None.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.plans: dict[Any, Any] = {}  # by which tensors are there and how they are aligned: a Plan, or None

    def __call__(self, tensors: Tensors) -> Tensors:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        key: Any = None  # the usual one: all are there and aligned
        if 0 in addresses or reduce(or_, addresses) & 15:
            key = tuple([address & 15 if address else None for address in addresses])
        plan = self.plans.get(key, self)
        if plan is self:
            return self.first_call(tensors, addresses, key)
        return self.function(tensors) if plan is None else plan.run(tensors, addresses)

    def first_call(self, tensors: Tensors, addresses: list[int], key: Any) -> Tensors:
        there = [address for address in addresses if address]
        if len(set(there)) < len(there):  # tensors share memory here; in the next call they may not
            return self.function(tensors)
        with Recorder() as recorder:
            results = self.function(tensors)
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        self.plans[key] = recorder.plan(tensors, results)
        return results


class ReplayInC(partial[Tensors]):
    """A Replay that native.c calls."""

    plans = property(lambda self: self.args[0])


def replayed(function: Function) -> Function:
    """A Replay of the function, in C if it can be compiled here."""
    replay, code = Replay(function), native.load()
    return replay if code is None else ReplayInC(code.replay, replay.plans, function, replay.first_call)


class Plan(NamedTuple):
    """The launches of a call: which kernels, and where each argument comes from. native.c reads the fields by place.

    One list holds the addresses of the given tensors, of the returned ones and of the scratch tensors within the
    workspace, then the numbers, which are the same in every call. A launch selects its arguments from that list."""

    given: int  # how many tensors
    device: int | None  # None: a CPU
    empty: Callable[..., Tensor]
    layouts: tuple[Layout, ...]  # of the tensors that are allocated
    workspace: Layout
    offsets: tuple[int, ...]  # of the scratch tensors in the workspace
    numbers: tuple[Any, ...]
    launches: tuple[tuple[Start, tuple[int, ...]], ...]  # places of the arguments
    results: tuple[int, ...] | None  # places among the given tensors, then the allocated; −1: None. None: all of these
    current_device: Callable[[], int]
    raw_stream: Callable[[int], int]

    def run(self, given: Tensors, addresses: list[Any]) -> Tensors:
        stream = None
        if self.device is not None:
            if self.device != self.current_device():
                with torch.cuda.device(self.device):
                    return self.run(given, addresses)
            stream = self.raw_stream(self.device)
        made = [self.empty(*layout) for layout in self.layouts]
        addresses += [tensor.data_ptr() for tensor in made]
        if self.offsets:
            workspace = self.empty(*self.workspace)
            base = workspace.data_ptr()
            addresses += [base + offset for offset in self.offsets]
        addresses += self.numbers
        for start, places in self.launches:
            start(stream, tuple(map(addresses.__getitem__, places)))
        if self.results is None:
            return made
        return list(map([*given, *made, None].__getitem__, self.results))  # place −1 is None


def plan(recorded: list[Any], given: Tensors, made: list[Tensor], results: Tensors) -> Plan:
    """Makes a plan of recorded launches. Raises LookupError if an argument belongs to no tensor of the call."""
    wanted = [result for result in results if result is not None]
    found = {result.data_ptr(): result for result in wanted if result.numel()}
    there = {tensor.data_ptr() for tensor in given if tensor is not None}
    memory = {tensor.data_ptr(): tensor for tensor in made if tensor.numel()}
    returned = [result for address, result in found.items() if address not in there]
    empty = [result for result in wanted if not result.numel()]
    scratch = [tensor for address, tensor in memory.items() if address not in found]
    tensors = [*given, *returned, *empty, *scratch]
    number = {t.data_ptr(): i for i, t in enumerate(tensors) if t is not None and t.numel()}
    if len(number) < sum(map(_has_memory, tensors)):
        raise LookupError("two tensors begin at the same address")
    if not all(result.data_ptr() in memory for result in returned):
        raise LookupError("a result is neither given nor made by the call")
    launches: list[tuple[Start, tuple[int, ...]]] = []
    numbers: list[Any] = []
    for compiled, grid, arguments in recorded:
        places: list[int] = []
        described: dict[int, dict[str, Any]] = {}
        for argument in arguments:
            if isinstance(getattr(argument, "base", None), Tensor):  # a descriptor, for copies block by block
                described[len(places)] = {name: value for name, value in vars(argument).items() if name != "base"}
                argument = argument.base
            if _has_memory(argument):
                places.append(number[argument.data_ptr()])
            else:
                places.append(len(tensors) + len(numbers))
                numbers.append(0 if isinstance(argument, Tensor) else argument)
        launches.append((starter(compiled, grid, described), tuple(places)))
    first = next(tensor for tensor in given if tensor is not None)
    index = first.get_device()  # −1: a CPU
    next_empty = count(len(given) + len(returned))
    places_of = [
        -1 if result is None else number[result.data_ptr()] if result.numel() else next(next_empty)
        for result in results
    ]
    offsets, size = [], 0
    for tensor in scratch:
        offsets.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    layouts = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in (*returned, *empty))
    every = list(range(len(given), len(given) + len(layouts)))
    return Plan(
        given=len(given),
        device=index if index >= 0 else None,
        empty=_empty_cuda if index >= 0 else partial(_empty, first.device),
        layouts=layouts,
        workspace=((size,), (1,), torch.uint8),
        offsets=tuple(offsets),
        numbers=tuple(numbers),
        launches=tuple(launches),
        results=None if places_of == every else tuple(places_of),
        current_device=private.current_device,
        raw_stream=private.raw_stream,
    )


def getter(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Selects these places of a sequence. itemgetter returns a single one bare, so that is a slice."""
    if not places:
        return lambda values: ()
    (place, *others) = places
    return itemgetter(*places) if others else itemgetter(slice(place, place + 1 or None))


def _has_memory(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.numel() > 0


class Recorder(private.TorchDispatchMode or object):  # type: ignore[misc]
    """Sees what a call allocates and launches. A call in which torch does anything else cannot be replayed."""

    ALLOCATIONS = tuple(getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "new_empty", "empty_strided"))

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Any] = []
        self.made: list[Tensor] = []
        self.others: list[str] = []

    def __enter__(self) -> Any:
        self.before = record(self.launches)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        record(self.before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in self.ALLOCATIONS:
            self.made.append(result)
        elif not func.is_view:
            self.others.append(str(func))
        return result

    def plan(self, given: Tensors, results: Tensors) -> Plan | None:
        if self.others or not self.launches:
            return None
        try:
            return plan(self.launches, given, self.made, results)
        except LookupError:  # an argument belongs to no tensor of the call
            return None
