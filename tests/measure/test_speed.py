"""Timings: medians, spreads, and the bytes that an op moves."""

import time
from functools import partial

import pytest
import torch

from mhc_ops.measure import cases, report, speed

CPU = torch.device("cpu")
CASE = cases.Case(cases.MHC_FORWARD_PRE, (16,), 2, 8, torch.float32)


def test_measures_forward_and_backward():
    call = partial(CASE.subject.call, backend="reference")
    errors = {"forward": 0.1, "backward": 0.2}
    rows = list(speed.measure(CASE, "eager", CASE.inputs(), call, speed.Copies(CPU), CPU, "decode", errors))
    assert [row.direction for row in rows] == ["forward", "backward", "both"]
    assert [row.error for row in rows] == [0.1, 0.2, None]
    for row in rows:
        assert row.microseconds > 0
        assert row.spread >= 0
        assert row.samples == speed.SAMPLES
        assert row.group == "decode"
        assert row.bytes == CASE.bytes_moved()[row.direction]
        assert row.bandwidth == pytest.approx(row.bytes / row.microseconds / 1e3)
        assert row.of_copy == row.copy_microseconds / row.microseconds


def test_few_samples_when_time_is_up():
    timing = speed.device_time(lambda: None, CPU, until=time.perf_counter())
    assert timing.samples == speed.FEWEST_SAMPLES


def test_median_and_quartiles(monkeypatch):
    samples = iter([9.0, 9.0, 9.0, 5.0, 1.0, 4.0, 2.0, 3.0])  # the first three warm up
    monkeypatch.setattr(speed, "_host_sample", lambda *arguments: next(samples))
    assert speed.device_time(lambda: None, CPU, until=0) == speed.Timing(3.0, 2.0, 5)


def test_a_copy_is_measured_once():
    copies = speed.Copies(CPU)
    assert copies(1000) is copies(1001)
    assert copies(1000) is not copies(2000)


def test_bytes_moved():
    case = cases.Case(cases.MHC_FORWARD_PRE, (8192,), 4, 4096)
    X = 8192 * 4 * 4096 * 2
    assert case.bytes_moved() == {"forward": 2.25 * X, "backward": 3.5 * X, "both": 5.75 * X}


def test_table():
    assert report.table(("a", "bb"), [("ccc", "d")]) == "a    bb\n---  --\nccc   d"


def test_progress_in_plain_lines(capsys):
    assert list(report.progress(["one", "two"], "work")) == ["one", "two"]
    assert capsys.readouterr().err == "work 1/2: one\nwork 2/2: two\n"
