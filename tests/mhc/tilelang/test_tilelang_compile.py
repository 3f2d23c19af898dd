"""What the TileLang launchers launch lowers for NVIDIA and AMD GPUs, and nvcc compiles it without spills."""

import os
import re
import shutil
import subprocess

import pytest
import torch

pytest.importorskip("tilelang")
import tilelang
from tilelang import tvm

from mhc_ops.core import backend, device
from mhc_ops.measure import accuracy, cases
from mhc_ops.mhc.tilelang import build, configs
from mhc_ops.mhc.tilelang.pre_dx import factors, phi_order

TARGETS = {
    "sm_90a": {"kind": "cuda", "arch": "sm_90a"},
    "sm_80": {"kind": "cuda", "arch": "sm_80"},
    "gfx942": {"kind": "hip", "mcpu": "gfx942", "mtriple": "amdgcn-amd-amdhsa-hcc", "thread_warp_size": 64},
}
SHARED_MEMORY = {"sm_90a": 227 << 10, "sm_80": 163 << 10, "gfx942": 64 << 10}
CASES = (
    cases.Case(cases.MHC_LAYER, (70,), 4, 4096, torch.bfloat16),
    cases.Case(cases.MHC_LAYER, (70,), 3, 257, torch.float16, gamma=False),
    cases.Case(cases.MHC_LAYER, (70,), 8, 64, torch.bfloat16),
    cases.Case(cases.MHC_LAYER, (70,), 7, 40, torch.float32),
    cases.Case(cases.MHC_POST_PRE, (70,), 2, 264, torch.bfloat16),
    cases.Case(cases.MHC_HEAD, (70,), 5, 40, torch.bfloat16),
    cases.Case(cases.SINKHORN, (70,), 8, 0, torch.bfloat16),
)


@pytest.fixture
def capability():
    return 9, 0


@pytest.fixture
def launched(monkeypatch, kind, capability):
    """The functions that launchers compile, by name, as they would on a GPU of that kind; nothing is executed."""
    functions = {}

    def compile(function, target):
        functions[function.attrs["global_symbol"]] = function
        return lambda *arguments: None

    monkeypatch.setattr(build.tilelang, "compile", compile)
    monkeypatch.setattr(torch.cuda, "current_device", object)  # a GPU that nothing was compiled for yet
    monkeypatch.setattr(device, "kind", lambda on: kind)
    monkeypatch.setattr(device, "capability", lambda on: capability)
    monkeypatch.setattr(device, "multiprocessors", lambda on: 132)
    monkeypatch.setattr(backend, "why_not", lambda family, name, device_type: None)
    return functions


def launch(case):
    tensors = case.inputs("cpu")
    cotangents = accuracy.random_cotangents(case.subject, accuracy.run(case.subject, tensors, "reference"), 0)
    accuracy.run(case.subject, tensors, "tilelang", cotangents)


def lower(function, target):
    """The source, which fits the shared memory of its GPU and adds no floats atomically."""
    on = tvm.target.Target(TARGETS[target])
    with on:
        lowered = tilelang.lower(function, target=on, enable_device_compile=False)
    (kernel,) = lowered.device_mod.functions.values()
    assert kernel.attrs.get("dyn_shared_memory_buf", 0) <= SHARED_MEMORY[target]
    assert "__global__" in lowered.kernel_source
    assert "atomicAdd" not in lowered.kernel_source
    return lowered.kernel_source


@pytest.mark.parametrize("kind", ["hip"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lowers_for_amd(case, kind, launched):
    launch(case)
    for function in launched.values():
        lower(function, "gfx942")


@pytest.mark.parametrize("kind", ["hip"])
def test_what_does_not_fit_amd_says_so(kind, launched):
    with pytest.raises(NotImplementedError, match="tilelang: on AMD GPUs the gradients of 8 streams fit"):
        launch(cases.Case(cases.MHC_PRE, (3,), 8, 16, torch.float32))


@pytest.mark.parametrize("kind", ["cuda"])
@pytest.mark.parametrize("capability", [(8, 0)])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_lowers_for_nvidia_before_hopper(case, kind, capability, launched):
    launch(case)
    for function in launched.values():
        lower(function, "sm_80")


@pytest.mark.parametrize("n", [4, 5, 6, 7, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_pass_b_fits_shared_memory(n, dtype):
    """As bytes of its tiles, which lowering shows only after seconds each."""
    M = n * n + 2 * n
    config, exact = configs.dx(n, 64, M, dtype, "cuda"), configs.arithmetic(dtype, "cuda")
    tile, wide = config.block_t * config.block_d, 4 if dtype == "float32" else 2
    mixes = configs.mix_columns(M, exact.parts)
    loaded = tile * wide * (config.streams + n + 1) + config.block_t * (2 * mixes + 4 * factors(n, False))
    phi = config.streams * 2 * len(phi_order(exact.parts)) * configs.padded_maps(M) * config.block_d
    kept = tile * (4 + 2 * exact.x_parts) + 4 * mixes * config.block_d
    assert config.resident * (loaded + phi + kept) <= SHARED_MEMORY["sm_90a"]


@pytest.mark.parametrize("kind", ["cuda"])
@pytest.mark.parametrize("case", [*CASES, cases.Case(cases.MHC_PRE, (70,), 8, 64, torch.float32)], ids=str)
def test_compiles_for_nvidia_without_spills(case, kind, launched, tmp_path):
    launch(case)
    sources = [lower(function, "sm_90a") for function in launched.values()]
    if shutil.which("nvcc") is None:
        pytest.skip("lowered, but there is no nvcc to compile it")
    file = tmp_path / "kernels.cu"
    file.write_text("\n".join(sources))  # in one file: the headers take longer than the kernels
    root = os.path.dirname(tilelang.__file__)
    includes = (f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include")
    options = ("--cubin", "-O3", "-arch=sm_90a", "-std=c++20", "-w", "--resource-usage", "-o", str(tmp_path / "cubin"))
    done = subprocess.run(["nvcc", *options, *includes, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert len(used) == len(sources)
    assert set(used) == {("0", "0", "0")}, done.stderr
