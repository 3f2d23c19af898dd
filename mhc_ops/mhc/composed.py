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
        options,
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
            options=options,
            dh_in=dh_in,
            dh_post=dh_post_next,
            dh_res=dh_res_next,
            dx_next=None,
            dx_added=dx_next,
            dx=whole,
            **of_pre,
        )
        mhc_post_bwd(
            x=x,
            h_out=h_out,
            h_post=h_post,
            h_res=h_res,
            transposed=options.transposed,
            dx_next=whole,
            residual=True,
            dx=dx,
            dh_out=dh_out,
            dh_post=dh_post,
            dh_res=dh_res,
        )

    return mhc_post_pre_bwd


def next_fwd(mhc_post_fwd: Launcher, mhc_pre_fwd: Launcher) -> Launcher:
    """mhc_next_fwd: post, then pre, with the bits of both."""

    def mhc_next_fwd(
        *,
        link,
        linked,
        x,
        h_out,
        h_post,
        h_res,
        read,
        options,
        x_next,
        h_post_next,
        h_res_next,
        h_pre_next,
        link_next,
        **of_pre,
    ):
        """of_pre: what else pre takes and fills, of the next sublayer. Nobody reads the links."""
        assert read is None, "only backends whose own boundary does it are shifted"
        mhc_post_fwd(x=x, h_out=h_out, h_post=h_post, h_res=h_res, transposed=options.transposed, x_next=x_next)
        mhc_pre_fwd(x=x_next, options=options, h_post=h_post_next, h_res=h_res_next, **of_pre)

    return mhc_next_fwd


def next_bwd(mhc_pre_bwd: Launcher, mhc_post_bwd: Launcher) -> Launcher:
    """mhc_next_bwd: pre's backward of the next sublayer, which mixes dlink_next, then post's of the one before, which
    reads the gradient of x_next as it is stored: the bits of two layers."""

    def mhc_next_bwd(
        *,
        x,
        h_out,
        h_post,
        h_res,
        options,
        x_next,
        dx_next,
        dh_in,
        dh_post_next,
        dh_res_next,
        dh_pre_next,
        dlink_next,
        dlink,
        dh_out,
        dh_post,
        dh_res,
        **of_pre,
    ):
        """of_pre: what else pre's backward takes and fills, of the next sublayer"""
        mhc_pre_bwd(
            x=x_next,
            options=options,
            dh_in=dh_in,
            dh_post=dh_post_next,
            dh_res=dh_res_next,
            dh_pre=dh_pre_next,
            dx_next=dlink_next,
            dx_added=dx_next,
            dx=dlink,
            **of_pre,
        )
        mhc_post_bwd(
            x=x,
            h_out=h_out,
            h_post=h_post,
            h_res=h_res,
            transposed=options.transposed,
            dx_next=dlink,
            residual=False,
            dx=x.new_empty(0),
            dh_out=dh_out,
            dh_post=dh_post,
            dh_res=dh_res,
        )

    return mhc_next_bwd
