"""SGLang's functions of mHC: DeepSeek V4 and V4.1, GLM-5.3, and the identity form of Hy4."""

from typing import Any

import torch
from torch import Tensor

from ...mhc import ops
from .. import servers
from ..servers import map_options, norm_options

Two = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    n_splits_pre: int = 32,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
) -> Three:
    """post_mix [..., n, 1], comb_mix [..., n, n] and layer_input [..., D]; `mhc_ops.mhc_pre`. n_splits and n_splits_pre
    have no effect."""
    own = {"phi": fn, "alpha": hc_scale, "bias": hc_base, **norm_options(norm_weight, norm_eps)}
    options = map_options(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
    return servers.pre(residual, {**own, **options})


def mhc_fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    tile_n: int = 1,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
) -> Four:
    """The streams after a sublayer that returned x, then what `mhc_pre` returns; `mhc_ops.mhc_post_pre`."""
    own = {"phi": fn, "alpha": hc_scale, "bias": hc_base, **norm_options(norm_weight, norm_eps)}
    options = map_options(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
    return servers.post_pre(x, residual, post_layer_mix, comb_res_mix, {**own, **options})


def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """post_layer_mix[j]·x + Σ_i comb_res_mix[i, j]·residual[i]; `mhc_ops.mhc_post`."""
    return servers.post(x, residual, post_layer_mix, comb_res_mix)


def mhc_post_split_h(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, *, block_size: int | None = None
) -> Tensor:
    """`mhc_post`; block_size has no effect."""
    return servers.post(x, residual, post, comb)


def hc_mix_stats_sinkhorn(
    x_flat: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int,
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> Three:
    """The maps of x_flat [T, nD]: pre [T, n], post [T, n], comb [T, n, n]; `mhc_ops.mhc_maps`."""
    options = map_options(rms_eps, hc_eps, hc_eps, 2.0, sinkhorn_iters)
    return ops.mhc_maps(x_flat.unflatten(-1, (hc_mult, -1)), hc_fn, hc_scale, hc_base, **options)


def mhc_combine(x_flat: Tensor, pre: Tensor, hc: int, out_dtype: torch.dtype) -> Tensor:
    """Σ_i pre[i]·x[i] of x_flat [T, nD], typed as out_dtype; `mhc_ops.mhc_read`."""
    streams = x_flat.to(torch.promote_types(x_flat.dtype, out_dtype)).unflatten(-1, (hc, -1))
    return ops.mhc_read(streams, pre).to(out_dtype)


def hc_pre(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    post_mult_value: float = 2.0,
    hc_norm_weight: Tensor | None = None,
    out_norm_weight: Tensor | None = None,
    out_norm_eps: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """GLM's form on x [T, nD]: layer_input [T, D], h_res [T, n²], h_post [T, n], and whether the norm is in it.

    hc_norm_weight: [nD], the weight of mHC's own norm   out_norm_weight: [D], of the sublayer's norm
    """
    streams = x.unflatten(-1, (hc_mult, -1))
    gamma = None if hc_norm_weight is None else hc_norm_weight.view(streams.shape[-2:])
    options = map_options(rms_eps, hc_eps, hc_eps, post_mult_value, sinkhorn_iters)
    of_norm = norm_options(out_norm_weight, out_norm_eps)
    h_in, h_post, h_res = ops.mhc_pre(streams, hc_fn, hc_scale, hc_base, gamma, **options, **of_norm)
    return h_in, h_res.flatten(-2), h_post, out_norm_weight is not None


def hc_post(x: Tensor, residual: Tensor, h_post: Tensor, h_res: Tensor, hc_mult: int) -> Tensor:
    """GLM's form: x [T, D] and residual [T, nD] to [T, nD], with h_post [T, n] and h_res [T, n²]."""
    streams = residual.unflatten(-1, (hc_mult, -1))
    maps = h_post.view(len(x), hc_mult), h_res.view(len(x), hc_mult, hc_mult)
    return ops.mhc_post(streams, x, *maps).flatten(-2)


def fused_hc_head(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, norm_eps: float, hc_eps: float
) -> Tensor:
    """The n streams as one, [T, n, D] to [T, D]; `mhc_ops.mhc_head`."""
    return ops.mhc_head(x, hc_fn, hc_scale, hc_base, norm_eps=norm_eps, hc_eps=hc_eps)


def fused_hy4_ihc_pre(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    magnitude: float,
    norm_eps: float,
    hc_eps: float,
    rms_weight: Tensor | None = None,
    rms_eps: float = 0.0,
) -> Two:
    """Hy4: layer_input [T, D] and post [T, n] of x [T, n, D], whose streams stay; `mhc_ops.mhc_pre`, identity."""
    options, of_norm = _of_hy4(magnitude, norm_eps, hc_eps), norm_options(rms_weight, rms_eps)
    h_in, h_post, _ = ops.mhc_pre(x, hc_fn, hc_scale, hc_base, **options, **of_norm)
    return h_in, h_post


def fused_hy4_ihc_post(output: Tensor, residual: Tensor, post: Tensor) -> Tensor:
    """residual[j] + post[j]·output; `mhc_ops.mhc_post` without h_res."""
    return ops.mhc_post(residual, output, post, None)


def fused_hy4_ihc_post_pre(
    output: Tensor,
    residual: Tensor,
    post: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    magnitude: float,
    norm_eps: float,
    hc_eps: float,
    rms_weight: Tensor | None = None,
    rms_eps: float = 0.0,
) -> Three:
    """The streams after a sublayer, layer_input and post of the next one; `mhc_ops.mhc_post_pre`."""
    own = {"phi": hc_fn, "alpha": hc_scale, "bias": hc_base, **norm_options(rms_weight, rms_eps)}
    options = _of_hy4(magnitude, norm_eps, hc_eps)
    x_next, h_in, h_post, _ = ops.mhc_post_pre(residual, output, post, None, **own, **options)
    return x_next, h_in, h_post


def _of_hy4(magnitude: float, norm_eps: float, hc_eps: float) -> Any:
    of_post = {"post_mult": magnitude, "post_eps": hc_eps}
    return {"norm_eps": norm_eps, "hc_eps": hc_eps, "residual": "identity", **of_post}


_FOLDER = "sglang.kernels.ops.layernorm"
FUNCTIONS: dict[str, dict[str, Any]] = {
    f"{_FOLDER}.{file}": {function.__name__: function for function in functions}
    for file, functions in {
        "mhc": (mhc_pre, mhc_fused_post_pre, mhc_post, hc_mix_stats_sinkhorn, mhc_combine, hc_pre, hc_post),
        "mhc_head": (fused_hc_head,),
        "mhc_post_split_h": (mhc_post_split_h,),
        "hy4_ihc": (fused_hy4_ihc_pre, fused_hy4_ihc_post, fused_hy4_ihc_post_pre),
    }.items()
}
