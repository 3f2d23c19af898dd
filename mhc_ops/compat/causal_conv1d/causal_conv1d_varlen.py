"""causal_conv1d.causal_conv1d_varlen: the states of packed sequences."""

import torch
from torch import Tensor

from ...core.check import check_dtype


@torch.no_grad()
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last state_len inputs of each packed sequence, as `causal_conv1d_update` takes them.

    x: [total, D]   cu_seqlens: [N + 1] int32 or int64, where the sequences begin and end. The host does not read its
    values; they are clamped to 0 … total and made non-decreasing.
    Returns states [N, D, state_len] with contiguous channels, zero before the start of a shorter sequence, and without
    a gradient.
    """
    function = "causal_conv1d_varlen_states"
    if not isinstance(x, Tensor) or not isinstance(cu_seqlens, Tensor):
        name, value = ("cu_seqlens", cu_seqlens) if isinstance(x, Tensor) else ("x", x)
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if x.dim() != 2:
        raise ValueError(f"{function}: x must be [total, D], got {list(x.shape)}")
    check_dtype(function, "cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{function}: cu_seqlens must be [N + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"{function}: cu_seqlens must be on {x.device} as x is, got {cu_seqlens.device}")
    if not isinstance(state_len, int) or isinstance(state_len, bool):
        raise TypeError(f"{function}: state_len must be an int, got {type(state_len).__name__}")
    if state_len < 0:
        raise ValueError(f"{function}: state_len must be at least 0, got {state_len}")
    total, D = x.shape
    if total == 0:
        return x.new_zeros(cu_seqlens.shape[0] - 1, state_len, D).mT
    bounds = cu_seqlens.clamp(0, total).cummax(0).values[:, None]
    begin, end = bounds[:-1], bounds[1:]
    time = end - state_len + torch.arange(state_len, device=x.device)
    states = torch.where((time >= begin)[..., None], x[time.clamp(min=0)], 0)
    return states.contiguous().mT


causal_conv1d_varlen_states_ref = causal_conv1d_varlen_states  # it is plain torch itself
