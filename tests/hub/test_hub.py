"""mhc-ops hub: the folder that it writes stands alone, beside an installed mhc_ops, and in the hands of `kernels`."""

import ast
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compat_oracle import FP32, assert_near, gradients, inverse_rms, read
from processes import output_of
from tiny_models import build
from torch import nn

import mhc_ops
from mhc_ops import cli, hub
from mhc_ops.hub import layers

N, D = 4, 16
M, K = N * N + 2 * N, N * D
WITH_TORCH = {"torch", "triton", "typing_extensions", "numpy"}  # triton's interpreter imports numpy
ARCHS = {"cpu": {}, "cuda": {"archs": ["8.0+PTX"]}, "rocm": {"archs": ["gfx942", "gfx950"]}}
NO_KERNELS = pytest.mark.skipif(not importlib.util.find_spec("kernels"), reason="needs pip install 'mhc-ops[adopt]'")
LAYERS = [cls for _, cls in inspect.getmembers(layers, inspect.isclass) if cls.__module__ == layers.__name__]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    assert cli.main(["hub", str(folder)]) == 0
    return folder


def metadata(folder, backend):
    return json.loads((folder / "build" / f"torch-{backend}" / "metadata.json").read_text())


@pytest.mark.parametrize(("backend", "archs"), ARCHS.items())
def test_metadata(folder, backend, archs):
    """The id is of the content."""
    contents = hub.files(), hub.files(), hub.files() | {"layers.py": ""}
    ids = [json.loads(hub.metadata(backend, content))["id"] for content in contents]
    assert ids[0] == ids[1] != ids[2]
    found = metadata(folder, backend)
    assert found.pop("id").startswith(f"_mhc_ops_{backend}_") and found.pop("digest")["algorithm"] == "sha256"
    fixed = {"name": "mhc-ops", "version": 0, "license": "MIT", "python-depends": [], "kernel-depends": []}
    assert found == {**fixed, "backend": {"type": backend, **archs}}


@NO_KERNELS
def test_kernels_accept_metadata_and_build_toml(folder):
    """`kernels` parses them: names and types of all keys, and the hash of each file, of which none is missing."""
    from kernels._rust import Build, Digest, Metadata

    for backend, archs in ARCHS.items():
        variant = folder / "build" / f"torch-{backend}"
        found = Metadata.read_from_file(variant / "metadata.json")
        found.digest.validate(Digest.hash_variant(found.digest.algorithm, variant))
        assert (found.name.python_name, found.version, found.backend.archs) == ("mhc_ops", 0, archs.get("archs"))
    assert [str(backend).rpartition(".")[2].lower() for backend in Build.open(folder).general.backends] == [*ARCHS]


def test_what_the_builder_takes(folder):
    """torch-ext has the sources of every variant; the cards name what is there, and nothing is left to fill in."""
    sources = folder / "torch-ext" / "mhc_ops"
    assert {path.relative_to(sources).as_posix() for path in folder.glob("torch-ext/**/*.*")} == {*hub.files()}
    card = (folder / "CARD.md").read_text(encoding="utf-8")
    assert card == (folder / "build" / "CARD.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^- `(\w+)`$", card, re.MULTILINE)) == {*mhc_ops.__all__, *(cls.__name__ for cls in LAYERS)}
    assert not re.search(r"REPOSITORY|VERSION|FUNCTIONS|LAYERS|\{\{", card)


def test_every_kernel_source_is_there_and_imports_are_relative_or_of_torch(folder):
    paths = (folder / "build" / "torch-cpu").rglob("*.py")
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    assert {name.partition(".")[0] for name in found} - sys.stdlib_module_names <= WITH_TORCH
    variant = folder / "build" / "torch-cuda"
    assert not list(variant.rglob("tilelang")) and not list(variant.rglob("__pycache__"))
    assert (variant / "core" / "native.c").exists(), "without it calls are repeated in Python"
    package = Path(mhc_ops.__file__).parent
    for name in ("mhc/triton", "conv/triton", "conv/hip"):
        there = {path.name for path in (package / name).iterdir() if path.suffix in hub.KINDS}
        assert there and there == {path.name for path in (variant / name).iterdir()}


BESIDE = """
import importlib, importlib.util, sys
from pathlib import Path
sys.modules["mhc_ops"] = None  # as if it were not installed

def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]

variant = Path(sys.argv[1])
copy, old = loaded("a_copy", variant / "__init__.py"), loaded("as_once", variant / "mhc_ops" / "__init__.py")
del sys.modules["mhc_ops"]
import torch, mhc_ops
torch.set_default_device(sys.argv[2])

def results(package):
    torch.manual_seed(0)
    stack = package.HyperStack(*(package.HyperConnection(torch.nn.Linear(16, 16), 4, 16) for _ in range(2)))
    x = package.mhc_expand(torch.randn(3, 16), 4).requires_grad_()
    y = package.HyperHead(4, 16)(stack(x))
    y = y + package.causal_conv1d(y[None], torch.ones(16, 3))[0]
    return [y, *torch.autograd.grad(y.square().sum(), [x, *stack.parameters()])]

for other in (copy, old):
    assert all(torch.equal(a, b) for a, b in zip(results(other), results(mhc_ops)))
    assert other.mhc_pre is not mhc_ops.mhc_pre and other.HyperStack is not mhc_ops.HyperStack
assert old.__all__ == copy.__all__ and old.mhc_pre.__module__.startswith("_mhc_ops_")
for package in (copy, mhc_ops):
    op = getattr(torch.ops, package.__name__).mhc_post_fwd.default
    contracts = importlib.import_module(package.__name__ + ".mhc.contracts")
    assert contracts.mhc_post_fwd.traced._opoverload is op, op
    backend = importlib.import_module(package.__name__ + ".core.backend")
    assert backend.families() == ("conv", "mhc")
with copy.use_backend("hip"):
    try:
        copy.sinkhorn(torch.zeros(2, 2))
    except RuntimeError as error:
        assert "there are no hip kernels for mhc" in str(error)
    mhc_ops.sinkhorn(torch.zeros(2, 2))  # the choice of one is not that of the other
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_beside_an_installed_mhc_ops(folder, device):
    """The same bits, forward and backward, also by the module for old loaders; ops, modules and choices are its own."""
    output_of(sys.executable, "-c", BESIDE, folder / "build" / f"torch-{device}", device)


def test_the_other_layers():
    """DeepSeek's own connection is in the model of transformers below."""
    torch.manual_seed(2)
    x, fn = torch.randn(2, 3, N, D), torch.randn(2 * N, K) / K**0.5
    base, scale = torch.randn(2 * N), torch.tensor([1.1, 0.7])
    v, own = x.flatten(-2), {"eps": 1e-6, "hc_eps": 1e-6, "input_norm": SimpleNamespace(eps=1e-5)}
    pre, post = (v @ fn.T * inverse_rms(v, 1e-5) * scale.repeat_interleave(N) + base).sigmoid().split(N, -1)
    h_in, hy = read(x, pre + 1e-6), SimpleNamespace(fn=fn, base=base, scale=scale, hc_post_magnitude=1.5, **own)
    assert_near(layers.HYV4HyperConnection.forward(hy, x), [1.5 * post + 1e-6, h_in], FP32)
    head = SimpleNamespace(hc_fn=fn[:N], hc_base=base[:N], hc_scale=scale[:1], **own)
    for layer in (layers.DeepseekV4HyperHead, layers.HYV4HyperHead):
        assert_near([layer.forward(head, x)], [h_in], FP32)
    assert_near([layers.Glm5NextTextHyperHead.forward(nn.Module(), x)], [x.mean(-2)], FP32)
    assert layers.Glm5NextTextHyperConnection.forward is layers.DeepseekV4HyperConnection.forward
    for layer in LAYERS:  # as the hub allows them: no constructor, nothing but forward and two flags
        assert issubclass(layer, nn.Module) and layer.__init__ is nn.Module.__init__
        assert set(dir(layer)) - set(dir(nn.Module)) == {"can_torch_compile", "has_backward"}


@pytest.fixture
def without_cuda(monkeypatch):
    """`kernels` asks how torch was built, not whether there is a GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.version, "cuda", None)


@NO_KERNELS
def test_kernels_load_it(folder, monkeypatch):
    """`kernels` loads it by its path and as a repository of the hub: the same module, under its id."""
    import kernels

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LOCAL_KERNELS", f"org/mhc-ops={folder}")
    found = kernels.get_local_kernel(folder, backend="cpu")
    assert found is kernels.get_kernel("org/mhc-ops", version=0, backend="cpu")
    identity = metadata(folder, "cpu")["id"]
    assert found.__name__ == identity and found.mhc_pre.__module__ == f"{identity}.mhc.ops"
    x = torch.randn(3, N, D)
    assert torch.equal(found.HyperHead(N, D)(x), mhc_ops.HyperHead(N, D)(x))


@NO_KERNELS
def test_the_benchmark_runs(folder, without_cuda):
    """By the runner of `kernels`, which compares each result with its reference."""
    from kernels.cli.benchmark import run_benchmark_class

    spec = importlib.util.spec_from_file_location("benchmark_of_the_hub", folder / "benchmarks" / "benchmark.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    module.HyperConnections.tokens = module.Convolution.length = 5
    module.HyperConnections.D = module.Convolution.D = 64
    options = {"iterations": 1, "warmup": 0, "repo_id": str(folder), "is_local": True, "revision": ""}
    timed = run_benchmark_class(module.HyperConnections, **options)[0]
    timed |= run_benchmark_class(module.Convolution, **options)[0]
    assert sorted(timed) == ["post", "post_pre", "pre", "silu"] and all(result.verified for result in timed.values())


def kernelized(model, folder, *names, mode="TRAINING"):
    import kernels

    mode = getattr(kernels.Mode, mode) | kernels.Mode.TORCH_COMPILE
    mapping = {name: {"cpu": {mode: kernels.LocalLayerRepository(folder, layer_name=name)}} for name in names}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        return kernels.kernelize(model, mode=mode, device="cpu")


@NO_KERNELS
def test_kernelize_a_model_of_transformers(folder, without_cuda, monkeypatch):
    """As docs/adopt_hub.md has it, with both classes; the maps and their gradients are those of its own class."""
    import kernels

    model, names = build("deepseek_v4"), ("DeepseekV4HyperConnection", "DeepseekV4HyperHead")
    ids, x = torch.randint(3, 64, (1, 6)), torch.randn(2, 3, 3, 32, requires_grad=True)
    ours = [module for module in model.modules() if type(module).__name__ in names]
    given, maps, expected = [x, *ours[0].parameters()], ours[0](x), model(ids).logits
    for layer in {type(module) for module in ours}:
        for attribute in ("kernel_layer_name", "kernel_condition"):  # removed again after this test
            monkeypatch.setattr(layer, attribute, None, raising=False)
        kernels.replace_kernel_forward_from_hub(layer, layer.__name__)
    kernelized(model.train(), folder, *names)
    assert len(ours) == 7 and all("_mhc_ops_cpu_" in module.forward.__func__.__module__ for module in ours)
    assert_near([model.eval()(ids).logits, *ours[0](x)], [expected, *maps], FP32)
    assert_near(gradients(ours[0](x), given), gradients(maps, given), FP32)


@NO_KERNELS
def test_kernelize_the_convolutions_of_transformers(folder):
    """Which are modules made of functions; here new ones of these classes, as a model shares the others."""
    lfm2 = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    torch.manual_seed(5)
    x, filters, silu = torch.randn(2, D, 7), (torch.randn(D, 3), torch.randn(D)), {"activation": "silu"}
    packed = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2, dtype=torch.int32)
    plain, step = type(lfm2.causal_conv1d_fn)(), type(lfm2.causal_conv1d_update)()
    ours = kernelized(type(plain)(), folder, "causal_conv1d_fn")
    assert_near([ours(x, *filters, **silu, output_attentions=False)], [plain(x, *filters, **silu)], FP32)
    alone = torch.cat([plain(part, *filters) for part in x.split([3, 4], -1)], -1)
    assert_near([ours(x, *filters, seq_idx=packed)], [alone], FP32)
    update = kernelized(type(step)(), folder, "causal_conv1d_update", mode="INFERENCE")
    state, token = torch.randn(2, D, 3), torch.randn(2, D, 1)
    found = update(token, written := state.clone(), *filters, **silu)
    assert_near([found, written], [step(token, state, *filters, **silu), state], FP32)


def test_what_is_in_the_folder_stays(tmp_path, capsys):
    (tmp_path / "build" / "mine").mkdir(parents=True)
    assert cli.main(["hub", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"mhc-ops hub: {tmp_path}/build is there already\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["build", "mine"]
