"""What bench runs and in which order, how it ends, that nothing that fails ends it; and the file of its results."""

import importlib.metadata
import json
from argparse import Namespace
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from stand_ins import a_peer, stand_in

from mhc_ops.measure import bench, peers, results, selection, speed
from mhc_ops.testing import cases

CPU = torch.device("cpu")
POST = cases.Case(cases.MHC_POST, (16,), 2, 8)
PRE = cases.Case(cases.MHC_PRE, (16,), 2, 8)
LAYER = cases.Case(cases.MHC_LAYER, (16,), 2, 8, gamma=False)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(selection, "BENCH_CPU", (POST, PRE))


def run(*others):
    """Eager and others."""
    found, saved = results.begin("bench"), []
    options = Namespace(device=CPU, providers=[*others, "eager", "eager"], peers=False, case="")
    bench.run(options, found, lambda: saved.append(len(found.measurements)))
    return found, saved


def test_results_come_one_by_one():
    found, saved = run()
    assert saved == [3, 6, 6]
    assert found.complete and found.not_measured == []
    assert [(m.case, m.provider) for m in found.measurements[::3]] == [(str(POST), "eager"), (str(PRE), "eager")]
    assert {row.output for row in found.accuracy if row.case == str(POST)} >= {"x_next", "dx", "dh_res"}
    assert {m.provider for m in found.measurements} == {row.backend for row in found.accuracy} == {"eager"}


def test_peers_are_checked_timed_and_named(monkeypatch):
    crash = Mock(side_effect=ValueError("no such size\nand more"))
    there = (a_peer("right"), a_peer("wrong", alone=1.1), stand_in("crashing", crash))
    there += (stand_in("lacking", lambda subject, ours: None),)
    monkeypatch.setattr(peers, "PEERS", (*there, peers.LIGER))
    monkeypatch.setattr(importlib.metadata, "version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    monkeypatch.setattr(selection, "BENCH_CPU", (LAYER,))
    found, _ = run(*(peer.name for peer in peers.PEERS))
    assert {m.provider for m in found.measurements} == {"right", "eager"}
    assert found.precision == {peer.name: "as the reference" for peer in there}
    said = {entry.provider: (entry.where, entry.failed, entry.reason) for entry in found.not_measured}
    assert said["wrong"][:2] == (str(LAYER), True)
    assert said["wrong"][2].startswith("wrong is wrong, so it is not timed: ")
    assert said["crashing"] == (str(LAYER), True, "ValueError: no such size and more")
    assert said["Liger"] == ("", False, "Liger is not installed: pip install liger-kernel")
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
    timed = {(m.case, m.provider) for m in found.measurements}
    assert timed == {(plain, "eager"), (normed, "eager"), (recomputed, "eager"), (plain, "library")}
    assert {m.direction for m in found.measurements} == {"forward", "backward", "both"}
    checked = {(row.case.split(" 16x")[0], row.backend) for row in found.accuracy if row.passed}
    assert checked >= {("mhc_next", "eager"), ("mhc_next normed", "eager"), ("mhc_layer", "library")}
    assert [entry.where for entry in found.not_measured if entry.provider == "wrong"] == [plain]


def test_a_file_is_whole_at_any_time(tmp_path, monkeypatch):
    file = tmp_path / "bench.json"
    found = results.begin("bench")
    found.complete = True
    found.steps = [results.StepTime("size", "triton", "eager", 60.0, 0.1, 20, [1.2, 1.1, 1.3], rounds=[[60.0, 59.0]])]
    results.write(found, file)
    assert results.read(file) == found

    found.complete = False
    monkeypatch.setattr(json, "dumps", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        results.write(found, file)
    monkeypatch.undo()
    assert results.read(file).complete


def test_not_a_number_survives(tmp_path):
    found = results.begin("check")
    found.accuracy = [results.Row("case", "triton", "y", float("nan"), float("inf"), 1e-5, False)]
    results.write(found, tmp_path / "file")
    (row,) = results.read(tmp_path / "file").accuracy
    assert row.max_error != row.max_error and not row.passed
