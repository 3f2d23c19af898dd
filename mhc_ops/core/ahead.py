"""Compile the kernels of a computation ahead and side by side, and say what was compiled and how long it took."""

import ast
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import native
from .launch import collected

BAR = 24  # characters


def compile_ahead(function: str, run: Callable[[], None], device: torch.device, verbose: bool) -> int:
    """Compile what `run` would launch, each kernel once. Returns how many kernels these are.

    verbose: a bar on a terminal's stderr, then a line: how many of which kernels, and the time
    """
    begin = time.monotonic()
    with collected() as compilations:
        run()
    distinct = {_signature(compilation): compilation for compilation in compilations}  # ops and sizes share kernels

    def compile_one(compilation: Any) -> None:
        with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():  # threads have their own device
            compilation()

    if distinct:
        native.compiled()
        parse_one_by_one()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for done, _ in enumerate(threads.map(compile_one, distinct.values()), 1):
            if verbose:
                _show(function, done, len(distinct))
    if verbose:
        counts = Counter(_kernel(compilation).__name__ for compilation in distinct.values())
        names = ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in counts.items())
        say(f"{function}: {len(distinct)} kernels in {time.monotonic() - begin:.1f} s: {names or 'none'}")
    return len(distinct)


@cache
def parse_one_by_one() -> None:
    """Triton makes a syntax tree of each kernel. Python 3.11 before 3.11.8 raises a SystemError where threads make
    several at once and one of them collects garbage, so there they take turns from now on."""
    if not (3, 11) <= sys.version_info < (3, 11, 8):
        return
    parse, lock = ast.parse, threading.RLock()

    def parse_alone(*arguments: Any, **options: Any) -> Any:
        with lock:
            return parse(*arguments, **options)

    ast.parse = parse_alone


def up_to(largest: int) -> list[int]:
    """Sizes of which each has the kernels of all sizes around it: configs change within a few tokens at any number, and
    among more at powers of two."""
    bounds = {2**power + more for power in range(6, largest.bit_length()) for more in (0, 1)}
    return sorted({*range(1, min(largest, 64) + 1), *(bound for bound in bounds if bound < largest), largest})


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show(function: str, done: int, of: int) -> None:
    """A bar that the next one overwrites; nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        full = BAR * done // of
        end = "\r" + " " * 79 + "\r" if done == of else ""
        print(f"\r{function} [{'#' * full:<{BAR}}] {done}/{of}{end}", end="", file=sys.stderr, flush=True)


def _kernel(compilation: Any) -> Any:
    return compilation.func.__self__


def _signature(compilation: Any) -> tuple[Any, ...]:
    """Equal where Triton would compile the same."""
    kernel = _kernel(compilation)
    of_triton = kernel if hasattr(kernel, "params") else getattr(kernel, "kernel", None)  # within a Ticketed
    known = {parameter.name: parameter for parameter in getattr(of_triton, "params", ())}
    arguments = dict(zip(kernel.arg_names, compilation.args))
    kinds = [_kind(known.get(name), value) for name, value in arguments.items()]
    options = [(name, value) for name, value in compilation.keywords.items() if name != "grid"]
    return kernel, *kinds, *options


def _kind(parameter: Any, value: Any) -> Any:
    """What Triton compiles an argument for. parameter: as Triton describes it; None in the interpreter"""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):  # a descriptor
        return value.base.dtype, tuple(value.block_shape), str(getattr(value, "layout", None))
    if parameter is None or parameter.is_constexpr or type(value) is not int:
        return type(value), value if isinstance(value, int | float | str | None) else id(value)
    special = None if parameter.do_not_specialize else (value == 1, value % 16 == 0)
    return int, value.bit_length() > 31, special
