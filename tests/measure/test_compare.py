"""compare: sees what is worse than noise, and nothing else."""

from dataclasses import replace

import pytest

from mhc_ops.measure import compare
from mhc_ops.measure.results import Measurement, NotMeasured, Results, StepTime
from mhc_ops.testing.accuracy import Row

TIMED = Measurement("op 8x8", "triton", "both", 200.0, 1.0, 100.0, peak_megabytes=50.0, spread=2.0, copy_spread=1.0)
SHORT = replace(TIMED, microseconds=4.0, copy_microseconds=4.0, spread=0.0, copy_spread=0.0)
LIGER = replace(TIMED, provider="Liger")
ROW = Row("op 8x8", "triton", "y", 1e-6, 2e-7, 1e-5, True, "float32", 10_000)
ONE = replace(ROW, elements=1, relative_error=1e-9)
STEP = StepTime("training_step 8x4x8", "triton", "eager", 60.0, 0.6, 20, [1.2, 1.194, 1.206], peak_megabytes=900.0)
FORM = replace(STEP, provider="triton recompute=4")
KINDS = {Measurement: "measurements", Row: "accuracy", StepTime: "steps"}


def of(*entries, **rest):
    return Results("bench", **({KINDS[type(entries[0])]: [*entries]} if entries else {}), **rest)


def scaled(us, copy=100.0):
    return {"microseconds": us, "spread": us / 100, "copy_microseconds": copy, "copy_spread": copy / 100}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (TIMED, scaled(196.0), []),
        (TIMED, scaled(208.0), []),  # 4 %, the noise of 3 · √(4 · 0.74 %²) is 4.4 %
        (TIMED, scaled(212.0), [("slower", True)]),
        (TIMED, scaled(424.0, copy=200.0), [("slower", True)]),  # another machine, twice as slow at everything
        (TIMED, scaled(400.0, copy=200.0), []),
        (TIMED, scaled(150.0), [("faster", False)]),
        (TIMED, {"microseconds": 212.0, "spread": 20.0}, []),  # noisy samples hide a change
        (SHORT, {"microseconds": 4.5}, []),  # short times are not known better than the clock
        (LIGER, {"microseconds": 400.0}, [("slower", False)]),  # other libraries are said, but count for nothing
        (replace(TIMED, spread=None), {"microseconds": 900.0, "spread": 2.0}, [("not compared", False)]),
        (TIMED, {"peak_megabytes": 50.3}, []),
        (TIMED, {"peak_megabytes": 52.0}, [("more memory", True)]),
        (ROW, {"relative_error": 3e-7}, []),
        (ROW, {"relative_error": 5e-7}, [("less exact", True)]),
        (ROW, {"relative_error": float("nan"), "passed": False}, [("fails", True)]),
        (ONE, {"relative_error": 3e-7}, []),  # the error of one number is luck
        (STEP, {"ratio": [1.22, 1.214, 1.226]}, []),  # 1.7 %, the noise of 3 · √2 · 0.74 % · ½ is 1.6 % and scatter
        (STEP, {"ratio": [1.28, 1.274, 1.286]}, [("slower", True)]),
        (STEP, {"milliseconds": 600.0, "spread": 6.0}, []),  # another machine, plain residuals as slow
        (STEP, {"ratio": [1.2]}, [("not compared", False)]),  # as older files have it
        (FORM, {"ratio": [1.28, 1.274, 1.286]}, [("slower", True)]),
    ],
)
def test_one_entry(before, after, expected):
    found, common = compare.compare(of(before), of(replace(before, **after)))
    assert common == 1
    assert [(change.kind, change.regression) for change in found] == expected


def test_what_runs_scatter_by_is_noise():
    """Thirty ratios that change by up to 10 % either way: 12 % in one of them is nothing, 80 % is. What all have in
    common is no noise."""
    before = [replace(TIMED, case=f"case {i}") for i in range(30)]
    after = [replace(m, microseconds=200.0 * (1 + 0.1 * (i % 3 - 1))) for i, m in enumerate(before)]

    def slower(after):
        return [change.key for change in compare.compare(of(*before), of(*after))[0] if change.regression]

    assert slower(after) == []
    assert slower([replace(after[0], microseconds=360.0), *after[1:]]) == [("case 0", "triton", "both")]
    assert len(slower([replace(m, microseconds=220.0) for m in before])) == 30


def failed(where):
    return of(not_measured=[NotMeasured(where, "triton", "RuntimeError: no", failed=True)])


COMPILED = replace(STEP, mode="torch.compile", in_a_row=[1.1, 1.1, 1.1])
MISSING = "missing: op 8x8 triton: only in the"
FAILS = "fails: torch.compile training_step 8x4x8 triton"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (TIMED, of(ROW), [f"{MISSING} first file: both", f"{MISSING} second file: y"]),
        (TIMED, failed("op 8x8"), ["fails: op 8x8 triton both: RuntimeError: no"]),
        (COMPILED, failed(COMPILED.case), [f"{FAILS} {kind}: RuntimeError: no" for kind in ("step", "steps in a row")]),
    ],
)
def test_what_only_one_file_has(before, after, said):
    found, common = compare.compare(of(before), after)
    assert common == 0
    assert [str(change) for change in found] == said
    assert all(change.regression == (change.kind == "fails") for change in found)
