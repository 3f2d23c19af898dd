"""The options of mHC's maps: names, types and defaults, for functions, modules, contracts and kernels alike.

To add one, write its line into both classes, which a test compares, and read it in the kernel.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypedDict, TypeVar, get_args

from ..core.check import check_count, check_flag, check_numbers, check_word

F = TypeVar("F", bound=Callable[..., Any])


class Residual(str, Enum):
    """How the old streams are mixed into the new ones. Options hold the value, as callers and torch's ops give it."""

    SINKHORN = "sinkhorn"  # h_res = sinkhorn(z_res)
    IDENTITY = "identity"  # every stream stays as it is: no h_res, no rows of phi for it
    LOGITS = "logits"  # h_res = z_res, for the caller to make a map of


class MapKeywords(TypedDict, total=False):
    """The options of the maps as a function takes them: `def mhc_maps(..., **options: Unpack[MapKeywords])`."""

    norm_eps: float
    hc_eps: float
    post_mult: float
    post_eps: float
    residual: str
    sinkhorn_iters: int
    sinkhorn_eps: float
    transposed: bool


class PreKeywords(MapKeywords, total=False):
    """The options of a function that also makes h_in, as `mhc_pre`."""

    layer_norm_eps: float


class PreOptions(NamedTuple):
    """All options of `mhc_pre`, as contracts and launchers take them."""

    norm_eps: float = 1e-6  # in inv_rms = rsqrt(mean(v²) + norm_eps)
    hc_eps: float = 1e-6  # in h_pre = σ(z_pre) + hc_eps
    post_mult: float = 2.0  # in h_post = post_mult·σ(z_post) + post_eps
    post_eps: float = 0.0
    residual: str = Residual.SINKHORN.value  # or another Residual
    sinkhorn_iters: int = 20  # 0, which no public function takes, where h_res is raw logits
    sinkhorn_eps: float = 1e-6
    transposed: bool = False  # h_res is [new, old], not [old, new], where the streams are mixed
    layer_norm_eps: float = 1e-6  # in h_in · rsqrt(mean(h_in²) + layer_norm_eps), where h_in is normalised


DEFAULTS = PreOptions()
NOT_IN_TILELANG = ("post_eps", "residual", "transposed")  # only Triton's kernels read them
_OF_SINKHORN = ("sinkhorn_iters", "sinkhorn_eps")
WITHOUT_MEANING = {
    Residual.SINKHORN.value: (),
    Residual.IDENTITY.value: (*_OF_SINKHORN, "transposed"),
    Residual.LOGITS.value: _OF_SINKHORN,
}


def _of_kind(kind: type) -> tuple[str, ...]:
    return tuple(name for name, annotation in PreOptions.__annotations__.items() if annotation is kind)


_COUNTS, _NUMBERS, _FLAGS = _of_kind(int), _of_kind(float), _of_kind(bool)


def checked(function: str, given: Mapping[str, Any], known: Iterable[str] = PreOptions._fields) -> PreOptions:
    """The options that a caller gave, checked, and defaults. known: the options that this function has"""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    options = PreOptions(**given)
    for name in _COUNTS:
        check_count(function, name, getattr(options, name))
    for name in _FLAGS:
        check_flag(function, name, getattr(options, name))
    check_word(function, "residual", options.residual, tuple(WITHOUT_MEANING))
    numbers: Any = dict(zip(_NUMBERS, check_numbers(function, **{name: getattr(options, name) for name in _NUMBERS})))
    for name in WITHOUT_MEANING[options.residual]:
        value = getattr(options, name)
        if value != getattr(DEFAULTS, name):
            raise ValueError(f"{function}: {name}={value} has no meaning with residual={options.residual!r}")
    if options.residual == Residual.LOGITS:
        numbers["sinkhorn_iters"] = 0
    return options._replace(**numbers)


def spelled_out(function: F) -> F:
    """Decorator: help() and documentation show the options and their defaults in place of **options."""
    signature = inspect.signature(function)
    *named, options = signature.parameters.values()
    (keywords,) = get_args(options.annotation)  # of Unpack[PreKeywords]
    for name, kind in PreOptions.__annotations__.items():
        if name in keywords.__optional_keys__:
            default = PreOptions._field_defaults[name]
            named.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function
