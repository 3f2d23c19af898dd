"""Launchers that are made of a backend's other launchers in the same way in every backend."""

from collections.abc import Callable

import torch

Launcher = Callable[..., None]


def post_pre_bwd(mhc_pre_bwd: Launcher, mhc_post_bwd: Launcher) -> Launcher:
    """mhc_post_pre_bwd: pre's backward, with the gradient of x_next that came from elsewhere added in its second pass;
    its dx stays in fp32, because post's backward, which reads it, rounds once more."""

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

    return mhc_post_pre_bwd
