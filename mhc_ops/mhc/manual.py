"""The one gradient that is written out in torch, step by step; a test holds it to autograd of the reference.

Each function is a step (core/steps.py): its name is what it computes, its arguments are the names of what it reads.
phi is [M, nD] and gamma [nD] here, alphas is alpha spread over the M rows, dlogits the gradient of z_res.
"""

import torch
from torch import Tensor

from ..core.precision import accumulate, without_autocast
from ..core.steps import evaluate, steps_of
from .reference import per_row, section_sizes


def m(h_mix: Tensor, inv_rms: Tensor) -> Tensor:
    return h_mix * inv_rms[..., None]


def z(m: Tensor, alphas: Tensor, bias: Tensor) -> Tensor:
    return m * alphas + bias


def h_pre(z: Tensor, n: int, hc_eps: float) -> Tensor:
    return torch.sigmoid(z[..., :n]) + hc_eps


def dh_pre(x: Tensor, dh_in: Tensor) -> Tensor:
    return (x * dh_in[..., None, :]).sum(-1)


def dz(z: Tensor, n: int, post_mult: float, dh_pre: Tensor, dh_post: Tensor, dlogits: Tensor) -> Tensor:
    """σ' = σ(z)·σ(−z): through h_pre and h_post, 1 − σ would cancel (0.2 off at z = 16)."""
    z_pre, z_post, _ = z.split(section_sizes(n), -1)
    dz_pre = dh_pre * torch.sigmoid(z_pre) * torch.sigmoid(-z_pre)
    dz_post = post_mult * dh_post * torch.sigmoid(z_post) * torch.sigmoid(-z_post)
    return torch.cat([dz_pre, dz_post, dlogits.flatten(-2)], -1)


def dalpha(dz: Tensor, m: Tensor, n: int) -> Tensor:
    return torch.stack([part.sum() for part in (dz * m).split(section_sizes(n), -1)])


def dbias(dz: Tensor) -> Tensor:
    return dz.reshape(-1, dz.shape[-1]).sum(0)


def dm(dz: Tensor, alphas: Tensor) -> Tensor:
    return dz * alphas


def dh_mix(dm: Tensor, inv_rms: Tensor) -> Tensor:
    return dm * inv_rms[..., None]


def dh_mix_x(dh_mix: Tensor, x: Tensor) -> Tensor:
    """[M, nD]: dphi and dgamma but for gamma and phi"""
    return dh_mix.reshape(-1, dh_mix.shape[-1]).T @ x.reshape(-1, x.shape[-2] * x.shape[-1])


def dphi(dh_mix_x: Tensor, gamma: Tensor) -> Tensor:
    return dh_mix_x * gamma


def dgamma(phi: Tensor, dh_mix_x: Tensor) -> Tensor:
    return (phi * dh_mix_x).sum(0)


def through_phi(dh_mix: Tensor, phi: Tensor, gamma: Tensor, n: int) -> Tensor:
    return (dh_mix @ phi * gamma).unflatten(-1, (n, -1))


def through_norm(dm: Tensor, h_mix: Tensor, inv_rms: Tensor, x: Tensor) -> Tensor:
    dinv_rms = (dm * h_mix).sum(-1)
    n, D = x.shape[-2:]
    return -(dinv_rms * inv_rms**3 / (n * D))[..., None, None] * x


def through_h_in(h_pre: Tensor, dh_in: Tensor) -> Tensor:
    return h_pre[..., None] * dh_in[..., None, :]


def dx(through_phi: Tensor, through_norm: Tensor, through_h_in: Tensor) -> Tensor:
    return through_phi + through_norm + through_h_in


TERMS_OF_DX = steps_of(through_phi, through_norm, through_h_in)
PRE_BACKWARD = (
    *steps_of(dh_pre, dz, dalpha, dbias, dm, dh_mix, dh_mix_x, dphi, dgamma),
    *TERMS_OF_DX,
    *steps_of(dx),
)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dx, dphi, dalpha, dbias, dgamma (None without gamma) of mhc_forward_pre from its intermediates."""
    n, D = x.shape[-2:]
    with without_autocast(x):
        wide = accumulate(x)
        maps = h_mix.to(wide.dtype)
        inputs = {
            "x": wide,
            "phi": phi.to(wide.dtype),
            "alphas": per_row(alpha.to(wide.dtype), n),
            "bias": bias.to(wide.dtype),
            "gamma": wide.new_ones(n * D) if gamma is None else gamma.to(wide.dtype).flatten(),
            "inv_rms": inv_rms.to(wide.dtype),
            "h_mix": maps,
            "dh_in": torch.zeros_like(wide[..., 0, :]) if dh_in is None else dh_in.to(wide.dtype),
            "dh_post": torch.zeros_like(maps[..., :n]) if dh_post is None else dh_post.to(wide.dtype),
            "dlogits": maps.new_zeros(*maps.shape[:-1], n, n) if dh_res is None else dh_res.to(wide.dtype),
            "n": n,
            "hc_eps": hc_eps,
            "post_mult": 2.0,
        }
        values = evaluate((*steps_of(m, z, h_pre), *PRE_BACKWARD), inputs)
    of_gamma = None if gamma is None else values["dgamma"].view(n, D).to(gamma.dtype)
    gradients = (values[f"d{name}"].to(p.dtype) for name, p in (("x", x), ("phi", phi), ("alpha", alpha), ("bias", bias)))
    return *gradients, of_gamma
