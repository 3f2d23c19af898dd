"""What the syntax trees say: who imports whom, what is called by name; and what importing the package costs."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mhc_ops

PACKAGE = Path(mhc_ops.__file__).parent
ROOT = Path(__file__).parents[2]
KERNEL_FOLDERS = {"triton", "tilelang", "hip"}
MOST_POSITIONAL = 9  # of a call: what small helpers within kernels take, one line of code
MOST_LINES = 100  # of a function, with its decorators; but for mhc/triton/few_tokens.py and TileLang's:
LONGER = ["mhc_few_fwd_kernel", "mhc_pre_dmaps_kernel", "mhc_pre_dx", "mhc_pre_dx_kernel", "mhc_pre_finish_kernel"]
FOR_TYPE_CHECKERS = ("compat", "convert", "distributed", "hub")  # test_one_import
# A layer imports from itself and from those before it.
LAYERS = [
    *("family", "core", "options", "records", "post_then_pre", "kernels", "reference", "backward_formula", "contracts"),
    *("serving_reference", "prepare", "serving", "ops", "warmup", "recompute", "carry", "modules", "stack", "metrics"),
    *("guide", "distributed", "public", "compat", "hub", "convert", "testing", "measure", "command", "cli", "__main__"),
]
OF_NO_FAMILY = ["core", "testing", "measure", "cli", "__main__", "compat", "convert", "distributed", "guide", "hub"]


def layer(parts):
    """("mhc", "triton", "pre_fwd") -> "kernels"; also the family, or None."""
    if not parts:
        return "public", None
    if parts[0] in ("convert", "hub") and parts[1:] in (("command",), ("checkpoint",)):
        return "command", None
    if parts[0] in OF_NO_FAMILY:
        return parts[0], None
    family, *rest = parts
    if not rest:
        return "family", family
    return ("kernels" if rest[0] in KERNEL_FOLDERS else rest[0]), family


def imports(package, tree):
    """Module paths inside mhc_ops that a file of this package imports, as tuples."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (tuple(rest) for first, *rest in names if first == "mhc_ops")
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if not node.level and module[0] != "mhc_ops":
                continue
            base = (*package[: len(package) - node.level + 1], *module) if node.level else tuple(module[1:])
            for alias in node.names:
                target = PACKAGE.joinpath(*base, alias.name)
                is_module = target.is_dir() or target.with_suffix(".py").exists()
                yield (*base, alias.name) if is_module else base


TREES = {path.relative_to(PACKAGE): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_imports_go_one_way():
    for path, tree in TREES.items():
        here = path.with_suffix("").parts
        own_layer, own_family = layer(here[:-1] if here[-1] == "__init__" else here)
        assert own_layer in LAYERS, f"{path}: say in this test which layer it is"
        allowed = {*LAYERS[: LAYERS.index(own_layer) + 1], *(FOR_TYPE_CHECKERS if own_layer == "public" else ())}
        for target in imports(here[:-1], tree):
            target_layer, target_family = layer(target)
            assert target_layer in allowed, f"{path} must not import {'.'.join(target)}"
            assert not own_family or target_family in (own_family, None), f"{path}: families never import each other"


def test_long_lists_of_arguments_are_named():
    """In kernels too, where no type checker sees that two pointers are swapped."""
    calls = [(path, node) for path, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert [f"{path}:{call.lineno}" for path, call in calls if len(call.args) > MOST_POSITIONAL] == []
    of_warps = [call.args[0].elts for _, call in calls if ast.unparse(call.func) == "gl.warp_specialize"]
    counts = [len(pair.elts[1].elts) for functions in of_warps for pair in functions]  # of the tuple for a function
    assert len(counts) == 4 and max(counts) <= MOST_POSITIONAL


def test_functions_are_short():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    begins = [min(part.lineno for part in (node, *node.decorator_list)) for node in functions]
    assert sorted(f.name for f, line in zip(functions, begins) if f.end_lineno - line >= MOST_LINES) == LONGER


def test_launchers_are_typed():
    """mypy does not read the body of a function without annotations; kernels are meant by that, launchers are not."""
    for path, tree in TREES.items():
        if path.parts[1:2] in (("triton",), ("tilelang",)):
            functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.decorator_list]
            assert [function.name for function in functions if function.returns is None] == [], path


def test_a_public_name_that_does_not_exist():
    with pytest.raises(AttributeError, match=r"^module 'mhc_ops' has no attribute 'distribute'$"):
        mhc_ops.distribute  # noqa: B018


WITH_ONE_IMPORT = """
import operator, sys
import mhc_ops
from mhc_ops.core import backend
slow, offered, names = (words.split() for words in sys.argv[1:])
of_its_own = {"MODULES", "ModuleType", "TYPE_CHECKING", "importlib", "read_environment"} & {*dir(mhc_ops)}
print([name for name in slow if name in sys.modules], backend.chosen(), {*offered} <= {*dir(mhc_ops)}, of_its_own)
print([name for name in names if not operator.attrgetter(name)(mhc_ops)])
"""


def test_one_import():
    """It loads nothing slow, reads MHC_OPS_BACKEND, and offers what pages write: mhc_ops.distributed.fully_shard."""
    ours = [f"mhc_ops.{name}" for name in mhc_ops.MODULES]
    slow = ["triton", "tilelang", "torch._dynamo", "torch.distributed.tensor", *ours]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    text = " ".join(page.read_text(encoding="utf-8") for page in pages)
    names = sorted({*re.findall(r"(?<!\w)mhc_ops\.(\w+(?:\.[a-z]\w*)*)", text), *mhc_ops.MODULES})
    assert len(names) > 10
    command = [sys.executable, "-c", WITH_ONE_IMPORT, *map(" ".join, (slow, mhc_ops.MODULES, names))]
    environment = {**os.environ, "MHC_OPS_BACKEND": "conv:hip"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "[] (('conv', 'hip'),) True set()\n[]\n", done.stdout + done.stderr
