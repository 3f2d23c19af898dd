"""Compile TileLang kernels, once per set of constants; the pieces that most of them are written with.

All kernels but the two with matrix products are written thread by thread: a thread's values are local arrays, and the
32 lanes of a group add theirs up with `lane_sum`. The same source compiles for a CPU, where a block is one thread and a
group one lane; the tests execute it there.
"""

import contextlib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import tilelang
import tilelang.language as T
import torch
from tilelang.cpu.language import Kernel as CPUKernel

F32, BF16 = "float32", "bfloat16"
NAMES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: "float16"}
TYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Threads:
    """How a kernel that is written thread by thread is spread: groups of lanes, so many groups to a block."""

    groups: int
    lanes: int = 32  # what lane_sum adds up, on NVIDIA and AMD GPUs alike

    @property
    def block(self) -> int:
        return self.groups * self.lanes


ON_CPU = Threads(1, 1)

# One thread compiles for all. Backward kernels are first called in a thread of torch's autograd, which Python does not
# wait for when it ends: a thread that is inside TVM then ends the process with "Aborted".
# Python waits for this one. TVM's registries are also not made for two threads that compile at a time.
COMPILER = ThreadPoolExecutor(1, "tilelang")


def _renew_compiler() -> None:
    global COMPILER
    COMPILER = ThreadPoolExecutor(1, "tilelang")


os.register_at_fork(after_in_child=_renew_compiler)  # a fork has no such thread


def grid(*blocks: Any, threads: Threads) -> Any:
    return CPUKernel(*blocks) if threads == ON_CPU else T.Kernel(*blocks, threads=threads.block)


def thread(threads: Threads) -> Any:
    """The number of this thread in its block."""
    return 0 if threads == ON_CPU else T.get_thread_binding()


def lane_sum(value: Any, threads: Threads) -> Any:
    """Σ of a value over the lanes of a group, the same in every lane; always in the same order."""
    return value if threads == ON_CPU else T.warp_reduce_sum(value)


def vector(threads: Threads, D: int, *dtypes: str) -> int:
    """Neighbouring channels that a thread takes at once: 16 bytes of the widest type, where they divide a row."""
    widest = 1 if threads == ON_CPU else 4 if F32 in dtypes else 8
    return next(width for width in (8, 4, 2, 1) if width <= widest and D % width == 0)


def in_order(function: Callable[..., Any]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """What orders arguments, given by name, as this function has them; a missing or unknown one is a TypeError."""
    names = tuple(inspect.signature(function).parameters)
    pick = operator.itemgetter(*names)

    def ordered(given: dict[str, Any]) -> tuple[Any, ...]:
        if len(given) == len(names):
            try:
                return pick(given)
            except KeyError:
                pass
        missing, unknown = sorted(set(names) - given.keys()), sorted(given.keys() - set(names))
        raise TypeError(f"{function.__name__}: missing {missing}, unknown {unknown}")

    return ordered


def by_name(function: Any, run: Callable[..., None]) -> Callable[..., None]:
    """`run` takes the arguments of this PrimFunc in its order; what is returned takes them by its names for them."""
    # Not the names in function.params: a number has the one there under which a macro took it last.
    ordered = in_order(function.orig_func)
    return lambda **arguments: run(*ordered(arguments))


def kernel(factory: Callable[..., Any]) -> Callable[..., Callable[..., None]]:
    """Decorator: `factory(n=n, ...)` returns a PrimFunc; the decorated one, the kernel compiled for this device, which
    takes its arguments by their names."""
    names, ordered = tuple(inspect.signature(factory).parameters), in_order(factory)

    def compile_for(gpu: int | None, constants: tuple[Any, ...]) -> Callable[..., None]:
        function = factory(**dict(zip(names, constants)))
        if gpu is None:
            return by_name(function, tilelang.compile(function, target="c"))
        with torch.cuda.device(gpu):
            return by_name(function, tilelang.compile(function, target="auto"))

    @functools.cache
    def compiled(gpu: int | None, *constants: Any) -> Callable[..., None]:
        return COMPILER.submit(compile_for, gpu, constants).result()

    @functools.wraps(factory)
    def for_this_device(**constants: Any) -> Callable[..., None]:
        on_cpu = constants.get("threads") == ON_CPU
        return compiled(None if on_cpu else torch.cuda.current_device(), *ordered(constants))

    return for_this_device


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """As kernels read it: beginning at a multiple of 16 bytes, in a type they know."""
    known = tensor if tensor.dtype in NAMES else tensor.float()
    return known if known.data_ptr() % 16 == 0 else known.clone()


@contextlib.contextmanager
def in_fp32(**outputs: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    """The outputs for kernels to fill, as fp32: themselves, or stand-ins that are copied to them at the end."""
    wide = {
        name: output if output.dtype == torch.float32 else torch.empty_like(output, dtype=torch.float32)
        for name, output in outputs.items()
    }
    yield wide
    for name, output in outputs.items():
        if wide[name] is not output:
            output.copy_(wide[name])
