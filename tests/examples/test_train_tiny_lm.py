"""The language model of the examples trains, with plain residuals and with mHC."""

import csv
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_tiny_lm.py"
STEPS = 40
TINY = ("--D", 32, "--depth", 1, "--context", 16, "--batch", 8, "--steps", STEPS)


def run(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads would wait for each other beside parallel tests
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment)


def assert_trains(folder, device, rounding):
    """The script ends well; both networks start equal and learn; the curves and the picture are written."""
    picture = folder / "curves.png"
    done = run(SCRIPT, *TINY, "--device", device, "--out", picture)
    assert done.returncode == 0, done.stderr
    assert "Elizabeth " in done.stdout
    with picture.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    plain, mhc = ([row for row in rows if row["network"] == name] for name in ("plain", "mHC"))
    assert math.isclose(float(plain[0]["val"]), float(mhc[0]["val"]), rel_tol=rounding)
    for curve in (plain, mhc):
        assert int(curve[-1]["step"]) == STEPS
        assert float(curve[-1]["val"]) < float(curve[0]["val"]) - 1
        assert float(curve[-1]["train"]) < float(curve[1]["train"]) - 1
    for row in mhc:
        assert max(float(row["rows"]), float(row["columns"])) < 0.1
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert picture.exists() == drawn
    assert drawn or "pip install matplotlib" in done.stdout


def test_train_tiny_lm(tmp_path):
    assert_trains(tmp_path, "cpu", rounding=1e-6)


@pytest.mark.gpu
def test_train_tiny_lm_on_a_gpu(tmp_path):
    assert_trains(tmp_path, "cuda", rounding=2**-8)


def test_train_tiny_lm_names_a_bad_width(tmp_path):
    done = run(SCRIPT, "--D", 40, "--out", tmp_path / "curves.png")
    assert done.returncode == 2
    assert "--D must be a multiple of 32" in done.stderr
