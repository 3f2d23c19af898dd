"""Every kernel and config compiles for GPUs that are not here, without spills, and once for all token counts."""

import re

import pytest
import torch

from mhc_ops.core.backend import _INTERPRETED
from mhc_ops.core.check import name_of

pytest.importorskip("triton")
import cross_compile
from config_domain import GPUS, STREAMS
from mhc_launches import launch_all

from mhc_ops.mhc.triton import configs

pytestmark = pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
# (n, D, dtype): one for each choice of tiles on Hopper, where all kernels are compiled; the GPU tests run every n
CONFIGS = [
    *((n, 4096, bf16) for n in (1, 2, 3, 4, 5, 6, 8)),
    *((n, 1280, dtype) for n, dtype in ((1, fp32), (2, fp32), (3, fp32), (4, fp16), (5, fp32), (6, fp32), (8, fp32))),
    *((n, 257, bf16) for n in (1, 2, 4, 5, 6, 8)),
    (8, 257, fp32),
]
# Other GPUs: the kernels whose tiles differ, and on AMD's all of them where D is 4096. sm_86 and sm_89 have the tiles
# of sm_120. scripts/compile_table.py compiles everything for everything.
TILED = {
    "mhc_pre_project_kernel",
    "mhc_pre_dmaps_kernel",
    "mhc_pre_dx_kernel",
    "mhc_pre_sums_kernel",
}
ELSEWHERE = {
    "sm_80": [(1, 257, fp32), (4, 4096, bf16), (5, 257, fp32), (8, 4096, bf16)],
    "sm_100": [(4, 4096, bf16), (8, 4096, bf16)],
    "sm_120": [(1, 4096, bf16), (2, 257, fp32), (4, 4096, bf16), (5, 1280, fp32), (8, 4096, bf16)],
    "gfx942": [(1, 4096, bf16), (4, 4096, bf16), (4, 257, bf16), (8, 4096, bf16), (8, 1280, fp32)],
    "gfx950": [(4, 4096, bf16)],
}
COMPILED = [
    *((*config, "sm_90") for config in CONFIGS),
    *((*config, target) for target, configs_there in ELSEWHERE.items() for config in configs_there),
]
# Everything is compiled for these; else on Hopper what fills registers (the table has all): 4 minutes for two cores.
EVERYTHING = [
    *((n, 4096, bf16, "sm_90") for n in (1, 4, 8)),
    (4, 4096, bf16, "gfx942"),
]
CROWDED = {"mhc_post_bwd_kernel", "mhc_pre_normed_dh_pre_kernel"}
# For the others: ops that launch every kernel in each of its tiles. The rest launch them in the same tiles on other
# tensors, which EVERYTHING has, and the table for all.
WITH_TILES = {"mhc_pre_fwd", "mhc_pre_bwd", "mhc_post_bwd"}
KERNELS = {
    "phi_parts_kernel",
    "mhc_pre_project_kernel",
    "mhc_pre_finish_kernel",
    "mhc_pre_dh_pre_kernel",
    "mhc_pre_dmaps_kernel",
    "mhc_pre_dx_kernel",
    "mhc_pre_sums_kernel",
    "mhc_read_fwd_kernel",
    "mhc_read_bwd_kernel",
    "mhc_mean_bwd_kernel",
    "mhc_post_fwd_kernel",
    "mhc_post_bwd_kernel",
    "sinkhorn_fwd_kernel",
    "sinkhorn_bwd_kernel",
}
OF_THE_NORM = {"mhc_pre_normed_read_kernel", "mhc_pre_normed_dh_pre_kernel"}
BOUNDARY = {"mhc_boundary_fwd_kernel", "mhc_boundary_bwd_kernel"}  # on Hopper
ONE_LAUNCH = "mhc_few_fwd_kernel"  # on NVIDIA GPUs
WITHOUT_TICKETS = {"mhc_pre_dalpha_kernel"}  # on AMD GPUs


@pytest.mark.parametrize(
    ("n", "D", "dtype", "target"), COMPILED, ids=[f"n{n}-D{D}-{name_of(dtype)}-{t}" for n, D, dtype, t in COMPILED]
)
def test_no_spills(n, D, dtype, target, monkeypatch):
    cross_compile.skip_if_too_old(target)
    everything = (n, D, dtype, target) in EVERYTHING
    on_hopper = TILED - {"mhc_pre_sums_kernel"} | CROWDED  # of whose two tiles EVERYTHING has both
    wanted = None if everything else on_hopper if target == "sm_90" else TILED
    with cross_compile.compiling_for(target, monkeypatch, wanted) as kernels:
        for normed in (False, True):
            launch_all(8192, n, D, dtype, normed=normed, ops=None if everything else WITH_TILES)
    fused = BOUNDARY if (n, D, dtype, target) == (4, 4096, bf16, "sm_90") else set()
    if target == "sm_90" and dtype == bf16 and n <= configs.FEW_STREAMS:
        fused = fused | {ONE_LAUNCH}
    if target.startswith("gfx"):
        fused = fused | WITHOUT_TICKETS
    assert {kernel.name for kernel in kernels} == (KERNELS | OF_THE_NORM | fused if everything else wanted)
    cross_compile.check(target, kernels)


FORMS = [{"shifted": True}, {"mixed": False, "shifted": True}, {"transposed": True}]
OTHER_FORMS = [(4, 4096, bf16, "sm_90"), (8, 4096, bf16, "sm_100"), (4, 4096, bf16, "gfx942")]
IN_OTHER_FORMS = WITH_TILES | {"mhc_layer_pre", "mhc_next_fwd"}  # off Hopper, and of their kernels:
THEIR_OWN = {"mhc_pre_finish_kernel", "mhc_pre_dmaps_kernel", "mhc_pre_dx_kernel", "mhc_post_bwd_kernel"}


@pytest.mark.parametrize(
    ("n", "D", "dtype", "target"),
    OTHER_FORMS,
    ids=[f"n{n}-D{D}-{name_of(dtype)}-{t}" for n, D, dtype, t in OTHER_FORMS],
)
def test_no_spills_in_other_forms(n, D, dtype, target, monkeypatch):
    """Shifted, without a residual map, transposed; with the layer's norm, with which all kernels run."""
    cross_compile.skip_if_too_old(target)
    wanted, ops = (None, None) if target == "sm_90" else (THEIR_OWN, IN_OTHER_FORMS)
    with cross_compile.compiling_for(target, monkeypatch, wanted) as kernels:
        for form in FORMS:
            launch_all(8192, n, D, dtype, normed=True, ops=ops, **form)
    assert wanted is None or {kernel.name for kernel in kernels} == wanted
    cross_compile.check(target, kernels)


WITH_SINKHORN = {
    "sinkhorn_fwd_kernel",
    "sinkhorn_bwd_kernel",
    "mhc_pre_finish_kernel",
    "mhc_pre_dmaps_kernel",
    ONE_LAUNCH,
}
WITHOUT_EPS = [
    ((1,), "sm_90"),
    *(pytest.param((3, 4, 8), target, marks=pytest.mark.thorough) for target in (*ELSEWHERE, "sm_90")),
]


@pytest.mark.parametrize(("streams", "target"), WITHOUT_EPS)
def test_no_spills_without_eps(streams, target, monkeypatch):
    """Where Sinkhorn has a second way, in logarithms."""
    cross_compile.skip_if_too_old(target)
    ops = {"mhc_pre_fwd", "mhc_pre_bwd", "mhc_next_fwd", "mhc_next_bwd", "sinkhorn_fwd", "sinkhorn_bwd"}
    with cross_compile.compiling_for(target, monkeypatch, WITH_SINKHORN) as kernels:
        for n in streams:
            launch_all(8192, n, 4096, bf16, normed=True, ops=ops, eps=0.0)
    cross_compile.check(target, kernels)


def tiles(n, D, dtype):
    """What is chosen on Hopper for each kernel with a choice, and what else fills registers where they are short."""
    M, wide, on = configs.maps(n), dtype != bf16, GPUS["sm_90"]
    yield "sinkhorn", configs.sinkhorn(n, on)
    yield "phi_parts", configs.phi_parts(M)
    yield "finish", configs.finish(D, on)
    yield "normed read", configs.normed_read(n, D, on)
    yield "dh_pre", configs.dh_pre(n, D, wide, on), wide
    yield "normed dh_pre", configs.normed_dh_pre(n, D, on), wide
    yield "post_fwd", configs.post_fwd(n, D, wide, on), wide
    yield "post_bwd", configs.post_bwd(n, D, wide, True, on), wide
    yield "project", configs.project(M, D, wide, on), configs.padded_maps(M), wide
    yield "dmaps", configs.dmaps(n, on)
    yield "sums", configs.sums(M, on)
    yield "normed dx", configs.normed_dx(n, D, wide, on), configs.padded_maps(M), wide
    yield "read_bwd", configs.read_bwd(n, D, on)
    for residual in (False, True):
        yield "dx", configs.dx(n, D, wide, residual, on), configs.padded_maps(M), wide, residual


def test_every_choice_of_tiles_is_compiled():
    wanted = {tile for n in STREAMS for D in (4096, 257) for dtype in (bf16, fp32) for tile in tiles(n, D, dtype)}
    compiled = {tile for config in CONFIGS for tile in tiles(*config)}
    assert wanted <= compiled, wanted - compiled


def test_streams_are_read_16_bytes_at_a_time(monkeypatch):
    with cross_compile.compiling_for("sm_90", monkeypatch) as kernels:
        launch_all(8192, 4, 4096, bf16)
    assembly = {kernel.name: kernel.assembly for kernel in kernels}
    for name in ("mhc_pre_project_kernel", "mhc_pre_dx_kernel"):
        assert "wgmma" in assembly[name], "the product does not run on the matrix units"
        assert "cp.async.cg.shared.global" in assembly[name], "x is not copied asynchronously, 16 bytes at a time"
    for name in ("mhc_pre_finish_kernel", "mhc_pre_dh_pre_kernel", "mhc_post_fwd_kernel"):
        assert assembly[name].count("ld.global.v4") >= 4, "x is not loaded 16 bytes at a time"


def test_the_last_program_sees_what_all_stored(monkeypatch):
    """In the sums, stores come before the ticket, with a barrier for all threads between them, and loads after one."""
    with cross_compile.compiling_for("sm_90", monkeypatch, {"mhc_pre_sums_kernel"}) as kernels:
        launch_all(8192, 4, 4096, bf16)
    for kernel in kernels:
        assert re.findall(r"\b(?:atom|red)\.\S+", kernel.assembly) == ["atom.global.gpu.acq_rel.add.u32"]
        before, after = kernel.assembly.split("atom.global.gpu.acq_rel.add.u32")
        assert "st.global" not in before[before.rindex("bar.sync") :]
        assert "bar.sync" in after[: after.index("ld.global")]


def test_nothing_is_compiled_per_token_count(monkeypatch):
    """Ten token counts: as many binaries as for three, many, some and few tokens."""
    binaries, once = set(), set()
    for T in (8191, 1, 2, 16, 100, 128, 1000, 1024, 4096, 100_000):
        with cross_compile.compiling_for("sm_90", monkeypatch) as kernels:
            launch_all(T, 4, 1280, bf16)
        binaries |= {(kernel.name, kernel.key) for kernel in kernels}
        once = once or set(binaries)
    assert {name for name, _ in binaries} == KERNELS | BOUNDARY | {ONE_LAUNCH}
    extra = sorted(name for name, _ in binaries - once)
    # One launch: of the boundary.
    # The finishing kernel: with slices of the layer; with bundles of pre, maps and head.
    assert extra == [ONE_LAUNCH] + 4 * ["mhc_pre_finish_kernel"]
