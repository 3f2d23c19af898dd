"""Every kernel of the convolution compiles for GPUs that are not here, without spills, and once for all lengths."""

from functools import partial

import pytest
import torch

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
    (4096, 4, bf16, ""),
    (4096, 4, bf16, "seq_idx"),
    (4096, 4, bf16, "states"),
    (4096, 4, bf16, "seq_idx states"),
    (4096, 4, bf16, "cu_seqlens states"),
    (4096, 8, bf16, ""),
    (4096, 4, fp32, ""),
    (4097, 4, bf16, ""),
    (4097, 8, fp32, "cu_seqlens states"),
]
# Channels of a thread are the same on every NVIDIA GPU.
ELSEWHERE = {"sm_80": (0,), "sm_120": (3,), "gfx942": (0, 3, 4), "gfx950": (0,)}
COMPILED = [
    *((*config, "sm_90") for config in CONFIGS),
    *((*CONFIGS[number], target) for target, numbers in ELSEWHERE.items() for number in numbers),
]


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


def launch_serving(places, D, W, dtype):
    """What servers call. places: "blocks" with a prefix cache; of a step "drafts", "tree" or "in place"."""

    def tensor(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    N, T = 8, 4
    x = tensor(*{"in place": (N,), "tree": (N, T)}.get(places, (2048,)), D, dtype=dtype)
    shared = {"weight": tensor(D, W, dtype=fp32), "bias": tensor(D, dtype=fp32), "silu": True, "pad_slot_id": 0}
    shared |= {"conv_state": tensor(64, W - 2 + T, D, dtype=dtype).transpose(1, 2)}
    with_columns, index = places in ("blocks", "drafts"), tensor(N)
    shared["conv_state_indices"] = tensor(N, 6) if with_columns else index
    shared |= dict.fromkeys(("read_columns", "write_columns"), index) if with_columns else {}
    if places in ("", "blocks"):
        blocks = {"first_columns": index, "tokens_before": index, "block_size": 528} if places else {"block_size": 0}
        bounds = {"cu_seqlens": tensor(N + 1), "has_initial_state": tensor(N, dtype=torch.bool)}
        op, given = contracts.causal_conv1d_prefill_, {"x": x, **blocks, **bounds}
    else:
        op, given = contracts.causal_conv1d_step_, {"out": x, "max_seqlen": 1 if places == "in place" else T}
        given |= {"num_accepted_tokens": index, "cu_seqlens": tensor(N + 1)} if places == "drafts" else {}
    if places == "tree":
        given |= {"x": x, "out": None, "parents": tensor(N, T), "windows": tensor(N, T, D, W - 1, dtype=dtype)}
    op.launch(backend="triton", **dict.fromkeys(op.inputs) | shared | given)


@pytest.mark.parametrize(
    ("D", "W", "dtype", "places", "target"),
    COMPILED,
    ids=[f"{D}-W{W}-{name_of(t)}-{p}-{g}" for D, W, t, p, g in COMPILED],
)
def test_no_spills(D, W, dtype, places, target, monkeypatch):
    cross_compile.skip_if_too_old(target)
    with cross_compile.compiling_for(target, monkeypatch) as kernels:
        launch_all(8192, D, W, dtype, places)
    assert kernels
    cross_compile.check(target, kernels)


SERVING = ("", "blocks", "in place", "drafts", "tree")
TARGETS = ["sm_90", "gfx942", *(pytest.param(target, marks=pytest.mark.thorough) for target in GPUS)]


@pytest.mark.parametrize("target", TARGETS)
def test_serving_has_no_spills(target, monkeypatch, request):
    """The usual filter; in the thorough run the widest one in the largest type."""
    cross_compile.skip_if_too_old(target)
    widest = request.node.get_closest_marker("thorough")
    for places in SERVING:
        with cross_compile.compiling_for(target, monkeypatch) as kernels:
            launch_serving(places, *((4097, 8, fp32) if widest else (4096, 4, bf16)))
        assert kernels
        cross_compile.check(target, kernels)


def test_nothing_is_compiled_per_length(monkeypatch):
    """Lengths that take the same config: the same forms of all kernels."""
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
