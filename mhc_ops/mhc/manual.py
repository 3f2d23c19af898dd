"""The one gradient that is written out in torch; a test holds it to autograd of the reference."""

import torch
from torch import Tensor

from ..core.precision import accumulate, without_autocast
from .reference import per_row, section_sizes


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
    """dx, dphi, dalpha, dbias, dgamma (None without gamma) of mhc_forward_pre from its intermediates.

    z is recomputed from h_mix: through h_pre and h_post, 1 − σ would cancel (0.2 off at z = 16).
    """
    n, D = x.shape[-2:]
    with without_autocast(x):
        wide = accumulate(x)
        inv_rms, h_mix = inv_rms.to(wide.dtype), h_mix.to(wide.dtype)
        dh_in = torch.zeros_like(wide[..., 0, :]) if dh_in is None else dh_in.to(wide.dtype)
        dh_post = torch.zeros_like(h_mix[..., :n]) if dh_post is None else dh_post.to(wide.dtype)
        dz_res = torch.zeros_like(h_mix[..., 2 * n :]) if dh_res is None else dh_res.to(wide.dtype).flatten(-2)
        alphas = per_row(alpha.to(wide.dtype), n)
        phi_wide = phi.to(wide.dtype)
        weight = wide.new_ones(n * D) if gamma is None else gamma.to(wide.dtype).flatten()

        m = h_mix * inv_rms[..., None]
        z_pre, z_post, _ = (m * alphas + bias.to(wide.dtype)).split(section_sizes(n), -1)
        dh_pre = (wide * dh_in[..., None, :]).sum(-1)
        dz_pre = dh_pre * torch.sigmoid(z_pre) * torch.sigmoid(-z_pre)
        dz_post = 2 * dh_post * torch.sigmoid(z_post) * torch.sigmoid(-z_post)
        dz = torch.cat([dz_pre, dz_post, dz_res], -1)

        M = dz.shape[-1]
        dalpha = torch.stack([part.sum() for part in (dz * m).split(section_sizes(n), -1)])
        dbias = dz.reshape(-1, M).sum(0)
        dm = dz * alphas
        dh_mix = dm * inv_rms[..., None]
        dinv = (dm * h_mix).sum(-1)
        A = dh_mix.reshape(-1, M).T @ wide.reshape(-1, n * D)
        dphi = A * weight
        dgamma = None if gamma is None else (phi_wide * A).sum(0).view(n, D).to(gamma.dtype)
        through_norm = -(dinv * inv_rms**3 / (n * D))[..., None, None] * wide
        through_phi = (dh_mix @ phi_wide * weight).unflatten(-1, (n, D))
        h_pre = torch.sigmoid(z_pre) + hc_eps
        dx = through_phi + through_norm + h_pre[..., None] * dh_in[..., None, :]
    return dx.to(x.dtype), dphi.to(phi.dtype), dalpha.to(alpha.dtype), dbias.to(bias.dtype), dgamma
