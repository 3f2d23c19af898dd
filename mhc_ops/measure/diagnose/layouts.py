"""The axes of every output and gradient, as words: what a place is said in, and what a heat map is drawn over."""

import math

from ..cases import Case
from ..conv_cases import AnyCase, ConvCase

Layout = dict[str, int]  # axis -> size; their product is the size of the tensor

_MHC = {
    "x": ("token", "stream", "channel"),
    "x_next": ("token", "stream", "channel"),
    "h_in": ("token", "channel"),
    "h_out": ("token", "channel"),
    "out": ("token", "channel"),
    "h_pre": ("token", "stream"),
    "h_post": ("token", "stream"),
    "h_res": ("token", "old stream", "new stream"),
    "logits": ("token", "old stream", "new stream"),
    "inv_rms": ("token",),
    "h_mix": ("token", "row"),
    "phi": ("row", "stream", "channel"),
    "alpha": ("section",),
    "bias": ("row",),
    "gamma": ("stream", "channel"),
}
_CONV = {
    "x": ("sequence", "token", "stream", "channel"),
    "y": ("sequence", "token", "stream", "channel"),
    "residual": ("sequence", "token", "channel"),
    "weight": ("stream", "channel", "tap"),
    "bias": ("channel",),
    "gamma": ("stream", "channel"),
    "initial_state": ("sequence", "channel", "step"),
    "final_state": ("sequence", "channel", "step"),
    "conv_state": ("slot", "channel", "step"),
}


def layout(case: AnyCase, output: str, shape: tuple[int, ...]) -> Layout:
    """`output`: the name of an output, or d and the name of an input."""
    table = _MHC if isinstance(case, Case) else _CONV
    names = table[output] if output in table else table[output.removeprefix("d")]
    if isinstance(case, Case):
        n, M = case.n, max(rows.stop for rows in section_names(case).values())
        sizes = {"stream": n, "old stream": n, "new stream": n, "channel": case.D, "row": M}
        sizes |= {"section": len(section_names(case)), "token": math.prod(case.outer)}
    else:
        first, last = (*shape, 1)[0], (1, *shape)[-1]
        sizes = {"stream": case.n, "channel": case.D, "tap": case.W, "token": case.L}
        sizes |= {"sequence": first, "slot": first, "step": last}
    return {name: sizes[name] for name in names if name != "stream" or isinstance(case, Case) or case.n}


def section_names(case: AnyCase) -> dict[str, range]:
    """The rows of each section of phi, bias and h_mix."""
    if isinstance(case, ConvCase):
        return {}
    n = case.n
    if case.subject.name == "mhc_head":
        return {"pre": range(n)}
    return {"pre": range(n), "post": range(n, 2 * n), "res": range(2 * n, 2 * n + n * n)}
