"""Signatures that are written more than once say the same: overloads, what they are of, and the guide's names of it."""

import ast
from pathlib import Path

import pytest

import mhc_ops

PACKAGE = Path(mhc_ops.__file__).parent


def parameters(function, without=()):
    """Name, kind, type and default of each, the last two as they are written."""
    arguments = function.args
    assert not arguments.vararg
    positional = [*arguments.posonlyargs, *arguments.args]
    kinds = ["positional only"] * len(arguments.posonlyargs) + ["either"] * len(arguments.args)
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    every = [
        *zip(positional, kinds, defaults),
        *((keyword, "keyword", default) for keyword, default in zip(arguments.kwonlyargs, arguments.kw_defaults)),
        *([(arguments.kwarg, "further keywords", None)] if arguments.kwarg else []),
    ]
    return {
        argument.arg: (kind, written(argument.annotation), written(default))
        for argument, kind, default in every
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
