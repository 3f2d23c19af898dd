"""What `mhc-ops convert` reads and writes: odd indexes and names, files of another format, devices, full disks."""

import importlib
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from convert_files import INDEX, K, M, N, refused

from mhc_ops import cli, convert
from mhc_ops.convert.command import FORMATS

NOT_A_NAME = "is not the name of a file beside it"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"weight_map": {"a_fn": "model-1.safetensors", "a_base": "model-1.safetensors"}}, ""),
        *(({"weight_map": {"a": name}}, f"{name!r} {NOT_A_NAME}") for name in ("../in.safetensors", 1, "", "..")),
        ({"weight_map": {"a": ["b" * 5000]}}, f"['{'b' * 78}… {NOT_A_NAME}"),
        *(({"weight_map": {"a": name}}, "") for name in ("a" * 5000, "a" * 300, "\x00", "\ud800", "\x1b[2J", INDEX)),
        *(({"weight_map": value}, "it is not an index of safetensors") for value in ([], None)),
        *(({"metadata": value}, "it is not an index of safetensors: weight_map and") for value in (None, [], "a", 1)),
        *((text, "not JSON: ") for text in ("{", "[" * 100_000, '{"weight_map":' * 100_000, "\ufeff{}")),
        *((text, "") for text in ("[1]", "null", "9" * 5000)),
    ],
)
def test_indexes_that_are_refused(changes, line, shards, tmp_path, capsys):
    index = shards / INDEX
    text = changes if isinstance(changes, str) else json.dumps(json.loads(index.read_text()) | changes)
    index.write_text(text, encoding="utf-8")
    said = refused([shards, tmp_path / "out", "--from", "deepseek"], capsys)
    assert said.isprintable() and len(said) < len(str(shards)) + 300
    assert said.startswith(f"{index}: {line}" if line else str(shards))
    assert not (tmp_path / "out").exists()


def test_a_name_with_an_escape_sequence(tmp_path, capsys, safetensors):
    """It is the tensor's all the same; only what is printed differs."""
    begin, path, out = "\x1b[2J\na", tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    state = {"_fn": torch.zeros(M, K), "_base": torch.zeros(M), "_scale": torch.zeros(3)}
    safetensors.save_file({begin + end: tensor for end, tensor in state.items()}, path)
    assert cli.main(["convert", str(path), str(out), "--from", "deepseek"]) == 0
    assert capsys.readouterr().out.startswith("1 of mHC among 3 tensors: \\x1b[2J\\na\n")
    assert set(safetensors.load_file(out)) == {begin + end for end in (".phi", ".bias", ".alpha")}
    safetensors.save_file({f"{begin}_fn": state["_fn"]}, path)
    line = refused([path, tmp_path / "other", "--from", "deepseek"], capsys)
    assert line == f"{path}: \\x1b[2J a_scale is missing beside \\x1b[2J a_fn"


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_full_disk_leaves_no_shard_behind(nth, shards, tmp_path, capsys, monkeypatch, safetensors):
    """The third file that is written is the index."""
    save, write_text, written = safetensors.save_file, Path.write_text, []

    def full(path):
        written.append(path)
        if len(written) == nth:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    def save_file(state, path, metadata):
        save(state, path, metadata)
        full(path)

    def write(path, text, **options):
        write_text(path, text, **options)
        full(path)

    monkeypatch.setattr(safetensors, "save_file", save_file)
    monkeypatch.setattr(Path, "write_text", write)
    before = sorted(tmp_path.rglob("*"))
    line = refused([shards, tmp_path / "out", "--from", "deepseek"], capsys)
    assert line.startswith(f"{tmp_path / 'out'}: ") and "No space left on device" in line
    assert sorted(tmp_path.rglob("*")) == before
    written += [None] * 3
    assert cli.main(["convert", str(shards), str(tmp_path / "out"), "--from", "deepseek"]) == 0


def test_what_safetensors_cannot_write(checkpoint, tmp_path, capsys, monkeypatch, safetensors):
    def save_file(state, path, metadata):
        raise importlib.import_module("safetensors").SafetensorError("I/O error: File too large")

    monkeypatch.setattr(safetensors, "save_file", save_file)
    out = tmp_path / "out"
    assert refused([checkpoint, out, "--from", "deepseek"], capsys) == f"{out}: I/O error: File too large"
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.name]


@pytest.mark.parametrize("linked", [False, True], ids=["itself", "by a link"])
@pytest.mark.parametrize("kind", ["device", "pipe"])
@pytest.mark.parametrize("sharded", [False, True], ids=["a file", "shards"])
def test_nothing_but_a_file_is_written(kind, sharded, linked, checkpoint, shards, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        os.mknod("node", 0o666 | (stat.S_IFCHR if kind == "device" else stat.S_IFIFO), os.stat("/dev/null").st_rdev)
    except PermissionError:
        pytest.skip("only root makes devices")
    if linked:
        (tmp_path / "link").symlink_to("node")
    before = os.lstat("node")
    line = refused([shards if sharded else checkpoint, "link" if linked else "node", "--from", "deepseek"], capsys)
    assert "is a device or a pipe" in line or "new or empty folder" in line
    after = os.lstat("node")
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)


def test_files_have_the_mode_that_umask_says(checkpoint, shards, tmp_path):
    """safetensors alone makes files that only their owner can read."""
    before = os.umask(0o027)
    try:
        assert cli.main(["convert", str(checkpoint), str(tmp_path / "one"), "--from", "deepseek"]) == 0
        assert cli.main(["convert", str(shards), str(tmp_path / "many"), "--from", "deepseek"]) == 0
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "one", *(tmp_path / "many").iterdir())}
    assert (modes, stat.S_IMODE((tmp_path / "many").stat().st_mode)) == ({0o640}, 0o750)


CONNECTION = {"fn": torch.zeros(M, K), "scale": torch.zeros(3), "base": torch.zeros(M)}
HEAD = {"fn": torch.zeros(N, K), "scale": torch.zeros(1), "base": torch.zeros(N)}
PARTS = {
    "a connection": {f"a_{name}": tensor for name, tensor in CONNECTION.items()},
    "a head": {f"b_{name}": tensor for name, tensor in HEAD.items()},
}
PARTS["both"] = PARTS["a connection"] | PARTS["a head"]
# (format of the file, --from) that nothing in the file tells apart: Megatron's branches have the same names, its head
# is DeepSeek's, and the names of a head in transformers end as those do.
ALIKE = {
    "a connection": {("megatron", "megatron-main"), ("megatron-main", "megatron")},
    "a head": {(a, b) for a in ("deepseek", "megatron", "transformers") for b in ("deepseek", "megatron")},
    "both": set(),
}
WITH_HEAD = ("mhc_ops", "deepseek", "transformers", "megatron")


@pytest.mark.parametrize(
    ("of", "parts"), [(of, parts) for of in FORMATS for parts in PARTS if parts == "a connection" or of in WITH_HEAD]
)
def test_every_format_as_every_other(of, parts, tmp_path, capsys, safetensors):
    """A file of one is refused as that of another, whole or in part."""
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    state = {**convert.between(PARTS[parts], "deepseek", of), "other.weight": torch.zeros(2)}
    safetensors.save_file(state, path)
    for source in FORMATS:
        if source == of or (of, source) in ALIKE[parts]:
            assert cli.main(["convert", str(path), str(out), "--from", source]) == 0
            assert len(safetensors.load_file(out)) == len(PARTS[parts]) + 1
            assert ("HyperConnection" in capsys.readouterr().out) == (parts != "a head")
            out.unlink()
        else:
            assert str(path) in refused([path, out, "--from", source], capsys)
            assert not out.exists()


def test_two_tensors_of_one_name_in_different_shards(shards, tmp_path, capsys, safetensors):
    safetensors.save_file({"layers.0.hc_attn.phi": torch.zeros(1)}, shards / "model-4.safetensors")
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["layers.0.hc_attn.phi"] = "model-4.safetensors"
    (shards / INDEX).write_text(json.dumps(index))
    line = refused([shards, tmp_path / "out", "--from", "deepseek"], capsys)
    assert line == f"{shards}: two tensors would be layers.0.hc_attn.phi"
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_missing(shards, tmp_path, capsys):
    (shards / "model-2.safetensors").unlink()
    line = refused([shards, tmp_path / "out", "--from", "deepseek"], capsys)
    assert line.startswith(f"{shards / 'model-2.safetensors'}: No such file or directory")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lists", [False, True], ids=["left out", "listed"])
def test_an_index_that_its_shards_contradict(lists, shards, tmp_path, capsys):
    """Tensors that it leaves out would vanish."""
    index = json.loads((shards / INDEX).read_text())
    if lists:
        index["weight_map"]["other"] = "model-2.safetensors"
    else:
        del index["weight_map"]["layers.0.norm.weight"]
    (shards / INDEX).write_text(json.dumps(index))
    line = refused([shards, tmp_path / "out", "--from", "deepseek"], capsys)
    what = "the index says that other is in it, and it is not"
    what = what if lists else "layers.0.norm.weight is in it, and the index does not say so"
    assert line == f"{shards / 'model-2.safetensors'}: {what}"
    assert not (tmp_path / "out").exists()
