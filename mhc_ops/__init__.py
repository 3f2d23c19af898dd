"""Fused operators for mHC (manifold-constrained hyper-connections) and channel-last causal conv1d.

`__all__` has the names for new code. The names of the original guide (`mhc_ops.guide`) can be imported from here too.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from .conv.modules import ShortConv
from .conv.ops import causal_conv1d, causal_conv1d_prefill, causal_conv1d_update, short_conv
from .conv.warmup import conv_warmup
from .core.backend import read_environment, use_backend
from .core.optim import parameter_groups
from .guide import *  # noqa: F403  the names of its __all__, which type checkers re-export
from .mhc.metrics import Metrics, metrics
from .mhc.modules import HyperConnection, HyperHead
from .mhc.ops import (
    Carry,
    mhc_enter,
    mhc_expand,
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

__version__ = "0.1.0"  # pyproject.toml reads it here
read_environment()

# These load when they are first used, because `import mhc_ops` loads no more of torch than the operators need.
MODULES = ("compat", "convert", "distributed", "hub")
if TYPE_CHECKING:
    from . import compat as compat
    from . import convert as convert
    from . import distributed as distributed
    from . import hub as hub
else:

    def __getattr__(name: str) -> ModuleType:
        if name not in MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    helpers = {"MODULES", "ModuleType", "TYPE_CHECKING", "importlib", "read_environment"}
    return sorted({*globals(), *MODULES} - helpers)


__all__ = [
    "Carry",
    "HyperConnection",
    "HyperHead",
    "HyperStack",
    "Metrics",
    "ShortConv",
    "causal_conv1d",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "conv_warmup",
    "metrics",
    "mhc_enter",
    "mhc_expand",
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
    "parameter_groups",
    "short_conv",
    "sinkhorn",
    "use_backend",
    "warmup",
]
