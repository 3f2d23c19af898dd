"""The contracts of the convolution kernels, and which op is whose gradient.

A backend's launcher has the contract's name and takes checked inputs and the outputs by their names. x and residual are
[B, L, D] with channels side by side and free other strides. States are [N, D, S] with channels side by side and
S = (W − 1)·dilation. All else is contiguous, cotangents too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import any_layout
from ..core.op import op


def _channels_last(x: Tensor) -> Tensor:
    """x with channels side by side. Its other strides are free."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _as_state(state: Tensor) -> Tensor:
    """The state [N, D, S] with channels side by side, as final_state has them."""
    rows = state.transpose(1, 2)
    return state if rows.is_contiguous() else rows.contiguous().transpose(1, 2)


LAYOUTS = {"x": _channels_last, "residual": _channels_last, "initial_state": _as_state}


class ConvOutputs(NamedTuple):
    """final_state is empty without output_final_state."""

    y: Tensor
    final_state: Tensor


class ConvGradients(NamedTuple):
    """dbias and dinitial_state are empty without bias and initial_state."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor
    dinitial_state: Tensor


@op("conv", layouts=LAYOUTS)
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
) -> ConvOutputs:
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    S = (weight.shape[1] - 1) * dilation
    state = x.new_empty((N, S, x.shape[2])).transpose(1, 2) if output_final_state else x.new_empty(0)
    return ConvOutputs(y=x.new_empty(x.shape), final_state=state)


@op("conv", layouts=LAYOUTS)
def causal_conv1d_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    dilation: int,
    dy: Tensor,
    dfinal_state: Tensor | None,
) -> ConvGradients:
    return ConvGradients(
        dx=x.new_empty(x.shape),
        dweight=torch.empty_like(weight),
        dbias=weight.new_empty(0) if bias is None else torch.empty_like(bias),
        dinitial_state=x.new_empty(0) if initial_state is None else _empty_state(initial_state),
    )


@causal_conv1d_fwd.gradient
def causal_conv1d_gradient(
    run,
    given,
    x,
    weight,
    bias,
    seq_idx,
    cu_seqlens,
    initial_state,
    silu,
    dilation,
    output_final_state,
    dy,
    dfinal_state,
):
    if dy is None:
        dy = x.new_zeros(x.shape)
    gradients = run(
        causal_conv1d_bwd,
        x=x,
        weight=weight,
        bias=bias,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        silu=silu,
        dilation=dilation,
        dy=dy,
        dfinal_state=dfinal_state if output_final_state else None,  # else of an empty tensor
    )
    return {
        "x": gradients.dx,
        "weight": gradients.dweight,
        "bias": gradients.dbias,
        "residual": without_padding(dy, seq_idx, cu_seqlens) if "residual" in given else None,
        "initial_state": gradients.dinitial_state,
    }


def without_padding(dy: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """dy, and 0 at padding."""
    if seq_idx is not None:
        return torch.where((seq_idx >= 0)[..., None], dy, 0)
    if cu_seqlens is not None:
        t = cu_seqlens.new_ones(dy.shape[1]).cumsum(0) - 1  # a DTensor if cu_seqlens is one
        return torch.where(((t >= cu_seqlens[0]) & (t < cu_seqlens.max()))[:, None], dy, 0)  # they may decrease
    return dy


class UpdateOutputs(NamedTuple):
    y: Tensor


@op("conv", mutates=("conv_state",), layouts={"x": any_layout, "conv_state": any_layout})
def causal_conv1d_update_(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    silu: bool,
    dilation: int,
    pad_slot_id: int,
) -> UpdateOutputs:
    """y has the shape of x, [B, D] or [B, T, D]. x enters conv_state [slots, D, length]; both have any strides."""
    return UpdateOutputs(y=torch.empty_like(x, memory_format=torch.contiguous_format))


class PrefillOutputs(NamedTuple):
    y: Tensor


@op(
    "conv",
    mutates=("conv_state",),
    layouts={"x": _channels_last, "conv_state": any_layout, "conv_state_indices": any_layout},
)
def causal_conv1d_prefill_(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state_indices: Tensor,
    has_initial_state: Tensor | None,
    read_columns: Tensor | None,
    write_columns: Tensor | None,
    first_columns: Tensor | None,
    tokens_before: Tensor | None,
    block_size: int,
    silu: bool,
    pad_slot_id: int,
) -> PrefillOutputs:
    """x [tokens, D]; conv_state_indices [N] or [N, blocks]; block_size 0: no states within the chunk are kept."""
    return PrefillOutputs(y=x.new_empty(x.shape))


class StepOutputs(NamedTuple):
    """y is empty where it is written to `out`."""

    y: Tensor


@op(
    "conv",
    mutates=("conv_state", "out", "windows"),
    layouts=dict.fromkeys(("x", "conv_state", "out", "windows", "conv_state_indices"), any_layout),
)
def causal_conv1d_step_(
    x: Tensor | None,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    cu_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    read_columns: Tensor | None,
    write_columns: Tensor | None,
    num_accepted_tokens: Tensor | None,
    windows: Tensor | None,
    window_indices: Tensor | None,
    parents: Tensor | None,
    max_seqlen: int,
    silu: bool,
    pad_slot_id: int,
) -> StepOutputs:
    """x [B, D], [B, T, D], or [tokens, D] with cu_seqlens; None: `out` holds it, and y takes its place where a token is
    no padding. windows [lines, steps, D, W − 1]; conv_state_indices [B] or [B, blocks]."""
    if out is not None or x is None:
        return StepOutputs(y=conv_state.new_empty(0))
    return StepOutputs(y=torch.empty_like(x, memory_format=torch.contiguous_format))


class ShortConvOutputs(NamedTuple):
    y: Tensor
    inv_rms: Tensor


class ShortConvGradients(NamedTuple):
    dx: Tensor
    dgamma: Tensor
    dweight: Tensor


@op("conv")
def short_conv_fwd(
    x: Tensor, gamma: Tensor, weight: Tensor, norm_eps: float, dilation: int, residual: bool
) -> ShortConvOutputs:
    """x [B, L, n, D], gamma [n, D], weight [nD, W]; inv_rms [B, L, n]"""
    return ShortConvOutputs(y=torch.empty_like(x), inv_rms=x.new_empty(x.shape[:-1], dtype=torch.float32))


@op("conv")
def short_conv_bwd(
    x: Tensor, gamma: Tensor, weight: Tensor, dilation: int, residual: bool, inv_rms: Tensor, dy: Tensor
) -> ShortConvGradients:
    return ShortConvGradients(torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(weight))


short_conv_fwd.gradient_is(short_conv_bwd)


def _empty_state(state: Tensor) -> Tensor:
    N, D, S = state.shape
    return state.new_empty((N, S, D)).transpose(1, 2)
