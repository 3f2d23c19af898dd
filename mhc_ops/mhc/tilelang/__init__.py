"""TileLang kernels of mHC (NVIDIA, AMD). Launchers are named as the contracts in contracts.py."""

from .boundary import mhc_next_bwd, mhc_next_fwd, mhc_post_pre_bwd, mhc_post_pre_fwd
from .post import mhc_layer_post, mhc_post_bwd, mhc_post_fwd
from .pre_bwd import mhc_head_bwd, mhc_pre_bwd
from .pre_fwd import mhc_head_fwd, mhc_layer_pre, mhc_pre_fwd
from .sinkhorn import sinkhorn_bwd, sinkhorn_fwd

__all__ = [
    "mhc_head_bwd",
    "mhc_head_fwd",
    "mhc_layer_post",
    "mhc_layer_pre",
    "mhc_next_bwd",
    "mhc_next_fwd",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_post_pre_bwd",
    "mhc_post_pre_fwd",
    "mhc_pre_bwd",
    "mhc_pre_fwd",
    "sinkhorn_bwd",
    "sinkhorn_fwd",
]
