"""Cases as data: an op, a shape, types and scales; the same case always makes the same tensors."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mhc_ops

from ..core.check import name_of
from ..mhc.options import NOT_IN_TILELANG as OPTIONS_NOT_IN_TILELANG

Tensors = dict[str, Tensor]
Call = Callable[..., tuple[Tensor, ...]]
STEEP_LOGITS = 8.0
LARGEST_SEED = 2**62  # torch takes larger ones, which leaves room to count on from a seed


def seed(text: str) -> int:
    """The seed that a text says; ValueError where it says none, for which argparse has words of its own."""
    if not 0 <= int(text) <= LARGEST_SEED:
        raise ValueError(text)
    return int(text)


# The seed of every case: none is chosen for what it happens to draw. A wrong one does not fail the import; the commands
# and the tests report it.
try:
    SEED, WRONG_SEED = seed(os.environ.get("MHC_OPS_SEED") or "0"), ""
except ValueError:
    SEED, WRONG_SEED = 0, f"MHC_OPS_SEED: {os.environ['MHC_OPS_SEED']!r} is no whole number from 0 to {LARGEST_SEED}"


@dataclass(frozen=True)
class Subject:
    """An op: `call(**tensors, backend=...)` returns the outputs in order."""

    name: str
    call: Call
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    moved: tuple[float, float, float, float]  # a, b, c, d: a + b/n times the bytes of x, backward c + d/n times
    intermediates: int = 0  # so many of the outputs, the last, carry no gradient
    mutated: tuple[str, ...] = ()  # the inputs that a call writes to
    options: tuple[tuple[str, float], ...] = ()  # further arguments, see `with_options`
    family: str = "mhc"

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The outputs that carry a gradient."""
        return self.outputs[: len(self.outputs) - self.intermediates]

    def run(self, tensors: Tensors, backend: str) -> Tensors:
        """The outputs by name."""
        return dict(zip(self.outputs, self.call(**tensors, backend=backend)))

    def truth(self, tensors: Tensors, results: Tensors) -> Tensors:
        """The outputs in fp64, from fp64 inputs and the results under test.

        Of a post and the pre after it, or a layer with a norm, the steps: what is stored in between is read as it was
        stored, x_next in the forward, and with a link its gradient too. scaled: h_in as its norm scales it. Its
        gradient and the one through the norm cancel (all of dh_pre if n is 1), so the terms of both are known apart.
        """
        if "layer_norm_weight" not in self.inputs and not {"h_post", "phi"} <= {*self.inputs}:
            return self.run(tensors, "reference")
        options, linked, found = dict[str, Any](self.options), "link" in tensors, dict[str, Any]()
        post: Any = partial(mhc_ops.mhc_post, transposed=options.get("transposed", False), backend="reference")
        layer_norm_eps, x, h_out = options.pop("layer_norm_eps", 1e-6), tensors["x"], tensors.get("h_out")
        if "h_post" in tensors:
            options |= {} if "h_res" in tensors else {"residual": "identity"}
            x_next = post(x.detach() if linked else x, h_out, tensors["h_post"], tensors.get("h_res"))
            if "dlink" in results:
                x_next.register_hook(lambda gradient: results["dlink"].double())
            if linked:
                x_next = x_next + tensors["link"]
            found["x_next"], x = x_next, x_next + (results["x_next"].double() - x_next).detach()
        options |= {name: tensors[name] for name in _OWN.split() if name in tensors}
        h_pre, h_post, h_res = mhc_ops.mhc_maps(x, **options, backend="reference")
        h_in = mhc_ops.mhc_read(x, tensors.get("read", h_pre), backend="reference")
        if "layer_norm_weight" in tensors:
            found["scaled"] = h_in.clone()
            factor = torch.rsqrt(h_in.square().mean(-1, keepdim=True) + layer_norm_eps)
            h_in = tensors["layer_norm_weight"] * found["scaled"] * factor
        if linked:
            found["x_after"] = post(x, tensors["h_out"].detach(), h_post, h_res)
        elif h_out is not None and "h_post" not in tensors:
            found["x_next"] = post(x, h_out, h_post, h_res)
        found |= {"h_in": h_in, "h_pre": h_pre, "h_post": h_post, "h_res": h_res}
        return {name: found[name] for name in (*self.outputs, "scaled") if name in found}

    def with_options(self, **options: float) -> "Subject":
        return replace(self, call=partial(self.call, **options), options=tuple(options.items()))


def public(name: str, **options: Any) -> Call:
    """A public function, looked up at the call; returns a tuple without an h_res that is None."""

    def call(**arguments: Any) -> tuple[Tensor, ...]:
        outputs = getattr(mhc_ops, name)(**arguments, **options)
        return tuple(o for o in outputs if o is not None) if isinstance(outputs, tuple) else (outputs,)

    return call


def _layer(x: Tensor, h_out: Tensor, backend: str, **parameters: Any) -> tuple[Tensor, ...]:
    """A layer that costs nothing: its output and the gradient of its input are given."""
    return mhc_ops.mhc_layer(x, lambda h_in: (h_out, h_in), **parameters, backend=backend)


def _next(x: Tensor, h_out: Tensor, link: Tensor, backend: str, **own: Any) -> tuple[Tensor, ...]:
    """One boundary, and the end after a sublayer that costs nothing. The gradient of x_next is dlink as it is stored;
    the gradient of x is made from that, but not here."""
    h_post, h_res, read = (own.pop(name, None) for name in ("h_post", "h_res", "read"))
    transposed = own.get("transposed", False)
    if backend == "reference":  # whose link is x itself
        x_next = mhc_ops.mhc_post(x.detach(), h_out, h_post, h_res, transposed=transposed, backend=backend) + link
        own |= {} if read is None else {"shifted": True, "read": read}
        h_in, carry = mhc_ops.mhc_enter(x_next, **own, backend=backend)
    else:
        ended = mhc_ops.Carry(x, h_post, h_res, read, link, transposed)
        h_in, carry = mhc_ops.mhc_next(ended, h_out, **own, backend=backend)
    left = mhc_ops.mhc_leave(carry, h_out.detach(), backend=backend)
    return h_in, *(left if isinstance(left, tuple) else (left,)), carry.x


def _shifted_pre(x: Tensor, backend: str, **own: Any) -> Any:
    h_in, carry = mhc_ops.mhc_enter(x, **own, shifted=True, backend=backend)
    return h_in, carry.h_post, carry.h_res, carry.read


def _subject(name: str, inputs: str, outputs: str, moved: Any, call: Call | None = None, **more: Any) -> Subject:
    """call: None for the public function of this name."""
    return Subject(name, call or public(name), tuple(inputs.split()), tuple(outputs.split()), moved, **more)


def _normed(subject: Subject, **changes: Any) -> Subject:
    """The subject with the norm of the layer."""
    inputs = (*subject.inputs, "layer_norm_weight")
    return replace(subject, name=f"{subject.name} normed", inputs=inputs, **changes)


_OWN, _POST, _MAPS = "phi alpha bias gamma", "x h_out h_post h_res", "h_in h_post h_res"
_PRE, _NEXT, _LEFT = f"x {_OWN}", f"{_POST} link {_OWN}", "h_in x_after x_next"
# The bytes of pre: x is read for the projection and again for h_in, which is written; backward, x and dh_in are read
# for dh_pre and again to write dx. Of post: x and h_out are read, x_next is written; backward, dx_next, x and h_out are
# read, dx and dh_out written. The layer's backward writes dx once; to its second pass over x comes dx_next. post_pre
# reads x_next once more for h_in; backward: pre's, with dx_next, up to a dx_next in fp32, then post's.
_BYTES = (2, 1, 3, 2)  # of pre, and as many of post
_forward_pre = public("mhc_forward_pre", outflag=True)
_stored_maps = f"{_MAPS} inv_rms h_mix h_pre"
MHC_FORWARD_PRE = _subject("mhc_forward_pre", _PRE, _stored_maps, _BYTES, _forward_pre, intermediates=3)
MHC_PRE = _subject("mhc_pre", _PRE, _MAPS, _BYTES)
MHC_POST = _subject("mhc_post", _POST, "x_next", _BYTES)
MHC_LAYER = _subject("mhc_layer", f"x h_out {_OWN}", "x_next h_in", (4, 2, 6, 4), _layer)
MHC_POST_PRE = _subject("mhc_post_pre", f"{_POST} {_OWN}", f"x_next {_MAPS}", (3, 2, 9, 4))
MHC_HEAD = _subject("mhc_head", _PRE, "out", _BYTES)
SINKHORN = _subject("sinkhorn", "logits", "h_res", (2, 0, 3, 0))
SUBJECTS = (MHC_FORWARD_PRE, MHC_PRE, MHC_POST, MHC_LAYER, MHC_POST_PRE, MHC_HEAD, SINKHORN)
# The stack: the maps and the read alone, the boundary with its carry, the layer's norm.
MHC_MAPS = _subject("mhc_maps", _PRE, "h_pre h_post h_res", (1, 0, 2, 0))
MHC_READ = _subject("mhc_read", "x h_pre", "h_in", (1, 1, 2, 1))
_boundary = partial(_subject, intermediates=1)
MHC_NEXT = _boundary("mhc_next", _NEXT, _LEFT, (3, 2, 4, 4), _next)
_with_norm = tuple(map(_normed, (MHC_PRE, MHC_LAYER, MHC_POST_PRE, MHC_NEXT)))
MHC_PRE_NORMED, MHC_LAYER_NORMED, MHC_POST_PRE_NORMED, MHC_NEXT_NORMED = _with_norm
OF_THE_STACK = (MHC_MAPS, MHC_READ, MHC_NEXT, *_with_norm)
# The shifted form, which reads with the weights of the sublayer before; the identity in place of h_res; the mean.
MHC_SHIFTED_PRE = _subject("mhc_shifted_pre", f"read {_PRE}", f"{_MAPS} h_pre", _BYTES, _shifted_pre)
MHC_NEXT_SHIFTED = _boundary("mhc_next shifted", f"read {_NEXT}", "h_in x_after h_pre x_next", (2, 2, 3, 3), _next)
MHC_NEXT_SHIFTED_NORMED = _normed(MHC_NEXT_SHIFTED, moved=MHC_NEXT.moved)
SHIFTED = (MHC_SHIFTED_PRE, MHC_NEXT_SHIFTED, MHC_NEXT_SHIFTED_NORMED)
MHC_PRE_IDENTITY = _subject("mhc_pre identity", _PRE, "h_in h_post", _BYTES, public("mhc_pre", residual="identity"))
MHC_POST_IDENTITY = _subject("mhc_post identity", "x h_out h_post", "x_next", _BYTES, public("mhc_post", h_res=None))
_next_identity, _without_h_res = partial(_next, residual="identity"), _NEXT.replace("h_res ", "")
MHC_NEXT_IDENTITY = _boundary("mhc_next identity", _without_h_res, _LEFT, (3, 2, 4, 4), _next_identity)
MHC_MEAN = _subject("mhc_mean", "x", "out", (1, 1, 1, 1))
VARIANTS = (*SHIFTED, MHC_PRE_IDENTITY, MHC_POST_IDENTITY, MHC_NEXT_IDENTITY, MHC_MEAN)
ALL = (*SUBJECTS, *OF_THE_STACK, *VARIANTS)
NORMED = tuple(subject for subject in ALL if "layer_norm_weight" in subject.inputs)
MIXED = (MHC_PRE, MHC_LAYER, MHC_POST_PRE, MHC_MAPS, MHC_NEXT, *NORMED, *SHIFTED[:2])  # with Sinkhorn and the rest
NOT_IN_TILELANG = tuple(subject.name for subject in (MHC_MAPS, MHC_READ, *NORMED, *VARIANTS))
LAYOUTS = ("", "sliced", "strided", "transposed", "expanded")


def laid_out(name: str, tensor: Tensor, layout: str) -> Tensor:
    """The same values in another layout, with NaN around them. `expanded` repeats the first row, except in parameters:
    equal maps would show nothing. A link has no values, only its layout."""
    if name == "link":
        return tensor
    other = float("nan") if tensor.is_floating_point() else -1
    if layout == "sliced" and tensor.dim():
        return torch.nn.functional.pad(tensor, (1, 2), value=other)[..., 1:-2]
    if layout == "strided":
        return torch.stack([tensor, torch.full_like(tensor, other)], -1)[..., 0]
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    if layout == "expanded" and tensor.dim() > 1 and name not in (*_OWN.split(), "weight"):
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
        """A case that is drawn on the CPU is the same on every device; large ones are drawn faster on a GPU."""
        generator = torch.Generator(drawn_on).manual_seed(self.seed)
        normal = partial(torch.randn, generator=generator, device=drawn_on)
        drawn = self._drawn(lambda *shape: normal(shape).to(device), generator)
        return {name: laid_out(name, tensor.to(device), self.layout) for name, tensor in drawn.items()}

    def bytes_moved(self: Any) -> dict[str, float]:
        """The bytes that kernels must move if x exceeds the cache."""
        X = math.prod(self.sizes) * self.dtype.itemsize
        a, b, c, d = self.subject.moved
        forward, backward = (a + b / max(1, self.n)) * X, (c + d / max(1, self.n)) * X
        return {"forward": forward, "backward": backward, "both": forward + backward}

    def _named(self: Any, first: Sequence[str], last: Sequence[str]) -> str:
        """The name says what differs from most cases. first, last: the words of the family."""
        words = [self.subject.name, "x".join(map(str, self.sizes)), *first]
        words += [f"parameters {name_of(self.parameter_dtype)}" * (self.parameter_dtype != torch.float32)]
        words += [f"scale {self.scale:g}" * (self.scale != 1), *last]
        words += [*(f"{name} {value:g}" for name, value in self.subject.options), self.layout]
        words += [*(f"no d{name}" for name in self.unused), f"seed {self.seed}" * (self.seed != SEED)]
        return " ".join(filter(None, words))


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
        parameter = partial(Tensor.to, dtype=self.parameter_dtype)
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
        # made on the device of x: moved there, it would get elements of its own
        return tensors | ({"link": tensors["x"].new_zeros(()).expand(self.sizes)} if "link" in inputs else {})

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.outer, self.n, self.n if "logits" in self.subject.inputs else self.D)

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

    def runs_on(self, provider: str) -> bool:
        """Whether the kernels of a backend have all that the case asks for."""
        there = self.subject.name not in NOT_IN_TILELANG
        return provider != "tilelang" or (there and not {*dict(self.subject.options)} & {*OPTIONS_NOT_IN_TILELANG})

    def smaller(self) -> "Case":
        """The case on few tokens, to check it quickly."""
        return replace(self, outer=(min(256, math.prod(self.outer)),))

    def __str__(self) -> str:
        no_gamma = not self.gamma and "gamma" in self.subject.inputs
        last = f"logits {self.sigma:g}" * (self.sigma != Case.sigma), "no gamma" * no_gamma
        return self._named([name_of(self.dtype)], last)


@dataclass(frozen=True)
class Stack(Case):
    """A boundary as `HyperStack` runs it, around layers that cost nothing; it is checked alone, on few tokens."""

    recompute: int = 0

    def runs_on(self, provider: str) -> bool:
        """Not torch.compile, which takes longer for two stacks than for all the rest."""
        return provider != "torch.compile" and super().runs_on(provider)

    def smaller(self) -> Case:
        return Case(self.subject, self.outer, self.n, self.D, self.dtype, self.gamma).smaller()

    def layer(self) -> Case:
        """The layer that a stack is made of in a library without boundaries."""
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


def _each(subjects: Iterable[Subject], sizes: Iterable[tuple[int, int]], kind: Any = Case, **more: Any) -> list[Case]:
    """At every size, T and D, with 4 streams."""
    return [kind(subject, (T,), 4, D, gamma=False, **more) for subject in subjects for T, D in sizes]


# What `mhc-ops bench` runs on a GPU: training sizes,
_OPS = (MHC_LAYER, MHC_PRE, MHC_POST, MHC_POST_PRE)
SIZES = ((8192, 4096), (8192, 7168), (4096, 2560), (16384, 1280))
BENCH = (
    *_each(_OPS, SIZES),
    *_each([MHC_NEXT, MHC_NEXT_NORMED], SIZES, Stack),
    *_each([MHC_NEXT], SIZES[:1], Stack, recompute=4),
    *_each([MHC_NEXT_SHIFTED, MHC_NEXT_SHIFTED_NORMED, MHC_NEXT_IDENTITY], SIZES[:3:2], Stack),
)
# decode sizes, beside other kernels only: they show launches,
_FEW = [(T, D) for D in (4096, 7168) for T in (1, 16, 128)]
DECODE = (
    *_each([*_OPS, MHC_HEAD], _FEW),
    *_each([MHC_NEXT_NORMED], _FEW, Stack),
    *_each([MHC_NEXT_SHIFTED_NORMED], [(T, D) for T, D in _FEW if T < 128], Stack),
)
# and on a CPU, where only the reference can be timed.
BENCH_CPU = (
    *_each(SUBJECTS, [(256, 256)], dtype=_fp32),
    *(stack for k in (0, 4) for stack in _each([MHC_NEXT_NORMED], [(64, 64)], Stack, dtype=_fp32, recompute=k)),
)
