"""Random cases against fp64: some in each run of the suite, more with `mhc-ops check --fuzz`."""

import math
from itertools import islice

import pytest
import torch

import mhc_ops
from mhc_ops.core.backend import BACKENDS
from mhc_ops.mhc.options import PreOptions
from mhc_ops.testing import cases, fuzz
from mhc_ops.testing.cases import LAYOUTS, Case
from mhc_ops.testing.conv_cases import PLACES, ConvCase

CPU = torch.device("cpu")


def assert_nothing_found(count, device, backends):
    """Of so many cases, which are the same on a slow machine."""
    outcomes = list(islice(fuzz.run(math.inf, device, backends, seed=cases.SEED), count))
    assert [outcome for outcome in outcomes if not outcome.passed] == []


def test_the_reference():
    assert_nothing_found(500, "cpu", ["reference"])


@pytest.mark.interpreted
@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.thorough)])
def test_the_kernels_in_the_interpreter(count):
    pytest.importorskip("triton")
    assert_nothing_found(count, "cpu", ["triton"])


@pytest.mark.gpu
def test_every_backend_of_this_gpu():
    assert_nothing_found(500, "cuda", BACKENDS)


def test_a_case_follows_from_its_number():
    drawn = [fuzz.case_of(3, number) for number in range(50)]
    assert [str(case) for case in drawn] == [str(fuzz.case_of(3, number)) for number in range(50)]
    assert len({str(case) for case in drawn}) == 50
    case = drawn[7]
    assert all(torch.equal(a, b) for a, b in zip(case.inputs().values(), fuzz.case_of(3, 7).inputs().values()))
    assert str(fuzz.case_of(4, 7)) != str(case)
    numbers = [outcome.case.split()[0] for outcome in islice(fuzz.run(60, "cpu", ["reference"], seed=3), 4)]
    assert numbers == ["3:0", "3:1", "3:2", "3:3"]


def test_what_tilelang_lacks_is_not_run_there():
    drawn = [case for case in (fuzz.case_of(0, number) for number in range(1000)) if isinstance(case, Case)]
    lacking = {case.subject.name for case in drawn if not case.runs_on("tilelang")}
    of_tilelang = {case.subject.name for case in drawn if case.runs_on("tilelang")}
    assert lacking - of_tilelang == set(cases.NOT_IN_TILELANG)
    assert of_tilelang == {subject.name for subject in (*cases.SUBJECTS, cases.MHC_NEXT)}


@pytest.mark.parametrize("small", [False, True])
def test_everything_is_drawn(small):
    drawn = [fuzz.case_of(0, number, small) for number in range(3000)]
    mhc = [case for case in drawn if isinstance(case, Case)]
    conv = [case for case in drawn if isinstance(case, ConvCase)]
    assert {case.subject.name.split()[0] for case in conv} == {"causal_conv1d", "causal_conv1d_update", "short_conv"}
    assert {case.subject.name for case in mhc} == {subject.name for subject in cases.ALL}
    assert {case.layout for case in drawn} == set(LAYOUTS)
    assert {case.dtype for case in drawn} == set(fuzz.FLOATS)
    assert {case.parameter_dtype for case in drawn} == {*fuzz.FLOATS, torch.float64}
    assert {case.n for case in mhc} == {case.W for case in conv} == set(range(1, 9))
    assert {case.dilation for case in conv} == {1, 2, 3, 5}
    assert {case.places for case in conv} == {"", *PLACES, "ring", "slots"}
    options = {name for case in mhc for name, _ in case.subject.options}
    assert options == {"iters", "eps", *PreOptions._fields} - {"residual"}
    assert any(not all(case.outer) for case in mhc) and any(case.L == 0 for case in conv)
    assert any(case.unused for case in mhc) and any(case.unused for case in conv)
    assert all(len(case.unused) < max(1, len(case.subject.differentiable)) for case in drawn)


def test_single_elements_that_are_zero_but_for_rounding():
    """Where the slope of SiLU turns, an element of dweight is 2e-4 off in fp32, and so on the other side in fp16."""
    assert fuzz.examine(fuzz.case_of(7, 2428, small=True), "reference", torch.device("cpu")) == ""


FAULTS = {
    "a value that is off": (lambda y, runs: y * (1 + 1e-4), "x_next off by"),
    "an element that is lost": (
        lambda y, runs: torch.cat([y.flatten()[:-1], y.new_zeros(1)]).view_as(y),
        "x_next off by",
    ),
    "other bits each time": (lambda y, runs: y * (1 + 2**-22 * (runs % 2)), "x_next has other bits in a second run"),
    "other bits in another batch": (
        lambda y, runs: y * (1 + 2**-22 * (y.numel() // (y.shape[-1] * y.shape[-2]) > 8)),
        "x_next has other bits in another batch",
    ),
    "a crash": (lambda y, runs: y.view(-7), "RuntimeError: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, monkeypatch):
    """Planted in mhc_post as a kernel has it; what computes the truth is left alone."""
    right, (plant, words), runs = mhc_ops.mhc_post, FAULTS[fault], []

    def wrong(x, *rest, backend, **more):
        y = right(x, *rest, backend="reference", **more)
        runs.append(1)
        return plant(y, len(runs)) if backend == "triton" else y

    monkeypatch.setattr(mhc_ops, "mhc_post", wrong)
    monkeypatch.setattr(fuzz, "runs", lambda case, *_: case.subject.name == "mhc_post" and all(case.outer))
    monkeypatch.setattr(fuzz, "FLOATS", (torch.float32,))
    found = [next(o for o in fuzz.run(60, "cpu", [name], seed=cases.SEED)) for name in ("triton", "reference")]
    assert [outcome.passed for outcome in found] == [False, True]
    assert words in found[0].detail
    number = int(found[0].case.split()[0].split(":")[1])
    assert words in fuzz.examine(fuzz.case_of(cases.SEED, number, small=True), "triton", CPU)


CONV = {
    "its batch": (ConvCase(2, 12, 5, dtype=torch.float32), lambda y, **_: len(y) > 1),
    "what it is packed with": (
        ConvCase(1, 12, 5, dtype=torch.float32, places="cu_seqlens states"),
        lambda y, cu_seqlens=None, **_: cu_seqlens is not None,
    ),
    "the tokens after it": (ConvCase(1, 12, 5, dtype=torch.float32), lambda y, **_: y.shape[1] == 12),
    "the chunks before it": (
        ConvCase(1, 12, 5, dtype=torch.float32, places="states"),
        lambda y, x, initial_state, **_: (
            not torch.equal(initial_state, CONV["the chunks before it"][0].inputs()["initial_state"])
        ),
    ),
}


@pytest.mark.parametrize("what", CONV)
def test_bits_of_a_sequence_that_depend_on(what, monkeypatch):
    right, (case, plant) = mhc_ops.causal_conv1d, CONV[what]
    planted = False

    def wrong(*, backend, **arguments):
        outputs = right(backend="reference", **arguments)
        y, *state = outputs if isinstance(outputs, tuple) else (outputs,)
        y = y * (1 + 2**-22 * (planted and plant(y, **arguments)))
        return (y, *state) if state else y

    monkeypatch.setattr(mhc_ops, "causal_conv1d", wrong)
    assert fuzz.in_any_batch(case, "triton", CPU) == []
    planted = True
    assert "y" in fuzz.in_any_batch(case, "triton", CPU)


def test_bits_are_compared():
    one = torch.tensor([[1.0, 2.0]], dtype=torch.float16)[:, :1]  # a single element, with a stride
    assert not fuzz.differ(one, one.clone())
    assert fuzz.differ(one, one + 2**-10)
    nan, zero = torch.tensor(float("nan")), torch.zeros(())
    assert not fuzz.differ(nan, nan)
    assert fuzz.differ(zero, -zero)
    assert fuzz.differ(nan, zero)
