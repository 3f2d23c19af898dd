"""Causal conv1d: the public functions. prepare.py checks their input and chooses a backend."""

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
    """A short depthwise convolution over time. Each channel has its own filter; channels are the last dimension.

    z[t] = bias + Σ_k weight[:, k] · x[t − (W−1−k)·dilation]
    y[t] = activation(z[t]) + residual[t]

    The activation is SiLU ("silu" or "swish") or None. Without options this is
    F.conv1d(F.pad(x.mT, (W − 1, 0)), weight[:, None], bias, groups=D).mT.

    x: [B, L, D]   weight: [D, W]   bias: [D]   residual: [B, L, D]
    seq_idx: [B, L] int32, the sequence of each token; taps on another sequence count as zero. A negative number is
      padding: y is 0 there and has no gradient. An initial_state then belongs to the sequence of token 0.
    cu_seqlens: [N + 1] int32 or int64, where packed sequences begin and end, with B = 1. Tokens past the last are
      padding. The host does not read its values: one out of range counts as the nearest of 0 and L, one smaller than
      an earlier one counts as that one, and kernels touch nothing outside of the tensors.
    initial_state: [N, D, (W − 1)·dilation] typed as x, the inputs before the first token of each sequence (N = B
      without cu_seqlens); None means zeros. With output_final_state, (y, final_state) is returned; the next piece of
      the sequence takes final_state as its initial_state. A sequence in pieces has the bits of the whole.
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
    """One decoding step of `causal_conv1d`, in place on conv_state: y of the next token or of the next few.

    x: [B, D] or [B, T, D]   weight: [D, W]   bias: [D]
    conv_state: [slots, D, length] typed as x with length at least (W − 1)·dilation, in any layout. The newest input is
      last and older ones shift out.
    cache_seqlens: [B] int32 or int64, how many inputs each sequence had before. conv_state is then a ring: the input at
      time t is at t modulo length.
    conv_state_indices: [B] int32 or int64, the slot of each sequence, no two alike; slot b for sequence b without it.
    A sequence is padding where its slot is pad_slot_id, negative or not in conv_state, or its cache_seqlens negative:
      y is zero there and no state changes.
    Returns y, shaped and typed as x, without a gradient. The host reads no values: a CUDA graph can capture the call.
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

    rmsnorm(x) = gamma · x · rsqrt(mean(x²) + norm_eps), for each stream over its D channels. Then `causal_conv1d` with
    SiLU runs over all nD channels.

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
