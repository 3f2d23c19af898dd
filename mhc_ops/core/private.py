"""Every private name of torch that this package needs, looked up once.

A torch without one of them costs speed, never the import or a right result: in its place stands a public function, or
calls take the long way through torch's dispatcher. `missing` lists the names that this torch lacks.

MHC_OPS_REPLAY=0 turns off what rests on them: no call is kept, every call is checked, prepared and launched anew.
"""

import os
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
share_memory = _found("_C._is_alias_of", _share_memory)

# How calls are kept and started again.
TensorGuards = _found("_C._dynamo.guards.TensorGuards")
empty_strided_cuda = _found("_C._dynamo.guards._empty_strided_cuda")
keeps_calls = TensorGuards is not None and sees_watchers and os.environ.get("MHC_OPS_REPLAY", "1") != "0"

# CUDA, where torch is built with it; elsewhere these are not called.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)

# What autograd does. A stack without these keeps every x.
saved_tensors_hooks_on_top = _found("_C._autograd._top_saved_tensors_default_hooks", lambda ignore: True)
why_no_hooks = _found("_C._autograd._saved_tensors_hooks_get_disabled_error_message", lambda: None)
graph_task = _found("_C._current_graph_task_id", lambda: -1)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation may be under way."""
    return getattr(forward_ad, "_current_level", 0) >= 0
