"""Compile the kernels once per compiler and source, into a cache folder: $MHC_OPS_CACHE or ~/.cache/mhc_ops."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from ...core import backend

SOURCE = Path(__file__).parent
CPU_FLAGS = ("-x", "c++", "-std=c++17", "-O1", "-Wno-unknown-pragmas")
# The SLP vectorizer pairs channels across rows and takes up to 100 registers more.
HIP_FLAGS = ("-x", "hip", "-std=c++17", "-O3", "-fno-slp-vectorize")
LIBRARY_FLAGS = ("-shared", "-fPIC")


def cache_folder() -> Path:
    return Path(os.environ.get("MHC_OPS_CACHE") or Path.home() / ".cache" / "mhc_ops")


def cpu_compiler() -> str:
    if backend._CXX is None:
        raise RuntimeError("causal_conv1d: the hip backend on CPU tensors needs a C++17 compiler (c++, g++ or $CXX)")
    return backend._CXX


def hip_compiler() -> str:
    if shutil.which("hipcc"):
        return "hipcc"
    rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "bin" / "hipcc"
    if rocm.exists():
        return str(rocm)
    raise RuntimeError("causal_conv1d: the hip backend needs hipcc, in PATH or in $ROCM_PATH/bin (default /opt/rocm)")


@functools.cache
def cpu_library() -> ctypes.CDLL:
    return _load((cpu_compiler(), *CPU_FLAGS))


@functools.cache
def hip_library(device: int) -> ctypes.CDLL:
    arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return _load((hip_compiler(), *HIP_FLAGS, f"--offload-arch={arch}"))


def _load(command: tuple[str, ...]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compiled(command)))
    for name in ("conv_forward", "conv_backward"):
        function = getattr(library, name)
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        function.restype = ctypes.c_char_p
    library.conv_workspace.argtypes = (ctypes.c_int64,) * 4
    library.conv_workspace.restype = ctypes.c_int64
    return library


def compiled(command: tuple[str, ...]) -> Path:
    """The shared library that `command` makes of conv.hip. Takes 20 s or more the first time."""
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True).stdout
    key = hashlib.sha256("\0".join((*command, *LIBRARY_FLAGS)).encode() + version)
    for path in sorted([*SOURCE.glob("*.h"), SOURCE / "conv.hip"]):
        key.update(path.name.encode() + path.read_bytes())
    library = cache_folder() / f"conv_{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed, so that another process finds all of it or nothing.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        call = [*command, *LIBRARY_FLAGS, str(SOURCE / "conv.hip"), "-o", str(made)]
        done = subprocess.run(call, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"causal_conv1d: {' '.join(call)} failed:\n{done.stderr[-4000:]}")
        made.replace(library)
    return library
