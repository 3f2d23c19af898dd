"""What may be watching a call: compilers, modes, transforms, forward-mode differentiation; and what else than plain
tensors may come."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .backend import PACKAGE

# Looked up once: every call asks for them.
_tracing_state, _transform = torch._C._get_tracing_state, torch._C._functorch.peek_interpreter_stack
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


def is_eager(arguments: Sequence[Any]) -> bool:
    """Plain tensors and nothing that watches."""
    return not watched() and not any(isinstance(a, Tensor) and not is_plain(a) for a in arguments)


def watched() -> bool:
    """By a compiler, torch.jit.trace, a dispatch or function mode, or a functorch transform."""
    return (
        torch.compiler.is_compiling()
        or _tracing_state() is not None
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transform() is not None
    )


def is_transformed() -> bool:
    """By torch.func: grad, vjp, vmap and what is made of them; not while a compiler traces those."""
    return not torch.compiler.is_compiling() and _transform() is not None


def traced_under_derivatives() -> bool:
    """While torch.compile traces: whether within grad, vjp or jvp of torch.func, which it compiles anew for."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(interpreter.key() != torch._C._functorch.TransformType.Vmap for interpreter in stack)


def is_dtensor(value: object) -> bool:
    """By its name: its class takes a second to import."""
    return type(value).__name__ == "DTensor"


def register_shardings() -> None:
    """Tell torch how ops are sharded: before the first call with a DTensor."""
    if f"{PACKAGE}.distributed.sharding" in sys.modules:
        return
    if importlib.util.find_spec(f"{PACKAGE}.distributed"):  # not in a kernel of the hub
        importlib.import_module(f"{PACKAGE}.distributed.sharding")


# For torch.compile a constant of each trace, as by torch.compiler.assume_constant_result; but that imports the
# compiler, which takes seconds.
traced_under_derivatives._dynamo_marked_constant = True  # type: ignore[attr-defined]
register_shardings._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_plain(value: object) -> bool:
    """A Tensor or Parameter with memory of its own: no subclass that has its own ways, and none of the wrappers of
    torch.func and of functionalization, which have no class of theirs."""
    if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
        return False
    assert isinstance(value, Tensor)
    return not (torch._is_functional_tensor(value) or torch._C._functorch.is_functorch_wrapped_tensor(value))


def has_tangent(arguments: Sequence[Any]) -> bool:
    """Forward-mode differentiation is under way; without a check, kernels would drop the tangents in silence."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in arguments)
