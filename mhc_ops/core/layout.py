"""How kernels take a tensor: what they read and write is memory, and what torch knows of a tensor besides is lost."""

from collections.abc import Callable

import torch
from torch import Tensor

Layout = Callable[[Tensor], Tensor]  # returns the tensor itself where it is already so


def any_layout(tensor: Tensor) -> Tensor:
    """Of a tensor whose strides the op takes as they are."""
    return tensor


def resolved(tensor: Tensor) -> Tensor:
    """With its values in memory. torch negates by a bit (z.conj().imag) and has zeros without memory."""
    if torch.compiler.is_compiling() or not (tensor.is_neg() or tensor._is_zerotensor()):
        return tensor  # where torch calls the op, it resolves both before
    return tensor.clone()
