"""The line through times at several sizes, and its noise."""

from dataclasses import replace

import pytest

from mhc_ops.measure import cases, speed

SWEEP = cases.Sweep("T", "D = 8", {T: f"op {T}" for T in (1, 2, 4, 8)})


def points(overhead=10.0, per_megabyte=2.0, spread=0.0, provider="triton", sizes=tuple(SWEEP.cases)):
    return [
        speed.Measurement(
            "op",
            f"op {T}",
            provider,
            "forward",
            overhead + per_megabyte * T,
            0.0,
            1.0 * T,
            bytes=T * 1e6,
            spread=spread * (overhead + per_megabyte * T),
            copy_spread=0.0,
        )
        for T in sizes
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
