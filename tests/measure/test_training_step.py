"""Training steps: every provider's model computes the same, what is wrong is not timed, rows are kept."""

import gc
import statistics
import weakref
from argparse import Namespace
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from stand_ins import a_peer, stand_in

from mhc_ops.measure import bench, peers, results, speed, training_step
from mhc_ops.measure.results import COMPILED, EAGER, GRAPHS, MODES, PLAIN
from mhc_ops.measure.training_step import APART, NO_NORM, RECOMPUTE, SHIFTED, Race, Size, Training

CPU = torch.device("cpu")
SMALL = Size(16, 128, 2, 128)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(training_step, "SIZES_CPU", (SMALL,))


def run(*others, save=lambda found: None):
    """Eager and others."""
    found = results.begin("bench")
    options = Namespace(device=CPU, providers=[*others, "eager"], peers=False, case="training_step")
    bench.run(options, found, lambda: save(found))
    return found


def test_all_models_take_turns(monkeypatch):
    """In rounds that each begins in turn; ratios are those of a round, from idle and in a row."""
    turns, saved = [], []
    monkeypatch.setattr(Training, "sample", lambda self, step: turns.append(step) or [float(len(turns)), 2.0])
    monkeypatch.setattr(peers, "PEERS", (a_peer("quick"),))
    found = run("quick", save=lambda found: saved.append(len(found.steps)))
    plain, _, eager = found.steps
    assert [step.provider for step in found.steps] == [PLAIN, "quick", "eager"]
    assert {(step.mode, step.size, step.samples) for step in found.steps} == {(EAGER, str(SMALL), speed.SAMPLES)}
    one, two, three = turns[:3]
    assert len({one, two, three}) == 3 and speed.SAMPLES == 20
    assert turns == ([one, two, three, two, three, one, three, one, two] * 7)[:60]
    own, of_plain = ([ms for ms, _ in step.rounds] for step in (eager, plain))
    lower, median, upper = statistics.quantiles([a / b for a, b in zip(own, of_plain)], n=4, method="inclusive")
    assert eager.ratio == [median, lower, upper] and eager.in_a_row == [1.0, 1.0, 1.0]
    assert eager.milliseconds == statistics.median(own)
    assert (plain.ratio, plain.in_a_row, plain.difference, eager.difference) == ([], [], None, 0.0)
    assert saved == [3, 3] and found.complete
    assert [str(entry) for entry in found.not_measured] == ["training_step: graphs did not run: CUDA graphs need a GPU"]


def test_a_sample_is_a_step_from_idle_and_steps_in_a_row(monkeypatch):
    training, done = Training(SMALL, EAGER, CPU), []
    monkeypatch.setattr(training, "wait", lambda: done.append("wait"))
    monkeypatch.setattr(training_step.time, "perf_counter", lambda: float(done.count("step")))
    assert training.sample(lambda: done.append("step")) == [1000.0, 1000.0]
    assert done == [*("step", "wait") * 2, *["step"] * training_step.IN_A_ROW, "wait"]


def test_peers_are_checked_in_a_layer_and_in_the_model(monkeypatch):
    planted = (
        a_peer("right"),
        a_peer("other layer", alone=1.1),
        a_peer("no gradient", in_model=lambda h_in: h_in.detach()),
        a_peer("not a number", in_model=lambda h_in: h_in * float("nan")),
        a_peer("crashing", in_model=lambda h_in: {}["no such size"]),
    )
    monkeypatch.setattr(peers, "PEERS", (*planted, peers.FLA))
    found = run(*(peer.name for peer in peers.PEERS))
    assert {step.provider for step in found.steps} == {PLAIN, "right", "eager"}
    assert next(step for step in found.steps if step.provider == "right").difference == 0.0
    reasons = {entry.provider: entry.reason for entry in found.not_measured if entry.failed}
    assert set(reasons) == {peer.name for peer in planted[1:]}
    assert "wrong, so it is not timed: dh_out of mhc_layer 16x4x128 bfloat16" in reasons["other layer"]
    for name in ("no gradient", "not a number"):
        assert reasons[name].startswith(f"{name} is wrong, so it is not timed: its step is off by "), reasons[name]
    assert reasons["crashing"] == "KeyError: 'no such size'"


def test_what_is_planned(monkeypatch):
    """Every form of ours, without those that torch.compile replaces; a formula; no peer that has no layer."""
    monkeypatch.setattr(peers, "PEERS", (a_peer("right"), stand_in("fla", lambda subject, ours: None)))
    present, cuda = ["triton", "right", "fla", "eager", "torch.compile"], torch.device("cuda")
    forms = ["triton", *(f"triton {form}" for form in (APART, NO_NORM, RECOMPUTE, SHIFTED))]
    expected = []
    for mode, formula in ((EAGER, "eager"), (GRAPHS, "eager"), (COMPILED, "torch.compile")):
        own = [form for form in forms if mode != COMPILED or RECOMPUTE not in form]
        expected += [Race(size, mode, (*own, "right", formula)) for size in training_step.SIZES]
    assert bench.plan("training_step", present, cuda) == expected
    assert bench.plan("training_step", ["right", "eager"], CPU) == [Race(SMALL, EAGER, ("right", "eager"))]


FORMS = {"": 0, f" {APART}": None, f" {NO_NORM}": 0, f" {RECOMPUTE}": 4}


@pytest.mark.parametrize("form", FORMS)
def test_our_forms_are_the_same_model(form, monkeypatch):
    """A HyperStack with the norms inside, with less kept, and HyperConnections with the norms in their layers."""
    built, connect = [], training_step.connect
    monkeypatch.setattr(training_step, "connect", lambda *a, **kw: built.append(connect(*a, **kw)) or built[-1])
    inside = form not in (f" {APART}", f" {NO_NORM}")
    training, provider = Training(SMALL, EAGER, CPU), f"reference{form}"
    assert 0 < training.checked(provider)[1]["difference"] <= 1e-2 or not inside
    connected = built[0]
    assert getattr(connected, "recompute", None) == FORMS[form]
    assert [c.layer_norm_weight is not None for c in connected] == [inside] * SMALL.sublayers


def test_a_captured_step_keeps_its_model(monkeypatch):
    """The graph reads the parameters in every replay."""
    models, connect = [], training_step.connect
    monkeypatch.setattr(training_step.torch, "cuda", MagicMock())
    monkeypatch.setattr(training_step, "connect", lambda *a, **kw: models.append(connect(*a, **kw)) or models[-1])
    step = Training(SMALL, GRAPHS, CPU).step("reference")
    model = weakref.ref(models.pop())
    gc.collect()
    assert model() is not None
    del step
    gc.collect()
    assert model() is None


@pytest.mark.interpreted
@pytest.mark.parametrize("provider", [*(f"triton{form}" for form in FORMS), "Liger"])
def test_kernels_in_a_model(provider):
    """Triton's interpreter is exact, but for roundings to bf16; Liger's phi is in bf16."""
    if peers.by_name(provider) and peers.version(peers.by_name(provider)) is None:
        pytest.skip(f"needs {peers.by_name(provider).package}")
    training = Training(SMALL, EAGER, CPU)
    loss_and_dx = zip(training.step(provider)(), training.step("eager")())
    assert all((a - b).float().norm() <= 1e-2 * b.float().norm() for a, b in loss_and_dx)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("provider", [*(f"triton{form}" for form in FORMS), "tilelang", "Liger", "TileKernels"])
def test_a_step_on_a_gpu(provider, mode):
    device = torch.device("cuda")
    reason = peers.why_not(peers.by_name(provider)) if peers.by_name(provider) else None
    backend = training_step.backend_of(provider)
    if reason is not None or not training_step.connects(backend, SMALL.case(provider), device):
        pytest.skip(reason or f"{provider} does not run here")
    training = Training(replace(SMALL, tokens=256), mode, device)
    plain, own = training.measure({name: training.checked(name) for name in (PLAIN, provider)})
    assert mode == GRAPHS or own.peak_megabytes > plain.peak_megabytes > 0
