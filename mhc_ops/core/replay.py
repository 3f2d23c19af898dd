"""Replay the launches of a call that is like an earlier one.

What a launcher does follows from the shapes, strides, types and alignments of its tensors and from its numbers. The
first call records which compiled kernels it started, with which grids and arguments, and what it allocated. A later
call that is alike allocates what is returned, takes one workspace for all the rest and starts the same kernels on its
own tensors: no checks, no configs, no binding and hashing of arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .launch import record, starter

ALIGNMENT = 512  # bytes, as torch's allocators give on a GPU
MOST_PLANS = 64  # of one function: a plan for each way in which its tensors are aligned

Tensors = Sequence[Tensor | None]
Function = Callable[[Tensors], Tensors]
# Without torch's dispatcher, a third of the time; what code that torch.compile writes allocates with.
_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


class Replay:
    """A function from tensors to tensors that does nothing but allocate and launch.

    Its tensors have the same shapes and types in every call; strides and alignments may differ."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.plans: dict[Any, Plan | None] = {}

    def __call__(self, tensors: Tensors) -> Tensors:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        key = tuple(
            None if tensor is None else (address & 15, tensor.is_contiguous() or tensor.stride())
            for tensor, address in zip(tensors, addresses)
        )
        if key not in self.plans:
            return self.first_call(tensors, key)
        plan = self.plans[key]
        return self.function(tensors) if plan is None else plan.run(tensors, addresses)

    def first_call(self, tensors: Tensors, key: Any) -> Tensors:
        with Recorder() as recorder:
            results = self.function(tensors)
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        self.plans[key] = recorder.plan(tensors, results)
        return results


class Plan:
    """The launches of a call: which kernels, and for each argument which of the call's tensors it points to.

    The tensors are numbered: those given, those made and returned, then the pieces of one workspace."""

    def __init__(self, launches: list[Any], given: Tensors, made: list[Tensor], results: Tensors):
        found = {result.data_ptr(): result for result in results if result is not None}
        there = {tensor.data_ptr() for tensor in given if tensor is not None}
        memory = {tensor.data_ptr(): tensor for tensor in made if tensor.numel()}
        returned = [result for address, result in found.items() if address not in there]
        scratch = [tensor for address, tensor in memory.items() if address not in found]
        tensors = [*given, *returned, *scratch]
        number = {tensor.data_ptr(): i for i, tensor in enumerate(tensors) if _has_memory(tensor)}
        if len(number) < sum(map(_has_memory, tensors)):
            raise LookupError("tensors that begin at the same address here need not do so in the next call")
        if not all(result.data_ptr() in memory for result in returned):
            raise LookupError("a result is neither given nor made by the call")
        self.launches = []
        for compiled, grid, arguments in launches:
            slots = [(i, number[a.data_ptr()]) for i, a in enumerate(arguments) if _has_memory(a)]
            constants = [0 if isinstance(a, Tensor) else a for a in arguments]
            self.launches.append((starter(compiled, grid), constants, slots))
        first = next(tensor for tensor in given if tensor is not None)
        self.device, self.index = first.device, first.get_device()  # index −1: a CPU
        self.made = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in returned]
        self.results = [None if result is None else number[result.data_ptr()] for result in results]
        self.offsets, self.size = [], 0
        for tensor in scratch:
            self.offsets.append(self.size)
            self.size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def run(self, given: Tensors, addresses: list[int]) -> Tensors:
        if self.index >= 0 and self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.index):
                return self.run_here(given, addresses)
        return self.run_here(given, addresses)

    def run_here(self, given: Tensors, addresses: list[int]) -> Tensors:
        made = [self.allocate(*layout) for layout in self.made]
        addresses += [tensor.data_ptr() for tensor in made]
        if self.size:
            workspace = self.allocate((self.size,), (1,), torch.uint8)
            base = workspace.data_ptr()
            addresses += [base + offset for offset in self.offsets]
        stream = torch._C._cuda_getCurrentRawStream(self.index) if self.index >= 0 else None
        for start, constants, slots in self.launches:
            arguments = constants.copy()
            for i, number in slots:
                arguments[i] = addresses[number]
            start(stream, arguments)
        tensors = [*given, *made]
        return [None if place is None else tensors[place] for place in self.results]

    def allocate(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.index >= 0 and _empty_cuda is not None:
            return _empty_cuda(shape, stride, dtype)
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)


def _has_memory(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.numel() > 0


class Recorder(TorchDispatchMode):
    """Sees what a call allocates and launches. What else torch does in it could not be replayed."""

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
            return Plan(self.launches, given, self.made, results)
        except LookupError:  # an argument is none of these tensors
            return None
