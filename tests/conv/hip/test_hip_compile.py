"""Device code for GPUs that are not here: registers, shared memory, waves, and no spills."""

import hip_toolchain as toolchain
import pytest

# What 2 blocks of 128 threads leave to each on sm_90, and 3 waves per SIMD on gfx942; 2 with seq_idx.
MOST_REGISTERS, MOST_WITH_IDS, MOST_ON_NVIDIA = 168, 255, 255
LEAST_WAVES, LEAST_WAVES_WITH_IDS, MOST_SHARED = 3, 2, 16 * 1024


def show(target, kernels):
    print(f"\n{target:60} registers  spilled  shared  waves/SIMD")
    for k in sorted(kernels, key=lambda k: k.name):
        waves = k.waves_per_simd if target.startswith("gfx") else "-"
        print(f"{k.name:60} {k.registers:9} {k.spilled:8} {k.shared:7} {waves:>11}")


def check(kernels, types, most=MOST_REGISTERS):
    assert len(kernels) == types * 2 * 2 * 2 * 2 + 1  # silu, seq_idx, channels, directions; and the sums
    for kernel in kernels:
        assert kernel.spilled == 0, kernel
        assert kernel.shared <= MOST_SHARED, kernel
        assert kernel.registers <= (MOST_WITH_IDS if "seq_idx" in kernel.name else most), kernel


@pytest.mark.parametrize("arch, flags, types", [("gfx942", (), 3), ("gfx950", (toolchain.BF16,), 1)])
def test_amd(arch, flags, types, tmp_path):
    kernels = toolchain.compile_amd(arch, tmp_path, toolchain.WIDTH_4, *flags)
    show(arch, kernels)
    check(kernels, types)
    for kernel in kernels:
        assert kernel.waves_per_simd >= (LEAST_WAVES_WITH_IDS if "seq_idx" in kernel.name else LEAST_WAVES), kernel


def test_nvidia(tmp_path):
    kernels = toolchain.compile_nvidia(tmp_path, toolchain.WIDTH_4, toolchain.NO_FP16)
    show("sm_90", kernels)
    check(kernels, 2, MOST_ON_NVIDIA)
