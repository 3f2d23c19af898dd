"""The meaning of mHC in plain torch: any device, any float type, forward only; torch differentiates it.

n streams of D channels, M = n² + 2n maps. Rows of phi: pre (n), post (n), res (n², row i·n + j for h_res[i, j]). With
the identity as residual there are no rows res, alpha is [2] and h_res is None everywhere. Computed in fp32, or fp64
where x is fp64; autocast is off in this file. Torch advises against a backward inside an
autocast block; its result there is torch's.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.precision import accumulate, without_autocast
from .options import PreOptions, Residual


class Carry(NamedTuple):
    """The state between two sublayers, until the first has returned h_out: `mhc_enter` and `mhc_next` return it,
    `mhc_next` and `mhc_leave` take it.

    x: the streams that the sublayer read   h_post, h_res: what its output is written back with
    read: in a shifted stack the h_pre of this sublayer, with which the next one reads; None elsewhere, as it makes its
    own. transposed: whether h_res is [new, old]
    link: private. The gradient of x past the sublayer goes through it, and x has none there. None in a carry that was
    made without gradients, or with another x than the streams (`carry._replace(x=..., link=None)`)
    """

    x: Tensor
    h_post: Tensor
    h_res: Tensor | None
    read: Tensor | None = None
    link: Tensor | None = None
    transposed: bool = False


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Positive [n, n] matrices whose rows and columns sum to 1 up to eps and what `iters` iterations leave.

    c = softmax(logits, over j) + eps;   c /= colsum(c) + eps;   then iters − 1 times:  c /= rowsum(c) + eps,
    c /= colsum(c) + eps
    """
    with without_autocast(logits):
        z = accumulate(logits)
        if eps:
            return half_steps(z, iters, eps)[0]
        # Without eps, a row or column whose entries all underflow is 0 / 0, and one with some such entries loses them.
        # Matrices whose divisors are that small are made in logarithms.
        number = torch.finfo(z.dtype)
        lost = divided_by(half_steps(z.detach(), iters, eps)[1])[..., None, None] < number.tiny / number.eps
        plain, _ = half_steps(z.masked_fill(lost, 0), iters, eps)
        return torch.where(lost, in_logarithms(z.masked_fill(~lost, 0), iters), plain)


def half_steps(z: Tensor, iters: int, eps: float) -> tuple[Tensor, list[Tensor]]:
    """sinkhorn(z), and the [..., n] that each half step divides by"""
    c, divisors = torch.softmax(z, -1) + eps, []
    for axis in (-2, *(-1, -2) * (iters - 1)):
        divisor = c.sum(axis, keepdim=True) + eps
        c = c / divisor
        divisors.append(divisor.squeeze(axis))
    return c, divisors


def divided_by(divisors: list[Tensor]) -> Tensor:
    """The least product of all divisors of an entry, those of its column and of its row. NaN counts as 1."""
    of_axes = divisors[::2], [torch.ones_like(divisors[0]), *divisors[1::2]]
    columns, rows = (torch.stack(of_axis).nan_to_num(1.0).clamp(max=1).prod(0).amin(-1) for of_axis in of_axes)
    return columns * rows


def in_logarithms(z: Tensor, iters: int) -> Tensor:
    """sinkhorn(z) without eps, as exp(z + u + v): u belongs to the rows, v to the columns"""
    u = -z.logsumexp(-1, keepdim=True)
    v = -(z + u).logsumexp(-2, keepdim=True)
    for _ in range(iters - 1):
        u = -(z + v).logsumexp(-1, keepdim=True)
        v = -(z + u).logsumexp(-2, keepdim=True)
    return (z + u + v).exp()


def mhc_maps(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, options: PreOptions
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """What the streams are read, written and mixed with: h_pre, h_post, h_res; inv_rms, h_mix.

    z      = (α0, α1, α2) · h_mix · inv_rms + bias
    h_pre  = σ(z_pre) + hc_eps      h_post = post_mult · σ(z_post) + post_eps
    h_res  = sinkhorn(z_res), None or z_res: residual says which
    """
    n = x.shape[-2]
    with without_autocast(x):
        inv_rms, h_mix = project(accumulate(x), phi, gamma, options.norm_eps)
        z = h_mix * inv_rms[..., None] * per_row(alpha.to(h_mix.dtype), n) + bias.to(h_mix.dtype)
        z_pre, z_post, *z_res = z.split(section_sizes(n)[: alpha.shape[0]], -1)
        h_pre = torch.sigmoid(z_pre) + options.hc_eps
        h_post = options.post_mult * torch.sigmoid(z_post) + options.post_eps
        h_res = None if options.residual == Residual.IDENTITY else z_res[0].unflatten(-1, (n, n))
        if h_res is not None and options.residual == Residual.SINKHORN:
            h_res = sinkhorn(h_res, options.sinkhorn_iters, options.sinkhorn_eps)
    return h_pre, h_post, h_res, inv_rms.detach(), h_mix.detach()


def mhc_read(x: Tensor, h_pre: Tensor) -> Tensor:
    """h_in = Σ_i h_pre[i] · x[i]"""
    with without_autocast(x):
        wide = accumulate(x)
        return weighted_sum(h_pre.to(wide.dtype), wide).to(x.dtype)


def layer_norm(h_in: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """weight ⊙ h_in · rsqrt(mean(h_in²) + eps), over the channels; h_in as it is without a weight"""
    if weight is None:
        return h_in
    with without_autocast(h_in):
        return weight.to(h_in.dtype) * h_in * inverse_root(h_in.square().mean(-1, keepdim=True), eps)


def mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """What a layer reads, and the maps that write it back: h_in, h_post, h_res; inv_rms, h_mix, h_pre.

    mhc_maps, then mhc_read and the layer's norm, rounded once.
    """
    wide = accumulate(x)  # once: the parts of dx meet before they are rounded
    h_pre, h_post, h_res, inv_rms, h_mix = mhc_maps(wide, phi, alpha, bias, gamma, options)
    h_in = layer_norm(mhc_read(wide, h_pre), layer_norm_weight, options.layer_norm_eps)
    return h_in.to(x.dtype), h_post, h_res, inv_rms, h_mix, h_pre.detach()


def mhc_shifted_pre(
    x: Tensor,
    read: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """mhc_pre of a shifted stack: h_in, h_post, h_res; h_pre, with which the next sublayer reads, with its gradient.

    h_in = Σ_i read[i] · x[i], where read is h_pre of the sublayer before; of the first, one-hot on stream 0 (None)
    """
    wide = accumulate(x)
    h_pre, h_post, h_res, *_ = mhc_maps(wide, phi, alpha, bias, gamma, options)
    h_in = mhc_read(wide, first_stream(wide) if read is None else read)
    return layer_norm(h_in, layer_norm_weight, options.layer_norm_eps).to(x.dtype), h_post, h_res, h_pre


def mhc_post(x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor | None, transposed: bool = False) -> Tensor:
    """x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i]; of h_res[j, i] where transposed; x[j] alone without h_res"""
    with without_autocast(x):
        wide = accumulate(x)
        h_out, h_post = h_out.to(wide.dtype), h_post.to(wide.dtype)
        mixed = wide if h_res is None else (h_res if transposed else h_res.mT).to(wide.dtype) @ wide
        return (mixed + h_post[..., None] * h_out[..., None, :]).to(x.dtype)


def mhc_post_pre(
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
) -> tuple[Any, ...]:
    """mhc_post, then mhc_pre of the x_next that was stored. transposed applies to both h_res."""
    x_next = mhc_post(accumulate(x), h_out, h_post, h_res, options.transposed)
    # Rounded as stored, but not in the backward: the two gradients of x_next meet before they are rounded.
    rounding = (x_next.to(x.dtype) - x_next).detach()
    stored = x_next + rounding.nan_to_num(0.0, torch.inf, -torch.inf)  # inf − inf: an inf stays what it is
    h_in, *maps = mhc_pre(stored, phi, alpha, bias, gamma, layer_norm_weight, options)
    return stored.to(x.dtype), h_in.to(x.dtype), *maps


def mhc_enter(x: Tensor, *sublayer: Any, shifted: bool = False, read: Tensor | None = None) -> tuple[Tensor, Carry]:
    """h_in of the first sublayer, and what `mhc_next` or `mhc_leave` write its output back with.

    sublayer: as mhc_pre, or where shifted, with read, as mhc_shifted_pre
    """
    *_, options = sublayer
    streams = accumulate(x)  # once: the parts of dx, through h_in, the maps and past them, meet before they are rounded
    link = streams if torch.is_grad_enabled() else None
    if shifted:
        h_in, h_post, h_res, h_pre = mhc_shifted_pre(streams, read, *sublayer)
        return h_in.to(x.dtype), Carry(x, h_post, h_res, h_pre, link, options.transposed)
    h_in, h_post, h_res, *_ = mhc_pre(streams, *sublayer)
    return h_in.to(x.dtype), Carry(x, h_post, h_res, None, link, options.transposed)


def mhc_leave(carry: Carry, h_out: Tensor) -> Tensor:
    """mhc_post of the sublayer that returned h_out. A shifted model ends with mhc_read of it and carry.read."""
    streams = carry.x if carry.link is None else carry.link
    return mhc_post(streams, h_out, carry.h_post, carry.h_res, carry.transposed).to(carry.x.dtype)


def mhc_next(carry: Carry, h_out: Tensor, *sublayer: Any) -> tuple[Tensor, Carry]:
    """mhc_post of the sublayer that returned h_out, then mhc_pre of the next, which in a shifted stack reads with
    carry.read: the gradient of those weights goes to the maps that were made one boundary earlier."""
    shifted = carry.read is not None
    return mhc_enter(mhc_leave(carry, h_out), *sublayer, shifted=shifted, read=carry.read)


def mhc_mean(x: Tensor) -> Tensor:
    """The streams as one at the end of a model: their mean"""
    return accumulate(x).mean(-2).to(x.dtype)


def mhc_head(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, norm_eps: float, hc_eps: float
) -> Tensor:
    """The streams as one at the end of a model: Σ_i h[i]·x[i] with h = σ(α · h_mix · inv_rms + bias) + hc_eps"""
    with without_autocast(x):
        wide = accumulate(x)
        inv_rms, h_mix = project(wide, phi, gamma, norm_eps)
        z = h_mix * inv_rms[..., None] * alpha.to(h_mix.dtype) + bias.to(h_mix.dtype)
        return weighted_sum(torch.sigmoid(z) + hc_eps, wide).to(x.dtype)


def mhc_expand(x: Tensor, n: int) -> Tensor:
    """n contiguous copies of x: [..., D] to [..., n, D]"""
    return x.unsqueeze(-2).expand(*x.shape[:-1], n, x.shape[-1]).clone(memory_format=torch.contiguous_format)


def project(wide: Tensor, phi: Tensor, gamma: Tensor | None, norm_eps: float) -> tuple[Tensor, Tensor]:
    """inv_rms = rsqrt(mean(v²) + norm_eps)    h_mix = phi @ (gamma ⊙ v)    v is x flattened to nD"""
    v = wide.flatten(-2)
    scaled = v if gamma is None else v * gamma.to(v.dtype).flatten()
    return inverse_root(v.square().mean(-1), norm_eps), scaled @ phi.to(v.dtype).T


def inverse_root(mean: Tensor, eps: float) -> Tensor:
    """rsqrt(mean + eps). Its gradient has its cube, which overflows in fp32 from 7e12 on. A root that large is made of
    4^56 times the mean and multiplied by 2^56: powers of two change no bit."""
    factor = torch.ones_like(mean).masked_fill(mean.detach() + eps < 2.0**-64, 2.0**56)
    return torch.rsqrt(mean * factor * factor + eps * factor * factor) * factor


def first_stream(x: Tensor) -> Tensor:
    """One-hot on stream 0, [..., n], typed as maps are"""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = x.new_zeros(x.shape[-2], dtype=dtype)  # of x: a DTensor where x is one
    weights[0].fill_(1)  # an assignment copies a number from the host, which then waits for the GPU
    return weights.expand(x.shape[:-1])


def weighted_sum(weights: Tensor, wide: Tensor) -> Tensor:
    """Σ_i weights[i] · x[i]"""
    return (weights[..., None] * wide).sum(-2)


def section_sizes(n: int) -> list[int]:
    """Rows of phi and bias per section, an element of alpha: pre, post, res."""
    return [n, n, n * n]


def per_row(alpha: Tensor, n: int) -> Tensor:
    """alpha [3] spread over the M rows of its sections; [2], over the 2n of pre and post."""
    return torch.cat([a.expand(size) for a, size in zip(alpha.unbind(), section_sizes(n))])
