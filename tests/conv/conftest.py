"""The backends of the convolution, each on every device that it has."""

import pytest
import torch

from mhc_ops.core import backend

CXX = pytest.mark.skipif(not backend._CXX, reason="needs a C++ compiler")
ROCM = pytest.mark.skipif(torch.version.hip is None, reason="needs a ROCm build of PyTorch")
EVERY = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(("triton", "cpu"), id="interpreted", marks=pytest.mark.interpreted),
    pytest.param(("triton", "cuda"), id="gpu", marks=pytest.mark.gpu),
]
HIP = [
    pytest.param(("hip", "cpu"), id="hip", marks=CXX),
    pytest.param(("hip", "cuda"), id="rocm", marks=(CXX, ROCM, pytest.mark.gpu)),
]


@pytest.fixture(params=EVERY)
def where(request):
    """A backend, and a device that it runs on."""
    return request.param


@pytest.fixture(params=[*EVERY, *HIP])
def anywhere(request):
    """As `where`, with the hip backend, which lacks some options."""
    return request.param
