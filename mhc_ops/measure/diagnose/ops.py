"""The ops as named steps, and what may be wrong in them.

Only the forward is written down; the terms of a gradient follow from it (core/steps.py): "dx via h_mix" is what dx gets
from the step h_mix. A hypothesis is a sentence and the values that are then others, by their names: "h_mix", "dh_mix",
"dx via h_mix", or what one step reads: "gamma for h_mix".
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...conv import reference as conv
from ...core import steps
from ...core.steps import Change, Computation, Step, Steps, Values, renamed, steps_of, total
from ...mhc import manual
from ...mhc import reference as mhc
from ...mhc.options import DEFAULTS
from ..accuracy import Cotangents
from ..cases import Case, Tensors
from ..conv_cases import AnyCase, ConvCase
from .outputs import BLOCKED, layout, words_of

Hypothesis = tuple[str, Mapping[str, Change]]  # a sentence, and what is then instead of which values
SMALLEST_BLOCK = 8

# mHC, with the maps of mhc/manual.py. Of a layer with a norm, h_read is h_in before it.
PROJECT = (
    *steps_of(
        inv_rms=lambda x, norm_eps: torch.rsqrt(x.square().mean((-2, -1)) + norm_eps),
        h_mix=lambda x, gamma, phi: (x.flatten(-2) * gamma.flatten()) @ phi.T,
        alphas=lambda alpha, section_of_row: alpha[section_of_row],
    ),
    *manual.PRE_MAPS,
)
MAPS = steps_of(
    h_post=lambda z, n, post_mult: post_mult * torch.sigmoid(z[..., n : 2 * n]),
    logits=lambda z, n: z[..., 2 * n :].unflatten(-1, (n, n)),
)
SINKHORN = steps_of(
    h_res=lambda logits, sinkhorn_iters, sinkhorn_eps: mhc.sinkhorn(logits, sinkhorn_iters, sinkhorn_eps)
)
READ = steps_of(h_in=lambda h_pre, x: (h_pre[..., None] * x).sum(-2))
WRITE = steps_of(
    written=lambda h_post, h_out: h_post[..., None] * h_out[..., None, :], mixed=lambda h_res, x: h_res.mT @ x
)
LAYER_NORM = steps_of(
    r=lambda h_read, layer_norm_eps: torch.rsqrt(h_read.square().mean(-1, keepdim=True) + layer_norm_eps),
    h_in=lambda h_read, r, layer_norm_weight: h_read * r * layer_norm_weight,
)
PRE, POST = (*PROJECT, *MAPS, *SINKHORN, *READ), (*WRITE, total("x_next", "written", "mixed"))
SHIFTED_PRE = (*PROJECT, *MAPS, *SINKHORN, *renamed(READ, h_pre="read"))
IDENTITY_PRE = (*PROJECT, *MAPS[:1], *READ)
IDENTITY_POST = (*WRITE[:1], *steps_of(kept=lambda x: x), total("x_next", "written", "kept"))
# mhc_post_pre and mhc_next have two of some names: "h_post before" is the post's. Their pre reads x_next as it was
# stored, or as it is where nothing was.
BEFORE = {"h_post": "h_post before", "h_res": "h_res before"}
GRADIENTS = {f"d{new}": f"d{name}" for name, new in BEFORE.items()} | {f"d{name}": f"d{name} given" for name in BEFORE}
STORED = steps_of(
    stored=lambda x_next, as_stored: x_next if as_stored is None else x_next + (as_stored - x_next).detach()
)
# mhc_next ends with the post of the next sublayer, which costs nothing. Its backward is two: that of the next sublayer
# ends with dlink, the gradient of x_next; that of the post before begins with dlink as it was stored. x has none.
AFTER = {"x_next": "x_after", **{name: f"{name} after" for name in ("h_out", "written", "mixed", "kept")}}
LINK = steps_of(
    dlink_taken=lambda dlink, dlink_as_stored: dlink if dlink_as_stored is None else dlink_as_stored,
    dx=lambda x: torch.zeros_like(x),
)


def _normed(pre: Steps) -> Steps:
    return (*renamed(pre, h_in="h_read"), *LAYER_NORM)


def _post_pre(pre: Steps, post: Steps = POST) -> Steps:
    return (*renamed(post, **BEFORE), *STORED, *renamed(pre, x="stored"))


def _boundary(pre: Steps, post: Steps = POST) -> Steps:
    return (*_post_pre(pre, post), *renamed(post, x="stored", **AFTER))


MHC: dict[str, Steps] = {
    "sinkhorn": SINKHORN,
    "mhc_post": POST,
    "mhc_forward_pre": renamed((*PROJECT, *MAPS, *READ), logits="h_res"),
    "mhc_head": renamed((*PROJECT, *READ), h_in="out"),
    "mhc_maps": (*PROJECT, *MAPS, *SINKHORN),
    "mhc_read": READ,
    "mhc_shifted_pre": SHIFTED_PRE,
    "mhc_pre identity": IDENTITY_PRE,
    "mhc_post identity": IDENTITY_POST,
    "mhc_next identity": _boundary(IDENTITY_PRE, IDENTITY_POST),
    "mhc_next shifted": _boundary(SHIFTED_PRE),
    "mhc_next shifted normed": _boundary(_normed(SHIFTED_PRE)),
    "mhc_mean": steps_of(out=lambda x: x.mean(-2)),
}
for _norm, _pre in {"": PRE, " normed": _normed(PRE)}.items():
    MHC |= {f"mhc_pre{_norm}": _pre, f"mhc_layer{_norm}": (*_pre, *POST)}
    MHC |= {f"mhc_post_pre{_norm}": _post_pre(_pre), f"mhc_next{_norm}": _boundary(_pre)}

# The convolution; `under` says what lies under each tap, which the final state is, and which tokens are no padding.
CONV = (
    *steps_of(
        taps=lambda x, initial_state, under: torch.stack(under(x, initial_state)[0]),
        final_state=lambda x, initial_state, under: under(x, initial_state)[1].mT,
        tapped=lambda taps, weight: sum(tap * w for tap, w in zip(taps, weight.T)),
        shift=lambda bias, real: bias.expand(*real.shape[:-1], -1),
    ),
    total("z", "tapped", "shift"),
    *steps_of(
        gate=lambda z: torch.sigmoid(z),
        convolved=lambda z, gate, real: torch.where(real, z * gate, 0),
        added=lambda residual, real: torch.where(real, residual, 0),
    ),
    total("y", "convolved", "added"),
)
NORM = steps_of(
    inv_rms=lambda x, norm_eps: torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps),
    normed=lambda x, inv_rms, gamma: (x * inv_rms * gamma).flatten(-2),
)
RESIDUAL = steps_of(residual=lambda x: x.flatten(-2))

WORDS = {
    "written": "h_post ⊗ h_out",
    "mixed": "h_resᵀ x",
    "kept": "x",
    "mixed after": "h_resᵀ x_next",
    "dx via h_mix": "gamma ⊙ phiᵀ dh_mix",
    "dx via inv_rms": "the norm's term",
    "dx via h_in": "h_pre ⊗ dh_in",
    "dx via h_read": "h_pre ⊗ dh_read",
    "dx via mixed": "h_res dx_next",
    "dx via mixed after": "h_res dx_after",
    "convolved": "the convolution",
    "added": "the residual",
    "dx via residual": "the residual",
}
WORDS |= {"stored": "x_next", "shift": "the bias", "gate": "the activation"}
WORDS |= {"h_out after": "h_out", "written after": WORDS["written"], "dstored": "dx_next", "alphas": "alpha"}
# Terms that are sums themselves.
BY_STREAM = (
    *("x for h_in", "stored for h_in", "x for out", "x for mixed", "stored for mixed after"),
    *("dx_next for dh_out via written", "dx_next for dx via mixed", "dx_after for dx via mixed after"),
)
BY_SECTION = ("dx via h_mix", "dx via inv_rms", "dgamma via h_mix")
READ_IN_BLOCKS = (
    *("dh_mix", "dz", "x", "stored", "dx_next", "dx_after", "dh_in", "dh_read", "dout"),
    *("phi", "gamma", "h_out", "h_out after", "h_read", "layer_norm_weight"),
    *("normed", "dy", "weight"),
)
FACTORS = ("gamma", "alphas", "layer_norm_weight", "r", "gate")


def model_of(
    case: AnyCase, tensors: Tensors, cotangents: Cotangents, results: Tensors, dtype: torch.dtype = torch.float64
) -> Computation:
    """results: those that are judged. A decoding step has no steps: where it is wrong has to do."""
    if isinstance(case, ConvCase) and case.update:
        return Computation((), {})
    pairs = zip(case.subject.differentiable, cotangents)
    inputs: Values = {f"cotangent of {name}": torch.zeros_like(results[name]) if c is None else c for name, c in pairs}
    inputs |= tensors
    every, more = _mhc(case, tensors, results) if isinstance(case, Case) else _conv(case, tensors, inputs)
    inputs = more | inputs
    wide = {name: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in inputs.items()}
    return Computation(every, wide)


def _mhc(case: Case, tensors: Tensors, results: Tensors) -> tuple[Steps, Values]:
    """And what the steps read beside what the op is given."""
    op, device = case.subject.name, next(iter(tensors.values())).device
    section_of_row = [k for k, rows in enumerate(case.sections.values()) for _ in rows]
    inputs: Values = {**DEFAULTS._asdict(), "n": case.n, "section_of_row": torch.tensor(section_of_row, device=device)}
    inputs |= {"gamma": torch.ones(case.n, case.D, device=device)}
    forward, wanted, names = MHC[op], set(tensors), {}
    if {"h_post", "phi"} <= wanted:  # a post and the pre behind it
        inputs |= {BEFORE[name]: tensors[name] for name in BEFORE if name in tensors} | {
            "h_out after": tensors["h_out"]
        }
        inputs |= {"as_stored": results.get("x_next"), "dlink_as_stored": results.get("dlink")}
        wanted, names = {BEFORE.get(name, name) for name in tensors}, GRADIENTS
    gradients = _gradients_of_next if "link" in tensors else steps.gradients
    return (*forward, *renamed(gradients(forward, wanted, case.subject.differentiable), **names)), inputs


def _gradients_of_next(forward: Steps, wanted: Collection[str], outputs: Collection[str]) -> Steps:
    end = next(i for i, step in enumerate(forward) if step.name == "stored") + 1
    before, own = forward[:end], forward[end:]
    names = {"dstored": "dlink"} | {f"dstored via {step.name}": f"dx via {step.name}" for step in own}
    of_own = renamed(steps.gradients(own, {*wanted, "stored"}, outputs), **names)
    of_post = steps.gradients(before, set(wanted) - {"x"}, ["x_next"])
    return (*of_own, *LINK, *renamed(of_post, **{"cotangent of x_next": "dlink_taken"}))


def _conv(case: ConvCase, tensors: Tensors, given: Values) -> tuple[Steps, Values]:
    """Without an argument, it is zero."""
    forward, x, bounds = CONV, tensors["x"].flatten(2), tensors.get("cu_seqlens")
    given["cotangent of y"] = given["cotangent of y"].flatten(2)
    if case.n:
        forward = (*NORM, *(RESIDUAL if case.residual else ()), *renamed(CONV, x="normed"))
    absent = {"final_state": "final_state" not in case.subject.outputs, "gate": not (case.silu or case.n)}
    forward = tuple(step for step in forward if not absent.get(step.name))

    def under(x: Tensor, initial_state: Tensor | None) -> conv.Taps:
        state = None if initial_state is None else initial_state.mT
        if bounds is None:
            return conv.dense(x, state, tensors.get("seq_idx"), case.W, case.dilation)
        return conv.packed(x, state, bounds, case.W, case.dilation)

    real = under(x, tensors.get("initial_state"))[2]
    inputs: Values = {"real": torch.ones_like(x[..., :1], dtype=torch.bool) if real is None else real, "under": under}
    inputs |= {"norm_eps": case.norm_eps, "initial_state": None, "gate": torch.ones_like(x)}
    inputs |= {"bias": x.new_zeros(x.shape[-1]), "residual": torch.zeros_like(x)}
    wanted = {name for name, tensor in tensors.items() if tensor.is_floating_point()}
    return (*forward, *steps.gradients(forward, wanted, case.subject.differentiable)), inputs


def terms_of(case: AnyCase, model: Computation, output: str) -> Tensors:
    """What adds up to an output, by its words: its terms, in parts where they are sums; none where it is one."""
    found: Tensors = {}
    for step in model.steps:
        if step.name in model.sums.get(output, (output,)):
            words, right, parts = WORDS.get(step.name, output), model.right[step.name], _parts(case, step)
            found |= {f"{words} of {part}": right - model.value(step.name, parts[part]) for part in parts}
            found |= {} if parts else {words: right}
    return found if len(found) > 1 else {}


def _parts(case: AnyCase, step: Step) -> dict[str, dict[str, Change]]:
    """Of a term that is a sum itself, what leaves out each summand."""
    summed = "dm for dinv_rms via m" if step.name == "dx via inv_rms" else f"{step.reads[-1]} for {step.name}"
    indices: dict[str, Any] = {f"stream {i}": (..., i, slice(None)) for i in range(case.n) if summed in BY_STREAM}
    indices |= {name: (..., rows) for name, rows in case.sections.items() if step.name in BY_SECTION}
    return {part: {summed: steps.at(index, steps.zeros)} for part, index in indices.items()}


# What may be wrong.


def hypotheses(case: AnyCase, model: Computation) -> Iterator[Hypothesis]:
    """The order is the order of preference where two explain an output equally well."""
    if isinstance(case, Case):
        yield from _in_maps(case.sections)
    yield from _left_out(case, model)
    for name in READ_IN_BLOCKS:
        if name in model.right:
            yield from _partial_reads(case, model, name)


def _in_maps(sections: Mapping[str, range]) -> Iterator[Hypothesis]:
    missing: dict[str, tuple[str, Change]] = {
        "inv_rms in z": ("m for z", lambda _, values: values["h_mix"]),
        "inv_rms in dh_mix": ("dh_mix", lambda _, values: values["dm"]),
    }
    for words, (name, change) in missing.items():
        for section, rows in sections.items():
            yield f"the {section} section lacks the factor {words}", {name: steps.at((..., rows), change)}
        yield f"every section lacks the factor {words}", {name: change}


def _left_out(case: AnyCase, model: Computation) -> Iterator[Hypothesis]:
    """A factor of one value, of all gradients or of everything; or a term of a value that is no output."""
    for name in [name for name in FACTORS if name in model.right]:
        readers = _readers(model, name)
        readers["the backward"] = [read for names in readers.values() for read in names if " via " in read]
        for into, names in readers.items():
            if names:
                yield f"{WORDS.get(name, name)} is left out of {into}", dict.fromkeys(names, steps.ones)
    results = {*case.subject.outputs, *(f"d{name}" for name in model.inputs)}  # whose terms are fitted
    for value, terms in model.sums.items():
        for term in terms if value not in results and len(terms) > 1 else ():
            words = WORDS.get(term, term.replace(f"{value} via", "the term via"))
            yield f"{words} is left out of {WORDS.get(value, value)}", {term: steps.zeros}


def _block_ends(size: int) -> list[int]:
    """Where a kernel may stop: after its first block, or before a last one that is not full. Blocks: powers of two."""
    blocks = [1 << k for k in range(SMALLEST_BLOCK.bit_length() - 1, size.bit_length()) if 1 << k < size]
    return sorted({end for block in blocks for end in (block, size // block * block) if end < size})


def _readers(model: Computation, tensor: str) -> dict[str, list[str]]:
    """By the words of what it is read for, and of all of it: what is then read, as a change names it."""
    found: dict[str, list[str]] = {}
    for step in model.steps:
        if tensor in step.reads and not step.is_sum and model.depends(step, tensor):
            into = model.sum_of(step.name)
            found.setdefault(WORDS.get(into, into), []).append(f"{tensor} for {step.name}")
    everything = " and ".join(", ".join(found).rsplit(", ", 1))
    return found | ({everything: [name for names in found.values() for name in names]} if found else {})


def _partial_reads(case: AnyCase, model: Computation, tensor: str) -> Iterator[Hypothesis]:
    """The tensor is read up to some index only, for one of the values that it is read for or for all of them."""
    axes, readers = layout(case, tensor, model.right[tensor].shape), _readers(model, tensor)
    for axis, (word, size) in enumerate(axes.items()):
        ends = _block_ends(size) if word in BLOCKED else range(1, size) if word in ("stream", "sequence") else ()
        for end in ends:
            index = (*[slice(None)] * axis, slice(end, None))
            missing = f"{words_of(list(range(end, size)), size, word)} of {WORDS.get(tensor, tensor)}"
            for into, names in readers.items():
                sentence = f"{missing} {'is' if end == size - 1 else 'are'} read as zero for {into}"
                yield sentence, dict.fromkeys(names, steps.at(index, steps.zeros, tuple(axes.values())))
