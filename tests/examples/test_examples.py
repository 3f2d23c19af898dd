"""The examples of one process run as the README says; the study and the sweep have equal networks and data."""

import csv
import importlib.util
import json
import math
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import output_of

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import tiny_lm_study as study  # noqa: E402
import train_tiny_lm  # noqa: E402

DRAWN = importlib.util.find_spec("matplotlib") is not None
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS = 40
TINY = ("--D", 32, "--depth", 1, "--context", 16, "--batch", 8, "--steps", STEPS)
run = partial(output_of, sys.executable)


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
    small = ("--D", 32, "--depth", 2, "--tokens", 64, "--lr", 1e-3) if device == "cpu" else ()
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
    printed = run(EXAMPLES / "train_tiny_lm.py", *TINY, "--device", device, "--out", picture)
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
    assert picture.exists() == (tmp_path / "curves_health.png").exists() == DRAWN
    assert DRAWN or "pip install matplotlib" in printed


@pytest.fixture
def given(monkeypatch):
    return lambda *words: monkeypatch.setattr(sys, "argv", ["train_tiny_lm.py", *map(str, words)])


VOCABULARY = 60
STUDIED = ("--D", 32, "--depth", 2, "--context", 8, "--batch", 2, "--steps", 3)


def studied(given, out, *arguments):
    given(*STUDIED, *arguments, "--out", out)
    assert train_tiny_lm.main() == 0
    assert out.exists() == DRAWN
    return read(out.with_suffix(".csv"))


def options(given, *arguments):
    given("--study", *arguments)
    return train_tiny_lm.parse()


@pytest.mark.parametrize("device", DEVICES)
def test_study(device, tmp_path, given, capsys):
    """A seed gives the same numbers whatever was trained before it."""
    arguments = ("--study", "--device", device)
    rows = studied(given, tmp_path / "both.png", *arguments, "--seeds", 2)
    assert [row["form"] for row in rows[::4]] == [*study.FORMS] * 2
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3] * 8
    for row in rows:
        assert math.isfinite(float(row["val"]))
        assert (row["gradient"] == "") == (row["step"] == "0")
        if row["step"] != "3":
            gains = [float(row[gain]) for gain in ("gain_forward", "gain_backward")]
            assert float(row["activation"]) > 0 and (row["form"] != "plain" or gains == [1, 1])
            assert row["form"] == "HC-like" or all(0.9 < gain < 1.1 for gain in gains)
    fresh = {row["form"]: float(row["val"]) for row in rows[:16] if row["step"] == "0"}
    assert math.isclose(fresh["HC-like"], fresh["mHC"], rel_tol=1e-6 if device == "cpu" else 2**-8)
    forms = json.loads((tmp_path / "both.json").read_text())["forms"]
    assert all(each["MB"] > 0 and each["ms per step"] > 0 and each["least"] <= each["most"] for each in forms)
    printed = capsys.readouterr().out
    assert all(f"{each['form']} " in printed and f"{each['parameters']:,}" in printed for each in forms)
    if device == "cpu":
        assert studied(given, tmp_path / "one.png", *arguments, "--seed", 1, "--seeds", 1) == rows[16:]


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("n", [2, 4])
def test_equally_many_parameters(on_cpu, n, given):
    """Within half a step of the MLPs' width, and within 1 %."""
    sizes = train_tiny_lm.chosen("study", on_cpu)
    found = options(given, "--n", n, *(word for name, size in sizes.items() for word in (f"--{name}", size)))
    found.device = "meta"
    with torch.device("meta"):
        widths = [study.equal_width(form, VOCABULARY, found) for form in study.FORMS]
        networks = [study.network(form, VOCABULARY, found, w) for form, w in zip(study.FORMS, widths)]
    counts = dict(zip(study.FORMS, map(study.parameters_of, networks)))
    assert counts["HC-like"] == counts["mHC"] and widths[2] == 4 * found.D
    for count in counts.values():
        assert abs(count - counts["mHC"]) <= min(4 * found.depth * (2 * found.D + 1), counts["mHC"] / 100)


def test_unconstrained_maps_are_what_mixes_the_streams():
    """With a layer that returns 0, x_next is the product of the maps that the gain is measured of."""
    torch.manual_seed(0)
    connection, watch = study.Unconstrained(torch.zeros_like, 3, 32, layer_norm=True), study.Watched()
    x = torch.randn(5, 3, 32)
    assert torch.equal(connection(x), x)
    torch.nn.init.normal_(connection.phi)
    connection.register_forward_hook(watch.see)
    torch.testing.assert_close(connection(x), watch.product @ x)
    rows, columns = (watch.product.abs().sum(dim).amax(-1).mean().item() for dim in (-1, -2))
    found = watch.result()
    assert (found["gain_forward"], found["gain_backward"]) == (rows, columns) and rows != columns


def test_sweep(tmp_path, given):
    rows = studied(given, tmp_path / "sweep.png", "--sweep", "--depth", 1, "--seeds", 1)
    assert len(rows) == len(study.SETTINGS) == len({(row["rate"], row["decay"], row["decayed"]) for row in rows})
    assert all(math.isfinite(float(row["val"])) for row in rows)


def decays(optimizer):
    return {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}


@pytest.mark.parametrize("decayed", ["all", "phi alpha bias", "alpha", "layer_norm_weight"])
def test_a_setting_decays_what_it_names(decayed, given):
    model = study.network("mHC", VOCABULARY, options(given, *STUDIED))
    found = decays(study.Setting(rate=0.5, decay=3.0, decayed=decayed).optimizer(model, 0.01))
    plain = decays(study.optimizer_of(model, 0.01))
    maps = {id(p) for m in (*model.layers, model.head) for p in m.parameters(recurse=False)}
    for name, p in model.named_parameters():
        decay = 3.0 if decayed == "all" or name.rpartition(".")[2] in decayed.split() else 0.0
        assert found[id(p)] == ((0.005, decay) if id(p) in maps else plain[id(p)]), name
