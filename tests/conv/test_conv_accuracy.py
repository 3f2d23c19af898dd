"""The convolution against fp64 whichever outputs are used and whatever is drawn."""

from dataclasses import replace

import pytest
import torch

from mhc_ops.core.backend import why_not
from mhc_ops.measure import accuracy, cases
from mhc_ops.measure.conv_cases import ConvCase

PARTS = [
    ConvCase(1, 9, 20, W, dtype, dilation=dilation, places=places, unused=unused)
    for places in ("states", "cu_seqlens states")
    for W, dilation in ((1, 1), (4, 1), (7, 2))
    for dtype in (torch.bfloat16, torch.float32)
    for unused in ((), ("y",), ("final_state",))
]


def assert_accurate(case, backend, device):
    rows = accuracy.measure(case, backend, device)
    assert all(row.passed for row in rows), rows


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_any_of_the_outputs_may_be_unused(case):
    assert_accurate(case, "reference", "cpu")


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_any_of_the_outputs_may_be_unused_in_triton(case, kernel_device, poisoned):
    pytest.importorskip("triton")
    assert_accurate(case, "triton", kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in PARTS if case.runs_on("hip")], ids=str)
def test_any_of_the_outputs_may_be_unused_in_hip(case):
    if why_not("conv", "hip", "cuda"):
        pytest.skip(why_not("conv", "hip", "cuda"))
    assert_accurate(case, "hip", "cuda")


TINY = [
    ConvCase(1, 7, 12),
    ConvCase(1, 7, 1, 3, torch.float32),
    ConvCase(1, 7, 12, parameter_dtype=torch.bfloat16, places="cu_seqlens states"),
    ConvCase(1, 4, 12, 2, n=2),
]


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", TINY, ids=str)
def test_exact_at_any_seed(case, seed):
    pytest.importorskip("triton")
    assert_accurate(replace(case, seed=cases.SEED + seed), "triton", "cpu")
