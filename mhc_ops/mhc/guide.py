"""The names of the original guide, one line each; its snippets run with only the import line changed."""

from functools import partial

from .manual import mhc_backward_manual
from .ops import mhc_backward, mhc_forward_pre

__all__ = [
    "mhc_backward_manual",
    "mhc_backward_triton",
    "mhc_forward_pre_triton",
    "mhc_forward_pre_triton_optimized",
]

mhc_forward_pre_triton = partial(mhc_forward_pre, backend="triton")
mhc_forward_pre_triton_optimized = mhc_forward_pre_triton  # one kernel serves small and large batches
mhc_backward_triton = partial(mhc_backward, backend="triton")
