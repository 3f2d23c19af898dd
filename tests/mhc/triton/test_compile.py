"""Every kernel and config compiles for GPUs that are not here, without spills, and once for all token counts."""

import pytest
import torch

from mhc_ops.core.backend import _INTERPRETED
from mhc_ops.core.check import name_of
from mhc_ops.mhc.contracts import mhc_pre_bwd, mhc_pre_fwd

pytest.importorskip("triton")
import cross_compile

pytestmark = pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
# (n, D, dtype): every n in bf16, each other type where it takes another config, an aligned and an odd D
CONFIGS = [
    *((n, 4096, bf16) for n in range(1, 9)),
    *((n, 1280, dtype) for n in (1, 3, 4, 7, 8) for dtype in (fp16, fp32)),
    *((n, 257, dtype) for n in (1, 4, 8) for dtype in (bf16, fp32)),
]


def launch_all(T, n, D, dtype, gamma=True):
    """Forward and backward on meta tensors: shapes and types, no storage."""
    M = n * n + 2 * n

    def tensor(*shape, dtype=fp32):
        return torch.empty(shape, dtype=dtype, device="meta")

    inputs = [tensor(T, n, D, dtype=dtype), tensor(M, n * D), tensor(3), tensor(M), tensor(n, D) if gamma else None]
    h_in, h_post, h_res, inv_rms, h_mix, _ = mhc_pre_fwd.launch(*inputs, 1e-6, 1e-6, 2.0, 20, 1e-6, "triton")
    mhc_pre_bwd.launch(*inputs, inv_rms, h_mix, h_in, h_post, h_res, None, 1e-6, 2.0, 20, 1e-6, "triton")


@pytest.mark.parametrize("target", cross_compile.TARGETS)
@pytest.mark.parametrize(("n", "D", "dtype"), CONFIGS, ids=[f"n{n}-D{D}-{name_of(dtype)}" for n, D, dtype in CONFIGS])
def test_no_spills(n, D, dtype, target, monkeypatch):
    with cross_compile.compiling_for(target, monkeypatch) as kernels:
        launch_all(8192, n, D, dtype)
    assert len({kernel.name for kernel in kernels}) == 8
    for kernel in kernels:
        assert kernel.spilled == 0, f"{kernel.name} spills {kernel.spilled} bytes at {kernel.registers} registers"
        assert kernel.shared <= cross_compile.SHARED_MEMORY[target], f"{kernel.name} takes {kernel.shared} bytes"


def test_streams_are_read_16_bytes_at_a_time(monkeypatch):
    with cross_compile.compiling_for("sm_90", monkeypatch) as kernels:
        launch_all(8192, 4, 4096, bf16)
    assembly = {kernel.name: kernel.assembly for kernel in kernels}
    for name in ("mhc_pre_project_kernel", "mhc_pre_dx_kernel"):
        assert "wgmma" in assembly[name], "the product does not run on the matrix units"
        assert "cp.async.cg.shared.global" in assembly[name], "x is not copied asynchronously, 16 bytes at a time"
    for name in ("mhc_pre_finish_kernel", "mhc_pre_dh_pre_kernel"):
        assert assembly[name].count("ld.global.v4") >= 4, "x is not loaded 16 bytes at a time"


def test_nothing_is_compiled_per_token_count(monkeypatch):
    """Ten token counts: one binary per kernel, and a second of two: the finishing kernel adds slices or groups, and the
    parts of phi are made without alpha in the forward, with alpha in the backward."""
    binaries = set()
    for T in (1, 2, 16, 100, 128, 1000, 1024, 4096, 8191, 100_000):
        with cross_compile.compiling_for("sm_90", monkeypatch) as kernels:
            launch_all(T, 4, 1280, bf16)
        binaries |= {(kernel.name, kernel.key) for kernel in kernels}
    names = sorted(name for name, _ in binaries)
    assert len(set(names)) == 8
    assert len(names) == 10
    assert names.count("mhc_pre_finish_kernel") == names.count("phi_parts_kernel") == 2
