"""The examples of one process run as the README says; the language model trains with plain residuals and with mHC."""

import csv
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import mhc_ops

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import tiny_lm  # noqa: E402
import train_tiny_lm  # noqa: E402

SCRIPT = EXAMPLES / "train_tiny_lm.py"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS = 40
TINY = ("--D", 32, "--depth", 1, "--context", 16, "--batch", 8, "--steps", STEPS)


def run(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads would wait for each other beside parallel tests
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("device", DEVICES)
def test_train_block(device):
    small = ("--D", 64, "--tokens", 128) if device == "cpu" else ()
    assert "step   99" in run(EXAMPLES / "train_block.py", "--device", device, *small, "--steps", 100)


def test_upcycle():
    """It exits with 0 where the loss stays the same, and falls after that."""
    printed = run(EXAMPLES / "upcycle.py", "--steps", 15)
    assert float(re.search(r"differ by at most (\S+)", printed)[1]) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["graphs", "step", pytest.param("reduce-overhead", marks=pytest.mark.thorough)])
def test_small_model(device, mode):
    """On a CPU it says that graphs need a GPU, and trains all the same."""
    small = ("--D", 32, "--depth", 2, "--tokens", 64) if device == "cpu" else ()
    printed = run(EXAMPLES / "small_model.py", "--mode", mode, "--device", device, *small, "--steps", 20)
    assert (f"--mode {mode} uses CUDA graphs, which need a GPU" in printed) == (device == "cpu")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < 0.9 * losses[0]


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("device", DEVICES)
def test_train_tiny_lm(device, tmp_path):
    """Both networks start equal and learn; the curves and the picture are written."""
    picture = tmp_path / "curves.png"
    printed = run(SCRIPT, *TINY, "--device", device, "--out", picture)
    assert "Elizabeth " in printed
    rows, health = (read(tmp_path / name) for name in ("curves.csv", "curves_health.csv"))
    plain, mhc = ([row for row in rows if row["network"] == name] for name in ("plain", "mHC"))
    assert math.isclose(float(plain[0]["val"]), float(mhc[0]["val"]), rel_tol=1e-6 if device == "cpu" else 2**-8)
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
    assert picture.exists() == (tmp_path / "curves_health.png").exists() == drawn
    assert drawn or "pip install matplotlib" in printed


def test_the_stack_is_its_layers_apart():
    """With the norm before each, and maps and weights that are no longer fresh."""
    torch.manual_seed(0)
    model, ids = tiny_lm.TinyLM(vocabulary=11, context=8, D=32, depth=2, n=3), torch.randint(11, (2, 8))
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


def test_train_tiny_lm_names_a_bad_width(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_tiny_lm.py", "--D", "40"])
    with pytest.raises(SystemExit, match="2"):
        train_tiny_lm.main()
    assert "--D must be a multiple of 32" in capsys.readouterr().err
