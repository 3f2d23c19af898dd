"""backend="hip" from the public function: on CPU tensors the very kernels run, compiled by a C++ compiler."""

import pytest
import torch

import mhc_ops
from mhc_ops.core import backend
from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import CHECK, ConvCase

pytestmark = pytest.mark.skipif(not backend._CXX, reason="needs a C++ compiler")
CASES = [case for case in CHECK if case.runs_on("hip")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_accuracy(case, poisoned):
    rows = accuracy.measure(case, "hip", "cpu")
    assert all(row.passed for row in rows), rows


@pytest.mark.parametrize(
    ("case", "missing"),
    [
        (ConvCase(1, 9, 8, dilation=2), "dilation"),
        (ConvCase(1, 9, 8, 5), "width 5"),
        (ConvCase(1, 9, 8, residual=True), "residual"),
        (ConvCase(1, 9, 8, places="cu_seqlens"), "cu_seqlens"),
    ],
    ids=str,
)
def test_what_it_does_not_do_is_named(case, missing):
    with pytest.raises(NotImplementedError, match=f"^causal_conv1d: the hip backend has no {missing}"):
        case.subject.call(**case.inputs(), backend="hip")


def test_decoding_is_not_there():
    case = ConvCase(2, 1, 8, update=True)
    with pytest.raises(NotImplementedError, match="the hip backend of conv does not have it"):
        case.subject.call(**case.inputs(), backend="hip")


def test_cuda_tensors_are_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    reason = backend.why_not("conv", "hip", "cuda")
    assert reason == "hip runs on ROCm devices and on CPU tensors, the tensors are on a CUDA device"


def test_no_compiler_is_said(monkeypatch):
    monkeypatch.setattr(backend, "_CXX", None)
    with pytest.raises(RuntimeError, match=r"backend 'hip' cannot run here: .* there is no C\+\+ compiler"):
        mhc_ops.causal_conv1d(torch.zeros(1, 2, 4), torch.zeros(4, 2), backend="hip")
