"""mhc-ops hub: the folder that it writes stands alone, beside an installed mhc_ops, and in the hands of `kernels`."""

import ast
import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compat_oracle import assert_near, gradients, inverse_rms, logits, read, sinkhorn
from torch import nn

import mhc_ops
from mhc_ops import cli, hub
from mhc_ops.hub import layers

FP32 = 1e-5
N, D = 4, 16
M, K = N * N + 2 * N, N * D
WITH_TORCH = {"torch", "triton", "typing_extensions", "numpy"}  # numpy: of triton's interpreter, where one asks for it
NO_KERNELS = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None, reason="kernels is not installed: pip install 'mhc-ops[adopt]'"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    assert cli.main(["hub", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("backend", hub.VARIANTS)
def test_metadata(folder, backend):
    found = json.loads((folder / "build" / f"torch-{backend}" / "metadata.json").read_text())
    assert found.pop("id").startswith(f"_mhc_ops_{backend}_")
    assert found == {
        "name": "mhc-ops",
        "version": 1,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": backend},
    }


def test_the_id_is_of_the_content():
    content = hub.files()
    before = hub.metadata("cpu", content)
    assert before == hub.metadata("cpu", hub.files())
    assert before != hub.metadata("cpu", {**content, "layers.py": ""})


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def test_imports_are_relative_or_of_torch(folder):
    found = set()
    for path in (folder / "build" / "torch-cpu").rglob("*.py"):
        found |= {name.partition(".")[0] for name in imported(ast.parse(path.read_text()))}
    assert found - sys.stdlib_module_names <= WITH_TORCH


def test_every_kernel_source_is_there(folder):
    variant = folder / "build" / "torch-cuda"
    assert not list(variant.rglob("tilelang")) and not list(variant.rglob("__pycache__"))
    assert "tilelang" not in (variant / "__init__.py").read_text().lower()
    package = Path(mhc_ops.__file__).parent
    for name in ("mhc/triton", "conv/triton", "conv/hip"):
        there = {path.name for path in (package / name).iterdir() if path.suffix in hub.KINDS}
        assert there and there == {path.name for path in (variant / name).iterdir()}


BESIDE = """
import importlib, importlib.util, sys
sys.modules["mhc_ops"] = None  # as if it were not installed
spec = importlib.util.spec_from_file_location("a_copy", sys.argv[1])
copy = importlib.util.module_from_spec(spec)
sys.modules["a_copy"] = copy
spec.loader.exec_module(copy)
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

assert all(torch.equal(a, b) for a, b in zip(results(copy), results(mhc_ops)))
assert copy.mhc_pre is not mhc_ops.mhc_pre and copy.HyperStack is not mhc_ops.HyperStack
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
    """The same bits, forward and backward, with ops, modules and choices of its own; on a GPU by its kernels."""
    init = folder / "build" / f"torch-{device}" / "__init__.py"
    done = subprocess.run([sys.executable, "-c", BESIDE, str(init), device], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class DeepseekV4HyperConnection(nn.Module):
    """As in transformers, by its equations."""

    def __init__(self):
        super().__init__()
        self.hc_mult, self.hc_sinkhorn_iters, self.hc_eps = N, 20, 1e-6
        self.input_norm = nn.Module()
        self.input_norm.eps = 1e-5
        self.fn, self.base = nn.Parameter(torch.randn(M, K) / K**0.5), nn.Parameter(torch.randn(M))
        self.scale = nn.Parameter(torch.tensor([1.1, 0.7, 1.3]))

    def forward(self, hidden_streams):
        x = hidden_streams
        pre, post, comb = logits(x, self.fn, self.scale, self.base, lambda v: inverse_rms(v, self.input_norm.eps))
        collapsed = read(x, pre.sigmoid() + self.hc_eps)
        return 2 * post.sigmoid(), sinkhorn(comb, self.hc_sinkhorn_iters, self.hc_eps), collapsed


def test_layer_of_deepseek():
    torch.manual_seed(1)
    module, x = DeepseekV4HyperConnection(), torch.randn(2, 3, N, D, requires_grad=True)
    given = [x, *module.parameters()]
    expected, found = module(x), layers.DeepseekV4HyperConnection.forward(module, x)
    assert_near(found, expected, FP32)
    assert_near(gradients(found, given), gradients(expected, given), FP32)


def test_the_other_layers():
    torch.manual_seed(2)
    x, v = (x := torch.randn(2, 3, N, D)), x.flatten(-2)
    fn, base, scale, norm = torch.randn(2 * N, K) / K**0.5, torch.randn(2 * N), torch.tensor([1.1, 0.7]), 1e-5
    z = v @ fn.T * inverse_rms(v, norm)
    pre = (z[..., :N] * 1.1 + base[:N]).sigmoid() + 1e-6
    post = 1.5 * (z[..., N:] * 0.7 + base[N:]).sigmoid() + 1e-6
    own = {"hc_eps": 1e-6, "hc_post_magnitude": 1.5, "input_norm": SimpleNamespace(eps=norm)}
    hy = SimpleNamespace(fn=fn, base=base, scale=scale, **own)
    assert_near(layers.HYV4HyperConnection.forward(hy, x), [post, read(x, pre)], FP32)
    own = {"eps": 1e-6, "input_norm": SimpleNamespace(eps=norm)}
    head = SimpleNamespace(hc_fn=fn[:N], hc_base=base[:N], hc_scale=scale[:1], **own)
    for layer in (layers.DeepseekV4HyperHead, layers.HYV4HyperHead):
        assert_near([layer.forward(head, x)], [read(x, pre)], FP32)
    assert_near([layers.Glm5NextTextHyperHead.forward(nn.Module(), x)], [x.mean(-2)], FP32)
    assert layers.Glm5NextTextHyperConnection.forward is layers.DeepseekV4HyperConnection.forward


LAYERS = [cls for _, cls in inspect.getmembers(layers, inspect.isclass) if cls.__module__ == layers.__name__]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_a_layer_is_what_the_hub_allows(layer):
    """No constructor, nothing but forward and two flags."""
    assert issubclass(layer, nn.Module) and layer.__init__ is nn.Module.__init__
    assert set(dir(layer)) - set(dir(nn.Module)) == {"can_torch_compile", "has_backward"}


@NO_KERNELS
def test_kernels_load_it(folder, monkeypatch):
    """By its path, and in the place of a repository of the hub; the same module, under its id."""
    import kernels

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LOCAL_KERNELS", f"org/mhc-ops={folder}")
    found = kernels.get_local_kernel(folder, backend="cpu")
    assert found is kernels.get_kernel("org/mhc-ops", version=1, backend="cpu")
    identity = json.loads((folder / "build" / "torch-cpu" / "metadata.json").read_text())["id"]
    assert found.__name__ == identity and found.mhc_pre.__module__ == f"{identity}.mhc.ops"
    x = torch.randn(3, N, D)
    assert torch.equal(found.HyperHead(N, D)(x), mhc_ops.HyperHead(N, D)(x))


@NO_KERNELS
def test_kernelize(folder):
    import kernels

    torch.manual_seed(3)
    kernels.replace_kernel_forward_from_hub(DeepseekV4HyperConnection, "DeepseekV4HyperConnection")
    model, x = nn.Sequential(DeepseekV4HyperConnection()), torch.randn(2, 3, N, D, requires_grad=True)
    given = [x, *model.parameters()]
    expected = model(x)
    layer = kernels.LocalLayerRepository(folder, layer_name="DeepseekV4HyperConnection")
    mapping = {"DeepseekV4HyperConnection": {"cpu": {kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE: layer}}}
    with kernels.use_kernel_mapping(mapping):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu")
    found = model(x)
    assert model[0].forward.__func__.__module__.startswith("_mhc_ops_cpu_")
    assert_near(found, expected, FP32)
    assert_near(gradients(found, given), gradients(expected, given), FP32)


@NO_KERNELS
def test_kernelize_a_model_of_transformers(folder, monkeypatch):
    """As docs/adopt_hub.md has it, with both classes."""
    import kernels

    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "q_lora_rank": 16,
    }
    sizes |= {
        "num_attention_heads": 2,
        "n_routed_experts": 3,
        "num_experts_per_tok": 3,
        "index_n_heads": 2,
        "index_head_dim": 16,
    }
    torch.manual_seed(4)
    model = v4.DeepseekV4Model(v4.DeepseekV4Config(**sizes, pad_token_id=0)).eval()
    ids = torch.randint(3, 64, (1, 6))
    expected, mapping = model(ids).last_hidden_state, {}
    for name in ("DeepseekV4HyperConnection", "DeepseekV4HyperHead"):
        for attribute in ("kernel_layer_name", "kernel_condition"):  # gone again behind this test
            monkeypatch.setattr(getattr(v4, name), attribute, None, raising=False)
        kernels.replace_kernel_forward_from_hub(getattr(v4, name), name)
        mapping[name] = {"cpu": {kernels.Mode.TRAINING: kernels.LocalLayerRepository(folder, layer_name=name)}}
    with kernels.use_kernel_mapping(mapping):
        kernels.kernelize(model.train(), mode=kernels.Mode.TRAINING, device="cpu")
    ours = [
        m for m in model.modules() if type(m).__name__ in mapping and "_mhc_ops_cpu_" in m.forward.__func__.__module__
    ]
    assert len(ours) == 5
    assert_near([model.eval()(ids).last_hidden_state], [expected], FP32)


def test_nothing_is_written_over(folder, capsys):
    before = (folder / "build" / "torch-cpu" / "metadata.json").stat().st_mtime_ns
    assert cli.main(["hub", str(folder)]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"mhc-ops hub: {folder}/build/torch-cpu is there already\n" and printed.out == ""
    assert (folder / "build" / "torch-cpu" / "metadata.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99], ids=["none", "half", "nearly all"])
def test_a_full_disk_leaves_nothing_behind(share, tmp_path, monkeypatch, capsys):
    """And does not hinder a second try."""
    most, written = share * sum(map(len, hub.variants().values())), []

    def write_text(path, text, **options):
        written.append(path)
        path.write_bytes(text.encode())
        if len(written) > most:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        assert cli.main(["hub", str(tmp_path / "hub")]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"mhc-ops hub: {tmp_path}/hub/build: No space left on device\n")
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["hub", str(tmp_path / "hub")]) == 0
    names = sorted(f"torch-{backend}" for backend in hub.VARIANTS)
    assert sorted(path.name for path in (tmp_path / "hub" / "build").iterdir()) == names


def test_the_other_variants_are_not_written_either(tmp_path, capsys):
    """Beside what is in the folder."""
    (tmp_path / "build" / "torch-rocm").mkdir(parents=True)
    (tmp_path / "build" / "mine").touch()
    assert cli.main(["hub", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"mhc-ops hub: {tmp_path}/build/torch-rocm is there already\n"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["build", "mine", "torch-rocm"]


def test_a_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["hub", str(tmp_path / "file")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"mhc-ops hub: {tmp_path}/file/build: Not a directory"
