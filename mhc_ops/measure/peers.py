"""The operators of other libraries on our tensors, to be timed beside ours.

Each peer runs the way its own modules run it, with our options: 20 Sinkhorn iterations, post_mult 2, every eps 1e-6.
Nothing of a peer is imported before it is asked to prepare a subject.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import Tensors

SINKHORN_ITERS = 20
POST_MULT = 2.0
EPS = 1e-6


@dataclass(frozen=True)
class Prepared:
    """A subject as a peer computes it: `call(**tensors)` returns our outputs, in our order and meaning.

    tensors: the peer's own leaves, converted once from ours; their gradients come in the peer's layout and type.
    call: differentiable with the peer's backward, given contiguous cotangents for every output, in the order of the
          outputs; a backward may overwrite the cotangent of x_next.
    """

    tensors: Tensors
    call: Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Peer:
    """A library with such operators of its own.

    package: its distribution's name on PyPI
    load: its module with the functions used here; RuntimeError where it is not installed or does not import
    prepare: (subject, our tensors with the tokens in one dimension) -> None where the peer lacks that op or cannot take
             these sizes and types; RuntimeError where it is not installed or does not import
    """

    name: str
    package: str
    load: Callable[[], ModuleType]
    prepare: Callable[[str, Tensors], Prepared | None]


def version(peer: Peer) -> str | None:
    """Of the installed distribution, or None."""
    try:
        return importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not(peer: Peer) -> str | None:
    """Why it cannot run here, or None."""
    try:
        peer.load()
    except RuntimeError as error:
        return str(error)
    return None


def _import(module: str, peer: Peer) -> ModuleType:
    if version(peer) is None:
        raise RuntimeError(f"{peer.name} is not installed: pip install {peer.package}")
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise RuntimeError(f"{peer.name} {version(peer)} does not import here: {error}") from error


# Liger: phi is [nD, M] in the type of x (its tensor-core path), alpha three scalars.
#
# Its maps are ours, its mix is transposed: x_next[o] = Σ_i h_res[o, i]·x[i]. So its post takes h_res transposed. In
# the layer, where h_res goes from its pre straight into its post, the res rows of phi and bias are transposed instead.
# That leaves the Sinkhorn of transposed logits, which is the transposed Sinkhorn only as far as both have converged:
# with four streams they differ by 1e-5 in norm at logits of σ=1, by 8e-3 at σ=3 (single entries by up to 0.1).


def _liger_pre(
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


def _liger_post(ops: Any, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> tuple[Tensor, ...]:
    return (ops.liger_mhc_post_res(x, f_out, h_post, h_res),)


def _liger_post_pre(
    ops: Any, x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor, **parameters: Tensor
) -> tuple[Tensor, ...]:
    (x_next,) = _liger_post(ops, x, f_out, h_post, h_res)
    return x_next, *_liger_pre(ops, x_next, **parameters)


def _liger_layer(ops: Any, x: Tensor, f_out: Tensor, **parameters: Tensor) -> tuple[Tensor, ...]:
    h_in, h_post, h_res = _liger_pre(ops, x, **parameters)
    return *_liger_post(ops, x, f_out, h_post, h_res), h_in


_LIGER_CALLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "mhc_pre": _liger_pre,
    "mhc_post": _liger_post,
    "mhc_post_pre": _liger_post_pre,
    "mhc_layer": _liger_layer,
}


def _prepare_liger(subject: str, ours: Tensors) -> Prepared | None:
    if subject not in _LIGER_CALLS or not _liger_takes(ours):
        return None
    ops = _liger()
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
    return Prepared(theirs, partial(_LIGER_CALLS[subject], ops))


def _liger() -> ModuleType:
    return _import("liger_kernel.transformers.functional", LIGER)


def _liger_takes(ours: Tensors) -> bool:
    """No gamma; streams that are a power of two."""
    return "gamma" not in ours and ours["x"].shape[-2].bit_count() == 1


def _rows_of_transposed_res(n: int, device: torch.device) -> Tensor:
    """The M rows of phi with res row i·n + j exchanged for row j·n + i."""
    rows = torch.arange(n * n + 2 * n, device=device)
    return torch.cat([rows[: 2 * n], rows[2 * n :].view(n, n).T.flatten()])


# TileKernels: [1, T, ...] tensors named residual, x (our h_out), fn, scale, base, post_mix [..., n, 1] and comb_mix.
# The same function as ours, with the projection in tf32 (3e-4 off in norm).
#
# Its pre adds to the gradient of the streams in place, in a buffer that the backward of the same layer's post has left
# at the storage of the streams; so does mhc_layer here. mhc_post_pre ends before that post: a stand-in leaves the
# cotangent of x_next there, as in a model. In mhc_pre and mhc_head no other gradient reaches the streams, and pre takes
# its unfused path, which clears and adds whole gradients: more than a model pays. The buffer outlives a backward of
# post alone, so every prepared subject owns a copy of the streams.

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


def _tile_maps(h_in: Tensor, post_mix: Tensor, comb_mix: Tensor) -> tuple[Tensor, ...]:
    """h_in, h_post, h_res"""
    return h_in.squeeze(0), post_mix.squeeze(-1).squeeze(0), comb_mix.squeeze(0)


def _tile_pre(ops: Any, residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        h_in, maps = ops.mhc_pre(residual, fn, scale, base, **_PRE_OPTIONS)
        return _tile_maps(h_in, *maps)
    mixes = ops.mhc_pre_norm_fn(residual, fn, None, EPS, fuse_grad_acc=False)
    pre_mix, post_mix, logits = ops.mhc_pre_split_mixes(mixes, scale, base, residual.shape[-2], POST_MULT, EPS)
    comb_mix = ops.sinkhorn_normalize(logits, repeat=SINKHORN_ITERS, eps=EPS)
    return _tile_maps(ops.mhc_pre_apply_mix(residual, pre_mix), post_mix, comb_mix)


def _tile_post(ops: Any, residual: Tensor, x: Tensor, post_mix: Tensor, comb_mix: Tensor) -> tuple[Tensor, ...]:
    return (ops.mhc_post(x, residual, post_mix, comb_mix).squeeze(0),)


def _tile_post_pre(
    ops: Any, residual: Tensor, x: Tensor, post_mix: Tensor, comb_mix: Tensor, **parameters: Tensor
) -> tuple[Tensor, ...]:
    x_next = ops.mhc_post(x, residual, post_mix, comb_mix)
    h_in, maps = ops.mhc_pre(x_next, **parameters, **_PRE_OPTIONS)
    outputs = _tile_maps(h_in, *maps)
    return _NextPost.apply(x_next).squeeze(0), *outputs  # last, so that its backward runs before that of pre


def _tile_layer(ops: Any, residual: Tensor, x: Tensor, **parameters: Tensor) -> tuple[Tensor, ...]:
    h_in, maps = ops.mhc_pre(residual, **parameters, **_PRE_OPTIONS)
    return ops.mhc_post(x, residual, *maps).squeeze(0), h_in.squeeze(0)


def _tile_head(ops: Any, residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, ...]:
    # The parts of its mhc_head, which itself neither takes more than one token (a strided slice goes to a kernel for
    # dense tensors) nor has a backward (it asks for the gradient that a post leaves; none follows the last layer).
    n = residual.shape[-2]
    padded = F.pad(fn, (0, 0, 0, n * n + 2 * n - fn.shape[0]))
    mixes = ops.mhc_pre_norm_fn(residual, padded, None, EPS, fuse_grad_acc=False)
    mix = ops.mhc_head_compute_mix(mixes[..., :n].contiguous(), scale, base, EPS)
    return (ops.mhc_pre_apply_mix(residual, mix.unsqueeze(-1)).squeeze(0),)


def _tile_sinkhorn(ops: Any, logits: Tensor) -> tuple[Tensor, ...]:
    return (ops.sinkhorn_normalize(logits, repeat=SINKHORN_ITERS, eps=EPS),)


_TILE_CALLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "mhc_pre": _tile_pre,
    "mhc_post": _tile_post,
    "mhc_post_pre": _tile_post_pre,
    "mhc_layer": _tile_layer,
    "mhc_head": _tile_head,
    "sinkhorn": _tile_sinkhorn,
}
_TILE_NAMES = {
    "x": "residual",
    "h_out": "x",
    "h_post": "post_mix",
    "h_res": "comb_mix",
    "phi": "fn",
    "alpha": "scale",
    "bias": "base",
    "logits": "logits",
}


def _prepare_tile_kernels(subject: str, ours: Tensors) -> Prepared | None:
    if subject not in _TILE_CALLS or not _tile_takes(ours):
        return None
    ops = _tile_kernels()
    theirs = {_TILE_NAMES[name]: _tile_layout(name, tensor.detach()).clone() for name, tensor in ours.items()}
    return Prepared(theirs, partial(_TILE_CALLS[subject], ops))


def _tile_layout(name: str, tensor: Tensor) -> Tensor:
    if name == "logits":
        return tensor.contiguous()
    if name in ("phi", "alpha", "bias"):
        return torch.atleast_1d(tensor).float().contiguous()
    return (tensor[None, ..., None] if name == "h_post" else tensor[None]).contiguous()


def _tile_takes(ours: Tensors) -> bool:
    """Four streams in bf16 whose nD is a multiple of its blocks, maps in fp32; gamma is not compared."""
    if "logits" in ours:
        return ours["logits"].shape[-1] == 4 and ours["logits"].dtype == torch.float32
    *_, n, D = ours["x"].shape
    in_bf16 = all(ours[name].dtype == torch.bfloat16 for name in ("x", "h_out") if name in ours)
    return "gamma" not in ours and in_bf16 and n == 4 and n * D % 256 == 0


def _tile_kernels() -> ModuleType:
    """Its functional module, whose namespace has its ops too.

    The packages above it import every other kernel of the library, which fails with some releases of TileLang; they
    are entered without being run.
    """
    for package in ("tile_kernels", "tile_kernels.modeling") if version(TILE_KERNELS) else ():
        spec = None if package in sys.modules else importlib.util.find_spec(package)
        if spec is not None:
            sys.modules[package] = importlib.util.module_from_spec(spec)
    return _import("tile_kernels.modeling.mhc.functional", TILE_KERNELS)


# fla: causal_conv1d on the same tensors; weights of any type.


def _prepare_fla(subject: str, ours: Tensors) -> Prepared | None:
    if subject not in ("causal_conv1d", "causal_conv1d silu") or not {"x", "weight", "bias"} >= set(ours):
        return None
    conv = _fla().causal_conv1d
    activation = "silu" if subject.endswith("silu") else None

    def call(**tensors: Tensor) -> tuple[Tensor, ...]:
        return (conv(**tensors, activation=activation)[0],)

    return Prepared({name: tensor.detach() for name, tensor in ours.items()}, call)


def _fla() -> ModuleType:
    return _import("fla.modules.causal_conv1d", FLA)


LIGER = Peer("Liger", "liger-kernel", _liger, _prepare_liger)
TILE_KERNELS = Peer("TileKernels", "tile-kernels", _tile_kernels, _prepare_tile_kernels)
FLA = Peer("fla", "flash-linear-attention", _fla, _prepare_fla)
PEERS: tuple[Peer, ...] = (LIGER, TILE_KERNELS, FLA)
