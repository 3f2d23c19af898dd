"""Private names of torch: which there are, and what happens without them."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mhc_ops
from mhc_ops.core import private

PACKAGE = Path(mhc_ops.__file__).parent
# A training step of a stack, second derivatives of the reference, forward mode and vmap, by the torch that is there.
STEP = """
import torch
{before}
import mhc_ops
from mhc_ops.core import call, private
torch.manual_seed(0)
connections = [mhc_ops.HyperConnection(torch.nn.Linear(8, 8), 2, 8) for _ in range(3)]
stack = mhc_ops.HyperStack(*connections, recompute=2)
x = torch.ones(3, 2, 8, requires_grad=True)
for _ in range(2):
    stack(x).square().sum().backward()
y = mhc_ops.causal_conv1d(torch.ones(1, 5, 4), torch.ones(4, 3), backend="{backend}")
assert torch.equal(y[0, :, 0], torch.tensor([1.0, 2.0, 3.0, 3.0, 3.0]))
vmapped = torch.func.vmap(mhc_ops.mhc_mean)(torch.ones(2, 3, 2, 8))
assert torch.equal(vmapped, torch.ones(2, 3, 8))
print(x.grad.sum().item(), bool(call.kept_calls()), *private.missing)
"""
# torch itself needs most of the names: private.py alone looks for another one.
WITHOUT = """
import sys, types
sys.modules["mhc_ops.core.private"] = types.ModuleType("mhc_ops.core.private")
source = open({path!r}).read().replace('_found("{{name}}"', '_found("absent.{{name}}"')
exec(source, vars(sys.modules["mhc_ops.core.private"]))
""".format(path=str(PACKAGE / "core" / "private.py"))
NAMES = re.findall(r'_found\("([\w.]+)"', (PACKAGE / "core" / "private.py").read_text(encoding="utf-8"))


def step(before="", backend="reference", **environment):
    command = [sys.executable, "-c", STEP.format(before=before, backend=backend)]
    environment |= {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **environment})
    assert done.returncode == 0, done.stderr
    total, kept, *missing = done.stdout.split()
    return float(total), kept == "True", missing


def test_this_torch_has_every_name():
    assert private.missing == [], "calls are slower without them; private.py says what stands in their place"
    assert len(NAMES) > 10


def test_no_other_file_uses_private_names():
    """The files that `import mhc_ops` and its ops need are searched; commands and DTensor rules name more."""
    files = [path for folder in ("core", "mhc", "conv") for path in (PACKAGE / folder).rglob("*.py")]
    used = [path.name for path in files if re.search(r"\btorch(\.\w+)*\._[A-Za-z]", path.read_text(encoding="utf-8"))]
    assert used == ["private.py"]


@pytest.mark.thorough
def test_a_torch_without_any_of_them():
    """Each name is taken away in turn, in one process each: the same numbers, and the name is told."""
    expected, kept, _ = step(backend="triton")
    assert kept
    for name in NAMES:
        found, _, missing = step(WITHOUT.format(name=name), backend="triton")
        assert (found, missing) == (expected, [f"torch.absent.{name}"]), name


def test_a_torch_whose_kernel_of_autograd_takes_other_arguments(monkeypatch):
    monkeypatch.setattr(private, "missing", [])
    monkeypatch.setattr(private, "make_autograd", lambda op: None)
    assert private.autograd_kernel(None, None) is None
    assert private.missing == ["torch._library.autograd.make_autograd_impl(op, formula)"]


def test_the_graph_that_is_captured(monkeypatch):
    """None where torch cannot tell, where another library captures, and for what is not the user's own object."""
    graph = SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)

    def refuse():
        raise RuntimeError("get_currently_capturing_graph() can be used only between capture_begin() and capture_end()")

    for found, expected in ((lambda: graph, graph), (refuse, None), (None, None), (object, None)):
        monkeypatch.setattr(private, "_capturing_graph", found)
        assert private.capturing_graph() is expected


def test_replay_is_turned_off():
    expected, kept, _ = step(backend="triton")
    assert kept
    assert step(backend="triton", MHC_OPS_REPLAY="0") == (expected, False, [])
