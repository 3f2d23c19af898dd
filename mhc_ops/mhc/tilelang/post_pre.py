"""mHC post and the next layer's pre in one call: their kernels one after the other.

Backward: pre's, with the gradient of x_next that came from elsewhere added in its second pass; its dx_next stays in
fp32, because post's backward, which reads it, rounds once more.
"""

import torch

from .post import mhc_post_bwd, mhc_post_fwd
from .pre_bwd import mhc_pre_bwd
from .pre_fwd import without_h_pre


def mhc_post_pre_fwd(x, h_out, h_post, h_res, phi, alpha, bias, gamma, *options_and_outputs):
    *options, x_next, h_in, h_post_next, h_res_next, inv_rms, h_mix = options_and_outputs
    mhc_post_fwd(x, h_out, h_post, h_res, x_next)
    without_h_pre(x_next, phi, alpha, bias, gamma, *options, h_in, h_post_next, h_res_next, inv_rms, h_mix)


def mhc_post_pre_bwd(
    x,
    h_out,
    h_post,
    h_res,
    phi,
    alpha,
    bias,
    gamma,
    x_next,
    inv_rms,
    h_mix,
    dx_next,
    dh_in,
    dh_post_next,
    dh_res_next,
    hc_eps,
    post_mult,
    sinkhorn_iters,
    sinkhorn_eps,
    dx,
    dh_out,
    dh_post,
    dh_res,
    *of_parameters,
):
    whole = torch.empty_like(x, dtype=torch.float32)
    maps = (inv_rms, h_mix, dh_in, dh_post_next, dh_res_next)
    options = (hc_eps, post_mult, sinkhorn_iters, sinkhorn_eps)
    mhc_pre_bwd(x_next, phi, alpha, bias, gamma, *maps, dx_next, *options, whole, *of_parameters, mixed=False)
    mhc_post_bwd(x, h_out, h_post, h_res, whole, True, dx, dh_out, dh_post, dh_res)
