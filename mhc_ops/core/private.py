"""Every private name of torch that this package needs, looked up once.

A torch without one of them costs speed, never the import or a right result: in its place stands a public function, or
calls take the long way through torch's dispatcher. `missing` lists the names that this torch lacks.

MHC_OPS_REPLAY=0 turns off what rests on them: no call is kept, every call is checked, prepared and launched anew.
"""

import contextlib
import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

missing: list[str] = []


def _found(name: str, instead: Any = None) -> Any:
    """torch.<name>, or what stands in its place."""
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not None:
        return found
    missing.append(f"torch.{name}")
    return instead


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _raw_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# What watches a call. Where a question cannot be asked, the answer is None and every call counts as watched.
tracing_state = _found("_C._get_tracing_state")
transform = _found("_C._functorch.peek_interpreter_stack")
transforms = _found("_C._functorch.get_interpreter_stack", lambda: ())
VMAP = _found("_C._functorch.TransformType.Vmap")
dispatch_modes = _found("_C._len_torch_dispatch_stack")
function_modes = _found("_C._len_torch_function_stack")
sees_watchers = None not in (tracing_state, transform, dispatch_modes, function_modes)

# What a tensor is. Where a question cannot be asked, every tensor counts as wrapped.
is_functional = _found("_is_functional_tensor", lambda tensor: True)
is_functorch_wrapped = _found("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: True)
is_zerotensor = _found("Tensor._is_zerotensor", lambda tensor: False)
share_memory = _found("_C._is_alias_of", _share_memory)

# Modes of torch's dispatcher. Without the first no launch is recorded.
TorchDispatchMode = _found("utils._python_dispatch.TorchDispatchMode")
disable_modes = _found("utils._python_dispatch._disable_current_modes", contextlib.nullcontext)

# How calls are kept and started again.
TensorGuards = _found("_C._dynamo.guards.TensorGuards")
empty_strided_cuda = _found("_C._dynamo.guards._empty_strided_cuda")
keeps_calls = (
    None not in (TensorGuards, TorchDispatchMode) and sees_watchers and os.environ.get("MHC_OPS_REPLAY", "1") != "0"
)

# How torch's dispatcher calls an op. Without these a call passes through it twice.
make_autograd = _found("_library.autograd.make_autograd_impl")
any_requires_grad = _found("_C._any_requires_grad")
beneath_autograd = _found("_C._after_ADInplaceOrView_keyset")
disable_dynamo = _found("_compile._disable_dynamo")

PRINTS_ARGUMENTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

# CUDA, where torch is built with it; elsewhere these are not called.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
_capturing_graph = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)  # torch 2.13 and newer

# What autograd does. A stack without these keeps every x.
saved_tensors_hooks_on_top = _found("_C._autograd._top_saved_tensors_default_hooks", lambda ignore: True)
why_no_hooks = _found("_C._autograd._saved_tensors_hooks_get_disabled_error_message", lambda: None)
graph_task = _found("_C._current_graph_task_id", lambda: -1)


def autograd_kernel(op: Any, formula: Any) -> Any:
    """torch's own kernel of autograd's key for this op, or None. formula: has _backward_fn and _setup_context_fn"""
    needed = (make_autograd, any_requires_grad, beneath_autograd, disable_dynamo)
    if not keeps_calls or any(name is None for name in needed):
        return None
    try:
        return make_autograd(op, formula)
    except (AttributeError, TypeError):  # it takes other arguments now
        missing.append("torch._library.autograd.make_autograd_impl(op, formula)")
        return None


def lower_as_a_call(op: Any) -> None:
    """Tells Inductor, once it is loaded, that its code calls this op. Nothing changes but the time to compile.

    Inductor finds that out itself. Before torch 2.13 it first prints the arguments, and all that they were computed
    from, once for each path: a shifted stack of six took 338 s to compile, and takes 6 s with this (docs/design.md).
    """
    graph: Any = sys.modules.get("torch._inductor.graph")
    if not PRINTS_ARGUMENTS or graph is None or op in getattr(graph, "lowerings", [op]):
        return
    try:
        constraint = graph.tag_to_layout_constraint(graph.get_layout_constraint_tag(op))
        graph.make_fallback(op, layout_constraint=constraint)
    except (AttributeError, TypeError) as error:  # it lacks one of these, or takes other arguments
        if str(error) not in missing:
            missing.append(str(error))


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation may be under way."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def may_have_compiled() -> bool:
    """Whether torch.compile may have been used. Its module takes seconds to import, so it is not imported to ask."""
    return "torch._dynamo" in sys.modules


def capturing_graph() -> torch.cuda.CUDAGraph | None:
    """The graph that the current stream is captured into; None where torch cannot tell, or another library captures."""
    if _capturing_graph is None:
        return None
    try:
        graph = _capturing_graph()
    except RuntimeError:
        return None
    return graph if isinstance(graph, torch.cuda.CUDAGraph) else None  # the object that ends with the graph
