"""A boundary as post of one sublayer and pre of the next, made of the launchers that every backend has for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .options import PreOptions

Launcher = Callable[..., None]
Arguments = dict[str, Any]

_OF_POST = ("h_out", "h_post", "h_res", "dh_out", "dh_post", "dh_res")


def apart(arguments: Arguments) -> tuple[Arguments, Arguments]:
    """The arguments of a boundary's launcher as those of post, and those of pre, which have no _next there."""
    post = {name: arguments[name] for name in _OF_POST if name in arguments}
    pre = {name.removesuffix("_next"): value for name, value in arguments.items() if name not in post}
    return post, pre


def post_pre_fwd(mhc_post_fwd: Launcher, mhc_pre_fwd: Launcher) -> Launcher:
    """mhc_post_pre_fwd: post, then pre, with the bits of both."""

    def mhc_post_pre_fwd(*, x: Tensor, x_next: Tensor, options: PreOptions, **arguments: Any) -> None:
        post, pre = apart(arguments)
        mhc_post_fwd(x=x, **post, transposed=options.transposed, x_next=x_next)
        mhc_pre_fwd(x=x_next, options=options, **pre)

    return mhc_post_pre_fwd


def post_pre_bwd(mhc_pre_bwd: Launcher, mhc_post_bwd: Launcher) -> Launcher:
    """mhc_post_pre_bwd: pre's backward adds the gradient that x_next got from elsewhere. Its dx stays in fp32, because
    post's backward, which reads it, rounds once more."""

    def mhc_post_pre_bwd(
        *, x: Tensor, x_next: Tensor, options: PreOptions, dx_next: Tensor | None, dx: Tensor, **arguments: Any
    ) -> None:
        post, pre = apart(arguments)
        whole = torch.empty_like(x, dtype=torch.float32)
        mhc_pre_bwd(x=x_next, options=options, **pre, dx_next=None, dx_added=dx_next, dx=whole)
        mhc_post_bwd(x=x, **post, transposed=options.transposed, dx_next=whole, residual=True, dx=dx)

    return mhc_post_pre_bwd


def next_bwd(mhc_pre_bwd: Launcher, mhc_post_bwd: Launcher) -> Launcher:
    """mhc_next_bwd: pre's backward of the next sublayer mixes dlink_next. Post's backward of the sublayer before reads
    the gradient of x_next as it is stored, so the bits are those of two layers."""

    def mhc_next_bwd(
        *,
        x: Tensor,
        x_next: Tensor,
        options: PreOptions,
        dx_next: Tensor | None,
        dlink_next: Tensor | None,
        dlink: Tensor,
        **arguments: Any,
    ) -> None:
        post, pre = apart(arguments)
        mhc_pre_bwd(x=x_next, options=options, **pre, dx_next=dlink_next, dx_added=dx_next, dx=dlink)
        unwanted = x.new_empty(0)
        mhc_post_bwd(x=x, **post, transposed=options.transposed, dx_next=dlink, residual=False, dx=unwanted)

    return mhc_next_bwd
