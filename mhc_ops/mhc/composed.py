"""Launchers that are made of a backend's other launchers in the same way in every backend."""

from collections.abc import Callable

import torch

Launcher = Callable[..., None]


def post_pre_bwd(mhc_pre_bwd: Launcher, mhc_post_bwd: Launcher) -> Launcher:
    """mhc_post_pre_bwd: pre's backward, with the gradient of x_next that came from elsewhere added in its second pass;
    its dx stays in fp32, because post's backward, which reads it, rounds once more."""

    def mhc_post_pre_bwd(
        *,
        x,
        h_out,
        h_post,
        h_res,
        x_next,
        dx_next,
        dh_in,
        dh_post_next,
        dh_res_next,
        dx,
        dh_out,
        dh_post,
        dh_res,
        **of_pre,
    ):
        """of_pre: what else pre's backward takes, of the next layer"""
        whole = torch.empty_like(x, dtype=torch.float32)
        mhc_pre_bwd(
            x=x_next,
            dh_in=dh_in,
            dh_post=dh_post_next,
            dh_res=dh_res_next,
            dx_next=dx_next,
            dx=whole,
            mixed=False,
            **of_pre,
        )
        mhc_post_bwd(
            x=x,
            h_out=h_out,
            h_post=h_post,
            h_res=h_res,
            dx_next=whole,
            residual=True,
            dx=dx,
            dh_out=dh_out,
            dh_post=dh_post,
            dh_res=dh_res,
        )

    return mhc_post_pre_bwd
