"""backend="hip" with gradients, every type and width: on a ROCm GPU where there is one, and always on CPU tensors."""

from itertools import product

import pytest
import torch

import mhc_ops
from mhc_ops.core import backend
from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import ConvCase

PLACES = ("states", "seq_idx", "seq_idx states")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
ROCM = (pytest.mark.gpu, pytest.mark.skipif(torch.version.hip is None, reason="needs a ROCm build of PyTorch"))
SMALL = [
    ConvCase(2, 300, D, W, dtype, silu=W % 2 == 0, places=places)
    for dtype, W, D, places in product(TYPES, (2, 3, 4), (64, 65), ("", *PLACES))
]
PARTS = [
    ConvCase(2, 30, D, W, dtype, places="states", unused=(unused,))
    for dtype, W, D, unused in product(TYPES, (2, 3, 4), (64, 65), ("y", "final_state"))
]
LARGE = [
    *(ConvCase(3, 1000, D, 4, dtype, silu=silu) for dtype, D, silu in product(TYPES, (4096, 4097), (False, True))),
    *(
        ConvCase(1, 3000, 1024, 4, dtype, places=places)
        for dtype, places in product(TYPES, ("states", "seq_idx", "seq_idx states"))
    ),
    *(ConvCase(2_000, 1, 8, 4, dtype) for dtype in TYPES),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ROCM, id="rocm")])
def device(request):
    if request.param == "cpu" and not backend._CXX:
        pytest.skip("needs a C++ compiler")
    return request.param


def assert_accurate(case, device):
    """y, the final state and every gradient."""
    rows = accuracy.measure(case, "hip", device)
    assert {"y", "dx", "dweight", "dbias"} <= {row.output for row in rows}
    assert [row for row in rows if not row.passed] == []


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_accuracy(case, device, poisoned):
    assert_accurate(case, device)


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_any_of_the_outputs_may_be_unused(case, device, poisoned):
    assert_accurate(case, device)


@pytest.mark.parametrize("case", [pytest.param(case, marks=ROCM, id=str(case)) for case in LARGE])
def test_accuracy_of_large_sizes(case, poisoned):
    assert_accurate(case, "cuda")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_same_bits_twice(dtype, device):
    case = ConvCase(2, 700, 257, 4, dtype, places="states")
    tensors = case.inputs(device)
    cotangents = accuracy.random_cotangents(case.subject, accuracy.run(case.subject, tensors, "hip"))
    once, again = (accuracy.run(case.subject, tensors, "hip", cotangents) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


def conv(device):
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).to(device) for shape in ((2, 100, 64), (64, 4)))
    return mhc_ops.causal_conv1d(x, weight, activation="silu", backend="hip").cpu()


@pytest.mark.gpu
@ROCM[1]
def test_runs_on_the_current_stream():
    expected, stream = conv("cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch.equal(conv("cuda"), expected)


@pytest.mark.gpu
@ROCM[1]
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_gpu_of_its_tensors():
    assert torch.equal(conv("cuda:1"), conv("cuda:0"))


@pytest.mark.gpu
@ROCM[1]
def test_agrees_with_triton():
    case = ConvCase(2, 500, 256, dtype=torch.float32)
    tensors = case.inputs("cuda")
    hip, triton = (accuracy.run(case.subject, tensors, name)["y"] for name in ("hip", "triton"))
    torch.testing.assert_close(hip, triton)
