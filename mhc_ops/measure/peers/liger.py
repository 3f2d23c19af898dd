"""Liger: phi is [nD, M] in the type of x (its tensor-core path), alpha three scalars.

Its maps are ours, its mix is transposed: x_next[o] = Σ_i h_res[o, i]·x[i]. So its post takes h_res transposed. In
the layer, where h_res goes from its pre straight into its post, the res rows of phi and bias are transposed instead.
That leaves the Sinkhorn of transposed logits, which is the transposed Sinkhorn only as far as both have converged:
with four streams they differ by 1e-5 in norm at logits of σ=1, by 8e-3 at σ=3 (single entries by up to 0.1).
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..cases import Tensors
from .peer import EPS, POST_MULT, SINKHORN_ITERS, TENSOR_CORES, Layer, Peer, Prepared, load_module


def _pre(
    ops: Any, x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor
) -> tuple[Tensor, ...]:
    h_pre, h_post, h_res = ops.liger_mhc_coeffs(
        x,
        phi,
        b,
        alpha_pre,
        alpha_post,
        alpha_res,
        allow_fp32=True,
        tmax=SINKHORN_ITERS,
        rms_eps=EPS,
        pre_eps=EPS,
        sinkhorn_eps=EPS,
        post_mult=POST_MULT,
    )
    return ops.liger_mhc_pre(x, h_pre), h_post, h_res


def _post(ops: Any, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> tuple[Tensor, ...]:
    return (ops.liger_mhc_post_res(x, f_out, h_post, h_res),)


def _post_pre(
    ops: Any, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor, **parameters: Tensor
) -> tuple[Tensor, ...]:
    (x_next,) = _post(ops, x, f_out, h_post, h_res)
    return x_next, *_pre(ops, x_next, **parameters)


def _layer(ops: Any, x: Tensor, f_out: Tensor | Layer, **parameters: Tensor) -> tuple[Tensor, ...]:
    h_in, h_post, h_res = _pre(ops, x, **parameters)
    return *_post(ops, x, f_out(h_in) if callable(f_out) else f_out, h_post, h_res), h_in


_CALLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "mhc_pre": _pre,
    "mhc_post": _post,
    "mhc_post_pre": _post_pre,
    "mhc_layer": _layer,
}


def _prepare(subject: str, ours: Tensors) -> Prepared | None:
    if subject not in _CALLS or not _takes(ours):
        return None
    ops = _load()
    ours = {name: tensor.detach() for name, tensor in ours.items()}
    x = ours["x"]
    theirs = {"x": x}
    if "h_out" in ours:
        theirs["f_out"] = ours["h_out"]
    if "h_res" in ours:
        theirs |= {"h_post": ours["h_post"], "h_res": ours["h_res"].mT.contiguous()}
    if "phi" in ours:
        phi, bias = ours["phi"], ours["bias"]
        if subject == "mhc_layer":
            rows = _rows_of_transposed_res(x.shape[-2], x.device)
            phi, bias = phi[rows], bias[rows]
        scalars = (alpha.clone() for alpha in ours["alpha"].float().unbind())
        theirs |= {"phi": phi.T.to(x.dtype).contiguous(), "b": bias.float()}
        theirs |= dict(zip(("alpha_pre", "alpha_post", "alpha_res"), scalars))
    return Prepared(theirs, partial(_CALLS[subject], ops), {"x": "x", "f_out": "h_out"})


def _load() -> ModuleType:
    return load_module("liger_kernel.transformers.functional", LIGER)


def _takes(ours: Tensors) -> bool:
    """No gamma; streams that are a power of two."""
    return "gamma" not in ours and ours["x"].shape[-2].bit_count() == 1


def _rows_of_transposed_res(n: int, device: torch.device) -> Tensor:
    """The M rows of phi with res row i·n + j exchanged for row j·n + i."""
    rows = torch.arange(n * n + 2 * n, device=device)
    return torch.cat([rows[: 2 * n], rows[2 * n :].view(n, n).T.flatten()])


LIGER = Peer(
    "Liger", "liger-kernel", "phi and the projection in the type of x (bf16, else tf32)", TENSOR_CORES, _load, _prepare
)
