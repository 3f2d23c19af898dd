"""Cases as data: an op, a shape, types and scales; the same case always makes the same tensors."""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mhc_ops

from ..core.check import name_of
from ..mhc.options import NOT_IN_TILELANG as OPTIONS_NOT_IN_TILELANG
from . import arguments

Tensors = dict[str, Tensor]
Call = Callable[..., tuple[Tensor, ...]]
STEEP_LOGITS = 8.0


def _base_seed(variable: str) -> tuple[int, str]:
    """And what is wrong with it: an import does not fail, the commands and the tests say it."""
    text = os.environ.get(variable) or "0"
    try:
        return arguments.seed(text), ""
    except (ValueError, argparse.ArgumentTypeError):
        return 0, f"{variable}: {text!r} is no whole number from 0 to {arguments.LARGEST_SEED}"


SEED, WRONG_SEED = _base_seed("MHC_OPS_SEED")  # of every case: none is chosen for what it happens to draw


@dataclass(frozen=True)
class Subject:
    """An op as the measurements see it: `call(**tensors, backend=...)` returns the outputs in order.

    inputs: names of the tensors it takes; outputs: their names, the last `intermediates` of them carry no gradient.
    moved: (a, b, c, d): forward must move a + b/n times the bytes of x, backward c + d/n times.
    exact: the outputs in fp64, from fp64 inputs and the results under test (which may be stored in between).
    mutated: the inputs that a call writes to. options: what a call is given beside tensors, see `with_options`.
    """

    name: str
    call: Call
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    moved: tuple[float, float, float, float]
    intermediates: int = 0
    exact: Call | None = None
    mutated: tuple[str, ...] = ()
    options: tuple[tuple[str, float], ...] = ()
    family: str = "mhc"

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The outputs that carry a gradient."""
        return self.outputs[: len(self.outputs) - self.intermediates]

    def truth(self, tensors: Tensors, results: Tensors) -> tuple[Tensor, ...]:
        if self.exact is not None:
            return self.exact(tensors, results)
        return self.call(**tensors, backend="reference")

    def with_options(self, **options: float) -> "Subject":
        exact = None if self.exact is None else partial(self.exact, **options)
        return replace(self, call=partial(self.call, **options), exact=exact, options=tuple(options.items()))


def public(name: str, **options: Any) -> Call:
    """A public function, looked up at the call; its outputs as a tuple, without an h_res that is None."""

    def call(**arguments: Any) -> tuple[Tensor, ...]:
        outputs = getattr(mhc_ops, name)(**arguments, **options)
        return tuple(o for o in outputs if o is not None) if isinstance(outputs, tuple) else (outputs,)

    return call


def _pre_exact(tensors: Tensors, results: Tensors, layer_norm_eps: float = 1e-6, **options: Any) -> tuple[Any, ...]:
    """mhc_pre, where h_in is read with `read` also h_pre and, last, h_in as a norm scales it: the gradient that comes
    there and the one that comes through the norm's factor cancel (all of dh_pre where n is 1), so the terms of both are
    to be known apart."""
    of_maps: Any = {name: tensor for name, tensor in tensors.items() if name in _PRE}
    h_pre, h_post, h_res = mhc_ops.mhc_maps(**of_maps, **options, backend="reference")
    h_in = mhc_ops.mhc_read(tensors["x"], tensors.get("read", h_pre), backend="reference")
    maps = (h_post, h_res, h_pre) if "read" in tensors else (h_post, h_res)
    if "layer_norm_weight" not in tensors:
        return h_in, *maps
    scaled = h_in.clone()
    factor = torch.rsqrt(h_in.square().mean(-1, keepdim=True) + layer_norm_eps)
    return tensors["layer_norm_weight"] * scaled * factor, *maps, scaled


def _stored(value: Tensor, result: Tensor) -> Tensor:
    """value, rounded as the result was stored, but not in the backward"""
    return value + (result.double() - value).detach()


def _parted(tensors: Tensors) -> tuple[Any, Tensors]:
    """What a post takes, and what is left for the pre behind it, which lacks its x; a link is neither's."""
    own = {name: tensor for name, tensor in tensors.items() if name not in (*_POST, "link")}
    return {name: tensors[name] for name in _POST if name in tensors}, own


def _post_pre_exact(tensors: Tensors, results: Tensors, **options: Any) -> tuple[Tensor, ...]:
    """The next layer reads x_next as it was stored."""
    of_post, own = _parted(tensors)
    x_next = mhc_ops.mhc_post(**of_post, backend="reference")
    return x_next, *_pre_exact({"x": _stored(x_next, results["x_next"]), **own}, results, **options)


def _layer(x: Tensor, h_out: Tensor, backend: str, **parameters: Any) -> tuple[Tensor, ...]:
    """Around a layer that costs nothing: its output is given, and so is the gradient of its input."""
    read: list[Tensor] = []

    def layer(h_in: Tensor) -> Tensor:
        read.append(h_in)
        return h_out

    return mhc_ops.mhc_layer(x, layer, **parameters, backend=backend), read[0]


def _layer_normed_exact(tensors: Tensors, results: Tensors, **options: Any) -> tuple[Tensor, ...]:
    of_pre = {name: tensor for name, tensor in tensors.items() if name != "h_out"}
    h_in, h_post, h_res, *more = _pre_exact(of_pre, results, **options)
    of_post: Any = {"transposed": options.get("transposed", False), "backend": "reference"}
    return mhc_ops.mhc_post(tensors["x"], tensors["h_out"], h_post, h_res, **of_post), h_in, *more


def _next(x: Tensor, h_out: Tensor, link: Tensor, backend: str, **own: Any) -> tuple[Tensor, ...]:
    """One boundary, and the end behind a sublayer that costs nothing. What x_next gets is dlink, as it is stored; the
    gradient of x is made from that, but not here."""
    h_post, h_res, read = (own.pop(name, None) for name in ("h_post", "h_res", "read"))
    if backend == "reference":  # whose link is x itself
        x_next = mhc_ops.mhc_post(x.detach(), h_out, h_post, h_res, backend=backend) + link
        of_read: dict[str, Any] = {} if read is None else {"shifted": True, "read": read}
        h_in, carry = mhc_ops.mhc_enter(x_next, **own, **of_read, backend=backend)
    else:
        h_in, carry = mhc_ops.mhc_next(mhc_ops.Carry(x, h_post, h_res, read, link), h_out, **own, backend=backend)
    left = mhc_ops.mhc_leave(carry, h_out.detach(), backend=backend)
    return h_in, *(left if isinstance(left, tuple) else (left,)), carry.x


def _next_exact(tensors: Tensors, results: Tensors, **options: Any) -> tuple[Tensor, ...]:
    of_post, own = _parted(tensors)
    x_next = mhc_ops.mhc_post(**{"h_res": None, **of_post, "x": tensors["x"].detach()}, backend="reference")
    if "dlink" in results:  # what is before x_next gets the gradient that was stored
        x_next.register_hook(lambda gradient: results["dlink"].double())
    x_next = x_next + tensors["link"]
    stored = _stored(x_next, results["x_next"])
    h_in, h_post, h_res, *more = _pre_exact({"x": stored, **own}, results, **options)
    after = mhc_ops.mhc_post(stored, tensors["h_out"].detach(), h_post, h_res, backend="reference")
    return h_in, after, *([more.pop(0)] if "read" in tensors else []), x_next, *more


def _shifted_pre(x: Tensor, backend: str, **own: Any) -> Any:
    h_in, carry = mhc_ops.mhc_enter(x, **own, shifted=True, backend=backend)
    return h_in, carry.h_post, carry.h_res, carry.read


_PARAMETERS = ("phi", "alpha", "bias", "gamma")
_PRE, _POST = ("x", *_PARAMETERS), ("x", "h_out", "h_post", "h_res")
_MAPS = ("h_in", "h_post", "h_res")
_NEXT = (*_POST, "link", *_PARAMETERS)


def _normed(subject: Subject, **changes: Any) -> Subject:
    """With the norm of the layer."""
    inputs = (*subject.inputs, "layer_norm_weight")
    return replace(subject, name=f"{subject.name} normed", inputs=inputs, **changes)


# The bytes of pre: x is read for the projection and again for h_in, which is written; backward, x and dh_in are read
# for dh_pre and again to write dx. Of post: x and h_out are read, x_next is written; backward, dx_next, x and h_out are
# read, dx and dh_out written. The layer's backward writes dx once; to its second pass over x comes dx_next. post_pre
# reads x_next once more for h_in; backward: pre's, with dx_next, up to a dx_next in fp32, then post's.
_BYTES = (2, 1, 3, 2)  # of pre, and as many of post
_stored_maps = (*_MAPS, "inv_rms", "h_mix", "h_pre")
_forward_pre = public("mhc_forward_pre", outflag=True)
MHC_FORWARD_PRE = Subject("mhc_forward_pre", _forward_pre, _PRE, _stored_maps, _BYTES, intermediates=3)
MHC_PRE = Subject("mhc_pre", public("mhc_pre"), _PRE, _MAPS, _BYTES)
MHC_POST = Subject("mhc_post", public("mhc_post"), _POST, ("x_next",), _BYTES)
MHC_LAYER = Subject("mhc_layer", _layer, ("x", "h_out", *_PARAMETERS), ("x_next", "h_in"), (4, 2, 6, 4))
_post_pre = public("mhc_post_pre"), (*_POST, *_PARAMETERS), ("x_next", *_MAPS), (3, 2, 9, 4)
MHC_POST_PRE = Subject("mhc_post_pre", *_post_pre, exact=_post_pre_exact)
MHC_HEAD = Subject("mhc_head", public("mhc_head"), _PRE, ("out",), _BYTES)
SINKHORN = Subject("sinkhorn", public("sinkhorn"), ("logits",), ("h_res",), (2, 0, 3, 0))
SUBJECTS = (MHC_FORWARD_PRE, MHC_PRE, MHC_POST, MHC_LAYER, MHC_POST_PRE, MHC_HEAD, SINKHORN)
# The stack: the maps and the read alone, the boundary with its carry, the layer's norm;
MHC_MAPS = Subject("mhc_maps", public("mhc_maps"), _PRE, ("h_pre", "h_post", "h_res"), (1, 0, 2, 0))
MHC_READ = Subject("mhc_read", public("mhc_read"), ("x", "h_pre"), ("h_in",), (1, 1, 2, 1))
_next_outputs = ("h_in", "x_after", "x_next")
MHC_NEXT = Subject("mhc_next", _next, _NEXT, _next_outputs, (3, 2, 4, 4), intermediates=1, exact=_next_exact)
MHC_PRE_NORMED = _normed(MHC_PRE, exact=_pre_exact)
MHC_LAYER_NORMED = _normed(MHC_LAYER, exact=_layer_normed_exact)
MHC_POST_PRE_NORMED, MHC_NEXT_NORMED = _normed(MHC_POST_PRE), _normed(MHC_NEXT)
OF_THE_STACK = (
    *(MHC_MAPS, MHC_READ, MHC_NEXT),
    *(MHC_PRE_NORMED, MHC_LAYER_NORMED, MHC_POST_PRE_NORMED, MHC_NEXT_NORMED),
)
# the shifted form, which reads with the weights of the sublayer before; the identity in place of h_res; the mean.
MHC_SHIFTED_PRE = Subject("mhc_shifted_pre", _shifted_pre, ("read", *_PRE), (*_MAPS, "h_pre"), _BYTES)
MHC_NEXT_SHIFTED = replace(
    MHC_NEXT,
    name="mhc_next shifted",
    inputs=("read", *_NEXT),
    outputs=("h_in", "x_after", "h_pre", "x_next"),
    moved=(2, 2, 3, 3),
)
MHC_NEXT_SHIFTED_NORMED = _normed(MHC_NEXT_SHIFTED, moved=MHC_NEXT.moved)
SHIFTED = (MHC_SHIFTED_PRE, MHC_NEXT_SHIFTED, MHC_NEXT_SHIFTED_NORMED)
_identity, _post_identity = public("mhc_pre", residual="identity"), public("mhc_post", h_res=None)
MHC_PRE_IDENTITY = Subject("mhc_pre identity", _identity, _PRE, _MAPS[:2], _BYTES)
MHC_POST_IDENTITY = Subject("mhc_post identity", _post_identity, _POST[:3], ("x_next",), _BYTES)
MHC_NEXT_IDENTITY = replace(
    MHC_NEXT,
    name="mhc_next identity",
    call=partial(_next, residual="identity"),
    exact=partial(_next_exact, residual="identity"),
    inputs=tuple(name for name in _NEXT if name != "h_res"),
)
MHC_MEAN = Subject("mhc_mean", public("mhc_mean"), ("x",), ("out",), (1, 1, 1, 1))
VARIANTS = (*SHIFTED, MHC_PRE_IDENTITY, MHC_POST_IDENTITY, MHC_NEXT_IDENTITY, MHC_MEAN)
ALL = (*SUBJECTS, *OF_THE_STACK, *VARIANTS)
NORMED = tuple(subject for subject in ALL if "layer_norm_weight" in subject.inputs)
MIXED = (MHC_PRE, MHC_LAYER, MHC_POST_PRE, MHC_MAPS, MHC_NEXT, *NORMED, *SHIFTED[:2])  # with Sinkhorn and the rest
NOT_IN_TILELANG = tuple(subject.name for subject in (MHC_MAPS, MHC_READ, *NORMED, *VARIANTS))

LAYOUTS = ("", "sliced", "strided", "transposed", "expanded")


def laid_out(name: str, tensor: Tensor, layout: str) -> Tensor:
    """The same values in another layout, NaN around them where there is a place; `expanded` repeats the first row, but
    of no parameter: of maps that are all alike there is nothing to learn. A link has no values, only its layout.
    """
    if name == "link":
        return tensor
    other = float("nan") if tensor.is_floating_point() else -1
    if layout == "sliced" and tensor.dim():
        return torch.nn.functional.pad(tensor, (1, 2), value=other)[..., 1:-2]
    if layout == "strided":
        return torch.stack([tensor, torch.full_like(tensor, other)], -1)[..., 0]
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    if layout == "expanded" and tensor.dim() > 1 and name not in (*_PARAMETERS, "weight"):
        return tensor[:1].expand_as(tensor)
    return tensor


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What the cases of both families share."""

    scale: float = 1.0  # of x
    parameter_dtype: torch.dtype = torch.float32
    seed: int = SEED
    unused: tuple[str, ...] = ()  # outputs without a cotangent
    layout: str = ""  # one of LAYOUTS

    def inputs(self: Any, device: torch.device | str = "cpu", drawn_on: torch.device | str = "cpu") -> Tensors:
        """Drawn on the CPU, a case is the same on every device; drawn on a GPU, large ones take no time."""
        generator = torch.Generator(drawn_on).manual_seed(self.seed)
        normal = partial(torch.randn, generator=generator, device=drawn_on)
        drawn = self._drawn(lambda *shape: normal(shape).to(device), generator)
        return {name: laid_out(name, tensor.to(device), self.layout) for name, tensor in drawn.items()}

    def bytes_moved(self: Any) -> dict[str, float]:
        """What kernels must move when x does not fit the cache."""
        X = math.prod(self.sizes) * self.dtype.itemsize
        a, b, c, d = self.subject.moved
        forward, backward = (a + b / max(1, self.n)) * X, (c + d / max(1, self.n)) * X
        return {"forward": forward, "backward": backward, "both": forward + backward}

    def _named(self: Any, first: dict[str, bool], last: dict[str, bool]) -> str:
        """What most cases leave as it is stands only in those that do not. first, last: what the family says, if so."""
        words = first | {f"parameters {name_of(self.parameter_dtype)}": self.parameter_dtype != torch.float32}
        words |= {f"scale {self.scale:g}": self.scale != 1} | last
        words |= {f"{name} {value:g}": True for name, value in self.subject.options} | {self.layout: bool(self.layout)}
        words |= {f"no d{name}": True for name in self.unused} | {f"seed {self.seed}": self.seed != SEED}
        shown = [word for word, holds in words.items() if holds]
        return " ".join([self.subject.name, "x".join(map(str, self.sizes)), *shown])


@dataclass(frozen=True)
class Case(Drawn):
    """An op on x [*outer, n, D], with every tensor random, gamma away from ones and odd alphas."""

    subject: Subject
    outer: tuple[int, ...]
    n: int
    D: int
    dtype: torch.dtype = torch.bfloat16
    gamma: bool = True
    sigma: float = 1.05  # of the logits that Sinkhorn gets

    def _drawn(self, normal: Callable[..., Tensor], generator: torch.Generator) -> Tensors:
        n, D, outer, inputs = self.n, self.D, self.outer, self.subject.inputs
        M, sections = sum(map(len, self.sections.values())), len(self.sections)

        def parameter(tensor: Tensor) -> Tensor:
            return tensor.to(self.parameter_dtype)

        drawn: dict[str, Callable[[], Tensor]] = {
            "logits": lambda: (self.sigma * normal(*self.sizes)).to(self.dtype),
            "x": lambda: (normal(*self.sizes) * self.scale).to(self.dtype),
            "h_out": lambda: (normal(*outer, D) * self.scale).to(self.dtype),
            "h_post": lambda: 2 * torch.sigmoid(normal(*outer, n)),
            "h_res": lambda: mhc_ops.sinkhorn(normal(*outer, n, n), backend="reference"),
            "phi": lambda: parameter(normal(M, n * D) / (n * D) ** 0.5),
            "alpha": lambda: parameter(torch.tensor([1.1, 0.9, self.sigma][:sections])),
            "bias": lambda: parameter(0.1 * normal(M)),
            "gamma": lambda: parameter(1 + 0.3 * normal(n, D)),
            "layer_norm_weight": lambda: parameter(1 + 0.3 * normal(D)),
            "h_pre": lambda: torch.sigmoid(normal(*outer, n)),
            "read": lambda: torch.sigmoid(normal(*outer, n)),
        }
        wanted = [name for name in drawn if name in inputs and (name != "gamma" or self.gamma)]
        tensors = {name: drawn[name]() for name in wanted}
        # On the device of x: moved there, it would get elements of its own.
        return tensors | ({"link": tensors["x"].new_zeros(()).expand(self.sizes)} if "link" in inputs else {})

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.outer, self.n, self.n if self.subject.inputs == SINKHORN.inputs else self.D)

    @property
    def sections(self) -> dict[str, range]:
        """The rows of each section of phi, bias and h_mix."""
        n, name = self.n, self.subject.name
        every = {"pre": range(n), "post": range(n, 2 * n), "res": range(2 * n, 2 * n + n * n)}
        many = 1 if name == MHC_HEAD.name else 2 if "identity" in name else 3
        return dict(list(every.items())[:many])

    @property
    def steep(self) -> bool:
        """Logits so large that Sinkhorn makes more of small errors."""
        return self.sigma >= STEEP_LOGITS

    def runs_on(self, backend: str) -> bool:
        """Whether the backend's kernels have all that the case asks for."""
        options = {name for name, _ in self.subject.options}
        there = self.subject.name not in NOT_IN_TILELANG and options.isdisjoint(OPTIONS_NOT_IN_TILELANG)
        return backend != "tilelang" or there

    def smaller(self) -> "Case":
        """As quick to check as to start."""
        return replace(self, outer=(min(256, math.prod(self.outer)),))

    def __str__(self) -> str:
        no_gamma = not self.gamma and "gamma" in self.subject.inputs
        return self._named(
            {name_of(self.dtype): True}, {f"logits {self.sigma:g}": self.sigma != Case.sigma, "no gamma": no_gamma}
        )


@dataclass(frozen=True)
class Stack(Case):
    """A boundary as `HyperStack` runs it, around layers that cost nothing; on few tokens it is checked alone."""

    recompute: int = 0

    def runs_on(self, provider: str) -> bool:
        """torch.compile would take longer for two stacks than for all the rest."""
        return provider != "torch.compile" and super().runs_on(provider)

    def smaller(self) -> Case:
        return Case(self.subject, self.outer, self.n, self.D, self.dtype, self.gamma).smaller()

    def layer(self) -> Case:
        """What a stack is made of where a library has no boundaries."""
        return replace(self.smaller(), subject=MHC_LAYER_NORMED if self.subject in NORMED else MHC_LAYER)

    def __str__(self) -> str:
        return super().__str__() + f" recompute {self.recompute}" * bool(self.recompute)


_bf16, _fp16, _fp32 = torch.bfloat16, torch.float16, torch.float32


# What `mhc-ops check` runs: every stream count, every type, every scale once, sizes that are a multiple of nothing.
def _check(subject: Subject) -> tuple[Case, ...]:
    case = partial(Case, subject)
    if subject is SINKHORN:
        return (
            *(case((500,), 4, 0, _fp32, sigma=sigma) for sigma in (0.1, 1, 3, 8)),
            *(case((173,), n, 0, _fp32) for n in (1, 2, 3, 5, 6, 7, 8)),
            case((2, 128), 4, 0, _bf16),
        )
    return (
        case((2, 128), 4, 256, gamma=False),
        *(case((2, 128), 4, 256, dtype) for dtype in (_bf16, _fp16, _fp32)),
        *(case((2, 128), 4, 256, scale=scale) for scale in (1e-3, 1e3)),
        case((2, 128), 4, 256, parameter_dtype=_bf16),
        *(case((173,), n, 257) for n in (1, 2, 3, 5, 6, 7, 8)),
        case((1,), 4, 4096),
        *(case((300,), 4, 200, sigma=sigma) for sigma in (0.1, 3, 8) if subject in MIXED),
    )


CHECK = (
    *(case for subject in (*SUBJECTS, *OF_THE_STACK) for case in _check(subject)),
    *(Case(subject, (2, 128), 4, 256, dtype) for subject in VARIANTS for dtype in (_bf16, _fp32)),
    *(Case(subject, (173,), 3, 257) for subject in VARIANTS),
)

# What `mhc-ops bench` runs on a GPU: training sizes of 4 streams,
_case, _boundary = partial(Case, n=4, gamma=False), partial(Stack, n=4, gamma=False)
SIZES = ((8192, 4096), (8192, 7168), (4096, 2560), (16384, 1280))  # T, D
BENCH: tuple[Case, ...] = (
    *(_case(s, (T,), D=D) for s in (MHC_LAYER, MHC_PRE, MHC_POST, MHC_POST_PRE) for T, D in SIZES),
    *(_boundary(s, (T,), D=D) for s in (MHC_NEXT, MHC_NEXT_NORMED) for T, D in SIZES),
    _boundary(MHC_NEXT, (8192,), D=4096, recompute=4),
    *(_boundary(s, (T,), D=D) for s in (*SHIFTED[1:], MHC_NEXT_IDENTITY) for T, D in (SIZES[0], SIZES[2])),
)
# decode sizes, beside other kernels only (launches are all there is to see),
_of_decode = (MHC_LAYER, MHC_PRE, MHC_POST, MHC_POST_PRE, MHC_HEAD)
DECODE: tuple[Case, ...] = (
    *(_case(s, (T,), D=D) for s in _of_decode for D in (4096, 7168) for T in (1, 16, 128)),
    *(_boundary(MHC_NEXT_NORMED, (T,), D=D) for D in (4096, 7168) for T in (1, 16, 128)),
    *(_boundary(MHC_NEXT_SHIFTED_NORMED, (T,), D=D) for D in (4096, 7168) for T in (1, 16)),
)
# and on a CPU, where only the reference can be timed.
BENCH_CPU: tuple[Case, ...] = (
    *(_case(subject, (256,), D=256, dtype=_fp32) for subject in SUBJECTS),
    *(_boundary(MHC_NEXT_NORMED, (64,), D=64, dtype=_fp32, recompute=k) for k in (0, 4)),
)


@dataclass(frozen=True)
class Sweep:
    """How time grows. axis: the size that varies; cases: what its values make of the op; at: what stays the same."""

    axis: str
    at: str
    cases: dict[int, Any]


_layer_case = partial(_case, MHC_LAYER)
_T, _D, _few = (1024, 2048, 4096, 8192, 16384), (1280, 2560, 4096, 5120, 7168), (64, 128, 256, 512)
SCALING = (
    Sweep("T", "D = 4096", {T: _layer_case((T,), D=4096) for T in _T}),
    Sweep("D", "T = 8192", {D: _layer_case((8192,), D=D) for D in _D}),
)
SCALING_CPU = (
    Sweep("T", "D = 256", {T: _layer_case((T,), D=256, dtype=_fp32) for T in _few}),
    Sweep("D", "T = 256", {D: _layer_case((256,), D=D, dtype=_fp32) for D in _few}),
)
