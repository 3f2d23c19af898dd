"""What `install()` of all stand-ins has in common, and that importing mhc_ops installs nothing."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from mhc_ops.compat import causal_conv1d, megatron, tile_kernels

# the module that is stood in for, and one of its functions
STAND_INS = {
    causal_conv1d: ("causal_conv1d", "causal_conv1d_fn"),
    megatron: ("megatron.core.fusions.fused_mhc_kernels", "fused_sinkhorn"),
    tile_kernels: ("tile_kernels.modeling.mhc", "mhc_pre"),
}
each_stand_in = pytest.mark.parametrize("ours", STAND_INS, ids=lambda ours: ours.__name__.rpartition(".")[2])


@pytest.fixture(autouse=True)
def has_slot(monkeypatch):
    """Megatron itself is not installed."""
    monkeypatch.setattr(megatron, "_has_slot", lambda: True)


def loaded(name):
    return {module for module in sys.modules if module.partition(".")[0] == name.partition(".")[0]}


@each_stand_in
def test_what_is_put_in_is_taken_out(ours):
    (name, function), finders = STAND_INS[ours], list(sys.meta_path)
    for _ in range(2):
        assert not loaded(name)
        ours.install()
        module = sys.modules[name]
        assert getattr(module, function) is getattr(ours, function)
        ours.install()
        assert sys.modules[name] is module
        for _ in range(2):
            ours.uninstall()
        assert sys.meta_path == finders
    assert not loaded(name)


@each_stand_in
def test_the_real_one_stays(ours, monkeypatch):
    name, _ = STAND_INS[ours]
    real = ModuleType(name)
    real.__file__ = "/somewhere/__init__.py"
    monkeypatch.setitem(sys.modules, name, real)
    words = rf"^{name} is loaded already, from /somewhere/__init__.py: install\(\) before the first import of "
    with pytest.raises(RuntimeError, match=words):
        ours.install()
    ours.uninstall()
    assert sys.modules[name] is real
    assert loaded(name) == {name}


CODE = """
import sys
import mhc_ops
assert {"liger", "megatron", "sglang", "tile_kernels", "transformers", "vllm"} <= set(mhc_ops.compat.__all__)
assert mhc_ops.compat.transformers.patch  # as the README says it
libraries = {"tile_kernels", "liger_kernel", "megatron", "transformers", "causal_conv1d", "fla", "kernels"}
libraries |= {"vllm", "sglang"}
print([name for name in sys.modules if name.partition(".")[0] in libraries])
"""


def test_importing_installs_and_loads_nothing():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_servers_find_the_plugins():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    found = dict(re.findall(r'^\[project\.entry-points\."(.+)"\]\nmhc_ops = "(.+)"$', text, re.MULTILINE))
    assert found.keys() == {"vllm.general_plugins", "sglang.srt.plugins"}
    for name in found.values():
        module, function = name.split(":")
        assert callable(getattr(import_module(module), function))
