"""What can be wrong in a convolution: each fault as a sentence and the steps of conv_model.py that it changes.

The order is the order of preference where two faults explain an output equally well.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..cases import Tensors
from .conv_model import Places, silu_of, slope_of
from .reads import partial_reads
from .trace import Edit, Hypothesis, Trace, Values, always, cuts

AXES = {"x": {-1: "channel"}, "g": {0: "sequence", 1: "token"}, "dy": {1: "token"}, "weight": {0: "channel"}}


def hypotheses(right: Trace, tensors: Tensors) -> list[Hypothesis]:
    """For an op whose right values these are."""
    values = right.values
    every = [
        *_readings(values, tensors),
        *_activation(values),
        *_bias_and_residual(tensors),
        *_states(values),
        *_norm(),
    ]
    return [h for h in every if set(h.edits) <= set(values)] + partial_reads(right, AXES, ())


def _readings(values: Values, tensors: Tensors) -> Iterator[Hypothesis]:
    """Another table of rows: everywhere, in the forward alone, in one gradient alone."""
    rows = values["rows"]
    others: list[str] = [name for name in ("rows for dweight", "rows for dx", "slope") if name in values]
    as_it_should = {name: always(values[name]) for name in others}
    for sentence, table in _tables(rows, values["places"], "initial_state" in tensors or "conv_state" in tensors):
        if not torch.equal(table, rows):
            wrong = always(table)
            yield Hypothesis(sentence.format(""), {"rows": wrong})
            yield Hypothesis(sentence.format(" in y"), {"rows": wrong, **as_it_should})
            yield Hypothesis(sentence.format(" in dweight"), {"rows for dweight": wrong})
            yield Hypothesis(sentence.format(" in dx"), {"rows for dx": wrong})


def _tables(rows: Tensor, places: Places, with_state: bool) -> Iterator[tuple[str, Tensor]]:
    """Sentences, with a place for where, and the rows that each tap then reads."""
    W, B, L = rows.shape
    dilation = places.S // max(1, W - 1)
    lags = [(W - 1 - k) * dilation for k in range(W)]
    tokens_from = 1 + places.N * places.S
    t = torch.arange(L, device=rows.device)

    yield "the taps are reversed{}", rows.flip(0)
    if with_state:
        yield "the initial state is not read{}", torch.where(rows < tokens_from, 0, rows)
    without_bounds = replace(places, time=t.expand(B, L), ids=None)
    leak = torch.stack([without_bounds.under(lag) for lag in lags])
    leak = torch.where(leak < tokens_from, rows, leak)
    yield "taps{} reach over the boundary into the sequence before", leak
    yield "dilation is ignored{}", torch.stack([places.under(W - 1 - k) for k in range(W)])
    yield "every tap{} reads one token too far back", torch.stack([places.under(lag + 1) for lag in lags])
    yield "every tap{} reads one token ahead", torch.stack([places.under(lag - 1) for lag in lags])
    for k in range(W):
        this = (torch.arange(W, device=rows.device) == k)[:, None, None]
        yield f"tap {k} is left out{{}}", torch.where(this, 0, rows)
    for block in cuts(L, smallest=2):
        in_block = (rows - tokens_from) % L // block == t // block
        halo = (rows >= tokens_from) & ~in_block
        sentence = f"the halo is missing{{}}: tokens before each block of {block} are read as zero"
        yield sentence, torch.where(halo, 0, rows)


def _activation(values: Values) -> Iterator[Hypothesis]:
    """SiLU and its derivative."""
    if not values["silu"]:
        sentence = "SiLU is applied although none was asked for"
        yield Hypothesis(sentence, {"activated": lambda y, v: silu_of(y), "slope": lambda slope, v: slope_of(v["z"])})
        return
    yield Hypothesis("the activation is left out", {"activated": lambda y, v: v["z"], "slope": _ones})
    yield Hypothesis("the activation is left out in y", {"activated": lambda y, v: v["z"]})
    yield Hypothesis("the derivative of SiLU is left out", {"slope": _ones})
    yield Hypothesis("the derivative of SiLU is taken as σ(z)", {"slope": lambda slope, v: torch.sigmoid(v["z"])})
    for output in ("dweight", "dbias"):
        sentence = f"the derivative of SiLU is left out of {output}"
        yield Hypothesis(sentence, {f"g for {output}": lambda g, v: g / v["slope"]})
    yield Hypothesis("the derivative of SiLU is counted in dresidual", {"dy for dresidual": lambda dy, v: v["g"]})


def _bias_and_residual(tensors: Tensors) -> Iterator[Hypothesis]:
    """What is added before and after the activation."""
    if "bias" in tensors:
        bias = tensors["bias"]
        yield Hypothesis("the bias is left out", {"z": lambda z, v: z - bias})
        in_y: dict[str, Edit] = {"z": lambda z, v: z - bias, "slope": lambda slope, v: slope_of(v["z"] + bias)}
        yield Hypothesis("the bias is left out in y", in_y)
        sentence = "the bias is left out of the z of the derivative"
        yield Hypothesis(sentence, {"slope": lambda slope, v: slope_of(v["z"] - bias)})
        sentence = "the bias is added after the activation"
        yield Hypothesis(sentence, {"activated": lambda y, v: silu_of(v["z"] - bias) + bias})
    if "residual" in tensors:
        residual = tensors["residual"]
        sentence = "the residual is added before the activation"
        yield Hypothesis(sentence, {"activated": lambda y, v: silu_of(v["z"] + residual) - residual})


def _ones(value: Tensor, values: Values) -> Tensor:
    return torch.ones_like(value)


def _states(values: Values) -> Iterator[Hypothesis]:
    """What is kept for the next call."""
    if "rows of final_state" in values:
        first, kept = 1 + values["places"].N * values["places"].S, values["rows of final_state"]
        behind, fresh = torch.where(kept > first, kept - 1, 0), torch.where(kept < first, 0, kept)
        yield Hypothesis("final_state is one token behind", {"rows of final_state": always(behind)})
        yield Hypothesis("final_state does not take over the initial state", {"rows of final_state": always(fresh)})
    yield Hypothesis("the state is not shifted", {"state after": lambda after, v: v["state before"]})
    sentence = "the ring is read from its first entry, not from cache_seqlens on"
    yield Hypothesis(
        sentence, {"turn": lambda turn, v: torch.arange(turn.shape[1], device=turn.device).expand_as(turn)}
    )
    sentence = "conv_state_indices is ignored"
    yield Hypothesis(sentence, {"slots": lambda slots, v: torch.arange(len(slots), device=slots.device)})


def _norm() -> Iterator[Hypothesis]:
    """ShortConv's RMSNorm."""
    yield Hypothesis("gamma is left out", {"gamma": _ones})
    yield Hypothesis("norm_eps is left out", {"norm_eps": always(0.0)})
    yield Hypothesis(
        "the norm is taken over all streams, not over each",
        {"mean square": lambda square, v: square.mean(-2, keepdim=True).expand_as(square)},
    )
    yield Hypothesis("the norm is left out", {"inv_rms": _ones})
    yield Hypothesis("dgamma lacks the factor inv_rms", {"inv_rms for dgamma": _ones})
