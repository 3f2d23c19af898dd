"""The package `causal_conv1d` by its name, where it is not installed: `install()` and `uninstall()`."""

import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import stand_ins
from . import causal_conv1d_interface, causal_conv1d_varlen, cpp_functions

NAME, VERSION = "causal_conv1d", "1.7.0"  # the version whose functions these are


def install() -> None:
    """Make a package `causal_conv1d`: later imports of it find `mhc_ops.compat.causal_conv1d`.

    The modules are `causal_conv1d`, `.causal_conv1d_interface`, `.causal_conv1d_varlen` and `.cpp_functions`. They stay
    until `uninstall()`, in this process only. A second call does nothing.

    Call it before the imports that look for the package. transformers looks when the file of a model is imported; a
    file that was imported earlier keeps what it found, and a warning names it. It is an error if the package itself is
    imported already.
    """
    if _METADATA in sys.meta_path:
        return
    stand_ins.put(_modules())
    sys.meta_path.insert(0, _METADATA)
    if late := _decided_before():
        warnings.warn(f"install: imported before, and not looking for {NAME} again: {', '.join(late)}", stacklevel=2)


def uninstall() -> None:
    """Take out what `install()` put in. Modules that were imported in between keep the functions that they found."""
    stand_ins.remove(NAME)
    if _METADATA in sys.meta_path:
        sys.meta_path.remove(_METADATA)


def _modules() -> dict[str, dict[str, Any]]:
    """The contents of the package and of its modules, by full name."""
    functions = {name: getattr(causal_conv1d_interface, name) for name in ("causal_conv1d_fn", "causal_conv1d_update")}
    modules: dict[str, dict[str, Any]] = {NAME: {**functions, "__version__": VERSION}}
    for part in (causal_conv1d_interface, causal_conv1d_varlen, cpp_functions):
        short = part.__name__.rpartition(".")[2]
        modules[f"{NAME}.{short}"] = {name: value for name, value in vars(part).items() if name.startswith(NAME)}
    return modules


def _decided_before() -> list[str]:
    """The model files of transformers that have already looked for the package."""
    loaded = [(name, vars(module)) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)]
    return [name for name, found in loaded if name.startswith("transformers.models.") and "causal_conv1d_fn" in found]


class _Metadata(Distribution):
    """What importlib.metadata finds: programs ask it for the version."""

    def read_text(self, filename: str) -> str | None:
        files = {"METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n", "top_level.txt": f"{NAME}\n"}
        return files.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class _MetadataFinder(DistributionFinder):
    def find_spec(self, *_: Any) -> None:
        """Modules are in sys.modules."""

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        name = None if context is None else context.name
        if name is None or name.lower().replace("-", "_") == NAME:
            yield _Metadata()


_METADATA = _MetadataFinder()
