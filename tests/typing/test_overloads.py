"""The guide's names have the ops' signatures, overloads their implementations'; the typed program uses every name."""

import ast
from pathlib import Path

import pytest

import mhc_ops

PACKAGE = Path(mhc_ops.__file__).parent


def signatures(scope, name):
    """The parameters of this name's overloads, or of the function without any, as written, without self and backend."""
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


def defaults(function):
    of = function.args
    arguments, values = [*of.posonlyargs, *of.args, *of.kwonlyargs], [*of.defaults, *of.kw_defaults]
    values = [None] * (len(arguments) - len(values)) + [value and ast.unparse(value) for value in values]
    return {argument.arg: value for argument, value in zip(arguments, values)}


def test_overloads_have_the_parameters_of_their_implementation():
    """All of them in the same order, with the same defaults or none: mypy compares types alone."""
    files = [path for path in PACKAGE.rglob("*.py") if "@overload" in path.read_text("utf-8")]
    for path in files:
        functions = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
        implemented = {function.name: defaults(function) for function in functions}  # the last of each name
        for function in functions:
            found, meant = defaults(function), implemented[function.name]
            assert list(found) == list(meant), function.name
            assert all(found[name] in (None, meant[name]) for name in found), function.name
    assert len(files) >= 4


def test_the_typed_program_uses_every_name():
    """tests/test_release.py checks it against the wheel."""
    tree = ast.parse(Path(__file__).with_name("program.py").read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {f"mhc_ops.{name}" for name in (*mhc_ops.__all__, *mhc_ops.guide.__all__, *mhc_ops.MODULES)} <= used
