"""Choosing a backend: argument, use_backend, MHC_OPS_BACKEND, device; and the errors of one that cannot run."""

import os
import subprocess
import sys

import pytest
import torch

import mhc_ops
from mhc_ops.core import backend
from mhc_ops.measure import cases

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def inputs():
    return cases.Case(cases.MHC_FORWARD_PRE, (3,), 2, 5).inputs()


def test_device_chooses():
    assert backend.choose("f", "mhc", None, CPU) == "reference"
    assert backend.choose("f", "mhc", None, CUDA) == "triton"


def test_scope_and_argument():
    with mhc_ops.use_backend("reference"):
        assert backend.choose("f", "mhc", None, CUDA) == "reference"
        assert backend.choose("f", "mhc", "triton", CUDA) == "triton"
        with mhc_ops.use_backend("triton"):
            assert backend.choose("f", "mhc", None, CUDA) == "triton"
        assert backend.choose("f", "mhc", None, CUDA) == "reference"
    assert backend.choose("f", "mhc", None, CUDA) == "triton"


def test_scope_ends_on_error():
    with pytest.raises(KeyError), mhc_ops.use_backend("reference"):
        raise KeyError
    assert backend.choose("f", "mhc", None, CUDA) == "triton"


def test_environment_variable():
    code = (
        "import torch; from mhc_ops.core import backend as b; print(b.choose('f', 'mhc', None, torch.device('cuda')))"
    )
    code = "import mhc_ops; " + code
    environment = {**os.environ, "MHC_OPS_BACKEND": "reference"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "reference\n"


def test_unknown_name(inputs):
    message = r"^mhc_forward_pre: backend must be one of reference, triton, tilelang, hip, got 'cuda'$"
    with pytest.raises(ValueError, match=message):
        mhc_ops.mhc_forward_pre(**inputs, backend="cuda")
    with pytest.raises(ValueError, match=r"^use_backend: backend must be one of"), mhc_ops.use_backend("cuda"):
        pass


@pytest.mark.skipif(backend._INTERPRETED, reason="the interpreter takes CPU tensors")
def test_triton_on_cpu_says_why(inputs):
    with pytest.raises(RuntimeError, match=r"^mhc_forward_pre: backend 'triton' cannot run here: .*TRITON_INTERPRET=1"):
        mhc_ops.mhc_forward_pre(**inputs, backend="triton")
    with mhc_ops.use_backend("triton"), pytest.raises(RuntimeError, match="cannot run here"):
        mhc_ops.mhc_forward_pre(**inputs)


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(backend._INSTALLED, "triton", False)
    with pytest.raises(RuntimeError, match=r"the package triton is not installed \(pip install 'mhc-ops\[triton\]'\)"):
        backend.choose("f", "mhc", None, CUDA)


def test_tilelang_says_what_is_missing(monkeypatch, inputs):
    monkeypatch.setitem(backend._INSTALLED, "tilelang", True)
    with pytest.raises(RuntimeError, match="tilelang runs on CUDA and ROCm devices, the tensors are on cpu"):
        mhc_ops.mhc_forward_pre(**inputs, backend="tilelang")
    monkeypatch.setattr(backend, "_NVCC", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(RuntimeError, match="tilelang compiles with nvcc of the CUDA toolkit, which is not there"):
        backend.choose("f", "mhc", "tilelang", CUDA)
    monkeypatch.setitem(backend._INSTALLED, "tilelang", False)
    with pytest.raises(RuntimeError, match=r"tilelang is not installed \(pip install 'mhc-ops\[tilelang\]'\)"):
        mhc_ops.mhc_forward_pre(**inputs, backend="tilelang")


def test_old_package_says_what_is_needed(monkeypatch):
    monkeypatch.setitem(backend._TOO_OLD, "triton", "3.2.0")
    with pytest.raises(RuntimeError, match=r"triton 3\.2\.0 is installed, the kernels need 3\.6"):
        backend.choose("f", "mhc", None, CUDA)


def test_wrong_environment_variable():
    environment = {**os.environ, "MHC_OPS_BACKEND": "cuda"}
    done = subprocess.run([sys.executable, "-c", "import mhc_ops"], env=environment, capture_output=True, text=True)
    assert "MHC_OPS_BACKEND: backend must be one of reference, triton, tilelang, hip, got 'cuda'" in done.stderr


def test_missing_folder():
    with pytest.raises(RuntimeError, match="there are no hip kernels for mhc"):
        backend.choose("f", "mhc", "hip", CUDA)


def test_other_device():
    with pytest.raises(RuntimeError, match="triton runs on CUDA and ROCm devices, the tensors are on mps"):
        backend.choose("f", "mhc", "triton", torch.device("mps"))


def test_missing_launcher():
    pytest.importorskip("triton")
    with pytest.raises(NotImplementedError, match="nothing: the triton backend of mhc does not have it"):
        backend.load("mhc", "triton", "nothing")
