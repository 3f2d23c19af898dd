"""The guide's names have the signatures of the ops that they are, and the program that mypy reads uses every name.
mypy itself holds overloads to their implementations."""

import ast
from pathlib import Path

import pytest

import mhc_ops

PACKAGE = Path(mhc_ops.__file__).parent


def signatures(scope, name):
    """The parameters of the overloads of this name, or of the function if it has none, as they are written. Without
    self and the backend, which is in the guide's names."""
    every = [node for node in scope.body if isinstance(node, ast.FunctionDef) and node.name == name]
    found = []
    for function in [each for each in every if "overload" in map(ast.unparse, each.decorator_list)] or every:
        of = function.args
        of.args = [argument for argument in of.args if argument.arg != "self"]
        pairs = [pair for pair in zip(of.kwonlyargs, of.kw_defaults) if pair[0].arg != "backend"]
        of.kwonlyargs, of.kw_defaults = ([pair[i] for pair in pairs] for i in (0, 1))
        found.append(ast.unparse(of))
    return found


@pytest.mark.parametrize(("protocol", "name"), [("ForwardPre", "mhc_forward_pre"), ("Backward", "mhc_backward")])
def test_the_guide_has_the_signatures_of_the_ops(protocol, name):
    guide, ops = (ast.parse((PACKAGE / file).read_text()) for file in ("guide.py", "mhc/ops.py"))
    (of_guide,) = (node for node in guide.body if isinstance(node, ast.ClassDef) and node.name == protocol)
    assert signatures(of_guide, "__call__") == signatures(ops, name)


def test_the_typed_program_uses_every_name():
    """tests/test_release.py checks it against the wheel."""
    tree = ast.parse(Path(__file__).with_name("program.py").read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {f"mhc_ops.{name}" for name in (*mhc_ops.__all__, *mhc_ops.guide.__all__, *mhc_ops.MODULES)} <= used
