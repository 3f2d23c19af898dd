"""Where a test runs: on the CPU, in Triton's interpreter, or on a GPU."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items):
    no_gpu = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    compiled = pytest.mark.skip(reason="needs TRITON_INTERPRET=1, as in the second run of ./run_tests.sh")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "interpreted" in item.keywords and not INTERPRETED:
            item.add_marker(compiled)
