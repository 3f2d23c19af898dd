"""Causal conv1d: the public functions. What each does first, checking its input and choosing a backend, is in
prepare.py."""

from typing import Literal, overload

from torch import Tensor

from ..core.call import run
from . import prepare


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

    z[t] = bias + Σ_k weight[:, k] · x[t − (W−1−k)·dilation]
    y[t] = activation(z[t]) + residual[t]

    The activation is SiLU, "silu" or "swish", or none. Without options this is
    F.conv1d(F.pad(x.mT, (W − 1, 0)), weight[:, None], bias, groups=D).mT.

    x: [B, L, D]   weight: [D, W]   bias: [D]   residual: [B, L, D]
    seq_idx: [B, L] int32, which sequence a token belongs to; taps on another one count as zero. Negative is padding:
      y is 0 there and nothing flows back from it. An initial_state is then that of the sequence of token 0.
    cu_seqlens: [N + 1] int32 or int64, where packed sequences begin and end, with B = 1. Tokens past the last are
      padding. Its values are not looked at on the host: one out of range counts as the nearest of 0 and L, one that is
      smaller than one before it as that one, and nothing outside of the tensors is touched.
    initial_state: [N, D, (W − 1)·dilation] typed as x, the inputs before the first token of each sequence (N = B
      without cu_seqlens); zeros where it is None. With output_final_state, (y, final_state) is returned: what the next
      piece of the sequence takes as its initial_state. A sequence in pieces has the bits of the whole.
    Returns y, shaped and typed as x. Differentiable in x, weight, bias, residual and initial_state.
    """
    return run(
        prepare.causal_conv1d,
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
        backend=backend,
    )


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
    return run(
        prepare.causal_conv1d_update,
        x=x,
        conv_state=conv_state,
        weight=weight,
        bias=bias,
        activation=activation,
        dilation=dilation,
        cache_seqlens=cache_seqlens,
        conv_state_indices=conv_state_indices,
        pad_slot_id=pad_slot_id,
        backend=backend,
    )


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
    return run(
        prepare.short_conv,
        x=x,
        gamma=gamma,
        weight=weight,
        dilation=dilation,
        residual=residual,
        norm_eps=norm_eps,
        backend=backend,
    )
