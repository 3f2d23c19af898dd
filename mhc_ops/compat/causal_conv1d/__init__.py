"""Dao-AILab's causal-conv1d: a program that uses that package runs with the import line changed,

    from mhc_ops.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states

or as it is: after `install()`, and in what `python -m mhc_ops.compat.causal_conv1d script.py` runs, `import
causal_conv1d` finds these functions.

Arguments, layouts, what is written in place and what is returned are those of version 1.7; its limits are not: any
width and D, any strides, states and seq_idx in both layouts, CPU tensors. The backend is chosen by the device or by
`mhc_ops.use_backend`.
"""

from .by_name import install, uninstall
from .causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update
from .causal_conv1d_varlen import causal_conv1d_varlen_states

__all__ = [
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "install",
    "uninstall",
]
