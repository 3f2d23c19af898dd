"""What may watch a call: compilers, modes, transforms, forward-mode differentiation. And which tensors are plain."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import private
from .backend import PACKAGE

# Looked up once: every call asks for them.
_tracing_state, _transform = private.tracing_state, private.transform
_dispatch_modes, _function_modes = private.dispatch_modes, private.function_modes


def is_eager(arguments: Sequence[Any]) -> bool:
    """The tensors are plain and nothing watches the call."""
    return not watched() and not any(isinstance(a, Tensor) and not is_plain(a) for a in arguments)


def watched() -> bool:
    """A compiler, torch.jit.trace, a dispatch or function mode, or a functorch transform sees the call."""
    return (
        torch.compiler.is_compiling()
        or not private.sees_watchers
        or _tracing_state() is not None
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transform() is not None
    )


def is_transformed() -> bool:
    """The call is within grad, vjp, vmap or another transform of torch.func, and no compiler traces it."""
    return not torch.compiler.is_compiling() and _transform is not None and _transform() is not None


def traced_under_derivatives() -> bool:
    """Whether torch.compile traces within grad, vjp or jvp of torch.func. It compiles anew for each of them."""
    stack = private.transforms() or ()
    return any(interpreter.key() != private.VMAP for interpreter in stack)


def is_dtensor(value: object) -> bool:
    """Compares the name: the class takes a second to import."""
    return type(value).__name__ == "DTensor"


def register_shardings() -> None:
    """Tells torch how ops are sharded. Called before the first call with a DTensor."""
    if f"{PACKAGE}.distributed.sharding" in sys.modules:
        return
    if importlib.util.find_spec(f"{PACKAGE}.distributed"):  # a kernel of the hub does not have it
        importlib.import_module(f"{PACKAGE}.distributed.sharding")


# A constant of each trace for torch.compile. torch.compiler.assume_constant_result does the same but imports the
# compiler, which takes seconds.
traced_under_derivatives._dynamo_marked_constant = True  # type: ignore[attr-defined]
register_shardings._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_plain(value: object) -> bool:
    """A Tensor or Parameter with memory of its own: no subclass, and no wrapper of torch.func or functionalization,
    whose class is Tensor too."""
    if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
        return False
    assert isinstance(value, Tensor)
    return not (private.is_functional(value) or private.is_functorch_wrapped(value))


def has_tangent(arguments: Sequence[Any]) -> bool:
    """An argument has a tangent of forward-mode differentiation, which kernels would drop in silence."""
    if not private.in_forward_mode():
        return False
    return any(isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in arguments)
