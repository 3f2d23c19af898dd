"""Triton kernels of the causal convolution (NVIDIA, AMD). Launchers are named as the contracts in contracts.py."""

from .bwd import causal_conv1d_bwd
from .fwd import causal_conv1d_fwd
from .prefill import causal_conv1d_prefill_
from .short_conv import short_conv_bwd, short_conv_fwd
from .step import causal_conv1d_step_
from .update import causal_conv1d_update_

__all__ = [
    "causal_conv1d_bwd",
    "causal_conv1d_fwd",
    "causal_conv1d_prefill_",
    "causal_conv1d_step_",
    "causal_conv1d_update_",
    "short_conv_bwd",
    "short_conv_fwd",
]
