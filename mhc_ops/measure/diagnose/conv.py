"""The causal convolution as named steps, forward and backward, and what may be wrong in them.

What lies under the taps is a table: rows[k, b, t] is the row of `everything` (nothing, the states, the tokens) that tap
k of token t reads. A fault of the reading (a missing halo, a leak between sequences) is another table.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...conv import reference
from ...core.steps import Values, renamed, steps_of, total
from ..cases import Tensors
from ..conv_cases import ConvCase
from .explain import Hypothesis, Model, always, block_ends, ones, partial_reads
from .outputs import layout

PAD_SLOT = -1


def _z(everything: Tensor, rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return sum((everything[row] * weight[:, k] for k, row in enumerate(rows)), bias)


def _g(dy: Tensor, real: Tensor, everything: Tensor, rows: Tensor, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    """The gradient of z, which is computed once more."""
    z = _z(everything, rows, weight, bias)
    slope = torch.sigmoid(z) * (1 + z * torch.sigmoid(-z)) if silu else torch.ones_like(z)
    return torch.where(real, dy, 0) * slope


def _back(gradient: Tensor, rows: Tensor, count: int) -> Tensor:
    """The gradient of everything, which has that many rows, from that of everything[rows]."""
    flat = gradient.flatten(0, -2)
    return flat.new_zeros(count, flat.shape[-1]).index_add(0, rows.flatten(), flat)


CONV = (
    *steps_of(
        everything=lambda state, x: torch.cat([x.new_zeros(1, x.shape[-1]), state.flatten(0, 1), x.flatten(0, 1)]),
        z=_z,
        convolved=lambda z, silu, real: torch.where(real, reference.silu_of(z) if silu else z, 0),
        added=lambda residual, real: torch.where(real, residual, 0),
    ),
    total("y", "convolved", "added"),
    *steps_of(
        final_state=lambda everything, final_rows: everything[final_rows].transpose(1, 2),
        g=_g,
        dweight=lambda everything, rows, g: torch.stack([(everything[row] * g).sum((0, 1)) for row in rows], -1),
        dbias=lambda g: g.sum((0, 1)),
        dresidual=lambda dy, real: torch.where(real, dy, 0),
        back_taps=lambda weight, g, rows, count: _back(torch.stack([g * tap for tap in weight.T]), rows, count),
        back_final=lambda dfinal_state, final_rows, count: _back(dfinal_state.transpose(1, 2), final_rows, count),
        through_taps=lambda back_taps, x: back_taps[-x.shape[0] * x.shape[1] :].view_as(x),
        through_final=lambda back_final, x: back_final[-x.shape[0] * x.shape[1] :].view_as(x),
        dinitial_state=lambda back_taps, back_final, state: (
            (back_taps + back_final)[1 : 1 + state.shape[0] * state.shape[1]].view_as(state).transpose(1, 2)
        ),
    ),
    total("dx", "through_taps", "through_final"),
)
NORM = steps_of(
    inv_rms=lambda x, norm_eps: torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps),
    normed=lambda x, inv_rms, gamma: (x * inv_rms * gamma).flatten(-2),
)
NORM_BACKWARD = steps_of(
    dgamma=lambda dnormed, x, inv_rms: (dnormed.view_as(x) * x * inv_rms).sum((0, 1)),
    through_gamma=lambda dnormed, x, gamma, inv_rms: dnormed.view_as(x) * gamma * inv_rms,
    through_norm=lambda dnormed, gamma, x, inv_rms: (
        -(dnormed.view_as(x) * gamma * x).mean(-1, keepdim=True) * inv_rms**3 * x
    ),
    through_residual=lambda dresidual, x: dresidual.view_as(x),
)
OF_NORM = ("through_gamma", "through_norm", "through_residual")
WITHOUT_BIAS_OR_STATE = [step for step in CONV if step.name not in ("dbias", "final_state")]
SHORT_CONV = (*NORM, *renamed(WITHOUT_BIAS_OR_STATE, x="normed", dx="dnormed"), *NORM_BACKWARD)
UPDATE = steps_of(
    both=reference.causal_conv1d_update, y=lambda both: both[0], conv_state=lambda both: both[1].transpose(1, 2)
)
WORDS = {
    "convolved": "the convolution",
    "added": "the residual",
    "everything": "x",
    "through_taps": "what flows back through the taps",
    "through_final": "what flows back from final_state",
    "through_gamma": "gamma ⊙ dnormed · inv_rms",
    "through_norm": "the norm's term",
    "through_residual": "the residual",
    "back_taps": "dx",
}
CUT = ("everything", "g", "dy", "weight")


def model(case: ConvCase, tensors: Tensors, cotangents: Tensors) -> Model:
    if case.update:
        return _update(case, tensors)
    x, steps = tensors["x"].flatten(2), CONV
    inputs: Values = {"bias": x.new_zeros(x.shape[-1]), "residual": torch.zeros_like(x), **tensors}
    inputs |= {"silu": case.silu or case.n > 0, "norm_eps": case.norm_eps, "dy": cotangents["y"].flatten(2)}
    inputs["rows"], inputs["final_rows"], inputs["real"] = rows_read(case, tensors)
    no_state = x.new_zeros(*inputs["final_rows"].shape, x.shape[-1]).transpose(1, 2)
    inputs["count"] = 1 + no_state[:, 0].numel() + x[..., 0].numel()
    inputs["state"] = tensors.get("initial_state", no_state).transpose(1, 2)
    inputs["dfinal_state"] = cotangents.get("final_state", no_state)
    if case.n:
        inputs["residual"] = x if case.residual else torch.zeros_like(x)
        steps = (*SHORT_CONV, total("dx", *OF_NORM[: 2 + case.residual]))
    return Model(steps, inputs, {}, WORDS)


def _update(case: ConvCase, tensors: Tensors) -> Model:
    optional = ("bias", "cache_seqlens")
    inputs: Values = {**dict.fromkeys(optional), **tensors, "silu": case.silu, "dilation": case.dilation}
    inputs |= {"state": inputs.pop("conv_state").transpose(1, 2), "slots": tensors.get("conv_state_indices")}
    inputs |= {"pad_slot_id": PAD_SLOT, "x": tensors["x"] if tensors["x"].dim() == 3 else tensors["x"][:, None]}
    return Model(UPDATE, inputs, {}, {})


def rows_read(
    case: ConvCase, tensors: Tensors, dilation: int = 0, bounded: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """rows [W, B, L], those of the final state [N, S], and which tokens are no padding: what the reference reads where
    every row holds its own number. bounded: whether sequences and states end where they do.
    """
    (B, L), W, S = tensors["x"].shape[:2], case.W, (case.W - 1) * case.dilation
    bounds = tensors.get("cu_seqlens")
    N, lag = B if bounds is None else len(bounds) - 1, (W - 1) * (dilation or case.dilation)
    numbers = torch.arange(1 + N * S + B * L, dtype=torch.float64, device=tensors["x"].device)
    state, tokens = numbers[1 : 1 + N * S].view(N, S, 1), numbers[1 + N * S :].view(B, L, 1)
    if not bounded:
        taps, last, real = reference.dense(tokens, None, None, W, case.dilation)
    elif bounds is None:
        taps, last, real = reference.dense(
            tokens, state[:, S - lag :], tensors.get("seq_idx"), W, dilation or case.dilation
        )
    else:
        taps, last, real = reference.packed(tokens, state[:, S - lag :], bounds, W, dilation or case.dilation)
    real = torch.ones(B, L, 1, dtype=torch.bool, device=tokens.device) if real is None else real
    return torch.stack(taps)[..., 0].long(), last[..., 0].long(), real


def hypotheses(case: ConvCase, model: Model, right: Values) -> Iterator[Hypothesis]:
    """The order is the order of preference where two explain an output equally well."""
    if case.update:
        yield from _hypotheses_of_update(right)
        return
    for sentence, table in _tables(case, right):
        if not torch.equal(table, right["rows"]):
            for where, name in {
                "": "",
                " in y": " for z",
                " in dweight": " for dweight",
                " in dx": " for back_taps",
            }.items():
                yield Hypothesis(sentence.format(where), {f"rows{name}": always(table)})
    if right["silu"]:
        yield Hypothesis("the activation is left out", {"silu": always(False)})
        yield Hypothesis("the activation is left out in y", {"silu for convolved": always(False)})
        yield Hypothesis("the derivative of SiLU is left out", {"silu for g": always(False)})
    if bool(right["bias"].any()):
        nothing = always(torch.zeros_like(right["bias"]))
        yield Hypothesis("the bias is left out", {"bias": nothing})
        yield Hypothesis("the bias is left out in y", {"bias for z": nothing})
    if "initial_state" in right:
        kept = right["final_rows"]
        fresh = torch.where(kept <= right["state"][..., 0].numel(), 0, kept)
        yield Hypothesis("final_state does not take over the initial state", {"final_rows": always(fresh)})
    if case.n:
        yield Hypothesis("gamma is left out", {"gamma": ones})
        yield Hypothesis("norm_eps is left out", {"norm_eps": always(0.0)})
        sentence = "the norm is taken over all streams, not over each"
        yield Hypothesis(sentence, {"inv_rms": lambda inv_rms, v: _over_streams(inv_rms)})
    for name in CUT:
        yield from partial_reads(model, name, layout(case, name, right[name].shape))


def _over_streams(inv_rms: Tensor) -> Tensor:
    return (inv_rms**-2).mean(-2, keepdim=True).rsqrt().expand_as(inv_rms)


def _tables(case: ConvCase, right: Values) -> Iterator[tuple[str, Tensor]]:
    """Sentences, with a gap for where, and the rows that each tap then reads."""
    rows, L = right["rows"], right["rows"].shape[-1]
    tokens_from = 1 + right["state"][..., 0].numel()
    yield "the taps are reversed{}", rows.flip(0)
    yield "the initial state is not read{}", torch.where(rows < tokens_from, 0, rows)
    leak = rows_read(case, right, bounded=False)[0]
    yield "taps{} reach over the boundary into the sequence before", torch.where(leak < tokens_from, rows, leak)
    yield "dilation is ignored{}", rows_read(case, right, dilation=1)[0]
    for k in range(len(rows)):
        others = torch.arange(len(rows), device=rows.device)[:, None, None] != k
        yield f"tap {k} is left out{{}}", torch.where(others, rows, 0)
    t = torch.arange(L, device=rows.device)
    for block in block_ends(L, smallest=2):
        halo = (rows >= tokens_from) & ((rows - tokens_from) % L // block != t // block)
        sentence = f"the halo is missing{{}}: tokens before each block of {block} are read as zero"
        yield sentence, torch.where(halo, 0, rows)


def _hypotheses_of_update(right: Values) -> Iterator[Hypothesis]:
    yield Hypothesis("the taps are reversed", {"weight": lambda weight, v: weight.flip(1)})
    yield Hypothesis("the activation is left out", {"silu": always(False)})
    yield Hypothesis("the state is not shifted", {"conv_state": lambda after, v: v["state"].transpose(1, 2)})
    if right["bias"] is not None:
        yield Hypothesis("the bias is left out", {"bias": always(None)})
    if right["cache_seqlens"] is not None:
        first = always(torch.zeros_like(right["cache_seqlens"]))
        yield Hypothesis("the ring is read from its first entry, not from cache_seqlens on", {"cache_seqlens": first})
    if right["slots"] is not None:
        yield Hypothesis("conv_state_indices is ignored", {"slots": always(None)})
