"""What `misuse` draws from: layouts and kinds of tensors, hooks, values, and a valid call of each public function."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import mhc_ops

from .cases import laid_out

PUBLIC = (*mhc_ops.__all__, *mhc_ops.guide.__all__)


class Subclass(Tensor):
    """Tensor under another name."""


class Wrapped(Tensor):
    """Like a DTensor: it has no memory, and its operations run on the tensor within."""

    within: Tensor

    @staticmethod
    def __new__(cls, within: Tensor) -> "Wrapped":
        alike: Any = {"strides": within.stride(), "dtype": within.dtype, "device": within.device}
        made = Tensor._make_wrapper_subclass(cls, within.shape, **alike)
        made.within = within
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Wrapped, lambda wrapped: wrapped.within, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapped, func(*args, **kwargs))


def plain(value: Any) -> Any:
    """A contiguous copy of the values; None for what has none."""
    if isinstance(value, Wrapped):
        return plain(value.within)
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    if not strided or value.is_nested or value.is_quantized or value.is_meta:
        return None
    return torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value.detach().as_subclass(Tensor))


def leaf(value: Any) -> Any:
    """The tensor with a gradient, if torch gives it one."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_inference():
        return value
    return value.detach().requires_grad_()


def _or_itself(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The tensor itself if torch cannot change one of this type or shape."""

    def changed(tensor: Tensor) -> Any:
        try:
            return change(tensor)
        except (RuntimeError, TypeError, KeyError, IndexError):
            return tensor

    return changed


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    **{layout: partial(laid_out, "x", layout=layout) for layout in ("sliced", "strided", "transposed")},
    "negated": lambda t: torch._neg_view(-t),
    "imaginary part": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
    "channels last": lambda t: t.contiguous(memory_format=_CHANNELS_LAST[t.dim()]),
}
_TYPES = {"complex": torch.complex64, "double": torch.float64, "half": torch.float16}
_TYPES |= {"of 8 bits": torch.float8_e4m3fn, "whole numbers": torch.int64, "flags": torch.bool}
_KINDS: dict[str, Callable[[Tensor], Any]] = {
    "expanded": lambda t: t.narrow(0, 0, 1).expand_as(t),
    # every element but the first lies where another one does
    "overlapping": lambda t: t.flatten().clone().as_strided(t.shape, (1,) * t.dim()),
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "Parameter": lambda t: nn.Parameter(t.clone(), requires_grad=t.is_floating_point()),
    "Buffer": nn.Buffer,
    "of a subclass": lambda t: t.as_subclass(Subclass),
    "wrapped": Wrapped,
    "inference": torch.inference_mode()(torch.clone),
    "nested": lambda t: torch.nested.nested_tensor(list(t)),
    "sparse": Tensor.to_sparse,
    "sparse rows": lambda t: t.flatten(1).to_sparse_csr(),
    "sparse blocks": lambda t: t.flatten(1).to_sparse_bsr((1, 1)),
    "mkldnn": Tensor.to_mkldnn,
    "meta": lambda t: t.to("meta"),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
    **{name: partial(Tensor.to, dtype=dtype) for name, dtype in _TYPES.items()},
    "one dimension more": lambda t: t[None],
    "one dimension less": lambda t: t[0],
    "cut": lambda t: t[..., :-1],
    "empty": lambda t: t[:0],
    "a list": Tensor.tolist,
    "an array": Tensor.numpy,
    "a number": lambda t: 1.0,
    "a word": lambda t: "x",
}
LAYOUTS_AND_KINDS = {name: _or_itself(change) for name, change in (_LAYOUTS | _KINDS).items()}
OF_LAYOUT = (*_LAYOUTS, "of a subclass")
# Hooks that keep the values; torch itself does not see that an index is negated.
KEEPING = {name: LAYOUTS_AND_KINDS[name] for name in OF_LAYOUT if name != "negated"}
_CHANGING = ("nested", "sparse", "sparse rows", "cut", "half", "meta")
HOOKS = {name: LAYOUTS_AND_KINDS[name] for name in (*OF_LAYOUT, *_CHANGING)}


def values() -> dict[str, Any]:
    """Values for any argument."""
    import numpy  # only needed here

    numbers = {str(value): value for value in (0, 1, 2, -1, 1.5, float("nan"), float("inf"), True, None)}
    numbers |= {"10**400": 10**400, "-10**400": -(10**400), "2**63": 2**63}
    arrays = {f"numpy {kind.__name__}": kind(2) for kind in (numpy.float32, numpy.float64, numpy.int64, numpy.bool_)}
    words = {repr(word): word for word in ("silu", "x", "", "triton", b"x")}
    tensors = {"a tensor": torch.ones(3, 2, 8), "a scalar": torch.ones(())}
    tensors["whole numbers"] = torch.tensor([1, 0])  # as slots they differ: two alike are an error that is not detected
    kinds = {name: LAYOUTS_AND_KINDS[name](torch.ones(3, 2, 8)) for name in ("nested", "sparse", "mkldnn", "meta")}
    others = {"a list": [1], "an object": object(), "a type": int, "a function": len, "a dtype": torch.float32}
    return numbers | arrays | words | tensors | kinds | others


def calls(device: torch.device) -> dict[str, dict[str, Any]]:
    """Valid arguments of every public function that computes with them."""
    generator = torch.Generator().manual_seed(0)
    T, n, D, M = 3, 2, 8, 8

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, h_out, h_pre, h_post, h_res = normal(T, n, D), normal(T, D), normal(T, n), normal(T, n), normal(T, n, n)
    maps = {"phi": normal(M, n * D), "alpha": normal(3), "bias": normal(M)}
    pre, post = {"x": x, **maps}, {"x": x, "h_out": h_out, "h_post": h_post, "h_res": h_res}
    cotangents = {"dh_in": h_out, "dh_post": h_post, "dh_res": h_res}
    back = {**pre, "inv_rms": normal(T).abs(), "h_mix": normal(T, M), "h_pre": None, "h_post": None, **cotangents}
    carry, made = mhc_ops.Carry(x, h_post, h_res, None, None, False), {"n": n, "D": D, "device": device}
    packed = {"cu_seqlens": torch.tensor([0, 2, 5]), "conv_state_indices": torch.tensor([2, 0])}
    packed = {name: tensor.to(device) for name, tensor in packed.items()}
    return {
        **{name: pre for name in PUBLIC if name.startswith(("mhc_forward_pre", "mhc_maps", "mhc_enter"))},
        **{name: back for name in PUBLIC if name.startswith("mhc_backward")},
        **{name: {"B": 1, "S": T, **made} for name in ("MHCForwardPreTileLang", "MHCBackwardTileLang")},
        **dict.fromkeys(("HyperHead", "MHCBlock", "ShortConv"), made),
        "mhc_pre": pre,
        "HyperConnection": {"layer": nn.Identity(), **made},
        "HyperStack": {},
        "causal_conv1d": {"x": normal(2, 5, 4), "weight": normal(4, 3)},
        "causal_conv1d_prefill": {"x": normal(5, 4), "conv_state": normal(3, 4, 2), "weight": normal(4, 3), **packed},
        "causal_conv1d_update": {"x": normal(2, 4), "conv_state": normal(2, 4, 2), "weight": normal(4, 3)},
        "conv_warmup": {"D": 4, "tokens": 2, "device": device, "backend": "reference"},
        "metrics": {"model": mhc_ops.HyperConnection(nn.Identity(), n, D)},
        "mhc_expand": {"x": h_out, "n": n},
        "mhc_head": {"x": x, "phi": normal(n, n * D), "alpha": normal(1), "bias": normal(n)},
        "mhc_layer": {**pre, "layer": nn.Identity()},
        "mhc_leave": {"carry": carry, "h_out": h_out},
        "mhc_mean": {"x": x},
        "mhc_next": {"carry": carry, "h_out": h_out, **maps},
        "mhc_post": post,
        "mhc_post_pre": {**post, **maps},
        "mhc_read": {"x": x, "h_pre": h_pre},
        "parameter_groups": {"model": nn.Linear(2, 2), "lr": 0.1, "weight_decay": 0.1},
        "short_conv": {"x": normal(2, 5, n, 4), "gamma": normal(n, 4), "weight": normal(n * 4, 3)},
        "sinkhorn": {"logits": h_res},
        "use_backend": {"name": "reference"},
        "warmup": {**made, "tokens": 2, "backend": "reference"},
    }


def outputs(
    function: Callable[..., Any], arguments: dict[str, Any], backend: str, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors that a public function returns for copies of its arguments. dtype: of the copies."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        return value.to(dtype if dtype and value.is_floating_point() else value.dtype, copy=True)

    given = {name: copied(value) for name, value in arguments.items()}
    if "backend" in inspect.signature(function).parameters:
        given = {"backend": backend, **given} if dtype is None else {**given, "backend": backend}
    result = function(**given)
    if hasattr(result, "__enter__"):
        with result:
            return {}
    parts = result if isinstance(result, tuple) else (result,)
    return {str(place): part for place, part in enumerate(parts) if isinstance(part, Tensor)}
