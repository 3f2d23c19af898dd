"""The forward of the ops as named steps, and what may be wrong in them (docs/diagnose.md, "How it works")."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...conv import reference as conv
from ...core import steps
from ...core.steps import Change, Computation, Steps, Values, renamed, steps_of, total
from ...mhc import backward_formula
from ...mhc import reference as mhc
from ...mhc.options import DEFAULTS
from ...testing.accuracy import Cotangents
from ...testing.cases import Case, Tensors
from ...testing.conv_cases import AnyCase, ConvCase
from .places import BLOCKED, layout, words_of

Hypothesis = tuple[str, Mapping[str, Change]]  # a sentence, and the values that change
BLOCKS = [8 << k for k in range(30)]  # sizes that kernels read at once

# mHC, with the maps of mhc/backward_formula.py. In a layer with a norm, h_read is h_in before the norm.
MAPS = (
    *steps_of(
        inv_rms=lambda x, norm_eps: torch.rsqrt(x.square().mean((-2, -1)) + norm_eps),
        h_mix=lambda x, gamma, phi: (x.flatten(-2) * gamma.flatten()) @ phi.T,
        alphas=mhc.per_row,
    ),
    *backward_formula.PRE_MAPS,
    *steps_of(
        h_post=lambda z, n, post_mult: post_mult * torch.sigmoid(z[..., n : 2 * n]),
        logits=lambda z, n: z[..., 2 * n :].unflatten(-1, (n, n)),
        h_res=lambda logits, sinkhorn_iters, sinkhorn_eps: mhc.sinkhorn(logits, sinkhorn_iters, sinkhorn_eps),
    ),
)
READ = steps_of(h_in=lambda h_pre, x: (h_pre[..., None] * x).sum(-2))
LAYER_NORM = steps_of(
    r=lambda h_read, layer_norm_eps: torch.rsqrt(h_read.square().mean(-1, keepdim=True) + layer_norm_eps),
    h_in=lambda h_read, r, layer_norm_weight: h_read * r * layer_norm_weight,
)
WRITTEN = steps_of(written=lambda h_post, h_out: h_post[..., None] * h_out[..., None, :])
MIX = (*WRITTEN, *steps_of(mixed=lambda h_res, x: h_res.mT @ x), total("x_next", "written", "mixed"))
KEEP = (*WRITTEN, *steps_of(kept=lambda x: x), total("x_next", "written", "kept"))
MEAN = steps_of(out=lambda x: x.mean(-2))
# In a post and the pre after it some names occur twice: "h_post before" is the post's. The pre reads x_next as it was
# stored. mhc_next ends with the post of the next sublayer, which costs nothing.
BEFORE = {"h_post": "h_post before", "h_res": "h_res before"}
OF_BEFORE = {f"d{name} before": f"d{name}" for name in BEFORE} | {f"d{name}": f"d{name} given" for name in BEFORE}
AFTER = {"x_next": "x_after"} | {name: f"{name} after" for name in ("h_out", "written", "mixed", "kept")}
STORED = steps_of(
    stored=lambda x_next, as_stored: x_next if as_stored is None else x_next + (as_stored - x_next).detach()
)
# Its backward has two parts: that of the next sublayer ends with dlink, the gradient of x_next; that of the post before
# begins with dlink as it was stored. x has no gradient.
LINK = steps_of(
    dlink_taken=lambda dlink, dlink_as_stored: dlink if dlink_as_stored is None else dlink_as_stored,
    dx=lambda x: torch.zeros_like(x),
)

# The convolution. `under` returns what lies under each tap, the final state, and which tokens are no padding.
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
SHORT_CONV = (
    *steps_of(
        inv_rms=lambda x, norm_eps: torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps),
        normed=lambda x, inv_rms, gamma: (x * inv_rms * gamma).flatten(-2),
        residual=lambda x: x.flatten(-2),
    ),
    *renamed(CONV, x="normed"),
)

# How a sentence names a value, and a term of dx.
WORDS = {"written": "h_post ⊗ h_out", "mixed": "h_resᵀ x", "kept": "x", "stored": "x_next", "dstored": "dx_next"}
WORDS |= {"written after": WORDS["written"], "mixed after": "h_resᵀ x_next", "h_out after": "h_out", "alphas": "alpha"}
WORDS |= {"shift": "the bias", "gate": "the activation", "convolved": "the convolution", "added": "the residual"}
OF_DX = {"h_mix": "gamma ⊙ phiᵀ dh_mix", "inv_rms": "the norm's term", "mixed": "h_res dx_next"}
OF_DX |= {"h_in": "h_pre ⊗ dh_in", "h_read": "h_pre ⊗ dh_read", "mixed after": "h_res dx_after"}
WORDS |= {"dx via residual": "the residual"} | {f"dx via {step}": words for step, words in OF_DX.items()}
# Terms that are sums themselves.
BY_STREAM = ["x for h_in", "stored for h_in", "x for out", "x for mixed", "stored for mixed after"]
BY_STREAM += ["dx_next for dh_out via written", "dx_next for dx via mixed", "dx_after for dx via mixed after"]
BY_SECTION = ("dx via h_mix", "dx via inv_rms", "dgamma via h_mix")
READ_IN_BLOCKS = ["dh_mix", "dz", "x", "stored", "dx_next", "dx_after", "dh_in", "dh_read", "dout", "phi", "gamma"]
READ_IN_BLOCKS += ["h_out", "h_out after", "h_read", "layer_norm_weight", "normed", "dy", "weight"]
FACTORS = ("gamma", "alphas", "layer_norm_weight", "r", "gate")


def model_of(
    case: AnyCase, tensors: Tensors, cotangents: Cotangents, results: Tensors, dtype: torch.dtype = torch.float64
) -> Computation:
    """results: those that are judged. What writes to a cache is not split into steps; only its place is reported."""
    subject = case.subject
    if not subject.differentiable:
        return Computation((), {**results})
    boundary = BEFORE if {"h_post", "phi"} <= set(tensors) else {}
    given = {boundary.get(name, name): tensor for name, tensor in tensors.items()}
    every, inputs = _mhc(case, given, results) if isinstance(case, Case) else _conv(case, given)
    inputs |= given
    for name, cotangent in zip(subject.differentiable, cotangents):
        whole = torch.zeros_like(results[name]) if cotangent is None else cotangent
        inputs[f"cotangent of {name}"] = whole if isinstance(case, Case) else whole.flatten(2)  # streams and channels
    own = [step for step in every if step.name not in inputs]
    needed = {step.name for output in subject.outputs for step in steps.leading_to(own, output)}
    forward = tuple(step for step in own if step.name in needed)
    gradients = _gradients_of_next if "link" in tensors else steps.gradients
    wanted = {name for name, tensor in given.items() if tensor.is_floating_point()}
    backward = renamed(gradients(forward, wanted, subject.differentiable), **(OF_BEFORE if boundary else {}))
    wide = {name: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in inputs.items()}
    return Computation((*forward, *backward), wide)


def _mhc(case: Case, given: Tensors, results: Tensors) -> tuple[Steps, Values]:
    """Most ops are a part of a pre and a post; a boundary is a post, a pre and a post."""
    op, gamma = case.subject.name.split()[0], next(iter(given.values())).new_ones(case.n, case.D)
    inputs: Values = {**DEFAULTS._asdict(), "n": case.n, "gamma": gamma}
    read = renamed(READ, h_pre="read") if "read" in given else READ
    if "layer_norm_weight" in given:
        read = (*renamed(read, h_in="h_read"), *LAYER_NORM)
    pre, post = (*MAPS, *read), KEEP if "identity" in case.subject.name else MIX
    if "h_post before" in given:
        inputs |= {"as_stored": results.get("x_next"), "dlink_as_stored": results.get("dlink")}
        inputs["h_out after"] = given["h_out"]
        return (*renamed(post, **BEFORE), *STORED, *renamed((*pre, *renamed(post, **AFTER)), x="stored")), inputs
    if op == "mhc_forward_pre":
        return renamed(pre, h_res="of logits", logits="h_res"), inputs
    return {"mhc_head": renamed(pre, h_in="out"), "mhc_mean": MEAN}.get(op, (*pre, *post)), inputs


def _gradients_of_next(forward: Steps, wanted: Collection[str], outputs: Collection[str]) -> Steps:
    end = 1 + [step.name for step in forward].index("stored")
    before, own = forward[:end], forward[end:]
    names = {"dstored": "dlink"} | {f"dstored via {step.name}": f"dx via {step.name}" for step in own}
    of_own = renamed(steps.gradients(own, {*wanted, "stored"}, outputs), **names)
    of_post = steps.gradients(before, set(wanted) - {"x"}, ["x_next"])
    return (*of_own, *LINK, *renamed(of_post, **{"cotangent of x_next": "dlink_taken"}))


def _conv(case: ConvCase, given: Tensors) -> tuple[Steps, Values]:
    """An argument that is not given is zero."""
    x, bounds = given["x"].flatten(2), given.get("cu_seqlens")

    def under(x: Tensor, initial_state: Tensor | None) -> conv.Taps:
        state = None if initial_state is None else initial_state.mT
        if bounds is None:
            return conv.dense(x, state, given.get("seq_idx"), case.W, case.dilation)
        return conv.packed(x, state, bounds, case.W, case.dilation)

    real = under(x, given.get("initial_state"))[2]
    inputs: Values = {"real": torch.ones_like(x[..., :1], dtype=torch.bool) if real is None else real, "under": under}
    inputs |= {"norm_eps": case.norm_eps, "initial_state": None, "bias": x.new_zeros(x.shape[-1])}
    inputs |= {} if case.silu or case.n else {"gate": torch.ones_like(x)}
    inputs |= {} if case.n and case.residual else {"residual": torch.zeros_like(x)}
    return SHORT_CONV if case.n else CONV, inputs


def terms_of(case: AnyCase, model: Computation, output: str) -> Tensors:
    """The terms of an output by their words, split where they are sums; none if there is only one."""
    found: Tensors = {}
    for step in model.steps:
        if step.name in model.sums.get(output, (output,)):
            words, right = WORDS.get(step.name, output), model.right[step.name]
            summed = "dm for dinv_rms via m" if step.name == "dx via inv_rms" else f"{step.reads[-1]} for {step.name}"
            parts: dict[str, Any] = {f"stream {i}": (..., i, slice(None)) for i in range(case.n) if summed in BY_STREAM}
            parts |= {name: (..., rows) for name, rows in case.sections.items() if step.name in BY_SECTION}
            without = {part: {summed: steps.at(index, steps.zeros)} for part, index in parts.items()}
            of_parts = {f"{words} of {part}": right - model.value(step.name, without[part]) for part in parts}
            found |= of_parts or {words: right}
    return found if len(found) > 1 else {}


def hypotheses(case: AnyCase, model: Computation) -> Iterator[Hypothesis]:
    """What may be wrong, the likelier first."""
    missing: dict[str, tuple[str, Change]] = {
        "inv_rms in z": ("m for z", lambda _, values: values["h_mix"]),
        "inv_rms in dh_mix": ("dh_mix", lambda _, values: values["dm"]),
    }
    for words, (name, change) in missing.items():
        for section, rows in case.sections.items():
            yield f"the {section} section lacks the factor {words}", {name: steps.at((..., rows), change)}
        yield f"every section lacks the factor {words}", {name: change}
    for name in FACTORS:
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
    for name in READ_IN_BLOCKS:
        if name in model.right:
            yield from _partial_reads(case, model, name)


def _partial_reads(case: AnyCase, model: Computation, tensor: str) -> Iterator[Hypothesis]:
    """The tensor is read up to an index at which a block ends: the first block, or the last full one."""
    axes, readers = layout(case, tensor, model.right[tensor].shape), _readers(model, tensor)
    for axis, (word, size) in enumerate(axes.items()):
        blocks = BLOCKS if word in BLOCKED else range(1, size) if word in ("stream", "sequence") else ()
        for end in sorted({end for block in blocks for end in (block, size // block * block) if 0 < end < size}):
            index = (*[slice(None)] * axis, slice(end, None))
            missing = f"{words_of(range(end, size), size, word, {})} of {WORDS.get(tensor, tensor)}"
            for into, names in readers.items():
                sentence = f"{missing} {'is' if end == size - 1 else 'are'} read as zero for {into}"
                yield sentence, dict.fromkeys(names, steps.at(index, steps.zeros, tuple(axes.values())))


def _readers(model: Computation, tensor: str) -> dict[str, list[str]]:
    """What reads the tensor, by the words of each reader and of all together, as a change names it."""
    found: dict[str, list[str]] = {}
    for step in model.steps:
        if tensor in step.reads and not step.is_sum and model.depends(step, tensor):
            into = model.sum_of(step.name)
            found.setdefault(WORDS.get(into, into), []).append(f"{tensor} for {step.name}")
    everything = " and ".join(", ".join(found).rsplit(", ", 1))
    return found | ({everything: [name for names in found.values() for name in names]} if found else {})
