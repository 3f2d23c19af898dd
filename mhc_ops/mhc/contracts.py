"""The contracts of the mHC kernels and how their gradients are made of one another.

A backend's launcher has the contract's name and takes its inputs and its outputs by their names. Inputs are checked and
contiguous, but for a link, whose values are not read. T is the product of the leading dimensions, M = n² + 2n, or 2n
where the residual is the identity: then h_res is None as an input and empty as an output.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import any_layout
from ..core.op import by_input, op
from .options import PreOptions


class SinkhornOutputs(NamedTuple):
    h_res: Tensor


class SinkhornGradients(NamedTuple):
    dlogits: Tensor


@op("mhc")
def sinkhorn_fwd(logits: Tensor, iters: int, eps: float) -> SinkhornOutputs:
    return SinkhornOutputs(h_res=torch.empty_like(logits, dtype=torch.float32))


@op("mhc")
def sinkhorn_bwd(logits: Tensor, iters: int, eps: float, dh_res: Tensor) -> SinkhornGradients:
    return SinkhornGradients(dlogits=torch.empty_like(logits))


sinkhorn_fwd.gradient_is(sinkhorn_bwd)


class PreOutputs(NamedTuple):
    h_in: Tensor
    h_post: Tensor
    h_res: Tensor
    inv_rms: Tensor
    h_mix: Tensor
    h_pre: Tensor


class PreGradients(NamedTuple):
    """An unwanted output is empty: dgamma without gamma, dlayer_norm_weight without that weight, dread where h_in is
    not shifted."""

    dx: Tensor
    dphi: Tensor
    dalpha: Tensor
    dbias: Tensor
    dgamma: Tensor
    dlayer_norm_weight: Tensor
    dread: Tensor


@op("mhc")
def mhc_pre_fwd(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
) -> PreOutputs:
    n = x.shape[-2]
    return PreOutputs(
        h_in=_h_in(x),
        h_post=_map(x, n),
        h_res=_h_res(x, phi),
        inv_rms=_map(x),
        h_mix=_map(x, phi.shape[0]),
        h_pre=_map(x, n),
    )


@op("mhc")
def mhc_pre_bwd(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
    read: Tensor | None,
    inv_rms: Tensor,
    h_mix: Tensor,
    dh_in: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
    dh_pre: Tensor | None,
    dx_next: Tensor | None,
) -> PreGradients:
    """With dx_next, dx includes Σ_j h_res[i, j]·dx_next[j], of the h_res that mixes streams. dh_pre is given where
    h_in was read with `read`; else it follows from dh_in."""
    return PreGradients(
        torch.empty_like(x),
        *_of_parameters(phi, alpha, bias, gamma, layer_norm_weight),
        dread=_of_optional(read, phi),
    )


mhc_pre_fwd.gradient_is(mhc_pre_bwd, read=None, dh_pre=None, dx_next=None)


class PostOutputs(NamedTuple):
    x_next: Tensor


class PostGradients(NamedTuple):
    """dx is empty where the caller has no use for it, dh_res without h_res."""

    dx: Tensor
    dh_out: Tensor
    dh_post: Tensor
    dh_res: Tensor


@op("mhc")
def mhc_post_fwd(x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor | None, transposed: bool) -> PostOutputs:
    return PostOutputs(x_next=torch.empty_like(x))


@op("mhc")
def mhc_post_bwd(
    x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor | None, transposed: bool, dx_next: Tensor, residual: bool
) -> PostGradients:
    """residual: whether dx is wanted"""
    return PostGradients(
        dx=torch.empty_like(x) if residual else x.new_empty(0),
        dh_out=torch.empty_like(h_out),
        dh_post=torch.empty_like(h_post),
        dh_res=_of_optional(h_res, h_post),
    )


mhc_post_fwd.gradient_is(mhc_post_bwd, residual=True)


# The pair for one whole layer. x reaches x_next through h_in and, mixed by h_res, directly. Left to autograd, its
# gradient would be two tensors of the size of x and a pass to add them. Instead mhc_layer_pre returns a `link`, shaped
# as x with a single element of storage, which mhc_layer_post takes and does not read. Post's backward gives the link
# dx_next as it is and x no gradient; pre's backward mixes dx_next into its own dx. The pair is correct only together:
# ops.py calls it in mhc_layer and in the functions with a carry.
class LayerPreOutputs(NamedTuple):
    """h_pre is empty where h_in is not shifted: no sublayer reads with it then."""

    h_in: Tensor
    h_post: Tensor
    h_res: Tensor
    link: Tensor
    h_pre: Tensor
    inv_rms: Tensor
    h_mix: Tensor


@op("mhc", unwritten=("link",))
def mhc_layer_pre(
    x: Tensor,
    read: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
) -> LayerPreOutputs:
    """Shifted, h_in is read with `read`."""
    n = x.shape[-2]
    return LayerPreOutputs(
        h_in=_h_in(x),
        h_post=_map(x, n),
        h_res=_h_res(x, phi),
        link=_link(x),
        h_pre=_h_pre(x, read),
        inv_rms=_map(x),
        h_mix=_map(x, phi.shape[0]),
    )


@op("mhc", layouts={"link": any_layout})
def mhc_layer_post(
    link: Tensor, x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor | None, transposed: bool
) -> PostOutputs:
    return PostOutputs(x_next=torch.empty_like(x))


mhc_layer_pre.gradient_is(mhc_pre_bwd, renamed={"dx_next": "dlink"})


@mhc_layer_post.gradient
def mhc_layer_post_gradient(run, x, h_out, h_post, h_res, transposed, dx_next):
    inputs = {"x": x, "h_out": h_out, "h_post": h_post, "h_res": h_res, "transposed": transposed}
    gradients = run(mhc_post_bwd, **inputs, dx_next=dx_next, residual=False)
    return by_input(gradients) | {"x": None, "link": dx_next}


class PostPreOutputs(NamedTuple):
    """All but x_next belong to the next layer."""

    x_next: Tensor
    h_in: Tensor
    h_post_next: Tensor
    h_res_next: Tensor
    inv_rms: Tensor
    h_mix: Tensor


class PostPreGradients(NamedTuple):
    dx: Tensor
    dh_out: Tensor
    dh_post: Tensor
    dh_res: Tensor
    dphi: Tensor
    dalpha: Tensor
    dbias: Tensor
    dgamma: Tensor
    dlayer_norm_weight: Tensor


@op("mhc")
def mhc_post_pre_fwd(
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
) -> PostPreOutputs:
    n = x.shape[-2]
    return PostPreOutputs(
        x_next=torch.empty_like(x),
        h_in=_h_in(x),
        h_post_next=_map(x, n),
        h_res_next=_h_res(x, phi),
        inv_rms=_map(x),
        h_mix=_map(x, phi.shape[0]),
    )


@op("mhc")
def mhc_post_pre_bwd(
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
    x_next: Tensor,
    inv_rms: Tensor,
    h_mix: Tensor,
    dx_next: Tensor | None,
    dh_in: Tensor | None,
    dh_post_next: Tensor | None,
    dh_res_next: Tensor | None,
) -> PostPreGradients:
    return PostPreGradients(
        torch.empty_like(x),
        torch.empty_like(h_out),
        torch.empty_like(h_post),
        _of_optional(h_res, h_post),
        *_of_parameters(phi, alpha, bias, gamma, layer_norm_weight),
    )


mhc_post_pre_fwd.gradient_is(mhc_post_pre_bwd)


# The boundary of a stack: mhc_layer_post of one sublayer and mhc_layer_pre of the next, each with its link. Backward,
# dx of the next sublayer is made once, rounded as x is stored, and handed to `link` as it is: the sublayer before mixes
# it with its h_res while it makes its own dx.
class NextOutputs(NamedTuple):
    """link_next is a single element where the caller asked for none; h_pre_next as in LayerPreOutputs."""

    x_next: Tensor
    h_in: Tensor
    h_post_next: Tensor
    h_res_next: Tensor
    link_next: Tensor
    h_pre_next: Tensor
    inv_rms: Tensor
    h_mix: Tensor


class NextGradients(NamedTuple):
    """dlink: all that x_next gets; x gets its gradient through the link."""

    dlink: Tensor
    dh_out: Tensor
    dh_post: Tensor
    dh_res: Tensor
    dphi: Tensor
    dalpha: Tensor
    dbias: Tensor
    dgamma: Tensor
    dlayer_norm_weight: Tensor
    dread: Tensor


@op("mhc", unwritten=("link_next",), layouts={"link": any_layout})
def mhc_next_fwd(
    link: Tensor | None,
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    read: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
    linked: bool,
) -> NextOutputs:
    """linked: whether link_next is wanted. Both links are left out where no gradient is: x would get none."""
    n = x.shape[-2]
    return NextOutputs(
        x_next=torch.empty_like(x),
        h_in=_h_in(x),
        h_post_next=_map(x, n),
        h_res_next=_h_res(x, phi),
        link_next=_link(x) if linked else x.new_empty(1),
        h_pre_next=_h_pre(x, read),
        inv_rms=_map(x),
        h_mix=_map(x, phi.shape[0]),
    )


@op("mhc")
def mhc_next_bwd(
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    read: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
    x_next: Tensor,
    inv_rms: Tensor,
    h_mix: Tensor,
    dx_next: Tensor | None,
    dh_in: Tensor | None,
    dh_post_next: Tensor | None,
    dh_res_next: Tensor | None,
    dh_pre_next: Tensor | None,
    dlink_next: Tensor | None,
) -> NextGradients:
    """dx_next: what x_next gets from elsewhere; dlink_next reaches it through h_res of the next sublayer."""
    return NextGradients(
        torch.empty_like(x),
        torch.empty_like(h_out),
        torch.empty_like(h_post),
        _of_optional(h_res, h_post),
        *_of_parameters(phi, alpha, bias, gamma, layer_norm_weight),
        dread=_of_optional(read, phi),
    )


mhc_next_fwd.gradient_is(mhc_next_bwd)


class MapsOutputs(NamedTuple):
    h_pre: Tensor
    h_post: Tensor
    h_res: Tensor
    inv_rms: Tensor
    h_mix: Tensor


class MapsGradients(NamedTuple):
    """dgamma is empty without gamma."""

    dx: Tensor
    dphi: Tensor
    dalpha: Tensor
    dbias: Tensor
    dgamma: Tensor


@op("mhc")
def mhc_maps_fwd(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, options: PreOptions
) -> MapsOutputs:
    n = x.shape[-2]
    return MapsOutputs(
        h_pre=_map(x, n), h_post=_map(x, n), h_res=_h_res(x, phi), inv_rms=_map(x), h_mix=_map(x, phi.shape[0])
    )


@op("mhc")
def mhc_maps_bwd(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    options: PreOptions,
    inv_rms: Tensor,
    h_mix: Tensor,
    dh_pre: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
) -> MapsGradients:
    return MapsGradients(torch.empty_like(x), *_of_maps(phi, alpha, bias, gamma))


mhc_maps_fwd.gradient_is(mhc_maps_bwd)


class ReadOutputs(NamedTuple):
    h_in: Tensor


class ReadGradients(NamedTuple):
    dx: Tensor
    dh_pre: Tensor


@op("mhc")
def mhc_read_fwd(x: Tensor, h_pre: Tensor) -> ReadOutputs:
    return ReadOutputs(h_in=_h_in(x))


@op("mhc")
def mhc_read_bwd(x: Tensor, h_pre: Tensor, dh_in: Tensor) -> ReadGradients:
    return ReadGradients(dx=torch.empty_like(x), dh_pre=torch.empty_like(h_pre))


mhc_read_fwd.gradient_is(mhc_read_bwd)


class HeadOutputs(NamedTuple):
    """out: the weighted sum of the streams"""

    out: Tensor
    inv_rms: Tensor
    h_mix: Tensor


@op("mhc")
def mhc_head_fwd(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, norm_eps: float, hc_eps: float
) -> HeadOutputs:
    return HeadOutputs(out=_h_in(x), inv_rms=_map(x), h_mix=_map(x, x.shape[-2]))


@op("mhc")
def mhc_head_bwd(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    hc_eps: float,
    inv_rms: Tensor,
    h_mix: Tensor,
    dout: Tensor,
) -> MapsGradients:
    return MapsGradients(torch.empty_like(x), *_of_maps(phi, alpha, bias, gamma))


mhc_head_fwd.gradient_is(mhc_head_bwd)


class MeanOutputs(NamedTuple):
    out: Tensor


class MeanGradients(NamedTuple):
    dx: Tensor


@op("mhc")
def mhc_mean_fwd(x: Tensor, n: int) -> MeanOutputs:
    """n: streams of x, which the gradient does not keep"""
    return MeanOutputs(out=_h_in(x))


@op("mhc")
def mhc_mean_bwd(n: int, dout: Tensor) -> MeanGradients:
    return MeanGradients(dx=dout.new_empty((*dout.shape[:-1], n, dout.shape[-1])))


mhc_mean_fwd.gradient_is(mhc_mean_bwd)


def _h_in(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-2], x.shape[-1]))


def _map(x: Tensor, *shape: int) -> Tensor:
    """fp32: the leading dimensions of x, then this shape."""
    return x.new_empty((*x.shape[:-2], *shape), dtype=torch.float32)


def _h_res(x: Tensor, phi: Tensor) -> Tensor:
    """Empty where phi has no rows for it."""
    n = x.shape[-2]
    return _map(x, n, n) if phi.shape[0] > 2 * n else x.new_empty(0, dtype=torch.float32)


def _h_pre(x: Tensor, read: Tensor | None) -> Tensor:
    """Empty where h_in is not shifted."""
    return x.new_empty(0, dtype=torch.float32) if read is None else _map(x, x.shape[-2])


def _link(x: Tensor) -> Tensor:
    """Shaped as x, with a single element of storage."""
    return torch.empty_strided(x.shape, (0,) * x.dim(), dtype=x.dtype, device=x.device)


def _of_maps(phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dphi, dalpha, dbias, dgamma"""
    return torch.empty_like(phi), torch.empty_like(alpha), torch.empty_like(bias), _of_optional(gamma, phi)


def _of_parameters(
    phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, layer_norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dphi, dalpha, dbias, dgamma, dlayer_norm_weight"""
    return *_of_maps(phi, alpha, bias, gamma), _of_optional(layer_norm_weight, phi)


def _of_optional(tensor: Tensor | None, beside: Tensor) -> Tensor:
    return beside.new_empty(0) if tensor is None else torch.empty_like(tensor)
