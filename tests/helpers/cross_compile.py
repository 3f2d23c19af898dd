"""Run launchers on meta tensors and compile every kernel they launch for a GPU that is not here."""

import contextlib
import functools
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton
from config_domain import GPUS
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mhc_ops.core import backend, device


def target_of(name):
    on = GPUS[name]
    return GPUTarget(on.kind, name if on.kind == "hip" else int(name.removeprefix("sm_")), on.warp)


@dataclass(frozen=True)
class Compiled:
    name: str
    key: str  # differs for each compilation
    registers: int
    spilled: int  # bytes of memory per thread
    shared: int
    assembly: str
    ttir: str  # what the kernel says, before a compiler has chosen instructions; empty for a Gluon kernel
    cooperative: bool  # all programs run at once


class Driver:
    """What triton asks of a driver before it compiles."""

    def __init__(self, target):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return str(self.target)

    def get_current_stream(self, _):
        return 0


def skip_if_too_old(name):
    """Skip the test where this triton is older than what the kernels need on the target's platform."""
    oldest, _ = backend.TRITON[GPUS[name].kind]
    for reason in backend.too_old("triton", backend.triton_version(), oldest, f" on {name}").values():
        pytest.skip(reason)


@contextlib.contextmanager
def compiling_for(name, monkeypatch, kernels=None):
    """Within it, `kernel[grid](...)` compiles for the target instead of launching; yields the list of results.

    kernels: the names of those that are compiled; the others are passed over."""
    target, compiled = target_of(name), []
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        if kernels is not None and self.__name__ not in kernels:
            return
        compiled.append(resources(launch(self, *args, grid=grid, warmup=True, **options), target))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(device, "of", lambda _: GPUS[name])
        patch.setattr(backend, "why_not", lambda *_: None)  # launchers take meta tensors here
        patch.setattr(driver, "_active", Driver(target))
        yield compiled


@contextlib.contextmanager
def counting_for(name, monkeypatch):
    """Within it, nothing is compiled or launched. Yields a dict: how often each kernel was asked for in which form that
    Triton would compile for the target."""
    asked = Counter()

    def count(self, *args, grid, warmup, **options):
        *_, binder = self.device_caches[driver.active.get_current_device()]
        _, specialization, rest = binder(*args, **options, debug=False, instrumentation_mode="")
        asked[self.__name__, str(specialization), str(sorted(rest.items()))] += 1

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", count)
        patch.setattr(device, "of", lambda _: GPUS[name])
        patch.setattr(backend, "why_not", lambda *_: None)  # launchers take meta tensors here
        patch.setattr(driver, "_active", Driver(target_of(name)))
        yield asked


_known = {}


def resources(kernel, target):
    if kernel.hash not in _known:
        _known[kernel.hash] = _nvidia(kernel) if target.backend == "cuda" else _amd(kernel)
    return _known[kernel.hash]


def _nvidia(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_cuobjdump(), "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    return _compiled(kernel, registers, stack, kernel.asm["ptx"])


def _amd(kernel):
    text = kernel.asm["amdgcn"]
    registers, scratch = (
        int(re.search(rf"\.{word}:\s*(\d+)", text)[1]) for word in ("vgpr_count", "private_segment_fixed_size")
    )
    return _compiled(kernel, registers, scratch, text)


def _compiled(kernel, registers, spilled, assembly):
    found = kernel.metadata
    cooperative = bool(found.launch_cooperative_grid)
    return Compiled(
        found.name, kernel.hash, registers, spilled, found.shared, assembly, kernel.asm.get("ttir", ""), cooperative
    )


@functools.cache
def _cuobjdump():
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def check(name, compiled):
    """None of the kernels spills or takes more shared memory than the GPU has."""
    for kernel in compiled:
        assert kernel.spilled == 0, f"{kernel.name} spills {kernel.spilled} bytes at {kernel.registers} registers"
        assert kernel.shared <= GPUS[name].shared_memory, f"{kernel.name} takes {kernel.shared} bytes"
