"""Triton kernels of mHC (NVIDIA, AMD). Launchers are named as the contracts in ops.py."""

from .pre_bwd import mhc_pre_bwd
from .pre_fwd import mhc_pre_fwd

__all__ = ["mhc_pre_bwd", "mhc_pre_fwd"]
