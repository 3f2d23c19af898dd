"""Choose a backend, say why one cannot run, load a launcher by name.

The first of these that is set: the `backend` argument, `use_backend(...)`, MHC_OPS_BACKEND, the device's own choice.
What was asked for and cannot run raises; nothing falls back.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import shutil
from collections.abc import Callable, Iterator

import torch

BACKENDS = ("reference", "triton", "tilelang", "hip")

# Read at import, so that the choice can be traced by torch.compile.
_INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("triton", "tilelang")}
_OLDEST = {"triton": (3, 6), "tilelang": (0, 1, 15)}
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
_COMPILERS = (os.environ.get("CXX"), "c++", "g++", "clang++")
_CXX = next((name for name in _COMPILERS if name and shutil.which(name)), None)
_NVCC = shutil.which("nvcc") or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
_FOLDERS: dict[str, frozenset[str]] = {}
# A plain global: torch.compile guards on it, while a ContextVar breaks the graph.
_chosen: str | None = os.environ.get("MHC_OPS_BACKEND") or None


def _version(package: str) -> str | None:
    """None where the package is missing or goes by another name, as in ROCm builds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if _NVCC is None and os.path.exists("/usr/local/cuda/bin/nvcc"):
    _NVCC = "/usr/local/cuda/bin/nvcc"
_NVCC = _NVCC or _version("nvidia-cuda-nvcc")
_VERSIONS = {name: version for name in _OLDEST if (version := _version(name)) is not None}
_TOO_OLD = {name: v for name, v in _VERSIONS.items() if tuple(map(int, re.findall(r"\d+", v)[:3])) < _OLDEST[name]}


def register_family(family: str) -> None:
    """Look up which kernel folders mhc_ops/<family>/ has. To add a backend, add a folder."""
    package = importlib.import_module(f"mhc_ops.{family}")
    _FOLDERS[family] = frozenset(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)


def families() -> tuple[str, ...]:
    return tuple(_FOLDERS)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use a backend for every call in a with block that does not name its own: `with mhc_ops.use_backend("triton"):`

    The choice is one for the process: threads that want different backends pass the `backend` argument.
    """
    global _chosen
    _check_name("use_backend", name)
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def choose(function: str, family: str, backend: str | None, device: torch.device) -> str:
    """The backend for this call, or an error that says why the one asked for cannot run and what would help."""
    name = backend if backend is not None else _chosen or ("triton" if device.type == "cuda" else "reference")
    _check_name(function, name)
    reason = why_not(family, name, device.type)
    if reason is not None:
        raise RuntimeError(f"{function}: backend {name!r} cannot run here: {reason}")
    return name


def why_not(family: str, backend: str, device_type: str) -> str | None:
    """Why this backend cannot run this family on this kind of device; None if it can."""
    if backend == "reference":
        return None
    if backend not in _FOLDERS[family]:
        return f"there are no {backend} kernels for {family}"
    if backend in _INSTALLED and not _INSTALLED[backend]:
        return f"the package {backend} is not installed (pip install 'mhc-ops[{backend}]')"
    if backend in _TOO_OLD:
        return f"{backend} {_TOO_OLD[backend]} is installed, the kernels need {'.'.join(map(str, _OLDEST[backend]))}"
    if backend == "hip":
        return _why_not_hip(device_type)
    if device_type == "cuda":
        if backend == "tilelang" and torch.version.hip is None and _NVCC is None:
            return (
                "tilelang compiles with nvcc of the CUDA toolkit, which is not there (put it on PATH or set CUDA_HOME)"
            )
        return None
    if backend == "triton" and device_type == "cpu":
        if _INTERPRETED:
            return None
        return "the tensors are on cpu, and triton takes them only in its interpreter (set TRITON_INTERPRET=1 at start)"
    return f"{backend} runs on CUDA and ROCm devices, the tensors are on {device_type}"


def _why_not_hip(device_type: str) -> str | None:
    if device_type == "cpu":
        return (
            None if _CXX else "the kernels are compiled on first use, and there is no C++ compiler (c++, g++ or $CXX)"
        )
    if device_type == "cuda" and torch.version.hip is None:
        return "hip runs on ROCm devices and on CPU tensors, the tensors are on a CUDA device"
    return None if device_type == "cuda" else f"hip runs on ROCm devices and on CPU tensors, not on {device_type}"


@functools.cache
def load(family: str, backend: str, name: str) -> Callable[..., None]:
    """The launcher `name` of mhc_ops/<family>/<backend>/."""
    if backend == "triton" and _INTERPRETED:
        _repair_interpreter()
    module = importlib.import_module(f"mhc_ops.{family}.{backend}")
    if not hasattr(module, name):
        raise NotImplementedError(f"{name}: the {backend} backend of {family} does not have it")
    return getattr(module, name)


@functools.cache
def _repair_interpreter() -> None:
    from .interpreter import make_bf16_exact

    make_bf16_exact()


def _check_name(function: str, name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"{function}: backend must be one of {', '.join(BACKENDS)}, got {name!r}")


if _chosen is not None:
    _check_name("MHC_OPS_BACKEND", _chosen)
