"""The first step of the public functions: check the input, choose a backend, and return a Request or the reference's
result. Eager calls that are like an earlier one skip it (core/call.py)."""

from typing import Any

import torch
from torch import Tensor

from ..core.backend import choose
from ..core.call import Request
from ..core.check import (
    KERNEL_FLOATS,
    check_count,
    check_dtype,
    check_flag,
    check_in_memory,
    check_numbers,
    check_range,
    check_shapes,
    check_tensor,
    check_tensors,
    check_whole,
    check_writable,
)
from . import contracts, reference

MAX_WIDTH = 8  # for kernels; the reference takes any
INTEGERS = (torch.int32, torch.int64)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dilation: int,
    residual: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    backend: str | None,
) -> Any:
    function = "causal_conv1d"
    silu = check_causal_conv1d(
        x=x,
        weight=weight,
        bias=bias,
        activation=activation,
        dilation=dilation,
        residual=residual,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        output_final_state=output_final_state,
    )
    if initial_state is None and not output_final_state:
        dilation = within(x.shape[1], dilation)
    name = choose(function, "conv", backend, x.device)
    if name == "reference":
        state = None if initial_state is None else initial_state.transpose(1, 2)
        y, final_state = reference.causal_conv1d(x, weight, bias, residual, seq_idx, cu_seqlens, state, silu, dilation)
        return (y, final_state.transpose(1, 2)) if output_final_state else y
    check_kernel_limits(function, x, weight, name)
    inputs = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "residual": residual,
        "seq_idx": seq_idx,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
        "silu": silu,
        "dilation": dilation,
        "output_final_state": output_final_state,
    }
    returns = ("y", "final_state") if output_final_state else "y"
    return Request(contracts.causal_conv1d_fwd, name, inputs, returns)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dilation: int,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    pad_slot_id: int,
    backend: str | None,
) -> Any:
    function = "causal_conv1d_update"
    check_tensors(function, x=x, conv_state=conv_state)
    tokens = x[:, None] if x.dim() == 2 else x
    silu = check_filter(function, tokens, "[B, D] or [B, T, D]", weight, bias, activation, dilation)
    B, _, D = tokens.shape
    S = (weight.shape[1] - 1) * dilation
    check_dtype(function, "conv_state", conv_state, (x.dtype,), " as x is")
    if conv_state.dim() != 3 or conv_state.shape[1] != D or conv_state.shape[2] < S:
        expected = f"[slots, {D}, length] with length at least {S}"
        raise ValueError(f"{function}: conv_state must be {expected}, got {list(conv_state.shape)}")
    for name, index in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if index is not None:
            check_index(function, name, index, x, INTEGERS)
            check_shapes(function, **{name: (index, (B,))})
    if cache_seqlens is not None and conv_state.shape[2] < 1:
        raise ValueError(f"{function}: conv_state must have a length of at least 1 with cache_seqlens, got 0")
    if conv_state_indices is None and conv_state.shape[0] != B:
        raise ValueError(
            f"{function}: conv_state must have a slot for each of {B} sequences, got {conv_state.shape[0]}"
        )
    check_whole(function, "pad_slot_id", pad_slot_id)
    if not torch.compiler.is_compiling():  # the op itself checks again
        check_writable(function, "conv_state", conv_state)
    name = choose(function, "conv", backend, x.device)
    check_not_hip(function, name)
    if name == "reference":
        with torch.no_grad():
            state, places = conv_state.transpose(1, 2), (cache_seqlens, conv_state_indices)
            y, after = reference.causal_conv1d_update(tokens, state, weight, bias, *places, silu, dilation, pad_slot_id)
            state.copy_(after)
            return y.view(x.shape)
    check_kernel_limits(function, x, weight, name)
    check_in_memory(function, "conv_state", conv_state, f" for backend {name!r}")
    inputs = {
        "x": x,
        "conv_state": conv_state,
        "weight": weight,
        "bias": bias,
        "cache_seqlens": cache_seqlens,
        "conv_state_indices": conv_state_indices,
        "silu": silu,
        "dilation": dilation,
        "pad_slot_id": pad_slot_id,
    }
    return Request(contracts.causal_conv1d_update_, name, inputs, "y")


def short_conv(
    x: Tensor, gamma: Tensor, weight: Tensor, dilation: int, residual: bool, norm_eps: float, backend: str | None
) -> Any:
    function = "short_conv"
    norm_eps = check_short_conv(x, gamma, weight, dilation, norm_eps)
    check_flag(function, "residual", residual)
    dilation = within(x.shape[1], dilation)
    name = choose(function, "conv", backend, x.device)
    check_not_hip(function, name)
    if name == "reference":
        return reference.short_conv(x, gamma, weight, norm_eps, dilation, residual)
    check_kernel_limits(function, x, weight, name)
    inputs = {"x": x, "gamma": gamma, "weight": weight}
    options = {"norm_eps": norm_eps, "dilation": dilation, "residual": residual}
    return Request(contracts.short_conv_fwd, name, {**inputs, **options}, "y")


def check_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dilation: int,
    residual: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
) -> bool:
    """Whether SiLU follows."""
    function = "causal_conv1d"
    silu = check_filter(function, x, "[B, L, D]", weight, bias, activation, dilation)
    if residual is not None:
        check_tensors(function, x=x, residual=residual)
        check_shapes(function, residual=(residual, tuple(x.shape)))
    B, L, D = x.shape
    S = (weight.shape[1] - 1) * dilation
    check_flag(function, "output_final_state", output_final_state)
    exclude(function, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    exclude(function, seq_idx=seq_idx, output_final_state=output_final_state or None)
    N = B
    if seq_idx is not None:
        check_index(function, "seq_idx", seq_idx, x, (torch.int32,))
        check_shapes(function, seq_idx=(seq_idx, (B, L)))
    if cu_seqlens is not None:
        check_index(function, "cu_seqlens", cu_seqlens, x, INTEGERS)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"{function}: cu_seqlens must be [N + 1], got {list(cu_seqlens.shape)}")
        if B != 1:
            raise ValueError(f"{function}: x must be [1, L, D] with cu_seqlens, got {list(x.shape)}")
        N = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        check_tensors(function, x=x, initial_state=initial_state)
        check_dtype(function, "initial_state", initial_state, (x.dtype,), " as x is")
        check_shapes(function, initial_state=(initial_state, (N, D, S)))
    return silu


def check_short_conv(x: Tensor, gamma: Tensor, weight: Tensor, dilation: int, norm_eps: float) -> float:
    """norm_eps as a float."""
    function = "short_conv"
    check_tensors(function, x=x, gamma=gamma, weight=weight)
    if x.dim() != 4 or x.shape[2] < 1 or x.shape[3] < 1:
        raise ValueError(f"{function}: x must be [B, L, n, D] with n and D at least 1, got {list(x.shape)}")
    n, D = x.shape[2:]
    check_shapes(function, gamma=(gamma, (n, D)))
    _check_weight(function, weight, n * D)
    check_count(function, "dilation", dilation)
    (norm_eps,) = check_numbers(function, norm_eps=norm_eps)
    return norm_eps


def check_filter(
    function: str, x: Tensor, layout: str, weight: Tensor, bias: Tensor | None, activation: str | None, dilation: int
) -> bool:
    """Whether SiLU follows."""
    check_tensors(function, x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if x.dim() != 3:
        raise ValueError(f"{function}: x must be {layout}, got {list(x.shape)}")
    D = x.shape[2]
    if weight.dim() > 1 and 1 < x.shape[1] == weight.shape[0] != D:
        expected = f"{layout} with D = {weight.shape[0]} as weight is {list(weight.shape)}"
        given = x.shape[1:] if layout == "[tokens, D]" else x.shape  # packed sequences are one row here
        raise ValueError(f"{function}: x must be {expected}, got {list(given)}: pass x.mT")
    _check_weight(function, weight, D)
    if bias is not None:
        check_shapes(function, bias=(bias, (D,)))
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"{function}: activation must be None, 'silu' or 'swish', got {activation!r}")
    check_count(function, "dilation", dilation)
    return activation is not None


def _check_weight(function: str, weight: Tensor, D: int) -> None:
    if weight.dim() != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        one_more = weight.dim() == 3 and weight.shape[1] == 1
        hint = ": pass weight.squeeze(1), nn.Conv1d has one dimension more" if one_more else ""
        raise ValueError(f"{function}: weight must be [{D}, W] with W at least 1, got {list(weight.shape)}{hint}")


def within(L: int, dilation: int) -> int:
    """The dilation, at most L: from there on every tap but the last lies before the first token.

    The memory and the programs of a call grow with the dilation.
    """
    return L if dilation > L > 0 else dilation


def check_index(function: str, name: str, index: object, x: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    check_tensor(function, name, index, allowed)
    assert isinstance(index, Tensor)
    if index.device != x.device:
        raise ValueError(f"{function}: {name} must be on {x.device} as x is, got {index.device}")


def exclude(function: str, **two: object) -> None:
    if all(value is not None for value in two.values()):
        raise ValueError(f"{function}: {' and '.join(two)} exclude each other")


def check_not_hip(function: str, backend: str) -> None:
    if backend == "hip":
        raise NotImplementedError(f"{function}: backend 'hip' does not have it, 'triton' and 'reference' do")


def check_kernel_limits(function: str, x: Tensor, weight: Tensor, backend: str) -> None:
    context = f" for backend {backend!r}"
    check_dtype(function, "x", x, KERNEL_FLOATS, context)
    check_range(function, "the width of weight", weight.shape[1], 1, MAX_WIDTH, context)
