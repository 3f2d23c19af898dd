"""Every kernel of the convolution compiles for GPUs that are not here, without spills, and once for all lengths."""

import random
from itertools import product

import pytest
import torch

from mhc_ops.conv import contracts, warmup
from mhc_ops.core.backend import _INTERPRETED
from mhc_ops.core.check import name_of
from mhc_ops.testing.cases import SEED

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
COMPILED = [
    *((*config, "sm_90") for config in CONFIGS),
    (*CONFIGS[0], "sm_80"),
    (*CONFIGS[3], "sm_120"),
    (*CONFIGS[0], "gfx942"),
    (*CONFIGS[3], "gfx942"),
    (*CONFIGS[4], "gfx942"),
    (*CONFIGS[0], "gfx950"),
]


def launch_all(L, D, W, dtype, places):
    """Every op, forward and backward, on meta tensors: shapes and types, no storage."""

    def tensor(*shape, dtype=fp32):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight, bias = tensor(1, L, D, dtype=dtype), tensor(D, W), tensor(D)
    N = 4 if "cu_seqlens" in places else 1
    state, dstate = (tensor(N, W - 1, D, dtype=dtype).transpose(1, 2), tensor(N, D, W - 1, dtype=dtype))
    filters = {"weight": weight, "bias": bias, "silu": True, "dilation": 1}
    where = {
        "seq_idx": tensor(1, L, dtype=torch.int32) if "seq_idx" in places else None,
        "cu_seqlens": tensor(N + 1, dtype=torch.int32) if "cu_seqlens" in places else None,
        "initial_state": state if "states" in places else None,
    }
    final = "states" in places and "seq_idx" not in places
    launch("causal_conv1d_fwd", x=x, **filters, **where, residual=None, output_final_state=final)
    launch("causal_conv1d_bwd", x=x, **filters, **where, dy=x, dfinal_state=dstate if final else None)
    if not places:
        decoding = {"cache_seqlens": None, "conv_state_indices": None, "pad_slot_id": -1}
        rolling = tensor(8, W, D, dtype=dtype).transpose(1, 2)
        launch("causal_conv1d_update_", x=tensor(8, D, dtype=dtype), conv_state=rolling, **filters, **decoding)
        streams, options = tensor(1, L, 4, D, dtype=dtype), {"dilation": 1, "residual": True}
        parameters = {"gamma": tensor(4, D), "weight": tensor(4 * D, W)}
        launch("short_conv_fwd", x=streams, **parameters, **options, norm_eps=1e-5)
        launch("short_conv_bwd", x=streams, **parameters, **options, inv_rms=tensor(1, L, 4), dy=streams)


def launch_serving(places, D=4096, W=4, dtype=bf16, N=8, T=4, slots=64, rows=2048, wider=0):
    """What servers call. places: "blocks" with a prefix cache; of a step "drafts", "tree" or "in place"."""

    def tensor(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    shape = {"in place": (N,), "tree": (N, T)}.get(places, (rows,))
    x = tensor(*shape, D + wider, dtype=dtype)[..., :D]
    shared = {"weight": tensor(D, W, dtype=fp32), "bias": tensor(D, dtype=fp32), "silu": True, "pad_slot_id": 0}
    shared |= {"conv_state": tensor(slots, W - 2 + max(T, 1), D, dtype=dtype).transpose(1, 2)}
    columns = dict.fromkeys(("read_columns", "write_columns"), tensor(N) if places in ("blocks", "drafts") else None)
    table = tensor(N, 5 + N % 7)
    if places in ("", "blocks"):
        blocks = dict.fromkeys(("first_columns", "tokens_before"), tensor(N) if places else None)
        blocks |= {"block_size": 528 + N if places else 0, "cu_seqlens": tensor(N + 1)}
        goes_on = tensor(N, dtype=torch.bool)
        table = table if places else table[:, 0]
        launch("causal_conv1d_prefill_", x=x, **shared, **columns, **blocks, conv_state_indices=table,
               has_initial_state=goes_on)  # fmt: skip
        return
    drafts = {"num_accepted_tokens": tensor(N), "cu_seqlens": tensor(N + 1)} if places == "drafts" else {}
    tree = {"parents": tensor(N, T), "windows": tensor(N, T, D, W - 1, dtype=dtype)} if places == "tree" else {}
    given = dict.fromkeys(contracts.causal_conv1d_step_.inputs) | shared | columns | drafts | tree
    given |= {"conv_state_indices": table if drafts else table[:, 0], "max_seqlen": T if drafts or tree else 1}
    launch("causal_conv1d_step_", **given | ({"x": x} if tree else {"out": x}))


def launch(name, **inputs):
    getattr(contracts, name).launch(backend="triton", **inputs)


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


def test_200_serving_calls_compile_each_kernel_once(monkeypatch):
    """Whatever the batch, the slots, the rows, the drafts, the widths of tables and blocks, the stride of x."""
    draw, binaries = random.Random(SEED), {}
    for number in range(200):
        sizes = {"N": draw.randint(1, 512), "slots": draw.randint(513, 4000), "rows": draw.randint(1, 40_000)}
        sizes |= {"T": draw.randint(1, 6), "wider": 16 * draw.randint(0, 200)}
        places = SERVING[number % len(SERVING)]
        with cross_compile.compiling_for("sm_90", monkeypatch) as kernels:
            launch_serving(places, **sizes)
        for kernel in kernels:
            binaries.setdefault((places, kernel.name), set()).add(kernel.key)
    assert {name: len(keys) for name, keys in binaries.items()} == dict.fromkeys(binaries, 1)
    assert len(binaries) == 6  # with blocks, prefill has two


def test_warmup_compiles_what_servers_call(monkeypatch):
    """A call of other sizes compiles nothing that was not compiled ahead."""
    options = {"silu": True, "bias": True, "parameter_dtype": fp32, "index_dtype": torch.int32, "places_last": False}
    of_servers = ("causal_conv1d_prefill_kernel", "block_states_kernel", "causal_conv1d_step_kernel")
    with cross_compile.compiling_for("sm_90", monkeypatch, of_servers) as ahead:
        warmup.launch_all(512, 4, bf16, tokens=8192, **options, device=torch.device("meta"), backend="triton")
    with cross_compile.compiling_for("sm_90", monkeypatch) as kernels:
        for places, N in product(("", "blocks", "in place", "drafts"), (1, 3, 64)):
            launch_serving(places, 512, N=N, T=1 + N % 4, slots=100 + N, rows=50 * N)
    assert {(kernel.name, kernel.key) for kernel in kernels} <= {(kernel.name, kernel.key) for kernel in ahead}


def test_nothing_is_compiled_per_length(monkeypatch):
    """Lengths that take the same config: the same binaries."""
    binaries = []
    for L in (8192, 8191, 10_000, 12_345):
        with cross_compile.compiling_for("sm_90", monkeypatch) as kernels:
            launch_all(L, 4096, 4, bf16, "")
        binaries.append({(kernel.name, kernel.key) for kernel in kernels})
    assert all(others == binaries[0] for others in binaries)


def test_rows_are_copied_ahead(monkeypatch):
    with cross_compile.compiling_for("sm_90", monkeypatch) as kernels:
        launch_all(8192, 4096, 4, bf16, "")
    assembly = {kernel.name: kernel.assembly for kernel in kernels}
    assert "cp.async.cg.shared.global" in assembly["causal_conv1d_bwd_kernel"], "not 16 bytes at a time"
    assert "cp.async.ca.shared.global" in assembly["causal_conv1d_fwd_kernel"], "not asynchronously"
