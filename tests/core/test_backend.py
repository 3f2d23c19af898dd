"""Choosing a backend: argument, use_backend, MHC_OPS_BACKEND, device; and the errors of one that cannot run."""

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import mhc_ops
from mhc_ops.core import backend, device
from mhc_ops.testing import cases

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


def chosen(family="mhc"):
    return backend.choose("f", family, None, CPU)


def test_scopes_of_threads_are_their_own():
    """The first to begin is the first to end; neither sees the other, and nothing is left behind."""
    began, ended = threading.Event(), threading.Event()
    seen = []

    def other():
        with mhc_ops.use_backend("hip"):
            began.set()
            ended.wait(10)
            seen.append(chosen("conv"))
        seen.append(chosen("conv"))

    thread = threading.Thread(target=other)
    with mhc_ops.use_backend("reference"):
        thread.start()
        began.wait(10)
        seen.append(chosen("conv"))
    ended.set()
    thread.join()
    assert seen == ["reference", "hip", "reference"]
    assert backend.choose("f", "mhc", None, CUDA) == "triton"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "after it, compiled"])
def test_scopes_of_tasks_are_their_own(compiled):
    """In eager. What torch.compile sees is the thread's, and is as before once all tasks have ended."""
    torch.compiler.reset()
    conv = torch.compile(lambda x: x + len(chosen("conv")), fullgraph=True, backend="eager")

    async def one(began, wait_for):
        with mhc_ops.use_backend("hip"):
            began.set()
            await asyncio.wait_for(wait_for.wait(), 10)
            return chosen("conv")

    async def both():
        first, second = asyncio.Event(), asyncio.Event()
        with mhc_ops.use_backend("reference"):
            task = asyncio.create_task(one(first, second))  # inherits reference, and ends last
            await asyncio.wait_for(first.wait(), 10)
            inside = chosen("conv")
        second.set()
        return inside, await task, chosen("conv")

    if compiled:
        assert conv(torch.zeros(())) == len("reference")
    assert asyncio.run(both()) == ("reference", "hip", "reference")
    assert backend.choose("f", "mhc", None, CUDA) == "triton"
    if compiled:
        assert conv(torch.zeros(())) == len("reference")


LENGTHS = {name: len(name) for name in backend.BACKENDS}  # what a compiled function can return of a name


def lengths(x):
    return x + LENGTHS[chosen("mhc")], x + LENGTHS[chosen("conv")]


def scoped(x):
    before = lengths(x)
    with mhc_ops.use_backend("reference", conv="hip"):
        inside = lengths(x)
    with mhc_ops.use_backend(conv="reference"):
        return *before, *inside, *lengths(x)


@pytest.mark.parametrize("function", [lengths, scoped])
def test_scopes_are_traced(function):
    """Around a compiled function and inside of it, in one graph, with the values of eager; nothing is left behind."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    x = torch.zeros((), dtype=torch.int64)

    def in_scopes(call):
        yield call(x)
        with mhc_ops.use_backend(conv="hip"):
            yield call(x)
            with mhc_ops.use_backend("reference"):
                yield call(x)
            yield call(x)
        yield call(x)

    assert list(in_scopes(compiled)) == list(in_scopes(function))
    seen = []
    with mhc_ops.use_backend(conv="hip"):
        thread = threading.Thread(target=lambda: seen.append(compiled(x)))
        thread.start()
        thread.join()
    assert seen == [function(x)]


def test_scope_by_family():
    with mhc_ops.use_backend(conv="hip"):
        assert (chosen("mhc"), chosen("conv")) == ("reference", "hip")
        with mhc_ops.use_backend(mhc="reference"):
            assert (chosen("mhc"), chosen("conv")) == ("reference", "hip")
        with mhc_ops.use_backend("reference"):
            assert (chosen("mhc"), chosen("conv")) == ("reference", "reference")
    with mhc_ops.use_backend("triton", conv="reference"):
        assert chosen("conv") == "reference"
        assert backend.choose("f", "mhc", None, CUDA) == "triton"
    with mhc_ops.use_backend("hip"), pytest.raises(RuntimeError, match="there are no hip kernels for mhc"):
        chosen("mhc")


@pytest.mark.parametrize(
    ("name", "families", "message"),
    [
        ("cuda", {}, "backend must be one of reference, triton, tilelang, hip, got 'cuda'"),
        (None, {"conv": "cuda"}, "backend must be one of reference, triton, tilelang, hip, got 'cuda'"),
        (None, {"attention": "hip"}, "family must be one of conv, mhc, got 'attention'"),
        (None, {}, "name a backend, one of reference, triton, tilelang, hip"),
    ],
)
def test_scope_says_what_is_allowed(name, families, message):
    with pytest.raises(ValueError, match=f"^use_backend: {message}$"), mhc_ops.use_backend(name, **families):
        pass


def test_environment_variable_is_read_at_import():
    code = "import mhc_ops; from mhc_ops.core import backend; print(backend.chosen())"
    environment = {**os.environ, "MHC_OPS_BACKEND": "conv:hip"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "(('conv', 'hip'),)\n"


@pytest.fixture
def environment(monkeypatch):
    def read(value):
        monkeypatch.setattr(backend, "_environment", ())  # put back at the end
        monkeypatch.setattr(backend, "wrong_environment", "")
        monkeypatch.setenv("MHC_OPS_BACKEND", value)
        backend.read_environment()

    return read


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", {"mhc": "triton", "conv": "triton"}),
        ("reference", {"mhc": "reference", "conv": "reference"}),
        ("conv:reference", {"mhc": "triton", "conv": "reference"}),
        ("conv:reference,mhc:triton", {"mhc": "triton", "conv": "reference"}),
        (" reference, conv:triton ", {"mhc": "reference", "conv": "triton"}),
    ],
)
def test_environment_variable(value, expected, environment):
    environment(value)
    fresh = contextvars.Context()  # one in which no scope was ever opened
    assert {family: fresh.run(backend.choose, "f", family, None, CUDA) for family in expected} == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cuda", "backend must be one of reference, triton, tilelang, hip, got 'cuda'"),
        ("conv:cuda", "backend must be one of reference, triton, tilelang, hip, got 'cuda'"),
        ("conf:hip", "family must be one of conv, mhc, got 'conf'"),
        ("triton,hip", "more than one backend for all families: triton, hip"),
    ],
)
def test_wrong_environment_variable(value, message, environment):
    """Whoever would take its choice is told."""
    environment(value)
    fresh = contextvars.Context()
    with pytest.raises(ValueError, match=f"^MHC_OPS_BACKEND: {message}$"):
        fresh.run(backend.choose, "f", "mhc", None, CUDA)
    assert fresh.run(backend.choose, "f", "mhc", "reference", CUDA) == "reference"
    with mhc_ops.use_backend(conv="reference"):
        assert backend.choose("f", "conv", None, CUDA) == "reference"
        with pytest.raises(ValueError, match=r"^MHC_OPS_BACKEND: "):
            backend.choose("f", "mhc", None, CUDA)


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


TRITON_WHEELS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows")


@pytest.mark.parametrize("wheel", TRITON_WHEELS)
@pytest.mark.parametrize(
    ("hip", "version", "expected"),
    [
        (None, "3.2.0", "triton 3.2.0 is installed, the kernels need 3.6 (torch 2.10 or newer brings it)"),
        (None, "3.6.0", None),
        ("7.1", "3.6.0", "triton 3.6.0 is installed, the kernels need 3.7 (torch 2.12 or newer brings it)"),
        ("7.1", "3.7.0+git1", None),
        ("7.1", "3.10.0", None),
    ],
)
def test_old_triton_under_any_name(wheel, hip, version, expected, monkeypatch, tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(f"__version__ = '{version}'\n")
    (tmp_path / f"{wheel}-{version}.dist-info").mkdir()
    (tmp_path / f"{wheel}-{version}.dist-info" / "METADATA").write_text(f"Name: {wheel}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backend, "_TOO_OLD", backend.triton_too_old())
    assert backend.why_not("mhc", "triton", "cuda") == expected


def test_old_tilelang():
    message = "tilelang 0.1.9 is installed, the kernels need 0.1.15"
    assert backend.too_old("tilelang", "0.1.9", backend.TILELANG) == {"tilelang": message}
    assert backend.too_old("tilelang", "0.1.15", backend.TILELANG) == {}
    assert backend.too_old("tilelang", None, backend.TILELANG) == {}


def test_interpreter_without_numpy(monkeypatch):
    monkeypatch.setattr(backend, "_INTERPRETED", True)
    monkeypatch.setitem(backend._INSTALLED, "numpy", False)
    message = r"triton's interpreter needs numpy, which is not installed \(pip install numpy\)$"
    with pytest.raises(RuntimeError, match=message):
        backend.choose("f", "mhc", "triton", CPU)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of another kind, as torch would describe it."""

    def with_capability(major, minor):
        shared = {"shared_memory_per_block": 2**16, "shared_memory_per_block_optin": 2**16}
        properties = SimpleNamespace(major=major, minor=minor, warp_size=32, multi_processor_count=40, **shared)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        for cached in (device.of, backend._why_not_this_gpu, backend.load):
            cached.cache_clear()
        monkeypatch.setitem(backend._INSTALLED, "triton", True)
        monkeypatch.setattr(backend, "_TOO_OLD", {})
        return torch.device("cuda", 0)

    yield with_capability
    monkeypatch.undo()
    for cached in (device.of, backend._why_not_this_gpu, backend.load):
        cached.cache_clear()


def test_gpu_that_is_too_old(gpu):
    message = r"this GPU is sm_75; the kernels need sm_80 or newer; backend='reference' runs on it$"
    old = gpu(7, 5)
    with pytest.raises(RuntimeError, match=f"^mhc_pre: backend 'triton' cannot run here: {message}"):
        backend.choose("mhc_pre", "mhc", None, old)
    assert backend.choose("mhc_pre", "mhc", "reference", old) == "reference"
    assert "sm_75" in backend.why_not("conv", "triton", "cuda")
    with pytest.raises(RuntimeError, match=message):  # what runs where a graph was traced
        backend.load("mhc", "triton", "mhc_post_fwd", old)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (12, 1)])
def test_gpu_that_is_new_enough(capability, gpu):
    assert backend.choose("mhc_pre", "mhc", None, gpu(*capability)) == "triton"


def test_a_graph_does_not_look_at_the_gpu(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(backend, "_why_not_gpu", torch.compiler.disable(lambda device: None))  # breaks a graph
    names = {"triton": 1}
    traced = torch.compile(lambda x: x + names[backend.choose("f", "mhc", None, CUDA)], fullgraph=True, backend="eager")
    assert traced(torch.zeros(())) == 1


def test_missing_folder():
    with pytest.raises(RuntimeError, match="there are no hip kernels for mhc"):
        backend.choose("f", "mhc", "hip", CUDA)


def test_other_device():
    with pytest.raises(RuntimeError, match="triton runs on CUDA and ROCm devices, the tensors are on mps"):
        backend.choose("f", "mhc", "triton", torch.device("mps"))


def test_missing_launcher():
    pytest.importorskip("triton")
    with pytest.raises(NotImplementedError, match="nothing: the triton backend of mhc does not have it"):
        backend.load("mhc", "triton", "nothing", CUDA)
