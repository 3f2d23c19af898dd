"""mhc-ops convert: files of safetensors in and out, and what it says."""

import json
import sys

import pytest
import torch
from convert_files import INDEX, D, K, M, N, refused

from mhc_ops import cli


def loaded(folder, safetensors):
    """All tensors of a folder; each is in the file that the index says, and there are no other files."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert {path.name for path in folder.iterdir()} == {INDEX, *weight_map.values()}
    parts = {name: safetensors.load_file(folder / name) for name in set(weight_map.values())}
    assert {key: name for name, part in parts.items() for key in part} == weight_map
    return {key: parts[name][key] for key, name in weight_map.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def test_there_and_back(checkpoint, tmp_path, capsys, safetensors):
    ours, back = tmp_path / "ours.safetensors", tmp_path / "back.safetensors"
    assert cli.main(["convert", str(checkpoint), str(ours), "--from", "deepseek"]) == 0
    assert capsys.readouterr().out == (
        "1 of mHC among 5 tensors: layers.0.hc_attn\n"
        "deepseek computes as HyperConnection(layer, n, D) does, with norm_eps and hc_eps of the model's config\n"
    )
    found = safetensors.load_file(ours)
    assert set(found) == {f"layers.0.hc_attn.{name}" for name in ("phi", "alpha", "bias")} | {
        "embed.weight",
        "layers.0.norm.weight",
    }
    assert cli.main(["convert", str(ours), str(back), "--from", "mhc_ops", "--to", "deepseek"]) == 0
    assert equal(safetensors.load_file(back), safetensors.load_file(checkpoint))
    import safetensors as files

    with files.safe_open(back, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "note": "kept"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([checkpoint.name, ours.name, back.name])


@pytest.mark.parametrize("target", ["liger", "megatron", "transformer-engine"])
def test_to_others_it_says_what_differs(target, checkpoint, tmp_path, capsys, safetensors):
    """And writes what a file of safetensors can hold: contiguous, no memory shared."""
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    assert cli.main(["convert", str(checkpoint), str(there), "--from", "deepseek", "--to", target]) == 0
    assert f"not the same function: {target} computes as HyperConnection(layer, n, D, " in capsys.readouterr().err
    assert cli.main(["convert", str(there), str(back), "--from", target, "--to", "deepseek"]) == 0
    assert equal(safetensors.load_file(back), safetensors.load_file(checkpoint))


def test_the_options_of_liger_are_said(checkpoint, tmp_path, capsys):
    there, ours = tmp_path / "there.safetensors", tmp_path / "ours.safetensors"
    assert cli.main(["convert", str(checkpoint), str(there), "--from", "deepseek", "--to", "liger"]) == 0
    assert cli.main(["convert", str(there), str(ours), "--from", "liger"]) == 0
    assert (
        "liger computes as HyperConnection(layer, n, D, hc_eps=0.0, transposed=True) does\n" in capsys.readouterr().out
    )


def test_the_options_of_hy4_are_said(tmp_path, capsys, safetensors):
    """Two scales instead of three, and a head beside it."""
    path, out = tmp_path / "hy4.safetensors", tmp_path / "out.safetensors"
    state = {"a_fn": torch.zeros(2 * N, K), "a_base": torch.zeros(2 * N), "a_scale": torch.zeros(2)}
    head = {"hc_head_fn": torch.zeros(N, K), "hc_head_base": torch.zeros(N), "hc_head_scale": torch.zeros(1)}
    safetensors.save_file(state | head, path)
    assert cli.main(["convert", str(path), str(out), "--from", "deepseek"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert "HyperConnection(layer, n, D, residual='identity', post_eps=1e-06) does, with norm_eps and hc_eps of" in line


def test_fold_gamma(tmp_path, capsys, safetensors):
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    state = {"a.phi": torch.ones(M, K), "a.alpha": torch.ones(3), "a.bias": torch.ones(M)}
    safetensors.save_file(state | {"a.gamma": torch.full((N, D), 2.0)}, path)
    command = [path, out, "--from", "mhc_ops", "--to", "deepseek"]
    assert "a.gamma: deepseek has no norm weight; fold it into phi first: fold_gamma, --fold-gamma" in refused(
        command, capsys
    )
    assert cli.main(["convert", *map(str, command), "--fold-gamma"]) == 0
    found = safetensors.load_file(out)
    assert equal(found, {"a_fn": 2 * state["a.phi"], "a_scale": state["a.alpha"], "a_base": state["a.bias"]})


def test_shards_there_and_back(checkpoint, shards, tmp_path, capsys, safetensors):
    """A folder or its index; a connection goes to the file where it begins."""
    ours, back = tmp_path / "ours", tmp_path / "back"
    back.mkdir()
    assert cli.main(["convert", str(shards), str(ours), "--from", "deepseek"]) == 0
    assert capsys.readouterr().out.startswith("1 of mHC among 5 tensors: layers.0.hc_attn\n")
    one = tmp_path / "one.safetensors"
    assert cli.main(["convert", str(checkpoint), str(one), "--from", "deepseek"]) == 0
    state = loaded(ours, safetensors)
    assert equal(state, safetensors.load_file(one))
    index = json.loads((ours / INDEX).read_text())
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert index["metadata"] == {"total_size": size, "note": "kept"}
    assert {index["weight_map"][f"layers.0.hc_attn.{name}"] for name in ("phi", "alpha", "bias")} == {
        "model-1.safetensors"
    }
    assert index["weight_map"]["layers.0.norm.weight"] == "model-2.safetensors"
    import safetensors as files

    with files.safe_open(ours / "model-2.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "note": "2"}
    assert cli.main(["convert", str(ours / INDEX), str(back), "--from", "mhc_ops", "--to", "deepseek"]) == 0
    assert equal(loaded(back, safetensors), safetensors.load_file(checkpoint))


def test_what_is_refused_of_shards(checkpoint, shards, tmp_path, capsys):
    out, empty, full = tmp_path / "out", tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "a").touch()
    of_deepseek = ("--from", "deepseek")
    said = {
        (empty, out, *of_deepseek): f"{empty}: there is no *.safetensors.index.json in it",
        (shards, full, *of_deepseek): f"{full}: shards are written to a new or empty folder",
        (shards, shards, *of_deepseek): f"{shards}: shards are written to a new or empty folder",
        (shards, checkpoint, *of_deepseek): f"{checkpoint}: shards are written to a new or empty folder",
        (checkpoint, empty, *of_deepseek): f"{empty}: is a folder",
        (shards, out, "--from", "liger"): f"{shards}: there are no parameters of mHC in it as liger has them",
    }
    for command, line in said.items():
        assert refused(command, capsys).startswith(line)
    assert not out.exists()


def test_what_is_refused(checkpoint, tmp_path, capsys, safetensors):
    out = tmp_path / "out.safetensors"
    missing, wrong, odd = tmp_path / "missing", tmp_path / "wrong", tmp_path / "odd"
    wrong.write_text("no tensors")
    safetensors.save_file({"a_fn": torch.zeros(M, K), "a_base": torch.zeros(M)}, odd)
    said = {
        (checkpoint, out, "--from", "liger"): f"{checkpoint}: there are no parameters of mHC in it as liger has them",
        (checkpoint, checkpoint, "--from", "deepseek"): f"{checkpoint} and {checkpoint} are one file",
        (missing, out, "--from", "deepseek"): f"{missing}: No such file or directory",
        (wrong, out, "--from", "deepseek"): f"{wrong}: it is not a file of safetensors: ",
        (odd, out, "--from", "deepseek"): f"{odd}: a_scale is missing beside a_fn",
        (checkpoint, out, "--from", "deepsek"): "argument --from: invalid choice: 'deepsek'",
        (checkpoint, tmp_path / "no" / "out", "--from", "deepseek"): "argument OUT.safetensors: ",
        (checkpoint, out): "one of the arguments --from --upcycle is required",
    }
    for command, line in said.items():
        assert refused(command, capsys).startswith(line)
    assert not out.exists()


def test_without_safetensors(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    line = refused([tmp_path / "in", tmp_path / "out", "--from", "liger"], capsys)
    assert line == "it reads and writes safetensors, which is not installed: pip install safetensors"
