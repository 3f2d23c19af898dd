"""What bench runs and in which order, how it ends, and that nothing that fails ends it."""

import importlib.metadata
import json
from dataclasses import replace

import pytest
import torch
from stand_ins import a_peer, stand_in

from mhc_ops.measure import bench, peers, results, selection, speed, training_step
from mhc_ops.testing import cases, conv_cases

CPU = torch.device("cpu")
POST = cases.Case(cases.MHC_POST, (16,), 2, 8)
PRE = cases.Case(cases.MHC_PRE, (16,), 2, 8)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(selection, "BENCH_CPU", (POST, PRE))


def run(*others):
    """Eager and others."""
    found = results.begin("bench")
    saved = []
    bench.run(bench.Options(CPU, [*others, "eager"]), found, lambda: saved.append(len(found.measurements)))
    return found, saved


def peer(name, change, lacks=()):
    """A library that computes what the reference does, then changes it."""

    def prepare(subject, ours):
        computed = next(s for s in cases.SUBJECTS if s.name == subject)

        def call(**tensors):
            return tuple(change(output) for output in computed.call(**tensors, backend="reference"))

        return None if subject in lacks else peers.Prepared(ours, call, ("x",))

    return stand_in(name, prepare)


def crash(output):
    raise ValueError("no such size\nand more")


def test_results_come_one_by_one():
    found, saved = run()
    assert saved == [3, 6, 6]
    assert found.complete
    assert [(m.case, m.provider) for m in found.measurements[::3]] == [(str(POST), "eager"), (str(PRE), "eager")]
    assert {row.output for row in found.accuracy if row.case == str(POST)} >= {"x_next", "dx", "dh_res"}
    assert {row.backend for row in found.accuracy} == {"eager"}


def test_peers_are_checked_timed_and_named(monkeypatch):
    right, wrong = peer("right", lambda output: output), peer("wrong", lambda output: 1.1 * output)
    crashing, lacking = peer("crashing", crash), peer("lacking", lambda output: output, lacks=("mhc_post", "mhc_pre"))
    monkeypatch.setattr(peers, "PEERS", (right, wrong, crashing, lacking, peers.LIGER))
    monkeypatch.setattr(importlib.metadata, "version", missing)
    found, _ = run(*(peer.name for peer in peers.PEERS))
    assert {m.provider for m in found.measurements} == {"right", "eager"}
    assert found.precision == dict.fromkeys(["right", "wrong", "crashing", "lacking"], "as the reference")
    reasons = {entry.provider: entry for entry in found.not_measured if entry.where in (str(POST), "")}
    assert reasons["wrong"].failed
    assert reasons["wrong"].reason.startswith("wrong is wrong, so it is not timed: ")
    assert reasons["crashing"].reason == "ValueError: no such size and more"
    assert reasons["Liger"].reason == "Liger is not installed: pip install liger-kernel"
    assert not reasons["Liger"].failed
    assert {row.backend for row in found.accuracy if not row.passed} == {"wrong"}
    assert found.complete


def test_a_stack(monkeypatch):
    """A stack is timed as a whole and checked as a boundary, or as a layer of a library; it is never compiled."""
    stacked = [cases.Stack(s, (16,), 2, 8, gamma=False) for s in (cases.MHC_NEXT, cases.MHC_NEXT_NORMED)]
    stacked.append(replace(stacked[0], recompute=4))
    monkeypatch.setattr(selection, "BENCH_CPU", stacked)
    monkeypatch.setattr(speed, "DEPTHS", (3, 1))
    monkeypatch.setattr(peers, "PEERS", (a_peer("library"), a_peer("wrong", alone=1.1)))
    found, _ = run("library", "wrong", "torch.compile")
    plain, normed, recomputed = map(str, stacked)
    assert recomputed == f"{plain} recompute 4"
    assert {(m.case, m.provider) for m in found.measurements} == {
        *((case, "eager") for case in (plain, normed, recomputed)),
        (plain, "library"),
    }
    assert {m.direction for m in found.measurements} == {"forward", "backward", "both"}
    checked = {(row.case.split(" 16x")[0], row.backend) for row in found.accuracy if row.passed}
    assert checked >= {("mhc_next", "eager"), ("mhc_next normed", "eager"), ("mhc_layer", "library")}
    assert [entry.where for entry in found.not_measured if entry.provider == "wrong"] == [plain]


def test_the_stacks_of_providers_are_the_same(monkeypatch):
    """x after a stack of ours, with less kept too, and after a library's layers."""
    case = cases.Stack(cases.MHC_NEXT, (16,), 4, 8, torch.float32, gamma=False)
    monkeypatch.setattr(peers, "PEERS", (a_peer("library"),))
    x = case.inputs()["x"]
    ours = training_step.build(case, "eager", 3, CPU)(x)
    for other, provider in ((case, "library"), (replace(case, recompute=2), "eager")):
        assert torch.equal(training_step.build(other, provider, 3, CPU)(x), ours)
    assert not torch.equal(training_step.build(case, "eager", 2, CPU)(x), ours)


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    def wrong(x, backend, **arguments):
        outputs = cases.MHC_PRE.call(x=x, backend="reference", **arguments)
        return tuple(2 * output for output in outputs) if backend == "triton" else outputs

    case = replace(PRE, subject=replace(cases.MHC_PRE, call=wrong))
    monkeypatch.setattr(selection, "BENCH_CPU", (case,))
    monkeypatch.setattr(conv_cases, "runs", lambda case, backend, device: backend == "triton")
    found, _ = run("triton")
    assert {m.provider for m in found.measurements} == {"eager"}
    (entry,) = [entry for entry in found.not_measured if entry.failed]
    assert entry.reason.startswith("triton is wrong, so it is not timed: ")


def test_order_of_importance(monkeypatch):
    monkeypatch.setattr(conv_cases, "runs", lambda case, backend, device: True)
    present = ["triton", "Liger", "eager", "torch.compile"]
    assert [unit.provider for unit in bench.plan(bench.Options(CPU), present)[::2]] == present


def test_providers_that_were_asked_for():
    found, _ = run()
    assert {m.provider for m in found.measurements} == {"eager"}
    assert found.not_measured == []


def test_small_cases_are_checked_once(monkeypatch):
    checked = []
    monkeypatch.setattr(selection, "check", lambda *arguments: checked.append(arguments) or [])
    large = [replace(POST, outer=(T,)) for T in (300, 600)]
    monkeypatch.setattr(selection, "BENCH_CPU", large)
    found, _ = run()
    assert len(checked) == 1
    assert len(found.measurements) == 6


def test_a_file_is_whole_at_any_time(tmp_path, monkeypatch):
    file = tmp_path / "bench.json"
    found, _ = run()
    results.write(found, file)
    read = results.read(file)
    assert read == found

    def torn(*arguments, **options):
        raise KeyboardInterrupt

    found.complete = False
    monkeypatch.setattr(json, "dumps", torn)
    with pytest.raises(KeyboardInterrupt):
        results.write(found, file)
    monkeypatch.undo()
    assert results.read(file).complete


def test_not_a_number_survives(tmp_path):
    found = results.begin("check")
    found.accuracy = [results.Row("case", "triton", "y", float("nan"), float("inf"), 1e-5, False)]
    results.write(found, tmp_path / "file")
    assert json.loads((tmp_path / "file").read_text())["accuracy"][0]["max_error"] is None
    (row,) = results.read(tmp_path / "file").accuracy
    assert row.max_error != row.max_error
    assert not row.passed
