"""Where a test of mHC runs: a backend, and a device of it."""

import pytest
from mhc_kernels import needs
from stack_results import PLACES

TILELANG = pytest.param(("tilelang", "cuda"), marks=pytest.mark.gpu, id="tilelang")


@pytest.fixture(params=PLACES)
def place(request):
    """The reference, or Triton's kernels."""
    needs(request.param[0])
    return request.param


@pytest.fixture(params=[*PLACES[1:], TILELANG])
def kernels(request):
    """Kernels of either backend."""
    needs(request.param[0])
    return request.param


@pytest.fixture(params=[*PLACES, TILELANG])
def anywhere(request):
    """The reference, or kernels of either backend."""
    needs(request.param[0])
    return request.param
