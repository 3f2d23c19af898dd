"""Random misuse: some in each run of the suite, more with `mhc-ops check --misuse`."""

import math
import os
import time
from dataclasses import replace
from itertools import islice

import pytest
import torch

import mhc_ops
from mhc_ops.testing import accuracy, cases, misuse, unusual
from mhc_ops.testing.misuse import Misuse

CPU = torch.device("cpu")


def assert_nothing_found(count, device, backends):
    """In so many calls, which are the same on a slow machine."""
    outcomes = list(islice(misuse.run(math.inf, device, backends, seed=cases.SEED), count))
    assert [outcome for outcome in outcomes if not outcome.passed] == []


@pytest.mark.parametrize("backend", ["reference", "hip"])
def test_the_cpu(backend):
    assert_nothing_found(500, "cpu", [backend])


@pytest.mark.interpreted
@pytest.mark.parametrize("count", [15, pytest.param(150, marks=pytest.mark.thorough)])
def test_the_kernels_in_the_interpreter(count):
    assert_nothing_found(count, "cpu", ["triton"])


@pytest.mark.gpu
def test_this_gpu():
    assert_nothing_found(1000, "cuda", ["triton"])


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


def test_a_call_follows_from_its_number():
    words = [misuse.misuse_of(3, number, "reference", CPU).words for number in range(40)]
    assert words == [misuse.misuse_of(3, number, "reference", CPU).words for number in range(40)]
    assert len(set(words)) > 35


def exactly(value):
    return lambda results: {"y": accuracy.Exact(torch.tensor([value], dtype=torch.float64))}


def raising(error):
    def call(backend):
        raise error

    return call


def returning(value):
    return lambda backend: {"y": torch.tensor([value])}


FOUND = {
    "a wrong number": (Misuse("", returning(1.0), exactly(1.1)), "y off by 9.1e-02 (allowed 1e-05)"),
    "accepted": (Misuse("", returning(1.0), None), "accepted"),
    "no words of ours": (Misuse("", lambda backend: {}[backend], None), "refused by KeyError: 'triton'"),
    "another error": (
        Misuse("", raising(OverflowError("int too large to convert to float")), None),
        "refused by OverflowError: int too large to convert to float",
    ),
    "nothing": (Misuse("", returning(1.0), exactly(1.0)), ""),
    "words of ours": (Misuse("", raising(ValueError("mhc_post: x must be")), None), ""),
    "words of torch": (Misuse("", raising(RuntimeError("of the reference too")), None), ""),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name):
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


@pytest.mark.parametrize(("factor", "found"), [(1, False), (1.1, True)])
def test_what_fp32_loses_is_no_misuse(factor, found):
    """From z = 17 on, σ(z) is 1 in fp32 and the gradient of z is 0, where fp64 has 1e-13."""
    case = next(case for case in cases.CHECK if case.subject is cases.MHC_HEAD and case.dtype == torch.float32)
    drawn = misuse._of_case("", case, {**case.inputs(), "bias": torch.full((case.n,), 30.0)})
    wrong = replace(drawn, call=lambda backend: {name: factor * of for name, of in drawn.call(backend).items()})
    assert drawn.exact(drawn.call("reference"))["dbias"].value.abs().max() > 0
    assert bool(misuse.examine(wrong, "reference")) == found
