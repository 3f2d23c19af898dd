"""vLLM's custom ops of mHC as functions: the arguments, the results and their order."""

from typing import Any

import torch
from torch import Tensor

from ...core.check import check_shapes
from ...mhc import ops
from .. import servers
from ..servers import column, map_options, norm_options

Three = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]
Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


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
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Three:
    """post_mix [..., n, 1], comb_mix [..., n, n] and layer_input [..., D]; `mhc_ops.mhc_pre`.

    residual: [..., n, D]   norm_weight: [D], of the sublayer's own norm. n_splits has no effect.
    """
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
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Four:
    """The streams after a sublayer that returned x [..., D], then what `mhc_pre` returns for the next one;
    `mhc_ops.mhc_post_pre`. n_splits and tile_n have no effect."""
    own = {"phi": fn, "alpha": hc_scale, "bias": hc_base, **norm_options(norm_weight, norm_eps)}
    options = map_options(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
    return servers.post_pre(x, residual, post_layer_mix, comb_res_mix, {**own, **options})


def mhc_pre_delayed(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    pre_mix: Tensor | None = None,
    x: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    sublayer_out: Tensor | None = None,
    post_layer_mix: Tensor | None = None,
    comb_res_mix: Tensor | None = None,
) -> Five:
    """The shifted form of V4.1: streams, post_mix, comb_mix, layer_input, and the pre_mix of the next sublayer.

    pre_mix: [..., n], what the sublayer before returned; None reads stream 0
    x: [..., D], the maps are those of x in place of the streams: the embedding, at the first sublayer; fn is then
    [n² + 2n, D], the sum over the streams. layer_input is read from the streams as without x
    sublayer_out, post_layer_mix, comb_res_mix: of the sublayer that ended, which is written back first
    """
    options = map_options(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
    n, D = residual.shape[-2:]
    if x is not None:
        check_shapes("mhc_pre_delayed", x=(x, (*residual.shape[:-2], D)), fn=(fn, (n * n + 2 * n, D)))
        fn = torch.nn.functional.pad(fn, (0, (n - 1) * D))  # on n copies of x it gives fn @ x
    of_maps: Any = {"phi": fn, "alpha": hc_scale, "bias": hc_base, **options}
    own = {**of_maps, **norm_options(norm_weight, norm_eps)}
    if sublayer_out is None:
        for name, given in (("post_layer_mix", post_layer_mix), ("comb_res_mix", comb_res_mix)):
            if given is not None:
                raise ValueError(f"mhc_pre_delayed: {name} needs sublayer_out, got None")
        h_in, carry = ops.mhc_enter(residual, shifted=True, read=pre_mix, **own)
    elif post_layer_mix is None or comb_res_mix is None:
        raise ValueError("mhc_pre_delayed: sublayer_out needs post_layer_mix and comb_res_mix, got None")
    elif pre_mix is None or torch.is_grad_enabled():
        streams = mhc_post(sublayer_out, residual, post_layer_mix, comb_res_mix)
        h_in, carry = ops.mhc_enter(streams, shifted=True, read=pre_mix, **own)
    else:
        ended = ops.Carry(residual, column(post_layer_mix, residual), comb_res_mix, pre_mix)
        h_in, carry = ops.mhc_next(ended, sublayer_out, **own)
    h_pre, h_post, h_res = carry.read, carry.h_post, carry.h_res
    if x is not None:
        h_pre, h_post, h_res = ops.mhc_maps(ops.mhc_expand(x, n), **of_maps)
    assert h_pre is not None and h_res is not None
    return carry.x, h_post.unsqueeze(-1), h_res, h_in, h_pre


def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """post_layer_mix[j]·x + Σ_i comb_res_mix[i, j]·residual[i], shaped as residual; `mhc_ops.mhc_post`."""
    return servers.post(x, residual, post_layer_mix, comb_res_mix)


def hc_head(
    hidden_states: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, rms_norm_eps: float, hc_eps: float
) -> Tensor:
    """The n streams as one: [..., n, D] to [..., D]; `mhc_ops.mhc_head`. hc_fn: [n, nD]   hc_scale: [1]"""
    return ops.mhc_head(hidden_states, hc_fn, hc_scale, hc_base, norm_eps=rms_norm_eps, hc_eps=hc_eps)
