"""Causal conv1d: the public functions. prepare.py checks their input and chooses a backend."""

from typing import Literal, overload

from torch import Tensor

from ..core.call import run
from . import prepare, serving


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


def causal_conv1d_prefill(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor,
    conv_state_indices: Tensor,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    read_columns: Tensor | None = None,
    write_columns: Tensor | None = None,
    first_columns: Tensor | None = None,
    tokens_before: Tensor | None = None,
    block_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """`causal_conv1d` of packed sequences whose states are in a cache, which changes in place: chunks of prompts.

    x: [tokens, D]   weight: [D, W] with W at least 2   bias: [D]
    conv_state: [slots, D, length] typed as x with length at least W − 1, in any layout. The last W − 1 inputs of a
      sequence are in places 0 to W − 2 of its slot, the newest at W − 2. Further places are room for drafts; they are
      neither read nor written.
    cu_seqlens: [N + 1] int32 or int64, where sequences begin and end in x. Rows of x that are in none of them, before
      the first or after the last, are padding.
    conv_state_indices: [N] int32 or int64, the slot that each sequence reads and writes; or [N, blocks], a table of the
      slots that a sequence has, any strides.
    has_initial_state: [N] bool, whether a sequence goes on from its slot; where not, and without it, from zeros.
    read_columns, write_columns: [N] int32 or int64, the column of the table whose slot is read, and the one that
      receives the state after the last token; column 0 without them.
    first_columns, tokens_before, block_size: the states at every multiple of block_size are kept too. Sequence i had
      tokens_before[i] tokens before these. Its state at the first multiple after them goes to the slot in column
      first_columns[i], the next one to the column after it, and so on. These slots differ from one another; where one
      is also that of the state after the last token, that state stays.
    A sequence is padding where it has no tokens, or where the slot that it reads (or would read) is pad_slot_id,
      negative, not in conv_state, or in a column that the table does not have: no state of it is written. A state is
      not written where its own slot is such. Slots are read before they are written, so one may be both.
    Returns y, shaped and typed as x, 0 at padding, without a gradient. The host reads no values: a CUDA graph can
    capture the call.
    """
    return run(
        serving.causal_conv1d_prefill,
        x=x,
        conv_state=conv_state,
        weight=weight,
        bias=bias,
        activation=activation,
        cu_seqlens=cu_seqlens,
        conv_state_indices=conv_state_indices,
        has_initial_state=has_initial_state,
        pad_slot_id=pad_slot_id,
        read_columns=read_columns,
        write_columns=write_columns,
        first_columns=first_columns,
        tokens_before=tokens_before,
        block_size=block_size,
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
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    read_columns: Tensor | None = None,
    write_columns: Tensor | None = None,
    out: Tensor | None = None,
    windows: Tensor | None = None,
    window_indices: Tensor | None = None,
    parents: Tensor | None = None,
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

    Servers also need these. They take dilation 1, W at least 2, and no cache_seqlens.

    num_accepted_tokens: [B] int32 or int64, how many tokens of the step before were accepted: 1 to T of that step, 1
      after `causal_conv1d_prefill`. The window of W − 1 inputs then begins at place num_accepted_tokens − 1, and the
      slot receives, from place 0 on, the newest W − 2 inputs before these tokens, and the tokens. length is at least
      W − 2 + T. A number that the slot has no window for is padding.
    cu_seqlens, max_seqlen: x is [tokens, D], and sequence b is the rows cu_seqlens[b] to cu_seqlens[b + 1], at most
      max_seqlen of them. Other rows, and those past max_seqlen, are padding. A sequence without rows changes no state.
    conv_state_indices: [B, blocks] is a table of slots. read_columns and write_columns [B] are the columns whose slots
      are read and written, 0 without them. Where there is no slot to read, the sequence is padding; where there is no
      slot to write, its state is not written.
    out: as x, receives y and is returned. It may be x itself (not with parents): y takes its place, except at padding,
      where x stays.
    windows: [lines, steps, D, W − 1] as x, receives the W − 1 newest inputs after each token t of a sequence, at step t
      of line window_indices[b] [B], or b without it. Lines that windows does not have are not written.
    parents: [B, T] int32 or int64, a tree of drafts: the input before token t is token parents[b, t], which is smaller
      than t, or else the newest in conv_state. conv_state does not change, because only one path will be accepted: copy
      the window after its last token.
    Returns y, shaped and typed as x, without a gradient. The host reads no values: a CUDA graph can capture the call.
    """
    plain = {
        "x": x,
        "conv_state": conv_state,
        "weight": weight,
        "bias": bias,
        "activation": activation,
        "dilation": dilation,
        "cache_seqlens": cache_seqlens,
        "conv_state_indices": conv_state_indices,
        "pad_slot_id": pad_slot_id,
        "backend": backend,
    }
    rows = num_accepted_tokens is cu_seqlens is max_seqlen is parents is None
    if rows and read_columns is write_columns is out is windows is window_indices is None:
        return run(serving.causal_conv1d_update, **plain)  # each further argument costs time in every call
    in_place = out is x
    y = run(
        serving.causal_conv1d_update,
        **plain,
        num_accepted_tokens=num_accepted_tokens,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        read_columns=read_columns,
        write_columns=write_columns,
        out=None if in_place else out,
        in_place=in_place,
        windows=windows,
        window_indices=window_indices,
        parents=parents,
    )
    return y if out is None else out


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
