"""Every planted fault gets its verdict, and a right op gets none."""

import math

import faults
import pytest
import torch

from mhc_ops.measure.diagnose import diagnose
from mhc_ops.testing import cases
from mhc_ops.testing.cases import Case
from mhc_ops.testing.conv_cases import ConvCase

fp32, bf16 = torch.float32, torch.bfloat16


def of(subject, sigma=Case.sigma):
    """72 channels and 38 tokens: more than a block of 32 each, and a multiple of none."""

    def diagnosed(fault, dtype=fp32):
        case = Case(subject, (2, 19), 4, 72, dtype, sigma=sigma)
        return diagnose(case, call=faults.call(case, fault))

    diagnosed.__name__ = subject.name
    return diagnosed


sinkhorn, pre, post = of(cases.SINKHORN, sigma=3), of(cases.MHC_FORWARD_PRE), of(cases.MHC_POST)
maps, read, normed = of(cases.MHC_MAPS), of(cases.MHC_READ), of(cases.MHC_PRE_NORMED)
boundary, boundary_normed = of(cases.MHC_NEXT), of(cases.MHC_NEXT_NORMED)
shifted, mean = of(cases.MHC_SHIFTED_PRE), of(cases.MHC_MEAN)
post_pre = of(cases.MHC_POST_PRE)
pre_identity, post_identity = of(cases.MHC_PRE_IDENTITY), of(cases.MHC_POST_IDENTITY)


def conv(fault, dtype=fp32):
    """Two sequences in each row of 75 tokens."""
    case = ConvCase(2, 75, 20, dtype=dtype, residual=True, places="seq_idx")
    inputs = case.inputs()
    inputs["seq_idx"] = (torch.arange(75) >= 40).int().expand(2, 75).contiguous()
    return diagnose(case, tensors=inputs, call=faults.call(case, fault))


VERDICTS = {
    # the four that the original found by hand
    (pre, "block shorter than a row"): "h_mix: channels 32 and up of x are read as zero for h_mix",
    (pre, "wrong variable accumulated n*n times"): (
        "dx: the norm's term of pre is counted 17 (n² + 1) times and the norm's term of res is left out"
    ),
    (pre, "inv_rms missing in res, backward"): "dphi: the res section lacks the factor inv_rms in dh_mix",
    (pre, "grid covers the first stream only, backward"): "dx: streams 1 to 3 are never written",
    # what the original's forward did beside its backward
    (pre, "gamma left out of h_mix"): "h_mix: gamma is left out of h_mix",
    # and more of their kind
    (pre, "inv_rms missing in post, forward"): "h_post: the post section lacks the factor inv_rms in z",
    (pre, "last partial block of h_in not written"): "h_in: channels 64 and up are never written",
    (pre, "dbias of res accumulated n*n times"): "dbias: the res section is counted 16 (n²) times",
    (pre, "dphi without the last tokens"): "dphi: tokens 32 and up of dh_mix are read as zero for dphi",
    (pre, "norm term left out"): "dx: the norm's term is left out",
    (post_pre, "norm term of x_next left out"): "dx: the term via inv_rms is left out of dx_next",
    (maps, "alpha left out"): "h_pre: alpha is left out of z",
    (post, "grid covers the first stream only, forward"): "x_next: streams 1 to 3 are never written",
    (post, "stream 2 left out of the mix"): "x_next: h_resᵀ x of stream 2 is left out",
    (read, "stream 2 left out of h_in"): "h_in: h_in of stream 2 is left out",
    # of the layer's norm
    (normed, "norm's weight left out"): "h_in: layer_norm_weight is left out of h_in",
    (normed, "norm's factor left out"): "h_in: r is left out of h_in",
    (normed, "norm over the first block"): "h_in: channels 32 and up of h_read are read as zero for r",
    (normed, "norm's weight left out, backward"): "dbias: layer_norm_weight is left out of the backward",
    (normed, "norm's factor taken as constant"): "dbias: the term via r is left out of dh_read",
    (normed, "norm's factor missing in its weight's gradient"): (
        "dlayer_norm_weight: r is left out of dlayer_norm_weight"
    ),
    (normed, "norm's weight's gradient without the last tokens"): (
        "dlayer_norm_weight: tokens 32 and up of dh_in are read as zero for dlayer_norm_weight"
    ),
    # of a boundary
    (boundary_normed, "block shorter than a row, of x_next"): (
        "h_in: channels 32 and up of x_next are read as zero for h_mix"
    ),
    (boundary, "last partial block of x_next not written"): "x_next: channels 64 and up are never written",
    (boundary, "stream 2 left out of the next mix"): "x_after: h_resᵀ x_next of stream 2 is left out",
    (boundary_normed, "what comes past the sublayer left out"): "dlink: h_res dx_after is left out",
    (boundary, "norm term n times"): "dlink: the norm's term is counted 4 (n) times",
    (boundary_normed, "stream 2 of dlink not read"): "dh_out: dh_out of stream 2 is left out",
    (boundary, "dlink read up to the first block"): (
        "dh_post: channels 32 and up of dx_next are read as zero for dh_post"
    ),
    # of the shifted form, the identity and the mean
    (shifted, "gradient of the weights before of the first block"): (
        "dread: channels 32 and up of x are read as zero for dread"
    ),
    (post_identity, "streams not kept"): "x_next: x is left out",
    (post_identity, "streams kept, but not backward"): "dx: everything is zero: masked, or never added to",
    (mean, "sum of the streams"): "out: out is counted 4 (n) times",
    # of the convolution
    (conv, "bias left out"): "y: the bias is left out of z",
    (conv, "activation left out"): "y: the activation is left out of y",
    (conv, "residual left out"): "y: the residual is left out",
    (conv, "dweight without its last strip"): "dweight: tokens 64 and up of dz are read as zero for dweight",
    (conv, "dbias counted per tap"): "dbias: everything is counted 4 (W) times",
    # the same in other ops
    (maps, "block shorter than a row"): "h_pre: channels 32 and up of x are read as zero for h_mix",
    (maps, "inv_rms missing in res, backward"): "dphi: the res section lacks the factor inv_rms in dh_mix",
    (read, "grid covers the first stream only, backward"): "dx: streams 1 to 3 are never written",
    (boundary_normed, "norm's factor taken as constant"): "dbias: the term via r is left out of dh_read",
    (boundary, "stream 2 left out of the mix"): "x_next: h_resᵀ x of stream 2 is left out",
    (pre_identity, "inv_rms missing in post, forward"): "h_post: the post section lacks the factor inv_rms in z",
    (pre_identity, "norm term left out"): "dx: the norm's term is left out",
}


IN_BF16 = [
    (pre, "block shorter than a row"),
    (pre, "wrong variable accumulated n*n times"),
    (pre, "inv_rms missing in res, backward"),
    (pre, "grid covers the first stream only, backward"),
    (pre, "gamma left out of h_mix"),
    (conv, "bias left out"),
    (conv, "activation left out"),
]
EVERY = [*((*key, fp32) for key in VERDICTS), *((*key, bf16) for key in IN_BF16)]


@pytest.mark.parametrize(
    ("op", "fault", "dtype"), EVERY, ids=[f"{op.__name__}, {fault}, {t}" for op, fault, t in EVERY]
)
def test_verdict(op, fault, dtype):
    diagnosis = op(fault, dtype)
    lead = diagnosis.findings[0]
    print(f"\n{fault}\n    -> {lead.outputs}: {lead.sentence}")
    assert f"{lead.outputs[0]}: {lead.sentence}" == VERDICTS[op, fault]
    if dtype == fp32:
        assert lead.share > 0.999
        named = [name for finding in diagnosis.findings for name in finding.outputs]
        assert sorted(named) == sorted(row.output for row in diagnosis.rows if not row.passed)


@pytest.mark.parametrize("dtype", [fp32, bf16])
@pytest.mark.parametrize(
    ("fault", "verdict"),
    {
        "halo missing": "y: no simple explanation; wrong: tokens 32, 33, 34, 64, 65 and 66",
        "leak between sequences": "y: no simple explanation; wrong: tokens 40 to 42",
        "halo missing in dweight": "dweight: no simple explanation; wrong: taps 0 to 2",
    }.items(),
)
def test_a_fault_without_a_name_has_a_place(fault, verdict, dtype):
    lead = conv(fault, dtype).findings[0]
    assert f"{lead.outputs[0]}: {lead.sentence}" == verdict
    assert not lead.share


@pytest.mark.parametrize("dtype", [fp32, bf16])
@pytest.mark.parametrize("op", [*map(of, cases.ALL), of(cases.SINKHORN, sigma=3), conv])
def test_silence(op, dtype):
    """The same arithmetic without a fault."""
    diagnosis = op(None, dtype)
    assert diagnosis.findings == []
    assert all(row.passed for row in diagnosis.rows)


def test_every_planted_fault_has_its_verdict():
    assert list(faults.FAULTS) == list(dict.fromkeys(fault for _, fault in VERDICTS))


def test_one_cause_takes_all_that_follows_from_it():
    (finding,) = pre("block shorter than a row").findings
    assert finding.outputs == ("h_mix", "h_pre", "h_post", "h_res", "h_in", "dbias", "dalpha", "dphi", "dgamma", "dx")


def test_a_gradient_that_should_be_none_is_off():
    """What x gets at a boundary comes through the link; a kernel that writes it to dx too counts it twice."""
    case = Case(cases.MHC_NEXT, (20,), 4, 24, fp32)
    call = faults.call(case, {"dx": lambda dx, values: values["dlink"]})
    assert [finding.outputs for finding in diagnose(case, call=call).findings] == [("dx",)]


def test_what_cannot_be_explained_is_said_and_what_follows_from_it():
    """Noise in h_mix is no fault that anyone thought of; the maps made from it are right, given it."""

    def call(backend, **tensors):
        h_in, h_post, h_res, inv_rms, h_mix, h_pre = cases.MHC_FORWARD_PRE.call(**tensors, backend="reference")
        noise = torch.randn(h_mix.shape, generator=torch.Generator().manual_seed(0))
        return h_in, h_post, h_res, inv_rms, h_mix + 0.1 * noise, h_pre

    (finding,) = diagnose(Case(cases.MHC_FORWARD_PRE, (20,), 4, 24, fp32), call=call).findings
    assert (finding.outputs, finding.sentence) == (("h_mix",), "no simple explanation")
    assert not finding.share

    def noisy_from_there_on(x, phi, alpha, bias, gamma, backend):
        alphas = torch.cat([a.expand(size) for a, size in zip(alpha, (4, 4, 16))])
        noise = torch.randn(20, 24, generator=torch.Generator().manual_seed(0))
        inv_rms = torch.rsqrt(x.flatten(1).square().mean(-1) + 1e-6)
        h_mix = (x * gamma).flatten(1) @ phi.T + 0.1 * noise
        z = h_mix * inv_rms[:, None] * alphas + bias
        h_pre = torch.sigmoid(z[:, :4]) + 1e-6
        h_in = (h_pre[..., None] * x).sum(1)
        h_post, h_res = 2 * torch.sigmoid(z[:, 4:8]), z[:, 8:].unflatten(-1, (4, 4))
        return h_in, h_post, h_res, inv_rms.detach(), h_mix.detach(), h_pre.detach()

    found = diagnose(Case(cases.MHC_FORWARD_PRE, (20,), 4, 24, fp32), call=noisy_from_there_on).findings
    assert [finding.sentence for finding in found] == ["no simple explanation", "follows from h_mix"]
    assert found[1].outputs[:4] == ("h_pre", "h_post", "h_res", "h_in")
    assert "dx" in found[1].outputs


def test_a_race_is_different_in_each_run():
    generator = torch.Generator().manual_seed(0)

    def call(logits, backend):
        h_res = cases.SINKHORN.call(logits=logits, backend="reference")[0]
        return (h_res + 0.1 * torch.rand(h_res.shape, generator=generator),)

    (finding,) = diagnose(Case(cases.SINKHORN, (40,), 4, 0, fp32), call=call).findings
    assert finding.sentence.startswith("no simple explanation; different in each run: a race")


@pytest.mark.parametrize(("value", "words"), [(math.nan, "NaN"), (math.inf, "NaN or infinite")])
def test_a_computed_nan_is_not_called_unwritten(value, words):
    def call(x, h_out, h_post, h_res, backend):
        x_next = cases.MHC_POST.call(x=x, h_out=h_out, h_post=h_post, h_res=h_res, backend="reference")[0].clone()
        x_next[..., 2, 5:8] *= value
        return (x_next,)

    lead = diagnose(Case(cases.MHC_POST, (12,), 4, 24, fp32), call=call).findings[0]
    assert (lead.outputs, lead.sentence) == (("x_next",), f"channels 5 to 7 of stream 2 are {words}")


def test_a_truth_that_is_not_finite_is_not_judged():
    case = Case(cases.MHC_POST, (12,), 4, 24, fp32)
    tensors = case.inputs()
    tensors["x"][3, 1, 7] = math.nan
    sentences = [finding.sentence for finding in diagnose(case, tensors=tensors).findings]
    assert sentences[0].startswith("cannot be judged: the truth is not finite")


def test_a_decoding_step_is_placed_without_a_model():
    case = ConvCase(3, 3, 20, dtype=fp32, update=True, places="ring")

    def call(backend, **tensors):
        y, conv_state = case.subject.call(**tensors, backend="reference")
        conv_state[..., 8:, :] = 0
        y[1] *= 2
        return y, conv_state

    found = diagnose(case, call=call).findings
    assert [finding.outputs for finding in found] == [("y",), ("conv_state",)]
    assert found[0].sentence == "sequence 1 is counted 2 times"
    assert found[1].sentence == "channels 8 and up are zero: masked, or never added to"


def test_a_state_without_elements():
    """One tap needs no tokens before."""
    case = ConvCase(2, 9, 5, 1, dtype=fp32, places="states")

    def call(backend, **tensors):
        y, final_state = case.subject.call(**tensors, backend="reference")
        return 2 * y, final_state

    lead = diagnose(case, call=call).findings[0]
    assert (lead.outputs, lead.sentence) == (("y",), "the convolution is counted 2 times")
