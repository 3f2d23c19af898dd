"""The step-by-step models are the ops, and right kernels give silence."""

import pytest
import torch

from mhc_ops.measure.diagnose import diagnose
from mhc_ops.measure.diagnose.ops import model_of, terms_of
from mhc_ops.testing import accuracy, cases
from mhc_ops.testing.cases import Case
from mhc_ops.testing.conv_cases import PLACES, ConvCase

fp32, bf16 = torch.float32, torch.bfloat16
OPS = [
    *(Case(subject, (2, 9), 3, 13, fp32, sigma=3) for subject in cases.ALL),
    Case(cases.MHC_LAYER, (), 4, 10, fp32, gamma=False),
    Case(cases.MHC_NEXT_NORMED, (7,), 3, 13, bf16),  # which goes on with x_next and dlink as they were rounded
    *(ConvCase(2, 19, 7, dtype=fp32, residual=True, dilation=2, places=places) for places in ("", "seq_idx", "states")),
    *(ConvCase(1, 33, 7, dtype=fp32, places=places) for places in PLACES[1:]),
    ConvCase(2, 9, 5, 1, fp32, silu=False, bias=False),
    *(ConvCase(2, 17, 5, n=3, residual=residual, dtype=fp32) for residual in (True, False)),
]


def model_and_truth(case):
    ran = accuracy.run_case(case, "reference")
    given = ran.tensors, ran.cotangents, ran.results
    return model_of(case, *given), accuracy.truth(case.subject, *given)


@pytest.mark.parametrize("case", OPS, ids=str)
def test_a_model_is_its_op(case):
    model, truth = model_and_truth(case)
    for name, exact in truth.items():
        assert accuracy.close(model.right[name].reshape(exact.value.shape), exact), name
        summands = terms_of(case, model, name)
        if summands:
            assert accuracy.close(sum(summands.values()).reshape(exact.value.shape), exact), name


OF_KERNELS = [
    *(Case(subject, (6,), 3, 20, fp32) for subject in cases.ALL),
    Case(cases.MHC_LAYER, (6,), 2, 40, bf16),
    Case(cases.MHC_NEXT_NORMED, (6,), 2, 40, bf16),
    *(ConvCase(1, 13, 20, dtype=fp32, residual=True, places=places) for places in ("", "seq_idx", "cu_seqlens states")),
    ConvCase(2, 1, 20, update=True),
    ConvCase(2, 9, 20, n=2, residual=True),
]


@pytest.mark.parametrize("case", OF_KERNELS, ids=str)
def test_the_kernels_give_silence(case, kernel_device):
    assert diagnose(case, "triton", kernel_device).findings == []


@pytest.mark.gpu
@pytest.mark.parametrize("subject", cases.ALL, ids=lambda subject: subject.name)
def test_the_kernels_give_silence_at_a_real_size(subject):
    assert diagnose(Case(subject, (2, 128), 4, 264, bf16), "triton", "cuda").findings == []
