"""The options of mHC's maps: names, types and defaults, for functions, modules, contracts and kernels alike.

To add one, write its line into both classes, which a test compares, and read it in the kernel.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar, get_args

from ..core.check import check_count, check_numbers

F = TypeVar("F", bound=Callable[..., Any])


class MapKeywords(TypedDict, total=False):
    """The options of the maps as a function takes them: `def mhc_maps(..., **options: Unpack[MapKeywords])`."""

    norm_eps: float
    hc_eps: float
    post_mult: float
    sinkhorn_iters: int
    sinkhorn_eps: float


class PreKeywords(MapKeywords, total=False):
    """Those of a function that makes h_in too, as `mhc_pre`."""

    layer_norm_eps: float


class PreOptions(NamedTuple):
    """All options of `mhc_pre`, as contracts and launchers take them."""

    norm_eps: float = 1e-6  # in inv_rms = rsqrt(mean(v²) + norm_eps)
    hc_eps: float = 1e-6  # in h_pre = σ(z_pre) + hc_eps
    post_mult: float = 2.0  # in h_post = post_mult·σ(z_post)
    sinkhorn_iters: int = 20  # 0, which no public function takes, leaves h_res as raw logits
    sinkhorn_eps: float = 1e-6
    layer_norm_eps: float = 1e-6  # in h_in · rsqrt(mean(h_in²) + layer_norm_eps), where h_in is normalised


DEFAULTS = PreOptions()
_COUNTS = tuple(name for name, kind in PreOptions.__annotations__.items() if kind is int)
_NUMBERS = tuple(name for name, kind in PreOptions.__annotations__.items() if kind is float)


def checked(function: str, given: Mapping[str, Any], known: Iterable[str] = PreOptions._fields) -> PreOptions:
    """What a caller gave to this function, and defaults. known: the options that this function has."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    options = PreOptions(**given)
    for name in _COUNTS:
        check_count(function, name, getattr(options, name))
    numbers: Any = dict(zip(_NUMBERS, check_numbers(function, **{name: getattr(options, name) for name in _NUMBERS})))
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
