"""The types that references compute in."""

import torch
from torch import Tensor


def accumulate(x: Tensor) -> Tensor:
    """x in the type of its sums: fp64 stays, all else is fp32."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)
