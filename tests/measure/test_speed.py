"""The benchmark: it refuses to time what is wrong, and counts what it moves."""

from dataclasses import replace

import pytest
import torch

from mhc_ops.measure import cases, report, speed

CPU = torch.device("cpu")
CASE = cases.Case(cases.MHC_FORWARD_PRE, (16,), 2, 8, torch.float32)


def test_a_wrong_kernel_is_not_timed():
    def wrong(x, **arguments):
        outputs = cases.MHC_FORWARD_PRE.call(x=x, **arguments)
        return outputs if x.dtype == torch.float64 else tuple(2 * output for output in outputs)

    case = replace(CASE, subject=replace(cases.MHC_FORWARD_PRE, call=wrong))
    with pytest.raises(AssertionError, match="reference is wrong, so it is not timed"):
        list(speed.measure(case, ["reference"], CPU))


def test_measures_forward_and_backward():
    rows = list(speed.measure(CASE, ["reference", "eager"], CPU))
    assert [(row.provider, row.direction) for row in rows] == [
        (provider, direction) for provider in ("reference", "eager") for direction in ("forward", "backward", "both")
    ]
    for row in rows:
        assert row.microseconds > 0
        assert row.bandwidth == pytest.approx(CASE.bytes_moved()[row.direction] / row.microseconds / 1e3)
        assert row.as_json()["of_copy"] == row.copy_microseconds / row.microseconds


def test_bytes_moved():
    case = cases.Case(cases.MHC_FORWARD_PRE, (8192,), 4, 4096)
    X = 8192 * 4 * 4096 * 2
    assert case.bytes_moved() == {"forward": 2.25 * X, "backward": 3.5 * X, "both": 5.75 * X}


def test_table():
    assert report.table(("a", "bb"), [("ccc", "d")]) == "a    bb\n---  --\nccc   d"


def test_progress_in_plain_lines(capsys):
    assert list(report.progress(["one", "two"], "work")) == ["one", "two"]
    assert capsys.readouterr().err == "work 1/2: one\nwork 2/2: two\n"


def test_progress_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert list(report.progress([("one", 1)], "work")) == [("one", 1)]
    assert "work ······························ 0/1  one 1" in capsys.readouterr().err
