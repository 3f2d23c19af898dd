"""Training steps: every provider's model computes the same, what is wrong is not timed, rows are kept and drawn."""

import statistics
import types
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from stand_ins import a_peer, stand_in

from mhc_ops import cli
from mhc_ops.compat import tile_kernels
from mhc_ops.measure import bench, page, peers, results, speed, training_step
from mhc_ops.measure.results import COMPILED, EAGER, GRAPHS, MODES, PLAIN, StepTime
from mhc_ops.measure.training_step import ALLOWED, APART, NO_NORM, RECOMPUTE, SHIFTED, Race, Size, Training

CPU = torch.device("cpu")
SMALL = Size(16, 128, 2, 128)
LARGE = "training_step 8192x4x4096 F=11008 6 sublayers"
STEPS = [
    StepTime("training_step small", PLAIN, EAGER, 17.6),
    StepTime("training_step small", "triton", EAGER, 19.6, ratio=[1.116]),
    StepTime(LARGE, PLAIN, EAGER, 55.6, 0.1, 20, peak_megabytes=9000.0),
    StepTime(LARGE, "eager", EAGER, 127.9, 0.4, 20, [2.3, 2.2, 21.4], [2.1], 31000.0, 0.0),
    StepTime(LARGE, "triton recompute=4", EAGER, 61.4, 0.1, 20, [1.105, 1.1, 1.113], [1.07, 1.06, 1.08], 12000.0, 3e-3),
    StepTime(LARGE, "triton", COMPILED, 60.0, 0.1, 20, [1.125, 1.12, 1.13], [1.1, 1.1, 1.1], 12000.0, 3e-3),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(training_step, "SIZES_CPU", (SMALL,))


def run(*others, save=lambda found: None):
    """Eager and others."""
    found = results.begin("bench")
    options = Namespace(device=CPU, providers=[*others, "eager"], peers=False, case="training_step")
    bench.run(options, found, lambda: save(found))
    return found


def test_it_is_among_the_cases_that_a_wrong_name_is_answered_with(capsys):
    for text, answer in (("nosuch", "there are cases of training_step, mhc_"), ("trainingstep", "did you mean 'train")):
        assert cli.main(["bench", "--device", "cpu", "--case", text]) == 2
        assert f"mhc-ops bench: no case matches {text!r}: {answer}" in capsys.readouterr().err


def difference(provider, mode=EAGER, device=CPU):
    training = Training(SMALL, mode, device)
    return training.difference(provider, training.step(provider, mode)())


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


def raising(error):
    def change(h_in):
        raise error

    return change


def test_every_size_is_kept_as_soon_as_it_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(training_step, "SIZES_CPU", (SMALL, replace(SMALL, tokens=32)))
    interrupt = raising(KeyboardInterrupt)
    monkeypatch.setattr(peers, "PEERS", (a_peer("slow", in_model=lambda h: interrupt(h) if len(h) == 32 else h),))
    with pytest.raises(KeyboardInterrupt):
        run("slow", save=lambda found: results.write(found, tmp_path / "file"))
    found = results.read(tmp_path / "file")
    assert [(step.provider, step.size) for step in found.steps] == [(p, str(SMALL)) for p in (PLAIN, "slow", "eager")]
    assert [(entry.provider, entry.reason) for entry in found.not_measured[-1:]] == [("slow, eager", "interrupted")]
    assert not found.complete


def test_peers_are_checked_in_a_layer_and_in_the_model(monkeypatch):
    planted = (
        a_peer("right"),
        a_peer("other layer", alone=1.1),
        a_peer("other model", in_model=lambda h_in: -h_in),
        a_peer("no gradient", in_model=lambda h_in: h_in.detach()),
        a_peer("not a number", in_model=lambda h_in: h_in * float("nan")),
        a_peer("crashing", in_model=raising(ValueError("no such size"))),
    )
    monkeypatch.setattr(peers, "PEERS", (*planted, peers.FLA))
    found = run(*(peer.name for peer in peers.PEERS))
    assert {step.provider for step in found.steps} == {PLAIN, "right", "eager"}
    assert next(step for step in found.steps if step.provider == "right").difference == 0.0
    reasons = {entry.provider: entry.reason for entry in found.not_measured if entry.failed}
    assert set(reasons) == {peer.name for peer in planted[1:]}
    assert "wrong, so it is not timed: dh_out of mhc_layer 16x4x128 bfloat16" in reasons["other layer"]
    for name in ("other model", "no gradient", "not a number"):
        assert reasons[name].startswith(f"{name} is wrong, so it is not timed: its step is off by "), reasons[name]
    assert reasons["crashing"] == "ValueError: no such size"


def test_what_is_planned(monkeypatch):
    monkeypatch.setattr(peers, "PEERS", (a_peer("right"), stand_in("fla", lambda subject, ours: None)))
    present, cuda = ["triton", "right", "fla", "eager", "torch.compile"], torch.device("cuda")
    plan = training_step.plan
    planned = {mode: plan("", present, cuda, mode) for mode in MODES}
    forms = ["triton", *(f"triton {form}" for form in (APART, NO_NORM, RECOMPUTE, SHIFTED))]
    sizes = [(size.D, size.tokens, size.sublayers) for size in training_step.SIZES]
    assert sizes == [(4096, 8192, 6), (2560, 4096, 8), (1280, 4096, 12), (768, 8192, 12)]
    for mode, formula in ((EAGER, "eager"), (COMPILED, "torch.compile"), (GRAPHS, "eager")):
        own = [form for form in forms if mode != COMPILED or RECOMPUTE not in form]
        assert planned[mode] == [Race(size, mode, (*own, "right", formula)) for size in training_step.SIZES]
    assert plan("", ["eager"], CPU, EAGER) == [Race(SMALL, EAGER, ("eager",))]
    for case, there, mode in (("", ["eager"], COMPILED), ("", ["eager"], GRAPHS), ("", ["fla"], EAGER)):
        assert plan(case, there, CPU, mode) == []
    assert plan("mhc_post", present, CPU, EAGER) == plan("mhc_post", present, CPU, COMPILED) == []
    in_order = [race for mode in (EAGER, GRAPHS, COMPILED) for race in planned[mode]]
    assert bench.plan("training_step", present, cuda) == in_order
    assert training_step.backend_of("other triton") == "other triton"  # a form has the backend in front


def test_streams_make_another_model():
    training = Training(SMALL, EAGER, CPU)
    losses = [training.step(provider)()[0] for provider in (PLAIN, "eager", "eager")]
    assert losses[0] != losses[1] == losses[2]


FORMS = {"": 0, f" {APART}": None, f" {NO_NORM}": 0, f" {RECOMPUTE}": 4}


@pytest.mark.parametrize("form", FORMS)
def test_our_forms_are_the_same_model(form, monkeypatch):
    """A HyperStack with the norms inside, with less kept, and HyperConnections with the norms in their layers."""
    built = []
    connect = training_step.connect
    monkeypatch.setattr(training_step, "connect", lambda *a, **kw: built.append(connect(*a, **kw)) or built[-1])
    inside = form not in (f" {APART}", f" {NO_NORM}")
    assert 0 < difference(f"reference{form}") <= 1e-2 or not inside
    connected = built[0]
    assert getattr(connected, "recompute", None) == FORMS[form]
    assert [c.layer_norm_weight is not None for c in connected] == [inside] * SMALL.sublayers


def assert_near(found, expected):
    """The loss and dx."""
    for a, b in zip(found, expected):
        assert (a - b).float().norm() <= 1e-2 * b.float().norm()


def test_compiled_it_is_the_same_model(cxx, monkeypatch):
    """In one graph, around a connection that takes less time to compile than twenty iterations of Sinkhorn."""

    def call(x, h_out, phi, alpha, bias):
        return ((1 + bias.mean()) * x + (phi.sum() + alpha.sum()) * h_out(x.mean(-2)).unsqueeze(-2),)

    def prepare(subject, ours):
        return peers.Prepared(ours, call, ("x", "h_out"))

    monkeypatch.setattr(peers, "PEERS", (stand_in("quick", prepare),))
    torch._dynamo.utils.counters.clear()
    training = Training(SMALL, EAGER, CPU)
    assert_near(training.step("quick", COMPILED)(), training.step("quick")())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


class HandOn(torch.autograd.Function):
    """x. Its backward leaves the gradient at the storage of x, or adds it to what is there and returns none."""

    added = 0

    @staticmethod
    def forward(ctx, x, adds):
        ctx.save_for_backward(x)
        ctx.adds = adds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        storage = ctx.saved_tensors[0].untyped_storage()
        if not ctx.adds:
            storage.grad_from_mhc_post = gradient
            return gradient, None
        storage.grad_from_mhc_post += gradient
        del storage.grad_from_mhc_post
        HandOn.added += 1
        return None, None


@pytest.mark.parametrize("mode", [EAGER, COMPILED])
def test_tile_kernels_in_a_model(mode, monkeypatch, request):
    """With a stand-in that hands on the gradient of the streams as the library does: post leaves it at their storage,
    pre adds to it in place."""
    if mode == COMPILED:
        request.getfixturevalue("cxx")
    functions = types.SimpleNamespace(
        mhc_pre=lambda x, *maps, **options: tile_kernels.mhc_pre(HandOn.apply(x, True), *maps, **options),
        mhc_post=lambda h_out, x, *maps: tile_kernels.mhc_post(h_out, HandOn.apply(x, False), *maps),
    )
    monkeypatch.setattr(peers.Peer, "load", lambda peer: functions)
    HandOn.added = 0
    assert 0 < difference("TileKernels", mode) <= ALLOWED
    assert HandOn.added > SMALL.sublayers  # the layer alone, then every one of the model


@pytest.mark.interpreted
@pytest.mark.parametrize("provider", [*(f"triton{form}" for form in FORMS), "Liger"])
def test_kernels_in_a_model(provider):
    """Triton's interpreter is exact, but for roundings to bf16; Liger's phi is in bf16."""
    if peers.by_name(provider) and peers.version(peers.by_name(provider)) is None:
        pytest.skip(f"needs {peers.by_name(provider).package}")
    training = Training(SMALL, EAGER, CPU)
    assert_near(training.step(provider)(), training.step("eager")())


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


def test_the_table():
    table, *_ = page.of_bench(replace(results.begin("bench"), steps=STEPS))
    assert " ".join(table.header) == "training step provider mode ms ± % over plain in a row peak MB difference"
    shown = [row for row in table.rows if row[0].startswith(LARGE)]
    assert shown[0][1:] == ["plain", "eager", "55.60", "0.10", "", "", "9000", ""]
    ratios = ["+12.5 (+12.0 to +13.0)", "+10.0 (+10.0 to +10.0)"]
    assert shown[3][1:] == ["triton", "torch.compile", "60.00", "0.10", *ratios, "12000", "3.0e-03"]


def test_the_picture():
    """The larger size in eager mode, the least overhead first, lengths as the percents, and no label at an edge."""
    text = page.picture(replace(results.begin("bench"), steps=STEPS, versions={"device": "a GPU & more"}))
    root = ElementTree.fromstring(text)
    space = {"svg": "http://www.w3.org/2000/svg"}
    words = {element.text: element for element in root.findall("svg:text", space)}
    assert "prefers-color-scheme:dark" in text
    assert list(words)[1:] == [
        "a GPU & more, 8192x4x4096 F=11008 6 sublayers, plain residuals: 55.6 ms, quartiles 0.1 apart",
        *("mhc_ops (triton recompute=4)", "+10.5 (+10.0 to +11.3)", "eager PyTorch", "+130.0 (+120.0 to +2040.0)"),
    ]
    ours, eager = root.findall("svg:rect", space)
    assert float(ours.get("width")) / float(eager.get("width")) == pytest.approx(10.5 / 130, rel=1e-2)
    assert (ours.get("class"), eager.get("class")) == ("ours", None)
    left, _, width, _ = map(float, root.get("viewBox").split())
    for text, element in words.items():  # letters of 15 px are 8.5 px wide on average, in wide fonts too
        at, wide = float(element.get("x", 0)), 8.5 * len(text)
        begin = at - wide if element.get("class") == "end" else at
        assert left + 8 <= begin and (element.get("class") == "soft" or begin + wide <= left + width - 8), text


def test_a_picture_of_nothing_but_noise_and_of_nothing(tmp_path, capsys):
    steps = [StepTime("s", PLAIN, EAGER, 1.0), StepTime("s", "triton", EAGER, 0.9, ratio=[0.9])]
    assert 'width="1.0"' in page.picture(replace(results.begin("bench"), steps=steps))
    results.write(results.begin("bench"), tmp_path / "none")
    assert cli.main(["page", str(tmp_path / "none"), "--svg", str(tmp_path / "svg")]) == 2
    assert "there are none" in capsys.readouterr().err
