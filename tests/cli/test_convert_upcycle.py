"""mhc-ops convert --upcycle: a plain checkpoint in files, with the maps of a fresh model."""

import json

import pytest
import torch
from convert_files import INDEX, D, N, refused

from mhc_ops import HyperConnection, HyperHead, cli, convert

NAMES = {"a.{i}": "b.{i+1}", "norm": "out_norm"}
WORDS = [f"{old}={new}" for old, new in NAMES.items()]


@pytest.fixture
def given(tmp_path, safetensors):
    """Paths of a plain checkpoint, in a file and in shards, and of a fresh model; and what upcycle makes of them"""
    torch.manual_seed(0)
    state = {f"a.{i}.{name}": torch.randn(D, D).bfloat16() for i in range(2) for name in ("q", "k")}
    state["norm.weight"] = torch.randn(D)
    model = {f"b.{i + 1}": HyperConnection(torch.tanh, N, D) for i in range(2)} | {"head": HyperHead(N, D)}
    fresh = {f"{name}.{key}": tensor for name, part in model.items() for key, tensor in part.state_dict().items()}
    fresh |= {f"b.{i + 1}.layer.{key}": torch.zeros(D, D) for i in range(2) for key in ("q", "k")}
    fresh["out_norm.weight"] = torch.zeros(D)
    safetensors.save_file(state, tmp_path / "plain", {"format": "pt", "note": "kept"})
    safetensors.save_file(fresh, tmp_path / "fresh")
    (tmp_path / "shards").mkdir()
    weight_map = {key: f"{'2' if key.startswith('a.1') else '1'}.safetensors" for key in state}
    for name in set(weight_map.values()):
        safetensors.save_file({key: state[key] for key in state if weight_map[key] == name}, tmp_path / "shards" / name)
    (tmp_path / "shards" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path, convert.upcycle(state, fresh, NAMES)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def test_a_file(given, capsys, safetensors):
    folder, expected = given
    words = [folder / "plain", folder / "out", "--upcycle", folder / "fresh", "--names", *WORDS]
    assert cli.main(["convert", *map(str, words)]) == 0
    assert capsys.readouterr().out == "3 of mHC added to 5 tensors: b.1, b.2, head\n"
    assert equal(safetensors.load_file(folder / "out"), expected)


def test_shards(given, safetensors):
    """The maps of a connection go where its layer is."""
    folder, expected = given
    words = [folder / "shards", folder / "out", "--upcycle", folder / "fresh", "--names", *WORDS]
    assert cli.main(["convert", *map(str, words)]) == 0
    index = json.loads((folder / "out" / INDEX).read_text())
    found = {name: safetensors.load_file(folder / "out" / name) for name in set(index["weight_map"].values())}
    assert equal({key: found[name][key] for key, name in index["weight_map"].items()}, expected)
    assert index["weight_map"]["b.1.phi"] == "1.safetensors" and index["weight_map"]["b.2.phi"] == "2.safetensors"
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())


def test_what_is_refused(given, capsys):
    folder, _ = given
    plain, out, fresh, missing = (folder / name for name in ("plain", "out", "fresh", "missing"))
    said = {
        (plain, out, "--upcycle", fresh): f"{plain}: a.0.",
        (plain, out, "--upcycle", plain): f"{plain} and {plain} are one file",
        (plain, fresh, "--upcycle", fresh): f"{fresh} and {fresh} are one file",
        (plain, out, "--upcycle", missing): f"{missing}: No such file or directory",
        (plain, out, "--upcycle", fresh, "--names", "a"): "argument --names: must be OLD=NEW, got 'a'",
        (plain, out, "--upcycle", fresh, "--to", "liger"): "--to and --fold-gamma go with --from",
        (plain, out, "--upcycle", fresh, "--from", "liger"): "argument --from: not allowed with argument --upcycle",
        (plain, out, "--from", "liger", "--names", "a=b"): "--names goes with --upcycle",
    }
    for command, line in said.items():
        assert refused(command, capsys).startswith(line)
    assert not out.exists()
