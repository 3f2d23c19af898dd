"""This package as a kernel of the Hugging Face hub: `build/torch-{cpu,cuda,rocm}` in a folder, for `kernels`.

    mhc-ops hub DIR
    kernels.get_local_kernel(Path(DIR))                # or LOCAL_KERNELS=org/mhc-ops=DIR and get_kernel("org/mhc-ops")

The loader imports a variant under the `id` of its metadata, beside whatever else is imported. So all imports in it are
relative, and its custom ops are in a namespace of that id: an installed mhc_ops, or another version from the hub, goes
on beside it. There are the operators, modules and `layers`; neither the commands nor what stands in for other
libraries, and no TileLang kernels, as a hub kernel may need nothing but torch and what comes with it.
"""

import hashlib
import json
from pathlib import Path

import mhc_ops

VARIANTS = ("cpu", "cuda", "rocm")
VERSION = 1  # of the kernel on the hub: a new one where something of it is taken away
PACKAGE = Path(mhc_ops.__file__).parent
FOLDERS = ("core", "mhc", "conv")
LEFT_OUT = ("__pycache__", "tilelang")
KINDS = (".py", ".h", ".hip", ".sh")


def variants() -> dict[str, dict[str, str]]:
    """What is in `build`: {folder of a variant: {path in it: text}}."""
    content = files()
    return {f"torch-{backend}": {**content, "metadata.json": metadata(backend, content)} for backend in VARIANTS}


def files() -> dict[str, str]:
    """All of a variant but its metadata: {path in it: text}."""
    content = {"__init__.py": _init(), "layers.py": (PACKAGE / "hub" / "layers.py").read_text("utf-8")}
    content["layers.py"] = content["layers.py"].replace("from ..", "from .")  # it lies one folder higher there
    for path in sorted(path for name in FOLDERS for path in (PACKAGE / name).rglob("*")):
        place = path.relative_to(PACKAGE)
        if path.suffix in KINDS and not set(place.parts) & set(LEFT_OUT):
            content[place.as_posix()] = path.read_text("utf-8")
    return content


def metadata(backend: str, content: dict[str, str]) -> str:
    """What the loader asks for. The id is another one for each backend and each content."""
    digest = hashlib.sha256(json.dumps([backend, content]).encode()).hexdigest()
    found = {
        "name": "mhc-ops",
        "id": f"_mhc_ops_{backend}_{digest[:12]}",
        "version": VERSION,
        "license": "MIT",
        "python-depends": [],
        "backend": {"type": backend},
    }
    return json.dumps(found, indent=2) + "\n"


def _init() -> str:
    """The public names of these folders, imported as the package itself does."""
    public = {name: getattr(mhc_ops, name).__module__.split(".") for name in mhc_ops.__all__ if _is_in_a_folder(name)}
    lines = [
        f'"""mhc_ops {mhc_ops.__version__}: {(mhc_ops.__doc__ or "").splitlines()[0]}"""',
        "",
        "from . import layers",
        "from .core.backend import read_environment",
        *(f"from .{'.'.join(module[1:])} import {name}" for name, module in public.items()),
        "",
        f'__version__ = "{mhc_ops.__version__}"',
        "read_environment()",
        "",
        f"__all__ = {json.dumps(sorted([*public, 'layers']), indent=4)}",
        "",
    ]
    return "\n".join(lines)


def _is_in_a_folder(name: str) -> bool:
    """But for names of TileLang's, whose kernels are left out."""
    module = getattr(getattr(mhc_ops, name), "__module__", "")  # a module has none
    return module.split(".")[:1] == ["mhc_ops"] and module.split(".")[1] in FOLDERS and "tilelang" not in name.lower()
