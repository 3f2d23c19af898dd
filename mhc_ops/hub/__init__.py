"""This package as a kernel of the Hugging Face hub, for `kernels` 0.17 and its kernel-builder.

    mhc-ops hub DIR
    kernels.get_local_kernel(Path(DIR))                # or LOCAL_KERNELS=org/mhc-ops=DIR and get_kernel("org/mhc-ops")

The loader imports a variant, build/torch-{cpu,cuda,rocm}, under the `id` of its metadata. All imports in it are
relative and its custom ops are in a namespace of that id, so it works beside an installed mhc_ops or another version
from the hub. A variant has the operators, modules and `layers`. It has no commands, no stand-ins for other libraries
and no TileLang kernels, because a hub kernel may need nothing but torch and what torch brings.
"""

import base64
import hashlib
import json
from pathlib import Path

import mhc_ops

NAME = "mhc-ops"
REPOSITORY = f"kernels-community/{NAME}"
VERSION = 0  # the hub's number for a kernel before its first release; after it, one more for each incompatible change
PACKAGE = Path(mhc_ops.__file__).parent
FOLDERS = ("core", "mhc", "conv")
LEFT_OUT = ("__pycache__", "tilelang")
KINDS = (".py", ".c", ".h", ".hip", ".sh")
# The GPUs of docs/gpus.md, by variant. +PTX: also on every newer compute capability.
ARCHS = {"cpu": [], "cuda": ["8.0+PTX"], "rocm": ["gfx942", "gfx950"]}
VARIANTS = tuple(ARCHS)
# Older versions of `kernels` import this module instead of the variant.
OLD_LOADERS = '''"""The names of the variant, for versions of `kernels` that import this folder."""

import importlib.util
import json
import sys
from pathlib import Path

_variant = Path(__file__).parent.parent
_id = json.loads((_variant / "metadata.json").read_text())["id"]
if _id not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_id, _variant / "__init__.py")
    sys.modules[_id] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_id])
__all__ = sys.modules[_id].__all__
globals().update({name: getattr(sys.modules[_id], name) for name in __all__})
'''


def folder() -> dict[str, str]:
    """The files that `mhc-ops hub` writes: {path: text}. `build` is what users load, the rest is for kernel-builder."""
    content, own = files(), PACKAGE / "hub"
    written = {
        "CARD.md": card(content),
        "benchmarks/benchmark.py": (own / "benchmark.py").read_text("utf-8"),
        "build.toml": build_toml(),
        "build/CARD.md": card(content),
        "flake.nix": (own / "flake.nix").read_text("utf-8"),
    }
    for path, text in content.items():
        written[f"torch-ext/{mhc_ops.__name__}/{path}"] = text
    for backend in VARIANTS:
        for path, text in variant(backend, content).items():
            written[f"build/torch-{backend}/{path}"] = text
    return written


def files() -> dict[str, str]:
    """The sources of every variant: {path: text}."""
    content = {"__init__.py": _init(), "layers.py": (PACKAGE / "hub" / "layers.py").read_text("utf-8")}
    content["layers.py"] = content["layers.py"].replace("from ..", "from .")  # it lies one folder higher there
    for path in sorted(path for name in FOLDERS for path in (PACKAGE / name).rglob("*")):
        place = path.relative_to(PACKAGE)
        if path.suffix in KINDS and not set(place.parts) & set(LEFT_OUT):
            content[place.as_posix()] = path.read_text("utf-8")
    return content


def variant(backend: str, content: dict[str, str]) -> dict[str, str]:
    """The sources, the module for old loaders and the metadata."""
    content = {**content, f"{mhc_ops.__name__}/__init__.py": OLD_LOADERS}
    return {**content, "metadata.json": metadata(backend, content)}


def metadata(backend: str, content: dict[str, str]) -> str:
    """What the loader reads. The id differs between backends and between contents."""
    identity = hashlib.sha256(json.dumps([backend, content]).encode()).hexdigest()
    hashed = {path: hashlib.sha256(text.encode()).digest() for path, text in sorted(content.items())}
    found = {
        "name": NAME,
        "id": f"_mhc_ops_{backend}_{identity[:12]}",
        "version": VERSION,
        "license": "MIT",
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend, **({"archs": ARCHS[backend]} if ARCHS[backend] else {})},
        "digest": {
            "algorithm": "sha256",
            "files": {path: base64.b64encode(value).decode() for path, value in hashed.items()},
        },
    }
    return json.dumps(found, indent=2) + "\n"


def build_toml() -> str:
    """How kernel-builder makes `build` of `torch-ext`. kernels 0.17 takes the last two keys with underscores only."""
    return f"""\
[general]
name = "{NAME}"
version = {VERSION}
edition = 5
license = "MIT"
backends = {json.dumps(VARIANTS)}

[general.hub]
repo-id = "{REPOSITORY}"

[torch-noarch]
pyext = {json.dumps([kind[1:] for kind in KINDS])}
cuda_capabilities = {json.dumps(ARCHS["cuda"])}
rocm_archs = {json.dumps(ARCHS["rocm"])}
"""


def card(content: dict[str, str]) -> str:
    """The page of the repository. kernel-builder fills templates in it; it has none."""
    layers = [line.split()[1].partition("(")[0] for line in content["layers.py"].splitlines() if line[:6] == "class "]
    filled = (PACKAGE / "hub" / "CARD.md").read_text("utf-8")
    for word, value in {"REPOSITORY": REPOSITORY, "VERSION": str(VERSION)}.items():
        filled = filled.replace(word, value)
    for word, names in {"FUNCTIONS": _public(), "LAYERS": layers}.items():
        filled = filled.replace(word, "\n".join(f"- `{name}`" for name in names))
    return filled


def _public() -> dict[str, str]:
    """The public names: {name: the module that defines it, relative to the package}."""
    return {name: getattr(mhc_ops, name).__module__.removeprefix(mhc_ops.__name__) for name in mhc_ops.__all__}


def _init() -> str:
    """The public names, imported as the package itself imports them."""
    public = _public()
    lines = [
        f'"""mhc_ops {mhc_ops.__version__}: {(mhc_ops.__doc__ or "").splitlines()[0]}"""',
        "",
        "from . import layers",
        "from .core.backend import read_environment",
        *(f"from {module} import {name}" for name, module in public.items()),
        "",
        f'__version__ = "{mhc_ops.__version__}"',
        "read_environment()",
        "",
        f"__all__ = {json.dumps(sorted([*public, 'layers']), indent=4)}",
        "",
    ]
    return "\n".join(lines)
