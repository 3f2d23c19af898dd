"""Tensors that are like earlier ones: what was found for those holds for them.

The guards of torch.compile compare them in C++, in a third of the time of a key in Python: class, shape, strides,
type, device, whether a gradient is needed, and the bits by which torch tells kinds of tensors apart (negated,
inference, within a transform). On tensors without sizes or strides the guards abort the process; they never get one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import private

MOST = 16  # types, strides, with and without gradients; guards are tried one by one


MOST_KEYS = 10_000  # token counts are part of them

calls: dict[Any, "Alike"] = {}  # by what else than tensors a call is told apart by


CONSTANTS = frozenset((int, float, bool, str, type(None)))
KINDS = Tensor, Parameter, CONSTANTS, torch.strided


class Alike(list[tuple[Any, Any]]):
    """Guards of tensors, and what was found for them. The caller has checked that every tensor `is_readable`."""

    def find(self, tensors: Sequence[Tensor]) -> Any:
        """What was found for tensors like these, or None."""
        for guards, found in self:
            if guards.check(*tensors):
                return found
        return None

    def add(self, tensors: Sequence[Tensor], found: Any) -> None:
        if len(self) >= MOST:
            self.clear()
        self.append((private.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None), found))


def find_call(calls: dict[Any, Alike], prepare: Any, chosen: Any, arguments: dict[str, Any], kinds: Any) -> Any:
    """Returns what is kept for this call or None, its tensors, and the key of everything else. Returns None alone if
    such calls are never kept. native.c does the same."""
    words: list[Any] = [prepare, chosen]
    tensors: list[Any] = []
    for name, argument in arguments.items():
        kind = argument.__class__
        if kind is Tensor or kind is Parameter:
            if argument.layout is not torch.strided or argument.is_nested:  # as is_readable
                return None  # guards would abort the process
            words.append(name)
            tensors.append(argument)
        elif kind in CONSTANTS:
            words += name, kind, argument
        else:  # unknown type
            return None
    if tensors:
        words.append(tensors[0].numel())  # token counts differ most; few calls are left for the guards
    key = tuple(words)
    for guards, found in calls.get(key, ()):
        if guards.check(*tensors):
            return found, tensors, key
    return None, tensors, key


def find_op(calls: dict[Any, Alike], op: Any, arguments: Sequence[Any], are_tensors: Sequence[bool]) -> Any:
    """What is kept for a call of the op like this one, or None; its tensors; and the key of what else it is told apart
    by. native.c does the same."""
    tensors = [argument for argument, is_tensor in zip(arguments, are_tensors) if is_tensor and argument is not None]
    words = [argument is None if is_tensor else argument for argument, is_tensor in zip(arguments, are_tensors)]
    key = (op, *words, *[tensor.numel() for tensor in tensors[:1]])
    return next((found for guards, found in calls.get(key, ()) if guards.check(*tensors)), None), tensors, key


def find_like(alike: Alike, kept: Sequence[Tensor], cotangents: Sequence[Tensor | None], strided: Any) -> Any:
    """What was found for a backward like this one, or None; and its tensors, the cotangents contiguous. None alone if
    guards cannot look at a kept tensor. native.c does the same."""
    for tensor in kept:
        if tensor.layout is not torch.strided or tensor.is_nested:  # as is_readable
            return None
    tensors = [*kept, *[c if c is None or c.is_contiguous() else c.contiguous() for c in cotangents]]
    given = [tensor for tensor in tensors if tensor is not None]
    for guards, found in alike:
        if guards.check(*given):
            return found, tensors
    return None, tensors


def is_readable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def keep(key: Any, tensors: Sequence[Tensor], found: Any) -> None:
    """Keeps `found` in `calls` for tensors like these."""
    if not private.keeps_calls:
        return
    if len(calls) >= MOST_KEYS:
        calls.clear()
    calls.setdefault(key, Alike()).add(tensors, found)
