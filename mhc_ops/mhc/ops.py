"""mHC: the contracts of the kernels, and the public functions that check, choose a backend and call."""

from typing import Any

import torch
from torch import Tensor

from ..core.backend import choose
from ..core.check import KERNEL_FLOATS, check_dtype, check_range, check_shapes, check_tensors
from ..core.op import op
from . import manual, reference

MAX_STREAMS = 8  # of the kernels; the reference takes any n


@op("mhc")
def mhc_pre_fwd(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, norm_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *outer, n, D = x.shape
    maps = (x.new_empty((*outer, *shape), dtype=torch.float32) for shape in ((n,), (n, n), (), (n * n + 2 * n,), (n,)))
    h_post, h_res, inv_rms, h_mix, h_pre = maps
    return x.new_empty((*outer, D)), h_post, h_res, inv_rms, h_mix, h_pre


@op("mhc")
def mhc_pre_bwd(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    inv_rms: Tensor,
    h_mix: Tensor,
    dh_in: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dgamma = phi.new_empty(0) if gamma is None else torch.empty_like(gamma)
    return torch.empty_like(x), torch.empty_like(phi), torch.empty_like(alpha), torch.empty_like(bias), dgamma


@mhc_pre_fwd.gradient(intermediates_from=3)
def mhc_pre_gradient(run, inputs, intermediates, cotangents):
    x, phi, alpha, bias, gamma, _, hc_eps = inputs
    inv_rms, h_mix, _ = intermediates
    *gradients, dgamma = run(mhc_pre_bwd, x, phi, alpha, bias, gamma, inv_rms, h_mix, *cotangents, hc_eps)
    return *gradients, None if gamma is None else dgamma


def mhc_forward_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    outflag: bool = False,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    *,
    gamma: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """What a layer reads from n residual streams, and the maps that write its output back (h_res without Sinkhorn).

    inv_rms = rsqrt(mean(v²) + norm_eps)    h_mix = phi @ (gamma ⊙ v)    z = (α0, α1, α2) · h_mix · inv_rms + bias
    h_pre = σ(z_pre) + hc_eps    h_post = 2σ(z_post)    h_res = z_res    h_in = Σ_i h_pre[i]·x[i]

    x: [..., n, D]   phi: [n² + 2n, nD]   alpha: [3]   bias: [n² + 2n]   gamma: [n, D] or None for ones
    Returns h_in [..., D] typed as x, h_post [..., n], h_res [..., n, n]; with outflag also inv_rms [...],
    h_mix [..., n² + 2n], h_pre [..., n], which carry no gradient. Differentiable in x, phi, alpha, bias and gamma.
    """
    function = "mhc_forward_pre"
    _check_pre(function, x, phi, alpha, bias, gamma)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        outputs = reference.mhc_forward_pre(x, phi, alpha, bias, gamma, norm_eps, hc_eps)
    else:
        _check_kernel_limits(function, x, name)
        inputs = _contiguous(x, phi, alpha, bias, gamma)
        outputs = mhc_pre_fwd(*inputs, norm_eps, hc_eps, name)
    return outputs if outflag else outputs[:3]


@torch.no_grad()
def mhc_backward(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    inv_rms: Tensor,
    h_mix: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    dh_in: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
    gamma: Tensor | None = None,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of mhc_forward_pre from its intermediates and cotangents. autograd does this for you.

    inv_rms, h_mix, h_pre, h_post: as `mhc_forward_pre(..., outflag=True)` returned them on the same backend (h_pre and
    h_post follow from h_mix and are recomputed; norm_eps is in inv_rms already).
    dh_in: [..., D]   dh_post: [..., n]   dh_res: [..., n, n], each may be None for zeros.
    Returns dx, dphi, dalpha, dbias, dgamma, typed as their tensors; dgamma is None without gamma.
    """
    function = "mhc_backward"
    _check_pre(function, x, phi, alpha, bias, gamma)
    *outer, n, D = x.shape
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "inv_rms": (inv_rms, (*outer,)),
        "h_mix": (h_mix, (*outer, n * n + 2 * n)),
        "h_pre": (h_pre, (*outer, n)),
        "h_post": (h_post, (*outer, n)),
        "dh_in": (dh_in, (*outer, D)),
        "dh_post": (dh_post, (*outer, n)),
        "dh_res": (dh_res, (*outer, n, n)),
    }
    optional = ("dh_in", "dh_post", "dh_res")
    given = {key: pair for key, pair in shapes.items() if pair[0] is not None or key not in optional}
    check_tensors(function, x=x, **{key: tensor for key, (tensor, _) in given.items()})
    check_shapes(function, **given)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return manual.mhc_pre_bwd(x, phi, alpha, bias, gamma, inv_rms, h_mix, dh_in, dh_post, dh_res, hc_eps)
    _check_kernel_limits(function, x, name)
    inputs = _contiguous(x, phi, alpha, bias, gamma, inv_rms, h_mix, dh_in, dh_post, dh_res)
    *gradients, dgamma = mhc_pre_bwd(*inputs, hc_eps, name)
    return *gradients, None if gamma is None else dgamma


def _check_pre(function: str, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> None:
    tensors = {"x": x, "phi": phi, "alpha": alpha, "bias": bias}
    check_tensors(function, **tensors if gamma is None else {**tensors, "gamma": gamma})
    if x.dim() < 2 or x.shape[-2] < 1 or x.shape[-1] < 1:
        raise ValueError(f"{function}: x must be [..., n, D] with n and D at least 1, got {list(x.shape)}")
    n, D = x.shape[-2:]
    M = n * n + 2 * n
    check_shapes(function, phi=(phi, (M, n * D)), alpha=(alpha, (3,)), bias=(bias, (M,)))
    if gamma is not None:
        check_shapes(function, gamma=(gamma, (n, D)))


def _check_kernel_limits(function: str, x: Tensor, backend: str) -> None:
    context = f" for backend {backend!r}"
    check_dtype(function, "x", x, KERNEL_FLOATS, context)
    check_range(function, "n", x.shape[-2], 1, MAX_STREAMS, context)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
