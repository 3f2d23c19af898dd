"""mHC as named steps, forward and backward, and what may be wrong in them. The backward of pre is mhc/manual.py's.

mhc_post_pre has two of some names: there `stored` is x_next as it was stored and as the pre reads it, dstored its
gradient; "h_post before" is the post's, "dh_post given" the cotangent of the pre's.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ...core.steps import Change, Steps, Values, renamed, steps_of, total
from ...mhc import manual, reference
from ...mhc.options import DEFAULTS
from ..cases import Case, Tensors
from .explain import Hypothesis, Model, always, ones, partial_reads
from .outputs import layout, sections

ITERS = DEFAULTS.sinkhorn_iters
sinkhorn = partial(reference.sinkhorn, iters=ITERS, eps=DEFAULTS.sinkhorn_eps)


def _gradient(logits: Tensor, squash: Callable[[Tensor], Tensor], dh_res: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(squash(leaf), leaf, dh_res)[0]


PROJECT = steps_of(
    inv_rms=lambda x, norm_eps: torch.rsqrt(x.square().mean((-2, -1)) + norm_eps),
    h_mix=lambda x, gamma, phi: (x.flatten(-2) * gamma) @ phi.T,
)
MAPS = steps_of(
    h_post=lambda z, n, post_mult: post_mult * torch.sigmoid(z[..., n : 2 * n]),
    logits=lambda z, n: z[..., 2 * n :].unflatten(-1, (n, n)),
)
SINKHORN = steps_of(h_res=lambda logits, squash: squash(logits))
SINKHORN_BACKWARD = steps_of(dlogits=_gradient)
READ = steps_of(h_in=lambda h_pre, x: (h_pre[..., None] * x).sum(-2))
PRE = (*PROJECT, *manual.PRE_MAPS, *MAPS, *SINKHORN, *READ)
PRE_BACKWARD = (*SINKHORN_BACKWARD, *manual.PARAMETER_GRADIENTS, *manual.TERMS_OF_DX)
POST = (
    *steps_of(
        written=lambda h_post, h_out: h_post[..., None] * h_out[..., None, :], mixed=lambda h_res, x: h_res.mT @ x
    ),
    total("x_next", "written", "mixed"),
)
POST_BACKWARD = steps_of(
    dh_out=lambda h_post, dx_next: (h_post[..., None] * dx_next).sum(-2),
    dh_post=lambda dx_next, h_out: (dx_next * h_out[..., None, :]).sum(-1),
    dh_res=lambda x, dx_next: x @ dx_next.mT,
    through_mix=lambda h_res, dx_next: h_res @ dx_next,
)
# The head has the pre section alone, and no cotangents but that of its h_in, which is called out.
OF_THE_HEAD = steps_of(
    dz=lambda z, dh_pre: dh_pre * torch.sigmoid(z) * torch.sigmoid(-z), dalpha=lambda dz, m: (dz * m).sum()
)
HEAD_BACKWARD = [{s.name: s for s in OF_THE_HEAD}.get(step.name, step) for step in PRE_BACKWARD[1:]]
OF_PRE = manual.DX.reads
STEPS: dict[str, Steps] = {
    "sinkhorn": (*SINKHORN, *SINKHORN_BACKWARD),
    "mhc_post": (*POST, *POST_BACKWARD, total("dx", "through_mix")),
    "mhc_pre": (*PRE, *PRE_BACKWARD, manual.DX),
    "mhc_head": renamed((*PROJECT, *manual.PRE_MAPS, *READ, *HEAD_BACKWARD, manual.DX), h_in="out", dh_in="dout"),
    "mhc_layer": (*PRE, *POST, *POST_BACKWARD, *PRE_BACKWARD, total("dx", *OF_PRE, "through_mix")),
    "mhc_post_pre": (
        *renamed(POST, h_post="h_post before", h_res="h_res before"),
        *renamed((*PRE, *PRE_BACKWARD), x="stored", dh_post="dh_post given", dh_res="dh_res given"),
        total("dstored", *OF_PRE, "dx_next"),
        *renamed(POST_BACKWARD, h_post="h_post before", h_res="h_res before", dx_next="dstored"),
        total("dx", "through_mix"),
    ),
}
STEPS["mhc_forward_pre"] = STEPS["mhc_pre"]
WORDS = {
    "written": "h_post ⊗ h_out",
    "mixed": "h_resᵀ x",
    "through_phi": "gamma ⊙ phiᵀ dh_mix",
    "through_norm": "the norm's term",
    "through_h_in": "h_pre ⊗ dh_in",
    "through_mix": "h_res dx_next",
    "dprojection": "dphi",
    "stored": "x_next",
    "dstored": "dx_next",
}
READ_IN_BLOCKS = ("dh_mix", "dz", "x", "stored", "dx_next", "dstored", "phi", "gamma", "dh_in", "dout", "h_out")


def model(case: Case, tensors: Tensors, cotangents: Tensors, results: Tensors) -> Model:
    """results: those that are judged; the pre of mhc_post_pre reads x_next as it was stored."""
    op, n, device = case.subject.name, case.n, next(iter(tensors.values())).device
    inputs: Values = {
        **tensors,
        **{f"d{name}": cotangent for name, cotangent in cotangents.items()},
        **DEFAULTS._asdict(),
        "n": n,
    }
    inputs["squash"] = (lambda logits: logits) if op == "mhc_forward_pre" else sinkhorn
    if "phi" in tensors:
        phi, alpha = tensors["phi"], tensors["alpha"]
        inputs["alphas"] = reference.per_row(alpha, n) if op != "mhc_head" else alpha.expand(n)
        inputs["gamma"] = tensors["gamma"].flatten() if "gamma" in tensors else phi.new_ones(phi.shape[1])
    if op == "mhc_post_pre":
        inputs |= {f"{name} before": inputs.pop(name) for name in ("h_post", "h_res")}
        inputs |= {f"{name} given": inputs.pop(name) for name in ("dh_post", "dh_res")}
        inputs["stored"] = results["x_next"].to(tensors["x"].dtype)
    streams = {f"stream {i}": mask[:, None] for i, mask in enumerate(torch.eye(n, dtype=torch.bool, device=device))}
    rows = torch.arange(sum(map(len, sections(case).values())), device=device)
    by_section = {name: (rows >= own[0]) & (rows <= own[-1]) for name, own in sections(case).items()}
    of_phi = {name: mask[:, None] for name, mask in by_section.items()}
    parts = dict.fromkeys(("h_in", "out", "mixed", "dh_out", "through_mix"), (1, streams))
    parts |= {"through_phi": (0, by_section), "through_norm": (0, by_section), "dgamma": (1, of_phi)}
    return Model(STEPS[op], inputs, parts, WORDS)


def hypotheses(case: Case, model: Model, right: Values) -> Iterator[Hypothesis]:
    """The order is the order of preference where two explain an output equally well."""
    yield from _left_out(sections(case))
    yield Hypothesis("norm_eps is left out of inv_rms", {"norm_eps": always(0.0)})
    for output, reader in {"h_mix": "h_mix", "dphi": "dphi", "dx": "through_phi"}.items():
        yield Hypothesis(f"gamma is left out of {output}", {f"gamma for {reader}": ones})
    yield Hypothesis("gamma is left out everywhere", {"gamma": ones})
    yield from _transposed("h_res before" if case.subject.name == "mhc_post_pre" else "h_res")
    if right["squash"] is sinkhorn:
        yield from _sinkhorn()
    for name in READ_IN_BLOCKS:
        if name in right:
            axes = layout(case, name, right[name].shape)
            yield from partial_reads(model, name, axes)
            if name in ("x", "stored"):
                row = {"all tokens": axes["token"], "channel": case.n * case.D}
                yield from partial_reads(model, name, row, f"{model.say(name)} as one row of n·D")


def _left_out(sections: Mapping[str, range]) -> Iterator[Hypothesis]:
    """A factor or a summand, in one section of the rows or in all of them."""
    changes: dict[str, tuple[str, Change]] = {
        "the factor inv_rms in z": ("z", lambda _, v: v["h_mix"] * v["alphas"] + v["bias"]),
        "the factor alpha in z": ("z", lambda _, v: v["m"] + v["bias"]),
        "the bias in z": ("z", lambda _, v: v["m"] * v["alphas"]),
        "the factor inv_rms in dh_mix": ("dh_mix", lambda _, v: v["dm"]),
        "the factor alpha in dh_mix": ("dm", lambda _, v: v["dz"]),
        "the derivative of σ in dz": ("dz", lambda dz, v: dz / torch.sigmoid(v["z"]) / torch.sigmoid(-v["z"])),
    }
    for words, (step, change) in changes.items():
        for name, rows in sections.items() if len(sections) > 1 else ():
            yield Hypothesis(f"the {name} section lacks {words}", {step: _in_rows(rows, change)})
        yield Hypothesis(f"{'every section' if len(sections) > 1 else 'the projection'} lacks {words}", {step: change})


def _in_rows(rows: range, change: Change) -> Change:
    def only_there(value: Tensor, values: Values) -> Tensor:
        changed = value.clone()
        changed[..., rows] = change(value, values)[..., rows]
        return changed

    return only_there


def _transposed(h_res: str) -> Iterator[Hypothesis]:
    def turned(value: Tensor, _: Values) -> Tensor:
        return value.mT

    forward, backward = {f"{h_res} for mixed": turned}, {f"{h_res} for through_mix": turned}
    yield Hypothesis("h_res is read transposed for x_next", forward)
    yield Hypothesis("h_res is read transposed for dx", backward)
    yield Hypothesis("dh_res is transposed", {"dh_res": turned})
    sentence = "h_res is read transposed for x_next, and so are its gradient and dx"
    yield Hypothesis(sentence, {**forward, **backward, "dh_res": turned})


def _sinkhorn() -> Iterator[Hypothesis]:
    softmax = always(partial(torch.softmax, dim=-1))
    yield Hypothesis("the gradient of Sinkhorn is that of its softmax alone", {"squash for dlogits": softmax})
    faults = {
        **{f"stops after {k} of {ITERS} iterations": partial(sinkhorn, iters=k) for k in range(ITERS - 1, 0, -1)},
        f"makes {ITERS + 1} iterations, one too many": partial(sinkhorn, iters=ITERS + 1),
        "has rows and columns swapped": lambda z: sinkhorn(z.mT).mT,
        "returns h_res transposed": lambda z: sinkhorn(z).mT,
        "lacks its eps": partial(sinkhorn, eps=0.0),
    }
    for words, function in faults.items():
        yield Hypothesis(f"Sinkhorn {words}", {"squash": always(function)})
        yield Hypothesis(f"Sinkhorn {words}, in the forward alone", {"squash for h_res": always(function)})
        yield Hypothesis(f"Sinkhorn {words}, in the backward alone", {"squash for dlogits": always(function)})
