"""What the TileLang launchers launch lowers for NVIDIA and AMD GPUs, and nvcc compiles it without spills."""

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
import torch

pytest.importorskip("tilelang")
import tilelang
from config_domain import GPUS
from mhc_kernels import bf16, fp16, fp32
from stale_values import stale_values
from tilelang import tvm

from mhc_ops.core import backend, device
from mhc_ops.core.device import Device
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
    """For every config that a device has in any type, whatever n: the product that needs most shared memory with it."""
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
    """Within it, launchers take a CPU's tensors as that device's; yields what they compile. Nothing is executed."""
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


CASES = {
    "sm_90a": (
        cases.Case(cases.MHC_LAYER, (70,), 4, 4096, bf16), cases.Case(cases.MHC_LAYER, (70,), 8, 64, fp32),
        cases.Case(cases.MHC_HEAD, (70,), 5, 40, bf16), cases.Case(cases.SINKHORN, (70,), 8, 0, bf16),
        cases.Case(cases.SINKHORN.with_options(eps=0.0), (70,), 4, 0, bf16),
    ),
    "sm_80": (cases.Case(cases.MHC_POST_PRE, (70,), 3, 257, fp16, gamma=False),),
    "gfx942": (
        cases.Case(cases.MHC_POST_PRE, (70,), 4, 264, bf16, gamma=False),
        cases.Case(cases.MHC_HEAD, (70,), 5, 40, fp32), cases.Case(cases.SINKHORN, (70,), 8, 0, fp16),
    ),
}  # fmt: skip


def lowered(functions, target):
    """Their sources: they fit the shared memory of their GPU, add no floats atomically, use no value out of date."""
    kernels = [lower(function, target) for function in functions]
    for kernel in kernels:
        assert kernel.shared <= DEVICES[target].shared_memory, kernel.kernel
        assert "__global__" in kernel.source and "atomicAdd" not in kernel.source
        assert stale_values(kernel.source) == []
        assert target == "sm_90a" or "wgmma" not in kernel.source.split('extern "C"', 1)[1]
    return kernels


def compiled(kernels, target):
    """By nvcc, without spills, all in one file: the headers take longer than the kernels."""
    if DEVICES[target].kind != "cuda":
        return
    nvcc = shutil.which("nvcc") or pytest.skip("there is no nvcc to compile with")
    root = os.path.dirname(tilelang.__file__)
    includes = (f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.cu"
        numbered = (k.source.replace(f"{k.kernel}_kernel(", f"kernel_{i}(") for i, k in enumerate(kernels))
        file.write_text("\n".join(numbered))
        options = ("--cubin", "-O3", f"-arch={target}", "-std=c++20", "-w", "--resource-usage", "-o", f"{folder}/cubin")
        done = subprocess.run([nvcc, *options, *includes, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills == [("0", "0", "0")] * len(kernels), done.stderr


@pytest.mark.parametrize(("target", "case"), [(target, case) for target in CASES for case in CASES[target]], ids=str)
def test_kernels_compile(target, case):
    """Every kernel compiles but for those that the tests of products compile."""
    functions = launched(case, DEVICES[target])
    compiled(lowered([function for function in functions if name_of(function) not in PRODUCTS], target), target)


HALVES = [*((target, part) for target in ("sm_90a", "gfx942", "gfx950") for part in (0, 1))]
HALVES += [("sm_80", 0), ("sm_120a", 1)]  # one: nvcc takes seconds for a product


@pytest.mark.parametrize(("target", "part"), HALVES)
def test_products_compile(target, part):
    """Every config of Hopper (wgmma), sm_80 (mma, as on other NVIDIA GPUs) and gfx942; of the others the largest."""
    products = sorted(distinct_products(target), key=lambda product: product.tiles)
    if target not in ("sm_90a", "sm_80", "gfx942"):
        products = list({product.kernel: product for product in products}.values())
    kernels = lowered([product.function(DEVICES[target]) for product in products[part::2]], target)
    for product, kernel in zip(products[part::2], kernels, strict=True):
        assert kernel.shared <= product.tiles + configs.KEPT, product
    compiled(kernels, target)


@pytest.mark.parametrize("target", ["sm_90a", "gfx942"])
def test_no_kernel_cuts_a_product_of_gamma(target):
    """Where it did, nvcc and hipcc would choose whether the product is rounded before a part is subtracted from it."""
    case = cases.Case(cases.MHC_PRE, (9,), 4, 64, bf16)
    sources = {kernel.kernel: kernel.source for kernel in (lower(f, target) for f in launched(case, DEVICES[target]))}
    assert {name for name, source in sources.items() if "gamma" in source} == {"mhc_pre_dphi"}
    assert re.findall(r"(\w+)\[.*\] = .*\bweight\[0\] \*", sources["mhc_pre_dphi"]) == ["dphi"]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(("n", "dtype"), [(8, fp32), (1, fp32), (2, fp16)], ids=str)
def test_gradients_of_maps_alone(n, dtype, target):
    """Without dh_in and dx_next, threads take other elements of x: for n = 1 and 8, fp32 once summed it three times."""
    case = cases.Case(cases.MHC_PRE, (9,), n, 64, dtype, unused=("h_in",))
    functions = launched(case, DEVICES[target])
    assert "mhc_pre_dh_pre" not in map(name_of, functions)
    lowered([function for function in functions if name_of(function) == "mhc_pre_dx"], target)


def test_what_does_not_fit_says_so():
    reason = "tilelang: the gradients of 8 streams in float32 do not fit the 48 KB of shared memory of this GPU"
    with pytest.raises(NotImplementedError, match=reason):
        launched(cases.Case(cases.MHC_PRE, (3,), 8, 16, fp32), Device("cuda", (8, 0), shared_memory=48 << 10))
