"""Every kernel of the convolution compiles for GPUs that are not here, without spills, and once for all lengths."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import mhc_ops
from mhc_ops.conv import contracts
from mhc_ops.core.backend import _INTERPRETED
from mhc_ops.core.check import name_of

pytest.importorskip("triton")
import cross_compile
from config_domain import GPUS

pytestmark = pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")

bf16, fp32 = torch.bfloat16, torch.float32
# (D, W, dtype, what goes with it): each of another config. W = 7 in fp32, which takes longest, is in
# scripts/compile_table.py.
CONFIGS = [
    (4096, 4, bf16, ""), (4096, 4, bf16, "seq_idx"), (4096, 4, bf16, "states"), (4096, 4, bf16, "seq_idx states"),
    (4096, 4, bf16, "cu_seqlens states"), (4096, 8, bf16, ""), (4096, 4, fp32, ""), (4097, 4, bf16, ""),
    (4097, 8, fp32, "cu_seqlens states"),
]  # fmt: skip
# Channels of a thread are the same on every NVIDIA GPU.
ELSEWHERE = {"sm_80": (0,), "sm_120": (3,), "gfx942": (0, 3, 4), "gfx950": (0,)}
COMPILED = [(*config, "sm_90") for config in CONFIGS]
COMPILED += [(*CONFIGS[number], target) for target, numbers in ELSEWHERE.items() for number in numbers]
IDS = [f"{D}-W{W}-{name_of(dtype)}-{places}-{target}" for D, W, dtype, places, target in COMPILED]


def launch_all(L, D, W, dtype, places):
    """Every op, forward and backward, on meta tensors: shapes and types, no storage."""

    def tensor(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    def launch(op, x, **inputs):
        op.launch(backend="triton", **dict.fromkeys(op.inputs) | {"x": x} | filters | inputs)

    x, parameter = tensor(1, L, D), partial(tensor, dtype=fp32)
    N = 4 if "cu_seqlens" in places else 1
    filters = {"weight": parameter(D, W), "bias": parameter(D), "silu": True, "dilation": 1}
    where = {"seq_idx": tensor(1, L, dtype=torch.int32)} if "seq_idx" in places else {}
    where |= {"cu_seqlens": tensor(N + 1, dtype=torch.int32)} if "cu_seqlens" in places else {}
    where |= {"initial_state": tensor(N, W - 1, D).transpose(1, 2)} if "states" in places else {}
    final = "states" in places and "seq_idx" not in places
    launch(contracts.causal_conv1d_fwd, x, **where, output_final_state=final)
    launch(contracts.causal_conv1d_bwd, x, **where, dy=x, dfinal_state=tensor(N, D, W - 1) if final else None)
    if not places:
        rolling = {"conv_state": tensor(8, W, D).transpose(1, 2), "pad_slot_id": -1}
        launch(contracts.causal_conv1d_update_, tensor(8, D), **rolling)
        streams, filters = tensor(1, L, 4, D), {"gamma": parameter(4, D), "weight": parameter(4 * D, W)}
        filters |= {"dilation": 1, "residual": True}
        launch(contracts.short_conv_fwd, streams, norm_eps=1e-5)
        launch(contracts.short_conv_bwd, streams, inv_rms=parameter(1, L, 4), dy=streams)


@pytest.mark.parametrize(("D", "W", "dtype", "places", "target"), COMPILED, ids=IDS)
def test_no_spills(D, W, dtype, places, target, monkeypatch):
    cross_compile.skip_if_too_old(target)
    with cross_compile.compiling_for(target, monkeypatch) as kernels:
        launch_all(8192, D, W, dtype, places)
    assert kernels
    cross_compile.check(target, kernels)


SERVING = ("causal_conv1d_prefill_kernel", "causal_conv1d_step_kernel", "block_states_kernel")


def warm_up(D, W, dtype):
    with mhc_ops.use_backend("triton"):
        mhc_ops.conv_warmup(D, W, dtype, tokens=2048, bias=True, parameter_dtype=fp32, device="meta")


TARGETS = ["sm_90", "gfx942", *(pytest.param(target, marks=pytest.mark.thorough) for target in GPUS)]


@pytest.mark.parametrize("target", TARGETS)
def test_serving_has_no_spills(target, monkeypatch, request):
    """Every form of a warm-up: of the usual filter, in the thorough run of the widest in the largest type."""
    cross_compile.skip_if_too_old(target)
    D, W, dtype = (4097, 8, fp32) if request.node.get_closest_marker("thorough") else (4096, 4, bf16)
    with cross_compile.compiling_for(target, monkeypatch, SERVING) as kernels:
        warm_up(D, W, dtype)
    assert {kernel.name for kernel in kernels} == set(SERVING)
    cross_compile.check(target, kernels)


def test_nothing_is_compiled_per_length(monkeypatch):
    forms = []
    for L in (8192, 8191, 10_000, 12_345):
        with cross_compile.counting_for("sm_90", monkeypatch) as asked:
            launch_all(L, 4096, 4, bf16, "")
        forms.append(set(asked))
    assert forms[0] and all(others == forms[0] for others in forms)


def test_rows_are_copied_ahead(monkeypatch):
    with cross_compile.compiling_for("sm_90", monkeypatch) as kernels:
        launch_all(8192, 4096, 4, bf16, "")
    assembly = {kernel.name: kernel.assembly for kernel in kernels}
    assert "cp.async.cg.shared.global" in assembly["causal_conv1d_bwd_kernel"], "not 16 bytes at a time"
    assert "cp.async.ca.shared.global" in assembly["causal_conv1d_fwd_kernel"], "not asynchronously"


def test_the_table_of_gpus_has_its_launches():
    """scripts/compile_table.py takes them from these tests."""
    script = Path(__file__).parents[3] / "scripts" / "compile_table.py"
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
