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
READ_IN_BLOCKS = ("everything", "g", "dy", "weight")


def model(case: ConvCase, tensors: Tensors, cotangents: Tensors) -> Model:
    """A decoding step has no steps: where it is wrong has to do."""
    if case.update:
        return Model((), {}, {}, {})
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


def rows_read(case: ConvCase, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """rows [W, B, L], those of the final state [N, S], and which tokens are no padding: what the reference reads where
    every row holds its own number.
    """
    (B, L), W, S = tensors["x"].shape[:2], case.W, (case.W - 1) * case.dilation
    bounds, device = tensors.get("cu_seqlens"), tensors["x"].device
    N = B if bounds is None else len(bounds) - 1
    numbers = torch.arange(1 + N * S + B * L, dtype=torch.float64, device=device)
    state, tokens = numbers[1 : 1 + N * S].view(N, S, 1), numbers[1 + N * S :].view(B, L, 1)
    if bounds is None:
        taps, last, real = reference.dense(tokens, state, tensors.get("seq_idx"), W, case.dilation)
    else:
        taps, last, real = reference.packed(tokens, state, bounds, W, case.dilation)
    real = torch.ones(B, L, 1, dtype=torch.bool, device=device) if real is None else real
    return torch.stack(taps)[..., 0].long(), last[..., 0].long(), real


def hypotheses(case: ConvCase, model: Model, right: Values) -> Iterator[Hypothesis]:
    """The order is the order of preference where two explain an output equally well."""
    if case.update:
        return
    for sentence, table in _tables(case, right):
        if not torch.equal(table, right["rows"]):
            for where, reader in {"y": "z", "dweight": "dweight", "dx": "back_taps"}.items():
                yield Hypothesis(sentence.format(f" in {where}"), {f"rows for {reader}": always(table)})
            yield Hypothesis(sentence.format(""), {"rows": always(table)})
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
    yield Hypothesis("gamma is left out", {"gamma": ones})
    for name in READ_IN_BLOCKS:
        yield from partial_reads(model, name, layout(case, name, right[name].shape))


def _tables(case: ConvCase, right: Values) -> Iterator[tuple[str, Tensor]]:
    """Sentences, with a gap for where, and the rows that each tap then reads."""
    rows, tokens_from = right["rows"], 1 + right["state"][..., 0].numel()
    W, _, L = rows.shape
    k, b, t = torch.meshgrid(*(torch.arange(size, device=rows.device) for size in rows.shape), indexing="ij")
    read = t - (W - 1 - k) * case.dilation
    yield "the taps are reversed{}", rows.flip(0)
    yield "the initial state is not read{}", torch.where(rows < tokens_from, 0, rows)
    leak = torch.where(read < 0, rows, tokens_from + b * L + read)
    yield "taps{} reach over the boundary into the sequence before", leak
    for block in block_ends(L, smallest=2):
        halo = (rows >= tokens_from) & (read // block != t // block)
        sentence = f"the halo is missing{{}}: tokens before each block of {block} are read as zero"
        yield sentence, torch.where(halo, 0, rows)
