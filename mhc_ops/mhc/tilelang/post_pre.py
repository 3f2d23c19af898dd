"""mHC post and the next layer's pre in one call: their kernels one after the other."""

from ..composed import post_pre_bwd
from .post import mhc_post_bwd, mhc_post_fwd
from .pre_bwd import mhc_pre_bwd
from .pre_fwd import without_h_pre


def mhc_post_pre_fwd(x, h_out, h_post, h_res, phi, alpha, bias, gamma, *options_and_outputs):
    *options, x_next, h_in, h_post_next, h_res_next, inv_rms, h_mix = options_and_outputs
    mhc_post_fwd(x, h_out, h_post, h_res, x_next)
    without_h_pre(x_next, phi, alpha, bias, gamma, *options, h_in, h_post_next, h_res_next, inv_rms, h_mix)


mhc_post_pre_bwd = post_pre_bwd(mhc_pre_bwd, mhc_post_bwd)
