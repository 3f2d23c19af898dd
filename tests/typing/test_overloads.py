"""Signatures that are written more than once say the same: overloads, what they are of, and the guide's names of it.
And the program that mypy reads uses every name."""

import ast
from pathlib import Path

import pytest

import mhc_ops

PACKAGE = Path(mhc_ops.__file__).parent


def parameters(function, without=()):
    """Name, kind, type and default of each, the last two as they are written."""
    of = function.args
    assert not of.vararg
    arguments = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, [of.kwarg])]
    kinds = ["positional only"] * len(of.posonlyargs) + ["either"] * len(of.args)
    kinds += ["keyword"] * len(of.kwonlyargs) + ["further keywords"]
    defaults = [None] * (len(of.posonlyargs) + len(of.args) - len(of.defaults)) + of.defaults + of.kw_defaults + [None]
    return {
        argument.arg: (kind, written(argument.annotation), written(default))
        for argument, kind, default in zip(arguments, kinds, defaults)
        if argument.arg not in ("self", *without)
    }


def written(node):
    return None if node is None else ast.unparse(node)


def functions(file, inside=None):
    """By name, in a module or in one of its classes: overloads, then the implementation."""
    scope = ast.parse((PACKAGE / file).read_text())
    if inside:
        (scope,) = (node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == inside)
    found = {}
    for node in scope.body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def is_overload(function):
    return any(written(decorator).endswith("overload") for decorator in function.decorator_list)


def test_overloads_and_implementation():
    """The same parameters in the same order, with the same defaults; an overload may take one by keyword alone, without
    its default, or with a narrower type, which mypy looks at."""
    files = [file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py")]
    every = [(f"{file} {name}", found) for file in files for name, found in functions(file).items()]
    overloaded = {name: found for name, found in every if any(map(is_overload, found))}
    assert len(overloaded) >= 4
    for name, (*overloads, implementation) in overloaded.items():
        assert not is_overload(implementation), name
        meant = parameters(implementation)
        for overload in overloads:
            given = parameters(overload)
            assert is_overload(overload) and list(given) == list(meant), name
            for parameter, (kind, annotation, default) in given.items():
                of_kind, of_type, of_default = meant[parameter]
                assert kind in (of_kind, "keyword") and default in (None, of_default), (name, parameter)
                assert annotation == of_type or annotation.startswith(("Literal", "Callable")), (name, parameter)


@pytest.mark.parametrize(("protocol", "name"), [("ForwardPre", "mhc_forward_pre"), ("Backward", "mhc_backward")])
def test_the_guide_has_the_signatures_of_the_ops(protocol, name):
    """But for the backend, which is in its names."""
    of_guide, of_ops = functions("guide.py", protocol)["__call__"], functions("mhc/ops.py")[name]
    typed = [function for function in of_ops if is_overload(function)] or of_ops
    assert len(of_guide) == len(typed)
    for one, other in zip(of_guide, typed):
        assert list(parameters(one).items()) == list(parameters(other, without=("backend",)).items())


def test_the_typed_program_uses_every_name():
    """tests/test_release.py checks it against the wheel."""
    tree = ast.parse(Path(__file__).with_name("program.py").read_text())
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {f"mhc_ops.{name}" for name in (*mhc_ops.__all__, *mhc_ops.guide.__all__, *mhc_ops.MODULES)} <= used
