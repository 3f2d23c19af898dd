"""The meaning of mHC in plain torch: any device, any float type, forward only; torch differentiates it.

n streams of D channels, M = n² + 2n maps. Rows of phi: pre (n), post (n), res (n², row i·n + j for h_res[i, j]).
Computed in fp32, or fp64 where x is fp64; autocast is off (a backward that is itself run inside an autocast block is
torch's affair, and torch advises against it).
"""

import torch
from torch import Tensor


def accumulate(x: Tensor) -> Tensor:
    """x in the type that sums are kept in: fp32, and fp64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)


def mhc_forward_pre(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, norm_eps: float, hc_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a layer reads, and the maps that write it back.

    inv_rms = rsqrt(mean(v²) + norm_eps)       v is x flattened to nD
    h_mix   = phi @ (gamma ⊙ v)
    z       = (α0, α1, α2) · h_mix · inv_rms + bias
    h_pre   = σ(z_pre) + hc_eps      h_post = 2 · σ(z_post)      h_res = z_res      h_in = Σ_i h_pre[i] · x[i]
    """
    n, sections = x.shape[-2], section_sizes(x.shape[-2])
    with without_autocast(x):
        wide = accumulate(x)
        phi, alpha, bias = (p.to(wide.dtype) for p in (phi, alpha, bias))
        v = wide.flatten(-2)
        inv_rms = torch.rsqrt(v.square().mean(-1) + norm_eps)
        scaled = v if gamma is None else v * gamma.to(wide.dtype).flatten()
        h_mix = scaled @ phi.T
        z = h_mix * inv_rms[..., None] * per_row(alpha, n) + bias
        z_pre, z_post, z_res = z.split(sections, -1)
        h_pre = torch.sigmoid(z_pre) + hc_eps
        h_post = 2 * torch.sigmoid(z_post)
        h_res = z_res.unflatten(-1, (n, n))
        h_in = (h_pre[..., None] * wide).sum(-2).to(x.dtype)
    return h_in, h_post, h_res, inv_rms.detach(), h_mix.detach(), h_pre.detach()


def section_sizes(n: int) -> list[int]:
    """Rows of phi, alpha and bias per section: pre, post, res."""
    return [n, n, n * n]


def per_row(alpha: Tensor, n: int) -> Tensor:
    """alpha [3] spread over the M rows of its sections."""
    return torch.cat([a.expand(size) for a, size in zip(alpha.unbind(), section_sizes(n))])
