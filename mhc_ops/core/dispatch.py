"""How torch's dispatcher calls an op: from code that torch.compile wrote, under modes and transforms, on DTensors.

A call like an earlier one starts the same kernels, as `call.run` does for eager calls. torch.library.custom_op passes
the arguments of a call through the dispatcher twice and checks what comes back. Where no gradient is needed, and no
mode, transform or wrapper lies between autograd and the device, `Dispatched` takes the arguments the first time: code
that torch.compile wrote calls ops so. All other calls take torch's way.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import native, private
from .alike import calls, find_op, is_readable, keep

Again = Callable[[list[Tensor]], Any]
DEVICES = ("CPU", "CUDA")  # torch calls ROCm devices CUDA


class Dispatched:
    """name, schema: of the custom op   parameters: those of the schema, by name: whether it is a tensor
    mutates: the parameters that are written to   prepare: makes of all arguments a function that does the same for
    tensors like theirs"""

    def __init__(
        self,
        name: str,
        schema: str,
        parameters: dict[str, bool],
        mutates: tuple[str, ...],
        prepare: Callable[[Sequence[Any]], Again],
    ):
        self.prepare = prepare
        self.op = torch.library.custom_op(name, self.any_tensors, mutates_args=mutates, schema=schema)
        self.formula = SimpleNamespace(_backward_fn=None, _setup_context_fn=None)
        self.are_tensors = tuple(parameters.values())
        self.written = [place for place, parameter in enumerate(parameters) if parameter in mutates]
        namespace, name = name.split("::")
        self.overload = getattr(getattr(torch.ops, namespace), name).default
        slowly = private.autograd_kernel(self.overload, self.formula)
        if slowly is None:
            return
        self.library = torch.library.Library(namespace, "FRAGMENT")  # registers for as long as it lives
        kernel = private.disable_dynamo(partial(self.of_autograd, slowly))
        for device in DEVICES:  # custom_op has registered torch's kernel for the autograd of all others
            self.library.impl(name, kernel, f"Autograd{device}", with_keyset=True)

    def differentiate(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        self.op.register_autograd(backward, setup_context=setup_context)
        self.formula._backward_fn, self.formula._setup_context_fn = backward, setup_context

    def of_autograd(self, slowly: Callable[..., Any], keys: Any, *arguments: Any) -> Any:
        """The kernel of autograd's key."""
        if (torch.is_grad_enabled() and private.any_requires_grad(*arguments)) or not _is_plain(keys):
            return slowly(keys, *arguments)
        if self.written:
            changed = [arguments[place] for place in self.written]
            torch.autograd.graph.increment_version([tensor for tensor in changed if tensor is not None])
        return self.plain_tensors(*arguments)

    def any_tensors(self, *arguments: Any) -> Any:
        """The kernel of all devices."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        for tensor in tensors:
            if tensor.__class__ not in (Tensor, Parameter) or not is_readable(tensor):
                return self.prepare(arguments)(tensors)
        return self.plain_tensors(*arguments)

    def plain_tensors(self, *arguments: Any) -> Any:
        find = find_op if native.code is None else native.code.find_op
        again, tensors, key = find(calls, self, arguments, self.are_tensors)
        if again is None:
            again = self.prepare(arguments)
            keep(key, tensors, again)
        return again(tensors)


_plain: dict[int, bool] = {}  # by the keys of a call


def _is_plain(keys: Any) -> bool:
    """Whether the dispatcher would call the device's kernel next, on dense tensors."""
    number = keys.raw_repr()
    if number not in _plain:
        _plain[number] = (keys & private.beneath_autograd).highestPriorityTypeId().name in DEVICES
    return _plain[number]
