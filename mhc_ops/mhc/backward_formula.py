"""mHC pre, backward, step by step in torch. A test compares it with autograd of the reference.

phi is [M, nD] in these steps, gamma [nD]; alphas is alpha spread over the M rows, dlogits the gradient of z_res.
"""

import torch
from torch import Tensor

from ..core.precision import accumulate, without_autocast
from ..core.steps import evaluate, steps_of, total
from .reference import per_row, section_sizes


def _dz(z: Tensor, n: int, post_mult: float, dh_pre: Tensor, dh_post: Tensor, dlogits: Tensor) -> Tensor:
    """σ' = σ(z)·σ(−z): from h_pre and h_post, as σ·(1 − σ), it would cancel (0.2 off at z = 16)."""
    z_pre, z_post, _ = z.split(section_sizes(n), -1)
    dz_pre = dh_pre * torch.sigmoid(z_pre) * torch.sigmoid(-z_pre)
    dz_post = post_mult * dh_post * torch.sigmoid(z_post) * torch.sigmoid(-z_post)
    return torch.cat([dz_pre, dz_post, dlogits.flatten(-2)], -1)


def _rows(tensor: Tensor, width: int) -> Tensor:
    """[rows, width]: all leading dimensions as one."""
    return tensor.reshape(-1, width)


# The forward again, from the saved h_mix and inv_rms.
PRE_MAPS = steps_of(
    m=lambda h_mix, inv_rms: h_mix * inv_rms[..., None],
    z=lambda m, alphas, bias: m * alphas + bias,
    h_pre=lambda z, n, hc_eps: torch.sigmoid(z[..., :n]) + hc_eps,
)
PARAMETER_GRADIENTS = steps_of(
    dh_pre=lambda x, dh_in: (x * dh_in[..., None, :]).sum(-1),
    dz=_dz,
    dm=lambda dz, alphas: dz * alphas,
    dh_mix=lambda dm, inv_rms: dm * inv_rms[..., None],
    dprojection=lambda dh_mix, x: _rows(dh_mix, dh_mix.shape[-1]).T @ _rows(x, x.shape[-2] * x.shape[-1]),
    dphi=lambda dprojection, gamma: dprojection * gamma,
    dalpha=lambda dz, m, n: torch.stack([section.sum() for section in (dz * m).split(section_sizes(n), -1)]),
    dbias=lambda dz: _rows(dz, dz.shape[-1]).sum(0),
    dgamma=lambda dprojection, phi: (phi * dprojection).sum(0),
)
TERMS_OF_DX = steps_of(
    through_phi=lambda dh_mix, phi, gamma, n: (dh_mix @ phi * gamma).unflatten(-1, (n, -1)),
    through_norm=lambda dm, h_mix, inv_rms, x: (
        -((dm * h_mix).sum(-1) * inv_rms**3 / (x.shape[-2] * x.shape[-1]))[..., None, None] * x
    ),
    through_h_in=lambda h_pre, dh_in: h_pre[..., None] * dh_in[..., None, :],
)
DX = total("dx", *(term.name for term in TERMS_OF_DX))


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
        values = evaluate((*PRE_MAPS, *PARAMETER_GRADIENTS, *TERMS_OF_DX, DX), inputs)
    of_gamma = None if gamma is None else values["dgamma"].view(n, D).to(gamma.dtype)
    dx, dphi, dalpha, dbias = (values[name] for name in ("dx", "dphi", "dalpha", "dbias"))
    return dx.to(x.dtype), dphi.to(phi.dtype), dalpha.to(alpha.dtype), dbias.to(bias.dtype), of_gamma
