"""The contracts of the mHC kernels and how their gradients are made of one another.

A backend's launcher has the contract's name and takes its inputs, then its outputs. Inputs are checked and contiguous.
T is the product of the leading dimensions, M = n² + 2n. `sinkhorn_iters` = 0 leaves h_res as raw logits.
"""

from typing import Any

import torch
from torch import Tensor

from ..core.op import op


@op("mhc")
def sinkhorn_fwd(logits: Tensor, iters: int, eps: float) -> Tensor:
    return torch.empty_like(logits, dtype=torch.float32)


@op("mhc")
def sinkhorn_bwd(logits: Tensor, dh_res: Tensor, iters: int, eps: float) -> Tensor:
    return torch.empty_like(logits)


@sinkhorn_fwd.gradient(outputs=1)
def sinkhorn_gradient(run, inputs, saved, cotangents):
    logits, iters, eps = inputs
    return (run(sinkhorn_bwd, logits, *cotangents, iters, eps),)


@op("mhc")
def mhc_pre_fwd(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    post_mult: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h_in, h_post, h_res, inv_rms, h_mix, h_pre"""
    return _h_in(x), *_pre_maps(x), *_maps(x, (x.shape[-2],))


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
    dx_next: Tensor | None,
    hc_eps: float,
    post_mult: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dphi, dalpha, dbias, dgamma. With dx_next (and Sinkhorn), dx includes Σ_j h_res[i, j]·dx_next[j]."""
    return torch.empty_like(x), *_parameter_gradients(phi, alpha, bias, gamma)


@mhc_pre_fwd.gradient(outputs=3)
def mhc_pre_gradient(run, inputs, saved, cotangents):
    x, phi, alpha, bias, gamma, _, *options = inputs
    inv_rms, h_mix, _ = saved
    return _pre_gradients(run, x, phi, alpha, bias, gamma, inv_rms, h_mix, *cotangents, None, *options)


def _pre_gradients(run, x, phi, alpha, bias, gamma, *rest):
    *gradients, dgamma = run(mhc_pre_bwd, x, phi, alpha, bias, gamma, *rest)
    return *gradients, None if gamma is None else dgamma


@op("mhc")
def mhc_post_fwd(x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """x_next"""
    return torch.empty_like(x)


@op("mhc")
def mhc_post_bwd(
    x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor, dx_next: Tensor, residual: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (empty without `residual`), dh_out, dh_post, dh_res"""
    dx = torch.empty_like(x) if residual else x.new_empty(0)
    return dx, torch.empty_like(h_out), torch.empty_like(h_post), torch.empty_like(h_res)


@mhc_post_fwd.gradient(outputs=1)
def mhc_post_gradient(run, inputs, saved, cotangents):
    return run(mhc_post_bwd, *inputs, *cotangents, True)


# The pair for one whole layer. x reaches x_next through h_in and, mixed by h_res, directly. Left to autograd, its
# gradient would be two tensors of the size of x and a pass to add them. Instead mhc_layer_pre returns a `link`, shaped
# as x with a single element of storage, that mhc_layer_post takes and never reads: post's backward gives it dx_next as
# it is and x nothing, and pre's backward mixes dx_next into its own dx. Correct only as a pair: ops.mhc_layer owns it.
@op("mhc")
def mhc_layer_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    post_mult: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h_in, h_post, h_res, link, inv_rms, h_mix"""
    h_post, h_res, inv_rms, h_mix = _pre_maps(x)
    link = x.new_zeros(()).expand(x.shape)
    return _h_in(x), h_post, h_res, link, inv_rms, h_mix


@op("mhc")
def mhc_layer_post(link: Tensor, x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """x_next"""
    return torch.empty_like(x)


@mhc_layer_pre.gradient(outputs=4)
def mhc_layer_pre_gradient(run, inputs, saved, cotangents):
    x, phi, alpha, bias, gamma, _, *options = inputs
    return _pre_gradients(run, x, phi, alpha, bias, gamma, *saved, *cotangents, *options)


@mhc_layer_post.gradient(outputs=1, unread=(0,))
def mhc_layer_post_gradient(run, inputs, saved, cotangents):
    _, *tensors = inputs
    (dx_next,) = cotangents
    _, *gradients = run(mhc_post_bwd, *tensors, dx_next, False)
    return dx_next, None, *gradients


@op("mhc")
def mhc_post_pre_fwd(
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    post_mult: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_next, and of the next layer h_in, h_post, h_res, inv_rms, h_mix"""
    return torch.empty_like(x), _h_in(x), *_pre_maps(x)


@op("mhc")
def mhc_post_pre_bwd(
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    x_next: Tensor,
    inv_rms: Tensor,
    h_mix: Tensor,
    dx_next: Tensor | None,
    dh_in: Tensor | None,
    dh_post_next: Tensor | None,
    dh_res_next: Tensor | None,
    hc_eps: float,
    post_mult: float,
    sinkhorn_iters: int,
    sinkhorn_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dh_out, dh_post, dh_res, dphi, dalpha, dbias, dgamma"""
    of_post = (torch.empty_like(x), torch.empty_like(h_out), torch.empty_like(h_post), torch.empty_like(h_res))
    return *of_post, *_parameter_gradients(phi, alpha, bias, gamma)


@mhc_post_pre_fwd.gradient(outputs=4, saved=(0, 4, 5))
def mhc_post_pre_gradient(run, inputs, saved, cotangents):
    *tensors, _, hc_eps, post_mult, sinkhorn_iters, sinkhorn_eps = inputs
    options = (hc_eps, post_mult, sinkhorn_iters, sinkhorn_eps)
    *gradients, dgamma = run(mhc_post_pre_bwd, *tensors, *saved, *cotangents, *options)
    return *gradients, None if tensors[-1] is None else dgamma


@op("mhc")
def mhc_head_fwd(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, norm_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted sum of the streams, inv_rms, h_mix"""
    return _h_in(x), *_maps(x, (), (x.shape[-2],))


@op("mhc")
def mhc_head_bwd(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    inv_rms: Tensor,
    h_mix: Tensor,
    dout: Tensor,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dphi, dalpha, dbias, dgamma"""
    return torch.empty_like(x), *_parameter_gradients(phi, alpha, bias, gamma)


@mhc_head_fwd.gradient(outputs=1)
def mhc_head_gradient(run, inputs, saved, cotangents):
    *tensors, _, hc_eps = inputs
    *gradients, dgamma = run(mhc_head_bwd, *tensors, *saved, *cotangents, hc_eps)
    return *gradients, None if tensors[-1] is None else dgamma


def _h_in(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]))


def _pre_maps(x: Tensor) -> Any:
    """h_post, h_res, inv_rms, h_mix"""
    n = x.shape[-2]
    return _maps(x, (n,), (n, n), (), (n * n + 2 * n,))


def _maps(x: Tensor, *shapes: tuple[int, ...]) -> Any:
    """fp32, one per shape behind the leading dimensions of x."""
    outer = x.shape[:-2]
    return [x.new_empty((*outer, *shape), dtype=torch.float32) for shape in shapes]


def _parameter_gradients(phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> Any:
    """An output that nobody wants is empty: dgamma without gamma."""
    dgamma = phi.new_empty(0) if gamma is None else torch.empty_like(gamma)
    return [torch.empty_like(phi), torch.empty_like(alpha), torch.empty_like(bias), dgamma]
