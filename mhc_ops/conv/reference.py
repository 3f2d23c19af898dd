"""The meaning of the causal convolution in plain torch: any device, any float type, forward only; torch differentiates.

x [B, L, D], weight [D, W], state [N, S, D] with S = (W − 1)·dilation: the S inputs before a sequence's first token.
Computed in fp32, or fp64 where x is fp64; autocast is off.
"""

import torch
from torch import Tensor

from ..core.precision import accumulate, without_autocast


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    dilation: int,
) -> tuple[Tensor, Tensor]:
    """y and the final state: the last S inputs of each sequence, the initial state shifting in where it is shorter.

    z[t] = bias + Σ_k weight[:, k] · x[t − (W−1−k)·dilation]        y = z or silu(z), + residual; 0 at padding
    """
    with without_autocast(x):
        wide, state = accumulate(x), None if initial_state is None else accumulate(initial_state)
        if cu_seqlens is None:
            taps, last, real = dense(wide, state, seq_idx, weight.shape[-1], dilation)
        else:
            taps, last, real = packed(wide, state, cu_seqlens, weight.shape[-1], dilation)
        y = filtered(taps, weight, bias, silu)
        if residual is not None:
            y = y + residual.to(wide.dtype)
        if real is not None:
            y = torch.where(real, y, 0)
        return y.to(x.dtype), last.to(x.dtype)


def filtered(taps: list[Tensor], weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """bias + Σ_k weight[:, k] · taps[k], and SiLU of it, in the type of the taps."""
    wide = taps[0].dtype
    z = sum((tap * weight[:, k].to(wide) for k, tap in enumerate(taps)), taps[0].new_zeros(()))
    if bias is not None:
        z = z + bias.to(wide)
    return silu_of(z) if silu else z


def silu_of(z: Tensor) -> Tensor:
    """z·σ(z). On a CPU, F.silu and sigmoid round the last few elements of a call differently, so a sequence in pieces
    would not have the bits of the whole. exp rounds all elements alike. exp(−|z|) does not overflow; it is written
    without abs, whose derivative at 0 is 0.
    """
    positive = z >= 0
    decay = torch.exp(torch.where(positive, -z, z))
    return z * torch.where(positive, 1, decay) / (1 + decay)


Taps = tuple[list[Tensor], Tensor, Tensor | None]


def dense(x: Tensor, state: Tensor | None, seq_idx: Tensor | None, W: int, dilation: int) -> Taps:
    """What lies under each of the W taps, [B, L, D] each; the final state; which tokens are no padding (None: all).

    Values are selected, not multiplied by 0, so a NaN stays within its sequence or padding.
    """
    B, L, D = x.shape
    S = (W - 1) * dilation
    before = x.new_zeros(B, S, D) if state is None else state
    everything = torch.cat([before, x], 1)
    taps = [everything[:, k * dilation : k * dilation + L] for k in range(W)]
    last = everything[:, L:].clone(memory_format=torch.contiguous_format)  # a view would keep all of it in memory
    if seq_idx is None or L == 0:
        return taps, last, None
    ids = torch.cat([seq_idx[:, :1].expand(B, S), seq_idx], 1)  # the state belongs to the sequence of token 0
    real = (seq_idx >= 0)[..., None]
    for k in range(W):
        same = ids[:, k * dilation : k * dilation + L] == seq_idx
        taps[k] = torch.where(real & same[..., None], taps[k], 0)
    return taps, last, real


def packed(x: Tensor, state: Tensor | None, cu_seqlens: Tensor, W: int, dilation: int) -> Taps:
    """The same for sequences cu_seqlens[i] to cu_seqlens[i + 1] of x [1, L, D], each with its own states.

    A boundary is clamped to 0 and L, and to no less than the ones before it.
    """
    _, L, D = x.shape
    N, S = cu_seqlens.numel() - 1, (W - 1) * dilation
    bounds = cu_seqlens.clamp(0, L).cummax(0).values
    before = x.new_zeros(N, S, D) if state is None else state
    everything = torch.cat([x.new_zeros(1, D), before.flatten(0, 1), x[0]])  # nothing, the states, the tokens
    begin, end = bounds[:-1], bounds[1:]

    def at(time: Tensor, sequence: Tensor, start: Tensor) -> Tensor:
        """The row of the input at `time`: a token, or a row of the state if `time` is before the sequence starts."""
        return torch.where(time >= start, 1 + N * S + time, 1 + sequence * S + S + time - start)

    t = torch.arange(L, device=x.device)
    sequence = torch.searchsorted(bounds, t, right=True) - 1
    real = (sequence >= 0) & (sequence < N)
    start = torch.cat([begin, begin.new_zeros(1)])[torch.where(real, sequence, N)]
    taps = []
    for k in range(W):
        rows = torch.where(real, at(t - (W - 1 - k) * dilation, sequence, start), 0)
        taps.append(everything[rows][None])
    s = torch.arange(S, device=x.device)
    last = at(end[:, None] - S + s, torch.arange(N, device=x.device)[:, None], begin[:, None])
    return taps, everything[last], real[None, :, None]


def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    slots: Tensor | None,
    silu: bool,
    dilation: int,
    pad_slot_id: int,
) -> tuple[Tensor, Tensor]:
    """y of a few tokens x [B, T, D], and what state [slots, length, D] is after them.

    Without cache_seqlens the newest input is last and older ones shift out. With it, the state is a ring: cache_seqlens
    inputs came before these, and the input at time t of its sequence is at t modulo length.
    A sequence is padding where its slot is pad_slot_id or missing, or its cache_seqlens negative.
    """
    B, T, D = x.shape
    N, length, S = len(state), state.shape[1], (weight.shape[1] - 1) * dilation
    rows = torch.arange(B, device=x.device) if slots is None else slots.long()
    real = (rows >= 0) & (rows < N)
    if slots is not None:
        real = real & (rows != pad_slot_id)
    if cache_seqlens is not None:
        real, turned = real & (cache_seqlens >= 0), cache_seqlens.long()[:, None] % length
    rows = torch.where(real, rows, N)
    slots_and_spare = torch.cat([state, state.new_zeros(1, length, D)])  # padding uses the spare one
    mine = slots_and_spare[rows]
    if cache_seqlens is not None:  # oldest first
        turn = (torch.arange(length, device=x.device) + turned) % length
        mine = mine.gather(1, turn[..., None].expand_as(mine))
    everything = torch.cat([mine, x], 1)
    before = everything[:, length - S : length]
    y, _ = causal_conv1d(x, weight, bias, None, None, None, before, silu, dilation)
    after = everything[:, T:]
    if cache_seqlens is not None:
        turn = (torch.arange(length, device=x.device) - turned - T) % length
        after = after.gather(1, turn[..., None].expand_as(after))
    y = torch.where(real[:, None, None], y, 0)
    return y, slots_and_spare.index_put((rows,), after)[:N]


def short_conv(x: Tensor, gamma: Tensor, weight: Tensor, norm_eps: float, dilation: int, residual: bool) -> Tensor:
    """silu(conv(rmsnorm(x))), + x with `residual`: x [B, L, n, D], gamma [n, D], weight [nD, W]

    rmsnorm(x) = gamma · x · rsqrt(mean(x²) + norm_eps), of each stream over its D channels
    """
    with without_autocast(x):
        wide = accumulate(x)  # once, so that the parts of dx are added before they are rounded
        inv_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
        normed = (wide * inv_rms * gamma.to(wide.dtype)).flatten(-2)
        added = wide.flatten(-2) if residual else None
        y, _ = causal_conv1d(normed, weight, None, added, None, None, None, True, dilation)
        return y.view_as(x).to(x.dtype)
