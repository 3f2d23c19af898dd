"""Fused operators for mHC (manifold-constrained hyper-connections) and channel-last causal conv1d."""

from .core.backend import use_backend
from .mhc.guide import (
    mhc_backward_manual,
    mhc_backward_triton,
    mhc_forward_pre_triton,
    mhc_forward_pre_triton_optimized,
)
from .mhc.modules import HyperConnection, HyperHead, MHCBlock
from .mhc.ops import (
    mhc_backward,
    mhc_expand,
    mhc_forward_pre,
    mhc_head,
    mhc_layer,
    mhc_post,
    mhc_post_pre,
    mhc_pre,
    sinkhorn,
)

__version__ = "0.1.0"

__all__ = [
    "HyperConnection",
    "HyperHead",
    "MHCBlock",
    "mhc_backward",
    "mhc_backward_manual",
    "mhc_backward_triton",
    "mhc_expand",
    "mhc_forward_pre",
    "mhc_forward_pre_triton",
    "mhc_forward_pre_triton_optimized",
    "mhc_head",
    "mhc_layer",
    "mhc_post",
    "mhc_post_pre",
    "mhc_pre",
    "sinkhorn",
    "use_backend",
]
