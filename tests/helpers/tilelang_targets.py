"""What the TileLang launchers launch, for GPUs that are not here: lowered to source, and compiled by nvcc."""

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import tilelang
import torch
from config_domain import GPUS
from tilelang import tvm

from mhc_ops.core import backend, device
from mhc_ops.mhc.tilelang import build, configs
from mhc_ops.testing import accuracy, cases

# By what nvcc compiles for: instructions of one generation alone are marked with an a.
DEVICES = {name + "a" * (name in ("sm_90", "sm_100", "sm_120")): on for name, on in GPUS.items()}

PRODUCTS = ("mhc_pre_project", "mhc_pre_dx")


class Lowered(NamedTuple):
    kernel: str
    source: str
    shared: int


class Product(NamedTuple):
    """One of the two kernels with matrix products, and its bytes of shared memory, as the config counts them."""

    kernel: str
    n: int
    D: int
    dtype: str
    tiles: int

    def function(self, on):
        functions = launched(cases.Case(cases.MHC_LAYER, (9,), self.n, self.D, build.TYPES[self.dtype]), on)
        return next(function for function in functions if name_of(function) == self.kernel)


def distinct_products(target):
    """For every config that a device has for n of 1 to 8 in any type, but for the number of streams, the product that
    needs most shared memory with it."""
    on, found = DEVICES[target], {}
    for n, D, dtype in itertools.product(range(1, 9), (64, 36), build.TYPES):
        M, exact = n * n + 2 * n, configs.arithmetic(dtype, on)
        project, dx = configs.project(M, n * D, dtype, on), configs.dx(n, D, M, dtype, on)
        for kernel, config, tiles in (
            ("mhc_pre_project", replace(project, slice_k=0), project.tiles(M, dtype, exact)),
            ("mhc_pre_dx", replace(dx, streams=0), dx.tiles(n, M, dtype, exact)),
        ):
            if (kernel, config) not in found or found[kernel, config].tiles < tiles:
                found[kernel, config] = Product(kernel, n, D, dtype, tiles)
    return list(found.values())


@contextlib.contextmanager
def launching_on(on):
    """Within it, launchers take tensors of a CPU for those of that device; yields the functions that they compile.
    Nothing is executed."""
    functions = []

    def compile(function, target):
        functions.append(function)
        return lambda *arguments: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.tilelang, "compile", compile)
        patch.setattr(torch.cuda, "current_device", object)  # a GPU that nothing was compiled for yet
        patch.setattr(torch.cuda, "device", lambda gpu: contextlib.nullcontext())
        patch.setattr(device, "of", lambda _: on)
        patch.setattr(backend, "why_not", lambda family, name, device_type: None)
        yield functions


def launched(case, on):
    """The functions that a case compiles on a device, forward and backward."""
    with launching_on(on) as functions:
        accuracy.run_case(case, "tilelang")
    return functions


def name_of(function):
    return str(function.attrs["global_symbol"])


def lower(function, target):
    if DEVICES[target].kind == "hip":
        config = {"kind": "hip", "mcpu": target, "mtriple": "amdgcn-amd-amdhsa-hcc", "thread_warp_size": 64}
    else:
        config = {"kind": "cuda", "arch": target}
    with (on := tvm.target.Target(config)):
        lowered = tilelang.lower(function, target=on, enable_device_compile=False)
    (kernel,) = lowered.device_mod.functions.values()
    return Lowered(name_of(function), lowered.kernel_source, int(kernel.attrs.get("dyn_shared_memory_buf", 0)))


def nvcc():
    return shutil.which("nvcc")


def assert_no_spills(kernels, target):
    """All of them in one file: the headers take longer than the kernels."""
    root = os.path.dirname(tilelang.__file__)
    includes = (f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.cu"
        numbered = (k.source.replace(f"{k.kernel}_kernel(", f"kernel_{i}(") for i, k in enumerate(kernels))
        file.write_text("\n".join(numbered))
        options = ("--cubin", "-O3", f"-arch={target}", "-std=c++20", "-w", "--resource-usage", "-o", f"{folder}/cubin")
        done = subprocess.run([nvcc(), *options, *includes, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills == [("0", "0", "0")] * len(kernels), done.stderr
