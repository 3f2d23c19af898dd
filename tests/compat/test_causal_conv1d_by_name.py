"""causal_conv1d by its own name: the package that `install()` puts in, and programs that run with it."""

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from mhc_ops.compat import causal_conv1d as compat
from mhc_ops.compat.causal_conv1d.__main__ import USAGE, main

ROOT = Path(__file__).parents[2]
NAME = "causal_conv1d"
PARTS = ("causal_conv1d_interface", "causal_conv1d_varlen", "cpp_functions")


@pytest.fixture
def installed():
    compat.install()
    yield importlib.import_module(NAME)
    compat.uninstall()


def names():
    return {name for name in sys.modules if name.partition(".")[0] == NAME}


def test_the_package_is_complete(installed):
    assert installed.__version__ == importlib.metadata.version("causal-conv1d") == "1.7.0"
    assert importlib.metadata.version("causal_conv1d") == "1.7.0"
    assert importlib.metadata.packages_distributions()[NAME] == [NAME]
    assert importlib.util.find_spec(NAME).name == NAME
    for part in PARTS:
        module = importlib.import_module(f"{NAME}.{part}")
        assert getattr(installed, part) is module
        assert importlib.util.find_spec(f"{NAME}.{part}").parent == module.__package__ == NAME
    assert names() == {NAME, *(f"{NAME}.{part}" for part in PARTS)}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{NAME}.another")


def test_a_model_that_was_imported_before_is_named(monkeypatch):
    model = types.ModuleType("transformers.models.lfm2.modeling_lfm2")
    model.causal_conv1d_fn = print
    monkeypatch.setitem(sys.modules, model.__name__, model)
    with pytest.warns(UserWarning, match=f"imported before, and not looking for {NAME} again: .*{model.__name__}"):
        compat.install()
    compat.uninstall()


@pytest.mark.parametrize("packed", [False, True], ids=["states", "seq_idx"])
def test_an_autograd_function_of_the_compiled_part(packed, installed):
    """Forward and backward by hand, as in mamba-ssm, with dx in a part of a wider tensor."""
    torch.manual_seed(0)
    x, weight, bias, states = torch.randn(2, 9, 5).mT, torch.randn(5, 4), torch.randn(5), torch.randn(2, 5, 3)
    ids = (torch.arange(9) >= 4).int().expand(2, 9).contiguous() if packed else None
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, states)]
    result = compat.causal_conv1d_fn(*leaves[:3], ids, leaves[3], not packed, activation="silu")
    outputs = (result,) if packed else result
    cotangents = [torch.randn_like(output) for output in outputs]
    expected = torch.autograd.grad(outputs, leaves, cotangents)
    final = None if packed else torch.empty(2, 3, 5).mT
    out = installed.cpp_functions.causal_conv1d_fwd_function(x, weight, bias, ids, states, final, True)
    assert all(map(torch.equal, (out,) if packed else (out, final), outputs))
    wide, dfinal = torch.zeros(2, 10, 9), None if packed else cotangents[1]
    backward = installed.cpp_functions.causal_conv1d_bwd_function
    with torch.no_grad():
        gradients = backward(x, weight, bias, cotangents[0], ids, states, dfinal, wide[:, 5:], True, True)
    assert gradients[0].data_ptr() == wide[:, 5:].data_ptr() and all(map(torch.equal, gradients, expected))
    assert backward(x, weight, None, cotangents[0], ids, states, None, None, False, False)[2:] == (None, None)


def test_other_forms_of_both_functions(installed):
    """In plain torch, and compiled."""
    x, weight, states = torch.randn(2, 5, 9), torch.randn(5, 4), torch.randn(2, 5, 3)
    plain, silu = installed.causal_conv1d_interface, {"activation": "silu"}
    given = {"initial_states": states, "return_final_states": True, **silu}
    expected = compat.causal_conv1d_fn(x, weight, **given)
    assert all(map(torch.equal, plain.causal_conv1d_ref(x, weight, **given), expected))
    after = [states.clone() for _ in range(3)]
    update, by_hand = plain.causal_conv1d_update_ref, installed.cpp_functions.causal_conv1d_update_function
    steps = [compat.causal_conv1d_update(x, after[0], weight, **silu), update(x, after[1], weight, **silu)]
    steps.append(by_hand(x, after[2], weight, None, True, None, None))
    assert all(torch.equal(step, steps[0]) and torch.equal(state, after[0]) for step, state in zip(steps, after))


PROGRAM = """
import sys
from pathlib import Path
import beside
from causal_conv1d import causal_conv1d_fn

assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
assert Path(__file__).samefile(sys.argv[0]), (__file__, sys.argv)
print(causal_conv1d_fn.__module__, *sys.argv[1:], beside.WORD)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("words", [["folder/program.py"], ["-m", "program"]], ids=["script", "module"])
def test_a_program_runs_with_it(words, tmp_path):
    """In a process of its own: the arguments are the program's, modules beside it are found, its exit code is kept."""
    (folder := tmp_path / "folder").mkdir()
    (folder / "program.py").write_text(PROGRAM)
    (folder / "beside.py").write_text("WORD = 'beside'\n")
    command = [sys.executable, "-m", "mhc_ops.compat.causal_conv1d", *words, "3", "-m", "--help"]
    environment = {"PYTHONPATH": f"{ROOT}:{folder}" if "-m" in words else str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "mhc_ops.compat.causal_conv1d.causal_conv1d_interface 3 -m --help beside\n"


def test_usage(capsys):
    main(["--help"])
    for words in ([], ["-m"], ["-x", "program.py"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{USAGE}\n", 3 * f"{USAGE}\n")
    assert not names()
