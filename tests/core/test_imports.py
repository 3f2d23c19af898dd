"""What the syntax trees say: who imports whom, what is called by name; and what importing the package costs."""

import ast
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
# layer -> layers it may import from
ALLOWED = {
    "core": {"core"},
    "options": {"core"},
    "reference": {"core", "options"},
    "manual": {"core", "reference"},
    "contracts": {"core", "options"},
    "prepare": {"core", "options", "contracts", "reference", "manual"},
    "ops": {"core", "options", "prepare", "reference"},
    "warmup": {"core", "options", "prepare", "contracts"},
    "recompute": {"core", "ops", "reference"},
    "modules": {"core", "options", "ops", "recompute"},
    "stack": {"core", "modules", "recompute"},
    "metrics": {"core", "options", "ops", "modules", "recompute"},
    "guide": {"core", "options", "ops"},
    "composed": set(),
    "kernels": {"core", "options", "composed", "kernels"},
    "compat": {"core", "ops", "public", "compat"},
    "convert": set(),
    "distributed": {"core", "prepare", "contracts", "ops", "modules", "recompute", "stack", "distributed"},
    "hub": {"ops", "public"},
    "command": {"convert", "hub", "measure", "command"},
    "testing": {"core", "public", "options", "testing"},
    "measure": {"core", "public", "testing", "measure", "options", "reference", "manual"},  # diagnose takes them apart
    "cli": {"core", "testing", "measure", "command"},
    "__main__": {"cli"},
    # The last four for type checkers: test_import_loads_nothing_slow.
    "public": {
        "core",
        "ops",
        "warmup",
        "modules",
        "stack",
        "metrics",
        "guide",
        "compat",
        "convert",
        "distributed",
        "hub",
    },
    "family": set(),
}


def layer(parts):
    """("mhc", "triton", "pre_fwd") -> "kernels"; also the family, or None."""
    if not parts:
        return "public", None
    if parts[0] in ("convert", "hub") and parts[1:] in (("command",), ("checkpoint",)):
        return "command", None
    if parts[0] in ("core", "testing", "measure", "cli", "__main__", "compat", "convert", "distributed", "hub"):
        return parts[0], None
    family, *rest = parts
    if not rest:
        return "family", family
    return ("kernels" if rest[0] in KERNEL_FOLDERS else rest[0]), family


def imports(path):
    """Module paths inside mhc_ops that a file imports, as tuples."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    package = here[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "mhc_ops":
                    yield tuple(alias.name.split(".")[1:])
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1] + tuple(
                    (node.module or "").split(".") if node.module else ()
                )
            elif (node.module or "").split(".")[0] == "mhc_ops":
                base = tuple(node.module.split(".")[1:])
            else:
                continue
            for alias in node.names:
                target = PACKAGE.joinpath(*base, alias.name)
                is_module = target.is_dir() or target.with_suffix(".py").exists()
                yield (*base, alias.name) if is_module else base


FILES = sorted(path for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    own_layer, own_family = layer(parts)
    assert own_layer in ALLOWED, f"{path.name}: say in this test which layer it is"
    for target in imports(path):
        target_layer, target_family = layer(target)
        assert target_layer in ALLOWED[own_layer], f"{'.'.join(parts)} must not import {'.'.join(target)}"
        if own_family and target_family:
            assert own_family == target_family, "families never import each other"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_long_lists_of_arguments_are_named(path):
    """In kernels too, where no type checker sees that two pointers are swapped."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert [f"{path.name}:{call.lineno}" for call in calls if len(call.args) > MOST_POSITIONAL] == []


def test_import_loads_nothing_slow():
    slow = (
        "triton",
        "tilelang",
        "torch._dynamo",
        "torch.distributed.tensor",
        *(f"mhc_ops.{name}" for name in mhc_ops.MODULES),
    )
    code = f"import sys, mhc_ops; print([m for m in {slow} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_public_names_exist():
    assert sorted(mhc_ops.__all__) == mhc_ops.__all__
    assert all(hasattr(mhc_ops, name) for name in mhc_ops.__all__)


WITH_ONE_IMPORT = """
import operator, sys
import mhc_ops
assert set(sys.argv[1].split()) <= set(dir(mhc_ops))
print([name for name in sys.argv[2].split() if not operator.attrgetter(name)(mhc_ops)])
"""


def test_what_pages_write_is_there_with_one_import():
    """mhc_ops.compat.fla, mhc_ops.distributed.fully_shard and all others; an editor offers the modules."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    text = " ".join(page.read_text(encoding="utf-8") for page in pages)
    names = sorted({*re.findall(r"(?<!\w)mhc_ops\.(\w+(?:\.[a-z]\w*)*)", text), *mhc_ops.MODULES})
    assert len(names) > 10
    command = [sys.executable, "-c", WITH_ONE_IMPORT, " ".join(mhc_ops.MODULES), " ".join(names)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"^module 'mhc_ops' has no attribute 'distribute'$"):
        mhc_ops.distribute  # noqa: B018
