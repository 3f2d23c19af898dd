"""mhc-ops convert: convert parameters of mHC in files of safetensors to another library's format, or add fresh ones."""

import argparse
import importlib.util
import os.path
from collections import Counter
from functools import partial
from pathlib import Path

from ..measure import files, report
from ..measure.report import Refused
from . import (
    Format,
    Parameters,
    State,
    between,
    checkpoint,
    fold_gamma,
    groups,
    options,
    parameters,
    places,
    refuse_other_formats,
    to_ours,
)

FORMATS = [format.value for format in Format]
OF_MODELS = (Format.DEEPSEEK, Format.TRANSFORMERS)  # formats whose models have a config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", metavar="IN.safetensors", type=Path, help="or a folder of shards, or their *.index.json")
    add("output", metavar="OUT.safetensors", type=_output, help="of shards: a new or empty folder")
    either = parser.add_mutually_exclusive_group(required=True).add_argument
    either("--from", dest="source", choices=FORMATS, help="whose parameters these are")
    either("--upcycle", metavar="FRESH", type=Path, help="these are of a plain model: add the maps of this fresh one")
    add("--to", dest="target", choices=FORMATS, help="default: mhc_ops")
    add("--fold-gamma", action="store_true", help="multiply norm weights into phi")
    several = partial(add, nargs="+", action="extend", default=[])
    several("--names", metavar="OLD=NEW", type=_name, help="of --upcycle: where modules moved, as a.{i}.b=c.{2i}")


def run_convert(given: argparse.Namespace) -> int:
    if importlib.util.find_spec("safetensors") is None:
        raise Refused("it reads and writes safetensors, which is not installed: pip install safetensors")
    if given.upcycle is None and given.names:
        raise Refused("--names goes with --upcycle")
    if given.upcycle is not None and (given.target or given.fold_gamma):
        raise Refused("--to and --fold-gamma go with --from")
    given.target = given.target or Format.MHC_OPS.value
    index = checkpoint.index_of(given.checkpoint)
    _refuse_output(given.output, sharded=index is not None)
    held = checkpoint.held(given.checkpoint, index)
    return _convert(given, index, held) if given.upcycle is None else _upcycle(given, index, held)


def _convert(given: argparse.Namespace, index: checkpoint.Index | None, held: dict[str, Path]) -> int:
    try:
        own = _own(held, given.source)
        found = {begin: one for state in own.values() for begin, one in parameters(state, given.source).items()}
        if not found:
            raise Refused(f"{given.checkpoint}: there are no parameters of mHC in it as {given.source} has them")
        refuse_other_formats(held, given.source, given.target)
        converted = {path: _converted(state, given) for path, state in own.items()}
        others = _others(held, own, converted)
    except ValueError as error:
        raise Refused(f"{given.checkpoint}: {str(error).removeprefix('convert: ')}") from error
    checkpoint.write(given.output, index, others, converted)
    print(f"{len(found)} of mHC among {len(held)} tensors: {', '.join(map(report.printable, found))}")
    _say_what_they_compute(found, given.source, given.target)
    return 0


def _upcycle(given: argparse.Namespace, index: checkpoint.Index | None, held: dict[str, Path]) -> int:
    of_fresh = checkpoint.held(given.upcycle, checkpoint.index_of(given.upcycle))
    try:
        found = groups(of_fresh, Format.MHC_OPS)
        maps = {key: tensor for state in _own(of_fresh, Format.MHC_OPS).values() for key, tensor in state.items()}
        placed = places(checkpoint.shapes(held), checkpoint.shapes(of_fresh) | maps, dict(given.names))
        others: dict[Path, dict[str, str]] = {path: {} for path in held.values()}
        for key, path in held.items():
            others[path][key] = placed[key]
        new: dict[Path, State] = {path: {} for path in others}
        for begin, keys in found.items():
            new[_file_of(begin, others)] |= {key: maps[key] for key in keys}
        _refuse_two(others, new)
    except ValueError as error:
        raise Refused(f"{given.checkpoint}: {str(error).removeprefix('convert: ')}") from error
    checkpoint.write(given.output, index, others, new)
    print(f"{len(found)} of mHC added to {len(held)} tensors: {', '.join(map(report.printable, found))}")
    return 0


def _file_of(begin: str, others: dict[Path, dict[str, str]]) -> Path:
    """That of the first tensor of a connection's layer; for a head the last one."""
    there = (path for path, keys in others.items() if any(new.startswith(f"{begin}.") for new in keys.values()))
    return next(there, list(others)[-1])


def _name(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be OLD=NEW, got {text!r}")
    return old, new


def _output(text: str) -> Path:
    return Path(text) if os.path.isdir(text) else files.output(text)


def _refuse_output(path: Path, sharded: bool) -> None:
    folder = path.is_dir()
    with files.refusing(path):
        if sharded and path.exists() and not (folder and not any(path.iterdir())):
            raise Refused(f"{path}: shards are written to a new or empty folder")
    if not sharded and folder:
        raise Refused(f"{path}: is a folder")
    if not sharded:
        files.refuse_what_is_not_replaced(path)


def _own(held: dict[str, Path], source: str) -> dict[Path, State]:
    """The tensors of mHC; a group belongs to the file of its first tensor. They are small: all are held at once."""
    own: dict[Path, State] = {}
    for keys in groups(held, source).values():
        together = own.setdefault(held[keys[0]], {})
        for key in keys:
            together |= checkpoint.read(held[key], [key])[0]
    return own


def _others(held: dict[str, Path], own: dict[Path, State], converted: dict[Path, State]) -> dict[Path, dict[str, str]]:
    """The keys of every file that stay as they are."""
    taken = {key for state in own.values() for key in state}
    others: dict[Path, dict[str, str]] = {path: {} for path in held.values()}
    for key, path in held.items():
        if key not in taken:
            others[path][key] = key
    _refuse_two(others, converted)
    return others


def _refuse_two(others: dict[Path, dict[str, str]], new: dict[Path, State]) -> None:
    there = Counter(key for keys in (*new.values(), *(names.values() for names in others.values())) for key in keys)
    if twice := [key for key, count in there.items() if count > 1]:
        raise ValueError(f"convert: two tensors would be {twice[0]}")


def _converted(state: State, given: argparse.Namespace) -> State:
    if given.fold_gamma:
        return between(fold_gamma(to_ours(state, given.source)), Format.MHC_OPS, given.target)
    return between(state, given.source, given.target)


def _say_what_they_compute(found: dict[str, Parameters], source: str, target: str) -> None:
    """Print the options that go with the parameters, and warn if source and target compute different functions."""
    of_connections = {own.alpha.numel() for own in found.values()} - {1}
    if not of_connections:
        return
    sections = min(of_connections)
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
