"""What the launchers ask about a device."""

import contextlib
import functools

import torch
from torch import Tensor

_NOTHING_TO_DO = contextlib.nullcontext()


def current(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU the current one, as Triton launches on that; free where it already is."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NOTHING_TO_DO
    return torch.cuda.device(tensor.device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at one per multiprocessor. A CPU (interpreter) counts as one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """CUDA's: (9, 0) is Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def kind(device: torch.device) -> str:
    """ "cuda", "hip" (torch calls ROCm devices cuda) or "cpu"."""
    if device.type == "cuda" and torch.version.hip:
        return "hip"
    return device.type
