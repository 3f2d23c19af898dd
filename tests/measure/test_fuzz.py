"""Random cases and random misuse: some in each run of the suite, more with `mhc-ops check --fuzz` and `--misuse`."""

import math
import os
import time
from itertools import islice
from unittest.mock import Mock

import pytest
import torch

import mhc_ops
from mhc_ops.core.backend import BACKENDS
from mhc_ops.mhc.options import PreOptions
from mhc_ops.testing import accuracy, cases, fuzz, misuse, unusual
from mhc_ops.testing.cases import LAYOUTS, Case
from mhc_ops.testing.conv_cases import PLACES, ConvCase
from mhc_ops.testing.misuse import Misuse

CPU = torch.device("cpu")


def found(draw, count, device, backends):
    """In so many draws, which are the same on a slow machine."""
    outcomes = islice(draw.run(math.inf, device, backends, seed=cases.SEED), count)
    return [outcome for outcome in outcomes if not outcome.passed]


DRAWS = {"fuzz": (fuzz, "reference"), "misuse": (misuse, "reference"), "misuse-hip": (misuse, "hip")}


@pytest.mark.parametrize(("draw", "backend"), DRAWS.values(), ids=DRAWS)
def test_the_cpu(draw, backend):
    assert found(draw, 500, "cpu", [backend]) == []


@pytest.mark.interpreted
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("draw", "count"), [pytest.param(fuzz, 6, id="fuzz"), pytest.param(misuse, 15, id="misuse")])
def test_the_kernels_in_the_interpreter(draw, count, times):
    pytest.importorskip("triton")
    assert found(draw, times * count, "cpu", ["triton"]) == []


@pytest.mark.gpu
def test_this_gpu():
    assert found(fuzz, 500, "cuda", BACKENDS) == []
    assert found(misuse, 1000, "cuda", ["triton"]) == []


def test_a_draw_follows_from_its_number():
    drawn = [fuzz.case_of(3, number) for number in range(50)]
    assert [str(case) for case in drawn] == [str(fuzz.case_of(3, number)) for number in range(50)]
    assert len({str(case) for case in drawn}) == 50 and str(fuzz.case_of(4, 7)) != str(drawn[7])
    pairs = zip(drawn[7].inputs().values(), fuzz.case_of(3, 7).inputs().values())
    assert all(torch.equal(a, b) for a, b in pairs)
    numbers = [outcome.case.split()[0] for outcome in islice(fuzz.run(60, "cpu", ["reference"], seed=3), 3)]
    assert numbers == ["3:0", "3:1", "3:2"]
    words, again = ([misuse.misuse_of(3, n, "reference", CPU).words for n in range(40)] for _ in range(2))
    assert words == again and len(set(words)) > 35


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


FAULTS = {
    "x_next off by": lambda y, runs: y * (1 + 1e-4),
    "x_next has other bits in a second run": lambda y, runs: y * (1 + 2**-22 * (runs % 2)),
    "x_next has other bits in another batch": lambda y, runs: y * (1 + 2**-22 * (y[..., 0, 0].numel() > 8)),
    "RuntimeError: ": lambda y, runs: y.view(-7),
}


@pytest.mark.parametrize(("words", "plant"), FAULTS.items(), ids=FAULTS)
def test_faults_are_found(words, plant, monkeypatch):
    """Planted in mhc_post as a kernel has it; what computes the truth is left alone."""
    right, runs = mhc_ops.mhc_post, []

    def wrong(x, *rest, backend, **more):
        y = right(x, *rest, backend="reference", **more)
        runs.append(1)
        return plant(y, len(runs)) if backend == "triton" else y

    monkeypatch.setattr(mhc_ops, "mhc_post", wrong)
    monkeypatch.setattr(fuzz, "runs", lambda case, *_: case.subject.name == "mhc_post" and all(case.outer))
    monkeypatch.setattr(fuzz, "FLOATS", (torch.float32,))
    outcomes = [next(o for o in fuzz.run(60, "cpu", [name], seed=cases.SEED)) for name in ("triton", "reference")]
    assert [outcome.passed for outcome in outcomes] == [False, True]
    assert words in outcomes[0].detail
    number = int(outcomes[0].case.split()[0].split(":")[1])
    assert words in fuzz.examine(fuzz.case_of(cases.SEED, number, small=True), "triton", CPU)


CONV = {  # B, the places, and when the bits are others; first is the state that the case begins with
    "its batch": (2, "", lambda y, given, first: len(y) > 1),
    "what it is packed with": (1, "cu_seqlens states", lambda y, given, first: "cu_seqlens" in given),
    "the tokens after it": (1, "", lambda y, given, first: y.shape[1] == 12),
    "the chunks before it": (1, "states", lambda y, given, first: not torch.equal(given["initial_state"], first)),
}


@pytest.mark.parametrize("what", CONV)
def test_bits_of_a_sequence_that_depend_on(what, monkeypatch):
    right, (B, places, plant) = mhc_ops.causal_conv1d, CONV[what]
    case, planted = ConvCase(B, 12, 5, dtype=torch.float32, places=places), False

    def wrong(*, backend, **arguments):
        outputs = right(backend="reference", **arguments)
        y, *state = outputs if isinstance(outputs, tuple) else (outputs,)
        y = y * (1 + 2**-22 * (planted and plant(y, arguments, case.inputs().get("initial_state"))))
        return (y, *state) if state else y

    monkeypatch.setattr(mhc_ops, "causal_conv1d", wrong)
    assert fuzz.in_any_batch(case, "triton", CPU) == []
    planted = True
    assert "y" in fuzz.in_any_batch(case, "triton", CPU)


def test_bits_are_compared():
    one = torch.tensor([[1.0, 2.0]], dtype=torch.float16)[:, :1]  # a single element, with a stride
    assert fuzz.differ(one, one + 2**-10) and not fuzz.differ(one, one.clone())
    nan, zero = torch.tensor(float("nan")), torch.zeros(())
    assert fuzz.differ(zero, -zero) and fuzz.differ(nan, zero) and not fuzz.differ(nan, nan)


def test_every_public_function_is_called():
    """But for modules, the carry, which takes anything, and what `metrics` returns."""
    public = {name for name in unusual.PUBLIC if callable(getattr(mhc_ops, name))}
    assert {*unusual.calls(CPU)} == public - {"Carry", "Metrics"}


@pytest.mark.parametrize("name", unusual.calls(CPU))
def test_a_valid_call_is_accepted(name):
    """Otherwise nothing would be seen of what is changed about it."""
    function, arguments = getattr(mhc_ops, name), unusual.calls(CPU)[name]
    if "ilelang" in name.lower() or "triton" in name:
        pytest.skip("runs on a GPU")
    unusual.outputs(function, arguments, "reference")


def exactly(value):
    return lambda results, dtype: {"y": accuracy.Exact(torch.tensor([value], dtype=dtype))}


ONE = Mock(return_value={"y": torch.ones(1)})
FOUND = {
    "a wrong number": (Misuse("", ONE, exactly(1.1)), "y off by 9.1e-02 (allowed 1e-05)"),
    "accepted": (Misuse("", ONE, None), "accepted"),
    "no words of ours": (Misuse("", lambda backend: {}[backend], None), "refused by KeyError: 'triton'"),
    "nothing": (Misuse("", ONE, exactly(1.0)), ""),
    "words of ours": (Misuse("", Mock(side_effect=ValueError("mhc_post: x must be")), None), ""),
    "words of torch": (Misuse("", Mock(side_effect=RuntimeError("of the reference too")), None), ""),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_a_call_is_found_to_do(name):
    drawn, detail = FOUND[name]
    assert misuse.examine(drawn, "triton") == detail


def dies(calls, drawn):
    os.abort()


def hangs(calls, drawn):
    time.sleep(60)


@pytest.mark.parametrize(("ends", "detail"), [(dies, "ended the process with -6"), (hangs, "no answer in 0.5 s")])
def test_a_call_that_ends_or_holds_the_process(ends, detail, monkeypatch):
    """Another process goes on with the next call."""
    monkeypatch.setattr(misuse, "answer", ends)
    monkeypatch.setattr(misuse, "LONGEST", 0.5 if ends is hangs else 600)
    outcomes = list(islice(misuse.run(math.inf, "cpu", ["hip"], seed=0), 2))
    words = [f"0:{number} {misuse.misuse_of(0, number, 'hip', CPU).words}" for number in range(2)]
    assert [(o.case, o.backend, o.passed, o.detail) for o in outcomes] == [(of, "hip", False, detail) for of in words]
