"""Timings: medians, spreads, the bytes that an op moves."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from mhc_ops.measure import report, speed
from mhc_ops.testing import cases

CPU = torch.device("cpu")
CASE = cases.Case(cases.MHC_FORWARD_PRE, (16,), 2, 8, torch.float32)


def test_measures_forward_and_backward():
    call = partial(CASE.subject.call, backend="reference")
    rows = list(speed.measure(speed.Unit(CASE, "eager", "decode"), CASE.inputs(), call, CPU))
    assert [row.direction for row in rows] == ["forward", "backward", "both"]
    for row in rows:
        assert row.microseconds > 0
        assert row.spread >= 0
        assert row.samples == speed.SAMPLES
        assert row.group == "decode"
        assert row.bytes == CASE.bytes_moved()[row.direction]
        assert row.bandwidth == pytest.approx(row.bytes / row.microseconds / 1e3)
        assert row.of_copy == row.copy_microseconds / row.microseconds


def test_a_boundary_is_the_difference_of_two_stacks(monkeypatch):
    """By the eight boundaries that the longer one has more; of time, host time, memory and spread."""
    one = speed.Measurement("s", "c", "p", "forward", 0.0, 0.0, 3.0, bytes=4e6, samples=20)
    of = {
        12: replace(one, microseconds=130.0, bandwidth=30.0, spread=6.0, host_microseconds=50.0, peak_megabytes=900.0),
        4: replace(one, microseconds=50.0, spread=8.0, host_microseconds=18.0, peak_megabytes=500.0),
    }

    class Stack(torch.nn.Linear):
        """Its parameters are among what is differentiated."""

        def __init__(self, depth):
            super().__init__(1, 1)
            self.depth = depth

        def forward(self, x):
            return self.depth

    def rows(unit, tensors, call, device, parameters):
        assert len(parameters) == 2
        return [of[call(0)[0]]]

    monkeypatch.setattr(speed, "measure", rows)
    (found,) = speed.measure_stack(speed.Unit(CASE, "p", "training"), {}, Stack, CPU)
    assert (found.microseconds, found.spread, found.host_microseconds, found.peak_megabytes) == (10.0, 1.25, 4.0, 50.0)
    assert found.bandwidth == 390.0
    assert found.of_copy == 0.3
    of[4] = replace(of[4], microseconds=130.0)
    with pytest.raises(RuntimeError, match="noise"):
        list(speed.measure_stack(speed.Unit(CASE, "p", "training"), {}, Stack, CPU))


def test_median_and_quartiles(monkeypatch):
    samples = iter([9.0, 9.0, 9.0, 5.0, 1.0, 4.0, 2.0, 3.0])  # the first three warm up
    monkeypatch.setattr(speed, "_host_sample", lambda *arguments: next(samples))
    monkeypatch.setattr(speed, "SAMPLES", 5)
    assert speed.device_time(lambda: None, CPU) == speed.Timing(3.0, 2.0, 5)


def test_a_copy_is_measured_once():
    assert speed.copy_time(1000, CPU) is speed.copy_time(1000, CPU)
    assert speed.copy_time(1000, CPU) is not speed.copy_time(2000, CPU)


def test_bytes_moved():
    case = cases.Case(cases.MHC_FORWARD_PRE, (8192,), 4, 4096)
    X = 8192 * 4 * 4096 * 2
    assert case.bytes_moved() == {"forward": 2.25 * X, "backward": 3.5 * X, "both": 5.75 * X}


def test_table():
    assert report.table(("a", "bb"), [("ccc", "d")]) == "a    bb\n---  --\nccc   d"


def test_progress_in_plain_lines(capsys):
    assert list(report.progress(["one", "two"], "work")) == ["one", "two"]
    assert capsys.readouterr().err == "work 1/2: one\nwork 2/2: two\n"
