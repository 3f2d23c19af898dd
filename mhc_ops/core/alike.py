"""Tensors that are like earlier ones: what was found for those holds for them.

The guards of torch.compile compare them in C++, in a third of the time of a key in Python: class, shape, strides,
type, device, whether a gradient is needed, and the bits by which torch tells kinds of tensors apart (negated,
inference, within a transform). On tensors without sizes or strides the guards abort the process; they never get one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import private

MOST = 16  # types, strides, with and without gradients; guards are tried one by one


MOST_KEYS = 10_000  # token counts are part of them

calls: dict[Any, "Alike"] = {}  # by what else than tensors a call is told apart by


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


def is_readable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def keep(key: Any, tensors: Sequence[Tensor], found: Any) -> None:
    """In `calls`, for tensors like these."""
    if not private.keeps_calls:
        return
    if len(calls) >= MOST_KEYS:
        calls.clear()
    calls.setdefault(key, Alike()).add(tensors, found)
