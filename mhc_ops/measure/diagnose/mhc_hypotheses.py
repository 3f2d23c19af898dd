"""What can be wrong in an mHC op: each fault as a sentence and the steps of mhc_model.py that it changes.

The order is the order of preference where two faults explain an output equally well.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from .mhc_model import HC_EPS, ITERS, SECTIONS, section_rows, sinkhorn, slope
from .reads import flat_reads, partial_reads
from .trace import Edit, Hypothesis, Trace, Values, always

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


def hypotheses(trace: Trace) -> list[Hypothesis]:
    """For an op whose right values these are."""
    values = trace.values
    with_sinkhorn = _sinkhorn() if values.get("sinkhorn") is sinkhorn else ()
    found = [h for h in (*_factors(values), *_maps(), *with_sinkhorn, *_mixes()) if set(h.edits) <= set(values)]
    found += partial_reads(trace, AXES, ONE_PASS)
    if "x for h_mix" in values:
        for group in (("x for h_mix",), ("x for inv_rms",), *ONE_PASS):
            found += flat_reads(values["x for h_mix"], group)
    return found


def _factors(values: Values) -> Iterator[Hypothesis]:
    """A factor or a summand left out or put in, in one section of the rows or in all of them."""
    if "z" not in values:
        return
    n, M = values["h_pre"].shape[-1], values["z"].shape[-1]
    rows = {"pre": slice(0, n)} if M == n else section_rows(n)
    bias = values["z"] - values["m"] * values["alpha per row"]
    changes: list[tuple[str, str, Callable[[Tensor, Values], Tensor]]] = [
        ("{} lacks the factor inv_rms in z", "z", lambda z, v: v["h_mix"] * v["alpha per row"] + bias),
        ("{} lacks the factor alpha in z", "z", lambda z, v: v["m"] + bias),
        ("{} lacks the bias in z", "z", lambda z, v: z - bias),
        ("{} lacks the factor inv_rms in dh_mix", "dh_mix", lambda dh_mix, v: v["dm"]),
        ("{} has the factor inv_rms twice in dh_mix", "dh_mix", lambda dh_mix, v: dh_mix * v["inv_rms"][:, None]),
        ("{} lacks the factor alpha in dh_mix", "dm", lambda dm, v: v["dz"]),
        ("{} lacks the factor inv_rms in dalpha", "m for dalpha", lambda m, v: v["h_mix"]),
        ("{} has a factor alpha too many in dbias", "dz for dbias", lambda dz, v: dz * v["alpha per row"]),
        ("{} has a factor inv_rms too many in the norm's term of dx", "dinv", lambda dinv, v: v["dm"] * v["m"]),
        ("{} lacks the factor h_mix in the norm's term of dx", "dinv", lambda dinv, v: v["dm"]),
    ]
    for words, step, change in changes:
        if len(rows) > 1:
            for name, section in rows.items():
                yield Hypothesis(words.format(f"the {name} section"), {step: _in_rows(section, change)})
        yield Hypothesis(words.format("every section" if len(rows) > 1 else "the projection"), {step: change})
    for section in ("pre", "post")[: len(rows)]:
        edit = _in_rows(rows[section], lambda dz, v: dz / slope(v["z"]))
        yield Hypothesis(f"the {section} section lacks the derivative of σ in dz", {"dz": edit})
    for name, section in rows.items():
        for index, other in enumerate(SECTIONS if len(rows) > 1 else ()):
            if other != name:
                one = values["alpha per row"][rows[other].start]
                edit = _in_rows(section, lambda alphas, v, one=one: one.expand_as(alphas))
                sentence = f"the {name} section is scaled by alpha[{index}], which is that of {other}"
                yield Hypothesis(sentence, {"alpha per row": edit})


def _in_rows(rows: slice, change: Edit) -> Edit:
    def edit(value: Tensor, values: Values) -> Tensor:
        changed = value.clone()
        changed[..., rows] = change(value, values)[..., rows]
        return changed

    return edit


def _maps() -> Iterator[Hypothesis]:
    """Whole steps."""
    yield Hypothesis("h_post lacks the factor 2", {"h_post": lambda h_post, v: h_post / 2})
    yield Hypothesis("h_pre has the factor 2 of h_post", {"h_pre": lambda h_pre, v: 2 * h_pre})
    yield Hypothesis("h_pre is not bounded by σ", {"h_pre": lambda h_pre, v: v["z"][:, : h_pre.shape[-1]] + HC_EPS})
    yield Hypothesis("norm_eps is left out of inv_rms", {"norm_eps": lambda eps, v: 0.0})
    mean_over_channels = lambda inv_rms, v: inv_rms / v["x for inv_rms"].shape[-2] ** 0.5  # noqa: E731
    yield Hypothesis("inv_rms divides by the channels alone, not by streams × channels", {"inv_rms": mean_over_channels})
    yield Hypothesis("inv_rms lacks the root: it is 1 / mean square", {"inv_rms": lambda inv_rms, v: inv_rms**2})
    for step in ("h_mix", "dphi", "dx"):
        yield Hypothesis(f"gamma is left out of {step}", {f"gamma for {step}": lambda gamma, v: torch.ones_like(gamma)})
    yield Hypothesis("gamma is left out everywhere", {"gamma": lambda gamma, v: torch.ones_like(gamma)})
    for power in (1, 2):
        edit: Edit = lambda _, v, power=power: v["inv_rms"] ** power  # noqa: E731
        yield Hypothesis(f"the norm's term of dx has inv_rms to the power {power}, not 3", {"inv_rms cubed": edit})


def _sinkhorn() -> Iterator[Hypothesis]:
    """In forward and backward, in one of them, and faults that only a gradient has."""
    both: dict[str, Callable[[Tensor], Tensor]] = {
        f"stops after {k} of {ITERS} iterations": partial(sinkhorn, iters=k) for k in range(ITERS - 1, 0, -1)
    }
    both[f"makes {ITERS + 1} iterations, one too many"] = partial(sinkhorn, iters=ITERS + 1, learned=ITERS + 1)
    both |= {
        "has rows and columns swapped": lambda z: sinkhorn(z.mT).mT,
        "is given its logits transposed": lambda z: sinkhorn(z.mT),
        "returns h_res transposed": lambda z: sinkhorn(z).mT,
        "lacks its eps": partial(sinkhorn, eps=0.0),
        "is a softmax over the rows and nothing more": lambda z: torch.softmax(z, -1),
        "is left out: h_res is its logits": lambda z: z,
    }
    softmax = always(partial(torch.softmax, dim=-1))
    yield Hypothesis("the gradient of Sinkhorn is that of its softmax alone", {"sinkhorn backward": softmax})
    for words, wrong in both.items():
        forward, backward, right = {"sinkhorn": always(wrong)}, {"sinkhorn backward": always(wrong)}, always(sinkhorn)
        yield Hypothesis(f"Sinkhorn {words}", forward)
        yield Hypothesis(f"Sinkhorn {words}, in the forward alone", {**forward, "sinkhorn backward": right})
        yield Hypothesis(f"Sinkhorn {words}, in the backward alone", backward)
    sentence = "the gradient of Sinkhorn goes through only the last {} of {} iterations"
    for k in range(ITERS - 1, 0, -1):
        yield Hypothesis(sentence.format(k, ITERS), {"sinkhorn backward": always(partial(sinkhorn, learned=k))})


def _mixes() -> Iterator[Hypothesis]:
    """[n, n] maps read or written with their axes exchanged."""
    turned: Edit = lambda h_res, v: h_res.mT  # noqa: E731
    for step in ("x_next", "dx"):
        yield Hypothesis(f"h_res is read transposed for {step}", {f"h_res for {step}": turned})
    yield Hypothesis("h_res is read transposed for x_next and dx", {"h_res for x_next": turned, "h_res for dx": turned})
    yield Hypothesis("dh_res is transposed", {"dh_res": turned})
    yield Hypothesis("the gradient of h_res is read transposed", {"dh_res for dz": turned})
    constant: Edit = lambda h_post, v: torch.ones_like(h_post)  # noqa: E731
    yield Hypothesis("h_post is left out of dh_out", {"h_post for dh_out": constant})
