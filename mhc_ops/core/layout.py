"""How kernels take a tensor. They see its memory alone, not torch's bits of it."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import private

Layout = Callable[[Tensor], Tensor]  # returns the tensor itself where it is already so


def any_layout(tensor: Tensor) -> Tensor:
    """The op takes the tensor's strides as they are."""
    return tensor


def resolved(tensor: Tensor) -> Tensor:
    """The tensor with its values in memory. torch negates by a bit (z.conj().imag) and has zeros without memory."""
    if torch.compiler.is_compiling() or not (tensor.is_neg() or private.is_zerotensor(tensor)):
        return tensor  # torch resolves both before it calls the op
    return tensor.clone()
