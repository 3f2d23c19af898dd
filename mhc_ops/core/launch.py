"""Launch Triton kernels without what triton repeats in every call: binding, specialising and hashing the arguments.

`launch(kernel, grid, *arguments, **constants)` is `kernel[grid](*arguments, **constants)`. After the first such call
the compiled kernel is kept by what it was specialised for, and called directly. What that saves on
the host has not been measured yet.
"""

from typing import Any

from torch import Tensor

from .backend import _INTERPRETED

MOST_KEPT = 10_000  # launches; token counts are part of what is kept

_kept: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    if _INTERPRETED:
        kernel[grid](*arguments, **constants)
        return
    # Triton specialises on types, on pointers that 16 divides, and on integers. The first argument is a tensor.
    key: list[Any] = [id(kernel), grid, arguments[0].get_device()]
    for argument in arguments:
        if isinstance(argument, Tensor):
            key += argument.dtype, argument.data_ptr() & 15
        else:
            key += argument.__class__, argument
    key += constants.values()
    words = tuple(key)
    kept = _kept.get(words)
    if kept is not None:
        run, more = kept
        run(*arguments, *more)
        return
    compiled = kernel[grid](*arguments, **constants)
    if compiled is not None:
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        more = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        _kept[words] = compiled[(*grid, 1, 1)[:3]], more
