"""The emulator of Gluon kernels shows what it says it shows: each fault below is one line of a right kernel."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
import gluon_emulator
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS, COLUMNS = (gl.constexpr(size) for size in (8, 16))


@gluon.jit
def doubling_kernel(x_desc, y_desc, T, FAULT: gl.constexpr):
    tile = gl.allocate_shared_memory(x_desc.dtype, [ROWS, COLUMNS], x_desc.layout)
    out = gl.allocate_shared_memory(y_desc.dtype, [ROWS, COLUMNS], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    for step in range(gl.cdiv(T, ROWS)):
        mbarrier.expect(full, x_desc.nbytes_per_cta // (2 if FAULT == "few bytes" else 1))
        tma.async_copy_global_to_shared(x_desc, [step * ROWS, 0], full, tile)
        if FAULT != "early read":
            mbarrier.wait(full, step % 2 ^ (1 if FAULT == "wrong phase" else 0))
        if FAULT != "early store":
            tma.store_wait(0)
        out.store(tile.load(None) + tile.load(None))
        if FAULT != "no fence":
            fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [step * ROWS, 0], out)
    tma.store_wait(0)


@pytest.mark.parametrize("fault", ["none", "early read", "no fence", "few bytes", "wrong phase", "early store"])
def test_a_fault_shows(fault, monkeypatch):
    monkeypatch.setattr(gluon_emulator, "PATIENCE", 20 if fault == "none" else 0.2)
    block = [ROWS.value, COLUMNS.value]
    x = torch.randn(5 * block[0] - 3, block[1])
    y = torch.full_like(x, torch.nan)
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    x_desc, y_desc = (TensorDescriptor.from_tensor(tensor, block, layout) for tensor in (x, y))
    try:
        gluon_emulator.run(doubling_kernel, (1,), x_desc=x_desc, y_desc=y_desc, T=x.shape[0], FAULT=fault)
        right = torch.equal(y, x + x)
    except (AssertionError, TimeoutError):
        right = False
    assert right == (fault == "none")
