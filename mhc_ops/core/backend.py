"""Choose a backend, say why one cannot run, load a launcher by name.

The first of these that is set decides: the `backend` argument, `use_backend(...)`, MHC_OPS_BACKEND, the device.
A chosen backend that cannot run raises; nothing falls back.
"""

import contextlib
import contextvars
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from . import device as devices

PACKAGE = __name__.rsplit(".", 2)[0]  # mhc_ops, or the name of a copy
BACKENDS = ("reference", "triton", "tilelang", "hip")
Choice = tuple[tuple[str, str], ...]  # a backend for each family that was given one: (("mhc", "triton"),)

# The oldest Triton that compiles every kernel, and the first torch that ships it.
TRITON = {"cuda": ((3, 6), "2.10"), "hip": ((3, 7), "2.12")}
TILELANG = (0, 1, 15)
OLDEST_GPU = (8, 0)

# Read at import, so that torch.compile can trace the choice.
_INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("triton", "tilelang", "numpy")}
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
_COMPILERS = (os.environ.get("CXX"), "c++", "g++", "clang++")
CXX = next((name for name in _COMPILERS if name and shutil.which(name)), None)
_NVCC = shutil.which("nvcc") or os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
_FOLDERS: dict[str, frozenset[str]] = {}
_environment: Choice = ()  # the choice of MHC_OPS_BACKEND
wrong_environment = ""  # its error: the import succeeds, a call that needs this choice raises
# The choice of use_backend, kept twice. Each asyncio task and each thread has its own context, but torch.compile cannot
# trace a ContextVar. It can trace, and guard on, a thread's own attribute, which holds the open scopes, newest first.
_in_context: contextvars.ContextVar[Choice] = contextvars.ContextVar("mhc_ops_backend")
_in_thread = threading.local()


def triton_version() -> str | None:
    """The version in the package itself, because wheels have many names (triton, pytorch-triton-rocm, ...)."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^__version__ = ['\"](.+?)['\"]", Path(spec.origin).read_text("utf-8"), re.MULTILINE)
    return found and found[1]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def too_old(package: str, version: str | None, oldest: tuple[int, ...], brought_by: str = "") -> dict[str, str]:
    """{package: sentence} where this version is too old. An unknown version counts as new enough."""
    if version is None or tuple(map(int, re.findall(r"\d+", version)[:3])) >= oldest:
        return {}
    return {package: f"{package} {version} is installed, the kernels need {'.'.join(map(str, oldest))}{brought_by}"}


def triton_too_old() -> dict[str, str]:
    oldest, torch_version = TRITON["cuda" if torch.version.hip is None else "hip"]
    return too_old("triton", triton_version(), oldest, f" (torch {torch_version} or newer brings it)")


if _NVCC is None and os.path.exists("/usr/local/cuda/bin/nvcc"):
    _NVCC = "/usr/local/cuda/bin/nvcc"
_NVCC = _NVCC or _version("nvidia-cuda-nvcc")
_TOO_OLD = {**triton_too_old(), **too_old("tilelang", _version("tilelang"), TILELANG)}


def register_family(family: str) -> None:
    """Looks up which kernel folders mhc_ops/<family>/ has. To add a backend, add a folder."""
    package = importlib.import_module(f"{PACKAGE}.{family}")
    folders = frozenset(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)
    found = sorted({**_FOLDERS, family: folders}.items())  # the order does not depend on imports
    _FOLDERS.clear()
    _FOLDERS.update(found)


def families() -> tuple[str, ...]:
    return tuple(_FOLDERS)


def use_backend(name: str | None = None, **families: str) -> "contextlib._GeneratorContextManager[None]":
    """Use a backend for every call in a with block that does not name its own: `with mhc_ops.use_backend("triton"):`

    A family, mhc or conv, can have its own: `use_backend(conv="hip")` or `use_backend("triton", conv="hip")`. A family
    that is not named keeps its choice. Each thread and each asyncio task has its own choice. torch.compile sees the
    thread's, so overlapping tasks of one thread pass `backend` to what they compile. Functions under
    torch.utils.checkpoint pass it too: autograd's threads run them again.
    """
    _merge("use_backend", (), name, families)  # a wrong name raises here, not first when the block is entered
    return _using(name, families)


@contextlib.contextmanager
def _using(name: str | None, families: dict[str, str]) -> Iterator[None]:
    with scope(_merge("use_backend", chosen(), name, families)):
        yield


@contextlib.contextmanager
def scope(choice: Choice) -> Iterator[None]:
    """Within it, `chosen()` is this choice."""
    before = chosen()
    _in_thread.scopes = (choice, *getattr(_in_thread, "scopes", ()))
    _set_in_context(choice)
    try:
        yield
    finally:
        scopes = list(getattr(_in_thread, "scopes", ()))
        if choice in scopes:  # not if another thread ends the scope of a generator
            scopes.remove(choice)  # the newest equal one: scopes of tasks may end in any order
        _in_thread.scopes = tuple(scopes)
        _set_in_context(before)


def read_environment() -> None:
    """MHC_OPS_BACKEND=triton, or by family: MHC_OPS_BACKEND=conv:hip,mhc:triton"""
    global _environment, wrong_environment
    try:
        _environment = _read("MHC_OPS_BACKEND", os.environ.get("MHC_OPS_BACKEND", ""))
    except ValueError as error:
        wrong_environment = str(error)


def _read(variable: str, text: str) -> Choice:
    words = [word.strip() for word in text.split(",") if word.strip()]
    pairs = [word.split(":", 1) for word in words]
    for_all = [pair[0] for pair in pairs if len(pair) == 1]
    if len(for_all) > 1:
        raise ValueError(f"{variable}: more than one backend for all families: {', '.join(for_all)}")
    by_family = dict(pair for pair in pairs if len(pair) == 2)
    return _merge(variable, (), for_all[0] if for_all else None, by_family) if words else ()


def chosen() -> Choice:
    """The choice of use_backend or MHC_OPS_BACKEND here."""
    if torch.compiler.is_compiling():
        scopes = getattr(_in_thread, "scopes", ())
        return scopes[0] if scopes else _environment
    return chosen_by_caller()


def chosen_by_caller() -> Choice:
    """`chosen()` in code that is not compiled."""
    return _in_context.get(_environment)


def _set_in_context(choice: Choice) -> None:
    if not torch.compiler.is_compiling():
        _in_context.set(choice)


def _merge(function: str, before: Choice, name: str | None, by_family: dict[str, str]) -> Choice:
    if name is None and not by_family:
        raise ValueError(f"{function}: name a backend, one of {', '.join(BACKENDS)}")
    choices = dict(before)
    if name is not None:
        _check_name(function, name)
        choices = dict.fromkeys(families(), name)
    for family, backend in by_family.items():
        if family not in _FOLDERS:
            raise ValueError(f"{function}: family must be one of {', '.join(families())}, got {family!r}")
        _check_name(function, backend)
        choices[family] = backend
    return tuple(choices.items())


def choose(function: str, family: str, backend: str | None, device: torch.device) -> str:
    """The backend for this call, or an error that says why the one asked for cannot run and what would help."""
    name = backend
    if name is None:
        choices = chosen()
        name = dict(choices).get(family) if choices else None
    if name is None:
        if wrong_environment:
            raise ValueError(wrong_environment)
        name = "triton" if device.type == "cuda" else "reference"
    _check_name(function, name)
    reason = why_not(family, name, device)
    if reason is not None:
        raise RuntimeError(f"{function}: backend {name!r} cannot run here: {reason}")
    return name


def why_not(family: str, backend: str, device: torch.device | str) -> str | None:
    """Why this backend cannot run this family on this device ("cuda": the current GPU); None if it can."""
    if backend == "reference":
        return None
    if backend not in _FOLDERS[family]:
        return f"there are no {backend} kernels for {family}"
    if backend in _INSTALLED and not _INSTALLED[backend]:
        return f"the package {backend} is not installed (pip install 'mhc-ops[{backend}]')"
    if backend in _TOO_OLD:
        return _TOO_OLD[backend]
    if isinstance(device, str):
        device = torch.device(device)
    if backend == "hip":
        return _why_not_hip(device.type)
    if device.type == "cuda":
        if backend == "tilelang" and torch.version.hip is None and _NVCC is None:
            return (
                "tilelang compiles with nvcc of the CUDA toolkit, which is not there (put it on PATH or set CUDA_HOME)"
            )
        # A trace cannot look at a GPU. `load` does when the graph first runs.
        return None if torch.compiler.is_compiling() else _why_not_gpu(device)
    if backend == "triton" and device.type == "cpu":
        return _why_not_interpreted()
    return f"{backend} runs on CUDA and ROCm devices, the tensors are on {device.type}"


def _why_not_hip(device_type: str) -> str | None:
    if device_type == "cpu":
        return None if CXX else "the kernels are compiled on first use, and there is no C++ compiler (c++, g++ or $CXX)"
    if device_type == "cuda" and torch.version.hip is None:
        return "hip runs on ROCm devices and on CPU tensors, the tensors are on a CUDA device"
    return None if device_type == "cuda" else f"hip runs on ROCm devices and on CPU tensors, not on {device_type}"


def _why_not_interpreted() -> str | None:
    if not _INTERPRETED:
        return "the tensors are on cpu, and triton takes them only in its interpreter (set TRITON_INTERPRET=1 at start)"
    return (
        None if _INSTALLED["numpy"] else "triton's interpreter needs numpy, which is not installed (pip install numpy)"
    )


def _why_not_gpu(device: torch.device) -> str | None:
    if device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return _why_not_this_gpu(device)


@functools.cache
def _why_not_this_gpu(device: torch.device) -> str | None:
    if not torch.cuda.is_available():  # the question is about a GPU that is not here
        return None
    gpu = devices.of(device)
    if gpu.kind != "cuda" or gpu.capability >= OLDEST_GPU:
        return None
    (major, minor), (oldest_major, oldest_minor) = gpu.capability, OLDEST_GPU
    needed = f"the kernels need sm_{oldest_major}{oldest_minor} or newer"
    return f"this GPU is sm_{major}{minor}; {needed}; backend='reference' runs on it"


@functools.cache
def load(family: str, backend: str, name: str, device: torch.device) -> Callable[..., None]:
    """The launcher `name` of mhc_ops/<family>/<backend>/, for tensors on this device."""
    choose(name, family, backend, device)
    if backend == "triton" and _INTERPRETED:
        _repair_interpreter()
    module = importlib.import_module(f"{PACKAGE}.{family}.{backend}")
    if not hasattr(module, name):
        raise NotImplementedError(f"{name}: the {backend} backend of {family} does not have it")
    return getattr(module, name)


@functools.cache
def _repair_interpreter() -> None:
    from .interpreter import repair

    repair()


def _check_name(function: str, name: str) -> None:
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"{function}: backend must be one of {', '.join(BACKENDS)}, got {name!r}")
