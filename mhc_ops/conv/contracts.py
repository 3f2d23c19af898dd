"""The contracts of the convolution kernels and how their gradients are made of one another.

A backend's launcher has the contract's name and takes its inputs, then its outputs. Inputs are checked. x and residual
are [B, L, D] with channels side by side and otherwise any strides; all else is contiguous, states as [N, S, D] with
S = (W − 1)·dilation.
"""

import torch
from torch import Tensor

from ..core.op import op


@op("conv")
def causal_conv1d_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    dilation: int,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """y, final_state (empty unless it is asked for)"""
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (N, (weight.shape[1] - 1) * dilation, x.shape[2])
    return x.new_empty(x.shape), x.new_empty(state if output_final_state else (0,))


@op("conv")
def causal_conv1d_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    dy: Tensor,
    dfinal_state: Tensor | None,
    silu: bool,
    dilation: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dweight, dbias (empty without bias), dinitial_state (empty without initial_state)"""
    dbias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    dinitial_state = x.new_empty(0) if initial_state is None else torch.empty_like(initial_state)
    return x.new_empty(x.shape), torch.empty_like(weight), dbias, dinitial_state


@causal_conv1d_fwd.gradient(outputs=2, unread=(3,))
def causal_conv1d_gradient(run, inputs, saved, cotangents):
    x, weight, bias, residual_dtype, seq_idx, cu_seqlens, initial_state, silu, dilation, output_final_state = inputs
    dy, dfinal_state = cotangents
    if not output_final_state:
        dfinal_state = None  # of the empty stand-in
    if dy is None:
        dy = x.new_zeros(x.shape)
    places = (seq_idx, cu_seqlens, initial_state)
    gradients = run(causal_conv1d_bwd, x, weight, bias, *places, dy, dfinal_state, silu, dilation)
    dx, dweight, dbias, dinitial_state = gradients
    dresidual = None if residual_dtype is None else without_padding(dy, seq_idx, cu_seqlens).to(residual_dtype)
    dbias = None if bias is None else dbias
    return dx, dweight, dbias, dresidual, None, None, None if initial_state is None else dinitial_state


def without_padding(dy: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """dy, and 0 at padding."""
    if seq_idx is not None:
        return torch.where((seq_idx >= 0)[..., None], dy, 0)
    if cu_seqlens is not None:
        t = torch.arange(dy.shape[1], device=dy.device)
        return torch.where(((t >= cu_seqlens[0]) & (t < cu_seqlens.max()))[:, None], dy, 0)  # they may decrease
    return dy


@op("conv", mutates=("state",))
def causal_conv1d_update_(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    slots: Tensor | None,
    silu: bool,
    dilation: int,
    pad_slot_id: int,
) -> Tensor:
    """y, shaped as x [B, D] or [B, T, D]. x and state [slots, length, D] have any strides; x enters state."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@op("conv")
def short_conv_fwd(
    x: Tensor, gamma: Tensor, weight: Tensor, norm_eps: float, dilation: int, residual: bool
) -> tuple[Tensor, Tensor]:
    """y, inv_rms [B, L, n]; x [B, L, n, D], gamma [n, D], weight [nD, W]"""
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@op("conv")
def short_conv_bwd(
    x: Tensor, gamma: Tensor, weight: Tensor, inv_rms: Tensor, dy: Tensor, dilation: int, residual: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dgamma, dweight"""
    return torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(weight)


@short_conv_fwd.gradient(outputs=1)
def short_conv_gradient(run, inputs, saved, cotangents):
    *tensors, _, dilation, residual = inputs
    return run(short_conv_bwd, *tensors, *saved, *cotangents, dilation, residual)
