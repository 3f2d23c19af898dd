"""The judge can say no: what it lets through and what it catches."""

from dataclasses import replace

import pytest
import torch

from mhc_ops.measure import accuracy, cases

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def verdict(result, exact):
    return accuracy.judge(None, "backend", "output", result, exact).passed


@pytest.fixture
def exact():
    return torch.randn(64, 32, dtype=fp64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, fp64])
def test_one_rounding_passes(dtype, exact):
    assert verdict(exact.to(dtype), exact)


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, fp64])
@pytest.mark.parametrize("fault", ["nan", "one element", "scale", "row of zeros", "truncated"])
def test_faults_fail(dtype, fault, exact):
    result = exact.to(dtype, copy=True)
    step = {bf16: 2**-7, fp16: 2**-10, fp32: 1e-4, fp64: 1e-10}[dtype]
    if fault == "nan":
        result[3, 4] = float("nan")
    elif fault == "one element":
        result[3, 4] += 10 * step
    elif fault == "scale":
        result = (exact * (1 + step)).to(dtype)
    elif fault == "row of zeros":
        result[5] = 0
    else:
        result = exact.to(dtype).float().view(torch.int32).bitwise_and(~0xFFFFF).view(fp32).to(dtype)
    assert not verdict(result, exact)


def test_few_elements_are_judged_one_by_one():
    exact = torch.tensor([1.0 + 2**-8, 1.0], dtype=fp64)
    assert verdict(exact.to(bf16), exact)
    assert not verdict(exact.to(bf16) * 1.02, exact)


def test_wrong_shape_is_an_error(exact):
    with pytest.raises(AssertionError, match=r"output is \[32, 64\], should be \[64, 32\]"):
        verdict(exact.T, exact)


def test_empty_and_zero():
    assert verdict(torch.zeros(0), torch.zeros(0, dtype=fp64))
    assert verdict(torch.zeros(3), torch.zeros(3, dtype=fp64))
    assert not verdict(torch.ones(3), torch.zeros(3, dtype=fp64))


@pytest.mark.parametrize("output", ["h_in", "h_post", "h_res", "inv_rms", "h_mix", "h_pre"])
def test_measure_finds_a_wrong_output(output):
    """An op that is off by 1e-4 in one output fails in that output and, where it has one, in its gradients."""
    subject = cases.MHC_FORWARD_PRE
    index = subject.outputs.index(output)

    def wrong(backend, **tensors):
        outputs = list(subject.call(**tensors, backend="reference"))
        if backend == "triton":
            outputs[index] = outputs[index] * (1 + 1e-4)
        return tuple(outputs)

    case = replace(cases.Case(cases.MHC_FORWARD_PRE, (40,), 4, 33, fp32), subject=replace(subject, call=wrong))
    failed = {row.output for row in accuracy.measure(case, "triton") if not row.passed}
    assert output in failed
    if index < 3:
        assert "dphi" in failed
    else:
        assert failed == {output}
    assert all(row.passed for row in accuracy.measure(case, "reference"))


def test_cases_are_the_same_each_time():
    case = cases.CHECK[1]
    assert all(torch.equal(a, b) for a, b in zip(case.inputs().values(), case.inputs().values()))
    assert str(case) == "mhc_forward_pre 2x128x4x256 bfloat16"


@pytest.mark.parametrize(("output", "passes"), [("h_res", True), ("dphi", True), ("h_post", False), ("h_mix", False)])
def test_steep_logits_allow_more_only_behind_sinkhorn(output, passes, exact):
    case = cases.Case(cases.MHC_PRE, (64,), 4, 32, sigma=8)
    assert accuracy.judge(case, "backend", output, (exact * (1 + 2e-5)).float(), exact).passed is passes
