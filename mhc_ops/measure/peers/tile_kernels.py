"""TileKernels: [1, T, ...] tensors named residual, x (our h_out), fn, scale, base, post_mix [..., n, 1] and comb_mix.
The same function as ours, with the projection in tf32 (3e-4 off in norm).

Its pre adds to the gradient of the streams in place, in a buffer that the backward of the same layer's post has left
at the storage of the streams; so does mhc_layer here. mhc_post_pre ends before that post: a stand-in leaves the
cotangent of x_next there, as in a model. In mhc_pre and mhc_head no other gradient reaches the streams, and pre takes
its unfused path, which clears and adds whole gradients: more than a model pays. The buffer outlives a backward of
post alone, so every prepared subject owns a copy of the streams.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cases import Tensors
from .peer import EPS, POST_MULT, SINKHORN_ITERS, TENSOR_CORES, Layer, Peer, Prepared, load_module, version

_GRADIENT_AT_STORAGE = "grad_from_mhc_post"
_PRE_OPTIONS = {
    "norm_eps": EPS,
    "pre_eps": EPS,
    "sinkhorn_eps": EPS,
    "sinkhorn_repeat": SINKHORN_ITERS,
    "post_mult_value": POST_MULT,
}


class _NextPost(torch.autograd.Function):
    """The streams as they are; backward leaves their cotangent where the post of the next layer would."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor) -> Tensor:
        ctx.save_for_backward(residual)
        return residual.view_as(residual)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (residual,) = ctx.saved_tensors
        cotangent = cotangents[0].contiguous()
        setattr(residual.untyped_storage(), _GRADIENT_AT_STORAGE, cotangent)
        return cotangent


def _maps(h_in: Tensor, post_mix: Tensor, comb_mix: Tensor) -> tuple[Tensor, ...]:
    """h_in, h_post, h_res"""
    return h_in.squeeze(0), post_mix.squeeze(-1).squeeze(0), comb_mix.squeeze(0)


def _pre(ops: Any, residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        h_in, maps = ops.mhc_pre(residual, fn, scale, base, **_PRE_OPTIONS)
        return _maps(h_in, *maps)
    mixes = ops.mhc_pre_norm_fn(residual, fn, None, EPS, fuse_grad_acc=False)
    pre_mix, post_mix, logits = ops.mhc_pre_split_mixes(mixes, scale, base, residual.shape[-2], POST_MULT, EPS)
    comb_mix = ops.sinkhorn_normalize(logits, repeat=SINKHORN_ITERS, eps=EPS)
    return _maps(ops.mhc_pre_apply_mix(residual, pre_mix), post_mix, comb_mix)


def _post(ops: Any, residual: Tensor, x: Tensor, post_mix: Tensor, comb_mix: Tensor) -> tuple[Tensor, ...]:
    return (ops.mhc_post(x, residual, post_mix, comb_mix).squeeze(0),)


def _post_pre(
    ops: Any, residual: Tensor, x: Tensor, post_mix: Tensor, comb_mix: Tensor, **parameters: Tensor
) -> tuple[Tensor, ...]:
    x_next = ops.mhc_post(x, residual, post_mix, comb_mix)
    h_in, maps = ops.mhc_pre(x_next, **parameters, **_PRE_OPTIONS)
    outputs = _maps(h_in, *maps)
    return _NextPost.apply(x_next).squeeze(0), *outputs  # last, so that its backward runs before that of pre


def _layer(ops: Any, residual: Tensor, x: Tensor | Layer, **parameters: Tensor) -> tuple[Tensor, ...]:
    h_in, maps = ops.mhc_pre(residual, **parameters, **_PRE_OPTIONS)
    return ops.mhc_post(x(h_in) if callable(x) else x, residual, *maps).squeeze(0), h_in.squeeze(0)


def _head(ops: Any, residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, ...]:
    # The parts of its mhc_head, which itself neither takes more than one token (a strided slice goes to a kernel for
    # dense tensors) nor has a backward (it asks for the gradient that a post leaves; none follows the last layer).
    n = residual.shape[-2]
    padded = F.pad(fn, (0, 0, 0, n * n + 2 * n - fn.shape[0]))
    mixes = ops.mhc_pre_norm_fn(residual, padded, None, EPS, fuse_grad_acc=False)
    mix = ops.mhc_head_compute_mix(mixes[..., :n].contiguous(), scale, base, EPS)
    return (ops.mhc_pre_apply_mix(residual, mix.unsqueeze(-1)).squeeze(0),)


def _sinkhorn(ops: Any, logits: Tensor) -> tuple[Tensor, ...]:
    return (ops.sinkhorn_normalize(logits, repeat=SINKHORN_ITERS, eps=EPS),)


_CALLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "mhc_pre": _pre,
    "mhc_post": _post,
    "mhc_post_pre": _post_pre,
    "mhc_layer": _layer,
    "mhc_head": _head,
    "sinkhorn": _sinkhorn,
}
_NAMES = {
    "x": "residual",
    "h_out": "x",
    "h_post": "post_mix",
    "h_res": "comb_mix",
    "phi": "fn",
    "alpha": "scale",
    "bias": "base",
    "logits": "logits",
}


def _prepare(subject: str, ours: Tensors) -> Prepared | None:
    if subject not in _CALLS or not _takes(ours):
        return None
    ops = _load()
    theirs = {_NAMES[name]: _layout(name, tensor.detach()).clone() for name, tensor in ours.items()}
    same = {"logits": "logits"} if "logits" in ours else {"residual": "x", "x": "h_out"}
    return Prepared(theirs, partial(_CALLS[subject], ops), same)


def _layout(name: str, tensor: Tensor) -> Tensor:
    if name == "logits":
        return tensor.contiguous()
    if name in ("phi", "alpha", "bias"):
        return torch.atleast_1d(tensor).float().contiguous()
    return (tensor[None, ..., None] if name == "h_post" else tensor[None]).contiguous()


def _takes(ours: Tensors) -> bool:
    """Four streams in bf16 whose nD is a multiple of its blocks, maps in fp32; gamma is not compared."""
    if "logits" in ours:
        return ours["logits"].shape[-1] == 4 and ours["logits"].dtype == torch.float32
    *_, n, D = ours["x"].shape
    in_bf16 = all(ours[name].dtype == torch.bfloat16 for name in ("x", "h_out") if name in ours)
    return "gamma" not in ours and in_bf16 and n == 4 and n * D % 256 == 0


def _load() -> ModuleType:
    """Its functional module, whose namespace has its ops too.

    The packages above it import every other kernel of the library, which fails with some releases of TileLang; they
    are entered without being run.
    """
    for package in ("tile_kernels", "tile_kernels.modeling") if version(TILE_KERNELS) else ():
        spec = None if package in sys.modules else importlib.util.find_spec(package)
        if spec is not None:
            sys.modules[package] = importlib.util.module_from_spec(spec)
    return load_module("tile_kernels.modeling.mhc.functional", TILE_KERNELS)


TILE_KERNELS = Peer("TileKernels", "tile-kernels", "projection in tf32", TENSOR_CORES, _load, _prepare)
