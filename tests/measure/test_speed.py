"""Timings: medians, spreads, the bytes that an op moves."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from mhc_ops.measure import speed
from mhc_ops.measure.results import Measurement
from mhc_ops.testing import cases

CPU = torch.device("cpu")
CASE = cases.Case(cases.MHC_FORWARD_PRE, (16,), 2, 8, torch.float32)


def test_measures_forward_and_backward():
    call = partial(CASE.subject.call, backend="reference")
    rows = list(speed.measure(speed.Unit(CASE, "eager", "decode"), CASE.inputs(), call, CPU))
    assert [row.direction for row in rows] == ["forward", "backward", "both"]
    for row in rows:
        assert row.microseconds > 0 and row.spread >= 0
        assert (row.samples, row.group) == (speed.SAMPLES, "decode")
        assert row.bytes == CASE.bytes_moved()[row.direction]
        assert row.bandwidth == pytest.approx(row.bytes / row.microseconds / 1e3)
        assert row.of_copy == row.copy_microseconds / row.microseconds


def test_a_boundary_is_the_difference_of_two_stacks(monkeypatch):
    """By the eight boundaries that the longer one has more; of time, host time, memory and spread."""
    few = Measurement("c", "p", "forward", 50.0, 4e6, 3.0, 18.0, 500.0, spread=8.0, samples=20)
    many = replace(few, microseconds=130.0, spread=6.0, host_microseconds=50.0, peak_megabytes=900.0)
    of = {12: many, 4: few}

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
    assert (found.bandwidth, found.of_copy) == (400.0, 0.3)
    of[4] = replace(few, microseconds=130.0)
    with pytest.raises(RuntimeError, match="noise"):
        list(speed.measure_stack(speed.Unit(CASE, "p", "training"), {}, Stack, CPU))


def test_median_and_quartiles(monkeypatch):
    samples = iter([9.0, 9.0, 9.0, 5.0, 1.0, 4.0, 2.0, 3.0])  # the first three warm up
    monkeypatch.setattr(speed, "_host_sample", lambda *arguments: next(samples))
    monkeypatch.setattr(speed, "SAMPLES", 5)
    assert speed.device_time(lambda: None, CPU) == speed.Timing(3.0, 2.0, 5)


def test_bytes_moved():
    case = cases.Case(cases.MHC_FORWARD_PRE, (8192,), 4, 4096)
    X = 8192 * 4 * 4096 * 2
    assert case.bytes_moved() == {"forward": 2.25 * X, "backward": 3.5 * X, "both": 5.75 * X}
