"""The language model of the examples trains, with plain residuals and with mHC."""

import csv
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mhc_ops

SCRIPT = Path(__file__).parents[2] / "examples" / "train_tiny_lm.py"
STEPS = 40
TINY = ("--D", 32, "--depth", 1, "--context", 16, "--batch", 8, "--steps", STEPS)


def run(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads would wait for each other beside parallel tests
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def assert_trains(folder, device, rounding):
    """The script ends well; both networks start equal and learn; the curves and the picture are written."""
    picture = folder / "curves.png"
    done = run(SCRIPT, *TINY, "--device", device, "--out", picture)
    assert done.returncode == 0, done.stderr
    assert "Elizabeth " in done.stdout
    rows, health = (read(folder / name) for name in ("curves.csv", "curves_health.csv"))
    plain, mhc = ([row for row in rows if row["network"] == name] for name in ("plain", "mHC"))
    assert math.isclose(float(plain[0]["val"]), float(mhc[0]["val"]), rel_tol=rounding)
    for curve in (plain, mhc):
        assert int(curve[-1]["step"]) == STEPS
        assert float(curve[-1]["val"]) < float(curve[0]["val"]) - 1
        assert float(curve[-1]["train"]) < float(curve[1]["train"]) - 1
    # The step that follows each evaluation but the last.
    assert [row["step"] for row in health] == [row["step"] for row in mhc[:-1]]
    for row in health:
        assert max(float(value) for name, value in row.items() if name.endswith("error")) < 0.1
        assert min(float(value) for name, value in row.items() if name.endswith("dphi_norm")) > 0
        assert all(0.9 < float(row[gain]) < 1.1 for gain in ("gain_forward", "gain_backward"))
    drawn = importlib.util.find_spec("matplotlib") is not None
    assert picture.exists() == (folder / "curves_health.png").exists() == drawn
    assert drawn or "pip install matplotlib" in done.stdout


def test_train_tiny_lm(tmp_path):
    assert_trains(tmp_path, "cpu", rounding=1e-6)


@pytest.mark.gpu
def test_train_tiny_lm_on_a_gpu(tmp_path):
    assert_trains(tmp_path, "cuda", rounding=2**-8)


def test_the_stack_is_its_layers_apart():
    """With the norm in front of each, and maps and weights that are no longer fresh."""
    spec = importlib.util.spec_from_file_location("train_tiny_lm", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.manual_seed(0)
    model, ids = script.TinyLM(vocabulary=11, context=8, D=32, depth=2, n=3), torch.randint(11, (2, 8))
    with torch.no_grad():
        for connection in model.layers:
            for parameter in connection.parameters(recurse=False):
                parameter += 0.1 * torch.randn_like(parameter)
    x = model.start(ids)
    for connection in model.layers:
        maps, weight = (connection.phi, connection.alpha, connection.bias), connection.layer_norm_weight
        normed = lambda h_in: connection.layer(F.rms_norm(h_in, (32,), weight, 1e-6))  # noqa: B023, E731
        x = mhc_ops.mhc_layer(x, normed, *maps)
    torch.testing.assert_close(model(ids), model.logits(model.norm(model.head(x))))


def test_train_tiny_lm_names_a_bad_width(tmp_path):
    done = run(SCRIPT, "--D", 40, "--out", tmp_path / "curves.png")
    assert done.returncode == 2
    assert "--D must be a multiple of 32" in done.stderr
