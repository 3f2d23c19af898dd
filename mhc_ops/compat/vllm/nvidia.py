"""The functions of mHC that vLLM's DeepSeek V4 and V4.1 call on NVIDIA, in place of custom ops."""

from types import FunctionType
from typing import Any

from torch import Tensor

from ...mhc import ops
from .. import servers
from ..servers import map_options, norm_options
from . import mhc
from .mhc import Four


def mhc_pre_broadcast(
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
    norm_eps: float = 1e-6,
    fn_broadcast: Tensor | None = None,
) -> Four:
    """`mhc_pre` of the first layer, of which residual [T, D] is the embedding. fn_broadcast, the sum of fn over the
    streams, is not needed: with fn the bits are those of `mhc_pre` on n copies."""
    streams = ops.mhc_expand(residual, fn.shape[1] // residual.shape[1])
    own = {"phi": fn, "alpha": hc_scale, "bias": hc_base, **norm_options(norm_weight, norm_eps)}
    options = map_options(rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat)
    return streams, *servers.pre(streams, {**own, **options})


def mhc_pre_delayed_alone(
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
) -> Four:
    """What `mhc_pre_delayed` returns without a sublayer that ended, but for the streams, which stay."""
    of_maps = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
    options: Any = {"pre_mix": pre_mix, "x": x, "norm_weight": norm_weight, "norm_eps": norm_eps}
    return mhc.mhc_pre_delayed(residual, fn, hc_scale, hc_base, *of_maps, **options)[1:]


def mhc_fused_post_pre_delayed(
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
    pre_mix: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    capture_aux: bool = False,
) -> tuple[Tensor, ...]:
    """What `mhc_pre_delayed` returns, and with capture_aux the mean of the new streams, else an empty tensor."""
    streams, *rest = mhc.mhc_pre_delayed(
        residual=residual,
        fn=fn,
        hc_scale=hc_scale,
        hc_base=hc_base,
        rms_eps=rms_eps,
        hc_pre_eps=hc_pre_eps,
        hc_sinkhorn_eps=hc_sinkhorn_eps,
        hc_post_mult_value=hc_post_mult_value,
        sinkhorn_repeat=sinkhorn_repeat,
        pre_mix=pre_mix,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        sublayer_out=x,
        post_layer_mix=post_layer_mix,
        comb_res_mix=comb_res_mix,
    )
    return streams, *rest, ops.mhc_mean(streams) if capture_aux else x.new_empty(0, x.shape[-1])


def hc_head_fused(
    hs_flat: Tensor, fn: Tensor, hc_scale: Tensor, hc_base: Tensor, rms_eps: float, hc_eps: float
) -> Tensor:
    return mhc.hc_head(hs_flat, fn, hc_scale, hc_base, rms_eps, hc_eps)


def hc_collapse(x: Tensor, pre_mix: Tensor) -> Tensor:
    return ops.mhc_read(x, pre_mix)


def is_not_supported(*arguments: Any) -> bool:
    """In the place of vLLM's tests for kernels that do more than one boundary on one GPU."""
    return False


def with_norm_eps(function: Any) -> Any:
    """The function with 1e-6 as the default of its last argument, as those have it that NVIDIA models call."""
    *defaults, _ = function.__defaults__
    return FunctionType(function.__code__, function.__globals__, function.__name__, (*defaults, 1e-6))


FUNCTIONS: dict[str, dict[str, Any]] = {
    "vllm.model_executor.kernels.mhc.tilelang": {
        "mhc_pre_tilelang": with_norm_eps(mhc.mhc_pre),
        "mhc_pre_broadcast_tilelang": mhc_pre_broadcast,
        "mhc_fused_post_pre_tilelang": with_norm_eps(mhc.mhc_fused_post_pre),
        "mhc_pre_delayed_tilelang": mhc_pre_delayed_alone,
        "mhc_fused_post_pre_delayed_tilelang": mhc_fused_post_pre_delayed,
        "mhc_post_tilelang": mhc.mhc_post,
        "hc_head_fused_kernel_tilelang": hc_head_fused,
    },
    "vllm.model_executor.kernels.mhc.triton": {"hc_collapse_triton": hc_collapse},
    "vllm.models.deepseek_v41.nvidia.ops.mhc": {
        "can_use_mega_mhc": is_not_supported,
        "supports_mhc_all_reduce": is_not_supported,
        "supports_mhc_overlap": is_not_supported,
    },
}
