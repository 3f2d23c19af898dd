"""Where a test of mHC runs: a backend, and a device of it."""

import pytest
from mhc_kernels import needs
from stack_results import PLACES

TILELANG = pytest.param(("tilelang", "cuda"), marks=pytest.mark.gpu, id="tilelang")


def one_of(*places):
    @pytest.fixture(params=places)
    def there(request):
        needs(request.param[0])
        return request.param

    return there


place = one_of(*PLACES)  # the reference, or Triton's kernels
kernels = one_of(*PLACES[1:], TILELANG)  # of either backend
anywhere = one_of(*PLACES, TILELANG)
