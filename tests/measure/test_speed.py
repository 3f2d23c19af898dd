"""Timings: medians, spreads, the bytes that an op moves, and the line through times at several sizes."""

import time
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
    errors = {"forward": 0.1, "backward": 0.2}
    rows = list(speed.measure(speed.Unit(CASE, "eager", "decode"), CASE.inputs(), call, CPU, errors))
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

    def rows(unit, tensors, call, *more, parameters):
        assert len(parameters) == 2
        return [of[call(0)[0]]]

    monkeypatch.setattr(speed, "measure", rows)
    (found,) = speed.measure_stack(speed.Unit(CASE, "p", "training"), {}, Stack)
    assert (found.microseconds, found.spread, found.host_microseconds, found.peak_megabytes) == (10.0, 1.25, 4.0, 50.0)
    assert found.bandwidth == 390.0
    assert found.of_copy == 0.3
    of[4] = replace(of[4], microseconds=130.0)
    with pytest.raises(RuntimeError, match="noise"):
        list(speed.measure_stack(speed.Unit(CASE, "p", "training"), {}, Stack))


def test_few_samples_when_time_is_up():
    timing = speed.device_time(lambda: None, CPU, until=time.perf_counter())
    assert timing.samples == speed.FEWEST_SAMPLES


def test_median_and_quartiles(monkeypatch):
    samples = iter([9.0, 9.0, 9.0, 5.0, 1.0, 4.0, 2.0, 3.0])  # the first three warm up
    monkeypatch.setattr(speed, "_host_sample", lambda *arguments: next(samples))
    assert speed.device_time(lambda: None, CPU, until=0) == speed.Timing(3.0, 2.0, 5)


def test_a_copy_is_measured_once():
    assert speed.copy_time(1000, CPU) is speed.copy_time(1000, CPU)
    assert speed.copy_time(1000, CPU) is not speed.copy_time(2000, CPU)


def test_bytes_moved():
    case = cases.Case(cases.MHC_FORWARD_PRE, (8192,), 4, 4096)
    X = 8192 * 4 * 4096 * 2
    assert case.bytes_moved() == {"forward": 2.25 * X, "backward": 3.5 * X, "both": 5.75 * X}


SWEEP = cases.Sweep("T", "D = 8", {T: f"op {T}" for T in (1, 2, 4, 8)})


def points(overhead=10.0, per_megabyte=2.0, spread=0.0, provider="triton", sizes=tuple(SWEEP.cases)):
    one = speed.Measurement("op", "", provider, "forward", 0.0, 0.0, 0.0, copy_spread=0.0)
    times = {T: overhead + per_megabyte * T for T in sizes}
    return [
        replace(one, case=f"op {T}", microseconds=time, copy_microseconds=1.0 * T, bytes=T * 1e6, spread=spread * time)
        for T, time in times.items()
    ]


def test_overhead_and_cost_per_byte():
    (growth,) = speed.fit([SWEEP], points())
    assert growth.overhead == pytest.approx(10)
    assert growth.per_megabyte == pytest.approx(2)
    assert growth.over_copy == pytest.approx(2)
    assert growth.sizes == [1, 2, 4, 8]
    assert growth.cases[0] == "op 1"


def test_one_bad_point_does_not_turn_the_line():
    bad = points(0)
    bad[-1] = replace(bad[-1], microseconds=32.0)  # twice what it should be
    (growth,) = speed.fit([SWEEP], bad)
    assert 2 < growth.per_megabyte < 3


def test_noise_follows_from_the_samples():
    noises = [speed.fit([SWEEP], points(1000, 200, spread))[0].noise for spread in (0.0, 0.1, 0.2)]
    assert noises[0] < noises[1] < noises[2]
    assert 0.05 < noises[1] < 0.2


def test_two_points_are_no_line():
    assert speed.fit([SWEEP], points(sizes=(1, 8))) == []
    growths = speed.fit([SWEEP], points() + points(provider="hip", sizes=(1, 2, 8)))
    assert [(g.provider, len(g.sizes)) for g in growths] == [("triton", 4), ("hip", 3)]


def test_table():
    assert report.table(("a", "bb"), [("ccc", "d")]) == "a    bb\n---  --\nccc   d"


def test_progress_in_plain_lines(capsys):
    assert list(report.progress(["one", "two"], "work")) == ["one", "two"]
    assert capsys.readouterr().err == "work 1/2: one\nwork 2/2: two\n"
