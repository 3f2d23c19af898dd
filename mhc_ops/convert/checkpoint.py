"""Checkpoints of safetensors: one file, or shards in a folder with an index that says which tensor is in which."""

import contextlib
import importlib
import json
import os.path
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..measure import files
from ..measure.report import Refused
from . import State

INDEX = ".safetensors.index.json"


def index_of(checkpoint: Path) -> Path | None:
    """That of shards, given itself or by its folder; None of one file."""
    if not os.path.isdir(checkpoint):
        return checkpoint if checkpoint.name.endswith(".index.json") else None
    found = sorted(checkpoint.glob(f"*{INDEX}"))
    if len(found) != 1:
        raise Refused(f"{checkpoint}: there is {'more than one' if found else 'no'} *{INDEX} in it")
    return found[0]


def held(checkpoint: Path, index: Path | None) -> dict[str, Path]:
    """The file that each tensor is in."""
    if index is not None:
        return {key: index.with_name(name) for key, name in _read_index(index)["weight_map"].items()}
    with _opened(checkpoint) as file:
        return dict.fromkeys(file.keys(), checkpoint)


def read(path: Path, keys: Iterable[str]) -> tuple[State, dict[str, str]]:
    """These tensors of a file, and its metadata."""
    with _opened(path) as file:
        return {key: file.get_tensor(key) for key in keys}, file.metadata() or {}


def write(output: Path, index: Path | None, kept: Mapping[Path, list[str]], new: Mapping[Path, State]) -> None:
    """Each file with the tensors that it keeps and the new ones. One shard at a time is in memory, and the index comes
    last: a folder without it is not whole."""
    weight_map: dict[str, str] = {}
    size = 0
    if index is not None:
        output.mkdir(exist_ok=True)
    for path, keys in kept.items():
        state, metadata = read(path, keys)
        state |= new.get(path, {})
        if state:
            _save(output if index is None else output / path.name, state, metadata)
        weight_map |= dict.fromkeys(state, path.name)
        size += sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if index is not None:
        whole = {"metadata": {**_read_index(index).get("metadata", {}), "total_size": size}, "weight_map": weight_map}
        files.write(output / index.name, json.dumps(whole, indent=2) + "\n")


def _read_index(path: Path) -> dict[str, Any]:
    """Refused unless every tensor has a file, and all are there."""
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        names = set(index["weight_map"].values())
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Refused(f"{path}: it is not an index of safetensors: {error}") from error
    for name in names:
        if not isinstance(name, str) or name != Path(name).name:
            raise Refused(f"{path}: {name!r} is not the name of a file beside it")
        if not path.with_name(name).is_file():
            raise Refused(f"{path.with_name(name)}: No such file or directory")
    return index


def _save(path: Path, state: State, metadata: dict[str, str]) -> None:
    save: Any = importlib.import_module("safetensors.torch").save_file
    with files.replaced(path) as part:
        save(state, part, metadata or {"format": "pt"})


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    opened: Any = importlib.import_module("safetensors").safe_open
    try:
        with opened(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # SafetensorError, which is none of Python's
        raise Refused(f"{path}: it is not a file of safetensors: {error}") from error
