"""The public names: each stands on docs/api.md once and is known to type checkers; the guide's import as it does it."""

import ast
import re
from pathlib import Path

import mhc_ops

ROOT = Path(__file__).parents[1]
OF_MHC_OPS = re.compile(r"^\.\. currentmodule:: mhc_ops\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_every_name_is_described_once():
    parts = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split("## The guide's names")
    for part, names in zip(parts, (mhc_ops.__all__, mhc_ops.guide.__all__), strict=True):
        assert sorted(re.findall(r"^\.\. auto\w+:: (\w+)$", "".join(OF_MHC_OPS.findall(part)), re.MULTILINE)) == names


def test_the_guides_names_are_imported_as_it_does():
    for name in mhc_ops.guide.__all__:
        found = {}
        exec(f"from mhc_ops import {name}", found)
        assert found[name] is getattr(mhc_ops.guide, name)
        assert name not in mhc_ops.__all__


def test_the_typed_program_uses_every_name():
    """Which tests/test_release.py checks against the wheel."""
    tree = ast.parse((ROOT / "tests" / "typing" / "program.py").read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {f"mhc_ops.{name}" for name in (*mhc_ops.__all__, *mhc_ops.guide.__all__, *mhc_ops.MODULES)} <= used
