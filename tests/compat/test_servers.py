"""mhc_ops.compat.vllm and .sglang in the place of a server's own functions and custom ops."""

import logging
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from compat_oracle import says
from server_adapters import package, refusing

from mhc_ops.compat import sglang, vllm
from mhc_ops.compat.sglang import mhc
from mhc_ops.compat.vllm import nvidia

CUSTOM_OP = """
from torch import nn
op_registry_oot = {}

class CustomOp(nn.Module):
    def __new__(cls, *given, **named):
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    def forward(self, *given, **named):
        return self.forward_cuda(*given, **named)

    @classmethod
    def register_oot(cls, name):
        assert name not in op_registry_oot
        return lambda replacement: op_registry_oot.setdefault(name, replacement)
"""
CLASS = """
class {}(CustomOp):
    def forward_cuda(self, *given, **named):
        raise AssertionError("its own kernel")

    forward_hip = forward_cuda
"""


def file_of(module):
    return f"{module.replace('.', '/')}.py"


def name_of(ours):
    return ours.__name__.rpartition(".")[2]


CONV, LAYERS = "vllm.model_executor.layers.mamba.ops.causal_conv1d", "vllm.model_executor.layers.mhc"
CALLER = {vllm: "vllm.model_executor.layers.mamba.short_conv", sglang: "sglang.srt.layers.backend"}
FUNCTIONS = {vllm: vllm.CONV | nvidia.FUNCTIONS, sglang: sglang.CONV | mhc.FUNCTIONS}
FILES = {
    "vllm/model_executor/custom_op.py": CUSTOM_OP,
    file_of(LAYERS): "from vllm.model_executor.custom_op import CustomOp\n"
    + "".join(map(CLASS.format, vllm.CUSTOM_OPS)),
    file_of(CALLER[vllm]): "from .ops.causal_conv1d import causal_conv1d_update as b\n",
    file_of(CALLER[sglang]): "from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn as a\n"
    "from .attention.mamba.causal_conv1d import causal_conv1d_fn as b\n",
}
each_server = pytest.mark.parametrize("ours", FUNCTIONS, ids=name_of)


@pytest.fixture
def server(written, monkeypatch):
    """server(ours, changes) writes a server of small files; without changes, one that has every name."""

    def write(ours, changes=()):
        files = {f"{name_of(ours)}/__init__.py": "__version__ = '0.1'"} | FILES
        files |= {file_of(module): refusing(*names) for module, names in FUNCTIONS[ours].items()}
        written(package({**files, **dict(changes)}))

    for ours in FUNCTIONS:
        monkeypatch.delenv(ours.VARIABLE, raising=False)
    yield write
    for ours in FUNCTIONS:
        ours.unregister()


@pytest.mark.parametrize("loaded_before", [False, True])
def test_vllm(loaded_before, server, caplog):
    server(vllm)
    if loaded_before:
        import_module(CALLER[vllm])
    caplog.set_level(logging.INFO, "vllm")
    assert vllm.register() == ("causal_conv1d_fn", "causal_conv1d_update", *vllm.CUSTOM_OPS)
    assert "mhc_ops runs causal_conv1d_fn, causal_conv1d_update, MHCPreOp" in caplog.text
    assert vllm.register("mhc") == tuple(vllm.CUSTOM_OPS)  # again
    assert import_module(CALLER[vllm]).b is vllm.causal_conv1d_update
    module = import_module(LAYERS)
    given = torch.randn(5, 24), torch.randn(5, 4, 24), torch.rand(5, 4, 1), torch.rand(5, 4, 4)
    assert torch.equal(module.MHCPostOp()(*given), vllm.mhc_post(*given))
    assert isinstance(module.HCHeadOp(), module.HCHeadOp) and module.MHCPostOp().forward_hip is vllm.mhc_post
    vllm.unregister()
    assert type(module.MHCPreOp()) is module.MHCPreOp
    with pytest.raises(AssertionError, match="its own causal_conv1d_fn"):
        import_module(CONV).causal_conv1d_fn()


def test_sglang(server):
    """A module that was loaded before gets ours too, each variant its own."""
    server(sglang)
    caller = import_module(CALLER[sglang])
    names = sglang.register()
    assert {"causal_conv1d_fn", "mhc_pre", "hc_pre", "fused_hc_head", "fused_hy4_ihc_post_pre"} < set(names)
    assert caller.a is sglang.causal_conv1d_fn and caller.b is sglang.causal_conv1d_fn_cuda
    assert sglang.register("conv") == ("causal_conv1d_fn", "causal_conv1d_update") * 2
    sglang.unregister()
    for function in (caller.a, caller.b):
        with pytest.raises(AssertionError, match="its own causal_conv1d_fn"):
            function()


def test_force(server):
    server(vllm)
    names = vllm.register("mhc", force=True)
    assert {"mhc_shifted_post_pre", "causal_conv1d_fn"}.isdisjoint(names)
    assert import_module("vllm.models.deepseek_v41.nvidia.ops.mhc").supports_mhc_overlap(object()) is False
    assert import_module("vllm.model_executor.kernels.mhc.tilelang").mhc_post_tilelang is vllm.mhc_post
    with pytest.raises(ValueError, match="force=True belongs to the part 'mhc'"):
        vllm.register("conv", force=True)
    with pytest.raises(ValueError, match="the parts are 'conv' or 'mhc', got 'attention'"):
        vllm.register("attention")


LACKS = [
    (vllm, CONV, "causal_conv1d_update", refusing("causal_conv1d_fn")),
    (vllm, LAYERS, "MHCPreOp", ""),
    (sglang, "sglang.kernels.ops.layernorm.mhc_head", "fused_hc_head", ""),
]


@pytest.mark.parametrize(("ours", "module", "lacks", "text"), LACKS)
def test_a_version_without_a_name(ours, module, lacks, text, server):
    """Nothing is replaced in part."""
    server(ours, {file_of(module): text})
    name = name_of(ours)
    with says(ImportError, f"register: {name} 0.1 has no {lacks} in {module}; {name} {ours.TRIED} has it"):
        ours.register()
    for path in ours.CONV:
        function = getattr(sys.modules.get(path), "causal_conv1d_fn", None)
        assert function is None or "mhc_ops" not in function.__module__


def test_a_server_lacks_a_package_or_another_has_replaced_an_op(server):
    server(vllm, {file_of(CONV): "import a_package_of_vllm"})
    with says(ModuleNotFoundError, "No module named 'a_package_of_vllm'"):
        vllm.register()
    import_module("vllm.model_executor.custom_op").op_registry_oot["MHCPostOp"] = torch.nn.Identity
    with says(RuntimeError, "register: MHCPostOp is replaced already, by torch.nn.modules.linear"):
        vllm.register("mhc")


@each_server
def test_without_the_server(ours):
    name = name_of(ours)
    with says(ModuleNotFoundError, f"register: the package {name} is not installed: pip install {name}"):
        ours.register()


@each_server
@pytest.mark.parametrize("words", ["yes", "0,conv"])
def test_what_the_environment_refuses(words, ours, monkeypatch):
    monkeypatch.setenv(ours.VARIABLE, words)
    with pytest.raises(ValueError, match=f"^{ours.VARIABLE}: the words? .*, got '{words}'$"):
        ours.plugin()


@each_server
@pytest.mark.parametrize("words", [None, "", "0", "conv", "mhc", "1, mhc"])
def test_plugin(words, ours, server, monkeypatch):
    """Servers call it always; the environment decides."""
    server(ours)
    if words is not None:
        monkeypatch.setenv(ours.VARIABLE, words.replace("mhc", "force") if ours is vllm else words)
    ours.plugin()
    assert (name_of(ours) in sys.modules) == (words not in (None, "", "0"))
    has_conv, has_mhc = words in ("conv", "1, mhc"), words in ("mhc", "1, mhc")
    assert ("mhc_ops" in import_module(CALLER[ours]).b.__module__) == has_conv
    loaded = sys.modules.keys() & set(nvidia.FUNCTIONS if ours is vllm else mhc.FUNCTIONS)
    assert bool(loaded) == has_mhc
    for path in loaded:
        assert all("mhc_ops" in getattr(sys.modules[path], name).__module__ for name in FUNCTIONS[ours][path])
    if ours is vllm:
        registry = getattr(sys.modules.get("vllm.model_executor.custom_op"), "op_registry_oot", {})
        assert set(registry) == (set(vllm.CUSTOM_OPS) if has_mhc else set())


def test_servers_find_the_plugins():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    found = dict(re.findall(r'^\[project\.entry-points\."(.+)"\]\nmhc_ops = "(.+)"$', text, re.MULTILINE))
    assert found.keys() == {"vllm.general_plugins", "sglang.srt.plugins"}
    for name in found.values():
        module, function = name.split(":")
        assert callable(getattr(import_module(module), function))
