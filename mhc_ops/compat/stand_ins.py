"""Stand-ins: modules under another library's name, found by programs that import that library, and functions in the
place of a library's own.

Nothing is written to disk, and nothing happens before `put`, `fill` or `replace` is called.
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_ours: dict[str, ModuleType] = {}
_wanted: dict[str, Mapping[str, Any]] = {}  # what `fill` was given
_filled: list[tuple[ModuleType, str]] = []
_replaced: list[tuple[ModuleType, str, Any]] = []  # and what was there


def put(modules: Mapping[str, Mapping[str, Any]], packages: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Make `import name` find these modules: {name: contents}. A second call does nothing.

    packages: the library's other modules, put only if it is not installed.
    RuntimeError if the library's own module of such a name is loaded: programs that imported it would keep it.
    """
    top = next(iter(packages or modules)).partition(".")[0]
    installed = top not in _ours and (top in sys.modules or importlib.util.find_spec(top) is not None)
    wanted = {**({} if installed else packages or {}), **modules}
    for name in wanted:
        loaded = sys.modules.get(name)
        if loaded is not None and loaded is not _ours.get(name):
            where = getattr(loaded, "__file__", None) or "sys.modules"
            raise RuntimeError(
                f"{name} is loaded already, from {where}: install() before the first import of {top}, or do without it"
            )
    for name, content in wanted.items():
        if name not in _ours:
            _ours[name] = module = ModuleType(name, f"Stands in for {name}: the functions of mhc_ops.compat.")
            if any(other.startswith(f"{name}.") for other in wanted):
                module.__path__ = []
            vars(module).update(content)
    for name in wanted:
        parent, _, last = name.rpartition(".")
        if above := _ours.get(parent) or sys.modules.get(parent):  # there already, so import will not do it
            setattr(above, last, _ours[name])
    _look_here()


def fill(name: str, content: Mapping[str, Any]) -> None:
    """Add to the module `name` what it lacks of this content: now if it is loaded, else when it is imported."""
    _wanted[name] = content
    if name in sys.modules:
        _fill(sys.modules[name])
    _look_here()


def _fill(module: ModuleType) -> None:
    for attribute, value in _wanted.get(module.__name__, {}).items():
        if not hasattr(module, attribute):
            setattr(module, attribute, value)
            _filled.append((module, attribute))


class _Finder(MetaPathFinder, Loader):
    """Finds our modules; and a library's own that is to be filled, after it has run. Python's import does the rest:
    it loads parents first, which may be the library's own, and makes each module an attribute of its parent."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname in _ours:
            return ModuleSpec(fullname, self, is_package=hasattr(_ours[fullname], "__path__"))
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _wanted else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_fill(module: ModuleType) -> None:
                run(module)
                _fill(module)

            spec.loader.exec_module = run_and_fill  # type: ignore[method-assign]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _ours[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        _fill(module)


_FINDER = _Finder()


def _look_here() -> None:
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def replace(modules: Mapping[ModuleType, Mapping[str, Any]]) -> None:
    """Put these functions in the place of a library's own: {module: {name: function}}. Modules of the library that are
    loaded and have imported a function, under whichever name, get ours too. A second call does nothing."""
    ours_of: dict[int, Any] = {}
    originals: list[Any] = []  # kept, so that none of these ids is given to another object
    for module, content in modules.items():
        for name, ours in content.items():
            original = vars(module)[name]
            if original is not ours:
                ours_of[id(original)] = ours
                originals.append(original)
    tops = {module.__name__.partition(".")[0] for module in modules}
    for loaded in [module for name, module in sys.modules.items() if module and name.partition(".")[0] in tops]:
        for name, value in list(vars(loaded).items()):
            if id(value) in ours_of:
                _replaced.append((loaded, name, value))
                setattr(loaded, name, ours_of[id(value)])


def remove(top: str) -> None:
    """Take out what `put`, `fill` and `replace` added for this library. Functions that were imported since stay where
    they are. A second call does nothing."""
    for module, attribute, original in [entry for entry in _replaced if entry[0].__name__.partition(".")[0] == top]:
        _replaced.remove((module, attribute, original))
        setattr(module, attribute, original)
    for name in [name for name in _wanted if name.partition(".")[0] == top]:
        del _wanted[name]
    for module, attribute in [entry for entry in _filled if entry[0].__name__.partition(".")[0] == top]:
        _filled.remove((module, attribute))
        delattr(module, attribute)
    for name in [name for name in _ours if name.partition(".")[0] == top]:
        module = _ours.pop(name)
        parent, _, last = name.rpartition(".")
        if getattr(sys.modules.get(parent), last, None) is module:
            delattr(sys.modules[parent], last)
        if sys.modules.get(name) is module:
            del sys.modules[name]
    if not _wanted and not _ours and _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
