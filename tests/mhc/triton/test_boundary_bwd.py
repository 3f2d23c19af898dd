"""The boundary's backward as one kernel, in Gluon: its source run on a CPU, compiled for Hopper, and run there."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")
import cross_compile
import gluon_emulator
from config_domain import GPUS
from mhc_kernels import bf16, failures, fp16, fp32, stored_x_next
from mhc_launches import all_calls

import mhc_ops
from mhc_ops.core import device
from mhc_ops.core.backend import _INTERPRETED
from mhc_ops.core.launch import COMPILE_OPTIONS
from mhc_ops.mhc import contracts
from mhc_ops.mhc.triton import boundary as boundary_launchers
from mhc_ops.mhc.triton import boundary_bwd, configs, pre_sums
from mhc_ops.testing import accuracy, cases

HOPPER = GPUS["sm_90"]
SUBJECTS = (cases.MHC_NEXT, cases.MHC_NEXT_NORMED)
KERNELS = ("mhc_boundary_bwd_kernel", "mhc_pre_sums_kernel")
by_norm = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or device.of(torch.device("cuda")).capability != HOPPER.capability,
    reason="needs a Hopper GPU",
)


# ---- the kernel alone -----------------------------------------------------------------------------------------------


def inputs(T, D, normed, seed=0, mixed=True, transposed=False, shifted=False):
    """What mhc_pre_bwd hands to boundary_pass, with NaN where the results go. Without `mixed` there is no h_res."""
    n, M, padded = 4, 24 if mixed else 8, 32 if mixed else 16
    generator = torch.Generator().manual_seed(cases.SEED + seed)

    def normal(*shape, dtype=fp32):
        return torch.randn(shape, generator=generator).to(dtype)

    def in_parts(value):
        high = value.to(bf16)
        return torch.stack([high, (value - high.float()).to(bf16)])

    def poison(*shape, dtype=fp32):
        return torch.full(shape, torch.nan, dtype=dtype)

    table = poison(T, configs.table_columns(n, M))  # of which not all columns are used
    used = M - n + (3 if normed else 1)
    table[:, :used] = torch.rand(T, used, generator=generator)
    return {
        "x": normal(T, n, D, dtype=bf16),
        "h_out": normal(T, D, dtype=bf16),
        "h_post": normal(T, n),
        "h_res": torch.softmax(normal(T, n, n), -1) if mixed else None,
        "transposed": transposed,
        "dh_in": normal(T, D, dtype=bf16),
        "dx_next": normal(T, n, D, dtype=bf16),
        "dh_mix": in_parts(torch.nn.functional.pad(normal(T, M), (0, padded - M))),
        "parts": in_parts(torch.nn.functional.pad(normal(M, n * D), (0, 0, 0, padded - M)) * D**-0.5),
        "table": table,
        "layer_norm_weight": 1 + 0.3 * normal(D) if normed else None,
        "dx": poison(T, n, D, dtype=bf16),
        "dh_out": poison(T, D, dtype=bf16),
        "dh_post": poison(T, n),
        "dh_res": poison(T, n, n) if mixed else None,
        "dread": poison(T, n) if shifted and not normed else None,  # pass A, which the norm waits for, makes it
    }


def on_a_gpu(given):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def exact(x, h_out, h_post, h_res, transposed, dh_in, dx_next, dh_mix, parts, table, layer_norm_weight, dx, dread, **_):
    """In fp64, of x_next and dlink as they are stored."""
    n, D = x.shape[-2:]
    mixed = 0 if h_res is None else n * n
    M = mixed + 2 * n
    x_next = stored_x_next(x, h_out, h_post, h_res.mT if transposed else h_res).double()
    given = (x, h_out, h_post, dh_in, dx_next, dh_mix, parts, table, dx)
    x, h_out, h_post, dh_in, dx_next, dh_mix, parts, table, stored = (tensor.double() for tensor in given)
    h_res_next, h_pre, x_factor, r, c = table[:, : mixed + n + 3].split([mixed, n, 1, 1, 1], dim=1)
    dh_mix, phi = dh_mix.sum(0)[:, :M], parts.sum(0)[:M]
    results = {"A": dh_mix.T @ x_next.flatten(1)}
    if layer_norm_weight is not None:
        h_in = torch.einsum("ti,tid->td", h_pre, x_next)
        results["dweight"] = (r * h_in * dh_in).sum(0)
        dh_in = r * (layer_norm_weight.double() * dh_in) - c * h_in
    dlink = (dh_mix @ phi).unflatten(1, (n, D)) + x_factor[:, :, None] * x_next + h_pre[:, :, None] * dh_in[:, None]
    if mixed:
        dx_next = torch.einsum("tij,tjd->tid", h_res_next.unflatten(1, (n, n)), dx_next)
        dh_res = torch.einsum("tid,tjd->tij", x, stored)
        results["dh_res"] = dh_res.mT if transposed else dh_res
    if dread is not None:
        results["dread"] = torch.einsum("td,tid->ti", dh_in, x_next)
    return results | {
        "dx": dlink + dx_next,
        "dh_out": torch.einsum("tj,tjd->td", h_post, stored),
        "dh_post": torch.einsum("td,tjd->tj", h_out, stored),
    }


def add_up(given, A, dweight, dots):
    """By the kernel, as mhc_pre_bwd has it done: it fills dh_post, dh_res and dread."""
    (_, M, K), D = A.shape, given["x"].shape[2]

    def tensor(*shape):
        return torch.zeros(shape, device=A.device)

    normed = {"dweight": dweight, "dlayer_norm_weight": None if dweight is None else tensor(D)}
    parameters = {"phi": tensor(M, K), "alpha": tensor(3), "gamma": None}
    gradients = {"dphi": tensor(M, K), "dalpha": tensor(3), "dgamma": None, "dbias": tensor(M)}
    pre_sums.sum_gradients(A=A, sums=tensor(1, 2, M), **parameters, **gradients, **normed, n=4, parts=2, dots=dots)


def added(dots):
    """What the kernel is to make of the dots, by torch."""
    results, rest = {}, dots.dots.sum(0)
    for name in ("dh_post", "dh_res", "dread"):
        output = getattr(dots, name)
        if output is not None:
            own, rest = rest[:, : output[0].numel()].reshape(output.shape), rest[:, output[0].numel() :]
            results[name] = own.mT if name == "dh_res" and dots.transposed else own
    assert not rest.numel()
    return results


def assert_exact(given, A, dweight, dots):
    """A, dweight and dots are still to be added up."""
    results = given | {"A": A.sum(0)} | ({} if dweight is None else {"dweight": dweight.sum(0)})
    if given["x"].is_cuda:
        add_up(given, A, dweight, dots)
    else:
        results |= added(dots)
    expected = exact(**given)
    wrong = [name for name, value in expected.items() if not accuracy.close(results[name], value)]
    assert not wrong


def emulating(kernel, grid, **arguments):
    """In place of launch: the Gluon kernel by its source."""
    arguments = {name: value for name, value in arguments.items() if name not in COMPILE_OPTIONS}
    gluon_emulator.run(kernel, grid, **arguments)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(boundary_bwd, "launch", emulating)


FORMS = [{"shifted": True}, {"mixed": False}, {"mixed": False, "shifted": True}, {"transposed": True, "shifted": True}]
by_form = pytest.mark.parametrize("form", [{}, *FORMS], ids=str)


@by_norm
@pytest.mark.parametrize(("T", "slices", "form"), [(1, 1, {}), (70, 1, {}), *((150, 2, form) for form in ({}, *FORMS))])
def test_emulated_against_fp64(T, slices, form, normed, emulated, monkeypatch):
    """5 blocks of tokens a program: every stage is filled and emptied, and the phases of its barriers come back."""
    monkeypatch.setattr(configs, "partition_rows", lambda *_: slices)
    given = inputs(T, 128, normed, **form)
    A, *rest = boundary_bwd.boundary_pass(**given)
    assert A.shape == (slices, 24 if form.get("mixed", True) else 8, 4 * 128)
    assert_exact(given, A, *rest)


@pytest.mark.interpreted
@by_form
def test_dots_are_added_up(form):
    """Integers, whose sums are exact in any order."""
    given = inputs(37, 64, False, **form)
    outputs = {name: given[name] for name in ("dh_post", "dh_res", "dread")}
    outputs = {name: None if output is None else output.clone() for name, output in outputs.items()}
    width = sum(output[0].numel() for output in outputs.values() if output is not None)
    drawn = torch.randint(-99, 100, (70, 37, width), generator=torch.Generator().manual_seed(cases.SEED)).float()
    dots = pre_sums.Dots(drawn, **outputs, transposed=form.get("transposed", False))
    add_up(given, torch.zeros(2, 24 if form.get("mixed", True) else 8, 4 * 64), None, dots)
    for name, expected in added(dots).items():
        assert torch.equal(outputs[name], expected), name


@on_hopper
@pytest.mark.gpu
@by_norm
@by_form
@pytest.mark.parametrize(("T", "D"), [(1, 64), (300, 512), (1024, 4096), (2000, 2560)])
def test_on_a_gpu_against_fp64(T, D, form, normed):
    given = on_a_gpu(inputs(T, D, normed, **form))
    assert_exact(given, *boundary_bwd.boundary_pass(**given))


# ---- as mhc_next_bwd -------------------------------------------------------------------------------------------------


@pytest.fixture
def for_all_tokens(monkeypatch):
    """Few of them too, and on any device."""
    monkeypatch.setattr(configs, "BOUNDARY_TOKENS", 1)
    monkeypatch.setattr(configs, "boundary_bwd", lambda n, D, dtype, enough, on: _choice(n, D, dtype, enough, HOPPER))


_choice = configs.boundary_bwd


@pytest.fixture
def launched(monkeypatch):
    """How often the kernel was taken."""
    found = []
    taken = boundary_launchers.as_one_kernel

    def counted(**arguments):
        found.append(1)
        taken(**arguments)

    monkeypatch.setattr(boundary_launchers, "as_one_kernel", counted)
    return found


@pytest.fixture
def in_a_stack(emulated, for_all_tokens, launched, monkeypatch):
    """x_next, made again, has the bits that the interpreter's mhc_post stored."""
    monkeypatch.setattr(gluon_emulator, "fma", gluon_emulator.fma_of_the_interpreter)
    return launched


def drawn(subject, T, D, **options):
    """A boundary whose x has no other reader."""
    return cases.Case(subject, (T,), 4, D, bf16, unused=("x_next",), **options)


@pytest.mark.interpreted
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize("options", [{}, {"gamma": False, "sigma": 8}, {"parameter_dtype": bf16}], ids=str)
@pytest.mark.parametrize("T", [37, 80])
def test_emulated_in_a_stack(subject, T, options, in_a_stack, poisoned):
    assert failures(drawn(subject, T, 128, **options), "triton") == []
    assert in_a_stack, "the composition was taken"


def boundary(T, D=4096, dtype=bf16, on="meta", **form):
    """mhc_next_bwd's inputs."""
    return dict(all_calls(T, 4, D, dtype, on=on, **form))["mhc_next_bwd"]


@pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("form", "weight_dtype"),
    [({}, None), ({}, fp32), ({}, bf16), *[(form, fp32 if "transposed" in form else None) for form in FORMS]],
    ids=str,
)
def test_compiles_for_hopper(form, weight_dtype, monkeypatch):
    """Without spills; two programs fit a multiprocessor; no token count is compiled in. weight_dtype: of the norm"""
    keys = set()
    for T in (8192, 1025) if not form else (8192,):
        given = boundary(T, normed=weight_dtype is not None, **form)
        if weight_dtype is not None:
            given["layer_norm_weight"] = given["layer_norm_weight"].to(weight_dtype)
        with cross_compile.compiling_for("sm_90", monkeypatch) as kernels:
            contracts.mhc_next_bwd.launch(backend="triton", **given)
        cross_compile.check("sm_90", kernels)
        by_name = {kernel.name: kernel for kernel in kernels}
        assert by_name.keys() >= set(KERNELS)
        assert not by_name.keys() & {"mhc_pre_dx_kernel", "mhc_post_bwd_kernel"}
        large, reserved, of_a_multiprocessor = by_name[KERNELS[0]], 1024, 228 * 1024
        assert 2 * (large.shared + reserved) <= of_a_multiprocessor
        assert large.registers <= configs.BOUNDARY_REGISTERS
        keys |= {kernel.key for kernel in kernels}
    assert len(keys) == len(kernels)


EVENTS = {
    "bar.sync": "barrier",
    "cp.async.bulk.wait_group.read": "wait",
    "fence.proxy.async": "fence",
    "global.shared::cta.bulk_group": "copy",
    "mbarrier.arrive.shared": "arrive",
}


@pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")
@by_norm
@pytest.mark.parametrize("form", [{}, {"mixed": False, "shifted": True}], ids=str)
def test_warps_meet_where_they_must(form, normed, monkeypatch):
    """What no emulation shows: no warp stores before the last copies have read, all have stored and fenced before the
    next copies, and all have read a stage before it is handed back."""
    with cross_compile.compiling_for("sm_90", monkeypatch, KERNELS[:1]) as kernels:
        contracts.mhc_next_bwd.launch(backend="triton", **boundary(8192, normed=normed, **form))
    lines = kernels[0].assembly.splitlines()
    events = [event for line in lines for text, event in EVENTS.items() if text in line]
    loop = events[events.index("wait") - 1 : events.index("arrive") + 1]
    assert loop == ["barrier", "wait", "barrier", "fence", "barrier", "copy", "copy", "barrier", "arrive"]


def test_otherwise_the_composition(monkeypatch):
    """Also of sublayers with and without a residual map (each kernel knows one kind), and of unaligned tensors."""
    monkeypatch.setattr(device, "of", lambda _: HOPPER)
    taken, identity, aligned = boundary(4096), boundary(4096, mixed=False), boundary(1024, D=64, on="cpu")
    assert all(boundary_launchers.is_one_kernel(**given) for given in (taken, identity, aligned))
    others = [
        taken | {"dx_next": taken["x"]},
        taken | {"dh_in": None},
        taken | {"dlink_next": None},
        *(
            taken | {name: taken[name].to(dtype)}
            for name, dtype in (("h_post", fp16), ("h_res", bf16), ("h_out", fp32))
        ),
        boundary(configs.BOUNDARY_TOKENS - 1),
        boundary(4096, D=4096 + 16),
        boundary(4096, dtype=fp32),
        taken | {"h_res": None},
        identity | {"h_res": taken["h_res"]},
        aligned | {"h_out": torch.zeros(1024 * 64 + 1, dtype=bf16)[1:].view(1024, 64)},
    ]
    assert [number for number, given in enumerate(others) if boundary_launchers.is_one_kernel(**given)] == []
    for given, other in ((taken, identity), (identity, taken)):
        of_post = {name: given[name] for name in ("x", "h_out", "h_post", "h_res", "x_next", "phi")} | {"read": None}
        assert boundary_launchers.is_fused(**of_post)
        assert not boundary_launchers.is_fused(**of_post | {"h_res": other["h_res"]})


WITHOUT_GLUON = """
import sys
sys.modules["triton.experimental.gluon"] = None
from mhc_ops.mhc.triton import boundary as boundary_launchers
assert boundary_launchers.boundary_pass() is None
assert boundary_launchers.post_project() is None
"""


def test_without_gluon_the_composition(monkeypatch):
    subprocess.run([sys.executable, "-c", WITHOUT_GLUON], check=True, cwd=Path(mhc_ops.__file__).parents[1])
    monkeypatch.setattr(device, "of", lambda _: HOPPER)
    monkeypatch.setattr(boundary_launchers, "boundary_pass", lambda: None)
    assert not boundary_launchers.is_one_kernel(**boundary(4096))


# ---- on a Hopper GPU -------------------------------------------------------------------------------------------------


LARGE = [(1024, 4096), (4096, 2560), (1500, 64), (1111, 1280), (2048, 7168)]


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
@pytest.mark.parametrize(("T", "D"), LARGE)
def test_in_a_stack_on_a_gpu(subject, T, D, launched, poisoned, monkeypatch):
    """Few elements of dlink are so near the middle of two steps that fp32 decides; only those differ from the parts."""
    case = drawn(subject, T, D)
    assert failures(case, "triton", "cuda") == []
    assert launched
    fused = accuracy.run_case(case, "triton", "cuda").results
    monkeypatch.setattr(boundary_launchers, "is_one_kernel", lambda **_: False)
    apart = accuracy.run_case(case, "triton", "cuda").results
    few = 10 * accuracy.NORM_TOLERANCE[fp32] / accuracy.ROUNDING[bf16]
    assert (fused["dlink"] != apart["dlink"]).float().mean() <= few


@on_hopper
@pytest.mark.gpu
def test_x_next_is_remade_with_the_bits_of_post():
    """A = dh_mixᵀ · x_next is exact where dh_mix is 1 for one token, so it shows x_next."""
    T, D = 1040, 512
    given = on_a_gpu(inputs(T, D, False))
    of_post = {name: given[name] for name in ("x", "h_out", "h_post", "h_res")}
    x_next = mhc_ops.mhc_post(**of_post, backend="triton")
    for token in (0, 17, T - 1):
        given["dh_mix"].zero_()
        given["dh_mix"][0, token, 3] = 1
        A, *_ = boundary_bwd.boundary_pass(**given)
        assert torch.equal(A.sum(0)[3], x_next[token].flatten().float())


def assert_same_bits_in_any_batch(alone, copies):
    """The copies of a token are at all places in a block where the token count is odd."""
    of_channels = ("parts", "layer_norm_weight")
    many = {
        name: torch.cat([value] * copies, 1 if name == "dh_mix" else 0)
        if isinstance(value, torch.Tensor) and name not in of_channels
        else value
        for name, value in alone.items()
    }
    names = ["dx", "dh_out", "dots"]
    for given in (alone, many):
        results = boundary_bwd.boundary_pass(**given)
        given["dots"] = results[2].dots.transpose(0, 1)
        if given["x"].is_cuda:
            add_up(given, *results)
            names += ["dh_post", "dh_res", "dread"]
    for name in names:
        assert alone[name] is None or all(
            torch.equal(part, alone[name]) for part in many[name].split(alone["x"].shape[0])
        ), name


@by_norm
@by_form
def test_emulated_in_any_batch(form, normed, emulated):
    assert_same_bits_in_any_batch(inputs(21, 64, normed, **form), 3)


@on_hopper
@pytest.mark.gpu
@by_norm
@pytest.mark.parametrize(("form", "copies"), [({}, 129), *[(form, 3) for form in ({}, *FORMS)]], ids=str)
def test_in_any_batch_on_a_gpu(form, copies, normed):
    """One with more than 2^31 elements."""
    alone = on_a_gpu(inputs(1021, 4096, normed, **form))
    assert (copies * alone["x"].numel() > 2**31) == (copies == 129)
    assert_same_bits_in_any_batch(alone, copies)
