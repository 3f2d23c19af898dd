"""What `install()` of all stand-ins has in common, and that importing mhc_ops installs nothing."""

import sys
from importlib import import_module
from types import ModuleType

import pytest
from processes import output_of

from mhc_ops.compat import causal_conv1d, megatron, tile_kernels

# what can be imported of each; the first module is the one that is stood in for
STAND_INS = {
    causal_conv1d: {
        "causal_conv1d": "causal_conv1d_fn causal_conv1d_update",
        "causal_conv1d.causal_conv1d_interface": "causal_conv1d_fn causal_conv1d_update",
        "causal_conv1d.causal_conv1d_varlen": "causal_conv1d_varlen_states",
    },
    megatron: {
        "megatron.core.fusions.fused_mhc_kernels": "fused_add_3 fused_h_aggregate fused_h_aggregate_into "
        "fused_h_post_bda fused_proj_rms_compute_h fused_sinkhorn log_fused_mhc_backend_once"
    },
    tile_kernels: {
        "tile_kernels.modeling.mhc": "expand_from_embedding mhc_head mhc_pre",
        "tile_kernels.modeling.mhc.functional": "expand_from_embedding mhc_head mhc_pre",
        "tile_kernels.modeling.mhc.ops": "mhc_post sinkhorn_normalize",
        "tile_kernels.modeling.mhc.ops.post": "mhc_post mhc_post_bwd mhc_post_fwd",
        "tile_kernels.mhc.sinkhorn_kernel": "_mhc_sinkhorn_bwd _mhc_sinkhorn_fwd",  # for NeMo Automodel
    },
}
each_stand_in = pytest.mark.parametrize("ours", STAND_INS, ids=lambda ours: ours.__name__.rpartition(".")[2])


@pytest.fixture(autouse=True)
def megatron_is_installed(monkeypatch, tmp_path):
    """Nothing stays loaded."""
    monkeypatch.setattr(megatron, "_has_slot", lambda: True)
    install("megatron.core.fusions", monkeypatch, tmp_path)
    yield
    for name in ("megatron", "tile_kernels"):
        for module in loaded(name):
            del sys.modules[module]


def install(package, monkeypatch, folder):
    """An empty package of this name, for as long as the test runs."""
    place = folder.joinpath(*package.split("."))
    place.mkdir(parents=True)
    for parent in (place, *place.parents):
        if parent != folder and parent.is_relative_to(folder):
            (parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder)
    for name in loaded(package):
        monkeypatch.delitem(sys.modules, name)


def loaded(name):
    return {module for module in sys.modules if module.partition(".")[0] == name.partition(".")[0]}


@each_stand_in
def test_what_is_put_in_is_taken_out(ours):
    name, finders = next(iter(STAND_INS[ours])), list(sys.meta_path)
    for _ in range(2):
        assert not loaded(name)
        ours.install()
        module = import_module(name)
        for path, functions in STAND_INS[ours].items():
            assert all(getattr(import_module(path), each) is getattr(ours, each) for each in functions.split())
        ours.install()
        assert import_module(name) is module
        for _ in range(2):
            ours.uninstall()
        assert sys.meta_path == finders and name not in sys.modules
        for parent in loaded(name):  # the library's own
            del sys.modules[parent]


def test_in_a_library_that_is_installed(monkeypatch, tmp_path):
    """However it is imported, and whether the library's own packages are loaded already."""
    install("tile_kernels.modeling", monkeypatch, tmp_path / "of tile_kernels")
    ways = ("from tile_kernels.modeling import mhc", "import tile_kernels.modeling.mhc as mhc")
    ways += ("import tile_kernels.modeling.mhc; mhc = tile_kernels.modeling.mhc",)
    ways += ("import tile_kernels.modeling.mhc.ops.post; mhc = tile_kernels.modeling.mhc",)
    for way in (*ways, f"import tile_kernels.modeling; {ways[2]}"):
        tile_kernels.install()
        exec(way, found := {})
        assert found["mhc"].mhc_pre is tile_kernels.mhc_pre
        assert sys.modules["tile_kernels.modeling"].__file__.startswith(str(tmp_path))
        tile_kernels.uninstall()
        for name in loaded("tile_kernels"):
            del sys.modules[name]
    import_module("tile_kernels.modeling")
    tile_kernels.install()
    assert sys.modules["tile_kernels"].modeling.mhc.mhc_pre is tile_kernels.mhc_pre
    tile_kernels.uninstall()
    assert not hasattr(sys.modules["tile_kernels"].modeling, "mhc")


@each_stand_in
def test_the_real_one_stays(ours, monkeypatch):
    name = next(iter(STAND_INS[ours]))
    real = ModuleType(name)
    real.__file__ = "/somewhere/__init__.py"
    monkeypatch.setitem(sys.modules, name, real)
    words = rf"^{name} is loaded already, from /somewhere/__init__.py: install\(\) before the first import of "
    with pytest.raises(RuntimeError, match=words):
        ours.install()
    ours.uninstall()
    assert sys.modules[name] is real and loaded(name) == {name}


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
    assert output_of(sys.executable, "-c", CODE) == "[]\n"
