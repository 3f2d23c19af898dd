"""backend="hip" against fp64: on a ROCm GPU where there is one, and always on CPU tensors, by the same kernels."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from conv_oracle import assert_accurate

import mhc_ops
from mhc_ops.conv import hip
from mhc_ops.core import backend
from mhc_ops.testing.cases import LAYOUTS
from mhc_ops.testing.conv_cases import CHECK, ConvCase

pytestmark = pytest.mark.skipif(not backend.CXX, reason="needs a C++ compiler")
PLACES = ("states", "seq_idx", "seq_idx states")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
ROCM = (pytest.mark.gpu, pytest.mark.skipif(torch.version.hip is None, reason="needs a ROCm build of PyTorch"))
SMALL = [
    *(ConvCase(2, 300, D, W, silu=W % 2 == 0, places=p) for W, D, p in product((2, 3, 4), (64, 65), ("", *PLACES))),
    *(ConvCase(2, L, D, places="states") for L, D in product((1, 2, 3, 5), (5, 24))),
    *(ConvCase(2, 30, D, W, places="states", unused=(unused,))
      for W, D, unused in product((2, 3, 4), (64, 65), ("y", "final_state"))),
    *(ConvCase(2, 37, 24, parameter_dtype=dtype, layout=layout) for dtype in TYPES[::2] for layout in LAYOUTS),
    *(case for case in CHECK if case.runs_on("hip")),
]  # fmt: skip
LARGE = [ConvCase(3, 1000, D, silu=silu) for D, silu in product((4096, 4097), (False, True))]
LARGE += [*(ConvCase(1, 3000, 1024, places=places) for places in PLACES), ConvCase(2_000, 1, 8)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ROCM, id="rocm")])
def device(request):
    return request.param


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_accuracy(case, device, poisoned):
    """In every type; what `mhc-ops check` has in its own."""
    for dtype in (case.dtype,) if case in CHECK else TYPES:
        assert_accurate(replace(case, dtype=dtype), "hip", device)


@pytest.mark.parametrize("case", [pytest.param(case, marks=ROCM, id=str(case)) for case in LARGE])
def test_accuracy_of_large_sizes(case, poisoned):
    for dtype in TYPES:
        assert_accurate(replace(case, dtype=dtype), "hip", "cuda")


def conv(*tensors, **options):
    return mhc_ops.causal_conv1d(*tensors, **options, activation="silu", backend="hip")


def test_strides_of_single_rows():
    x, weight = torch.randn(1, 1, 24).as_strided((1, 1, 24), (3, 5, 1)), torch.randn(24, 4)
    y = mhc_ops.causal_conv1d(x, weight, backend="hip")
    torch.testing.assert_close(y[0, 0], x[0, 0] * weight[:, 3])


def test_what_is_missing_is_named():
    x, weight = torch.randn(1, 4, 8), torch.randn(8, 4)
    wanted = {"cu_seqlens": {"cu_seqlens": torch.tensor([0, 4])}, r"width 5 \(2 to 4\)": {"weight": torch.randn(8, 5)}}
    for name, given in {r"dilation \(got 2\)": {"dilation": 2}, "residual": {"residual": x}, **wanted}.items():
        message = f"^causal_conv1d: the hip backend has no {name}; use backend=.tri"
        with pytest.raises(NotImplementedError, match=message):
            conv(**{"x": x, "weight": weight, **given})
    state, bounds = torch.zeros(4, 8, 3), torch.tensor([0, 4], dtype=torch.int32)
    for name, *given, others in (
        ("causal_conv1d_update", x[0], state, weight, {}),
        ("causal_conv1d_update", x[0], state, weight, {"out": torch.empty_like(x[0])}),
        ("causal_conv1d_prefill", x[0], state, weight, {"cu_seqlens": bounds, "conv_state_indices": bounds[:1]}),
        ("short_conv", x[:, :, None], torch.ones(1, 8), weight, {}),
    ):
        with pytest.raises(NotImplementedError, match=f"^{name}: backend 'hip' does not have it, 'triton' and 'ref"):
            getattr(mhc_ops, name)(*given, **others, backend="hip")
    with pytest.raises(TypeError, match="x must be bfloat16, float16 or float32 for backend 'hip', got float64"):
        conv(x.double(), weight)
    with pytest.raises(RuntimeError, match="hip runs on ROCm devices and on CPU tensors, not on meta"):
        conv(x.to("meta"), weight.to("meta"))


def test_a_pointer_that_is_missing_or_unknown():
    x, weight = torch.randn(1, 4, 8), torch.randn(8, 4)
    every = dict.fromkeys([field for field, _ in hip.Forward._fields_[:7]], x)
    for tensors in ({"x": x, "weight": weight}, {**every, "z": x}):
        with pytest.raises(TypeError, match=r"conv_forward: takes \['x', 'weight', 'bias', "):
            hip._run(None, "conv_forward", hip.Forward, tensors, silu=True)


def test_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    reason = backend.why_not("conv", "hip", "cuda")
    assert reason == "hip runs on ROCm devices and on CPU tensors, the tensors are on a CUDA device"
    monkeypatch.setattr(backend, "CXX", None)
    with pytest.raises(RuntimeError, match=r"backend 'hip' cannot run here: .* there is no C\+\+ compiler"):
        conv(torch.zeros(1, 2, 4), torch.zeros(4, 2))


@pytest.mark.gpu
@ROCM[1]
def test_runs_on_its_stream_and_gpu_and_agrees_with_triton():
    tensors = ConvCase(2, 100, 64, dtype=torch.float32).inputs("cuda")
    expected = conv(**tensors)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(conv(**tensors), expected)
    torch.testing.assert_close(mhc_ops.causal_conv1d(**tensors, activation="silu", backend="triton"), expected)
    if torch.cuda.device_count() > 1:
        other = conv(**{name: tensor.to("cuda:1") for name, tensor in tensors.items()})
        assert torch.equal(other.to("cuda:0"), expected)
