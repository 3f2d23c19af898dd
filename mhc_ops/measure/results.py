"""What `check` and `bench` found, and the file it is kept in; docs/measure.md names every field."""

import dataclasses
import datetime
import functools
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import files, peers, report
from .accuracy import Row
from .speed import LARGEST, Direction, Group, Growth, Measurement
from .training_step import Step

FORMAT = 2  # 1 had neither accuracy, spread nor scaling
DIRECTIONS: tuple[str, ...] = typing.get_args(Direction)
GROUPS: tuple[str, ...] = typing.get_args(Group)
LONGEST_VALUE = 40  # characters of a wrong value in a message
_NUMBERS = {float: "a number", int: "a whole number"}
_WORDS = _NUMBERS | {str: "a text", bool: "true or false", list: "a list", dict: "an object"}


class Unreadable(report.Refused):
    """Not a file of results."""


@dataclass(frozen=True)
class NotMeasured:
    """where: a case, a family of ops, or "" for all; failed: wrong or crashed, not just absent or out of time."""

    where: str
    provider: str
    reason: str
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.where + ': ' if self.where else ''}{self.provider} did not run: {self.reason}"


def by_reason(entries: Sequence[NotMeasured]) -> dict[tuple[str, str, bool], list[str]]:
    """Each provider, reason and whether it failed once, with where that was."""
    found: dict[tuple[str, str, bool], list[str]] = {}
    for entry in entries:
        found.setdefault((entry.provider, entry.reason, entry.failed), []).append(entry.where)
    return found


@dataclass
class Results:
    """command: "check" or "bench"; complete: neither interrupted nor out of time; selection: what bench was limited to;
    stack_megabytes: peak of a stack of layers; precision: what a peer computes in, where that is less than ours;
    add_microseconds: what torch.add of two small tensors takes on the host, the unit of host times; steps: training
    steps of a model."""

    command: str
    date: str = ""
    complete: bool = False
    budget_seconds: float | None = None
    selection: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    precision: dict[str, str] = field(default_factory=dict)
    add_microseconds: float | None = None
    measurements: list[Measurement] = field(default_factory=list)
    accuracy: list[Row] = field(default_factory=list)
    scaling: list[Growth] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stack_megabytes: dict[str, float | None] = field(default_factory=dict)
    not_measured: list[NotMeasured] = field(default_factory=list)


def begin(command: str) -> Results:
    """Empty, with today's date and what is installed."""
    versions = {**report.versions(), **{peer.name: peers.version(peer) or "-" for peer in peers.PEERS}}
    return Results(command, datetime.date.today().isoformat(), versions=versions)


def resume(path: Path) -> Results:
    """What an earlier run has written, to be added to; Refused where that was another machine or other versions."""
    now = begin("bench")
    if not path.exists():
        return now
    found = read(path)
    for name, version in report.versions().items():
        if found.versions.get(name) != version:
            raise report.Refused(f"{path}: measured with {name} {found.versions.get(name)}, this is {version}")
    found.versions |= now.versions
    return found


def write(results: Results, path: Path) -> None:
    """An entry a line: easy to compare, and quick to write as often as a run does (json.dumps(indent=1) is not)."""
    fields = []
    for name, value in {"format": FORMAT, **vars(results)}.items():
        entries = [_as_json(entry) for entry in value] if isinstance(value, list) else []
        lines = ",\n  ".join(json.dumps(entry, allow_nan=False) for entry in entries)
        fields.append(f' "{name}": ' + (f"[\n  {lines}\n ]" if entries else json.dumps(value, allow_nan=False)))
    files.write(path, "{\n" + ",\n".join(fields) + "\n}\n")


def _as_json(entry: Any) -> Any:
    """Its fields, and the ratio to the copy that is derived from them."""
    derived = {name: getattr(entry, name) for name in ("of_copy", "over_copy") if hasattr(entry, name)}
    return report.finite({**vars(entry), **derived})


class Keeper:
    """Writes the results as they come, or once where a file takes one text. A disk that fills up does not end a run:
    what was measured is still printed."""

    def __init__(self, found: Results, path: Path | None) -> None:
        self._found = found
        self._path = path
        self._again = path is not None and files.is_replaced(path)
        self._error: files.Unwritable | None = None

    def save(self) -> None:
        if self._again:
            self.finish()

    def finish(self) -> None:
        self._error = None
        if self._path is not None:
            try:
                write(self._found, self._path)
            except files.Unwritable as error:
                self._error = error

    def refuse_if_lost(self) -> None:
        if self._error is not None:
            raise self._error


def read(path: Path) -> Results:
    """Also of older files, which have less in them."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or not {"measurements", "accuracy"} & set(content):
        raise Unreadable(f"{path}: not written by mhc-ops check or bench")
    try:
        written = typed(int, content.get("format", 1), "format")
        if written > FORMAT:
            raise Unreadable(f"written by a newer mhc-ops (format {written}, this reads up to {FORMAT})")
        found = typed(Results, {"command": "bench", **content}, "")
        for nth, row in enumerate(found.accuracy):
            _refuse_unless(_is_floating_type(row.dtype), f"accuracy.{nth}.dtype", "a floating type of torch", row.dtype)
        return found
    except Unreadable as error:
        raise Unreadable(f"{path}: {error}") from error


def typed(kind: Any, value: Any, where: str) -> Any:
    """The value as the type that a field has. JSON has no NaN: null stands for it where a number must be."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Annotated:
        found, check = typed(inner[0], value, where), inner[1]
        _refuse_unless(check.holds(found), where, check.words, value)
        return found
    if origin is typing.Literal:
        _refuse_unless(value in inner, where, " or ".join([", ".join(inner[:-1]), inner[-1]]), value)
        return value
    if origin in (typing.Union, types.UnionType):  # only ever with None
        return None if value is None else typed(inner[0], value, where)
    if dataclasses.is_dataclass(kind):
        return _entry(kind, typed(dict, value, where), where)
    if kind is float and value is None:
        return math.nan
    fits = isinstance(value, (int, float) if kind is float else origin)
    fits = fits and (kind is bool or not isinstance(value, bool))
    _refuse_unless(fits and not (kind in _NUMBERS and abs(value) > LARGEST), where, _WORDS[origin], value)
    if origin is list and inner:
        return [typed(inner[0], entry, f"{where}.{nth}") for nth, entry in enumerate(value)]
    if origin is dict and inner:
        return {name: typed(inner[1], entry, f"{where}.{name}") for name, entry in value.items()}
    return value


def _refuse_unless(holds: bool, where: str, words: str, value: Any) -> None:
    if not holds:
        text = json.dumps(value)
        text = text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "…"
        raise Unreadable(f"{where} must be {words}, not {text}")


def _entry(kind: Any, content: dict[str, Any], where: str) -> Any:
    """What the class knows of it."""
    found = {}
    for name, (of, required) in _fields(kind).items():
        path = f"{where}.{name}".lstrip(".")
        if name in content:
            found[name] = typed(of, content[name], path)
        elif required:
            raise Unreadable(f"{path} is missing")
    return kind(**found)


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Of each field its type, and whether it must be there."""
    kinds, missing = typing.get_type_hints(kind, include_extras=True), dataclasses.MISSING
    return {
        f.name: (kinds[f.name], f.default is missing and f.default_factory is missing) for f in dataclasses.fields(kind)
    }


def _is_floating_type(name: str) -> bool:
    """Or none, as in older files."""
    dtype = getattr(torch, name, None) if name else torch.float32
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
