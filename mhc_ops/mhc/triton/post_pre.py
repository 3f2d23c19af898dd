"""The boundary between two layers: mHC post of one and pre of the next.

Forward, on Hopper: one kernel makes x_next and projects it (boundary_fwd.py), shifted also h_in; then comes pre's
finishing kernel.
Up to 64 tokens: one launch (few.py). Elsewhere: post, then pre. The bits are the same, so it is nobody's concern which
was taken.
Backward: one after the other.
"""

from functools import cache

from ...core import device
from ..composed import post_pre_bwd
from . import configs, few
from .post import mhc_post_bwd, mhc_post_fwd
from .pre_bwd import mhc_pre_bwd
from .pre_finish import finish
from .pre_fwd import mhc_pre_fwd


def mhc_post_pre_fwd(*, x, h_out, h_post, h_res, phi, gamma, options, x_next, h_post_next, h_res_next, **of_finish):
    """of_finish: what else pre's finishing kernel takes and fills, of the next layer"""
    of_post = {"x": x, "h_out": h_out, "h_post": h_post, "h_res": h_res, "x_next": x_next}
    of_finish["options"] = options
    T = x.numel() // phi.shape[1]
    tile = few.chosen(x, T, phi.shape[0])
    if tile is not None and T:
        maps = {"h_post_next": h_post_next, "h_res_next": h_res_next}
        few.few_fwd(tile=tile, **of_post, phi=phi, gamma=gamma, **maps, **of_finish)
        return
    of_finish |= {"x": x_next, "h_post": h_post_next, "h_res": h_res_next}
    read = of_finish.get("read") if of_finish["layer_norm_weight"] is None else None  # the norm has a kernel for h_in
    if is_fused(**of_post, phi=phi, read=read):
        of_project = {**of_post, "transposed": options.transposed, "phi": phi, "gamma": gamma}
        if read is not None:
            of_project |= {"read": read, "h_in": of_finish["h_in"]}
            of_finish |= {"read": None, "h_in": None}
        partials, split = post_project()(**of_project)
        finish(**of_finish, partials=partials, split=split)
    else:
        mhc_post_fwd(**of_post, transposed=options.transposed)
        mhc_pre_fwd(**of_finish, phi=phi, gamma=gamma)


def is_fused(*, x, h_out, h_post, h_res, x_next, phi, read):
    """Whether the boundary's kernel takes these tensors. It copies blocks, which begin and are wide in 16 bytes, and
    both layers have a residual map or neither has."""
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
def post_project():
    """The launcher in boundary_fwd.py; None where Triton does not have the Gluon that it is written for."""
    try:
        from .boundary_fwd import post_project
    except ImportError:
        return None
    return post_project


def mhc_next_fwd(*, link, linked, link_next, read, h_pre_next, **arguments):
    """Nobody reads the links."""
    mhc_post_pre_fwd(**arguments, read=read, h_pre=None if read is None else h_pre_next)


mhc_post_pre_bwd = post_pre_bwd(mhc_pre_bwd, mhc_post_bwd)
