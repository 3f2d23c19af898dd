"""What the adapters of servers share: the parts that are asked for, the places of a server's own functions, and the
arguments that both servers pass alike."""

import logging
import os
from collections.abc import Collection, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..conv.ops import causal_conv1d_prefill, causal_conv1d_update
from ..core.check import check_shapes, check_tensors, check_writable, listed
from ..mhc import ops
from . import stand_ins

PARTS = ("conv", "mhc")


def asked(variable: str, words: Collection[str] = PARTS) -> tuple[str, ...]:
    """The words that an environment variable lists; "1" stands for all parts, "" and "0" alone for none."""
    whole = os.environ.get(variable, "")
    given = [word.strip() for word in whole.split(",")]
    if given in ([""], ["0"]):
        return ()
    if "0" in given:
        raise ValueError(f"{variable}: the word '0' must stand alone, got {whole!r}")
    for word in given:
        if word != "1" and word not in words:
            known = listed([repr(each) for each in ("0", "1", *words)])
            raise ValueError(f"{variable}: the words must be {known}, got {word!r}")
    return tuple(dict.fromkeys(part for word in given for part in (PARTS if word == "1" else (word,))))


def checked_parts(parts: Collection[str]) -> Collection[str]:
    """All parts, if none is named."""
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"register: the parts are {listed([repr(each) for each in PARTS])}, got {part!r}")
    return parts or PARTS


def places(server: str, tried: str, wanted: Mapping[str, Mapping[str, Any]]) -> dict[ModuleType, Mapping[str, Any]]:
    """The modules of a server that hold these names; ImportError if it lacks one. tried: the version that has all"""
    try:
        version = getattr(import_module(server), "__version__", "of an unknown version")
    except ModuleNotFoundError as error:
        if error.name != server:
            raise
        raise ModuleNotFoundError(f"register: the package {server} is not installed: pip install {server}") from None
    found: dict[ModuleType, Mapping[str, Any]] = {}
    for path, names in wanted.items():
        lacks = f"register: {server} {version} has no %s; {server} {tried} has it"
        try:
            module = import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not path.startswith(error.name):  # a package that the server needs
                raise
            raise ImportError(lacks % f"module {path}") from None
        for name in names:
            if name not in vars(module):
                raise ImportError(lacks % f"{name} in {path}")
        found[module] = names
    return found


def replace(found: Mapping[ModuleType, Mapping[str, Any]]) -> tuple[str, ...]:
    """Put our functions in their places. Returns their names."""
    stand_ins.replace(found)
    return tuple(name for content in found.values() for name in content)


def say(server: str, names: Collection[str]) -> None:
    """A line in the server's own log."""
    logging.getLogger(f"{server}.mhc_ops").info("mhc_ops runs %s", ", ".join(names))


def prefill(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: Any, **given: Any
) -> Tensor:
    """`causal_conv1d_prefill` of x [D, tokens], computed in the type of the state.

    Without conv_state_indices, sequence i uses slot i. pad_slot_id=None means no padding. Arguments with one entry per
    sequence may be longer.
    """
    check_tensors("causal_conv1d_fn", x=x, conv_states=conv_state)
    count = len(given["cu_seqlens"]) - 1
    for name, value in given.items():
        if name != "cu_seqlens" and isinstance(value, Tensor):
            given[name] = value[:count]
    if given["conv_state_indices"] is None:
        given |= {"conv_state_indices": torch.arange(count, device=x.device), "pad_slot_id": None}
    tokens = x.to(conv_state.dtype).transpose(0, 1) if x.dim() == 2 else x
    y = causal_conv1d_prefill(tokens, conv_state, weight, bias, activation=word(activation), **_with_pad(given))
    return y.transpose(0, 1).to(x.dtype)


def step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Any,
    *,
    out: Tensor | None = None,
    in_place: bool = False,
    **given: Any,
) -> Tensor:
    """`causal_conv1d_update` of x [B, D], [B, D, T], or packed [tokens, D], computed in the type of the state. Slot i
    for sequence i without conv_state_indices; there may be more slots.
    out: shaped as x, of any type   in_place: y takes the place of x if it has the type of the state"""
    check_tensors("causal_conv1d_update", x=x, conv_state=conv_state)
    if out is not None:  # before the state changes
        check_tensors("causal_conv1d_update", x=x, out=out)
        check_shapes("causal_conv1d_update", out=(out, tuple(x.shape)))
        if not torch.compiler.is_compiling():
            check_writable("causal_conv1d_update", "out", out)
    if given.get("conv_state_indices") is None:
        given["pad_slot_id"] = None
        conv_state = conv_state[: len(x)]
    if given.get("num_accepted_tokens") is None and given.get("cache_seqlens") is None:
        conv_state = conv_state[..., : weight.shape[-1] - 1]  # the rest is room for drafts
    tokens = _turned(x.to(conv_state.dtype))
    target = tokens if in_place else None if out is None or out.dtype != tokens.dtype else _turned(out)
    of_call = {**_with_pad(given), "activation": word(activation), "out": target}
    y = _turned(causal_conv1d_update(tokens, conv_state, weight, bias, **of_call))
    if out is not None:
        return out if target is not None else out.copy_(y)
    return x if in_place and x.dtype == tokens.dtype else y.to(x.dtype)


def _turned(x: Tensor) -> Tensor:
    """[B, D, T] as [B, T, D] and back"""
    return x.transpose(1, 2) if x.dim() == 3 else x


def word(activation: str | bool | None) -> str | None:
    """The servers also take True and False."""
    if isinstance(activation, bool):
        return "silu" if activation else None
    return activation


def _with_pad(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "pad_slot_id": -1 if given["pad_slot_id"] is None else given["pad_slot_id"]}


def map_options(rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float, repeat: int) -> Any:
    """The options of maps, in the order in which both servers pass them."""
    of_sinkhorn = {"sinkhorn_eps": sinkhorn_eps, "sinkhorn_iters": repeat}
    return {"norm_eps": rms_eps, "hc_eps": pre_eps, "post_mult": post_mult, **of_sinkhorn}


def norm_options(weight: Tensor | None, eps: float | None) -> Any:
    """The norm of the next sublayer; without a weight there is none, and eps has no meaning."""
    return {} if weight is None else {"layer_norm_weight": weight, "layer_norm_eps": eps}


def pre(residual: Tensor, options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """post_mix [..., n, 1], comb_mix and layer_input. options: also phi, alpha and bias"""
    h_in, h_post, h_res = ops.mhc_pre(residual, **options)
    return h_post.unsqueeze(-1), h_res, h_in


def post_pre(
    x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The new streams, then what `pre` returns."""
    h_post = column(post_mix, residual)
    x_next, h_in, h_post, h_res = ops.mhc_post_pre(x=residual, h_out=x, h_post=h_post, h_res=comb_mix, **options)
    return x_next, h_post.unsqueeze(-1), h_res, h_in


def post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> Tensor:
    """post_mix: [..., n, 1] or [..., n]"""
    return ops.mhc_post(residual, x, column(post_mix, residual), comb_mix)


def column(post_mix: Tensor, residual: Tensor) -> Tensor:
    return post_mix.squeeze(-1) if post_mix.dim() == residual.dim() else post_mix
