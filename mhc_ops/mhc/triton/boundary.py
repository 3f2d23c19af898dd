"""The boundary between two sublayers: mHC post of one and pre of the next.

| where | forward | backward |
| --- | --- | --- |
| Hopper, many tokens | one kernel and pre's finishing kernel | pre's steps, one kernel for pass B and post |
| up to 64 tokens | one launch (few_tokens.py) | pre's backward, then post's |
| elsewhere | post, then pre | pre's backward, then post's |

The kernels for many tokens are in boundary_fwd.py, which makes x_next and projects it, and boundary_bwd.py. The forward
has the same bits in all three rows. mhc_post_pre_bwd, which no stack calls, is always pre's backward, then post's.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from ...core import device
from ..options import PreOptions
from ..post_then_pre import apart, next_bwd, post_pre_bwd
from ..records import PassB, Post, Pre, PreBackward
from . import configs, few_tokens
from .post import mhc_post_bwd, mhc_post_fwd
from .pre_bwd import maps_backward, mhc_pre_bwd, pass_a, scaled_phi, sum_up, token_table
from .pre_finish import finish
from .pre_fwd import pre_fwd

mhc_post_pre_bwd = post_pre_bwd(mhc_pre_bwd, mhc_post_bwd)
composition = next_bwd(mhc_pre_bwd, mhc_post_bwd)


def mhc_next_fwd(
    *, link: Tensor | None, linked: bool, link_next: Tensor, read: Tensor | None, h_pre_next: Tensor, **arguments: Any
) -> None:
    """The links are not read."""
    mhc_post_pre_fwd(**arguments, read=read, h_pre_next=None if read is None else h_pre_next)


def mhc_post_pre_fwd(*, x: Tensor, x_next: Tensor, options: PreOptions, **arguments: Any) -> None:
    of_post, of_pre = apart(arguments)
    post = Post(x=x, **of_post, transposed=options.transposed, x_next=x_next)
    pre = Pre(x=x_next, options=options, **of_pre)
    T = x.numel() // pre.phi.shape[1]
    tile = few_tokens.chosen(x, T, pre.phi.shape[0])
    if tile is not None and T:
        few_tokens.few_fwd(tile, pre, post)
        return
    read = pre.read if pre.layer_norm_weight is None else None  # the norm has a kernel for h_in
    if not is_fused(x=x, **of_post, x_next=x_next, phi=pre.phi, read=read):
        mhc_post_fwd(**post._asdict())
        pre_fwd(pre)
        return
    project, h_in = post_project(), None if read is None else pre.h_in
    assert project is not None, "is_fused says so"
    partials, split = project(**post._asdict(), phi=pre.phi, gamma=pre.gamma, read=read, h_in=h_in)
    finish(pre if read is None else pre._replace(read=None, h_in=None), partials, split)


def is_fused(
    *,
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    x_next: Tensor,
    phi: Tensor,
    read: Tensor | None,
) -> bool:
    """Whether the forward's kernel takes these tensors. It copies blocks that begin and are wide in 16 bytes. Both
    sublayers have a residual map or neither has."""
    n, D = x.shape[-2:]
    if (h_res is None) != (phi.shape[0] == 2 * n):
        return False
    maps = [tensor for tensor in (h_post, h_res, read) if tensor is not None]
    return (
        configs.boundary_fwd(n, D, h_out.numel() // D, device.of(x.device)) is not None
        and post_project() is not None
        and all(tensor.dtype == configs.BOUNDARY_DTYPE for tensor in (x, h_out))
        and all(tensor.dtype == configs.MAPS_DTYPE for tensor in maps)
        and not any(tensor.data_ptr() % 16 for tensor in (x, h_out, *maps))
    )


@cache
def post_project() -> Callable[..., Any] | None:
    """The launcher in boundary_fwd.py; None where Triton does not have the Gluon that it is written for."""
    try:
        from .boundary_fwd import post_project
    except ImportError:
        return None
    return post_project


def mhc_next_bwd(**arguments: Any) -> None:
    if is_one_kernel(**arguments):
        as_one_kernel(**arguments)
    else:
        composition(**arguments)


def is_one_kernel(
    *,
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    phi: Tensor,
    dh_in: Tensor | None,
    dx_next: Tensor | None,
    dlink_next: Tensor | None,
    **_: Any,
) -> bool:
    """Whether the backward's kernel takes these tensors. It needs the gradients that a sublayer in a stack gets, and
    no dx_next, which x_next gets where a hook used it. The tensors are copied as those of `is_fused`."""
    if dh_in is None or dlink_next is None or dx_next is not None:
        return False
    n, D = x.shape[-2:]
    if (h_res is None) != (phi.shape[0] == 2 * n):
        return False
    enough = x.numel() >= configs.BOUNDARY_TOKENS * n * D
    if configs.boundary_bwd(n, D, x.dtype, enough, device.of(x.device)) is None or boundary_pass() is None:
        return False
    maps = (h_post,) if h_res is None else (h_post, h_res)
    wide = all(tensor.dtype == configs.MAPS_DTYPE for tensor in maps)
    narrow = all(tensor.dtype == configs.BOUNDARY_DTYPE for tensor in (h_out, dh_in, dlink_next))
    described = (x, h_out, *maps, dh_in, dlink_next)
    return wide and narrow and all(tensor.data_ptr() % 16 == 0 for tensor in described)


def as_one_kernel(
    *,
    x: Tensor,
    x_next: Tensor,
    options: PreOptions,
    dx_next: None,
    dlink_next: Tensor,
    dlink: Tensor,
    **arguments: Any,
) -> None:
    """The steps of pre_bwd.py, with boundary_bwd.py's kernel in the place of pass B."""
    of_post, of_pre = apart(arguments)
    pre = PreBackward(x=x_next, options=options, **of_pre, dx_next=dlink_next, dx=dlink)
    parts, token = scaled_phi(pre), token_table(pre)
    dh_pre, dread = pre.dh_pre, pre.dread if pre.read is not None else None
    if pre.read is None or pre.layer_norm_weight is not None:
        dh_pre, _ = pass_a(pre, token.table)
        dread = None  # pass A has made it; without it, the boundary's kernel does
    dh_mix, sums = maps_backward(pre, token, dh_pre)
    boundary = boundary_pass()
    assert boundary is not None, "is_one_kernel says so"
    assert pre.dh_in is not None and token.table is not None, "is_one_kernel says so"
    pass_b = PassB(
        dh_in=pre.dh_in,
        dx_next=dlink_next,
        dh_mix=dh_mix,
        parts=parts,
        layer_norm_weight=pre.layer_norm_weight,
        table=token.table,
        dx=dlink,
    )
    A, dweight, dots = boundary(
        x=x,
        **of_post,
        transposed=options.transposed,
        dread=dread,
        pass_b=pass_b,
    )
    sum_up(pre, A, sums, dweight, dots)


@cache
def boundary_pass() -> Callable[..., Any] | None:
    """The launcher in boundary_bwd.py; None where Triton does not have the Gluon that it is written for."""
    try:
        from .boundary_bwd import boundary_pass
    except ImportError:
        return None
    return boundary_pass
