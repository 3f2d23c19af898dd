"""Dao-AILab's causal-conv1d. A program that uses that package runs with the import line changed,

    from mhc_ops.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states

or unchanged: after `install()`, or under `python -m mhc_ops.compat.causal_conv1d script.py`, `import causal_conv1d`
finds these functions.

Arguments, layouts, results and what is written in place are those of version 1.7. Its limits do not apply: any width
and D, any strides, states and seq_idx in both layouts, CPU tensors. The device or `mhc_ops.use_backend` chooses the
backend.
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
