"""The names of the original guide: its snippets run with only the import line changed to `from mhc_ops import …`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import torch
from torch import Tensor

from .core.check import check_shapes
from .mhc.modules import MHCBlock
from .mhc.ops import Six, Three, mhc_backward, mhc_forward_pre
from .mhc.options import DEFAULTS

__all__ = [
    "MHCBackwardTileLang",
    "MHCBlock",
    "MHCForwardPreTileLang",
    "mhc_backward",
    "mhc_backward_manual",
    "mhc_backward_tilelang",
    "mhc_backward_triton",
    "mhc_forward_pre",
    "mhc_forward_pre_tilelang",
    "mhc_forward_pre_triton",
    "mhc_forward_pre_triton_optimized",
]

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class ForwardPre(Protocol):
    """`mhc_forward_pre` without its backend."""

    @overload
    def __call__(
        self,
        x: Tensor,
        phi: Tensor,
        alpha: Tensor,
        bias: Tensor,
        outflag: Literal[False] = False,
        norm_eps: float = DEFAULTS.norm_eps,
        hc_eps: float = DEFAULTS.hc_eps,
        *,
        gamma: Tensor | None = None,
    ) -> Three: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        phi: Tensor,
        alpha: Tensor,
        bias: Tensor,
        outflag: Literal[True],
        norm_eps: float = DEFAULTS.norm_eps,
        hc_eps: float = DEFAULTS.hc_eps,
        *,
        gamma: Tensor | None = None,
    ) -> Six: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        phi: Tensor,
        alpha: Tensor,
        bias: Tensor,
        outflag: bool,
        norm_eps: float = DEFAULTS.norm_eps,
        hc_eps: float = DEFAULTS.hc_eps,
        *,
        gamma: Tensor | None = None,
    ) -> Three | Six: ...


class Backward(Protocol):
    """`mhc_backward` without its backend."""

    def __call__(
        self,
        x: Tensor,
        phi: Tensor,
        alpha: Tensor,
        bias: Tensor,
        inv_rms: Tensor,
        h_mix: Tensor,
        h_pre: Tensor | None,
        h_post: Tensor | None,
        dh_in: Tensor | None,
        dh_post: Tensor | None,
        dh_res: Tensor | None,
        gamma: Tensor | None = None,
        norm_eps: float = DEFAULTS.norm_eps,
        hc_eps: float = DEFAULTS.hc_eps,
    ) -> Gradients: ...


def _on(backend: str, function: Callable[..., Any], name: str) -> Any:
    """Bind the backend and name the result. The assignments below give its type."""

    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options, backend=backend)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f'`{function.__name__}(..., backend="{backend}")`'
    return call


mhc_forward_pre_triton: ForwardPre = _on("triton", mhc_forward_pre, "mhc_forward_pre_triton")
mhc_forward_pre_triton_optimized = mhc_forward_pre_triton  # one pair of kernels serves small and large batches
mhc_forward_pre_tilelang: ForwardPre = _on("tilelang", mhc_forward_pre, "mhc_forward_pre_tilelang")
mhc_backward_triton: Backward = _on("triton", mhc_backward, "mhc_backward_triton")
mhc_backward_tilelang: Backward = _on("tilelang", mhc_backward, "mhc_backward_tilelang")
# The gradient written out in torch.
mhc_backward_manual: Backward = _on("reference", mhc_backward, "mhc_backward_manual")


class _ForShape:
    """A function for x of one shape. The constructor compiles its kernels for x of this type."""

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

    if TYPE_CHECKING:
        __call__: ForwardPre


class MHCBackwardTileLang(_ForShape):
    """`op = MHCBackwardTileLang(B, S, n, D)`, then `op(x, phi, alpha, ...)` as `mhc_backward`."""

    function = staticmethod(mhc_backward_tilelang)
    if TYPE_CHECKING:
        __call__: Backward

    def compile(self, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> None:
        maps = mhc_forward_pre_tilelang(x, phi, alpha, bias, outflag=True, gamma=gamma)
        h_in, h_post, h_res, inv_rms, h_mix, _ = maps
        mhc_backward_tilelang(
            x=x,
            phi=phi,
            alpha=alpha,
            bias=bias,
            inv_rms=inv_rms,
            h_mix=h_mix,
            h_pre=None,
            h_post=None,
            dh_in=h_in,  # only the shapes of the cotangents matter
            dh_post=h_post,
            dh_res=h_res,
            gamma=gamma,
        )
