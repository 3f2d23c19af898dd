"""What can be wrong in an mHC op: each fault as a sentence and the steps of mhc_model.py that it changes.

The order is the order of preference where two faults explain an output equally well.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .mhc_model import HC_EPS, ITERS, section_rows, sinkhorn, slope
from .reads import flat_reads, partial_reads
from .trace import Edit, Hypothesis, Trace, Values, always

# The axes along which a step may read only a part: channels and streams, and tokens where they are summed up.
AXES = {
    "x": {0: "token", 1: "stream", 2: "channel"},
    "dx_next": {1: "stream", 2: "channel"},
    "phi": {1: "stream", 2: "channel"},
    "gamma": {-1: "channel"},
    "dh_in": {-1: "channel"},
    "h_out": {-1: "channel"},
    "dz": {0: "token"},
    "dh_mix": {0: "token"},
}
ONE_PASS = (("x for inv_rms", "x for h_mix"), ("x for inv_rms", "x for h_mix", "x for h_in"))


def hypotheses(right: Trace) -> list[Hypothesis]:
    """For an op whose right values these are."""
    values = right.values
    every = [*_sections(values), *_alphas(values), *_norm(), *_maps(), *_mixes()]
    if values.get("sinkhorn") is sinkhorn:
        every += _sinkhorn()
    found = [hypothesis for hypothesis in every if set(hypothesis.edits) <= set(values)]
    found += partial_reads(right, AXES, ONE_PASS)
    if "x for h_mix" in values:
        for group in (("x for h_mix",), ("x for inv_rms",), *ONE_PASS):
            found += flat_reads(values["x for h_mix"], group)
    return found


def _rows(values: Values) -> dict[str, slice]:
    """The rows of each section; the head has one."""
    if "z" not in values:
        return {}
    n, M = values["h_pre"].shape[-1], values["z"].shape[-1]
    return section_rows(n) if n < M else {"pre": slice(0, n)}


def _sections(values: Values) -> Iterator[Hypothesis]:
    """A factor or a summand left out or put in, in one section of the rows or in all of them."""
    faults: list[tuple[str, str, Edit]] = [
        ("lacks the factor inv_rms in z", "z", lambda z, v: z + (v["h_mix"] - v["m"]) * v["alpha per row"]),
        ("lacks the factor alpha in z", "z", lambda z, v: z + v["m"] * (1 - v["alpha per row"])),
        ("lacks the bias in z", "z", lambda z, v: v["m"] * v["alpha per row"]),
        ("lacks the factor inv_rms in dh_mix", "dh_mix", lambda dh_mix, v: v["dm"]),
        ("has the factor inv_rms twice in dh_mix", "dh_mix", lambda dh_mix, v: dh_mix * v["inv_rms"][:, None]),
        ("lacks the factor alpha in dh_mix", "dm", lambda dm, v: v["dz"]),
        ("lacks the derivative of σ in dz", "dz", lambda dz, v: dz / slope(v["z"])),
        ("lacks the factor inv_rms in dalpha", "m for dalpha", lambda m, v: v["h_mix"]),
        ("has a factor alpha too many in dbias", "dz for dbias", lambda dz, v: dz * v["alpha per row"]),
        ("has a factor inv_rms too many in the norm's term of dx", "dinv", lambda dinv, v: v["dm"] * v["m"]),
        ("lacks the factor h_mix in the norm's term of dx", "dinv", lambda dinv, v: v["dm"]),
    ]
    rows = _rows(values)
    for words, step, edit in faults:
        if len(rows) > 1:
            for name, section in rows.items():
                yield Hypothesis(f"the {name} section {words}", {step: _in_rows(section, edit)})
        yield Hypothesis(f"{'every section' if len(rows) > 1 else 'the projection'} {words}", {step: edit})


def _in_rows(rows: slice, change: Edit) -> Edit:
    def edit(value: Tensor, values: Values) -> Tensor:
        changed = value.clone()
        changed[..., rows] = change(value, values)[..., rows]
        return changed

    return edit


def _alphas(values: Values) -> Iterator[Hypothesis]:
    """The scale of one section in another."""
    rows = _rows(values)
    for name, section in rows.items():
        for index, (other, taken) in enumerate(rows.items()):
            if other != name:
                alphas = values["alpha per row"]
                one = alphas[taken.start].expand_as(alphas)
                sentence = f"the {name} section is scaled by alpha[{index}], which is that of {other}"
                yield Hypothesis(sentence, {"alpha per row": _in_rows(section, always(one))})


def _norm() -> Iterator[Hypothesis]:
    """inv_rms and gamma"""
    yield Hypothesis("norm_eps is left out of inv_rms", {"norm_eps": always(0.0)})
    yield Hypothesis(
        "inv_rms divides by the channels alone, not by streams × channels",
        {"inv_rms": lambda inv_rms, v: inv_rms / v["x for inv_rms"].shape[-2] ** 0.5},
    )
    yield Hypothesis("inv_rms lacks the root: it is 1 / mean square", {"inv_rms": lambda inv_rms, v: inv_rms**2})
    for step in ("h_mix", "dphi", "dx"):
        yield Hypothesis(f"gamma is left out of {step}", {f"gamma for {step}": _ones})
    yield Hypothesis("gamma is left out everywhere", {"gamma": _ones})
    sentence = "the norm's term of dx has inv_rms to the power {}, not 3"
    yield Hypothesis(sentence.format(1), {"inv_rms cubed": lambda cubed, v: v["inv_rms"]})
    yield Hypothesis(sentence.format(2), {"inv_rms cubed": lambda cubed, v: v["inv_rms"] ** 2})


def _ones(value: Tensor, values: Values) -> Tensor:
    return torch.ones_like(value)


def _maps() -> Iterator[Hypothesis]:
    yield Hypothesis("h_post lacks the factor 2", {"h_post": lambda h_post, v: h_post / 2})
    yield Hypothesis("h_pre has the factor 2 of h_post", {"h_pre": lambda h_pre, v: 2 * h_pre})
    yield Hypothesis("h_pre is not bounded by σ", {"h_pre": lambda h_pre, v: v["z"][:, : h_pre.shape[-1]] + HC_EPS})
    yield Hypothesis("h_post is left out of dh_out", {"h_post for dh_out": _ones})


def _mixes() -> Iterator[Hypothesis]:
    """[n, n] maps read or written with their axes exchanged."""
    for step in ("x_next", "dx"):
        yield Hypothesis(f"h_res is read transposed for {step}", {f"h_res for {step}": _turned})
    yield Hypothesis(
        "h_res is read transposed for x_next, and so are its gradient and dx",
        {"h_res for x_next": _turned, "h_res for dx": _turned, "dh_res": _turned},
    )
    yield Hypothesis("dh_res is transposed", {"dh_res": _turned})
    yield Hypothesis("the gradient of h_res is read transposed", {"dh_res for dz": _turned})


def _turned(value: Tensor, values: Values) -> Tensor:
    return value.mT


def _sinkhorn() -> Iterator[Hypothesis]:
    """In forward and backward, in one of them, and faults that only a gradient has."""
    faults: dict[str, Callable[[Tensor], Tensor]] = {
        **{f"stops after {k} of {ITERS} iterations": partial(sinkhorn, iters=k) for k in range(ITERS - 1, 0, -1)},
        f"makes {ITERS + 1} iterations, one too many": partial(sinkhorn, iters=ITERS + 1, learned=ITERS + 1),
        "has rows and columns swapped": lambda z: sinkhorn(z.mT).mT,
        "is given its logits transposed": lambda z: sinkhorn(z.mT),
        "returns h_res transposed": lambda z: sinkhorn(z).mT,
        "lacks its eps": partial(sinkhorn, eps=0.0),
        "is a softmax over the rows and nothing more": partial(torch.softmax, dim=-1),
        "is left out: h_res is its logits": lambda z: z,
    }
    softmax = always(partial(torch.softmax, dim=-1))
    yield Hypothesis("the gradient of Sinkhorn is that of its softmax alone", {"sinkhorn backward": softmax})
    for words, function in faults.items():
        forward, right, wrong = "sinkhorn", always(sinkhorn), always(function)
        yield Hypothesis(f"Sinkhorn {words}", {forward: wrong})
        yield Hypothesis(f"Sinkhorn {words}, in the forward alone", {forward: wrong, "sinkhorn backward": right})
        yield Hypothesis(f"Sinkhorn {words}, in the backward alone", {"sinkhorn backward": wrong})
    sentence = "the gradient of Sinkhorn goes through only the last {} of {} iterations"
    for k in range(ITERS - 1, 0, -1):
        yield Hypothesis(sentence.format(k, ITERS), {"sinkhorn backward": always(partial(sinkhorn, learned=k))})
