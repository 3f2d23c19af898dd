"""What configs and launchers ask about a device."""

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

_NOTHING_TO_DO = contextlib.nullcontext()


@dataclass(frozen=True)
class Device:
    """A device as configs see it. Tests also describe devices that are not here."""

    kind: str  # "cuda", "hip" (torch calls ROCm devices cuda) or "cpu" (Triton's interpreter)
    capability: tuple[int, int] = (0, 0)  # CUDA's, (9, 0) is Hopper; ROCm's gfx942 is (9, 4)
    shared_memory: int = 0  # bytes that one program can have
    processors: int = 1  # multiprocessors
    warp: int = 32  # threads that run in step


def current(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, where Triton launches. Free where it already is."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NOTHING_TO_DO
    return torch.cuda.device(tensor.device)


@functools.cache
def of(device: torch.device) -> Device:
    """The description of a device that is here."""
    if device.type != "cuda":
        return Device(device.type)
    properties = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    # CUDA has a default limit and one that a kernel can opt in to. Triton and TileLang use the second.
    shared = properties.shared_memory_per_block if hip else properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Device(
        kind="hip" if hip else "cuda",
        capability=(properties.major, properties.minor),
        shared_memory=shared,
        processors=properties.multi_processor_count,
        warp=properties.warp_size,
    )
