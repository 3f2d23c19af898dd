"""The backends of the convolution, each on every device that it has."""

import pytest
import torch
from stack_results import PLACES

from mhc_ops.core import backend

CXX = pytest.mark.skipif(not backend.CXX, reason="needs a C++ compiler")
ROCM = pytest.mark.skipif(torch.version.hip is None, reason="needs a ROCm build of PyTorch")
HIP = [
    pytest.param(("hip", "cpu"), id="hip", marks=CXX),
    pytest.param(("hip", "cuda"), id="rocm", marks=(CXX, ROCM, pytest.mark.gpu)),
]


@pytest.fixture(params=PLACES)
def where(request):
    return request.param


@pytest.fixture(params=[*PLACES, *HIP])
def anywhere(request):
    """As `where`, with the hip backend, which lacks some options."""
    return request.param
