"""The formats: names, shapes and layouts of the mHC of other libraries, and conversions between them."""

import re
from collections.abc import Callable, Mapping
from enum import Enum
from math import isqrt
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

State = dict[str, Tensor]
T = TypeVar("T")
WHAT = {1: "head", 2: "connection that keeps its streams", 3: "connection"}  # by the number of sections


class Format(str, Enum):
    """A library's names, shapes and layouts; functions take the value, such as "liger"."""

    MHC_OPS = "mhc_ops"  # HyperConnection and HyperHead
    DEEPSEEK = "deepseek"  # checkpoints of DeepSeek V4, GLM-5.3, Hy4: layers.0.hc_attn_fn, hc_head_fn
    TRANSFORMERS = "transformers"  # its modules: model.layers.0.attn_hc.fn, model.hc_head.hc_fn
    LIGER = "liger"  # LigerMHC
    MEGATRON = "megatron"  # HyperConnectionModule of the dev branch, and its learned head
    MEGATRON_MAIN = "megatron-main"  # that of the main branch: the same names, other equations
    TRANSFORMER_ENGINE = "transformer-engine"  # the arguments of its functions; streams are innermost in phi


class Parameters(NamedTuple):
    """The parameters of one connection or head, as in mhc_ops. alpha has one element per section: 3 for pre, post and
    res; 2 without res; 1 for a head."""

    phi: Tensor
    alpha: Tensor
    bias: Tensor
    gamma: Tensor | None = None

    @property
    def n(self) -> int:
        maps, sections = self.phi.shape[0], self.alpha.numel()
        return {1: maps, 2: maps // 2, 3: isqrt(maps + 1) - 1}[sections]


class Layout(NamedTuple):
    """How a library stores Parameters: the ends of its keys (the first identifies a group), and functions from its
    tensors to Parameters and back. An optional end is the last, and its tensor may be None."""

    ends: tuple[str, ...]
    read: Callable[..., Parameters]
    write: Callable[[Parameters], tuple[Tensor | None, ...]]
    optional: str | None = None


def to_ours(state: Mapping[str, Tensor], source: str) -> State:
    """The state dict with every group of this format converted to a HyperConnection or HyperHead."""
    return between(state, source, Format.MHC_OPS)


def from_ours(state: Mapping[str, Tensor], target: str) -> State:
    """The state dict with every HyperConnection and HyperHead converted to this format."""
    return between(state, Format.MHC_OPS, target)


def between(state: Mapping[str, Tensor], source: str, target: str) -> State:
    """Convert from one format to another. If their `options` differ, the result is another function."""
    refuse_other_formats(state, source, target)
    taken = {key: begin for begin, keys in groups(state, source).items() for key in keys}
    found = parameters(state, source)
    converted: State = {}
    for key, tensor in state.items():
        begin = taken.get(key)
        if begin is None:
            add(converted, key, tensor)
        elif begin in found:
            for name, part in _written(begin, found.pop(begin), target).items():
                add(converted, name, part)
    return converted


def parameters(state: Mapping[str, Tensor], source: str) -> dict[str, Parameters]:
    """The parameters of all connections and heads of this format, by prefix."""
    return {begin: _read(state, begin, keys, source) for begin, keys in groups(state, source).items()}


def groups(state: Mapping[str, object], source: str) -> dict[str, list[str]]:
    """The keys of all connections and heads of this format, by prefix. ValueError if one is missing."""
    found: dict[str, list[str]] = {}
    for key in state:
        for layout in _layouts("source", source).values():
            begin = _begin(key, layout.ends[0])
            if begin is not None:
                found[begin] = _keys(state, begin, layout)
    return found


def refuse_other_formats(state: Mapping[str, object], source: str, target: str) -> None:
    """ValueError if parameters of a third format would be left over: the wrong source was named, or not all of a model
    would be converted."""
    known = {*_layouts("source", source).values(), *_layouts("target", target).values()}
    taken = {key for keys in groups(state, source).values() for key in keys}
    left = {key: None for key in state if key not in taken}
    others = {layout: other for other in reversed(Format) for layout in LAYOUTS[other].values() if layout not in known}
    for layout, other in others.items():
        for begin in (_begin(key, layout.ends[0]) for key in left):
            needed = [] if begin is None else [_key(begin, end) for end in layout.ends if end != layout.optional]
            if needed and left.keys() >= set(needed):
                what = f"{', '.join(needed)} are as {other.value} has them"
                raise ValueError(f"convert: {what}, not {Format(source).value}, and would be left as they are")


def options(source: str, sections: int = 3) -> dict[str, Any]:
    """The options with which `HyperConnection(layer, n, D, **options)` computes as this library does, except those that
    are defaults. sections: how many scales a connection has, 3 or, in Hy4, 2. Numbers that a checkpoint's config has
    (iterations, eps) are the usual ones."""
    format = _format("source", source)
    if sections not in LAYOUTS[format]:
        raise ValueError(f"convert: {format.value} has no connection of {sections} sections")
    return OPTIONS[format] | (KEEPING_STREAMS[format] if sections == 2 else {})


def fold_gamma(state: Mapping[str, Tensor]) -> State:
    """The state dict with each norm weight multiplied into its phi: only TransformerEngine has norm weights too."""
    folded = dict(state)
    for begin in groups(state, Format.MHC_OPS):
        gamma = folded.pop(_key(begin, ".gamma"), None)
        if gamma is not None:
            phi = folded[_key(begin, ".phi")]
            folded[_key(begin, ".phi")] = (phi.double() * gamma.double().flatten()).to(phi.dtype)
    return folded


def _read(state: Mapping[str, Tensor], begin: str, keys: list[str], source: str) -> Parameters:
    layouts = _layouts("source", source)
    layout = next(layout for layout in layouts.values() if _key(begin, layout.ends[0]) in keys)
    try:
        found = layout.read(*(state.get(_key(begin, end)) for end in layout.ends))
    except (RuntimeError, IndexError) as error:  # torch refuses a shape that the library does not have
        raise ValueError(f"convert: {', '.join(keys)} do not fit one another: {error}") from error
    _check(begin, found)
    if layouts.get(sections := found.alpha.numel()) is not layout:
        has = f"{Format(source).value} has no {WHAT[sections]} of these names"
        raise ValueError(f"convert: {', '.join(keys)} are a {WHAT[sections]}, and {has}")
    return found


def _written(begin: str, own: Parameters, target: str) -> State:
    where, layouts, sections = Format(target).value, _layouts("target", target), own.alpha.numel()
    if sections not in layouts:
        raise ValueError(f"convert: {begin or 'this state dict'} is a {WHAT[sections]}, and {where} has none")
    layout = layouts[sections]
    if own.gamma is not None and layout.optional is None:
        gamma, how = _key(begin, ".gamma"), "fold it into phi first: fold_gamma, --fold-gamma"
        raise ValueError(f"convert: {gamma}: {where} has no norm weight; {how}")
    begin = _begin_in(target, begin)
    parts = zip(layout.ends, layout.write(own))
    return {_key(begin, end): part.contiguous() for end, part in parts if part is not None}


def _check(begin: str, parameters: Parameters) -> None:
    phi, alpha, bias, gamma = parameters
    here = begin or "this state dict"
    if alpha.dim() != 1 or alpha.numel() not in (1, 2, 3):
        raise ValueError(f"convert: {here}: there must be 1 to 3 scales, got {list(alpha.shape)}")
    if not _is_phi(parameters):
        raise ValueError(f"convert: {here}: phi of n streams must be [n² + 2n, nD], got {list(phi.shape)}")
    if bias.shape != phi.shape[:1]:
        raise ValueError(f"convert: {here}: bias must be [{phi.shape[0]}], got {list(bias.shape)}")
    if gamma is not None and gamma.shape != (parameters.n, phi.shape[1] // parameters.n):
        raise ValueError(f"convert: {here}: gamma must be [n, D], got {list(gamma.shape)}")


def _is_phi(parameters: Parameters) -> bool:
    """phi is [n, nD] for a head, [2n, nD] for a connection that keeps its streams, else [n² + 2n, nD]."""
    phi, sections = parameters.phi, parameters.alpha.numel()
    if phi.dim() != 2 or phi.shape[0] < sections or phi.shape[1] == 0:
        return False
    n = parameters.n
    return phi.shape[0] == {1: n, 2: 2 * n, 3: n**2 + 2 * n}[sections] and phi.shape[1] % n == 0


def _keys(state: Mapping[str, object], begin: str, layout: Layout) -> list[str]:
    keys = [_key(begin, end) for end in layout.ends]
    for end, key in zip(layout.ends, keys):
        if key not in state and end != layout.optional:
            raise ValueError(f"convert: {key} is missing beside {keys[0]}")
    return [key for key in keys if key in state]


def _key(begin: str, end: str) -> str:
    """layers.0.hc_attn_fn for layers.0.hc_attn and _fn; fn without a prefix"""
    return begin + end if begin else end[1:]


def _begin(key: str, end: str) -> str | None:
    """The prefix of a key with this end; "" if the key is the end alone."""
    if key == end[1:]:
        return ""
    return key.removesuffix(end) if key.endswith(end) and key != end else None


def _begin_in(target: str, begin: str) -> str:
    """The prefix in the target: layers.0.hc_attn is layers.0.attn_hc in transformers, and back in DeepSeek."""
    for pattern, name in BEGINS.get(_format("target", target), {}).items():
        begin = re.sub(pattern, name, begin)
    return begin


def add(state: dict[str, T], key: str, value: T) -> None:
    if key in state:
        raise ValueError(f"convert: two tensors would be {key}")
    state[key] = value


def _format(argument: str, name: str) -> Format:
    try:
        return Format(name)
    except ValueError:
        known = ", ".join(format.value for format in Format)
        raise ValueError(f"convert: {argument} must be one of {known}, got {name!r}") from None


def _layouts(argument: str, name: str) -> dict[int, Layout]:
    return LAYOUTS[_format(argument, name)]


def _renamed(phi: str, alpha: str, bias: str) -> Layout:
    return Layout((phi, alpha, bias), Parameters, lambda own: own[:3])


def _streams_innermost(tensor: Tensor, n: int) -> Tensor:
    """Move column i·D + d of [..., nD] to column d·n + i."""
    return tensor.unflatten(-1, (n, -1)).mT.flatten(-2)


def _streams_outermost(tensor: Tensor, n: int) -> Tensor:
    return tensor.unflatten(-1, (-1, n)).mT.flatten(-2)


def _transposed(tensor: Tensor) -> Tensor:
    """An IndexError below two dimensions, where mT only warns."""
    return tensor.transpose(-2, -1)


def _read_liger(phi: Tensor, b: Tensor, *alphas: Tensor) -> Parameters:
    return Parameters(_transposed(phi), torch.stack(alphas), b)


def _write_liger(own: Parameters) -> tuple[Tensor, ...]:
    return own.phi.mT, own.bias, *own.alpha.unbind()


def _read_megatron(weight: Tensor, bias: Tensor, *alphas: Tensor) -> Parameters:
    return Parameters(weight, _transposed(torch.stack(alphas)).squeeze(0), bias)  # each is [1]


def _write_megatron(own: Parameters) -> tuple[Tensor, ...]:
    return own.phi, own.bias, *own.alpha.split(1)


def _read_transformer_engine(phi: Tensor, alpha: Tensor, beta: Tensor, norm_weight: Tensor | None) -> Parameters:
    n = isqrt(phi.shape[0] + 1) - 1
    gamma = None if norm_weight is None else norm_weight.unflatten(-1, (-1, n)).mT
    bias = _transposed(beta).squeeze(-1)  # beta is [1, n² + 2n]
    return Parameters(_streams_outermost(phi, n), alpha, bias, gamma)


def _write_transformer_engine(own: Parameters) -> tuple[Tensor | None, ...]:
    norm_weight = None if own.gamma is None else own.gamma.mT.flatten()
    return _streams_innermost(own.phi, own.n), own.alpha, own.bias[None], norm_weight


_OURS = Layout((".phi", ".alpha", ".bias", ".gamma"), Parameters, tuple, ".gamma")
_ALPHAS = (".alpha_pre", ".alpha_post", ".alpha_res")
_DEEPSEEK = _renamed("_fn", "_scale", "_base")
_TRANSFORMERS = _renamed(".fn", ".scale", ".base")
_LIGER = Layout((".phi", ".b", *_ALPHAS), _read_liger, _write_liger)
_MEGATRON = Layout((".mapping_proj.weight", ".bias", *_ALPHAS), _read_megatron, _write_megatron)
_TRANSFORMER_ENGINE = Layout(
    (".phi", ".alpha", ".beta", ".norm_weight"), _read_transformer_engine, _write_transformer_engine, ".norm_weight"
)

LAYOUTS: dict[Format, dict[int, Layout]] = {  # by the number of sections: 3 or 2 for a connection, 1 for a head
    Format.MHC_OPS: {3: _OURS, 2: _OURS, 1: _OURS},
    Format.DEEPSEEK: {3: _DEEPSEEK, 2: _DEEPSEEK, 1: _DEEPSEEK},
    Format.TRANSFORMERS: {3: _TRANSFORMERS, 2: _TRANSFORMERS, 1: _renamed(".hc_fn", ".hc_scale", ".hc_base")},
    Format.LIGER: {3: _LIGER},
    Format.MEGATRON: {3: _MEGATRON, 1: _DEEPSEEK},
    Format.MEGATRON_MAIN: {3: _MEGATRON},
    Format.TRANSFORMER_ENGINE: {3: _TRANSFORMER_ENGINE},
}
BEGINS: dict[Format, dict[str, str]] = {  # prefixes that have another name in this library
    Format.DEEPSEEK: {r"\b(attn|ffn)_hc$": r"hc_\1"},
    # A file that transformers saves has DeepSeek's names, except hc_head.hc_fn.
    Format.TRANSFORMERS: {r"\bhc_(attn|ffn)$": r"\1_hc", r"\bhc_head\.hc$": "hc_head"},
}
OPTIONS: dict[Format, dict[str, Any]] = {
    Format.MHC_OPS: {},
    Format.DEEPSEEK: {},
    Format.TRANSFORMERS: {},
    Format.LIGER: {"hc_eps": 0.0, "transposed": True},
    # Megatron's norm has its eps, 1e-6, outside of the root.
    Format.MEGATRON: {"norm_eps": 1e-12},
    Format.MEGATRON_MAIN: {"norm_eps": 1e-12, "hc_eps": 0.0, "sinkhorn_eps": 0.0, "transposed": True},
    Format.TRANSFORMER_ENGINE: {"norm_eps": torch.finfo(torch.float32).eps, "hc_eps": 0.0, "sinkhorn_eps": 0.0},
}
_HY4 = {"residual": "identity", "post_eps": 1e-6}
KEEPING_STREAMS: dict[Format, dict[str, Any]] = {  # further options of connections with 2 sections
    Format.MHC_OPS: {"residual": "identity"},
    Format.DEEPSEEK: _HY4,
    Format.TRANSFORMERS: _HY4,
}
