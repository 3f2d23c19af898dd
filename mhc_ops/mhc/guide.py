"""The names of the original guide; its snippets run with only the import line changed."""

from typing import Any

from torch import Tensor

from .ops import mhc_backward, mhc_forward_pre


def mhc_forward_pre_triton(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    """`mhc_forward_pre(..., backend="triton")`"""
    return mhc_forward_pre(*arguments, **options, backend="triton")


mhc_forward_pre_triton_optimized = mhc_forward_pre_triton  # one pair of kernels serves small and large batches


def mhc_backward_triton(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """`mhc_backward(..., backend="triton")`"""
    return mhc_backward(*arguments, **options, backend="triton")


def mhc_backward_manual(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """`mhc_backward(..., backend="reference")`: the gradient written out in torch."""
    return mhc_backward(*arguments, **options, backend="reference")
