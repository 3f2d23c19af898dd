"""Run launchers on meta tensors and compile every kernel they launch for a GPU that is not here."""

import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
from config_domain import GPUS
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mhc_ops.core import backend, device


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


def skip_if_too_old(name):
    """Skip the test where this triton is older than what the kernels need on the target's platform."""
    oldest, _ = backend.TRITON[GPUS[name].kind]
    for reason in backend.too_old("triton", backend.triton_version(), oldest, f" on {name}").values():
        pytest.skip(reason)


@contextlib.contextmanager
def _launching(name, monkeypatch, run):
    """Within it, launchers take meta tensors and choose as on the GPU, and what starts a kernel is `run`."""
    on = GPUS[name]
    target = GPUTarget(on.kind, name if on.kind == "hip" else int(name.removeprefix("sm_")), on.warp)
    asked = {"target": lambda: target, "device": lambda: name, "stream": lambda _: 0}
    gpu = SimpleNamespace(**{f"get_current_{what}": answer for what, answer in asked.items()})
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(device, "of", lambda _: on)
        patch.setattr(backend, "why_not", lambda *_: None)
        patch.setattr(driver, "_active", gpu)  # what triton asks of it before it compiles
        yield


@contextlib.contextmanager
def compiling_for(name, monkeypatch, kernels=None):
    """Within it, `kernel[grid](...)` compiles for the target instead of launching; yields the list of results.

    kernels: the names of those that are compiled; the others are passed over."""
    compiled, launch = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        if kernels is None or self.__name__ in kernels:
            compiled.append(resources(launch(self, *args, grid=grid, warmup=True, **options)))

    with _launching(name, monkeypatch, compile_only):
        yield compiled


@contextlib.contextmanager
def counting_for(name, monkeypatch):
    """Within it nothing is compiled. Yields how often each kernel was asked for in which form to compile."""
    asked = Counter()

    def count(self, *args, grid, warmup, **options):
        *_, binder = self.device_caches[driver.active.get_current_device()]
        _, specialization, rest = binder(*args, **options, debug=False, instrumentation_mode="")
        asked[self.__name__, str(specialization), str(sorted(rest.items()))] += 1

    with _launching(name, monkeypatch, count):
        yield asked


# Where the registers and the memory of a thread are said.
USAGE = {
    "ptx": (r"REG:(\d+)", r"STACK:(\d+)"),
    "amdgcn": (r"\.vgpr_count:\s*(\d+)", r"\.private_segment_fixed_size:\s*(\d+)"),
}
_known = {}


def resources(kernel):
    if kernel.hash not in _known:
        language = "ptx" if "ptx" in kernel.asm else "amdgcn"
        usage = _usage(kernel.asm["cubin"]) if language == "ptx" else kernel.asm[language]
        registers, spilled = (int(re.search(words, usage)[1]) for words in USAGE[language])
        found = {"registers": registers, "spilled": spilled, "shared": kernel.metadata.shared}
        found |= {"assembly": kernel.asm[language], "ttir": kernel.asm.get("ttir", "")}
        cooperative = bool(kernel.metadata.launch_cooperative_grid)
        _known[kernel.hash] = Compiled(name=kernel.metadata.name, key=kernel.hash, **found, cooperative=cooperative)
    return _known[kernel.hash]


def _usage(cubin):
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# How a program draws a ticket, looks how many were drawn, and draws another.
TICKET, LOOK, AGAIN = "atom.global.gpu.acq_rel.add.u32", "ld.global.gpu.acquire.b32", "atom.global.gpu.relaxed.add.u32"


def check(name, compiled):
    """None of the kernels spills, takes more shared memory than the GPU has, or adds in memory, but for tickets.

    What is stored comes before the ticket, with a barrier for all threads between them, and what is loaded after one.
    Programs that wait for one another, looking how many have come, are launched together: elsewhere they would hang
    where other kernels hold a part of the GPU."""
    for kernel in compiled:
        assert kernel.spilled == 0, f"{kernel.name} spills {kernel.spilled} bytes at {kernel.registers} registers"
        assert kernel.shared <= GPUS[name].shared_memory, f"{kernel.name} takes {kernel.shared} bytes"
        atomics = re.findall(r"\b(?:(?:atom|red|ld(?=\.global\.gpu))\.global\.\S+|global_atomic\w+)", kernel.assembly)
        assert atomics in ([], [TICKET], [TICKET, LOOK, AGAIN]), kernel.name
        assert kernel.cooperative == (LOOK in atomics), kernel.name
        if atomics:
            before, after = kernel.assembly.split(TICKET)
            assert "st.global" not in before[before.rindex("bar.sync") :], kernel.name
            after = after.split(LOOK)[-1]
            assert "bar.sync" in after[: after.index("ld.global")], kernel.name
