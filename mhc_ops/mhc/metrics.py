"""Health of a training run: maps, logits and gradients of a model's hyper-connections."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core import private
from ..core.backend import choose
from ..core.maps import ReadsStreams
from ..core.modes import is_transformed
from ..core.precision import accumulate
from .ops import mhc_maps, sinkhorn
from .options import DEFAULTS, MapKeywords, PreOptions, Residual

SATURATED = 6.0  # |z| above which a sigmoid has less than 1 % of its steepest slope
_SATURATED_SHARE = 1 / (1 + math.exp(-SATURATED)) - 0.5  # how far σ(z) is from ½ there
_OF_RESIDUAL = ("residual", "sinkhorn_iters", "sinkhorn_eps", "transposed")
_OF_READ_AND_WRITE = MapKeywords.__optional_keys__ - set(_OF_RESIDUAL)
_paused = ContextVar("paused", default=False)
_OF_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # parts of names, as torch adds them


@contextmanager
def metrics(model: nn.Module) -> Iterator["Metrics"]:
    """Collects what the `HyperConnection`s of a model do, in a `HyperStack` or alone, and those of a model of
    transformers that `mhc_ops.compat.transformers` has patched.

    >>> with mhc_ops.metrics(model) as health:
    ...     loss_of(model(batch)).backward()
    >>> health.result()["layers.0/h_res_entropy"]

    All values stay on the device until `health.result()`, so the host does not wait. Results and gradients of the
    model keep their bits. Each connection makes its maps a second time, which reads x once more: collect in every
    so many steps of a training run.

    All calls within count, those of gradient accumulation too; what a checkpoint runs again in the backward does not.
    Gradients are read when the context ends: end it between backward and zero_grad. Within the context what
    torch.compile has compiled runs eagerly, and takes the time and memory of that; compile before the context, not
    within. Under torch.func nothing is collected: call the model itself.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"metrics: model must be an nn.Module, got {type(model).__name__}")
    connections: dict[str, Any] = {
        _plain(name): each for name, each in model.named_modules() if isinstance(each, ReadsStreams)
    }
    if not connections:
        advice = "a model of transformers is patched first, by mhc_ops.compat.transformers.patch"
        raise ValueError(f"metrics: there is no HyperConnection in this {type(model).__name__}; {advice}")
    found = Metrics(connections)
    with ExitStack() as hooks:
        hooks.enter_context(_eager)
        hooks.enter_context(model.register_forward_pre_hook(found._begin))
        for name, connection in connections.items():
            # Before other hooks: those of FSDP2 free the parameters that the maps are made of.
            hooks.enter_context(connection.register_forward_hook(partial(found._see, name), prepend=True))
        hooks.enter_context(model.register_forward_hook(found._end))
        yield found
        found._see_gradients()


class NotCollected(RuntimeError):
    """No numbers were collected, or not from all connections that ran."""


class Metrics:
    """What `metrics` collects; `result()` has it as numbers."""

    def __init__(self, connections: dict[str, Any]):
        self._connections = connections
        self._seen = {name: _Seen() for name in connections}
        self._composite = _Seen()
        self._product: Tensor | None = None  # of the maps since the call of the model began
        self._called = False  # the model itself, not a part of it
        self._gradients: dict[str, dict[str, Tensor]] = {}

    def result(self) -> dict[str, float]:
        """By name: "layers.0/h_res_entropy" of the connection model.layers[0], "gain_forward" of all of them.

        h_res_row_error, h_res_column_error: the largest |sum − 1| of a row or column
        h_res_entropy: −Σ_ij h log h / n, mean over tokens: 0 of a permutation, log n of 1/n everywhere
        h_res_max: the largest entry
        h_pre_mean, h_pre_min, h_pre_max and the same of h_post
        saturated_pre, saturated_post, saturated_res: share of the logits z with |z| > 6
        dphi_norm, dalpha_norm, dbias_norm: of the gradients, where there are some
        gain_forward, gain_backward: largest absolute row and column sum of the product of all h_resᵀ in one forward,
        mean over tokens

        With residual="identity" there is no h_res and none of its metrics. Where connections see different shapes, as
        in an encoder and a decoder, each run of equal shapes has its own product. Here the host waits for the device.
        """
        compiled = [name or "the model" for name, seen in self._seen.items() if seen.compiled]
        if compiled:
            further = f" and {len(compiled) - 1} more" if len(compiled) > 1 else ""
            raise NotCollected(
                f"metrics: torch.compile compiled {compiled[0]}{further} within the context, where nothing is "
                "collected: compile before the context begins, and set no stance of torch.compiler within it"
            )
        if not any(seen.counts for seen in self._seen.values()):
            raise NotCollected(
                "metrics: no connection of the model ran within the context, or only under torch.func, where nothing "
                "is collected: call the model itself"
            )
        found = self._composite.tensors()
        for name, seen in self._seen.items():
            for metric, value in {**seen.tensors(), **self._gradients.get(name, {})}.items():
                found[f"{name}/{metric}" if name else metric] = value
        return _numbers(found)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if not _unseen():
            self._product, self._called = None, True

    def _end(self, model: nn.Module, inputs: Any, result: Any) -> None:
        if not _unseen():
            with _aside():
                self._close()
            self._called = False

    def _close(self) -> None:
        """Count the product of this forward's maps."""
        if self._product is not None:
            sizes = self._product.abs()
            self._composite.mean("gain_forward", sizes.sum(-1).amax(-1))
            self._composite.mean("gain_backward", sizes.sum(-2).amax(-1))
            self._product = None

    def _see(self, name: str, connection: Any, inputs: tuple[Any, ...], result: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._seen[name].compiled = True  # in each call of what is compiled here
        if _unseen():
            return
        x = _local(connection.streams_read(inputs[0], result))
        if x.numel():
            with _aside():
                self._see_maps(self._seen[name], connection, x)

    def _see_maps(self, seen: "_Seen", connection: Any, x: Tensor) -> None:
        options = PreOptions(**connection.map_options())
        backend = _backend(connection, x.device)
        h_pre, h_post, z_res = _maps(connection, x, options, backend)
        for which, h in (("pre", h_pre), ("post", h_post)):
            seen.mean(f"h_{which}_mean", h)
            seen.least(f"h_{which}_min", h)
            seen.most(f"h_{which}_max", h)
        for which, sigmoid in (
            ("pre", h_pre - options.hc_eps),
            ("post", (h_post - options.post_eps) / options.post_mult),
        ):
            seen.mean(f"saturated_{which}", (sigmoid - 0.5).abs() > _SATURATED_SHARE)
        if z_res is None:
            self._multiply(torch.diag_embed(torch.ones_like(h_post)))
            return
        seen.mean("saturated_res", z_res.abs() > SATURATED)
        h_res = sinkhorn(z_res, options.sinkhorn_iters, options.sinkhorn_eps, backend=backend)
        seen.most("h_res_row_error", (h_res.sum(-1) - 1).abs())
        seen.most("h_res_column_error", (h_res.sum(-2) - 1).abs())
        seen.mean("h_res_entropy", torch.special.entr(h_res).sum(-1))
        seen.most("h_res_max", h_res)
        self._multiply(h_res if options.transposed else h_res.mT)

    def _multiply(self, mix: Tensor) -> None:
        """x_next = mix @ x + …"""
        if not self._called:
            return
        if self._product is None or self._product.shape != mix.shape:
            self._close()
            self._product = mix
        else:  # by @, tensor cores might round to 11 bits
            self._product = (mix[..., None] * self._product[..., None, :, :]).sum(-2)

    @torch.no_grad()
    def _see_gradients(self) -> None:
        for name, connection in self._connections.items():
            gradients = {which: tensor.grad for which, tensor in zip(("phi", "alpha", "bias"), _parameters(connection))}
            self._gradients[name] = {
                f"d{which}_norm": _whole(torch.linalg.vector_norm(accumulate(gradient)))
                for which, gradient in gradients.items()
                if gradient is not None
            }


class _Seen:
    """Means and extremes over all calls so far, as tensors."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.extremes: dict[str, Tensor] = {}
        self.compiled = False

    def mean(self, name: str, values: Tensor) -> None:
        _merge(self.sums, name, values.sum(), torch.add)
        self.counts[name] = self.counts.get(name, 0) + values.numel()

    def least(self, name: str, values: Tensor) -> None:
        _merge(self.extremes, name, values.amin(), torch.minimum)

    def most(self, name: str, values: Tensor) -> None:
        _merge(self.extremes, name, values.amax(), torch.maximum)

    def tensors(self) -> dict[str, Tensor]:
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        return {**means, **self.extremes}


def _merge(kept: dict[str, Tensor], name: str, value: Tensor, both: Callable[[Tensor, Tensor], Tensor]) -> None:
    kept[name] = both(kept[name], value) if name in kept else value


def _unseen() -> bool:
    """True in `unseen`, while torch.compile traces, under torch.func, and where a checkpoint runs a forward again."""
    return torch.compiler.is_compiling() or _paused.get() or is_transformed() or private.graph_task() != -1


class _Eager:
    """While a context is open, what torch.compile has compiled runs eagerly. Contexts may end in any order. The last
    one restores the stance from before the first; one that was set in between stays."""

    def __init__(self) -> None:
        self.contexts = 0
        self.stance: Any = None  # as torch returned it, once it is set

    def __enter__(self) -> None:
        self.contexts += 1
        if private.may_have_compiled():
            now, is_ours = self._set()
            if is_ours:
                self.stance.__enter__()
            else:
                self.stance = now

    def __exit__(self, *error: object) -> None:
        self.contexts -= 1
        if not self.contexts and self.stance is not None:
            now, is_ours = self._set()
            (self.stance if is_ours else now).__exit__(None, None, None)
            self.stance = None

    def _set(self) -> tuple[Any, bool]:
        """Set the stance: torch tells only then which one there was. Whether that was ours."""
        now: Any = torch.compiler.set_stance("force_eager")
        return now, self.stance is not None and now.prev is self.stance.stance


_eager = _Eager()


@contextmanager
def unseen() -> Iterator[None]:
    """Forwards within count for no metrics: that of a pipeline on memory of any content, to find shapes."""
    before = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(before)


@contextmanager
def _aside() -> Iterator[None]:
    """No gradients, and no modes: that of a selective checkpoint counts operations."""
    with torch.no_grad(), private.disable_modes():
        yield


def _plain(name: str) -> str:
    """The name of a module in the model that torch's wrappers were put around."""
    return ".".join(part for part in name.split(".") if part not in _OF_WRAPPERS)


def _parameters(connection: Any) -> list[Tensor]:
    """phi, alpha and bias."""
    return [getattr(connection, name) for name in connection.map_names[:3]]


def _maps(connection: Any, x: Tensor, options: PreOptions, backend: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """h_pre, h_post and the logits of h_res, or None."""
    own: Any = {name: value for name, value in options._asdict().items() if name in _OF_READ_AND_WRITE}
    further = {name: value for name, value in own.items() if value != getattr(DEFAULTS, name)}
    residual = options.residual if options.residual == Residual.IDENTITY else Residual.LOGITS.value
    gamma = getattr(connection, "gamma", None)
    parameters: Any = [None if each is None else _local(each) for each in (*_parameters(connection), gamma)]
    return mhc_maps(x, *parameters, residual=residual, backend=backend, **further)


def _backend(connection: Any, device: torch.device) -> str:
    """The connection's, but TileLang has no maps alone."""
    name = choose("metrics", "mhc", getattr(connection, "backend", None), device)
    return "triton" if name == "tilelang" else name


def _local(tensor: Any) -> Tensor:
    """This process's tokens, where x is in pieces on several; maps are whole on each."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(norm: Any) -> Tensor:
    """The norm of a whole gradient, also where it is sharded over processes."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _numbers(tensors: dict[str, Tensor]) -> dict[str, float]:
    """As floats, with one copy per device."""
    numbers: dict[str, float] = {}
    for device in {value.device for value in tensors.values()}:
        there = {name: value for name, value in tensors.items() if value.device == device}
        numbers |= zip(there, torch.stack(list(there.values())).tolist())
    return {name: numbers[name] for name in tensors}
