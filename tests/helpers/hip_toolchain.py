"""Compilers that may be here: clang for AMD without ROCm, nvcc, and what they say about each kernel."""

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from mhc_ops.conv.hip import build

SOURCE = build.SOURCE
CLANG = "clang++-22"
# Fewer kernels, to compile faster.
WIDTH_4, FP32, BF16 = (f"-DMHC_CONV_ONLY_{what}" for what in ("WIDTH_4", "FP32", "BF16"))
NO_FP16 = "-DMHC_CONV_WITHOUT_FP16"
# What ROCm's device libraries ask about the target; the ones shipped with triton leave it open.
DEVICE_CONSTANTS = """
#define CONSTANT(type, name, value) \\
    const type __oclc_##name __attribute__((address_space(4), visibility("hidden"), weak)) = value;
CONSTANT(unsigned char, wavefrontsize64, 1)
CONSTANT(unsigned char, finite_only_opt, 0)
CONSTANT(unsigned char, unsafe_math_opt, 0)
CONSTANT(unsigned char, correctly_rounded_sqrt32, 1)
CONSTANT(unsigned int, ISA_version, {isa})
CONSTANT(unsigned int, ABI_version, 600)
"""
ISA = {"gfx942": 9402, "gfx950": 9500}
REGISTERS_PER_LANE, GRANULE, MOST_WAVES = 512, 8, 8  # of one SIMD of gfx942 and gfx950
SHARED, SIMDS, LANES = 64 * 1024, 4, 64  # of one compute unit of gfx942; gfx950 has more shared memory


@dataclass(frozen=True)
class Kernel:
    name: str
    registers: int
    spilled: int  # registers or bytes: 0 is what counts
    shared: int
    threads: int

    @property
    def waves_per_simd(self) -> int:
        by_registers = REGISTERS_PER_LANE // (-(-self.registers // GRANULE) * GRANULE)
        by_shared = SHARED // max(self.shared, 1) * (self.threads // LANES) // SIMDS
        return min(MOST_WAVES, by_registers, by_shared)


def compile_amd(arch: str, folder: Path, *flags: str) -> list[Kernel]:
    """Skips where clang or the headers that come with triton are missing."""
    if shutil.which(CLANG) is None:
        pytest.skip(f"needs {CLANG} (Debian: apt-get install clang-22 lld-22)")
    spec = importlib.util.find_spec("triton")
    amd = Path(spec.origin).parent / "backends" / "amd" if spec and spec.origin else None
    if amd is None or not (amd / "include" / "hip").exists():
        pytest.skip("needs the HIP headers that come with triton")
    rocm = folder / "rocm"
    (rocm / "share" / "hip").mkdir(parents=True)
    (rocm / "include").symlink_to(amd / "include")
    (rocm / "share" / "hip" / "version").write_text("HIP_VERSION_MAJOR=7\nHIP_VERSION_MINOR=1\nHIP_VERSION_PATCH=0\n")
    constants, bitcode, assembly = folder / "constants.c", folder / "constants.bc", folder / "conv.s"
    constants.write_text(DEVICE_CONSTANTS.format(isa=ISA[arch]))
    target = ("-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-nogpulib")
    run(CLANG, "-x", "c", *target, "-O1", "-emit-llvm", "-c", constants, "-o", bitcode)
    libraries = []
    for library in (amd / "lib" / "ocml.bc", amd / "lib" / "ockl.bc", bitcode):
        libraries += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", library]
    device = ("--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", f"--offload-arch={arch}")
    where = (f"--rocm-path={rocm}", *libraries)
    run(CLANG, *build.HIP_FLAGS, *device, *where, *flags, "-S", SOURCE / "conv.hip", "-o", assembly)
    return amd_kernels(assembly.read_text())


def amd_kernels(assembly: str) -> list[Kernel]:
    kernels = []
    for entry in re.split(r"\n  - ", assembly[assembly.index("amdhsa.kernels:") :])[1:]:
        if "vgpr_spill_count" not in entry:
            continue  # the version, at the end
        number = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)\n", entry)}
        spilled = number["vgpr_spill_count"] + number["sgpr_spill_count"] + number["private_segment_fixed_size"]
        name, registers = re.search(r"\n    \.name:\s+(\S+)", entry)[1], number["vgpr_count"]  # with accumulators
        sizes = number["group_segment_fixed_size"], number["max_flat_workgroup_size"]
        kernels.append(Kernel(readable(name), registers, spilled, *sizes))
    return kernels


def compile_nvidia(folder: Path, *flags: str) -> list[Kernel]:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    command = ("nvcc", *build.CUDA_FLAGS, "-arch=sm_90", "-Xptxas", "-v", *flags, "-cubin")
    said = run(*command, SOURCE / "conv.hip", "-o", folder / "conv.cubin")
    pattern = r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers([^\n]*)"
    kernels = []
    for name, spilled, registers, rest in re.findall(pattern, said, re.S):
        shared = re.search(r"(\d+) bytes smem", rest)
        kernels.append(Kernel(readable(name), int(registers), int(spilled), int(shared[1]) if shared else 0, 0))
    return kernels


def readable(mangled: str) -> str:
    """void conv_bwd_kernel<Bf16, 4, true, false, 4>(...) as conv_bwd<bf16, W=4, silu, 4 channels>"""
    pattern = r"(conv_[a-z_]+)_kernelI(?:(4Bf16|4Half|f))?Li(\d)E(?:Lb(\d)ELb(\d)ELi(\d)E)?"
    kernel, kind, width, silu, seq, channels = re.search(pattern, mangled).groups()
    words = [{"4Bf16": "bf16", "4Half": "fp16", "f": "fp32"}[kind]] if kind else []
    words += [f"W={width}"] + ["silu"] * (silu == "1") + ["seq_idx"] * (seq == "1")
    return f"{kernel}<{', '.join(words + [f'{channels} channels'] * bool(channels))}>"


def run(*command: object) -> str:
    """What the command printed; an error shows it."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
