"""mhc-ops convert: files of safetensors in and out, also in shards, and what it says and refuses."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from mhc_ops import HyperConnection, HyperHead, convert
from mhc_ops.convert.command import FORMATS

N, D = 4, 8
M, K = N * N + 2 * N, N * D
CONNECTION = {"a.phi": torch.zeros(M, K), "a.alpha": torch.zeros(3), "a.bias": torch.zeros(M)}
HEAD = {"b.phi": torch.zeros(N, K), "b.alpha": torch.zeros(1), "b.bias": torch.zeros(N)}
WITH_HEAD = ("mhc_ops", "deepseek", "transformers", "megatron")
STATES = {  # of ours, and the formats that have such parameters
    "a connection": (CONNECTION, FORMATS),
    "a head": (HEAD, WITH_HEAD),
    "both": (CONNECTION | HEAD, WITH_HEAD),
    "with gamma": (CONNECTION | {"a.gamma": torch.ones(N, D)}, ("mhc_ops", "transformer-engine")),
}
INDEX = "model.safetensors.index.json"
WEIGHT_MAP = {"embed.weight": "model-1", "layers.0.hc_attn_fn": "model-1", "layers.0.hc_attn_base": "model-2"}
WEIGHT_MAP |= {"layers.0.norm.weight": "model-2", "layers.0.hc_attn_scale": "model-3"}
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def safetensors(here):
    return pytest.importorskip("safetensors.torch", reason="safetensors is not installed: pip install safetensors")


@pytest.fixture
def checkpoint(safetensors):
    """Two tensors without mHC and one connection, in the file "one" and in the folder "many". The connection lies in
    all three shards of the folder, and the last one has nothing else."""
    torch.manual_seed(1)
    shapes = {"embed.weight": (5, D), "layers.0.norm.weight": (D,)}
    shapes |= {"layers.0.hc_attn_fn": (M, K), "layers.0.hc_attn_base": (M,), "layers.0.hc_attn_scale": (3,)}
    state = {key: torch.randn(shape) for key, shape in shapes.items()}
    state["embed.weight"] = state["embed.weight"].bfloat16()
    safetensors.save_file(state, "one", {"format": "pt", "note": "kept"})
    save_shards("many", state, WEIGHT_MAP, safetensors)
    return state


def save_shards(folder, state, weight_map, safetensors):
    Path(folder).mkdir()
    for name in set(weight_map.values()):
        part = {key: tensor for key, tensor in state.items() if weight_map[key] == name}
        safetensors.save_file(part, f"{folder}/{name}", {"format": "pt", "note": f"of {name}"})
    index = {"metadata": {"total_size": 1, "note": "kept"}, "weight_map": weight_map}
    Path(folder, INDEX).write_text(json.dumps(index))


def loaded(folder, safetensors):
    """The tensors of a folder and its index. Each tensor is in the file that the index says; there are no others. Their
    modes are as usual: safetensors alone makes files that only their owner can read."""
    index = json.loads(Path(folder, INDEX).read_text())
    weight_map = index["weight_map"]
    Path("usual").touch()
    modes = {path.name: path.stat().st_mode for path in Path(folder).iterdir()}
    assert modes == dict.fromkeys([INDEX, *weight_map.values()], Path("usual").stat().st_mode)
    parts = {name: safetensors.load_file(f"{folder}/{name}") for name in set(weight_map.values())}
    assert {key: name for name, part in parts.items() for key in part} == weight_map
    state = {key: parts[name][key] for key, name in weight_map.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    assert index["metadata"] == {"note": "kept", "total_size": size}
    return state, weight_map


def test_there_and_back(checkpoint, run, safetensors):
    code, printed, _ = run("convert one ours --from deepseek")
    computes = "deepseek computes as HyperConnection(layer, n, D) does, with norm_eps and hc_eps of the model's config"
    assert (code, printed) == (0, f"1 of mHC among 5 tensors: layers.0.hc_attn\n{computes}\n")
    assert_equal(safetensors.load_file("ours"), convert.to_ours(checkpoint, "deepseek"))
    assert run("convert ours back --from mhc_ops --to deepseek")[0] == 0
    assert_equal(safetensors.load_file("back"), checkpoint)
    assert safetensors.safe_open("back", "pt").metadata() == {"format": "pt", "note": "kept"}
    assert sorted(os.listdir()) == ["back", "many", "one", "ours"]


def test_shards_there_and_back(checkpoint, run, safetensors):
    """They are named by the folder or by the index. A connection goes to the file where it begins."""
    assert run("convert many ours --from deepseek")[1].startswith("1 of mHC among 5 tensors: layers.0.hc_attn\n")
    state, weight_map = loaded("ours", safetensors)
    assert_equal(state, convert.to_ours(checkpoint, "deepseek"))
    assert {weight_map[f"layers.0.hc_attn.{name}"] for name in ("phi", "alpha", "bias")} == {"model-1"}
    assert Path("ours").stat().st_mode == Path("many").stat().st_mode
    assert weight_map["layers.0.norm.weight"] == "model-2"
    assert safetensors.safe_open("ours/model-2", "pt").metadata()["note"] == "of model-2"
    Path("back").mkdir()
    assert run(f"convert ours/{INDEX} back --from mhc_ops --to deepseek")[0] == 0
    assert_equal(loaded("back", safetensors)[0], checkpoint)


DIFFERENT = {"liger": "hc_eps=0.0, transposed=True", "megatron": "norm_eps=1e-12"}
DIFFERENT |= {"transformer-engine": f"norm_eps={2**-23}, hc_eps=0.0, sinkhorn_eps=0.0"}


@pytest.mark.parametrize(("target", "options"), DIFFERENT.items())
def test_what_differs_is_said(target, options, checkpoint, run, safetensors):
    """What is written has no views and no shared memory, which a file of safetensors cannot hold."""
    said = run(f"convert one there --from deepseek --to {target}")[2]
    assert said.startswith(f"not the same function: {target} computes as HyperConnection(layer, n, D, {options}), ")
    assert run(f"convert there back --from {target} --to deepseek")[0] == 0
    assert_equal(safetensors.load_file("back"), checkpoint)
    printed = run(f"convert there ours --from {target}")[1]
    assert printed.endswith(f"{target} computes as HyperConnection(layer, n, D, {options}) does\n")


def test_the_options_of_hy4_are_said(run, safetensors):
    """Two scales instead of three, and a head beside it."""
    state = {"a_fn": torch.zeros(2 * N, K), "a_base": torch.zeros(2 * N), "a_scale": torch.zeros(2)}
    safetensors.save_file(state | convert.from_ours(HEAD, "deepseek"), "hy4")
    line = run("convert hy4 out --from deepseek")[1].splitlines()[-1]
    assert "HyperConnection(layer, n, D, residual='identity', post_eps=1e-06) does, with norm_eps and hc_eps of" in line


def test_fold_gamma(run, refused, safetensors):
    state = {name: torch.ones_like(tensor) for name, tensor in CONNECTION.items()}
    safetensors.save_file(state | {"a.gamma": torch.full((N, D), 2.0)}, "in")
    command = "convert in out --from mhc_ops --to deepseek"
    assert "a.gamma: deepseek has no norm weight; fold it into phi first: fold_gamma, --fold-gamma" in refused(command)
    assert run(f"{command} --fold-gamma")[0] == 0
    found = safetensors.load_file("out")
    assert_equal(found, {"a_fn": 2 * state["a.phi"], "a_scale": state["a.alpha"], "a_base": state["a.bias"]})


@pytest.fixture
def upcycled(safetensors):
    """What upcycle makes of the checkpoint in the file "plain" and in the shards "parts", and of the model "fresh"."""
    torch.manual_seed(0)
    plain = {"a.0.weight": torch.randn(D, D).bfloat16(), "a.1.weight": torch.randn(D, D), "norm.weight": torch.randn(D)}
    layers = {str(i): HyperConnection(nn.Linear(D, D, bias=False), N, D) for i in (1, 2)}
    model = nn.ModuleDict({"b": nn.ModuleDict(layers), "out_norm": nn.RMSNorm(D), "head": HyperHead(N, D)})
    safetensors.save_file(plain, "plain")
    safetensors.save_file(model.state_dict(), "fresh")
    save_shards("parts", plain, dict(zip(plain, ("model-1", "model-2", "model-1"))), safetensors)
    return convert.upcycle(plain, model.state_dict(), {"a.{i}": "b.{i+1}", "norm": "out_norm"})


def test_upcycle(upcycled, run, safetensors):
    """Of shards, the maps of a connection go where its layer is."""
    names = "--upcycle fresh --names a.{i}=b.{i+1} norm=out_norm"
    assert run(f"convert plain out {names}") == (0, "3 of mHC added to 3 tensors: b.1, b.2, head\n", "")
    assert_equal(safetensors.load_file("out"), upcycled)
    assert run(f"convert parts outs {names}")[0] == 0
    state, weight_map = loaded("outs", safetensors)
    assert_equal(state, upcycled)
    assert (weight_map["b.1.phi"], weight_map["b.2.phi"]) == ("model-1", "model-2")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("one out --from liger", "one: there are no parameters of mHC in it as liger has them"),
        ("one one --from deepseek", "one and one are one file"),
        ("missing out --from deepseek", "missing: No such file or directory"),
        ("short out --from deepseek", "short: it is not a file of safetensors: "),
        ("hostile out --from deepseek", "hostile: it is not a file of safetensors: "),
        ("odd out --from deepseek", "odd: a_scale is missing beside a_fn"),
        ("one out --from deepsek", "argument --from: invalid choice: 'deepsek'"),
        ("one no/out --from deepseek", "argument OUT.safetensors: "),
        ("one out", "one of the arguments --from --upcycle is required"),
        ("one empty --from deepseek", "empty: is a folder"),
        ("empty out --from deepseek", "empty: there is no *.safetensors.index.json in it"),
        ("many full --from deepseek", "full: shards are written to a new or empty folder"),
        ("many many --from deepseek", "many: shards are written to a new or empty folder"),
        ("one pipe --from deepseek", "pipe: is a device or a pipe"),
        ("plain out --upcycle fresh", "plain: a.0."),
        ("plain out --upcycle missing", "missing: No such file or directory"),
        ("plain out --upcycle fresh --names a", "argument --names: must be OLD=NEW, got 'a'"),
        ("plain out --upcycle fresh --to liger", "--to and --fold-gamma go with --from"),
        ("plain out --upcycle fresh --from liger", "argument --from: not allowed with argument --upcycle"),
        ("plain out --from liger --names a=b", "--names goes with --upcycle"),
    ],
)
def test_what_is_refused(words, line, checkpoint, upcycled, refused, safetensors):
    Path("short").write_bytes(Path("one").read_bytes()[:-1])
    Path("hostile").write_bytes(Path("one").read_bytes().replace(b'"F32"', b'"\\n2"'))  # which the error repeats
    safetensors.save_file({"a_fn": torch.zeros(M, K), "a_base": torch.zeros(M)}, "odd")
    Path("empty").mkdir()
    Path("full/below").mkdir(parents=True)
    os.mkfifo("pipe")
    assert refused(f"convert {words}").startswith(line)


def test_without_safetensors(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    line = "it reads and writes safetensors, which is not installed: pip install safetensors"
    assert refused("convert in out --from liger") == line


# What an index says beside the right one, or instead of it
OTHER_INDEXES = [
    *(({"a": name}, f"many/{INDEX}: {name!r} is not the name of") for name in ("../one", 1, "", "..")),
    *(({"a": name}, "many/") for name in ("a" * 5000, "\x00", "\ud800", "\x1b[2J", INDEX)),
    ('{"weight_map": []}', f"many/{INDEX}: it is not an index"),
    ('{"metadata": "a", "weight_map": {"a": "b"}}', f"many/{INDEX}: it is not an index"),
    *((text, f"many/{INDEX}: ") for text in ("{", "[" * 100_000, "[1]", "9" * 5000)),
    # its shards contradict it; tensors that it leaves out would vanish
    ({"other": "model-5"}, "many/model-5: No such file or directory"),
    ({"other": "model-2"}, "many/model-2: the index says that other is in it, and it is not"),
    ({"layers.0.norm.weight": None}, "many/model-2: layers.0.norm.weight is in it, and the index does not say so"),
    ({"layers.0.hc_attn.phi": "model-4"}, "many: two tensors would be layers.0.hc_attn.phi"),
]


@pytest.mark.parametrize(("other", "line"), OTHER_INDEXES)
def test_indexes_that_are_refused(other, line, checkpoint, refused, safetensors):
    safetensors.save_file({"layers.0.hc_attn.phi": torch.zeros(1)}, "many/model-4")
    if isinstance(other, dict):
        weight_map = {key: name for key, name in (WEIGHT_MAP | other).items() if name is not None}
        other = json.dumps({"metadata": {}, "weight_map": weight_map})
    Path("many", INDEX).write_text(other, encoding="utf-8")
    said = refused("convert many out --from deepseek")
    assert said.startswith(line) and len(said) < 300


@pytest.mark.parametrize("given", ["one", "many"])
def test_a_full_disk_leaves_nothing(given, checkpoint, refused, monkeypatch, safetensors):
    """safetensors has an error of its own."""
    save, error = safetensors.save_file, sys.modules["safetensors"].SafetensorError("I/O error: File too large")

    def save_and_fail(*arguments, **options):
        save(*arguments, **options)
        raise error

    monkeypatch.setattr(safetensors, "save_file", save_and_fail)
    assert refused(f"convert {given} out --from deepseek") == f"out: {error}"


# (format of the file, --from) that nothing in the file tells apart: Megatron's branches have the same names, its head
# is DeepSeek's, and the names of a head in transformers end as those do.
ALIKE = {
    "a connection": {("megatron", "megatron-main"), ("megatron-main", "megatron")},
    "a head": {(a, b) for a in ("deepseek", "megatron", "transformers") for b in ("deepseek", "megatron")},
}


@pytest.mark.parametrize(("parts", "of"), [(parts, of) for parts, (_, formats) in STATES.items() for of in formats])
def test_every_format_as_every_other(parts, of, run, refused, safetensors):
    """A file of one is refused as that of another, whole or in part."""
    state = {**convert.from_ours(STATES[parts][0], of), "other.weight": torch.zeros(2)}
    safetensors.save_file(state, "in")
    for source in FORMATS:
        if source == of or (of, source) in ALIKE.get(parts, ()):
            code, printed, _ = run(f"convert in {source} --from {source}")
            assert code == 0 and ("HyperConnection" in printed) == (parts != "a head")
            assert len(safetensors.load_file(source)) == len(STATES[parts][0]) + 1
        else:
            assert refused(f"convert in out --from {source}").startswith("in: ")
