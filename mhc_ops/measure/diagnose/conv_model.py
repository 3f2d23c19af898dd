"""The causal convolution step by step in fp64, forward and backward; each step has a name for hypotheses.

What lies under the taps is a table of rows: rows[k, b, t] is the row of `everything` (nothing, the states, the tokens)
that tap k of token t reads. A fault of the reading (a missing halo, a leak between sequences) is another table.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cases import Tensors
from ..conv_cases import ConvCase
from .trace import Trace

NORM_EPS = 1e-5  # the default of short_conv


@dataclass(frozen=True)
class Places:
    """Which tokens are seen by which, and where they lie in `everything`."""

    time: Tensor  # [B, L] of a token since the begin of its sequence
    sequence: Tensor  # [B, L] the state that comes before it; -1 at padding
    ids: Tensor | None  # [B, L] seq_idx
    N: int  # states
    S: int  # inputs in one

    def under(self, lag: int) -> Tensor:
        """Rows [B, L] of everything, `lag` tokens back (negative: ahead); row 0 is nothing."""
        B, L = self.time.shape
        token = torch.arange(L, device=self.time.device) - lag
        batch = torch.arange(B, device=self.time.device)[:, None]
        in_state = 1 + self.sequence * self.S + self.S + self.time - lag
        in_tokens = 1 + self.N * self.S + batch * L + token
        seen = (self.sequence >= 0) & (self.time - lag >= -self.S) & (token < L)
        if self.ids is not None:
            seen = seen & (self.ids == self.ids[:, token.clamp(0, L - 1)])
        return torch.where(seen, torch.where(self.time >= lag, in_tokens, in_state), 0)


def places_of(tensors: Tensors, S: int) -> Places:
    (B, L), device = tensors["x"].shape[:2], tensors["x"].device
    t = torch.arange(L, device=device).expand(B, L)
    batch = torch.arange(B, device=device)[:, None].expand(B, L)
    if "cu_seqlens" in tensors:
        bounds = tensors["cu_seqlens"].long()
        N = len(bounds) - 1
        sequence = torch.searchsorted(bounds, t.contiguous(), right=True) - 1
        sequence = torch.where(sequence < N, sequence, -1)
        return Places(t - torch.where(sequence >= 0, bounds[sequence], t), sequence, None, N, S)
    if "seq_idx" in tensors:
        ids = tensors["seq_idx"]
        return Places(t, torch.where(ids >= 0, batch, -1), ids, B, S)
    return Places(t, batch, None, B, S)


def silu_of(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z)


def slope_of(z: Tensor) -> Tensor:
    """The derivative of SiLU."""
    return torch.sigmoid(z) * (1 + z * torch.sigmoid(-z))


def conv(tensors: Tensors, cotangents: Tensors, at: Trace, silu: bool, dilation: int, output: str = "y") -> None:
    """Forward and backward of x [B, L, D] with states [N, S, D]; dx is left as terms by tap."""
    x, weight = tensors["x"], tensors["weight"]
    (B, L, D), W = x.shape, weight.shape[1]
    S = (W - 1) * dilation
    places = at("places", places_of(tensors, S))
    rows = at("rows", torch.stack([places.under((W - 1 - k) * dilation) for k in range(W)]))
    state = tensors.get("initial_state", x.new_zeros(places.N, S, D))
    nothing = x.new_zeros(1, D)
    read = at("x for y", x)
    real = (places.sequence >= 0)[..., None]

    everything = torch.cat([nothing, state.flatten(0, 1), read.flatten(0, 1)])
    z = sum(everything[rows[k]] * weight[:, k] for k in range(W))
    z = at("z", z + tensors.get("bias", x.new_zeros(())))
    y = at("activated", silu_of(z) if at("silu", silu) else z)
    terms = {"the convolution": torch.where(real, y, 0)}
    if "residual" in tensors:
        terms["the residual"] = torch.where(real, tensors["residual"], 0)
    at.sum(output, terms)
    if "final_state" in cotangents:
        last = at("rows of final_state", last_rows(places, tensors, L))
        at("final_state", everything[last].transpose(1, 2))
    if output not in cotangents:
        return

    dy = torch.where(at("real for dy", real), cotangents[output], 0)
    g = at("g", dy * at("slope", slope_of(z) if silu else torch.ones_like(z)))
    everything = torch.cat([nothing, state.flatten(0, 1), at("x for dweight", x).flatten(0, 1)])
    back, g_weight = at("rows for dweight", rows), at("g for dweight", g)
    at("dweight", torch.stack([(everything[back[k]] * g_weight).sum((0, 1)) for k in range(W)], -1))
    if "bias" in tensors:
        at("dbias", at("g for dbias", g).sum((0, 1)))
    if "residual" in tensors:
        at("dresidual", at("dy for dresidual", dy))
    back = at("rows for dx", rows)
    terms, states = {}, torch.zeros_like(state).flatten(0, 1)
    taps = at("weight for dx", weight)
    for k in range(W):
        flowed = flow_back(taps[:, k] * g, back[k], len(everything))
        terms[f"tap {k}"] = flowed[1 + places.N * S :].view(B, L, D)
        states = states + flowed[1 : 1 + places.N * S]
    if "final_state" in cotangents:
        flowed = flow_back(cotangents["final_state"].transpose(1, 2), last, len(everything))
        terms["what flows back from final_state"] = flowed[1 + places.N * S :].view(B, L, D)
        states = states + flowed[1 : 1 + places.N * S]
    at.sum("dx", terms)
    at("dinitial_state", states.view_as(state).transpose(1, 2))


def flow_back(gradient: Tensor, rows: Tensor, count: int) -> Tensor:
    """The gradient of everything[rows]. A row is read once, but for row 0, whose gradient nobody wants."""
    flowed = gradient.new_zeros(count, gradient.shape[-1])
    flowed[rows.flatten()] = gradient.flatten(0, 1)
    return flowed


def last_rows(places: Places, tensors: Tensors, L: int) -> Tensor:
    """Rows [N, S] of the last S inputs of each sequence: tokens, and before its begin its state."""
    number = torch.arange(places.N, device=places.time.device)[:, None]
    begin, end, batch = torch.zeros_like(number), torch.full_like(number, L), number
    if "cu_seqlens" in tensors:
        bounds = tensors["cu_seqlens"].long()[:, None]
        begin, end, batch = bounds[:-1], bounds[1:], torch.zeros_like(number)
    time = end - places.S + torch.arange(places.S, device=number.device)
    in_tokens = 1 + places.N * places.S + batch * L + time
    return torch.where(time >= begin, in_tokens, 1 + number * places.S + places.S + time - begin)


def causal_conv1d(case: ConvCase) -> Callable[[Tensors, Tensors, Trace], None]:
    def model(tensors: Tensors, cotangents: Tensors, at: Trace) -> None:
        inner = dict(tensors)
        if "initial_state" in tensors:
            inner["initial_state"] = tensors["initial_state"].transpose(1, 2)
        conv(inner, cotangents, at, case.silu, case.dilation)

    return model


def short_conv(case: ConvCase) -> Callable[[Tensors, Tensors, Trace], None]:
    """The norm before, and its gradient after."""

    def model(tensors: Tensors, cotangents: Tensors, at: Trace) -> None:
        x, gamma = tensors["x"], at("gamma", tensors["gamma"])
        D = x.shape[-1]
        mean_square = x.square().mean(-1, keepdim=True)
        inv_rms = at("inv_rms", torch.rsqrt(at("mean square", mean_square) + at("norm_eps", NORM_EPS)))
        normed = at("normed", x * inv_rms * gamma)
        inner = {"x": normed.flatten(-2), "weight": tensors["weight"]}
        if case.residual:
            inner["residual"] = at("residual", x).flatten(-2)
        wide = {"y": cotangents["y"].flatten(-2)}
        inside = Trace(at.edits)
        conv(inner, wide, inside, silu=True, dilation=case.dilation)
        dnormed = inside.values["dx"].view_as(x)
        own = ("dx", "dresidual", "dy for dresidual")  # here they have another meaning
        at.values |= {name: value for name, value in inside.values.items() if name.split(":")[0] not in own}
        at.values["y"] = at.values["y"].view_as(x)
        at("dgamma", (dnormed * x * at("inv_rms for dgamma", inv_rms)).sum((0, 1)))
        inner_product = (dnormed * gamma * x).sum(-1, keepdim=True)
        terms = {
            "gamma ⊙ dnormed · inv_rms": dnormed * gamma * inv_rms,
            "the norm's term": -inner_product * inv_rms**3 / D * x,
        }
        at.sum("dx", {**terms, **({"the residual": cotangents["y"]} if case.residual else {})})

    return model


def causal_conv1d_update(case: ConvCase) -> Callable[[Tensors, Tensors, Trace], None]:
    """Decoding: the state, oldest first, stands before the tokens."""

    def model(tensors: Tensors, cotangents: Tensors, at: Trace) -> None:
        x, state = tensors["x"], tensors["conv_state"].transpose(1, 2)
        tokens = x if x.dim() == 3 else x[:, None]
        (B, T, _), length = tokens.shape, state.shape[1]
        S = (tensors["weight"].shape[1] - 1) * case.dilation
        batch, steps = torch.arange(B, device=x.device), torch.arange(length, device=x.device)
        slot, turn = batch, steps.expand(B, length)
        if "conv_state_indices" in tensors:
            slot = at("slots", tensors["conv_state_indices"].long())
        if "cache_seqlens" in tensors:
            turn = at("turn", (steps + tensors["cache_seqlens"].long()[:, None]) % length)
        real = (slot != -1)[:, None, None]
        mine = at("state before", state[slot.clamp(min=0)[:, None], turn])
        before = mine[:, length - S :]
        inner = {name: tensor for name, tensor in tensors.items() if name in ("weight", "bias")}
        conv({"x": tokens, "initial_state": before, **inner}, {}, at, case.silu, case.dilation, "y of a token")
        at("y", torch.where(real, at.values["y of a token"], 0).view_as(x))
        after = at("state after", torch.cat([mine, tokens], 1)[:, T:])
        new = state.clone()
        if "cache_seqlens" in tensors:
            back = (steps - tensors["cache_seqlens"].long()[:, None] - T) % length
            after = after.gather(1, back[..., None].expand_as(after))
        new[slot[slot != -1]] = after[slot != -1]
        at("conv_state", new.transpose(1, 2))

    return model


MODELS = {"causal_conv1d": causal_conv1d, "causal_conv1d_update": causal_conv1d_update, "short_conv": short_conv}
