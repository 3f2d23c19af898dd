"""train_tiny_lm.py --study and --sweep: equal networks, equal data, and measurements that mean what they say."""

import csv
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

import mhc_ops

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import tiny_lm_study as example
import train_tiny_lm

VOCABULARY = 60
TINY = ("--D", 32, "--depth", 2, "--context", 8, "--batch", 2, "--steps", 3)


def run(monkeypatch, out, *arguments):
    """The rows that are written as CSV."""
    monkeypatch.setattr(sys, "argv", ["train_tiny_lm.py", *map(str, (*arguments, "--out", out))])
    assert train_tiny_lm.main() == 0
    assert out.exists() == (importlib.util.find_spec("matplotlib") is not None)
    with out.with_suffix(".csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def options(monkeypatch):
    def parsed(*arguments):
        monkeypatch.setattr(sys, "argv", ["train_tiny_lm.py", "--study", *map(str, arguments)])
        return train_tiny_lm.parse()

    return parsed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_study(device, tmp_path, monkeypatch, capsys):
    """A seed gives the same numbers whatever was trained before it."""
    arguments = ("--study", *TINY, "--device", device)
    rows = run(monkeypatch, tmp_path / "both.png", *arguments, "--seeds", 2)
    assert [row["form"] for row in rows[::4]] == [*example.FORMS] * 2
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
        assert run(monkeypatch, tmp_path / "one.png", *arguments, "--seed", 1, "--seeds", 1) == rows[16:]


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("n", [2, 4])
def test_equally_many_parameters(on_cpu, n, options):
    """Within half a step of the MLPs' width, and within 1 %."""
    sizes = train_tiny_lm.chosen("study", on_cpu)
    found = options("--n", n, *(word for name, size in sizes.items() for word in (f"--{name}", size)))
    found.device = "meta"
    with torch.device("meta"):
        widths = [example.equal_width(form, VOCABULARY, found) for form in example.FORMS]
        networks = [example.network(form, VOCABULARY, found, w) for form, w in zip(example.FORMS, widths)]
    counts = dict(zip(example.FORMS, map(example.parameters_of, networks)))
    assert counts["HC-like"] == counts["mHC"] and widths[2] == 4 * found.D
    for count in counts.values():
        assert abs(count - counts["mHC"]) <= min(4 * found.depth * (2 * found.D + 1), counts["mHC"] / 100)


def test_gains_are_those_of_metrics(options):
    torch.manual_seed(0)
    model, by_hand = example.network("mHC", VOCABULARY, options(*TINY)), example.Watched()
    with torch.no_grad():
        for connection in model.layers:
            connection.phi += torch.randn_like(connection.phi)
            connection.bias += torch.randn_like(connection.bias)

    def multiply(connection, inputs, carry):
        by_hand.multiply(mhc_ops.mhc_maps(carry.x, connection.phi, connection.alpha, connection.bias)[2].mT)

    for connection in model.layers:
        connection.register_forward_hook(multiply)
    with example.watched(model) as found, torch.no_grad():
        model(torch.randint(VOCABULARY, (2, 8)))
    by_hand.largest = found.largest
    expected, result = found.result(), by_hand.result()
    assert expected["gain_backward"] > 1.0001  # rows are off, columns are not
    for name, value in expected.items():
        assert math.isclose(result[name], value, rel_tol=1e-5), name


def test_unconstrained_maps_are_what_mixes_the_streams(options):
    """With a layer that returns 0, x_next is the product of the maps that the gain is measured of."""
    torch.manual_seed(0)
    connection, watch = example.Unconstrained(torch.zeros_like, 3, 32, layer_norm=True), example.Watched()
    x = torch.randn(5, 3, 32)
    assert torch.equal(connection(x), x)
    torch.nn.init.normal_(connection.phi)
    connection.register_forward_hook(watch.see)
    torch.testing.assert_close(connection(x), watch.product @ x)
    assert (watch.product.sum(-1) - 1).abs().amax() > 0.01


def test_sweep(tmp_path, monkeypatch):
    rows = run(monkeypatch, tmp_path / "sweep.png", "--sweep", *TINY, "--depth", 1, "--seeds", 1)
    assert len(rows) == len(example.SETTINGS) == len({(row["rate"], row["decay"], row["decayed"]) for row in rows})
    assert all(math.isfinite(float(row["val"])) for row in rows)


@pytest.mark.parametrize("decayed", ["all", "phi alpha bias", "alpha", "layer_norm_weight"])
def test_a_setting_decays_what_it_names(decayed, options):
    model = example.network("mHC", VOCABULARY, options(*TINY))
    optimizer = example.Setting(rate=0.5, decay=3.0, decayed=decayed).optimizer(model, 0.01)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    plain = {
        id(p): (g["lr"], g["weight_decay"]) for g in example.optimizer_of(model, 0.01).param_groups for p in g["params"]
    }
    maps = {id(p) for m in (*model.layers, model.head) for p in m.parameters(recurse=False)}
    for name, p in model.named_parameters():
        decay = 3.0 if decayed == "all" or name.rpartition(".")[2] in decayed.split() else 0.0
        assert found[id(p)] == ((0.005, decay) if id(p) in maps else plain[id(p)]), name
