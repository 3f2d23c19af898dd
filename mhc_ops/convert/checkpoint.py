"""Checkpoints of safetensors: one file, or shards in a folder with an index that maps tensors to files."""

import contextlib
import errno
import importlib
import json
import os.path
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..measure import files, report
from ..measure.report import Refused
from . import State

INDEX = ".safetensors.index.json"


class Index(NamedTuple):
    """The index of shards. weight_map: {tensor: name of a file beside the index}   metadata: kept as it is"""

    path: Path
    weight_map: dict[str, str]
    metadata: dict[str, Any]


def index_of(checkpoint: Path) -> Index | None:
    """The index of shards, given by itself or by its folder; None for one file."""
    if not os.path.isdir(checkpoint):
        return _read_index(checkpoint) if checkpoint.name.endswith(".index.json") else None
    found = sorted(checkpoint.glob(f"*{INDEX}"))
    if len(found) != 1:
        raise Refused(f"{checkpoint}: there is {'more than one' if found else 'no'} *{INDEX} in it")
    return _read_index(found[0])


def held(checkpoint: Path, index: Index | None) -> dict[str, Path]:
    """The file of each tensor. Refused where the index and a shard contradict each other."""
    if index is not None:
        found = {key: index.path.with_name(name) for key, name in index.weight_map.items()}
        for path in dict.fromkeys(found.values()):
            with _opened(path) as file:
                there = dict.fromkeys(file.keys())
            for key in there:
                if found.get(key) != path:
                    raise Refused(f"{path}: {report.shortened(key)} is in it, and the index does not say so")
            for key in found:
                if found[key] == path and key not in there:
                    raise Refused(f"{path}: the index says that {report.shortened(key)} is in it, and it is not")
        return found
    with _opened(checkpoint) as file:
        return dict.fromkeys(file.keys(), checkpoint)


def read(path: Path, keys: Iterable[str]) -> tuple[State, dict[str, str]]:
    """These tensors of a file, and its metadata."""
    with _opened(path) as file:
        return {key: file.get_tensor(key) for key in keys}, file.metadata() or {}


def shapes(held: Mapping[str, Path]) -> State:
    """For each tensor one of its shape, on the meta device."""
    found: State = {}
    for path in dict.fromkeys(held.values()):
        with _opened(path) as file:
            keys = [key for key, there in held.items() if there == path]
            found |= {key: torch.empty(file.get_slice(key).get_shape(), device="meta") for key in keys}
    return {key: found[key] for key in held}


def write(output: Path, index: Index | None, kept: Mapping[Path, Mapping[str, str]], new: Mapping[Path, State]) -> None:
    """Write each file with the tensors that it keeps, {name in it: name to write}, and the new ones: all files or none.
    One shard at a time is in memory, and the index comes last."""
    if index is None:
        with files.refusing(output):
            for path in kept:
                _save(output, path, kept, new)
        return
    weight_map: dict[str, str] = {}
    size = 0
    with files.filled(output, last=index.path.name) as folder:
        for path in kept:
            state = _save(folder / path.name, path, kept, new)
            weight_map |= dict.fromkeys(state, path.name)
            size += sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        whole = {"metadata": {**index.metadata, "total_size": size}, "weight_map": weight_map}
        (folder / index.path.name).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _save(target: Path, path: Path, kept: Mapping[Path, Mapping[str, str]], new: Mapping[Path, State]) -> State:
    """Write what becomes of one file; nothing if it has no tensor left."""
    tensors, metadata = read(path, kept[path])
    state = {kept[path][key]: tensor for key, tensor in tensors.items()} | new.get(path, {})
    save: Any = importlib.import_module("safetensors.torch").save_file
    if state:
        with files.replaced(target) as part:  # gives the file its usual mode, which safetensors does not
            try:
                save(state, part, metadata or {"format": "pt"})
            except Exception as error:  # SafetensorError, which is not an OSError
                raise OSError(errno.EIO, str(error)) from error
    return state


def _read_index(path: Path) -> Index:
    """Refused unless every tensor has a file that exists."""
    content = files.read_json(path)
    content = content if isinstance(content, dict) else {}
    weight_map, metadata = content.get("weight_map"), content.get("metadata", {})
    if not isinstance(weight_map, dict) or not isinstance(metadata, dict):
        raise Refused(f"{path}: it is not an index of safetensors: weight_map and metadata must be objects")
    for name in weight_map.values():
        if not isinstance(name, str) or name in ("", "..") or name != Path(name).name:
            raise Refused(f"{path}: {report.shortened(repr(name))} is not the name of a file beside it")
    for name in dict.fromkeys(weight_map.values()):
        if not os.path.isfile(path.with_name(name)):
            raise Refused(f"{path.with_name(report.shortened(name))}: No such file or directory")
    return Index(path, weight_map, metadata)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    opened: Any = importlib.import_module("safetensors").safe_open
    try:
        with opened(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from error
    except Exception as error:  # SafetensorError, which is not an OSError
        raise Refused(f"{path}: it is not a file of safetensors: {error}") from error
