"""What can be wrong in a convolution: each fault as a sentence and the steps of conv_model.py that it changes.

The order is the order of preference where two faults explain an output equally well.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..cases import Tensors
from .conv_model import Places
from .reads import partial_reads
from .trace import Edit, Hypothesis, Trace, Values, always, cuts

AXES = {"x": {-1: "channel"}, "g": {0: "sequence", 1: "token"}, "dy": {1: "token"}, "weight": {0: "channel"}}
# where rows are read: the words, and the steps that then read as they should
USES = (("", ()), (" in y", ("dweight", "dx")), (" in dweight", ()), (" in dx", ()))


def hypotheses(trace: Trace, tensors: Tensors) -> list[Hypothesis]:
    """For an op whose right values these are."""
    values = trace.values
    every = (*_readings(values), *_activation(values, tensors), *_states(values), *_norm())
    return [h for h in every if set(h.edits) <= set(values)] + partial_reads(trace, AXES, ())


def _readings(values: Values) -> Iterator[Hypothesis]:
    """Other tables of rows, wherever they are used."""
    W, B, L = values["rows"].shape
    places: Places = values["places"]
    step = places.S // max(1, W - 1)  # the dilation
    tokens_from = 1 + places.N * places.S
    t = torch.arange(L, device=places.time.device)

    def tables() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
        yield "the taps are reversed{}", lambda rows: rows.flip(0)
        yield "the initial state is not read{}", lambda rows: torch.where(rows < tokens_from, 0, rows)
        open_places = replace(places, time=t.expand(B, L), ids=None)
        leak = torch.stack([open_places.under((W - 1 - k) * step) for k in range(W)])
        leak = torch.where(leak < tokens_from, values["rows"], leak)
        yield "taps reach over the boundary into the sequence before{}", lambda rows: leak
        dense = torch.stack([places.under(W - 1 - k) for k in range(W)])
        yield "dilation is ignored{}", lambda rows: dense
        for words, by in (("late", 1), ("early", -1)):
            moved = torch.stack([places.under((W - 1 - k) * step + by) for k in range(W)])
            yield f"every tap reads one token too {words}{{}}", lambda rows, moved=moved: moved
        for k in range(W):
            only = (torch.arange(W, device=t.device) == k)[:, None, None]
            yield f"tap {k} is left out{{}}", lambda rows, only=only: torch.where(only, 0, rows)
        for block in cuts(L, smallest=2):
            same = _token(values["rows"], tokens_from, L) // block == t // block
            missing = (values["rows"] >= tokens_from) & ~same
            sentence = f"the halo is missing{{}}: tokens before each block of {block} are read as zero"
            yield sentence, lambda rows, missing=missing: torch.where(missing, 0, rows)

    for sentence, change in tables():
        wrong = change(values["rows"])
        if torch.equal(wrong, values["rows"]):
            continue
        for words, right in USES:
            name = f"rows for{words[3:]}" if words and not right else "rows"
            edits = {name: always(wrong)}
            edits |= {f"rows for {step}": always(values["rows"]) for step in right}
            edits |= {"slope": always(values["slope"])} if right and "slope" in values else {}
            yield Hypothesis(sentence.format(words), edits)


def _token(rows: Tensor, tokens_from: int, L: int) -> Tensor:
    return (rows - tokens_from) % L


def _activation(values: Values, tensors: Tensors) -> Iterator[Hypothesis]:
    """The activation, its derivative, what is added before and after."""
    bias = tensors.get("bias", torch.zeros(()))
    silu = lambda z: z * torch.sigmoid(z)  # noqa: E731
    flat: Edit = lambda slope, v: torch.ones_like(slope)  # noqa: E731
    yield Hypothesis("the activation is left out", {"activated": lambda y, v: v["z"], "slope": flat})
    yield Hypothesis("the activation is left out in y", {"activated": lambda y, v: v["z"]})
    yield Hypothesis("the derivative of SiLU is left out", {"slope": flat})
    yield Hypothesis("the derivative of SiLU is taken as σ(z)", {"slope": lambda slope, v: torch.sigmoid(v["z"])})
    for words, step in (("dweight", "g for dweight"), ("dbias", "g for dbias")):
        plain: Edit = lambda g, v: g / v["slope"]  # noqa: E731
        yield Hypothesis(f"the derivative of SiLU is left out of {words}", {step: plain})
    yield Hypothesis("the derivative of SiLU is counted in dresidual", {"dy for dresidual": lambda dy, v: v["g"]})
    if "bias" in tensors:
        without = lambda z: torch.sigmoid(z - bias) * (1 + (z - bias) * torch.sigmoid(bias - z))  # noqa: E731
        yield Hypothesis("the bias is left out", {"z": lambda z, v: z - bias})
        right: Edit = lambda slope, v: _slope(v["z"] + bias)  # noqa: E731
        yield Hypothesis("the bias is left out in y", {"z": lambda z, v: z - bias, "slope": right})
        yield Hypothesis("the bias is left out of the z of the derivative", {"slope": lambda s, v: without(v["z"])})
        yield Hypothesis("the bias is added after the activation", {"activated": lambda y, v: silu(v["z"] - bias) + bias})
    if "residual" in tensors:
        added: Edit = lambda y, v: silu(v["z"] + tensors["residual"]) - tensors["residual"]  # noqa: E731
        yield Hypothesis("the residual is added before the activation", {"activated": added})
    if bool((values["places"].sequence < 0).any()):
        everywhere: Edit = lambda real, v: torch.ones_like(real)  # noqa: E731
        yield Hypothesis("gradients at padding are counted", {"real for dy": everywhere})


def _slope(z: Tensor) -> Tensor:
    return torch.sigmoid(z) * (1 + z * torch.sigmoid(-z))


def _states(values: Values) -> Iterator[Hypothesis]:
    """What is kept for the next call."""
    first = 1 + values["places"].N * values["places"].S
    ahead: Edit = lambda rows, v: torch.where(rows > first, rows - 1, 0)  # noqa: E731
    yield Hypothesis("final_state is one token behind", {"rows of final_state": ahead})
    fresh: Edit = lambda rows, v: torch.where(rows < first, 0, rows)  # noqa: E731
    yield Hypothesis("final_state does not take over the initial state", {"rows of final_state": fresh})
    yield Hypothesis("the state is not shifted", {"state after": lambda after, v: v["state before"]})
    straight: Edit = lambda turn, v: torch.arange(turn.shape[1], device=turn.device).expand_as(turn)  # noqa: E731
    yield Hypothesis("the ring is read from its first entry, not from cache_seqlens on", {"turn": straight})
    in_order: Edit = lambda slots, v: torch.arange(len(slots), device=slots.device)  # noqa: E731
    yield Hypothesis("conv_state_indices is ignored", {"slots": in_order})


def _norm() -> Iterator[Hypothesis]:
    """ShortConv's RMSNorm."""
    yield Hypothesis("gamma is left out", {"gamma": lambda gamma, v: torch.ones_like(gamma)})
    yield Hypothesis("norm_eps is left out", {"norm_eps": lambda eps, v: 0.0})
    over_streams: Edit = lambda square, v: square.mean(-2, keepdim=True).expand_as(square)  # noqa: E731
    yield Hypothesis("the norm is taken over all streams, not over each", {"mean square": over_streams})
    plain: Edit = lambda inv_rms, v: torch.ones_like(inv_rms)  # noqa: E731
    yield Hypothesis("the norm is left out", {"inv_rms": plain})
    yield Hypothesis("dgamma lacks the factor inv_rms", {"inv_rms for dgamma": plain})
