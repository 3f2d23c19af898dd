"""What the CUDA driver is told to launch, on a machine without a GPU: libcuda.c takes the driver's place.

Kernels are compiled for an H200 and started by Triton's own launcher, on the addresses of CPU tensors.
"""

import contextlib
import ctypes
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from config_domain import GPUS

from mhc_ops.core import alike, backend, device, native, replay

STREAM = 77
# An address, alone or as the first of a descriptor's 128 bytes. No number that kernels take is as large.
ADDRESS = re.compile(r"(?<= )0000(?!00000000)[0-9a-f]{12}(?=[0-9a-f]{240}\b|\b)")


@contextlib.contextmanager
def written_driver():
    """Within it, backend="triton" takes CPU tensors. Yields `lines(function)`: the launches of a call, a line for each,
    with addresses numbered in the order in which they come. Only for a process that then ends."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    compiler, source = shutil.which("gcc") or shutil.which("clang"), Path(__file__).with_name("libcuda.c")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        command = [compiler, "-shared", "-fPIC", "-Wall", "-Werror", f"-I{include}", str(source)]
        subprocess.run([*command, "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"], check=True)
        library = ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # found again by its soname
        library.launches.restype = ctypes.c_char_p
        patch.setenv("TRITON_LIBCUDA_PATH", folder)
        from triton.backends.nvidia.driver import CudaDriver

        gpu = CudaDriver()
        gpu.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        gpu.get_current_device, gpu.get_current_stream = int, lambda _: STREAM
        patch.setattr(driver, "_active", gpu)
        patch.setattr(device, "of", lambda _: GPUS["sm_90"])
        patch.setattr(backend, "why_not", lambda *_: None)
        kept = _keep_memory(patch)

        def lines(function):
            results, numbers = function(), {}
            found = ADDRESS.sub(lambda m: f"#{numbers.setdefault(m[0], len(numbers))}", library.launches().decode())
            del results
            kept.clear()
            return found.splitlines()

        yield lines


def _keep_memory(patch):
    """Plans are those of a GPU. No memory is used twice in a call: addresses say which tensor is meant."""
    from mhc_ops.mhc.triton import tickets

    kept, plan, seen = [], replay.plan, replay.Recorder.__torch_dispatch__

    def keep(tensor):
        kept.append(tensor)
        return tensor

    of_gpu = {"device": 0, "current_device": int, "raw_stream": lambda _: STREAM}
    patch.setattr(replay, "plan", lambda *arguments: plan(*arguments)._replace(**of_gpu))
    patch.setattr(replay, "_empty", lambda _, shape, *rest: keep(torch.empty_strided(shape, *rest[:1], dtype=rest[1])))
    patch.setattr(replay.Recorder, "__torch_dispatch__", lambda *arguments: keep(seen(*arguments)))
    patch.setattr(tickets, "tickets", lambda index, stream, own=tickets.tickets: own(index, STREAM))
    return kept


def launches(make, in_python):
    """The lines of four calls of make(): Triton's own, then three replayed ones. in_python: without native.c"""
    with written_driver() as lines, pytest.MonkeyPatch.context() as patch:
        if in_python:
            patch.setattr(native, "load", lambda: None)
        function = make()
        found = [lines(function) for _ in range(4)]
        assert (native.code is None) == bool(in_python or native.why_not())
        assert alike.calls
    return found
