"""compare: sees what is worse than noise, and nothing else."""

from dataclasses import replace

import pytest

from mhc_ops.measure import compare
from mhc_ops.measure.results import NotMeasured, Results
from mhc_ops.measure.speed import Measurement, StepTime
from mhc_ops.testing.accuracy import Row

TIMED = Measurement(
    "op", "op 8x8", "triton", "both", 200.0, 1.0, 100.0, peak_megabytes=50.0, spread=2.0, copy_spread=1.0, samples=20
)
ROW = Row("op 8x8", "triton", "y", 1e-6, 2e-7, 1e-5, True, "float32", 10_000)


def changes(after, before=TIMED, **rest):
    kinds = {Measurement: "measurements", Row: "accuracy"}
    files = [Results("bench", **{kinds[type(entry)]: [entry]}) for entry in (before, after)]
    found, common = compare.compare(files[0], replace(files[1], **rest))
    assert common == 1
    return [(change.kind, change.regression) for change in found]


@pytest.mark.parametrize(
    ("microseconds", "copy", "expected"),
    [
        (200.0, 100.0, []),
        (208.0, 100.0, []),  # 4 %, the noise of 3 · √(4 · 0.74 %²) is 4.4 %
        (212.0, 100.0, [("slower", True)]),
        (424.0, 200.0, [("slower", True)]),  # another machine, twice as slow at everything
        (400.0, 200.0, []),
        (150.0, 100.0, [("faster", False)]),
    ],
)
def test_times_are_ratios_to_the_copy(microseconds, copy, expected):
    scaled = replace(TIMED, microseconds=microseconds, copy_microseconds=copy)
    assert changes(replace(scaled, spread=microseconds / 100, copy_spread=copy / 100)) == expected


SHORT = replace(TIMED, microseconds=4.0, copy_microseconds=4.0, spread=0.0, copy_spread=0.0)
LIGER, ONE = replace(TIMED, provider="Liger"), replace(ROW, elements=1, relative_error=1e-9)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (TIMED, {"microseconds": 212.0, "spread": 20.0}, []),  # noisy samples hide a change
        (SHORT, {"microseconds": 4.5}, []),  # short times are not known better than the clock
        (SHORT, {"microseconds": 6.0}, [("slower", True)]),
        (LIGER, {"microseconds": 400.0}, [("slower", False)]),  # other libraries are said, but count for nothing
        (replace(TIMED, spread=None), {"microseconds": 900.0, "spread": 2.0}, [("not compared", False)]),
        (TIMED, {"peak_megabytes": 50.3}, []),
        (TIMED, {"peak_megabytes": 52.0}, [("more memory", True)]),
        (TIMED, {"peak_megabytes": 40.0}, [("less memory", False)]),
        (ROW, {"relative_error": 3e-7}, []),
        (ROW, {"relative_error": 5e-7}, [("less exact", True)]),
        (ROW, {"relative_error": 5e-5, "passed": False}, [("fails", True)]),
        (ROW, {"relative_error": float("nan"), "passed": False}, [("fails", True)]),
        (ROW, {"relative_error": 6e-8}, [("more exact", False)]),
        (ONE, {"relative_error": 3e-7}, []),  # the error of one number is luck
        (ONE, {"relative_error": 3e-6}, [("less exact", True)]),
    ],
)
def test_one_entry(before, after, expected):
    assert changes(replace(before, **after), before) == expected


def test_what_runs_scatter_by_is_noise():
    """Thirty ratios that change by up to 10 % either way: 12 % in one of them is nothing, 80 % is."""
    before = [replace(TIMED, case=f"case {i}") for i in range(30)]
    after = [replace(m, microseconds=200.0 * (1 + 0.1 * (i % 3 - 1))) for i, m in enumerate(before)]
    worse = [replace(after[0], microseconds=360.0), *after[1:]]

    def slower(after):
        found, _ = compare.compare(Results("bench", measurements=before), Results("bench", measurements=after))
        return [change.key for change in found if change.regression]

    assert slower(after) == []
    assert slower(worse) == [("case 0", "triton", "both")]


def test_what_all_have_in_common_is_no_noise():
    before = [replace(TIMED, case=f"case {i}") for i in range(30)]
    after = [replace(m, microseconds=220.0) for m in before]
    found, _ = compare.compare(Results("bench", measurements=before), Results("bench", measurements=after))
    assert sum(change.regression for change in found) == 30


def test_missing_rows_are_said():
    found, common = compare.compare(Results("bench", measurements=[TIMED]), Results("check", accuracy=[ROW]))
    assert common == 0
    assert [str(change) for change in found] == [
        "missing: op 8x8 triton: only in the first file: both",
        "missing: op 8x8 triton: only in the second file: y",
    ]


def test_a_kernel_that_no_longer_runs():
    after = Results("bench", not_measured=[NotMeasured("op 8x8", "triton", "RuntimeError: no", failed=True)])
    (change,), _ = compare.compare(Results("bench", measurements=[TIMED]), after)
    assert change.regression
    assert str(change) == "fails: op 8x8 triton both: RuntimeError: no"


STEP = StepTime("training_step 8x4x8", "triton", "eager", 60.0, 0.6, 20, [1.2, 1.194, 1.206], [1.1, 1.1, 1.1])
STEP = replace(STEP, peak_megabytes=900.0)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (STEP, []),
        (replace(STEP, ratio=[1.22, 1.214, 1.226]), []),  # 1.7 %, the noise of 3 · √2 · 0.74 % · ½ is 1.6 % and scatter
        (replace(STEP, ratio=[1.28, 1.274, 1.286]), ["slower"]),
        (replace(STEP, milliseconds=600.0, spread=6.0), []),  # another machine, plain residuals as slow
        (replace(STEP, ratio=[1.1, 1.094, 1.106]), ["faster"]),
        (replace(STEP, ratio=[1.2]), ["not compared"]),  # as older files have it
        (replace(STEP, peak_megabytes=950.0), ["more memory"]),
    ],
)
def test_training_steps_are_ratios_to_plain_residuals(after, expected):
    files = [Results("bench", steps=[replace(step, in_a_row=[])]) for step in (STEP, after)]
    found, common = compare.compare(*files)
    assert common == 1
    assert [change.kind for change in found] == expected
    assert [change.key for change in found] == [("training_step 8x4x8", "triton", "step")] * len(expected)
    assert all(change.regression for change in found if change.kind in ("slower", "more memory"))


def test_a_training_step_that_no_longer_runs():
    failed = NotMeasured("torch.compile training_step 8x4x8", "triton", "RuntimeError: no", failed=True)
    before = Results("bench", steps=[replace(STEP, mode="torch.compile")])
    of_step, in_a_row = compare.compare(before, Results("bench", not_measured=[failed]))[0]
    assert of_step.regression
    assert str(of_step) == "fails: torch.compile training_step 8x4x8 triton step: RuntimeError: no"
    assert str(in_a_row) == "fails: torch.compile training_step 8x4x8 triton steps in a row: RuntimeError: no"
