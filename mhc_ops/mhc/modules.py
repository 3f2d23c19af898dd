"""Modules around the mHC functions."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack

from ..core import backend as backends
from ..core.check import check_count, check_flag, check_tensors
from ..core.maps import KeepsMaps, ReadsStreams, type_of_maps
from .carry import StackCarry, Start, boundary
from .ops import mhc_forward_pre, mhc_head, mhc_layer
from .options import DEFAULTS, PreKeywords, Residual, checked, spelled_out

MOST = 1 - 2**-8  # of a sigmoid in a fresh module: nearer to 1 its slope is too small to learn


class _Maps(KeepsMaps, nn.Module):
    """Parameters of the modules here: phi [maps, nD], alpha [sections], bias [maps] and, if asked for, gamma [n, D].

    sections: 3 for the n² + 2n maps of a layer, pre, post and res; 2 for those without res; 1 for the n of a head.
    """

    phi: nn.Parameter
    alpha: nn.Parameter
    bias: nn.Parameter
    gamma: nn.Parameter | None
    map_names = ("phi", "alpha", "bias", "gamma", "layer_norm_weight")

    def __init__(
        self,
        n: int,
        D: int,
        sections: int,
        gamma: bool,
        options: dict[str, Any],
        backend: str | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        cast_maps: bool,
    ):
        super().__init__()
        kind = type(self).__name__
        check_count(kind, "n", n)
        check_count(kind, "D", D)
        check_flag(kind, "gamma", gamma)
        dtype, self.cast_maps = type_of_maps(kind, dtype, cast_maps)
        found = checked(kind, options)
        if found.hc_eps >= 1:
            raise ValueError(f"{kind}: hc_eps must be below 1, got {found.hc_eps}")
        if found.post_mult <= 0:
            raise ValueError(f"{kind}: post_mult must be above 0, got {found.post_mult}")
        if found.post_eps >= 1:
            raise ValueError(f"{kind}: post_eps must be below 1, got {found.post_eps}")
        maps = sum([n, n, n * n][:sections])
        self.n, self.D = n, D
        self.options = {name: getattr(found, name) for name in options}
        # Functions get only options that differ from the defaults: each one given costs time in every call.
        self.further = {name: value for name, value in self.options.items() if value != getattr(DEFAULTS, name)}
        self.backend = backend
        self.phi = nn.Parameter(torch.empty(maps, n * D, device=device, dtype=dtype))
        self.alpha = nn.Parameter(torch.empty(sections, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(maps, device=device, dtype=dtype))
        self.gamma = nn.Parameter(torch.empty(n, D, device=device, dtype=dtype)) if gamma else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """phi = 0, alpha = 0.01, gamma = 1; the maps are those of the bias."""
        nn.init.zeros_(self.phi)
        nn.init.constant_(self.alpha, 0.01)
        if self.gamma is not None:
            nn.init.ones_(self.gamma)

    def check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.is_nested or x.shape[-2:] != (self.n, self.D):
            check_tensors(type(self).__name__, x=x)
            raise ValueError(f"{type(self).__name__}: x must be [..., {self.n}, {self.D}], got {list(x.shape)}")

    def extra_repr(self) -> str:
        """n=4, D=64, the flags that are on, and the backend where one was named."""
        weight = getattr(self, "layer_norm_weight", None)
        flags = {
            "gamma": self.gamma is not None,
            "layer_norm": weight is not None,
            "checkpoint": getattr(self, "checkpoint", False),
            "cast_maps": self.cast_maps,
        }
        words = [f"n={self.n}", f"D={self.D}", *(f"{name}=True" for name, on in flags.items() if on)]
        words += [f"{name}={self.further[name]!r}" for name in ("residual", "transposed") if name in self.further]
        return ", ".join(words + ([f"backend={self.backend!r}"] if self.backend else []))


class MHCBlock(_Maps):
    """The trainable maps of one mHC layer: `h_in, h_post, h_res = block(x)` for x [..., n, D].

    h_in [..., D] is what the layer reads; h_post [..., n] and h_res [..., n, n] (raw logits, no Sinkhorn) say how its
    output is written back. Parameters: phi [n² + 2n, nD], alpha [3], bias [n² + 2n], of types as in `HyperConnection`.
    A fresh block is near h_pre = 0.5, h_post = 1 and h_res = 0 for every x: alpha is 0.01 and bias 0. `HyperConnection`
    is the module to train with.

    >>> block = MHCBlock(n=4, D=256)
    >>> h_in, h_post, h_res = block(torch.randn(2, 128, 4, 256))
    """

    def __init__(
        self,
        n: int = 4,
        D: int = 256,
        *,
        norm_eps: float = DEFAULTS.norm_eps,
        hc_eps: float = DEFAULTS.hc_eps,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        cast_maps: bool = False,
    ):
        options = {"norm_eps": norm_eps, "hc_eps": hc_eps}
        super().__init__(n, D, 3, False, options, backend, device, dtype, cast_maps)

    def reset_parameters(self) -> None:
        """phi ~ N(0, 0.02²), alpha = 0.01, bias = 0."""
        nn.init.normal_(self.phi, std=0.02)
        nn.init.constant_(self.alpha, 0.01)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.check(x)
        return mhc_forward_pre(x, self.phi, self.alpha, self.bias, backend=self.backend, **self.options)


class HyperConnection(_Maps, ReadsStreams):
    """A layer of a network with n residual streams: `x_next = HyperConnection(layer, n, D)(x)` for x [..., n, D].

    Where a residual network computes x + layer(x), this reads a weighted sum h_in of the streams, runs the layer on it
    and writes the result back into every stream, while the streams are mixed by a doubly stochastic matrix. All weights
    depend on the token (see `mhc_pre`, `mhc_post`).

    layer: any module or function from [..., D] to [..., D]. Where it returns a tuple, so does this: (x_next, *rest).
    `forward(x, /, *args, **kwargs)` passes the extras on to the layer, an argument named x too.

    >>> expand, layer, head = (lambda x: mhc_expand(x, 4)), HyperConnection(nn.Linear(64, 64), 4, 64), HyperHead(4, 64)
    >>> out = head(layer(expand(torch.randn(2, 10, 64))))

    A fresh model of these computes what a plain residual network does, x + layer(x) in every stream, up to rounding:
    phi is 0, so that the maps are those of the bias; h_pre sums to 1 and the columns of h_res do, so that equal streams
    are read and kept as they are, and h_post is 1. h_pre is random (not 1/n each), otherwise the streams would get the
    same gradients and stay equal for ever. With n = 1 h_pre would have to be 1, which a sigmoid does not reach: it
    starts at 1 − 2⁻⁸; with post_mult at most 1, h_post starts at (1 − 2⁻⁸)·post_mult.

    gamma: learn a norm weight [n, D]. layer_norm: h_in comes normed, as by an nn.RMSNorm in front of the layer, whose
    weight is `layer_norm_weight` [D], ones; that takes no pass of its own. checkpoint: keep only x for the backward and
    run everything, the layer included, again there.

    Other options as in `mhc_pre`: with residual="identity" every stream is kept as it is, and phi is [2n, nD],
    alpha [2], bias [2n]. `HyperStack` runs several of these in a row faster.

    dtype: of the parameters; without it fp32, or torch's default where that is wider. They stay fp32 when the module is
    cast to a narrower type, as by `model.bfloat16()`, or loads one; the layer is cast. cast_maps: they follow such
    casts, as they do where dtype is narrower than fp32.
    """

    @spelled_out
    def __init__(
        self,
        layer: Any,
        n: int,
        D: int,
        *,
        gamma: bool = False,
        layer_norm: bool = False,
        checkpoint: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        cast_maps: bool = False,
        **options: Unpack[PreKeywords],
    ):
        if not callable(layer):
            raise TypeError(f"HyperConnection: layer must be callable, got {type(layer).__name__}")
        check_flag("HyperConnection", "layer_norm", layer_norm)
        check_flag("HyperConnection", "checkpoint", checkpoint)
        residual = options.get("residual", DEFAULTS.residual)
        if residual == Residual.LOGITS:
            raise ValueError("HyperConnection: residual='logits' is no map to mix streams with; MHCBlock returns it")
        has_h_res = residual != Residual.IDENTITY
        sections, options_of_all = 3 if has_h_res else 2, {**DEFAULTS._asdict(), **options}
        super().__init__(n, D, sections, gamma, options_of_all, backend, device, dtype, cast_maps)
        weight = nn.Parameter(torch.ones(D, device=device, dtype=self.bias.dtype)) if layer_norm else None
        self.layer_norm_weight: nn.Parameter | None = weight
        self.layer, self.checkpoint = layer, checkpoint
        self.has_h_res = has_h_res  # where it has none, every stream is kept as it is

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """phi = 0, alpha = 0.01, gamma and layer_norm_weight = 1; bias: h_pre random with sum 1, h_post = 1, h_res, if
        there is one, 4 above the rest on its diagonal (95 % of a stream stays where it is, n = 4). The wrapped layer is
        left as it is.
        """
        super().reset_parameters()
        weight = getattr(self, "layer_norm_weight", None)
        if weight is not None:
            nn.init.ones_(weight)
        pre, post, res = self.bias.tensor_split([self.n, 2 * self.n])
        share = torch.softmax(torch.randn(self.n, device=self.bias.device, dtype=torch.float32), 0)
        pre.copy_(torch.logit((share - self.options["hc_eps"]).clamp(1 - MOST, MOST)))
        post.fill_(_logit((1 - self.options["post_eps"]) / self.options["post_mult"]))
        res.copy_(4 * torch.eye(self.n, device=self.bias.device).flatten()[: len(res)])

    def streams_read(self, given: Any, result: Any) -> Tensor:
        """x as a call read it: its input or, in a stack, the x of the carry that it returned."""
        if not isinstance(given, StackCarry):
            return given
        return (result if isinstance(result, StackCarry) else result[0]).carry.x

    def map_options(self) -> dict[str, Any]:
        return self.options

    def forward(self, x: Tensor | StackCarry, /, *args: Any, **kwargs: Any) -> Any:
        """x_next; in a `HyperStack`, which hands a carry over in the place of x, the next carry in that of x_next"""
        if not isinstance(x, StackCarry):
            self.check(x)
        elif isinstance(x.carry, Start):  # the x after it is made by these connections
            self.check(x.carry.x)
        own = self._parameters  # sooner than attributes, which torch looks up in Python
        parameters: list[Any] = [own[name] if name in own else getattr(self, name) for name in self.map_names]
        if not self.checkpoint or not torch.is_grad_enabled():
            return self._run(args, kwargs, x, *parameters)
        run = partial(self._run, args, kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(run, x, *parameters, use_reentrant=False)
        choice = backends.chosen()  # autograd runs it again in a thread without this context

        def run_on_the_same(x: Tensor, *parameters: Any) -> Any:
            with backends.scope(choice):
                return run(x, *parameters)

        return checkpoint(run_on_the_same, x, *parameters, use_reentrant=False)

    def _run(
        self, args: Any, kwargs: Any, x: Any, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Any, weight: Any
    ) -> Any:
        found = self._modules.get("layer")  # sooner, too
        layer: Any = self.layer if found is None else found
        wrapped = (lambda h_in: layer(h_in, *args, **kwargs)) if args or kwargs else layer
        own: Any = {"layer_norm_weight": weight, "backend": self.backend, **self.further}
        if not isinstance(x, StackCarry):
            return mhc_layer(x, wrapped, phi, alpha, bias, gamma, **own)
        h_in, carry = boundary(x, phi, alpha, bias, gamma, **own)
        if x.leaving is not None:
            h_in, carry = x.leaving(h_in, carry)
        result = wrapped(h_in)
        if isinstance(result, tuple) and result:
            return carry.after(result[0]), *result[1:]
        return carry.after(result)


class HyperHead(_Maps):
    """The end of a network with n residual streams: a weighted sum of them, [..., n, D] to [..., D] (see `mhc_head`).

    Fresh, it is their mean (1 − 2⁻⁸ of the one stream with n = 1). Parameters: phi [n, nD], alpha [1], bias [n] and,
    with gamma=True, gamma [n, D], of types as in `HyperConnection`.

    >>> HyperHead(4, 64)(torch.randn(2, 10, 4, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        n: int,
        D: int,
        *,
        gamma: bool = False,
        norm_eps: float = DEFAULTS.norm_eps,
        hc_eps: float = DEFAULTS.hc_eps,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        cast_maps: bool = False,
    ):
        options = {"norm_eps": norm_eps, "hc_eps": hc_eps}
        super().__init__(n, D, 1, gamma, options, backend, device, dtype, cast_maps)

    def reset_parameters(self) -> None:
        """phi = 0, alpha = 0.01, gamma = 1; bias: every weight is 1/n."""
        super().reset_parameters()
        nn.init.constant_(self.bias, _logit(1 / self.n - self.options["hc_eps"]))

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return mhc_head(x, self.phi, self.alpha, self.bias, self.gamma, backend=self.backend, **self.options)


def _logit(probability: float) -> float:
    probability = max(1 - MOST, min(probability, MOST))
    return math.log(probability / (1 - probability))
