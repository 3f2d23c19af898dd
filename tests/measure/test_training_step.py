"""Training steps: every provider's model computes the same, what is wrong is not timed, rows are kept and drawn."""

import types
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from stand_ins import a_peer, stand_in

import mhc_ops
from mhc_ops import cli
from mhc_ops.measure import bench, compare, page, peers, results, speed, training_step
from mhc_ops.measure.training_step import ALLOWED, APART, PLAIN, RECOMPUTE, Size, StepTime, Training

CPU = torch.device("cpu")
SMALL = Size(16, 128, 2, 128)
LARGE = "training_step 8192x4x4096 F=11008 6 sublayers"
STEPS = [
    StepTime("training_step small", PLAIN, False, 17.6),
    StepTime("training_step small", "triton", False, 19.6, overhead_percent=11.6),
    StepTime(LARGE, PLAIN, False, 55.6, 0.1, 20, None, 9000.0),
    StepTime(LARGE, "eager", False, 127.9, 0.4, 20, 130.0, 31000.0, 0.0),
    StepTime(LARGE, "triton", False, 61.4, 0.1, 20, 10.5, 12000.0, 3e-3),
    StepTime(LARGE, "triton", True, 60.0, 0.1, 20, 12.5, 12000.0, 3e-3),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(training_step, "SIZES_CPU", (SMALL,))


def run(*others, save=lambda found: None):
    """Eager and others."""
    found = results.begin("bench")
    bench.run(bench.Options(CPU, [*others, "eager"], case="training_step"), found, lambda: save(found))
    return found


@pytest.mark.parametrize(
    ("text", "answer"),
    [("nosuch", "there are cases of training_step, mhc_"), ("trainingstep", "did you mean 'training_step'?")],
)
def test_it_is_among_the_cases_that_a_wrong_name_is_answered_with(text, answer, capsys):
    assert cli.main(["bench", "--device", "cpu", "--case", text]) == 2
    assert f"mhc-ops bench: no case matches {text!r}: {answer}" in capsys.readouterr().err


def difference(provider, compiled=False, device=CPU):
    training = Training(SMALL, compiled, device)
    return training.difference(provider, training.step(provider, compiled)())


def crash(h_in):
    raise ValueError("no such size")


def test_plain_and_eager_take_turns(monkeypatch):
    turns = []
    timed = Training.microseconds
    monkeypatch.setattr(Training, "microseconds", lambda self, step: turns.append(step) or timed(self, step))
    saved = []
    found = run(save=lambda found: saved.append(len(found.steps)))
    assert [(step.provider, step.compiled, step.size) for step in found.steps] == [
        (PLAIN, False, str(SMALL)),
        ("eager", False, str(SMALL)),
    ]
    plain, eager = found.steps
    assert (plain.overhead_percent, plain.difference, eager.difference) == (None, None, 0.0)
    assert eager.overhead_percent == pytest.approx(100 * (eager.milliseconds / plain.milliseconds - 1))
    assert {step.samples for step in found.steps} == {speed.SAMPLES}
    assert turns == turns[:2] * speed.SAMPLES
    assert turns[0] is not turns[1]
    assert saved == [2, 2]
    assert found.complete


def interrupt(h_in):
    raise KeyboardInterrupt


def test_every_provider_is_kept_as_soon_as_it_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "PEERS", (a_peer("quick"), a_peer("slow", in_model=interrupt)))
    with pytest.raises(KeyboardInterrupt):
        run("quick", "slow", save=lambda found: results.write(found, tmp_path / "file"))
    found = results.read(tmp_path / "file")
    assert [step.provider for step in found.steps] == [PLAIN, "quick"]
    reasons = [(entry.provider, entry.reason) for entry in found.not_measured[-2:]]
    assert reasons == [("slow", "interrupted"), ("eager", "interrupted")]
    assert not found.complete


def test_peers_are_checked_in_a_layer_and_in_the_model(monkeypatch):
    planted = (
        a_peer("right"),
        a_peer("other layer", alone=1.1),
        a_peer("other model", in_model=lambda h_in: -h_in),
        a_peer("no gradient", in_model=lambda h_in: h_in.detach()),
        a_peer("not a number", in_model=lambda h_in: h_in * float("nan")),
        a_peer("crashing", in_model=crash),
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
    monkeypatch.setattr(peers, "PEERS", (a_peer("right"), peers.FLA))
    present, cuda = ["triton", "right", "fla", "eager", "torch.compile"], torch.device("cuda")
    planned = [race for compiled in (False, True) for race in training_step.plan("", present, cuda, compiled)]
    first = [(race.compiled, race.provider) for race in planned if race.size == training_step.SIZES[0]]
    eager = ("triton", "triton HyperConnection", "triton recompute=4", "triton shifted", "right", "eager")
    compiled = ("triton", "triton HyperConnection", "triton shifted", "right", "torch.compile")
    assert first == [*((False, provider) for provider in eager), *((True, provider) for provider in compiled)]
    assert {race.size for race in planned} == set(training_step.SIZES)
    assert [race.compiled for race in training_step.plan("", ["eager"], CPU, False)] == [False]
    assert training_step.plan("", ["eager"], CPU, True) == []
    assert training_step.plan("", ["fla"], CPU, False) == []
    assert (
        training_step.plan("mhc_post", present, CPU, False) == training_step.plan("mhc_post", present, CPU, True) == []
    )
    assert bench.plan(bench.Options(cuda, case="training_step"), present) == planned


def test_streams_make_another_model():
    training = Training(SMALL, False, CPU)
    losses = [training.step(provider)()[0] for provider in (PLAIN, "eager", "eager")]
    assert losses[0] != losses[1] == losses[2]


FORMS = {"": 0, f" {APART}": None, f" {RECOMPUTE}": 4}


@pytest.mark.parametrize("form", FORMS)
def test_our_forms_are_the_same_model(form, monkeypatch):
    """A HyperStack with the norms inside, with less kept, and HyperConnections with the norms in their layers."""
    built = []
    connect = training_step.connect
    monkeypatch.setattr(training_step, "connect", lambda *a, **kw: built.append(connect(*a, **kw)) or built[-1])
    assert 0 < difference(f"reference{form}") <= 1e-2 or form == f" {APART}"
    connected = built[0]
    assert getattr(connected, "recompute", None) == FORMS[form]
    assert [c.layer_norm_weight is not None for c in connected] == [FORMS[form] is not None] * SMALL.sublayers


def test_a_form_is_ours():
    assert training_step.backend_of("triton recompute=4") == "triton"
    assert training_step.backend_of("other triton") == "other triton"
    steps = [replace(step, provider=step.provider.replace("triton", "triton recompute=4")) for step in STEPS]
    text = page.picture(replace(results.begin("bench"), steps=steps))
    assert "mhc_ops (triton recompute=4)" in text and 'class="ours"' in text
    before = replace(results.begin("bench"), steps=steps)
    failed = results.NotMeasured(LARGE, steps[-2].provider, "", True)
    change = compare.compare(before, replace(before, steps=steps[:4], not_measured=[failed]))[0][0]
    assert (change.kind, change.regression) == ("fails", True)


def test_compiled_it_is_the_same_model(cxx, monkeypatch):
    """In one graph, around a connection that takes less time to compile than twenty iterations of Sinkhorn."""

    def call(x, h_out, phi, alpha, bias):
        return ((1 + bias.mean()) * x + (phi.sum() + alpha.sum()) * h_out(x.mean(-2)).unsqueeze(-2),)

    def prepare(subject, ours):
        return peers.Prepared(ours, call, ("x", "h_out"))

    monkeypatch.setattr(peers, "PEERS", (stand_in("quick", prepare),))
    torch._dynamo.utils.counters.clear()
    training = Training(SMALL, False, CPU)
    for found, expected in zip(training.step("quick", compiled=True)(), training.step("quick")()):
        assert (found - expected).float().norm() <= 1e-2 * expected.float().norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("compiled", [False, True])
def test_tile_kernels_in_a_model(compiled, monkeypatch, request):
    """With a stand-in that hands on the gradient of the streams as the library does: post leaves it at their storage,
    pre adds to it in place and returns none."""
    if compiled:
        request.getfixturevalue("cxx")
    functions = types.SimpleNamespace(mhc_pre=stand_in_pre, mhc_post=Post.apply)
    planted = replace(peers.TILE_KERNELS, load=lambda peer: functions)
    monkeypatch.setattr(peers, "PEERS", (planted,))
    Pre.backwards = 0
    assert 0 < difference("TileKernels", compiled) <= ALLOWED
    assert Pre.backwards > SMALL.sublayers  # the layer alone, then every one of the model


def stand_in_pre(residual, fn, scale, base, **options):
    h_in, *maps = Pre.apply(residual, fn, scale, base)
    return h_in, maps


def _pre(residual, fn, scale, base):
    h_in, h_post, h_res = mhc_ops.mhc_pre(residual, fn, scale, base, backend="reference")
    return h_in, h_post[..., None], h_res


def _post(x, residual, post_mix, comb_mix):
    return mhc_ops.mhc_post(residual, x, post_mix[..., 0], comb_mix, backend="reference")


def gradients_of(function, inputs, cotangents):
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*leaves), leaves, cotangents)


class Pre(torch.autograd.Function):
    backwards = 0

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return _pre(*inputs)

    @staticmethod
    def backward(ctx, *cotangents):
        Pre.backwards += 1
        dx, *of_maps = gradients_of(_pre, ctx.saved_tensors, cotangents)
        storage = ctx.saved_tensors[0].untyped_storage()
        storage.grad_from_mhc_post += dx
        del storage.grad_from_mhc_post
        return None, *of_maps


class Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        return _post(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        gradients = gradients_of(_post, ctx.saved_tensors, cotangent)
        ctx.saved_tensors[1].untyped_storage().grad_from_mhc_post = gradients[1]
        return gradients


@pytest.mark.interpreted
@pytest.mark.parametrize("provider", [*(f"triton{form}" for form in FORMS), "Liger"])
def test_kernels_in_a_model(provider):
    """Triton's interpreter is exact, but for roundings to bf16; Liger's phi is in bf16."""
    if peers.by_name(provider) and peers.version(peers.by_name(provider)) is None:
        pytest.skip(f"needs {peers.by_name(provider).package}")
    training = Training(SMALL, False, CPU)
    for found, expected in zip(training.step(provider)(), training.step("eager")()):
        assert (found - expected).float().norm() <= 1e-2 * expected.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("provider", [*(f"triton{form}" for form in FORMS), "tilelang", "Liger", "TileKernels"])
def test_a_step_on_a_gpu(provider, compiled):
    device = torch.device("cuda")
    reason = peers.why_not(peers.by_name(provider)) if peers.by_name(provider) else None
    if reason is not None or not training_step._connects(training_step.backend_of(provider), SMALL, device):
        pytest.skip(reason or f"{provider} does not run here")
    plain, own = Training(replace(SMALL, tokens=256), compiled, device).measure(provider)
    assert own.peak_megabytes > plain.peak_megabytes > 0


def test_rows_are_kept(tmp_path):
    found = replace(results.begin("bench"), steps=STEPS)
    results.write(found, tmp_path / "file")
    assert results.read(tmp_path / "file") == found


def test_the_table():
    table, *_ = page.of_bench(replace(results.begin("bench"), steps=STEPS))
    assert " ".join(table.header) == "training step provider mode ms ± % over plain peak MB difference"
    shown = [row for row in table.rows if row[0].startswith(LARGE)]
    assert shown[0][1:] == ["plain", "eager", "55.60", "0.10", "", "9000", ""]
    assert shown[3][1:] == ["triton", "torch.compile", "60.00", "0.10", "+12.5", "12000", "3.0e-03"]


def test_the_picture():
    """The larger size in eager mode, the least overhead first, lengths as the percents."""
    text = page.picture(replace(results.begin("bench"), steps=STEPS, versions={"device": "a GPU & more"}))
    root = ElementTree.fromstring(text)
    space = {"svg": "http://www.w3.org/2000/svg"}
    words = [element.text for element in root.findall("svg:text", space)]
    assert words[1] == "a GPU & more, 8192x4x4096 F=11008 6 sublayers, plain residuals: 55.6 ms, quartiles 0.1 apart"
    assert words[2:] == ["mhc_ops (triton)", "+10.5 %", "eager PyTorch", "+130.0 %"]
    ours, eager = root.findall("svg:rect", space)
    assert float(ours.get("width")) / float(eager.get("width")) == pytest.approx(10.5 / 130, rel=1e-2)
    assert (ours.get("class"), eager.get("class")) == ("ours", None)
    assert "prefers-color-scheme:dark" in text


def test_a_picture_of_nothing_but_noise():
    steps = [StepTime("s", PLAIN, False, 1.0), StepTime("s", "triton", False, 0.9, overhead_percent=-10)]
    assert 'width="1.0"' in page.picture(replace(results.begin("bench"), steps=steps))


def test_a_picture_of_nothing(tmp_path, capsys):
    results.write(results.begin("bench"), tmp_path / "none")
    assert cli.main(["page", str(tmp_path / "none"), "--svg", str(tmp_path / "svg")]) == 2
    assert "there are none" in capsys.readouterr().err
