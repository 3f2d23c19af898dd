"""causal_conv1d.causal_conv1d_interface: the convolution, its decoding step, and both in plain torch."""

from typing import Literal, overload

from torch import Tensor

import mhc_ops

from ...core.check import check_dtype, check_shapes, check_tensors


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: Literal[False] = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    *,
    return_final_states: Literal[True],
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    return_final_states: Literal[True],
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A causal depthwise convolution over the last dimension, then SiLU with activation "silu" or "swish".

    x: [B, D, L] in either layout; nothing is copied if channels are contiguous (a transposed [B, L, D]).
    weight: [D, W]   bias: [D]
    seq_idx: [B, L] int32, which sequence a token belongs to; negative is padding. Not together with final states.
    initial_states: [B, D, W − 1], the inputs before the first token, with seq_idx those of its sequence; None: zeros
    final_states_out: [B, D, W − 1], written to if return_final_states is set, else ignored
    Returns out, shaped, typed and laid out as x; with return_final_states (out, final_states [B, D, W − 1]), where
    final_states is final_states_out if it is given. If gradients flow, it is an alias of final_states_out that carries
    them, so that a buffer that is used again does not keep the graph of its last use.
    Differentiable in x, weight, bias and initial_states.
    """
    function = "causal_conv1d_fn"
    _check_activation(function, activation)
    check_tensors(function, x=x, weight=weight)
    if x.dim() != 3:
        raise ValueError(f"{function}: x must be [B, D, L], got {list(x.shape)}")
    result = mhc_ops.causal_conv1d(
        x.mT,
        weight,
        bias,
        activation=activation,
        seq_idx=seq_idx,
        initial_state=initial_states,
        output_final_state=bool(return_final_states),
    )
    if isinstance(result, Tensor):
        return _laid_out_as(x, result)
    y, final_states = result
    if final_states_out is None:
        return _laid_out_as(x, y), final_states
    check_tensors(function, x=x, final_states_out=final_states_out)
    check_dtype(function, "final_states_out", final_states_out, (x.dtype,), " as x is")
    check_shapes(function, final_states_out=(final_states_out, tuple(final_states.shape)))
    written = final_states_out.detach() if final_states.requires_grad else final_states_out
    written.copy_(final_states)
    return _laid_out_as(x, y), written


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """One decoding step, in place on conv_state, for the next token or the next few, in order.

    x: [B, D] or [B, D, T]   weight: [D, W]   bias: [D]
    conv_state: [slots, D, state_len] typed as x with state_len at least W − 1, in any layout. The newest input is last
      and older ones shift out.
    cache_seqlens: [B] int32, how many inputs each sequence had before; conv_state is then a ring buffer, written from
      cache_seqlens % state_len on.
    conv_state_indices: [B] int32, the slot of each sequence; None: slot b for sequence b. For −1, a slot that does not
      exist or a negative cache_seqlens, out is zero and no state is changed.
    Returns out, shaped, typed and laid out as x; it carries no gradient.
    """
    function = "causal_conv1d_update"
    _check_activation(function, activation)
    check_tensors(function, x=x, conv_state=conv_state, weight=weight)
    if x.dim() not in (2, 3):
        raise ValueError(f"{function}: x must be [B, D] or [B, D, T], got {list(x.shape)}")
    several = x.dim() == 3
    y = mhc_ops.causal_conv1d_update(
        x.mT if several else x,
        conv_state,
        weight,
        bias,
        activation=activation,
        cache_seqlens=cache_seqlens,
        conv_state_indices=conv_state_indices,
    )
    return _laid_out_as(x, y) if several else y


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`causal_conv1d_fn` in plain torch; the package's tests compare with it."""
    wanted = bool(return_final_states)
    with mhc_ops.use_backend("reference"):
        return causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, wanted, final_states_out, activation)


def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d_update` in plain torch; the package's tests compare with it."""
    with mhc_ops.use_backend("reference"):
        return causal_conv1d_update(x, conv_state, weight, bias, activation, cache_seqlens)


def _check_activation(function: str, activation: object) -> None:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"{function}: activation must be None, silu, or swish, got {activation!r}")


def _laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    """y [B, L, D] as [B, D, L] with the memory layout of x [B, D, L]: channels contiguous, or else time."""
    return y.mT if x.stride(1) == 1 and x.stride(2) > 1 else y.mT.contiguous()
