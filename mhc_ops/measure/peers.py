"""The operators of other libraries on our tensors, to be timed beside ours; and how each is checked before that.

Each peer runs the way its own modules run it, with our options: the defaults of PreOptions.
Nothing of a peer is imported before it is asked to prepare a subject.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mhc.options import DEFAULTS as OURS
from . import accuracy
from .cases import Tensors
from .conv_cases import AnyCase

CONV = ("causal_conv1d", "causal_conv1d silu")
CONV_UPDATE = ("causal_conv1d_update", "causal_conv1d_update silu")
WITH_GRADIENTS = " with gradients"

# The same function is one that is off by no more than five roundings in a row, in norm: a projection, its sums, two
# maps and the stored result. A transposed or missing term is off by far more.
ROUNDINGS = 5
TF32_ROUNDING = 2**-11
TENSOR_CORES = ROUNDINGS * TF32_ROUNDING  # what fp32 tensors are held to where tensor cores round them to tf32
NO_TENSOR_CORES = accuracy.NORM_TOLERANCE[torch.float32]

Outputs = tuple[Tensor, ...]
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Prepared:
    """A subject as a peer computes it: `call(**tensors)` returns our outputs, in our order and meaning.

    tensors: the peer's own leaves, converted once from ours; their gradients come in the peer's layout and type.
    call: differentiable with the peer's backward, given contiguous cotangents for every output, in the order of the
          outputs; a backward may overwrite the cotangent of x_next. Of mhc_layer, h_out may be the layer itself.
    same: the leaves that hold a tensor of ours as it is: their gradients can be compared. Their name -> our name.
    """

    tensors: Tensors
    call: Callable[..., Outputs]
    same: Mapping[str, str]


def load_module(peer: "Peer") -> Any:
    """The packages of `unrun` import every other kernel of their library, which fails with some releases of TileLang:
    they are entered without being run."""
    if version(peer) is None:
        raise RuntimeError(f"{peer.name} is not installed: pip install {peer.package}")
    try:
        for package in peer.unrun:
            spec = None if package in sys.modules else importlib.util.find_spec(package)
            if spec is not None:
                sys.modules[package] = importlib.util.module_from_spec(spec)
        return importlib.import_module(peer.module)
    except Exception as error:
        raise RuntimeError(f"{peer.name} {version(peer)} does not import here: {error}") from error


@dataclass(frozen=True)
class Peer:
    """A library with such operators of its own.

    package: its distribution's name on PyPI; module: the one with the functions used here
    precision: what it computes in, where that is less than fp32
    fp32_tolerance: what its results are held to where tensors are fp32
    adapt: (load, subject, our tensors with the tokens in one dimension) -> None where the peer lacks that op or cannot
           take these sizes and types; load() has the functions of its module
    """

    name: str
    package: str
    module: str
    precision: str
    fp32_tolerance: float
    adapt: Callable[[Callable[[], Any], str, Tensors], Prepared | None]
    unrun: tuple[str, ...] = ()
    load: Callable[["Peer"], Any] = load_module

    def prepare(self, subject: str, ours: Tensors) -> Prepared | None:
        """None where it lacks the op; RuntimeError where it is not installed or does not import."""
        return self.adapt(lambda: self.load(self), subject, {name: tensor.detach() for name, tensor in ours.items()})

    def tolerance(self, dtype: torch.dtype) -> float:
        """In norm, for an op on tensors of this type."""
        return ROUNDINGS * accuracy.ROUNDING[dtype] if dtype in accuracy.ROUNDING else self.fp32_tolerance


def version(peer: Peer) -> str | None:
    """Of the installed distribution, or None."""
    try:
        return importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not(peer: Peer) -> str | None:
    """Why it cannot run here, or None."""
    try:
        peer.load(peer)
    except RuntimeError as error:
        return str(error)
    return None


def by_name(name: str) -> Peer | None:
    return next((peer for peer in PEERS if peer.name == name), None)


def measure(peer: Peer, case: AnyCase, device: torch.device | str = "cpu") -> list[accuracy.Row] | None:
    """How far its outputs and the gradients of tensors it lays out as we do are from fp64; None where it lacks the op.

    Judged at its own precision, with and without gradients: some peers run other kernels where none is asked for.
    """
    subject, ours = case.subject, case.inputs(device)
    prepared = peer.prepare(subject.name, ours)
    if prepared is None:
        return None

    theirs = replace(subject, call=lambda backend, **tensors: prepared.call(**tensors))
    with torch.no_grad():
        results = accuracy.run(theirs, prepared.tensors, peer.name)
    cotangents = accuracy.random_cotangents(subject, results, case.seed)
    exact = accuracy.truth(subject, ours, cotangents, results)
    if subject.differentiable:  # the truth is there before a backward may overwrite a cotangent
        trained = accuracy.run(theirs, prepared.tensors, peer.name, cotangents)
        results |= {name + WITH_GRADIENTS: trained[name] for name in subject.outputs}
        same = {name: trained[f"d{leaf}"] for leaf, name in prepared.same.items() if f"d{leaf}" in trained}
        results |= {f"d{name}": gradient.view_as(ours[name]) for name, gradient in same.items()}
    tolerance = peer.tolerance(next(iter(ours.values())).dtype)
    return [
        accuracy.judge(case, peer.name, name, result, exact[name.removesuffix(WITH_GRADIENTS)], tolerance)
        for name, result in results.items()
    ]


def _output(h_out: Tensor | Layer, h_in: Tensor) -> Tensor:
    return h_out(h_in) if callable(h_out) else h_out


# Liger: phi is [nD, M] in the type of x (its tensor-core path), alpha three scalars.
#
# Its maps are ours, its mix is transposed: x_next[o] = Σ_i h_res[o, i]·x[i]. So its post takes h_res transposed. In
# the layer, where h_res goes from its pre straight into its post, the res rows of phi and bias are transposed instead.
# That leaves the Sinkhorn of transposed logits, which is the transposed Sinkhorn only as far as both have converged:
# with four streams they differ by 1e-5 in norm at logits of σ=1, by 8e-3 at σ=3 (single entries by up to 0.1).


def _liger(load: Callable[[], Any], subject: str, ours: Tensors) -> Prepared | None:
    """No gamma; streams that are a power of two."""
    options = {"rms_eps": OURS.norm_eps, "pre_eps": OURS.hc_eps, "sinkhorn_eps": OURS.sinkhorn_eps}
    options |= {"allow_fp32": True, "tmax": OURS.sinkhorn_iters, "post_mult": OURS.post_mult}

    def pre(x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor) -> Outputs:
        parameters = (phi, b, alpha_pre, alpha_post, alpha_res)
        h_pre, h_post, h_res = ops.liger_mhc_coeffs(x, *parameters, **options)
        return ops.liger_mhc_pre(x, h_pre), h_post, h_res

    def post(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Outputs:
        return (ops.liger_mhc_post_res(x, f_out, h_post, h_res),)

    def post_pre(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor, **parameters: Tensor) -> Outputs:
        (x_next,) = post(x, f_out, h_post, h_res)
        return x_next, *pre(x_next, **parameters)

    def layer(x: Tensor, f_out: Tensor | Layer, **parameters: Tensor) -> Outputs:
        h_in, h_post, h_res = pre(x, **parameters)
        return *post(x, _output(f_out, h_in), h_post, h_res), h_in

    calls: dict[str, Callable[..., Outputs]]
    calls = {"mhc_pre": pre, "mhc_post": post, "mhc_post_pre": post_pre, "mhc_layer": layer}
    if subject not in calls or "gamma" in ours or ours["x"].shape[-2].bit_count() != 1:
        return None
    ops = load()
    x, theirs = ours["x"], {"x": ours["x"]}
    if "h_out" in ours:
        theirs["f_out"] = ours["h_out"]
    if "h_res" in ours:
        theirs |= {"h_post": ours["h_post"], "h_res": ours["h_res"].mT.contiguous()}
    if "phi" in ours:
        n = x.shape[-2]
        rows = torch.arange(n * n + 2 * n, device=x.device)
        if subject == "mhc_layer":  # res row i·n + j exchanged for row j·n + i
            rows = torch.cat([rows[: 2 * n], rows[2 * n :].view(n, n).T.flatten()])
        theirs |= {"phi": ours["phi"][rows].T.to(x.dtype).contiguous(), "b": ours["bias"][rows].float()}
        scalars = (alpha.clone() for alpha in ours["alpha"].float().unbind())
        theirs |= dict(zip(("alpha_pre", "alpha_post", "alpha_res"), scalars))
    return Prepared(theirs, calls[subject], {"x": "x", "f_out": "h_out"})


# TileKernels: [1, T, ...] tensors named residual, x (our h_out), fn, scale, base, post_mix [..., n, 1] and comb_mix.
# The same function as ours, with the projection in tf32 (3e-4 off in norm).
#
# Its pre adds to the gradient of the streams in place, in a buffer that the backward of the same layer's post has left
# at the storage of the streams; so does mhc_layer here. mhc_post_pre ends before that post: a stand-in leaves the
# cotangent of x_next there, as in a model. In mhc_pre and mhc_head no other gradient reaches the streams, and pre takes
# its unfused path, which clears and adds whole gradients: more than a model pays. The buffer outlives a backward of
# post alone, so every prepared subject owns a copy of the streams.

_TILE_KERNELS_NAMES = {"x": "residual", "h_out": "x", "h_post": "post_mix", "h_res": "comb_mix"}
_TILE_KERNELS_NAMES |= {"phi": "fn", "alpha": "scale", "bias": "base", "logits": "logits"}


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
        residual.untyped_storage().grad_from_mhc_post = cotangent
        return cotangent


def _tile_kernels_fit(ours: Tensors) -> bool:
    """Four streams in bf16 whose nD is a multiple of its blocks, maps in fp32."""
    if "logits" in ours:
        return ours["logits"].shape[-1] == 4 and ours["logits"].dtype == torch.float32
    *_, n, D = ours["x"].shape
    in_bf16 = all(ours[name].dtype == torch.bfloat16 for name in ("x", "h_out") if name in ours)
    return in_bf16 and n == 4 and n * D % 256 == 0


def _tile_kernels(load: Callable[[], Any], subject: str, ours: Tensors) -> Prepared | None:
    """gamma is not compared."""
    options = {"norm_eps": OURS.norm_eps, "pre_eps": OURS.hc_eps, "sinkhorn_eps": OURS.sinkhorn_eps}
    options |= {"sinkhorn_repeat": OURS.sinkhorn_iters, "post_mult_value": OURS.post_mult}

    def maps(h_in: Tensor, post_mix: Tensor, comb_mix: Tensor) -> Outputs:
        """h_in, h_post, h_res"""
        return h_in.squeeze(0), post_mix.squeeze(-1).squeeze(0), comb_mix.squeeze(0)

    def pre(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> Outputs:
        if not torch.is_grad_enabled():
            h_in, mixes = ops.mhc_pre(residual, fn, scale, base, **options)
            return maps(h_in, *mixes)
        mixes = ops.mhc_pre_norm_fn(residual, fn, None, OURS.norm_eps, fuse_grad_acc=False)
        pre_mix, post_mix, logits = ops.mhc_pre_split_mixes(
            mixes, scale, base, residual.shape[-2], OURS.post_mult, OURS.hc_eps
        )
        (comb_mix,) = sinkhorn(logits)
        return maps(ops.mhc_pre_apply_mix(residual, pre_mix), post_mix, comb_mix)

    def post(residual: Tensor, x: Tensor, post_mix: Tensor, comb_mix: Tensor) -> Outputs:
        return (ops.mhc_post(x, residual, post_mix, comb_mix).squeeze(0),)

    def post_pre(residual: Tensor, x: Tensor, post_mix: Tensor, comb_mix: Tensor, **parameters: Tensor) -> Outputs:
        x_next = ops.mhc_post(x, residual, post_mix, comb_mix)
        h_in, mixes = ops.mhc_pre(x_next, **parameters, **options)
        outputs = maps(h_in, *mixes)
        return _NextPost.apply(x_next).squeeze(0), *outputs  # last, so that its backward runs before that of pre

    def layer(residual: Tensor, x: Tensor | Layer, **parameters: Tensor) -> Outputs:
        h_in, mixes = ops.mhc_pre(residual, **parameters, **options)
        return ops.mhc_post(_output(x, h_in), residual, *mixes).squeeze(0), h_in.squeeze(0)

    def head(residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> Outputs:
        # The parts of its mhc_head, which itself neither takes more than one token (a strided slice goes to a kernel
        # for dense tensors) nor has a backward (it asks for the gradient that a post leaves; none follows the last
        # layer).
        n = residual.shape[-2]
        padded = F.pad(fn, (0, 0, 0, n * n + 2 * n - fn.shape[0]))
        mixes = ops.mhc_pre_norm_fn(residual, padded, None, OURS.norm_eps, fuse_grad_acc=False)
        mix = ops.mhc_head_compute_mix(mixes[..., :n].contiguous(), scale, base, OURS.hc_eps)
        return (ops.mhc_pre_apply_mix(residual, mix.unsqueeze(-1)).squeeze(0),)

    def sinkhorn(logits: Tensor) -> Outputs:
        return (ops.sinkhorn_normalize(logits, repeat=OURS.sinkhorn_iters, eps=OURS.sinkhorn_eps),)

    def layout(name: str, tensor: Tensor) -> Tensor:
        if name in ("phi", "alpha", "bias"):
            return torch.atleast_1d(tensor).float()
        return {"logits": tensor, "h_post": tensor[None, ..., None]}.get(name, tensor[None])

    calls: dict[str, Callable[..., Outputs]]
    calls = {"mhc_pre": pre, "mhc_post": post, "mhc_post_pre": post_pre, "mhc_layer": layer, "mhc_head": head}
    calls["sinkhorn"] = sinkhorn
    if subject not in calls or "gamma" in ours or not _tile_kernels_fit(ours):
        return None
    ops = load()
    theirs = {_TILE_KERNELS_NAMES[name]: layout(name, tensor).contiguous().clone() for name, tensor in ours.items()}
    same = {"logits": "logits"} if subject == "sinkhorn" else {"residual": "x", "x": "h_out"}
    return Prepared(theirs, calls[subject], same)


# flash-linear-attention: causal_conv1d on the same tensors; weights of any type.


def _fla(load: Callable[[], Any], subject: str, ours: Tensors) -> Prepared | None:
    if subject not in CONV or not {"x", "weight", "bias"} >= set(ours):
        return None
    conv, activation = load().causal_conv1d, "silu" if subject.endswith("silu") else None

    def call(**tensors: Tensor) -> Outputs:
        return (conv(**tensors, activation=activation)[0],)

    return Prepared(ours, call, {name: name for name in ours})


# causal-conv1d, the CUDA package: x is [B, D, L] there; ours transposed is its channel-last layout, without a copy. It
# takes widths of 2 to 4, channels in multiples of 8, and a bias in the type of the weight.


def _causal_conv1d(load: Callable[[], Any], subject: str, ours: Tensors) -> Prepared | None:
    known = {"x", "weight", "bias"} | ({"conv_state"} if subject in CONV_UPDATE else set())
    if subject not in (*CONV, *CONV_UPDATE) or not known >= set(ours):
        return None
    D, W = ours["weight"].shape
    if not 2 <= W <= 4 or D % 8 or ("bias" in ours and ours["bias"].dtype != ours["weight"].dtype):
        return None
    ops, activation = load(), "silu" if subject.endswith("silu") else None

    def train(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Outputs:
        return (ops.causal_conv1d_fn(x.mT, weight, bias, activation=activation).mT,)

    def update(x: Tensor, weight: Tensor, conv_state: Tensor, bias: Tensor | None = None) -> Outputs:
        steps = x if x.dim() == 2 else x.mT
        y = ops.causal_conv1d_update(steps, conv_state, weight, bias, activation)
        return y if x.dim() == 2 else y.mT, conv_state

    return Prepared(ours, update if subject in CONV_UPDATE else train, {name: name for name in ours})


_liger_precision = "phi and the projection in the type of x (bf16, else tf32)"
LIGER = Peer("Liger", "liger-kernel", "liger_kernel.transformers.functional", _liger_precision, TENSOR_CORES, _liger)
TILE_KERNELS = Peer(
    "TileKernels",
    "tile-kernels",
    "tile_kernels.modeling.mhc.functional",  # whose namespace has its ops too
    "projection in tf32",
    TENSOR_CORES,
    _tile_kernels,
    unrun=("tile_kernels", "tile_kernels.modeling"),
)
FLA = Peer("fla", "flash-linear-attention", "fla.modules.causal_conv1d", "sums in fp32", NO_TENSOR_CORES, _fla)
CAUSAL_CONV1D = Peer("causal-conv1d", "causal-conv1d", "causal_conv1d", "sums in fp32", NO_TENSOR_CORES, _causal_conv1d)
PEERS: tuple[Peer, ...] = (LIGER, TILE_KERNELS, FLA, CAUSAL_CONV1D)
