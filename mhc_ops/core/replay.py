"""Replay the launches of a call that is like an earlier one.

What a launcher does follows from the shapes, strides, types and alignments of its tensors and from its numbers. The
first call records which compiled kernels it started, with which grids and arguments, and which scratch memory it
allocated. A later call that is alike takes one workspace for all scratch memory and starts the same kernels on its own
tensors: no configs, no binding and hashing of arguments.

`fill` replays a launcher. `replayed` replays a whole public function where no gradient is needed: the checks of the
first call hold for the later ones, and outputs that the function does not return become scratch memory.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from . import backend as backends
from . import device
from .launch import record
from .modes import watched

P = ParamSpec("P")
R = TypeVar("R")
MOST_PLANS = 10_000  # token counts are part of what a plan is kept by
ALIGNMENT = 512  # bytes, as torch's allocators give on a GPU
CONSTANTS = frozenset((int, float, bool, str, type(None)))

_plans: dict[Any, "Plan | None"] = {}
_fills = threading.local()


class Plan:
    """The launches of a call: which kernels, and for each argument which of the call's tensors it points to.

    The tensors are numbered: those given, those returned, then the pieces of one workspace.
    """

    single = False  # the public function returns a tensor, not a tuple

    def __init__(self, launches: list[Any], given: list[Tensor], returned: list[Tensor], scratch: list[Tensor]):
        tensors = [*given, *returned, *scratch]
        number = {tensor.data_ptr(): i for i, tensor in enumerate(tensors)}
        if len(number) < len(tensors):
            raise LookupError("tensors that begin at the same address here need not do so in the next call")
        self.launches = []
        for compiled, grid, arguments in launches:
            slots = [(i, number[a.data_ptr()]) for i, a in enumerate(arguments) if isinstance(a, Tensor)]
            constants = [None if isinstance(a, Tensor) else a for a in arguments]
            self.launches.append((compiled[grid], constants, slots))
        self.returned = [(tensor.shape, tensor.dtype, tensor.device) for tensor in returned]
        self.offsets, self.size = [], 0
        for tensor in scratch:
            self.offsets.append(self.size)
            self.size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def allocate(self) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=on) for shape, dtype, on in self.returned]

    def run(self, given_and_returned: list[Tensor]) -> None:
        first = given_and_returned[0]
        addresses = [tensor.data_ptr() for tensor in given_and_returned]
        if self.size:
            workspace = torch.empty(self.size, dtype=torch.uint8, device=first.device)
            base = workspace.data_ptr()
            addresses += [base + offset for offset in self.offsets]
        stream = torch._C._cuda_getCurrentRawStream(first.get_device()) if first.is_cuda else None
        for start, constants, slots in self.launches:
            arguments = constants.copy()
            for i, number in slots:
                arguments[i] = addresses[number]
            start(*arguments, stream=stream)


def fill(
    name: str, backend: str, launcher: Callable[..., None], inputs: list[Any], outputs: tuple[Tensor, ...]
) -> None:
    """launcher(*inputs, *outputs), replayed where it can be."""
    fills = getattr(_fills, "list", None)
    key: list[Any] = [name, backend]
    tensors: list[Tensor] = []
    if backend != "triton" or backends._INTERPRETED or not describe(inputs, key, tensors):
        launcher(*inputs, *outputs)
        return
    words = tuple(key)
    if words in _plans and fills is None:
        plan = _plans[words]
        if plan is None:
            launcher(*inputs, *outputs)
        else:
            plan.run([*tensors, *outputs])
        return
    with Recorder() as recorder:
        launcher(*inputs, *outputs)
    keep(words, recorder.plan(tensors, list(outputs), recorder.scratch))
    if fills is not None:
        fills.append((recorder, outputs))


def replayed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a public function that calls one op, once, and returns some of its outputs."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if watched() or forward_ad._current_level >= 0:
            return function(*arguments, **options)
        key: list[Any] = [function, backends.chosen(), *options]
        tensors: list[Tensor] = []
        if not describe(arguments, key, tensors) or not describe(options.values(), key, tensors):
            return function(*arguments, **options)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return function(*arguments, **options)
        words = tuple(key)
        if words not in _plans:
            return first_call(function, arguments, options, tensors, words)
        plan = _plans[words]
        if plan is None:
            return function(*arguments, **options)
        outputs = plan.allocate()
        with device.current(tensors[0]):
            plan.run(tensors + outputs)
        return outputs[0] if plan.single else tuple(outputs)

    return call


def first_call(
    function: Callable[..., Any], arguments: Any, options: Any, tensors: list[Tensor], words: tuple[Any, ...]
) -> Any:
    fills: list[Any] = []
    _fills.list = fills
    try:
        result = function(*arguments, **options)
    finally:
        _fills.list = None
    plan = None
    returned = list(result) if isinstance(result, tuple) else [result]
    if len(fills) == 1:
        recorder, outputs = fills[0]
        kept = {id(tensor) for tensor in returned}
        if kept <= {id(tensor) for tensor in outputs}:
            scratch = [tensor for tensor in outputs if id(tensor) not in kept and tensor.numel()]
            plan = recorder.plan(tensors, returned, [*scratch, *recorder.scratch])
    if plan is not None:
        plan.single = not isinstance(result, tuple)
    keep(words, plan)
    return result


def describe(arguments: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> bool:
    """Append to the key all that a launcher may look at, and collect the tensors; False where there is more to it."""
    for argument in arguments:
        kind = argument.__class__
        if kind is Tensor or kind is Parameter:
            tensors.append(argument)
            try:
                layout = argument.is_contiguous() or argument.stride()
                key += argument.shape, layout, argument.dtype, argument.get_device(), argument.data_ptr() & 15
            except RuntimeError:  # sparse and nested tensors have no strides, shape or address
                return False
        elif kind in CONSTANTS:
            key += kind, argument
        else:
            return False
    return True


def keep(words: tuple[Any, ...], plan: Plan | None) -> None:
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    _plans[words] = plan


def forget() -> None:
    """Drop all plans; tests that change configs do."""
    _plans.clear()


class Recorder(TorchDispatchMode):
    """Sees what a launcher allocates and launches. What else torch does in it could not be replayed."""

    ALLOCATIONS = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty)

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Any] = []
        self.scratch: list[Tensor] = []
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
            self.scratch.append(result)
        elif func.overloadpacket is not torch.ops.aten.detach:  # torch.empty ends with one under a mode
            self.others.append(str(func))
        return result

    def plan(self, given: list[Tensor], returned: list[Tensor], scratch: list[Tensor]) -> Plan | None:
        if self.others or not self.launches:
            return None
        try:
            return Plan(self.launches, given, returned, scratch)
        except LookupError:  # an argument is none of these tensors
            return None
