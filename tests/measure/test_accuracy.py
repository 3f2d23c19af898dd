"""The judge can say no: what it lets through and what it catches."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import mhc_ops
from mhc_ops.measure.selection import CHECK
from mhc_ops.testing import accuracy, cases
from mhc_ops.testing.accuracy import Exact
from mhc_ops.testing.conv_cases import ConvCase

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def verdict(result, value, terms=None):
    exact = Exact(value, [] if terms is None else [lambda: terms])
    return accuracy.judge(None, "backend", "output", result, exact).passed


@pytest.fixture
def exact():
    return torch.randn(64, 32, dtype=fp64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32, fp64])
def test_one_rounding_passes_and_faults_fail(dtype, exact):
    right, step = exact.to(dtype), {bf16: 2**-7, fp16: 2**-10, fp32: 1e-4, fp64: 1e-10}[dtype]

    def changed(index, value):
        result = right.clone()
        result[index] = value
        return result

    faults = {
        "nan": changed((3, 4), math.nan),
        "one element": changed((3, 4), right[3, 4] + 10 * step),
        "scale": (exact * (1 + step)).to(dtype),
        "row of zeros": changed(5, 0),
        "truncated": right.float().view(torch.int32).bitwise_and(~0xFFFFF).view(fp32).to(dtype),
    }
    assert verdict(right, exact)
    assert [name for name, result in faults.items() if verdict(result, exact)] == []


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32])
@pytest.mark.parametrize("count", [3, 2000])
def test_what_a_gpu_flushes_passes(dtype, count):
    """Below 2^-126; and nothing above it, nor what a GPU does not make of it."""
    exact = torch.full((count,), 6.9e-39, dtype=fp64)
    assert verdict(torch.zeros(count, dtype=dtype), exact)
    assert verdict(torch.full((count,), 3e-39, dtype=dtype), exact)
    assert not verdict(torch.full((count,), 1e-30, dtype=fp32), exact)
    assert not verdict(torch.zeros(count, dtype=fp32), torch.full((count,), 1e-30, dtype=fp64))
    assert not verdict(torch.zeros(count, dtype=bf16), torch.full((count,), 2e-38, dtype=fp64))
    assert not verdict(torch.full((count,), 1.01e-30, dtype=fp32), torch.full((count,), 1e-30, dtype=fp64))
    assert not verdict(torch.zeros(count, dtype=fp64), exact)
    beside_large = torch.tensor([[1e3], [1e-39], [1e-25]], dtype=fp64)  # 2^-100 of the largest is nothing too
    assert verdict(torch.tensor([[1e3], [0.0], [1e-25]]).bfloat16(), beside_large)
    assert not verdict(torch.tensor([[1e3], [0.0], [1.1e-25]]).bfloat16(), beside_large)


def test_wrong_shape_is_an_error(exact):
    with pytest.raises(AssertionError, match=r"output is \[32, 64\], should be \[64, 32\]"):
        verdict(exact.T, exact)


def test_empty_and_zero():
    assert verdict(torch.zeros(0), torch.zeros(0, dtype=fp64))
    assert verdict(torch.zeros(3), torch.zeros(3, dtype=fp64))
    assert not verdict(torch.ones(3), torch.zeros(3, dtype=fp64))
    assert verdict(torch.zeros(3), torch.full((3,), 1e-60, dtype=fp64)), "fp32 has nothing that small"
    assert not verdict(torch.zeros(3), torch.full((3,), 1e-30, dtype=fp64))


@pytest.mark.parametrize("output", ["h_in", "h_post", "h_res", "inv_rms", "h_mix", "h_pre"])
def test_measure_finds_a_wrong_output(output):
    """An op that is off by 1e-4 in one output fails in that output and, where it has one, in its gradients."""
    subject = cases.MHC_FORWARD_PRE

    def wrong(backend, **tensors):
        off = 1e-4 * (backend == "triton")
        made = zip(subject.outputs, subject.call(**tensors, backend="reference"))
        return tuple(value * (1 + off * (name == output)) for name, value in made)

    case = cases.Case(replace(subject, call=wrong), (40,), 4, 33, fp32)
    failed = {row.output for row in accuracy.measure(case, "triton") if not row.passed}
    assert {output, "dphi"} <= failed if output in subject.differentiable else {output} == failed
    assert all(row.passed for row in accuracy.measure(case, "reference"))


@pytest.mark.parametrize(("output", "passes"), [("h_res", True), ("dphi", True), ("h_post", False), ("h_mix", False)])
def test_steep_logits_allow_more_only_behind_sinkhorn(output, passes, exact):
    case = cases.Case(cases.MHC_PRE, (64,), 4, 32, sigma=8)
    assert accuracy.judge(case, "backend", output, (exact * (1 + 2e-5)).float(), Exact(exact)).passed is passes


def test_one_rounding_of_numbers_too_small_for_fp16(exact):
    """Below 2^-14 the steps of fp16 stay as they are: one rounding is half of such a step."""
    for few in (1e-7 * exact[:20], 1e-5 * exact[:20], exact[:20]):
        assert verdict(few.half(), few)
        assert not verdict((few + 2**-23 + 2**-9 * few.abs().amax()).half(), few)


def test_values_that_repeat_do_not_average():
    """1 + 2^-8 is in the middle between two steps of bf16: every element is off by that, which is one rounding."""
    repeated = torch.full((64, 32), 1 + 2**-8, dtype=fp64)
    assert verdict(repeated.bfloat16(), repeated)
    assert not verdict((repeated + 2**-7).bfloat16(), repeated)
    spread = repeated * torch.linspace(1, 2, 32, dtype=fp64)
    assert verdict(spread.bfloat16(), spread)
    assert not verdict(spread.bfloat16() * (1 + 2**-7), spread)


def test_a_sum_that_cancels_is_judged_by_its_terms():
    """1000 added up to 1: rounding to fp32 is a share of the 1000."""
    one, terms = torch.ones(3, dtype=fp64), torch.full((3,), 1000.0, dtype=fp64)
    assert not verdict((one + 5e-3).float(), one)
    assert verdict((one + 5e-3).float(), one, terms)
    assert not verdict((one + 2e-2).float(), one, terms)
    assert verdict((one + 5e-6).float(), one, terms / 1e6), "terms that are smaller than their sum change nothing"
    assert not verdict((one + 2e-5).float(), one, terms / 1e6)
    assert verdict((one + 2**-8 + 5e-3).bfloat16(), one, terms)
    assert not verdict((one + 3e-2).bfloat16(), one, terms)


TINY = [cases.Case(cases.MHC_FORWARD_PRE, (3,), 2, 3, fp32), ConvCase(1, 12, 2, 3, fp32, places="cu_seqlens states")]


def all_terms(subject, tensors, cotangents):
    """Σ terms² of every gradient: one element of one cotangent, and nothing else, gives one term."""
    squares = {}
    for index, cotangent in enumerate(cotangents):
        for element in range(cotangent.numel()):
            only = [None] * len(cotangents)
            only[index] = torch.zeros_like(cotangent, dtype=fp64)
            only[index].view(-1)[element] = cotangent.view(-1)[element]
            for name, term in accuracy.run(subject, tensors, "reference", only).items():
                squares[name] = squares.get(name, 0) + term.square()
    return squares


@pytest.mark.parametrize("case", TINY, ids=str)
def test_the_sizes_of_terms_are_what_each_element_contributes(case, monkeypatch):
    """Against all terms one by one."""
    monkeypatch.setattr(accuracy, "DRAWS", (400,))  # a norm is then known to 4 %
    ran = accuracy.run_case(case, "reference")
    wide = {name: t.double() if t.is_floating_point() else t for name, t in ran.tensors.items()}
    squares = all_terms(case.subject, wide, ran.cotangents)
    for name, exact in accuracy.truth(case.subject, ran.tensors, ran.cotangents, ran.results).items():
        if name not in case.subject.outputs:
            assert exact.terms[0]().norm().item() == pytest.approx(squares[name].sum().sqrt().item(), rel=0.2), name


@pytest.mark.parametrize("seed", range(1, 21))
def test_the_reference_is_exact_at_any_seed(seed):
    """Every case of `mhc-ops check`, with 20 other draws; of mHC with fewer tokens, which take most of the time."""
    drawn = [replace(case, seed=cases.SEED + seed) for case in CHECK]
    drawn = [replace(c, outer=(min(32, c.outer[-1]),)) if isinstance(c, cases.Case) else c for c in drawn]
    failed = [row for case in drawn for row in accuracy.measure(case, "reference") if not row.passed]
    assert failed == []


def without_a_token(x, phi, backend, **rest):
    """dphi lacks what the last token contributes."""
    all_but, last = (
        cases.MHC_PRE.call(x=rows, phi=phi, **rest, backend=backend)
        for phi, rows in ((phi, x[:-1]), (phi.detach(), x[-1:]))
    )
    return tuple(torch.cat(two) for two in zip(all_but, last))


def with_gradient(case, name, fault):
    def call(backend, **tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].register_hook(fault)
        return case.subject.call(**tensors, backend=backend)

    return call


def in_two_parts(x, backend, **rest):
    """dx as torch adds it up: through the layer and past it, each rounded, and rounded again."""
    h_in, h_post, h_res = mhc_ops.mhc_pre(x, **{k: v for k, v in rest.items() if k != "h_out"}, backend=backend)
    return mhc_ops.mhc_post(x, rest["h_out"], h_post, h_res, backend=backend), h_in


FOUR_TOLERANCES = 4 * accuracy.NORM_TOLERANCE[fp32]
PRE, LAYER, POST_PRE, HEAD = (
    cases.Case(subject, (130,), 4, 64, bf16)
    for subject in (cases.MHC_PRE, cases.MHC_LAYER, cases.MHC_POST_PRE, cases.MHC_HEAD)
)
CONV, PACKED = ConvCase(2, 65, 64), ConvCase(1, 130, 64, 7, dilation=2, places="cu_seqlens states", silu=False)
SUMS = dict.fromkeys((PRE, LAYER, POST_PRE, HEAD), "phi bias gamma")  # dalpha, whose few numbers cancel: see below
SUMS |= {CONV: "weight bias", PACKED: "weight bias", ConvCase(2, 65, 16, n=4): "weight gamma"}
PLANTED = {"a token left out of dphi": (PRE, "dphi", without_a_token), "dx rounded twice": (LAYER, "dx", in_two_parts)}
for case, names in SUMS.items():
    for name in names.split():
        off = with_gradient(case, name, lambda gradient: gradient * (1 + FOUR_TOLERANCES))
        PLANTED[f"d{name} of {case}"] = case, f"d{name}", off


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fault", PLANTED)
def test_a_few_roundings_too_many_fail(fault, seed):
    """In every seed, and in that gradient alone."""
    case, output, call = PLANTED[fault]
    case = replace(case, seed=cases.SEED + seed)
    right = accuracy.run_case(case, "reference")
    assert all(row.passed for row in accuracy.judge_all(case, "reference", right))
    wrong = accuracy.run(replace(case.subject, call=call), right.tensors, "reference", right.cotangents)
    rows = accuracy.judge_all(case, "reference", right._replace(results=wrong))
    assert [row.output for row in rows if not row.passed] == [output]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("subject", [cases.MHC_PRE, cases.MHC_HEAD], ids=lambda subject: subject.name)
def test_dalpha_four_tolerances_of_its_terms_off_fails(subject, seed):
    """A few numbers, which cancel now and then: they are held to what they add up."""
    case = cases.Case(subject, (37,), 4, 24, fp32, seed=cases.SEED + seed)
    ran = accuracy.run_case(case, "reference")
    exact = accuracy.truth(subject, ran.tensors, ran.cotangents)["dalpha"]
    size = max(exact.value.norm(), exact.terms[-1]().norm())
    for error, passes in ((FOUR_TOLERANCES, False), (FOUR_TOLERANCES / 8, True)):
        wrong = (exact.value + error * size * exact.value.sign() / len(exact.value) ** 0.5).float()
        assert accuracy.judge(case, "backend", "dalpha", wrong, exact).passed is passes


def test_one_seed_for_all_cases(monkeypatch):
    """And the environment gives it."""
    assert {case.seed for case in CHECK} == {cases.SEED}
    monkeypatch.setenv("MHC_OPS_SEED", "31")
    code = "from mhc_ops.measure.selection import CHECK; print({case.seed for case in CHECK})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "{31}\n"


def test_the_largest_of_many_errors_is_allowed_more_than_their_mean():
    """In 16 bits, where every element is looked at: √(2 ln 1000) = 3.7 times what their norm is allowed."""
    value, terms = torch.full((1000, 1), 1.0, dtype=fp64), torch.full((1000, 1), 1e4, dtype=fp64)
    one, of_norm = torch.zeros(1000, 1, dtype=fp64), 1e-5 * 1e4
    one[0] = 1.0
    assert verdict((value + 3.5 * of_norm * one).bfloat16(), value, terms)
    assert not verdict((value + 4 * of_norm * one).bfloat16(), value, terms)
    assert not verdict((value + 3.5 * of_norm).bfloat16(), value, terms), "but not all of them"
