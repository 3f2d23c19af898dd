"""What the TileLang launchers launch, for GPUs that are not here: lowered to source, and compiled by nvcc."""

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import tilelang
import torch
from config_domain import GPUS
from tilelang import tvm

from mhc_ops.core import backend, device
from mhc_ops.core.device import Device
from mhc_ops.mhc.tilelang import build, configs
from mhc_ops.mhc.tilelang.pre_dx import Residual, mhc_pre_dx_kernel
from mhc_ops.mhc.tilelang.pre_project import mhc_pre_project_kernel
from mhc_ops.testing import accuracy, cases

# By what nvcc compiles for: instructions of one generation alone are marked with an a.
DEVICES = {name + "a" * (name in ("sm_90", "sm_100", "sm_120")): on for name, on in GPUS.items()}

PRODUCTS = ("mhc_pre_project", "mhc_pre_dx")


@dataclass(frozen=True)
class Lowered:
    kernel: str
    source: str
    shared: int


@dataclass(frozen=True)
class Product:
    """One of the two kernels with matrix products."""

    kernel: str
    n: int
    D: int
    dtype: str
    dh_in: bool = True
    residual: Residual = Residual.MIXED

    @property
    def M(self) -> int:
        return self.n * self.n + 2 * self.n

    def config(self, on: Device) -> configs.Project | configs.Dx:
        if self.kernel == "mhc_pre_project":
            return configs.project(self.M, self.n * self.D, self.dtype, on)
        return configs.dx(self.n, self.D, self.M, self.dtype, on)

    def tiles(self, on: Device) -> int:
        """Bytes of shared memory, as the config counts them."""
        streams = () if self.kernel == "mhc_pre_project" else (self.n,)
        return self.config(on).tiles(*streams, self.M, self.dtype, configs.arithmetic(self.dtype, on))

    def function(self, on: Device):
        constants = {"dtype": self.dtype, "exact": configs.arithmetic(self.dtype, on), "config": self.config(on)}
        if self.kernel == "mhc_pre_project":
            return mhc_pre_project_kernel.__wrapped__(M=self.M, K=self.n * self.D, **constants)
        return mhc_pre_dx_kernel.__wrapped__(
            n=self.n,
            D=self.D,
            M=self.M,
            in_dtype=self.dtype if self.dh_in else None,
            dx_dtype=self.dtype,
            residual=self.residual,
            **constants,
        )


def distinct_products(target: str) -> dict:
    """For every config that a device has for n of 1 to 8 in any type, but for the number of streams, the product that
    needs most shared memory with it."""
    on, found = DEVICES[target], {}
    for kernel, n, D, dtype in itertools.product(PRODUCTS, range(1, 9), (64, 36), build.TYPES):
        product = Product(kernel, n, D, dtype)
        config = product.config(on)
        same = {"slice_k": 0} if kernel == "mhc_pre_project" else {"streams": 0}
        key = (kernel, dataclasses.replace(config, **same))
        if key not in found or found[key].tiles(on) < product.tiles(on):
            found[key] = product
    return found


@contextlib.contextmanager
def launching_on(on: Device) -> Iterator[list]:
    """Within it, launchers take tensors of a CPU for those of that device; yields the functions that they compile.
    Nothing is executed."""
    functions: list = []

    def compile(function, target):
        functions.append(function)
        return lambda *arguments: None

    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (build.tilelang, "compile", compile),
            (torch.cuda, "current_device", object),  # a GPU that nothing was compiled for yet
            (torch.cuda, "device", lambda gpu: contextlib.nullcontext()),
            (device, "of", lambda _: on),
            (backend, "why_not", lambda family, name, device_type: None),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield functions


def launched(case: cases.Case, on: Device, unused: Iterable[str] = ()) -> list:
    """The functions that a case compiles on a device, forward and backward, where some outputs are not used."""
    tensors = case.inputs("cpu")
    outputs = accuracy.run(case.subject, tensors, "reference")
    cotangents = accuracy.random_cotangents(case.subject, outputs, 0)
    for index, name in enumerate(case.subject.differentiable):
        cotangents[index] = None if name in unused else cotangents[index]
    with launching_on(on) as functions:
        accuracy.run(case.subject, tensors, "tilelang", cotangents)
    return functions


def lower(function, target: str) -> Lowered:
    if DEVICES[target].kind == "hip":
        config = {"kind": "hip", "mcpu": target, "mtriple": "amdgcn-amd-amdhsa-hcc", "thread_warp_size": 64}
    else:
        config = {"kind": "cuda", "arch": target}
    on = tvm.target.Target(config)
    with on:
        lowered = tilelang.lower(function, target=on, enable_device_compile=False)
    (kernel,) = lowered.device_mod.functions.values()
    shared = int(kernel.attrs.get("dyn_shared_memory_buf", 0))
    return Lowered(str(function.attrs["global_symbol"]), lowered.kernel_source, shared)


def nvcc() -> str | None:
    return shutil.which("nvcc")


def resources(kernels: list[Lowered], target: str) -> list[tuple[int, int]]:
    """Registers and bytes spilled, of each kernel. All in one file: the headers take longer than the kernels."""
    root = os.path.dirname(tilelang.__file__)
    includes = (f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.cu"
        numbered = (k.source.replace(f"{k.kernel}_kernel(", f"kernel_{i}(") for i, k in enumerate(kernels))
        file.write_text("\n".join(numbered))
        options = ("--cubin", "-O3", f"-arch={target}", "-std=c++20", "-w", "--resource-usage", "-o", f"{folder}/cubin")
        done = subprocess.run([nvcc(), *options, *includes, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    used = {}
    for text in done.stderr.split("Compiling entry function")[1:]:
        number = int(re.search(r"kernel_(\d+)", text)[1])
        memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
        used[number] = (int(re.search(r"Used (\d+) registers", text)[1]), max(map(int, memory.groups())))
    return [used[i] for i in range(len(kernels))]
