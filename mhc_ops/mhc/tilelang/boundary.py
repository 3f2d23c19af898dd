"""The boundary between two layers: the kernels of mHC post and of the next layer's pre, one after the other."""

from typing import Any

from torch import Tensor

from ..post_then_pre import next_bwd, post_pre_bwd, post_pre_fwd
from .post import mhc_post_bwd, mhc_post_fwd
from .pre_bwd import mhc_pre_bwd
from .pre_fwd import mhc_pre_fwd

mhc_post_pre_fwd = post_pre_fwd(mhc_post_fwd, mhc_pre_fwd)
mhc_post_pre_bwd = post_pre_bwd(mhc_pre_bwd, mhc_post_bwd)
mhc_next_bwd = next_bwd(mhc_pre_bwd, mhc_post_bwd)


def mhc_next_fwd(
    *, link: Tensor | None, linked: bool, link_next: Tensor, read: Tensor | None, h_pre_next: Tensor, **arguments: Any
) -> None:
    """The links are not read, and h_pre_next is empty."""
    assert read is None, "prepare.py refuses it"
    mhc_post_pre_fwd(**arguments)
