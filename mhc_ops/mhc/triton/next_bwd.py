"""mHC next, backward: on Hopper pass B of the next sublayer and post's backward of the one before are one kernel; else
they are launched one after the other."""

from functools import cache, partial

from ...core import device
from ..composed import next_bwd
from . import configs
from .post import mhc_post_bwd
from .pre_bwd import mhc_pre_bwd

composition = next_bwd(mhc_pre_bwd, mhc_post_bwd)


def mhc_next_bwd(**arguments):
    if is_one_kernel(**arguments):
        as_one_kernel(**arguments)
    else:
        composition(**arguments)


def is_one_kernel(*, x, h_out, h_post, h_res, phi, dh_in, dx_next, dlink_next, **_):
    """Where all gradients come that a sublayer in a stack gets, and no other (somebody looked at x in between), in
    tensors that can be copied block by block, and both sublayers have a residual map or neither has."""
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
    of_post = {"x": x, "h_out": h_out, "h_post": h_post, "h_res": h_res, "transposed": options.transposed}
    of_post |= {"dh_out": dh_out, "dh_post": dh_post, "dh_res": dh_res}
    mhc_pre_bwd(
        x=x_next,
        options=options,
        dh_in=dh_in,
        dh_post=dh_post_next,
        dh_res=dh_res_next,
        dh_pre=dh_pre_next,
        dx_next=dlink_next,
        dx=dlink,
        boundary=partial(boundary_pass(), **of_post),
        **of_pre,
    )


@cache
def boundary_pass():
    """The launcher in boundary_bwd.py; None where Triton does not have the Gluon that it is written for."""
    try:
        from .boundary_bwd import boundary_pass
    except ImportError:
        return None
    return boundary_pass
