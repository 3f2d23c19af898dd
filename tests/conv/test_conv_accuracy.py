"""The convolution against fp64 whichever of its outputs are used."""

from itertools import product

import pytest
import torch

from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import ConvCase

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
PLACES = ("states", "cu_seqlens states")
UNUSED = (("y",), ("final_state",))


def parts_of_the_outputs(widths, types, channels):
    """Each output without a cotangent; with both of them, the cases of `mhc-ops check` are."""
    return [
        ConvCase(1, 9, D, W, dtype, dilation=1 + W // 7, places=places, unused=unused)
        for places, W, dtype, D, unused in product(PLACES, widths, types, channels, UNUSED)
    ]


# What takes another config on a GPU: another item size, more taps, channels that are a multiple of 16 or not. The
# interpreter takes its time and has one config: one type for each choice of outputs, in turn.
GPU_PARTS = parts_of_the_outputs((1, 4, 7), (bf16, fp32), (20, 64))
SOME_PARTS = [
    case
    for case in GPU_PARTS
    if case.D == 20 and (case.dtype == bf16) == (case.unused == UNUSED["cu_seqlens" in case.places])
]


def assert_accurate(case, backend, device):
    rows = accuracy.measure(case, backend, device)
    assert all(row.passed for row in rows), rows


@pytest.mark.parametrize("W", range(1, 9))
def test_any_of_the_outputs_may_be_unused(W):
    for case in parts_of_the_outputs([W], (bf16, fp16, fp32), (20, 64)):
        assert_accurate(case, "reference", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_PARTS, ids=str)
def test_any_of_the_outputs_may_be_unused_in_triton(case, poisoned):
    pytest.importorskip("triton")
    assert_accurate(case, "triton", "cuda")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", SOME_PARTS, ids=str)
def test_any_of_the_outputs_may_be_unused_in_the_interpreter(case, poisoned):
    pytest.importorskip("triton")
    assert_accurate(case, "triton", "cpu")
