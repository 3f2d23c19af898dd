"""Where a test of mHC kernels runs."""

import pytest
from mhc_kernels import needs


@pytest.fixture(
    params=[
        pytest.param(("triton", "cpu"), marks=pytest.mark.interpreted, id="interpreted"),
        pytest.param(("triton", "cuda"), marks=pytest.mark.gpu, id="triton"),
        pytest.param(("tilelang", "cuda"), marks=pytest.mark.gpu, id="tilelang"),
    ]
)
def place(request):
    """A backend, and a device where it runs."""
    needs(request.param[0])
    return request.param
