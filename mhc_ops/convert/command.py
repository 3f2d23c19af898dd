"""mhc-ops convert: parameters of mHC in a file of safetensors, as another library has them."""

import argparse
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from ..measure import arguments, files, report
from ..measure.report import Refused
from . import Format, Parameters, State, between, fold_gamma, options, parameters, to_ours

FORMATS = [format.value for format in Format]
OF_MODELS = (Format.DEEPSEEK, Format.TRANSFORMERS)  # which have a config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="IN.safetensors", type=Path)
    parser.add_argument("output", metavar="OUT.safetensors", type=arguments.output)
    parser.add_argument("--from", dest="source", required=True, choices=FORMATS, help="whose parameters these are")
    parser.add_argument("--to", dest="target", default="mhc_ops", choices=FORMATS, help="default: %(default)s")
    parser.add_argument("--fold-gamma", action="store_true", help="multiply norm weights into phi")


def run_convert(given: argparse.Namespace) -> int:
    if importlib.util.find_spec("safetensors") is None:
        raise Refused("it reads and writes safetensors, which is not installed: pip install safetensors")
    state, metadata = _read(given.checkpoint)
    try:
        found = parameters(state, given.source)
        converted = _converted(state, given)
    except ValueError as error:
        raise Refused(f"{given.checkpoint}: {str(error).removeprefix('convert: ')}") from error
    if not found:
        raise Refused(f"{given.checkpoint}: there are no parameters of mHC in it as {given.source} has them")
    _write(given.output, converted, metadata)
    print(f"{len(found)} of mHC among {len(state)} tensors: {', '.join(found)}")
    _say_what_they_compute(found, given.source, given.target)
    return 0


def _converted(state: State, given: argparse.Namespace) -> State:
    if given.fold_gamma:
        return between(fold_gamma(to_ours(state, given.source)), Format.MHC_OPS, given.target)
    return between(state, given.source, given.target)


def _say_what_they_compute(found: dict[str, Parameters], source: str, target: str) -> None:
    """Parameters are half of a function: with which options they were, and are, computed with."""
    sections = 2 if any(own.alpha.numel() == 2 for own in found.values()) else 3
    if Format.MHC_OPS in (source, target):
        other = source if target == Format.MHC_OPS else target
        config = ", with norm_eps and hc_eps of the model's config" if other in OF_MODELS else ""
        print(f"{other} computes as {_described(other, sections)} does{config}")
    elif options(source, sections) != options(target, sections):
        there, here = _described(target, sections), _described(source, sections)
        report.say(f"not the same function: {target} computes as {there}, {source} as {here}")


def _described(format: str, sections: int) -> str:
    words = [f"{name}={value!r}" for name, value in options(format, sections).items()]
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
