"""Every kernel and config compiles for GPUs that are not here, without spills, and once for all token counts."""

import pytest
from mhc_kernels import bf16, fp16, fp32

from mhc_ops.core.backend import _INTERPRETED
from mhc_ops.core.check import name_of

pytest.importorskip("triton")
import cross_compile
from config_domain import GPUS
from mhc_launches import compiled, launch_all

from mhc_ops.mhc.triton import configs

pytestmark = pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")


def kernels_of(names):
    return {f"{name}_kernel" for name in names.split()}


# (n, D, dtype): one for each choice of tiles on Hopper, where all kernels are compiled; the GPU tests run every n
CONFIGS = [
    *((n, 4096, bf16) for n in (1, 2, 3, 4, 5, 6, 8)),
    *((n, 1280, dtype) for n, dtype in ((1, fp32), (2, fp32), (3, fp32), (4, fp16), (5, fp32), (6, fp32), (8, fp32))),
    *((n, 257, bf16) for n in (1, 2, 4, 5, 6, 8)),
    (8, 257, fp32),
]
# Other GPUs: the kernels whose tiles differ, and on AMD's all of them where D is 4096. sm_86 and sm_89 have the tiles
# of sm_120. scripts/compile_table.py compiles everything for everything.
TILED = kernels_of("mhc_pre_project mhc_pre_dmaps mhc_pre_dx mhc_pre_sums")
ELSEWHERE = {
    "sm_80": [(1, 257, fp32), (4, 4096, bf16), (5, 257, fp32), (8, 4096, bf16)],
    "sm_100": [(4, 4096, bf16), (8, 4096, bf16)],
    "sm_120": [(1, 4096, bf16), (2, 257, fp32), (4, 4096, bf16), (5, 1280, fp32), (8, 4096, bf16)],
    "gfx942": [(1, 4096, bf16), (4, 4096, bf16), (4, 257, bf16), (8, 4096, bf16), (8, 1280, fp32)],
    "gfx950": [(4, 4096, bf16)],
}
COMPILED = [(*config, target) for target, there in {"sm_90": CONFIGS, **ELSEWHERE}.items() for config in there]
IDS = [f"n{n}-D{D}-{name_of(dtype)}-{target}" for n, D, dtype, target in COMPILED]
# Everything is compiled for these; else on Hopper what fills registers (the table has all): 4 minutes for two cores.
EVERYTHING = [*((n, 4096, bf16, "sm_90") for n in (1, 4, 8)), (4, 4096, bf16, "gfx942")]
CROWDED = kernels_of("mhc_post_bwd mhc_pre_normed_dh_pre")
# For the others: ops that launch every kernel in each of its tiles. The rest launch them in the same tiles on other
# tensors, which EVERYTHING has, and the table for all.
WITH_TILES = {"mhc_pre_fwd", "mhc_pre_bwd", "mhc_post_bwd"}
KERNELS = kernels_of(
    "phi_parts mhc_pre_project mhc_pre_finish mhc_pre_dh_pre mhc_pre_dmaps mhc_pre_dx mhc_pre_sums mhc_read_fwd "
    "mhc_read_bwd mhc_mean_bwd mhc_post_fwd mhc_post_bwd sinkhorn_fwd sinkhorn_bwd"
)
OF_THE_NORM = kernels_of("mhc_pre_normed_read mhc_pre_normed_dh_pre")
BOUNDARY = kernels_of("mhc_boundary_fwd mhc_boundary_bwd")  # on Hopper
ONE_LAUNCH = "mhc_few_fwd_kernel"  # on NVIDIA GPUs
WITHOUT_TICKETS = kernels_of("mhc_pre_dalpha")  # on AMD GPUs


@pytest.mark.parametrize(("n", "D", "dtype", "target"), COMPILED, ids=IDS)
def test_no_spills(n, D, dtype, target, monkeypatch):
    everything = (n, D, dtype, target) in EVERYTHING
    on_hopper = TILED - {"mhc_pre_sums_kernel"} | CROWDED  # of whose two tiles EVERYTHING has both
    wanted = None if everything else on_hopper if target == "sm_90" else TILED
    config = {"T": 8192, "n": n, "D": D, "dtype": dtype, "ops": None if everything else WITH_TILES}
    found = compiled(target, monkeypatch, config, config | {"normed": True}, kernels=wanted)
    fused = BOUNDARY if (n, D, dtype, target) == (4, 4096, bf16, "sm_90") else set()
    if target == "sm_90" and dtype == bf16 and n <= configs.FEW_STREAMS:
        fused = fused | {ONE_LAUNCH}
    if target.startswith("gfx"):
        fused = fused | WITHOUT_TICKETS
    assert {kernel.name for kernel in found} == (KERNELS | OF_THE_NORM | fused if everything else wanted)


FORMS = [{"shifted": True}, {"mixed": False, "shifted": True}, {"transposed": True}]
IN_OTHER_FORMS = WITH_TILES | {"mhc_layer_pre", "mhc_next_fwd"}  # off Hopper, and of their kernels:
THEIR_OWN = kernels_of("mhc_pre_finish mhc_pre_dmaps mhc_pre_dx mhc_post_bwd")
# Without its eps Sinkhorn has a second way, in logarithms.
OF_SINKHORN = {"mhc_pre_fwd", "mhc_pre_bwd", "mhc_next_fwd", "mhc_next_bwd", "sinkhorn_fwd", "sinkhorn_bwd"}
WITH_SINKHORN = kernels_of("sinkhorn_fwd sinkhorn_bwd mhc_pre_finish mhc_pre_dmaps")
OTHER_FORMS = [("sm_90", [4], FORMS, None, None), ("sm_100", [8], FORMS, IN_OTHER_FORMS, THEIR_OWN)]
OTHER_FORMS += [("gfx942", [4], FORMS, IN_OTHER_FORMS, THEIR_OWN)]
WITHOUT_EPS = [1, 3, 4, 8], [{"eps": 0.0}], OF_SINKHORN, WITH_SINKHORN
OTHER_FORMS += [(target, *WITHOUT_EPS) for target in ("sm_90", *ELSEWHERE)]


@pytest.mark.parametrize(("target", "streams", "forms", "ops", "kernels"), OTHER_FORMS)
def test_no_spills_in_other_forms(target, streams, forms, ops, kernels, monkeypatch):
    """Shifted, without a residual map, transposed, without eps; with the layer's norm, with which all kernels run."""
    if ops is OF_SINKHORN and GPUS[target].kind == "cuda":
        kernels = kernels | {ONE_LAUNCH}
    config = {"T": 8192, "D": 4096, "dtype": bf16, "normed": True, "ops": ops}
    launches = [config | {"n": n} | form for n in streams for form in forms]
    found = compiled(target, monkeypatch, *launches, kernels=kernels)
    assert kernels is None or {kernel.name for kernel in found} == kernels


def test_streams_are_read_16_bytes_at_a_time(monkeypatch):
    products = kernels_of("mhc_pre_project mhc_pre_dx")
    others = kernels_of("mhc_pre_finish mhc_pre_dh_pre mhc_post_fwd")
    launched = {"T": 8192, "n": 4, "D": 4096, "dtype": bf16, "ops": {"mhc_pre_bwd", "mhc_pre_fwd", "mhc_post_fwd"}}
    found = compiled("sm_90", monkeypatch, launched, kernels=products | others)
    assert {kernel.name for kernel in found} == products | others
    for kernel in found:
        if kernel.name in products:
            assert "wgmma" in kernel.assembly, "the product does not run on the matrix units"
            assert "cp.async.cg.shared.global" in kernel.assembly, "x is not copied asynchronously, 16 bytes at a time"
        else:
            assert kernel.assembly.count("ld.global.v4") >= 4, "x is not loaded 16 bytes at a time"


def test_nothing_is_compiled_per_token_count(monkeypatch):
    """Ten token counts: as many forms as for three, many, some and few tokens."""
    with cross_compile.counting_for("sm_90", monkeypatch) as asked:

        def launch(T):
            for normed in (False, True):
                launch_all(T, 4, 1280, bf16, normed=normed)
            return set(asked)

        once = launch(8191)
        assert {name for name, *_ in once} == KERNELS | OF_THE_NORM | BOUNDARY | {ONE_LAUNCH}
        for T in (1, 2, 16, 100, 128, 1000, 1024, 4096, 100_000):
            every = launch(T)
    # One launch: of the boundary, with the norm and without. The finishing kernel: of slices and of bundles, where
    # launch_all has none for other numbers of tokens.
    assert sorted(name for name, *_ in every - once) == 2 * [ONE_LAUNCH] + 3 * ["mhc_pre_finish_kernel"]
