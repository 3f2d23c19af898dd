"""The operators of other libraries on our tensors, as their own modules run them with the defaults of PreOptions."""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mhc.options import DEFAULTS as OURS
from ..testing import accuracy
from ..testing.cases import Tensors
from ..testing.conv_cases import AnyCase

WITH_GRADIENTS = " with gradients"

# The same function is off by at most five roundings in a row, in norm: a projection, its sums, two maps and the stored
# result. A transposed or missing term is off by far more.
ROUNDINGS = 5
TENSOR_CORES = ROUNDINGS * 2**-11  # what fp32 tensors are held to where tensor cores round them to tf32
NO_TENSOR_CORES = accuracy.NORM_TOLERANCE[torch.float32]

Outputs = tuple[Tensor, ...]
Function = Callable[..., Outputs]
Layer = Callable[[Tensor], Tensor]


class Prepared(NamedTuple):
    """A subject as a peer computes it: `call(**tensors)` returns our outputs, in our order and meaning. All outputs get
    contiguous cotangents; a backward may overwrite that of x_next. The h_out of mhc_layer may be the layer itself."""

    tensors: Tensors  # the peer's own leaves, converted once from ours; gradients have their layout and type
    call: Function
    same: Collection[str]  # the leaves that are tensors of ours, whose gradients can be compared


@dataclass(frozen=True)
class Peer:
    """A library with such operators. adapt: (its module, subject, our tensors with the tokens in one dimension) ->
    Prepared, or None if the peer lacks the op or these sizes and types."""

    name: str
    package: str  # its name on PyPI
    module: str  # that has the functions used here
    precision: str  # what it computes in, if less than fp32
    fp32_tolerance: float  # what its results are held to for fp32 tensors
    adapt: Callable[[Any, str, Tensors], Prepared | None]
    unrun: tuple[str, ...] = ()  # packages that are not run: they import kernels that fail with some TileLangs

    def load(self) -> Any:
        """Its module; RuntimeError if it is not installed or does not import."""
        if version(self) is None:
            raise RuntimeError(f"{self.name} is not installed: pip install {self.package}")
        try:
            for package in self.unrun:
                spec = None if package in sys.modules else importlib.util.find_spec(package)
                if spec is not None:
                    sys.modules[package] = importlib.util.module_from_spec(spec)
            return importlib.import_module(self.module)
        except Exception as error:
            raise RuntimeError(f"{self.name} {version(self)} does not import here: {error}") from error

    def prepare(self, subject: str, ours: Tensors) -> Prepared | None:
        return self.adapt(self.load(), subject, {name: tensor.detach() for name, tensor in ours.items()})


def version(peer: Peer) -> str | None:
    """The installed version, or None."""
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


def by_name(name: str) -> Peer | None:
    return next((peer for peer in PEERS if peer.name == name), None)


def measure(peer: Peer, case: AnyCase, device: torch.device | str = "cpu") -> list[accuracy.Row] | None:
    """Its outputs, and the gradients of tensors it lays out as we do, against fp64 at its own precision; None if it
    lacks the op. Outputs are judged with and without gradients, for which some peers run other kernels."""
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
        same = [name for name in prepared.same if f"d{name}" in trained]
        results |= {f"d{name}": trained[f"d{name}"].view_as(ours[name]) for name in same}
    rounding = accuracy.ROUNDING.get(next(iter(ours.values())).dtype)
    tolerance = peer.fp32_tolerance if rounding is None else ROUNDINGS * rounding
    return [
        accuracy.judge(case, peer.name, name, result, exact[name.removesuffix(WITH_GRADIENTS)], tolerance)
        for name, result in results.items()
    ]


def _composed(pre: Function, post: Function) -> dict[str, Function]:
    """All ops of mHC, made of a pre and a post that take tensors by our names."""

    def post_pre(x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor, **maps: Tensor) -> Outputs:
        (x_next,) = post(x, h_out, h_post, h_res)
        return x_next, *pre(x_next, **maps)

    def layer(x: Tensor, h_out: Tensor | Layer, **maps: Tensor) -> Outputs:
        h_in, h_post, h_res = pre(x, **maps)
        return *post(x, h_out(h_in) if callable(h_out) else h_out, h_post, h_res), h_in

    return {"mhc_pre": pre, "mhc_post": post, "mhc_post_pre": post_pre, "mhc_layer": layer}


def _liger(ops: Any, subject: str, ours: Tensors) -> Prepared | None:
    """Without gamma; streams must be a power of two. phi is [nD, M] in the type of x (its tensor-core path), alpha
    three scalars.

    Its maps are ours, its mix is transposed: x_next[o] = Σ_i h_res[o, i]·x[i]. So its post takes h_res transposed. In
    the layer, where h_res goes from its pre straight into its post, the res rows of phi and bias are transposed
    instead. That leaves the Sinkhorn of transposed logits, which is the transposed Sinkhorn only as far as both have
    converged: with four streams they differ by 1e-5 in norm at logits of σ=1, by 8e-3 at σ=3 (single entries by up to
    0.1).
    """
    options = {"rms_eps": OURS.norm_eps, "pre_eps": OURS.hc_eps, "sinkhorn_eps": OURS.sinkhorn_eps}
    options |= {"allow_fp32": True, "tmax": OURS.sinkhorn_iters, "post_mult": OURS.post_mult}

    def pre(x: Tensor, phi: Tensor, bias: Tensor, alpha_0: Tensor, alpha_1: Tensor, alpha_2: Tensor) -> Outputs:
        h_pre, h_post, h_res = ops.liger_mhc_coeffs(x, phi, bias, alpha_0, alpha_1, alpha_2, **options)
        return ops.liger_mhc_pre(x, h_pre), h_post, h_res

    calls = _composed(pre, lambda x, h_out, h_post, h_res: (ops.liger_mhc_post_res(x, h_out, h_post, h_res),))
    if subject not in calls or "gamma" in ours or ours["x"].shape[-2].bit_count() != 1:
        return None
    x, n = ours["x"], ours["x"].shape[-2]
    theirs = {name: tensor for name, tensor in ours.items() if name in ("x", "h_out", "h_post")}
    if "h_res" in ours:
        theirs["h_res"] = ours["h_res"].mT.contiguous()
    if "phi" in ours:
        rows = torch.arange(n * n + 2 * n, device=x.device)
        if subject == "mhc_layer":  # res row i·n + j exchanged for row j·n + i
            rows = torch.cat([rows[: 2 * n], rows[2 * n :].view(n, n).T.flatten()])
        theirs |= {"phi": ours["phi"][rows].T.to(x.dtype).contiguous(), "bias": ours["bias"][rows].float()}
        theirs |= {f"alpha_{nth}": alpha.clone() for nth, alpha in enumerate(ours["alpha"].float().unbind())}
    return Prepared(theirs, calls[subject], ("x", "h_out"))


def _tile_kernels(ops: Any, subject: str, ours: Tensors) -> Prepared | None:
    """Without gamma; four streams in bf16, nD a multiple of its blocks; tensors are [1, T, ...], h_post [..., n, 1].

    Its pre adds to the gradient of the streams in place, in a buffer that the backward of the same layer's post has
    left at the storage of the streams; so does mhc_layer here. mhc_post_pre ends before that post: a stand-in leaves
    the cotangent of x_next there, as in a model. In mhc_pre and mhc_head no other gradient reaches the streams, and pre
    takes its unfused path, which clears and adds whole gradients: more than a model pays. The buffer outlives a
    backward of post alone, so every prepared subject owns a copy of the streams.
    """
    options = {"norm_eps": OURS.norm_eps, "pre_eps": OURS.hc_eps, "sinkhorn_eps": OURS.sinkhorn_eps}
    options |= {"sinkhorn_repeat": OURS.sinkhorn_iters, "post_mult_value": OURS.post_mult}

    def fused_pre(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Outputs:
        h_in, maps = ops.mhc_pre(x, phi, alpha, bias, **options)
        return h_in, *maps

    def pre(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Outputs:
        if not torch.is_grad_enabled():
            return fused_pre(x, phi, alpha, bias)
        mixes = ops.mhc_pre_norm_fn(x, phi, None, OURS.norm_eps, fuse_grad_acc=False)
        split = ops.mhc_pre_split_mixes(mixes, alpha, bias, x.shape[-2], OURS.post_mult, OURS.hc_eps)
        h_pre, h_post, logits = split
        h_res = ops.sinkhorn_normalize(logits, repeat=OURS.sinkhorn_iters, eps=OURS.sinkhorn_eps)
        return ops.mhc_pre_apply_mix(x, h_pre), h_post, h_res

    def post_pre(**tensors: Tensor) -> Outputs:
        x_next, *maps = composed["mhc_post_pre"](**tensors)

        def leave(cotangent: Tensor) -> Tensor:
            storage: Any = x_next.untyped_storage()
            storage.grad_from_mhc_post = cotangent.contiguous()
            return storage.grad_from_mhc_post

        next_post = x_next.view_as(x_next)  # last, so that its backward runs before that of pre
        if next_post.requires_grad:
            next_post.register_hook(leave)
        return next_post, *maps

    def head(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor) -> Outputs:
        # The parts of its mhc_head, which takes one token (a strided slice goes to a kernel for dense tensors) and
        # has no backward (it asks for the gradient that a post leaves; none follows the last layer).
        n = x.shape[-2]
        padded = F.pad(phi, (0, 0, 0, n * n + 2 * n - phi.shape[0]))
        mixes = ops.mhc_pre_norm_fn(x, padded, None, OURS.norm_eps, fuse_grad_acc=False)
        mix = ops.mhc_head_compute_mix(mixes[..., :n].contiguous(), alpha, bias, OURS.hc_eps)
        return (ops.mhc_pre_apply_mix(x, mix.unsqueeze(-1)),)

    def layout(name: str, tensor: Tensor) -> Tensor:
        if name in ("phi", "alpha", "bias"):
            return torch.atleast_1d(tensor).float()
        return tensor[None, ..., None] if name == "h_post" else tensor[None]

    def call(**tensors: Any) -> Outputs:
        outputs = (output.squeeze(0) for output in calls[subject](**tensors))
        return tuple(output.squeeze(-1) if output.shape[-1] == 1 else output for output in outputs)  # h_post alone

    composed = _composed(fused_pre, lambda x, h_out, h_post, h_res: (ops.mhc_post(h_out, x, h_post, h_res),))
    calls = composed | {"mhc_pre": pre, "mhc_post_pre": post_pre, "mhc_head": head}
    if subject not in calls or "gamma" in ours:
        return None
    n, D = ours["x"].shape[-2:]
    if n != 4 or n * D % 256 or any(ours[name].dtype != torch.bfloat16 for name in ("x", "h_out") if name in ours):
        return None
    theirs = {name: layout(name, tensor).contiguous().clone() for name, tensor in ours.items()}
    return Prepared(theirs, call, ("x", "h_out"))


def _fla(ops: Any, subject: str, ours: Tensors) -> Prepared | None:
    """On the same tensors; weights of any type."""
    op, _, silu = subject.partition(" ")
    if op != "causal_conv1d" or not {"x", "weight", "bias"} >= set(ours):
        return None
    return Prepared(ours, lambda **tensors: (ops.causal_conv1d(**tensors, activation=silu or None)[0],), ours)


def _causal_conv1d(ops: Any, subject: str, ours: Tensors) -> Prepared | None:
    """x is [B, D, L] there; ours transposed is its channel-last layout, without a copy. It takes widths of 2 to 4,
    channels in multiples of 8, and a bias in the type of the weight."""
    op, _, silu = subject.partition(" ")

    def train(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Outputs:
        return (ops.causal_conv1d_fn(x.mT, weight, bias, activation=silu or None).mT,)

    def update(x: Tensor, weight: Tensor, conv_state: Tensor, bias: Tensor | None = None) -> Outputs:
        one = x.dim() == 2
        y = ops.causal_conv1d_update(x if one else x.mT, conv_state, weight, bias, silu or None)
        return y if one else y.mT, conv_state

    calls: dict[str, Function] = {"causal_conv1d": train, "causal_conv1d_update": update}
    if op not in calls or set(ours) - {"x", "weight", "bias", "conv_state"}:
        return None
    D, W = ours["weight"].shape
    if not 2 <= W <= 4 or D % 8 or ("bias" in ours and ours["bias"].dtype != ours["weight"].dtype):
        return None
    return Prepared(ours, calls[op], ours)


_liger_precision, _sums = "phi and the projection in the type of x (bf16, else tf32)", "sums in fp32"
_functions = "tile_kernels.modeling.mhc.functional"  # whose namespace has its ops too
_unrun = ("tile_kernels", "tile_kernels.modeling")
PEERS = LIGER, TILE_KERNELS, FLA, CAUSAL_CONV1D = (
    Peer("Liger", "liger-kernel", "liger_kernel.transformers.functional", _liger_precision, TENSOR_CORES, _liger),
    Peer("TileKernels", "tile-kernels", _functions, "projection in tf32", TENSOR_CORES, _tile_kernels, _unrun),
    Peer("fla", "flash-linear-attention", "fla.modules.causal_conv1d", _sums, NO_TENSOR_CORES, _fla),
    Peer("causal-conv1d", "causal-conv1d", "causal_conv1d", _sums, NO_TENSOR_CORES, _causal_conv1d),
)
