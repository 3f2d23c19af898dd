"""Fused operators for mHC (manifold-constrained hyper-connections) and channel-last causal conv1d."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from .conv.modules import ShortConv
from .conv.ops import causal_conv1d, causal_conv1d_update, short_conv
from .core.backend import read_environment, use_backend
from .mhc.guide import (
    MHCBackwardTileLang,
    MHCForwardPreTileLang,
    mhc_backward_manual,
    mhc_backward_tilelang,
    mhc_backward_triton,
    mhc_forward_pre_tilelang,
    mhc_forward_pre_triton,
    mhc_forward_pre_triton_optimized,
)
from .mhc.metrics import Metrics, metrics
from .mhc.modules import HyperConnection, HyperHead, MHCBlock
from .mhc.ops import (
    Carry,
    mhc_backward,
    mhc_enter,
    mhc_expand,
    mhc_forward_pre,
    mhc_head,
    mhc_layer,
    mhc_leave,
    mhc_maps,
    mhc_mean,
    mhc_next,
    mhc_post,
    mhc_post_pre,
    mhc_pre,
    mhc_read,
    sinkhorn,
)
from .mhc.stack import HyperStack
from .mhc.warmup import warmup

__version__ = "0.1.0"
read_environment()

# Imported when they are first asked for: `import mhc_ops` is to load no more of torch than the operators need.
MODULES = ("compat", "convert", "distributed", "hub")
if TYPE_CHECKING:
    from . import compat, convert
    from . import distributed as distributed
    from . import hub as hub
else:

    def __getattr__(name: str) -> ModuleType:
        if name not in MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})


__all__ = [
    "Carry",
    "HyperConnection",
    "HyperHead",
    "HyperStack",
    "MHCBackwardTileLang",
    "MHCBlock",
    "MHCForwardPreTileLang",
    "Metrics",
    "ShortConv",
    "causal_conv1d",
    "causal_conv1d_update",
    "compat",
    "convert",
    "metrics",
    "mhc_backward",
    "mhc_backward_manual",
    "mhc_backward_tilelang",
    "mhc_backward_triton",
    "mhc_enter",
    "mhc_expand",
    "mhc_forward_pre",
    "mhc_forward_pre_tilelang",
    "mhc_forward_pre_triton",
    "mhc_forward_pre_triton_optimized",
    "mhc_head",
    "mhc_layer",
    "mhc_leave",
    "mhc_maps",
    "mhc_mean",
    "mhc_next",
    "mhc_post",
    "mhc_post_pre",
    "mhc_pre",
    "mhc_read",
    "short_conv",
    "sinkhorn",
    "use_backend",
    "warmup",
]
