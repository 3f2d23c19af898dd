"""Causal conv1d: the public functions. Each checks its input, chooses a backend, calls the reference or the kernels."""

from typing import Literal, overload

import torch
from torch import Tensor

from ..core.backend import choose
from ..core.check import (
    KERNEL_FLOATS,
    check_count,
    check_dtype,
    check_numbers,
    check_range,
    check_shapes,
    check_tensors,
)
from ..core.replay import replayed
from . import contracts, reference

MAX_WIDTH = 8  # of the kernels; the reference takes any
INTEGERS = (torch.int32, torch.int64)


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dilation: int = 1,
    residual: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dilation: int = 1,
    residual: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dilation: int = 1,
    residual: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


@replayed
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dilation: int = 1,
    residual: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A short depthwise convolution over time, each channel with its own filter, channels fastest.

    z[t] = bias + Σ_k weight[:, k] · x[t − (W−1−k)·dilation]    y = z, or silu(z) with activation "silu" or "swish";
    then + residual. Without options this is F.conv1d(F.pad(x.mT, (W − 1, 0)), weight[:, None], bias, groups=D).mT.

    x: [B, L, D]   weight: [D, W]   bias: [D]   residual: [B, L, D]
    seq_idx: [B, L] int32, which sequence a token belongs to; taps on another one count as zero. Negative is padding:
      y is 0 there and nothing flows back from it.
    cu_seqlens: [N + 1] int32 or int64, where packed sequences begin and end, with B = 1. Tokens past the last are
      padding. Its values are not looked at on the host: one out of range counts as the nearest of 0 and L, one that is
      smaller than one before it as that one, and nothing outside of the tensors is touched.
    initial_state: [N, D, (W − 1)·dilation] typed as x, the inputs before the first token of each sequence (N = B
      without cu_seqlens); zeros where it is None. With output_final_state, (y, final_state) is returned: what the next
      piece of the sequence takes as its initial_state. A sequence in pieces has the bits of the whole.
    Returns y, shaped and typed as x. Differentiable in x, weight, bias, residual and initial_state.
    """
    function = "causal_conv1d"
    silu = _check_filter(function, x, "[B, L, D]", weight, bias, activation, dilation)
    if residual is not None:
        check_tensors(function, x=x, residual=residual)
        check_shapes(function, residual=(residual, tuple(x.shape)))
    B, L, D = x.shape
    S = (weight.shape[1] - 1) * dilation
    _exclude(function, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    _exclude(function, seq_idx=seq_idx, initial_state=initial_state)
    _exclude(function, seq_idx=seq_idx, output_final_state=output_final_state or None)
    N = B
    if seq_idx is not None:
        _check_index(function, "seq_idx", seq_idx, x, (torch.int32,))
        check_shapes(function, seq_idx=(seq_idx, (B, L)))
    if cu_seqlens is not None:
        _check_index(function, "cu_seqlens", cu_seqlens, x, INTEGERS)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"{function}: cu_seqlens must be [N + 1], got {list(cu_seqlens.shape)}")
        if B != 1:
            raise ValueError(f"{function}: x must be [1, L, D] with cu_seqlens, got {list(x.shape)}")
        N = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        check_tensors(function, x=x, initial_state=initial_state)
        check_dtype(function, "initial_state", initial_state, (x.dtype,), " as x is")
        check_shapes(function, initial_state=(initial_state, (N, D, S)))
    elif not output_final_state:
        dilation = _within(L, dilation)
    name = choose(function, "conv", backend, x.device)
    state = None if initial_state is None else initial_state.transpose(1, 2)
    if name == "reference":
        inputs = (x, weight, bias, residual, seq_idx, cu_seqlens, state)
        y, final_state = reference.causal_conv1d(*inputs, silu, dilation)
    else:
        _check_kernel_limits(function, x, weight, name)
        places = _contiguous(seq_idx, cu_seqlens, state)
        rows, weights, biases = _rows(x), *_contiguous(weight, bias)
        added = None if residual is None else _rows(residual)
        y, final_state = contracts.causal_conv1d_fwd(
            rows, weights, biases, added, *places, silu, dilation, output_final_state, name
        )
    return (y, final_state.transpose(1, 2)) if output_final_state else y


@replayed
@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dilation: int = 1,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    backend: str | None = None,
) -> Tensor:
    """One decoding step of `causal_conv1d`, in place on conv_state: y of the next token, or of the next few, in order.

    x: [B, D] or [B, T, D]   weight: [D, W]   bias: [D]
    conv_state: [slots, D, length] typed as x with length at least (W − 1)·dilation, in any layout. The newest input is
      last and older ones shift out.
    cache_seqlens: [B] int32 or int64, how many inputs each sequence had before; conv_state is then a ring of its own
      length, the input at time t at t modulo length.
    conv_state_indices: [B] int32 or int64, the slot of each sequence (slot b for sequence b without it), one of its own
      for each.
    A sequence is padding where its slot is pad_slot_id, negative or not in conv_state, or its cache_seqlens negative:
      y is zero there and no state is touched.
    Returns y, shaped and typed as x; it carries no gradient. Nothing is looked at on the host, so the call can be
    captured in a CUDA graph.
    """
    function = "causal_conv1d_update"
    tokens = x[:, None] if isinstance(x, Tensor) and x.dim() == 2 else x
    silu = _check_filter(function, tokens, "[B, D] or [B, T, D]", weight, bias, activation, dilation)
    B, _, D = tokens.shape
    S = (weight.shape[1] - 1) * dilation
    check_tensors(function, x=x, conv_state=conv_state)
    check_dtype(function, "conv_state", conv_state, (x.dtype,), " as x is")
    if conv_state.dim() != 3 or conv_state.shape[1] != D or conv_state.shape[2] < S:
        expected = f"[slots, {D}, length] with length at least {S}"
        raise ValueError(f"{function}: conv_state must be {expected}, got {list(conv_state.shape)}")
    for name, index in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if index is not None:
            _check_index(function, name, index, x, INTEGERS)
            check_shapes(function, **{name: (index, (B,))})
    if cache_seqlens is not None and conv_state.shape[2] < 1:
        raise ValueError(f"{function}: conv_state must have a length of at least 1 with cache_seqlens, got 0")
    if conv_state_indices is None and conv_state.shape[0] != B:
        raise ValueError(
            f"{function}: conv_state must have a slot for each of {B} sequences, got {conv_state.shape[0]}"
        )
    if not isinstance(pad_slot_id, int):
        raise TypeError(f"{function}: pad_slot_id must be an int, got {type(pad_slot_id).__name__}")
    name = choose(function, "conv", backend, x.device)
    state = conv_state.transpose(1, 2)
    if name == "reference":
        places = (cache_seqlens, conv_state_indices)
        y, after = reference.causal_conv1d_update(tokens, state, weight, bias, *places, silu, dilation, pad_slot_id)
        state.copy_(after)
        return y.view(x.shape)
    _check_kernel_limits(function, x, weight, name)
    inputs = _contiguous(weight, bias, cache_seqlens, conv_state_indices)
    return contracts.causal_conv1d_update_(x, state, *inputs, silu, dilation, pad_slot_id, name)


@replayed
def short_conv(
    x: Tensor,
    gamma: Tensor,
    weight: Tensor,
    *,
    dilation: int = 1,
    residual: bool = True,
    norm_eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """A short causal convolution over the normalised streams of an mHC model: silu(conv(rmsnorm(x))), + x.

    rmsnorm(x) = gamma · x · rsqrt(mean(x²) + norm_eps), of each stream over its D channels; then `causal_conv1d` with
    SiLU over all nD channels.

    x: [B, L, n, D]   gamma: [n, D]   weight: [nD, W]
    Returns y, shaped and typed as x. Differentiable in x, gamma and weight.
    """
    function = "short_conv"
    check_tensors(function, x=x, gamma=gamma, weight=weight)
    if x.dim() != 4 or x.shape[2] < 1 or x.shape[3] < 1:
        raise ValueError(f"{function}: x must be [B, L, n, D] with n and D at least 1, got {list(x.shape)}")
    n, D = x.shape[2:]
    check_shapes(function, gamma=(gamma, (n, D)))
    _check_weight(function, weight, n * D)
    check_count(function, "dilation", dilation)
    (norm_eps,) = check_numbers(function, norm_eps=norm_eps)
    options = (norm_eps, _within(x.shape[1], dilation), bool(residual))
    name = choose(function, "conv", backend, x.device)
    if name == "reference":
        return reference.short_conv(x, gamma, weight, *options)
    _check_kernel_limits(function, x, weight, name)
    return contracts.short_conv_fwd(*_contiguous(x, gamma, weight), *options, name)[0]


def _check_filter(
    function: str, x: Tensor, layout: str, weight: Tensor, bias: Tensor | None, activation: str | None, dilation: int
) -> bool:
    """Whether SiLU follows."""
    check_tensors(function, x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if x.dim() != 3:
        raise ValueError(f"{function}: x must be {layout}, got {list(x.shape)}")
    D = x.shape[2]
    if weight.dim() > 1 and 1 < x.shape[1] == weight.shape[0] != D:
        expected = f"{layout} with D = {weight.shape[0]} as weight is {list(weight.shape)}"
        raise ValueError(f"{function}: x must be {expected}, got {list(x.shape)}: pass x.mT")
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


def _within(L: int, dilation: int) -> int:
    """A dilation that does the same without states: from L on, every tap but the last is before the first token.

    The memory and the programs of a call grow with it.
    """
    return L if dilation > L > 0 else dilation


def _check_index(function: str, name: str, index: object, x: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if not isinstance(index, Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(index).__name__}")
    if index.layout is not torch.strided:
        layout = str(index.layout).removeprefix("torch.")
        raise TypeError(f"{function}: {name} must be a dense (strided) tensor, got {layout}")
    check_dtype(function, name, index, allowed)
    if index.device != x.device:
        raise ValueError(f"{function}: {name} must be on {x.device} as x is, got {index.device}")


def _exclude(function: str, **two: object) -> None:
    if all(value is not None for value in two.values()):
        raise ValueError(f"{function}: {' and '.join(two)} exclude each other")


def _check_kernel_limits(function: str, x: Tensor, weight: Tensor, backend: str) -> None:
    context = f" for backend {backend!r}"
    check_dtype(function, "x", x, KERNEL_FLOATS, context)
    check_range(function, "the width of weight", weight.shape[1], 1, MAX_WIDTH, context)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _rows(x: Tensor) -> Tensor:
    """Channels side by side; other strides are free."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
