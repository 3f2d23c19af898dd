"""Files of others that are broken at random: a command takes one, or says in one line why not and writes nothing."""

import copy
import json
import random
import shutil

import pytest
import torch
from convert_files import D, K, M, N

from mhc_ops import cli, convert
from mhc_ops.convert.command import FORMATS
from mhc_ops.testing import cases

VALUES = (
    None, True, -1, 0, 1, 3, 2**63, 10**400, 1.5, 1e99, 1e-99, 1e308, float("nan"), float("inf"),
    "", " ", ".", "..", "a", "a" * 5000, "a/b", "\x00", "\x1b[2J", "a\nb", "\ud800", "<b>|`*", "F32",
    [], [[]], [1], [0, 0], [1, 2, 3], {}, {"a": 1}, {"a": {"a": []}},
)  # fmt: skip

CONNECTION = {"a.phi": torch.zeros(M, K), "a.alpha": torch.zeros(3), "a.bias": torch.zeros(M)}
HEAD = {"b.phi": torch.zeros(N, K), "b.alpha": torch.zeros(1), "b.bias": torch.zeros(N)}
STATES = (  # of ours, and the formats that have such parameters
    (CONNECTION, FORMATS),
    (CONNECTION | HEAD, ["mhc_ops", "deepseek", "transformers", "megatron"]),
    (CONNECTION | {"a.gamma": torch.ones(N, D)}, ["mhc_ops", "transformer-engine"]),
)
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)


def places(value, path=()):
    """The path of everything in a JSON value."""
    inner = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    yield from ((*path, key) for key, _ in inner)
    for key, entry in inner:
        yield from places(entry, (*path, key))


def kind_of(value):
    return (int, float) if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value)


def changed(value, chance):
    """With one to three of its entries replaced (mostly by one of their kind), gone, doubled or under another name."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        *way, last = chance.choice([*places(value)] or [(0,)])
        inner = value
        for key in way:
            inner = inner[key]
        how = chance.choice(["kind", "kind", "kind", "kind", "kind", "value", "gone", "name"])
        if how == "kind":
            inner[last] = copy.deepcopy(
                chance.choice([v for v in VALUES if isinstance(v, kind_of(inner[last]))] or VALUES)
            )
        elif how == "value":
            inner[last] = copy.deepcopy(chance.choice(VALUES))
        elif how == "gone":
            del inner[last]
        elif isinstance(inner, dict):
            inner[chance.choice([v for v in VALUES if isinstance(v, str)])] = inner.pop(last)
        else:
            inner.append(copy.deepcopy(inner[last]))
    return value


def garbled(content, chance):
    """Bytes of a file, cut off, with some of them changed, or deeper than anybody reads."""
    how = chance.choice(["short", "bytes", "deep"])
    if how == "short":
        return content[: chance.randrange(len(content))]
    if how == "deep":
        return b'{"a":' * 100_000
    content = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    return bytes(content)


def run(command, capsys):
    """The exit code; what is printed is fit for a terminal, and a refusal is one line."""
    try:
        code = cli.main(list(map(str, command)))
    except SystemExit as exit:
        code = exit.code
    printed = capsys.readouterr()
    assert (printed.out + printed.err).replace("\n", "").isprintable()
    if code == 2:
        assert printed.out == "" and len(printed.err.splitlines()) == 1
    else:
        assert printed.err.count("\n") <= 1
    return code


def shape(chance):
    return [chance.choice([0, 1, 2, 3, N, M, K]) for _ in range(chance.randint(0, 3))]


def broken_checkpoint(folder, chance):
    """A file of safetensors, or shards with an index; what it is given to."""
    ours, formats = chance.choice(STATES)
    of, other, target = chance.choice(formats), chance.choice(FORMATS), chance.choice(formats)
    safetensors = pytest.importorskip(
        "safetensors.torch", reason="safetensors is not installed: pip install safetensors"
    )
    state = {**convert.between(ours, "mhc_ops", of), "other.weight": torch.zeros(2)}
    where = chance.choice(["shapes", "header", "bytes", "index"])
    if where == "shapes":
        state[chance.choice([*state])] = torch.zeros(shape(chance), dtype=chance.choice(DTYPES))
    content = safetensors.save(state, {"format": "pt"})
    if where == "header":
        size = int.from_bytes(content[:8], "little")
        header = json.dumps(changed(json.loads(content[8 : 8 + size]), chance)).encode()
        content = len(header).to_bytes(8, "little") + header + content[8 + size :]
    if where == "bytes":
        content = garbled(content, chance)
    (folder / "FILE").write_bytes(content)
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(state, "FILE")}
    text = json.dumps(changed(index, chance) if where == "index" else index)
    (folder / "FILE.index.json").write_text(text)
    given = "FILE.index.json" if where == "index" or chance.random() < 0.5 else "FILE"
    source = of if chance.random() < 0.8 else other
    return ["convert", given, "out", "--from", source, "--to", target, *["--fold-gamma"] * (chance.random() < 0.3)]


def test_broken_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chance = random.Random(cases.SEED)
    codes = set()
    for _ in range(100):
        command = broken_checkpoint(tmp_path, chance)
        before = {*tmp_path.iterdir()}
        codes.add(code := run(command, capsys))
        written = {*tmp_path.iterdir()} - before
        assert code in (0, 2)
        assert [path.name for path in written] == ["out"] * (code == 0 and "out" in command), command
        for path in written:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert codes >= {0, 2}
