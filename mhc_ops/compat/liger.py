"""mHC of Liger-Kernel (0.8): `LigerMHC` and the functions `liger_mhc_*`, on the operators of this library.

    from mhc_ops.compat.liger import LigerMHC

The same as in Liger: arguments and defaults (pre_eps 0, phi in fp16); names, shapes and types of parameters (phi is
[nD, n² + 2n], the transpose of ours), so that a state dict fits both; maps in fp32; the mix h_res[new, old]; h_in in
the type of the layer's parameters; fp32 streams only with allow_fp32=True.

Different:

- The projection is exact to fp32 for every type of phi. Gradients have the same bits in every run; Liger adds up dphi
  with atomics.
- n is 1 to 8 (in Liger a power of two), D is any, CPU tensors work.
- `LigerMHC` and `liger_mhc_forward` are one operation around the layer (`mhc_ops.mhc_layer`): the two parts of dx are
  added before they are rounded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.check import check_tensors, name_of
from ..core.maps import HasMaps
from ..mhc import ops


def liger_mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The maps: h_pre [..., n], h_post [..., n], h_res [..., n, n] for h_res[new, old]; `mhc_ops.mhc_maps`.

    x: [..., n, D]   phi: [nD, n² + 2n]   b: [n² + 2n]   alpha_pre, alpha_post, alpha_res: one element each
    """
    _check_type("liger_mhc_coeffs", x, allow_fp32)
    parameters = _parameters(phi, b, alpha_pre, alpha_post, alpha_res)
    return ops.mhc_maps(x, *parameters, **_options(tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult))


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """The layer's input Σ_i h_pre[i]·x[i], typed as x; `mhc_ops.mhc_read`."""
    return ops.mhc_read(x, h_pre)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """h_post[o]·f_out + Σ_i h_res[o, i]·x[i], typed as x; `mhc_ops.mhc_post` with transposed=True."""
    return ops.mhc_post(x, f_out, h_post, h_res, transposed=True)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`liger_mhc_post_res`; with return_x_in also the result of `liger_mhc_pre`."""
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, liger_mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> Any:
    """A layer within its streams: x_out, and with return_coeffs (x_out, (h_pre, h_post, h_res))."""
    _check_type("liger_mhc_forward", x, allow_fp32)
    parameters = _parameters(phi, b, alpha_pre, alpha_post, alpha_res)
    options = _options(tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult)
    cast = _in_the_type_of(layer)
    if not return_coeffs:
        return ops.mhc_layer(x, cast, *parameters, **options)
    h_pre, h_post, h_res = ops.mhc_maps(x, *parameters, **options)
    x_out = liger_mhc_post_res(x, cast(liger_mhc_pre(x, h_pre)), h_post, h_res)
    return x_out, (h_pre, h_post, h_res)


class LigerMHC(HasMaps, nn.Module):
    """A layer from [..., c] to [..., c] within hc residual streams: x [..., hc, c] to the same shape.

    Parameters: phi [hc·c, hc² + 2hc] of phi_dtype, 0.02·randn; b [hc² + 2hc], zeros; alpha_pre, alpha_post and
    alpha_res, each a scalar 1; on the layer's device.
    """

    map_names = ("phi", "b", "alpha_pre", "alpha_post", "alpha_res")

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ):
        super().__init__()
        self.layer = layer
        self.hc, self.c, self.tmax = int(hc), int(c), int(tmax)
        self.rms_eps, self.pre_eps, self.sinkhorn_eps = float(rms_eps), float(pre_eps), float(sinkhorn_eps)
        self.post_mult, self.allow_fp32 = float(post_mult), bool(allow_fp32)
        first = next(layer.parameters(), None)
        device, maps = torch.device("cpu") if first is None else first.device, hc * hc + 2 * hc
        self.phi = nn.Parameter(torch.randn(hc * c, maps, dtype=phi_dtype, device=device) * 0.02)
        self.b = nn.Parameter(torch.zeros(maps, dtype=torch.float32, device=device))
        self.alpha_pre = nn.Parameter(torch.ones((), dtype=torch.float32, device=device))
        self.alpha_post = nn.Parameter(torch.ones((), dtype=torch.float32, device=device))
        self.alpha_res = nn.Parameter(torch.ones((), dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.hc, self.c):
            raise ValueError(f"LigerMHC: x must be [..., {self.hc}, {self.c}], got {list(x.shape)}")
        return liger_mhc_forward(
            x,
            self.layer,
            self.phi,
            self.b,
            self.alpha_pre,
            self.alpha_post,
            self.alpha_res,
            allow_fp32=self.allow_fp32,
            tmax=self.tmax,
            rms_eps=self.rms_eps,
            pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            post_mult=self.post_mult,
        )

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"


def _check_type(function: str, x: Tensor, allow_fp32: bool) -> None:
    """An AssertionError, as in Liger."""
    check_tensors(function, x=x)
    if x.dtype not in (torch.bfloat16, torch.float16) and not allow_fp32:
        got = name_of(x.dtype)
        raise AssertionError(f"{function}: x must be bfloat16 or float16 without allow_fp32=True, got {got}")


def _parameters(phi: Tensor, b: Tensor, *alphas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """phi, alpha and bias in the layout of mhc_ops."""
    return phi.mT, torch.cat([alpha.reshape(1) for alpha in alphas]), b


def _options(tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float) -> Any:
    return {
        "norm_eps": rms_eps,
        "hc_eps": pre_eps,
        "post_mult": post_mult,
        "sinkhorn_iters": tmax,
        "sinkhorn_eps": sinkhorn_eps,
        "transposed": True,
    }


def _in_the_type_of(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The layer with its input cast to the type of its first parameter."""
    first = next(layer.parameters(), None) if isinstance(layer, nn.Module) else None
    if first is None:
        return layer
    dtype = first.dtype
    return lambda h_in: layer(h_in.to(dtype))
