"""Every planted fault gets its verdict, and a right op gets none."""

import math

import pytest
import torch

from mhc_ops.core.steps import at, ones, zeros
from mhc_ops.measure.diagnose import Output, diagnose
from mhc_ops.measure.diagnose.ops import model_of
from mhc_ops.testing import cases
from mhc_ops.testing.accuracy import Exact
from mhc_ops.testing.cases import Case
from mhc_ops.testing.conv_cases import ConvCase

fp32, bf16 = torch.float32, torch.bfloat16
BLOCK, N = 32, 4  # channels or tokens of the faults that have a block; streams
PRE, POST, RES = slice(0, N), slice(N, 2 * N), slice(2 * N, None)


class Faulty(torch.autograd.Function):
    """The op of a case with some steps done wrong: diagnose's steps in fp32 with these changes. Without any, they are
    the op. In the backward the steps run once more, now with the cotangents."""

    @staticmethod
    def forward(ctx, case, changes, names, *tensors):
        ctx.case, ctx.changes, ctx.names = case, changes, names
        ctx.save_for_backward(*tensors)
        given = dict(zip(names, tensors))
        shapes = case.subject.call(**given, backend="reference")
        values = changed_values(case, given, [torch.zeros_like(output) for output in shapes], changes)
        outputs = [values[name].to(like.dtype).view_as(like) for name, like in zip(case.subject.outputs, shapes)]
        ctx.mark_non_differentiable(*outputs[len(case.subject.differentiable) :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *cotangents):
        tensors = ctx.saved_tensors
        values = changed_values(ctx.case, dict(zip(ctx.names, tensors)), cotangents, ctx.changes)
        gradients = [
            values[f"d{name}"].to(tensor.dtype).view_as(tensor) if tensor.is_floating_point() else None
            for name, tensor in zip(ctx.names, tensors)
        ]
        return None, None, None, *gradients


def changed_values(case, tensors, cotangents, changes):
    """A pre after a post goes on with what was stored."""
    between = ("x_next", "dlink") if "link" in tensors else ("x_next",) if {"h_post", "phi"} <= set(tensors) else ()
    stored = {}
    for name in between:
        values = model_of(case, tensors, cotangents, stored, torch.float32).run(changes)
        stored[name] = values[name].to(case.dtype)
    return model_of(case, tensors, cotangents, stored, torch.float32).run(changes)


def faulty(case, changes):
    """To be diagnosed in place of the op of the case."""
    return lambda backend, **tensors: Faulty.apply(case, changes, tuple(tensors), *tensors.values())


def of(subject, sigma=Case.sigma):
    """72 channels and 38 tokens: more than a block of 32 each, and a multiple of none."""

    def diagnosed(changes, dtype=fp32):
        case = Case(subject, (2, 19), N, 72, dtype, sigma=sigma)
        return diagnose(case, call=faulty(case, changes))

    diagnosed.__name__ = subject.name
    return diagnosed


def conv(changes, dtype=fp32):
    case = ConvCase(2, 75, 20, dtype=dtype, residual=True)
    return diagnose(case, call=faulty(case, changes))


pre, post, post_pre = of(cases.MHC_FORWARD_PRE), of(cases.MHC_POST), of(cases.MHC_POST_PRE)
maps, normed = of(cases.MHC_MAPS), of(cases.MHC_PRE_NORMED)
boundary, boundary_normed = of(cases.MHC_NEXT), of(cases.MHC_NEXT_NORMED)
shifted, mean, post_identity = of(cases.MHC_SHIFTED_PRE), of(cases.MHC_MEAN), of(cases.MHC_POST_IDENTITY)


def times(factor):
    return lambda value, values: factor * value


def instead(name):
    return lambda value, values: values[name]


def unwritten(value, values):
    """Fresh memory, as a kernel leaves what it does not reach."""
    return torch.empty_like(value)


def no_last(value, values):
    """A kernel leaves out the last tokens: 38 are two blocks of 16 and a rest."""
    rows = value.reshape(-1, value.shape[-1]).clone()
    rows[len(rows) // 16 * 16 :] = 0
    return rows.view_as(value)


def wrong_variable(value, values):
    """The norm's term with what the pre section has accumulated n² times, in place of the res section's."""
    dm, h_mix, x = values["dm"], values["h_mix"], values["x"]
    parts = [(dm * h_mix)[..., rows].sum(-1) for rows in (PRE, POST)]
    dinv_rms = parts[0] + parts[1] + N * N * parts[0]
    return -(dinv_rms * values["inv_rms"] ** 3 / x[0, 0].numel())[..., None, None] * x


def no_halo(taps, values):
    """A tap reads nothing of the block before that of its token."""
    W, _, L, _ = taps.shape
    t, lag = torch.arange(L), torch.arange(W - 1, -1, -1)[:, None]
    return torch.where(((t - lag) // BLOCK == t // BLOCK)[:, None, :, None], taps, 0)


first_block, stream_2 = at((..., slice(BLOCK, None)), zeros), at((..., 2, slice(None)), zeros)
first_stream = at((..., slice(1, None), slice(None)), unwritten)
no_inv_rms, last_strip = at((..., POST), instead("h_mix")), at((slice(None), slice(2 * BLOCK, None)), zeros)

TERM = "the norm's term of"
# An op, its fault as changes of steps, and the first finding. The first seven are found in bf16 too.
VERDICTS = [
    # the four that the original found by hand, what its forward did beside its backward, and more of their kind
    (pre, {"x for h_mix": first_block}, "h_mix: channels 32 and up of x are read as zero for h_mix"),
    (
        pre,
        {"dx via inv_rms": wrong_variable},
        f"dx: {TERM} pre is counted 17 (n² + 1) times and {TERM} res is left out",
    ),
    (pre, {"dh_mix": at((..., RES), instead("dm"))}, "dphi: the res section lacks the factor inv_rms in dh_mix"),
    (pre, {"dx": first_stream}, "dx: never written in streams 1 to 3"),
    (pre, {"gamma for h_mix": ones}, "h_mix: gamma is left out of h_mix"),
    (conv, {"bias for shift": zeros}, "y: the bias is left out of z"),
    (conv, {"gate for convolved": ones}, "y: the activation is left out of y"),
    (pre, {"m for z": no_inv_rms}, "h_post: the post section lacks the factor inv_rms in z"),
    (pre, {"dbias": at(RES, times(N * N))}, "dbias: counted 16 (n²) times in the res section"),
    (pre, {"dh_mix for dphi via h_mix": no_last}, "dphi: tokens 32 and up of dh_mix are read as zero for dphi"),
    (post_pre, {"dstored via inv_rms": zeros}, "dx: the term via inv_rms is left out of dx_next"),
    (maps, {"alphas for z": ones}, "h_pre: alpha is left out of z"),
    (post, {"x for mixed": stream_2}, "x_next: h_resᵀ x of stream 2 is left out"),
    (normed, {"layer_norm_weight for h_in": ones}, "h_in: layer_norm_weight is left out of h_in"),
    (normed, {"h_read for r": first_block}, "h_in: channels 32 and up of h_read are read as zero for r"),
    (normed, {"dh_read via r": zeros}, "dbias: the term via r is left out of dh_read"),
    (boundary, {"stored for mixed after": stream_2}, "x_after: h_resᵀ x_next of stream 2 is left out"),
    (boundary_normed, {"dx via mixed after": zeros}, "dlink: h_res dx_after is left out"),
    (boundary, {"dx via inv_rms": times(N)}, "dlink: the norm's term is counted 4 (n) times"),
    (shifted, {"dh_in for dread via h_in": first_block}, "dread: channels 32 and up of x are read as zero for dread"),
    (post_identity, {"kept": zeros}, "x_next: x is left out"),
    (mean, {"out": times(N)}, "out: out is counted 4 (n) times"),
    (conv, {"added": zeros}, "y: the residual is left out"),
    (mean, {"out": times(-1)}, "out: out is of the wrong sign"),
    (conv, {"dz for dweight via tapped": last_strip}, "dweight: tokens 64 and up of dz are read as zero for dweight"),
]
EVERY = [*((*row, fp32) for row in VERDICTS), *((*row, bf16) for row in VERDICTS[:7])]


@pytest.mark.parametrize("op, changes, verdict, dtype", EVERY, ids=[f"{e[0].__name__}, {e[2]}, {e[3]}" for e in EVERY])
def test_verdict(op, changes, verdict, dtype):
    diagnosis = op(changes, dtype)
    lead = diagnosis.findings[0]
    assert f"{lead.outputs[0]}: {lead.sentence}" == verdict
    if dtype == fp32:
        assert lead.share > 0.999
        named = [name for finding in diagnosis.findings for name in finding.outputs]
        assert sorted(named) == sorted(output.name for output in diagnosis.outputs if not output.passed)


def test_a_fault_without_a_name_has_a_place():
    lead = conv({"taps": no_halo}).findings[0]
    assert (lead.outputs, lead.share) == (("y",), 0)
    assert lead.sentence == "no simple explanation; wrong: 6 of 75 tokens (32, 33, 34, 64, 65, 66)"


def test_a_gradient_that_should_be_none_is_off():
    """What x gets at a boundary comes through the link; a kernel that writes it to dx too counts it twice."""
    assert [finding.outputs for finding in boundary({"dx": instead("dlink")}).findings] == [("dx",)]


def noisy(h_mix, values=None):
    return h_mix + 0.1 * torch.randn(h_mix.shape, generator=torch.Generator().manual_seed(0))


def test_what_cannot_be_explained_is_said_and_what_follows_from_it():
    """Noise in h_mix is no fault that anyone thought of; the maps made from it are right, given it."""

    def call(backend, **tensors):
        *outputs, h_mix, h_pre = cases.MHC_FORWARD_PRE.call(**tensors, backend="reference")
        return *outputs, noisy(h_mix), h_pre

    (finding,) = diagnose(Case(cases.MHC_FORWARD_PRE, (20,), 4, 24, fp32), call=call).findings
    assert finding == ("no simple explanation", ("h_mix",), 0)
    found = pre({"h_mix": noisy}).findings
    assert [finding.sentence for finding in found] == ["no simple explanation", "follows from h_mix"]
    assert found[1].outputs[:4] == ("h_pre", "h_post", "h_res", "h_in")
    assert "dx" in found[1].outputs
    assert post_identity({"kept": lambda kept, _: noisy(0 * kept).flip(0)}).findings[0].share == 0  # x is not all


def test_a_race_is_different_in_each_run():
    generator = torch.Generator().manual_seed(0)

    def call(logits, backend):
        h_res = cases.SINKHORN.call(logits=logits, backend="reference")[0]
        return (h_res + 0.1 * torch.rand(h_res.shape, generator=generator),)

    (finding,) = diagnose(Case(cases.SINKHORN, (40,), 4, 0, fp32), call=call).findings
    assert finding.sentence.startswith("no simple explanation; different in each run: a race")


@pytest.mark.parametrize(("value", "words"), [(math.nan, "NaN"), (math.inf, "NaN or infinite")])
def test_a_computed_nan_is_not_called_unwritten(value, words):
    lead = post({"x_next": at((..., 2, slice(5, 8)), times(value))}).findings[0]
    assert (lead.outputs, lead.sentence) == (("x_next",), f"{words} in channels 5 to 7 of stream 2")


def test_a_truth_that_is_not_finite_is_not_judged():
    found = diagnose(Case(cases.MHC_POST, (12,), 4, 24, fp32, scale=math.nan)).findings
    assert found[0].sentence.startswith("cannot be judged: the truth is not finite")


def test_what_writes_to_a_cache_is_placed_without_a_model():
    case = ConvCase(3, 3, 20, dtype=fp32, update=True, places="ring")

    def call(backend, **tensors):
        y, conv_state = case.subject.call(**tensors, backend="reference")
        conv_state[..., 8:, :] = 0
        y[1] *= 2
        return y, conv_state

    found = diagnose(case, call=call).findings
    assert [finding.outputs for finding in found] == [("y",), ("conv_state",)]
    assert found[0].sentence == "counted 2 times in sequence 1"
    assert found[1].sentence == "zero (masked, or never added to) in channels 8 and up"


def test_wrong_elements_go_by_the_type():
    """1 + 2^-7 is one rounding to bf16, and an error in fp32."""
    exact = torch.ones(10, 4, 8, dtype=torch.float64)
    result = exact.clone()
    result[1, 2, 3] += 2**-8
    result[1, 2, 4] += 2**-6
    case = Case(cases.MHC_POST, (10,), 4, 8)
    for dtype, off in ((bf16, [[1, 2, 4]]), (fp32, [[1, 2, 3], [1, 2, 4]])):
        found = Output(case, "x_next", result.to(dtype), result.to(dtype), Exact(exact))
        assert found.off.nonzero().tolist() == off
