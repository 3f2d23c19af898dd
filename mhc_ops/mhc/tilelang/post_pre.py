"""mHC post and the next layer's pre in one call: their kernels one after the other."""

from ..composed import next_bwd, next_fwd, post_pre_bwd
from .post import mhc_post_bwd, mhc_post_fwd
from .pre_bwd import mhc_pre_bwd
from .pre_fwd import mhc_pre_fwd


def mhc_post_pre_fwd(*, x, h_out, h_post, h_res, options, x_next, h_post_next, h_res_next, **of_pre):
    """of_pre: what else pre takes and fills, of the next layer"""
    mhc_post_fwd(x=x, h_out=h_out, h_post=h_post, h_res=h_res, transposed=options.transposed, x_next=x_next)
    mhc_pre_fwd(x=x_next, options=options, h_post=h_post_next, h_res=h_res_next, **of_pre)


mhc_post_pre_bwd = post_pre_bwd(mhc_pre_bwd, mhc_post_bwd)
mhc_next_fwd = next_fwd(mhc_post_fwd, mhc_pre_fwd)
mhc_next_bwd = next_bwd(mhc_pre_bwd, mhc_post_bwd)
