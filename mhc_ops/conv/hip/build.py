"""Compile the kernels once per compiler and source, into a cache folder: $MHC_OPS_CACHE or ~/.cache/mhc_ops."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from ...core import backend

SOURCE = Path(__file__).parent
_FLAGS = dict(re.findall(r'^(\w+)="(.*)"$', (SOURCE / "flags.sh").read_text(), re.MULTILINE))
CPU_FLAGS, CUDA_FLAGS, HIP_FLAGS = (tuple(_FLAGS[f"{target}_FLAGS"].split()) for target in ("CPU", "CUDA", "HIP"))
LIBRARY_FLAGS = ("-shared", "-fPIC")
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    return Path(os.environ.get("MHC_OPS_CACHE") or Path.home() / ".cache" / "mhc_ops")


def cpu_compiler() -> str:
    if backend.CXX is None:
        raise RuntimeError("causal_conv1d: the hip backend on CPU tensors needs a C++17 compiler (c++, g++ or $CXX)")
    return backend.CXX


def hip_compiler() -> str:
    """The hipcc that run_channellast_test.sh uses too."""
    found = subprocess.run(["sh", str(SOURCE / "find_hipcc.sh")], capture_output=True, text=True)
    if found.returncode != 0:
        raise RuntimeError(f"causal_conv1d: {found.stderr.strip()}")
    return found.stdout.strip()


@functools.cache
def cpu_library() -> ctypes.CDLL:
    return _load(compiled((cpu_compiler(), *CPU_FLAGS)))


@functools.cache
def hip_library(device: int) -> ctypes.CDLL:
    compiler = hip_compiler()
    refuse_another_rocm(compiler, torch.version.hip)
    arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return _load(compiled((compiler, *HIP_FLAGS, f"--offload-arch={arch}")))


def refuse_another_rocm(compiler: str, of_torch: str | None) -> None:
    """Raises an error for a hipcc of another major version: two HIP runtimes do not know each other's streams."""
    found = re.search(r"HIP version: *(\d+)", _version(compiler))
    if found is None or of_torch is None:
        return
    theirs, ours = found[1], of_torch.split(".")[0]
    if theirs != ours:
        raise RuntimeError(
            f"causal_conv1d: {compiler} is of ROCm {theirs}, this PyTorch of ROCm {ours}; "
            f"set ROCM_PATH to the folder of a ROCm {ours}"
        )


def compiled(command: tuple[str, ...]) -> Path:
    """The shared library that `command` compiles from conv.hip. The first time takes 20 s or more."""
    library = cache_folder() / f"conv_{_key(command)}.so"
    try:
        library.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _refuse_what_others_write(library.parent)
        if _is_whole(library):
            return library
        with _locked(library.with_suffix(".lock")):
            if not _is_whole(library):
                _compile(command, library)
    except OSError as error:
        raise RuntimeError(
            f"causal_conv1d: cannot keep the compiled kernels in {library.parent} ({error}); "
            "set MHC_OPS_CACHE to a writable folder"
        ) from None
    return library


def _refuse_what_others_write(path: Path) -> None:
    """Loaded code runs as this user, so no other user may be able to write it."""
    found, me = path.stat(), os.geteuid()
    if found.st_uid not in (me, 0):
        problem = f"belongs to user {found.st_uid}, not to you (user {me}) or root"
    elif found.st_mode & WRITABLE_BY_OTHERS:
        problem = "can be written by other users"
    else:
        return
    remedy = f"delete {path}" if path.is_file() else f"chmod go-w {path} where it is yours"
    raise RuntimeError(
        f"causal_conv1d: {path} {problem}, so compiled kernels there may be another user's code; "
        f"{remedy}, or set MHC_OPS_CACHE to a folder of your own"
    )


def _key(command: tuple[str, ...]) -> str:
    key = hashlib.sha256("\0".join((*command, *LIBRARY_FLAGS, _version(command[0]))).encode())
    for path in sorted([*SOURCE.glob("*.h"), SOURCE / "conv.hip"]):
        key.update(path.name.encode() + path.read_bytes())
    return key.hexdigest()[:16]


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True)
        reason = f"ends with {done.returncode}"
    except OSError as error:
        done, reason = None, str(error)
    if done is None or done.returncode != 0:
        raise RuntimeError(
            f"causal_conv1d: the compiler {compiler!r} does not work: {compiler} --version {reason}; "
            "set CXX to a C++17 compiler, or ROCM_PATH to the folder of a ROCm, before Python starts"
        )
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of many compiles, the others wait for it."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # without locks all processes compile, and the last result is kept
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command: tuple[str, ...], library: Path) -> None:
    # Written beside its place and renamed: another process finds all of it or nothing.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        call = [*command, *LIBRARY_FLAGS, str(SOURCE / "conv.hip"), "-o", str(made)]
        done = subprocess.run(call, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"causal_conv1d: {' '.join(call)} failed:\n{done.stderr[-4000:]}")
        made.write_bytes(_with_hash(made.read_bytes()))
        made.chmod(made.stat().st_mode & ~WRITABLE_BY_OTHERS)  # whatever umask allowed
        made.replace(library)


def _with_hash(content: bytes) -> bytes:
    """The library with its hash at the end. A loader does not read beyond the sections."""
    return content + hashlib.sha256(content).digest()


def _is_whole(library: Path) -> bool:
    """False where it is missing or damaged. Loading a truncated library ends the process with a bus error."""
    if not library.exists():
        return False
    _refuse_what_others_write(library)
    content = library.read_bytes()
    return content == _with_hash(content[: -hashlib.sha256().digest_size])


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(
            f"causal_conv1d: cannot load the compiled kernels ({error}); "
            f"delete {path} to have them compiled again, or set MHC_OPS_CACHE to another folder"
        ) from None
    for name in ("conv_forward", "conv_backward"):
        function = getattr(library, name)
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        function.restype = ctypes.c_char_p
    library.conv_workspace.argtypes = (ctypes.c_int64,) * 4
    library.conv_workspace.restype = ctypes.c_int64
    return library
