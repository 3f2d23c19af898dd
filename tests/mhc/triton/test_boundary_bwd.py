"""The boundary's backward as one kernel, in Gluon: its source run on a CPU, compiled for Hopper, and run there."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")
import gluon_emulator
from config_domain import GPUS
from mhc_kernels import bf16, failures, fp16, fp32
from mhc_launches import all_calls, compiled

import mhc_ops
from mhc_ops.core import device
from mhc_ops.core.backend import _INTERPRETED
from mhc_ops.mhc import contracts
from mhc_ops.mhc.triton import boundary as boundary_launchers
from mhc_ops.mhc.triton import boundary_bwd, configs
from mhc_ops.testing import accuracy, cases

HOPPER = GPUS["sm_90"]


def on_hopper(test):
    there = torch.cuda.is_available() and device.of(torch.device("cuda")).capability == HOPPER.capability
    return pytest.mark.gpu(pytest.mark.skipif(not there, reason="needs a Hopper GPU")(test))


def forms_of(subject):
    """With a map, transposed or not, and without."""
    inputs, call = tuple(name for name in subject.inputs if name != "h_res"), partial(subject.call, residual="identity")
    identity = replace(subject, name=f"{subject.name} identity", inputs=inputs, call=call)
    return subject, subject.with_options(transposed=True), identity


STANDARD = (cases.MHC_NEXT, cases.MHC_NEXT_NORMED)
SUBJECTS = [form for subject in (*STANDARD, *cases.SHIFTED[1:]) for form in forms_of(subject)]
by_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{s.name} {dict(s.options) or ''}".strip())


def drawn(subject, T, D, **options):
    """A boundary whose x has no other reader."""
    return cases.Case(subject, (T,), 4, D, bf16, unused=("x_next",), **options)


@pytest.fixture
def taken(monkeypatch):
    """What the kernel's launcher is given in each call."""
    found, launcher = [], boundary_launchers.as_one_kernel
    monkeypatch.setattr(boundary_launchers, "as_one_kernel", lambda **given: found.append(given) or launcher(**given))
    return found


@pytest.fixture
def emulated(taken, monkeypatch):
    """On the CPU, of any number of tokens. x_next, made again, has the bits that the interpreter's mhc_post stored."""
    choice = configs.boundary_bwd
    monkeypatch.setattr(configs, "BOUNDARY_TOKENS", 1)
    monkeypatch.setattr(configs, "boundary_bwd", lambda n, D, dtype, enough, on: choice(n, D, dtype, enough, HOPPER))
    monkeypatch.setattr(boundary_bwd, "launch", gluon_emulator.run)
    monkeypatch.setattr(gluon_emulator, "fma", gluon_emulator.fma_of_the_interpreter)
    return taken


EMULATED = [drawn(subject, 1, 128) for subject in STANDARD]
EMULATED += [drawn(subject, 80, 128, gamma=False, sigma=8) for subject in STANDARD]
EMULATED += [drawn(subject, 80, 128, parameter_dtype=bf16) for subject in STANDARD]
EMULATED += [drawn(subject, 149, 128) for subject in SUBJECTS]
SIZES = [(1, 64), (300, 512), (1024, 4096), (4096, 2560), (1500, 64), (1111, 1280), (2048, 7168)]  # on a GPU


def assert_same_bits_in_any_batch(alone, copies):
    """The copies of a token are at all places in a block where the token count is odd."""
    T, results = alone["x"].shape[0], contracts.mhc_next_bwd.outputs._fields
    per_token = [name for name, value in alone.items() if isinstance(value, torch.Tensor) and value.shape[:1] == (T,)]
    many = {name: torch.cat([alone[name]] * copies) for name in per_token}
    found = [name for name in per_token if name in results]
    assert {"dlink", "dh_out", "dh_post"} <= set(found)
    for name in found:
        many[name].fill_(torch.nan)
    boundary_launchers.as_one_kernel(**alone | many)
    wrong = [name for name in found if any(not torch.equal(part, alone[name]) for part in many[name].split(T))]
    assert wrong == []


@pytest.mark.interpreted
@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_emulated(case, emulated, poisoned, monkeypatch):
    """5 blocks of tokens a program: every stage is filled and emptied, and the phases of its barriers come back."""
    many = case.outer == (149,)
    monkeypatch.setattr(configs, "partition_rows", lambda *_: 2 if many else 1)
    assert failures(case, "triton") == []
    assert len(emulated) == 1, "the composition was taken"
    if many:
        assert_same_bits_in_any_batch(emulated[0], 2)


@on_hopper
@by_subject
@pytest.mark.parametrize(("T", "D"), SIZES)
def test_on_a_gpu(subject, T, D, taken, poisoned, monkeypatch):
    """Few elements of dlink are so near the middle of two steps that fp32 decides; only those differ from the parts."""
    monkeypatch.setattr(configs, "BOUNDARY_TOKENS", 1)
    case = drawn(subject, T, D)
    assert failures(case, "triton", "cuda") == []
    assert taken
    if T >= 1024 and subject in STANDARD:
        fused = accuracy.run_case(case, "triton", "cuda").results
        monkeypatch.setattr(boundary_launchers, "is_one_kernel", lambda **_: False)
        apart = accuracy.run_case(case, "triton", "cuda").results
        few = 10 * accuracy.NORM_TOLERANCE[fp32] / accuracy.ROUNDING[bf16]
        assert (fused["dlink"] != apart["dlink"]).float().mean() <= few


@on_hopper
def test_x_next_is_remade_with_the_bits_of_post(monkeypatch):
    """A = dh_mixᵀ · x_next is exact where dh_mix is 1 for one token, so it shows x_next."""
    given, launcher = {}, boundary_bwd.boundary_pass
    monkeypatch.setattr(boundary_launchers, "boundary_pass", lambda: lambda **all: given.update(all) or launcher(**all))
    accuracy.run_case(drawn(cases.MHC_NEXT, 1040, 512), "triton", "cuda")
    x_next = mhc_ops.mhc_post(*(given[name] for name in ("x", "h_out", "h_post", "h_res")), backend="triton")
    for token in (0, 17, 1039):
        given["pass_b"].dh_mix.zero_()
        given["pass_b"].dh_mix[0, token, 3] = 1
        A, *_ = launcher(**given)
        assert torch.equal(A.sum(0)[3], x_next[token].flatten().float())


@on_hopper
@pytest.mark.parametrize(("subject", "copies"), [*((one, 129) for one in STANDARD), *((one, 3) for one in SUBJECTS)])
def test_in_any_batch_on_a_gpu(subject, copies, taken, monkeypatch):
    """One with more than 2^31 elements."""
    monkeypatch.setattr(configs, "BOUNDARY_TOKENS", 1)
    accuracy.run_case(drawn(subject, 1021, 4096), "triton", "cuda")
    assert (copies * taken[0]["x"].numel() > 2**31) == (copies == 129)
    assert_same_bits_in_any_batch(taken[0], copies)


EVENTS = {
    "bar.sync": "barrier", "cp.async.bulk.wait_group.read": "wait", "fence.proxy.async": "fence",
    "global.shared::cta.bulk_group": "copy", "mbarrier.arrive.shared": "arrive",
}  # fmt: skip
IDENTITY = {"mixed": False, "shifted": True}
COMPILED = [*(({}, dtype) for dtype in (None, fp32, bf16)), (IDENTITY, None), (IDENTITY, fp32)]
COMPILED += [({"shifted": True}, None), ({"mixed": False}, None), ({"transposed": True, "shifted": True}, fp32)]


@pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("form", "weight_dtype"), COMPILED, ids=str)
def test_compiles_for_hopper(form, weight_dtype, monkeypatch):
    """Without spills; two programs fit a multiprocessor. weight_dtype: of the norm

    What no emulation shows: no warp stores before the last copies have read, all have stored and fenced before the next
    copies, and all have read a stage before it is handed back."""
    launch = {"T": 8192, "n": 4, "D": 4096, "dtype": bf16, "normed": weight_dtype, "ops": {"mhc_next_bwd"}}
    kernels = {kernel.name: kernel for kernel in compiled("sm_90", monkeypatch, launch | form)}
    assert "mhc_pre_sums_kernel" in kernels
    assert not kernels.keys() & {"mhc_pre_dx_kernel", "mhc_post_bwd_kernel"}
    large, reserved, of_a_multiprocessor = kernels["mhc_boundary_bwd_kernel"], 1024, 228 * 1024
    assert 2 * (large.shared + reserved) <= of_a_multiprocessor
    assert large.registers <= configs.BOUNDARY_REGISTERS
    lines = large.assembly.splitlines()
    events = [event for line in lines for text, event in EVENTS.items() if text in line]
    loop = events[events.index("wait") - 1 : events.index("arrive") + 1]
    assert loop == ["barrier", "wait", "barrier", "fence", "barrier", "copy", "copy", "barrier", "arrive"]


def boundary(T, D=4096, dtype=bf16, on="meta", **form):
    return dict(all_calls(T, 4, D, dtype, on=on, **form))["mhc_next_bwd"]


def test_otherwise_the_composition(monkeypatch):
    """The kernel takes no unaligned tensors, and no boundary of one sublayer with a residual map and one without."""
    monkeypatch.setattr(device, "of", lambda _: HOPPER)
    taken, identity, aligned = boundary(4096), boundary(4096, mixed=False), boundary(1024, D=64, on="cpu")
    assert all(boundary_launchers.is_one_kernel(**given) for given in (taken, identity, aligned))
    other_types = {"h_post": fp16, "h_res": bf16, "h_out": fp32}
    others = [
        *(taken | {name: None} for name in ("dh_in", "dlink_next", "h_res")),
        *(taken | {name: taken[name].to(dtype)} for name, dtype in other_types.items()),
        *(boundary(T, D=D) for T, D in ((configs.BOUNDARY_TOKENS - 1, 4096), (4096, 4096 + 16))),
        *(boundary(4096, dtype=fp32), taken | {"dx_next": taken["x"]}, identity | {"h_res": taken["h_res"]}),
        aligned | {"h_out": torch.zeros(1024 * 64 + 1, dtype=bf16)[1:].view(1024, 64)},
    ]
    assert [number for number, given in enumerate(others) if boundary_launchers.is_one_kernel(**given)] == []
    for given, other in ((taken, identity), (identity, taken)):
        of_post = {name: given[name] for name in ("x", "h_out", "h_post", "h_res", "x_next", "phi")} | {"read": None}
        assert boundary_launchers.is_fused(**of_post)
        assert not boundary_launchers.is_fused(**of_post | {"h_res": other["h_res"]})


def test_without_gluon_the_composition(monkeypatch):
    monkeypatch.setattr(device, "of", lambda _: HOPPER)
    for name in ("boundary_fwd", "boundary_bwd"):
        monkeypatch.delitem(sys.modules, f"mhc_ops.mhc.triton.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)  # as where there is none
    for launcher in (boundary_launchers.boundary_pass, boundary_launchers.post_project):
        assert launcher.__wrapped__() is None
