"""Choosing a backend: argument, use_backend, MHC_OPS_BACKEND, device; and the errors of one that cannot run."""

import asyncio
import contextvars
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import mhc_ops
from mhc_ops.core import backend, device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
STREAMS = torch.zeros(3, 2, 5)


def chosen(family="mhc", device=CPU):
    return backend.choose("f", family, None, device)


def test_argument_then_scope_then_device():
    assert (chosen(), chosen(device=CUDA)) == ("reference", "triton")
    with mhc_ops.use_backend("reference"):
        assert chosen(device=CUDA) == "reference"
        assert backend.choose("f", "mhc", "triton", CUDA) == "triton"
        with mhc_ops.use_backend("triton"):
            assert chosen(device=CUDA) == "triton"
        assert chosen(device=CUDA) == "reference"
    with pytest.raises(KeyError), mhc_ops.use_backend("reference"):
        raise KeyError
    assert chosen(device=CUDA) == "triton", "a scope ends on an error too"


def test_scope_by_family():
    with mhc_ops.use_backend(conv="hip"):
        assert (chosen("mhc"), chosen("conv")) == ("reference", "hip")
        with mhc_ops.use_backend(mhc="reference"):
            assert (chosen("mhc"), chosen("conv")) == ("reference", "hip")
        with mhc_ops.use_backend("reference"):
            assert (chosen("mhc"), chosen("conv")) == ("reference", "reference")
    with mhc_ops.use_backend("triton", conv="reference"):
        assert (chosen("mhc", CUDA), chosen("conv")) == ("triton", "reference")
    with mhc_ops.use_backend("hip"), pytest.raises(RuntimeError, match="there are no hip kernels for mhc"):
        chosen("mhc")
    with pytest.raises(ValueError, match=r"^use_backend: backend must be one of reference, triton, .*, got 'cuda'$"):
        mhc_ops.use_backend("cuda")  # not first when it is entered


def test_scopes_of_tasks_are_their_own():
    """In eager. The first to begin is the first to end. What torch.compile sees is the thread's, and is as before once
    all tasks have ended."""
    torch.compiler.reset()
    conv = torch.compile(lambda x: x + len(chosen("conv", CUDA)), fullgraph=True, backend="eager")

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

    assert conv(torch.zeros(())) == len("triton")
    assert asyncio.run(both()) == ("reference", "hip", "reference")
    assert chosen(device=CUDA) == "triton"
    assert conv(torch.zeros(())) == len("triton")


def test_scopes_are_traced():
    """Around a compiled function and inside of it, in one graph, with the values of eager; nothing remains, and another
    thread sees none of them."""
    torch.compiler.reset()
    numbers = {name: len(name) for name in backend.BACKENDS}  # what a compiled function can return of a name

    def lengths(x):
        return x + numbers[chosen("mhc")], x + numbers[chosen("conv")]

    def scoped(x):
        before = lengths(x)
        with mhc_ops.use_backend("reference", conv="hip"):
            inside = lengths(x)
        with mhc_ops.use_backend(conv="reference"):
            return *before, *inside, *lengths(x)

    compiled = torch.compile(scoped, fullgraph=True, backend="eager")
    x, seen = torch.zeros((), dtype=torch.int64), []
    outside = scoped(x)
    for families in ({}, {"conv": "hip"}, {"conv": "reference"}):
        with mhc_ops.use_backend("reference", **families):
            assert compiled(x) == scoped(x)
            thread = threading.Thread(target=lambda: seen.extend((compiled(x), scoped(x))))
            thread.start()
            thread.join()
        assert compiled(x) == outside
    assert seen == [outside] * 6


ONE_OF = "one of reference, triton, tilelang, hip"


def test_names_that_are_not_there():
    for name, families, message in (
        ("cuda", {}, f"backend must be {ONE_OF}, got 'cuda'"),
        (None, {"conv": "cuda"}, f"backend must be {ONE_OF}, got 'cuda'"),
        (None, {"attention": "hip"}, "family must be one of conv, mhc, got 'attention'"),
        (None, {}, f"name a backend, {ONE_OF}"),
    ):
        with pytest.raises(ValueError, match=f"^use_backend: {message}$"), mhc_ops.use_backend(name, **families):
            pass
    with pytest.raises(ValueError, match=f"^mhc_mean: backend must be {ONE_OF}, got 'cuda'$"):
        mhc_ops.mhc_mean(STREAMS, backend="cuda")


@pytest.fixture
def environment(monkeypatch):
    """Reads a value of MHC_OPS_BACKEND; runs functions in a context in which no scope was ever opened."""

    def read(value):
        monkeypatch.setattr(backend, "_environment", ())  # put back at the end
        monkeypatch.setattr(backend, "wrong_environment", "")
        monkeypatch.setenv("MHC_OPS_BACKEND", value)
        backend.read_environment()
        return contextvars.Context().run

    return read


def test_environment_variable(environment):
    for value, expected in {
        "": ("triton", "triton"),
        "reference": ("reference", "reference"),
        "conv:reference,mhc:triton": ("triton", "reference"),
        " reference, conv:triton ": ("reference", "triton"),
    }.items():
        run = environment(value)
        assert (run(chosen, "mhc", CUDA), run(chosen, "conv", CUDA)) == expected, value


def test_wrong_environment_variable(environment):
    """A call that would take its choice raises."""
    for value, message in {
        "conv:cuda": f"backend must be {ONE_OF}, got 'cuda'",
        "conf:hip": "family must be one of conv, mhc, got 'conf'",
        "triton,hip": "more than one backend for all families: triton, hip",
    }.items():
        run = environment(value)
        with pytest.raises(ValueError, match=f"^MHC_OPS_BACKEND: {message}$"):
            run(chosen, "mhc", CUDA)
        assert run(backend.choose, "f", "mhc", "reference", CUDA) == "reference"
        with mhc_ops.use_backend(conv="reference"):
            assert chosen("conv", CUDA) == "reference"
            with pytest.raises(ValueError, match=r"^MHC_OPS_BACKEND: "):
                chosen("mhc", CUDA)


@pytest.mark.skipif(backend._INTERPRETED, reason="the interpreter takes CPU tensors")
def test_triton_on_cpu_says_why():
    message = "^mhc_mean: backend 'triton' cannot run here: .*TRITON_INTERPRET=1"
    with pytest.raises(RuntimeError, match=message):
        mhc_ops.mhc_mean(STREAMS, backend="triton")
    with mhc_ops.use_backend("triton"), pytest.raises(RuntimeError, match=message):
        mhc_ops.mhc_mean(STREAMS)


def test_what_is_missing_is_said(monkeypatch):
    def refused(message, name, device=CUDA, family="mhc"):
        with pytest.raises(RuntimeError, match=f"^f: backend {name!r} cannot run here: {message}"):
            backend.choose("f", family, name, device)

    refused("there are no hip kernels for mhc", "hip")
    refused("triton runs on CUDA and ROCm devices, the tensors are on mps", "triton", torch.device("mps"))
    monkeypatch.setitem(backend._INSTALLED, "tilelang", True)
    refused("tilelang runs on CUDA and ROCm devices, the tensors are on cpu", "tilelang", CPU)
    monkeypatch.setattr(backend, "_NVCC", None)
    monkeypatch.setattr(torch.version, "hip", None)
    refused("tilelang compiles with nvcc of the CUDA toolkit, which is not there", "tilelang")
    for name in ("tilelang", "triton"):
        monkeypatch.setitem(backend._INSTALLED, name, False)
        refused(rf"the package {name} is not installed \(pip install 'mhc-ops\[{name}\]'\)", name)
    monkeypatch.undo()
    monkeypatch.setattr(backend, "_INTERPRETED", True)
    monkeypatch.setitem(backend._INSTALLED, "numpy", False)
    refused("triton's interpreter needs numpy, which is not installed", "triton", CPU)
    assert backend.too_old("tilelang", None, backend.TILELANG) == {}
    with pytest.raises(NotImplementedError, match="nothing: the triton backend of mhc does not have it"):
        backend.load("mhc", "triton", "nothing", CUDA)


@pytest.mark.parametrize(
    ("wheel", "hip", "version", "needed"),
    [
        ("triton", None, "3.2.0", "3.6 (torch 2.10 or newer brings it)"),
        ("triton-rocm", "7.1", "3.6.0", "3.7 (torch 2.12 or newer brings it)"),
        ("pytorch-triton-rocm", "7.1", "3.7.0+git1", None),
    ],
)
def test_old_triton_under_any_name(wheel, hip, version, needed, monkeypatch, tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(f"__version__ = '{version}'\n")
    (tmp_path / f"{wheel}-{version}.dist-info").mkdir()
    (tmp_path / f"{wheel}-{version}.dist-info" / "METADATA").write_text(f"Name: {wheel}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backend, "_TOO_OLD", backend.triton_too_old())
    expected = f"triton {version} is installed, the kernels need {needed}"
    assert backend.why_not("mhc", "triton", "cuda") == (needed and expected)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of another kind, as torch would describe it."""

    def clear():
        for cached in (device.of, backend._why_not_this_gpu, backend.load):
            cached.cache_clear()

    def with_capability(major, minor):
        shared = {"shared_memory_per_block": 2**16, "shared_memory_per_block_optin": 2**16}
        properties = SimpleNamespace(major=major, minor=minor, warp_size=32, multi_processor_count=40, **shared)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setitem(backend._INSTALLED, "triton", True)
        monkeypatch.setattr(backend, "_TOO_OLD", {})
        clear()
        return torch.device("cuda", 0)

    yield with_capability
    monkeypatch.undo()
    clear()


def test_gpu_that_is_too_old(gpu):
    message = r"this GPU is sm_75; the kernels need sm_80 or newer; backend='reference' runs on it$"
    old = gpu(7, 5)
    with pytest.raises(RuntimeError, match=f"^mhc_pre: backend 'triton' cannot run here: {message}"):
        backend.choose("mhc_pre", "mhc", None, old)
    assert backend.choose("mhc_pre", "mhc", "reference", old) == "reference"
    assert "sm_75" in backend.why_not("conv", "triton", "cuda")
    with pytest.raises(RuntimeError, match=message):  # what runs where a graph was traced
        backend.load("mhc", "triton", "mhc_post_fwd", old)
    for capability in ((8, 0), (8, 6), (12, 1)):
        assert backend.choose("mhc_pre", "mhc", None, gpu(*capability)) == "triton"


def test_a_graph_does_not_look_at_the_gpu(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(backend, "_why_not_gpu", torch.compiler.disable(lambda device: None))  # breaks a graph
    names = {"triton": 1}
    traced = torch.compile(lambda x: x + names[backend.choose("f", "mhc", None, CUDA)], fullgraph=True, backend="eager")
    assert traced(torch.zeros(())) == 1
