"""mhc-ops convert: parameters of mHC in a file of safetensors, as another library has them."""

import argparse
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from ..measure import arguments, files, report
from ..measure.report import Refused
from . import Format, State, between, groups, options

FORMATS = [format.value for format in Format]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="IN.safetensors", type=Path)
    parser.add_argument("output", metavar="OUT.safetensors", type=arguments.output)
    parser.add_argument("--from", dest="source", required=True, choices=FORMATS, help="whose parameters these are")
    parser.add_argument("--to", dest="target", default="mhc_ops", choices=FORMATS, help="default: %(default)s")


def run_convert(given: argparse.Namespace) -> int:
    if importlib.util.find_spec("safetensors") is None:
        raise Refused("it reads and writes safetensors, which is not installed: pip install safetensors")
    state, metadata = _read(given.checkpoint)
    try:
        found = groups(state, given.source)
        converted = between(state, given.source, given.target)
    except ValueError as error:
        raise Refused(f"{given.checkpoint}: {str(error).removeprefix('convert: ')}") from error
    if not found:
        raise Refused(f"{given.checkpoint}: there are no parameters of mHC in it as {given.source} has them")
    _write(given.output, converted, metadata)
    print(f"{len(found)} of mHC among {len(state)} tensors: {', '.join(found)}")
    _say_what_they_compute(given.source, given.target)
    return 0


def _say_what_they_compute(source: str, target: str) -> None:
    """Parameters are half of a function: with which options they were, and are, computed with."""
    if Format.MHC_OPS in (source, target):
        other = source if target == Format.MHC_OPS else target
        print(f"{other} computes as {_described(other)} does")
    elif options(source) != options(target):
        report.say(
            f"not the same function: {target} computes as {_described(target)}, {source} as {_described(source)}"
        )


def _described(format: str) -> str:
    words = [f"{name}={value}" for name, value in options(format).items()]
    return f"HyperConnection({', '.join(['layer, n, D', *words])})"


def _read(path: Path) -> tuple[State, dict[str, str]]:
    opened: Any = importlib.import_module("safetensors").safe_open
    try:
        with opened(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118 (no dict)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # SafetensorError, which is none of Python's
        raise Refused(f"{path}: it is not a file of safetensors: {error}") from error


def _write(path: Path, state: State, metadata: dict[str, str]) -> None:
    save: Any = importlib.import_module("safetensors.torch").save_file
    with files.replaced(path) as part:
        save(state, part, metadata or {"format": "pt"})
