"""The names of the original guide; its snippets run with only the import line changed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.check import check_shapes
from .ops import mhc_backward, mhc_forward_pre

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def mhc_forward_pre_triton(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    """`mhc_forward_pre(..., backend="triton")`"""
    return mhc_forward_pre(*arguments, **options, backend="triton")


mhc_forward_pre_triton_optimized = mhc_forward_pre_triton  # one pair of kernels serves small and large batches


def mhc_backward_triton(*arguments: Any, **options: Any) -> Gradients:
    """`mhc_backward(..., backend="triton")`"""
    return mhc_backward(*arguments, **options, backend="triton")


def mhc_backward_manual(*arguments: Any, **options: Any) -> Gradients:
    """`mhc_backward(..., backend="reference")`: the gradient written out in torch."""
    return mhc_backward(*arguments, **options, backend="reference")


def mhc_forward_pre_tilelang(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    """`mhc_forward_pre(..., backend="tilelang")`"""
    return mhc_forward_pre(*arguments, **options, backend="tilelang")


def mhc_backward_tilelang(*arguments: Any, **options: Any) -> Gradients:
    """`mhc_backward(..., backend="tilelang")`"""
    return mhc_backward(*arguments, **options, backend="tilelang")


class _ForShape:
    """A function for x of one shape; making it compiles its kernels for x of this type."""

    function: Callable[..., Any] = staticmethod(mhc_forward_pre_tilelang)

    def __init__(
        self,
        B: int,
        S: int,
        n: int,
        D: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        self.shape = (B, S, n, D)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        M = n * n + 2 * n
        x = torch.zeros(1, n, D, dtype=dtype, device=device)
        phi, alpha, bias = (torch.zeros(shape, device=device) for shape in ((M, n * D), (3,), (M,)))
        for gamma in (None, torch.ones(n, D, device=device)):
            self.compile(x, phi, alpha, bias, gamma)

    def compile(self, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> None:
        mhc_forward_pre_tilelang(x, phi, alpha, bias, gamma=gamma)

    def __call__(self, x: Tensor, *arguments: Any, **options: Any) -> Any:
        check_shapes(type(self).__name__, x=(x, self.shape))
        return self.function(x, *arguments, **options)


class MHCForwardPreTileLang(_ForShape):
    """`op = MHCForwardPreTileLang(B, S, n, D)`, then `op(x, phi, alpha, bias)` as `mhc_forward_pre`."""


class MHCBackwardTileLang(_ForShape):
    """`op = MHCBackwardTileLang(B, S, n, D)`, then `op(x, phi, alpha, ...)` as `mhc_backward`."""

    function = staticmethod(mhc_backward_tilelang)

    def compile(self, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> None:
        maps = mhc_forward_pre_tilelang(x, phi, alpha, bias, outflag=True, gamma=gamma)
        h_in, h_post, h_res, inv_rms, h_mix, h_pre = maps
        mhc_backward_tilelang(x, phi, alpha, bias, inv_rms, h_mix, h_pre, h_post, h_in, h_post, h_res, gamma)
