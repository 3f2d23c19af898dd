"""What `check` and `bench` found, and the file it is kept in; docs/measure.md names every field."""

import dataclasses
import datetime
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import files, peers, report
from .accuracy import Row
from .scaling import Growth
from .speed import Measurement
from .training_step import Step

FORMAT = 2  # 1 had neither accuracy, spread nor scaling

DIRECTIONS = ("forward", "backward", "both")
GROUPS = ("training", "decode", "sweep")
LARGEST = 1e100  # of a number: far above anything measured, and its square is still one
LONGEST = 40  # characters of a wrong value in a message
_WORDS = {
    float: "a number",
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


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


@dataclass
class Results:
    """command: "check" or "bench"; complete: neither interrupted nor out of time; selection: what bench was limited to;
    stack_megabytes: peak of a stack of layers; precision: what a peer computes in, where that is less than ours; steps:
    training steps of a model."""

    command: str
    date: str = ""
    complete: bool = False
    budget_seconds: float | None = None
    selection: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    precision: dict[str, str] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    accuracy: list[Row] = field(default_factory=list)
    scaling: list[Growth] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stack_megabytes: dict[str, float | None] = field(default_factory=dict)
    not_measured: list[NotMeasured] = field(default_factory=list)


def _positive(value: float) -> bool:
    return value > 1 / LARGEST


def _is_floating_type(name: str) -> bool:
    dtype = getattr(torch, name, None) if name else torch.float32
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _all_positive(values: list[float]) -> bool:
    return bool(values) and all(map(_positive, values))


def _one_of(*names: str) -> tuple[Callable[[Any], bool], str]:
    return names.__contains__, " or ".join([", ".join(names[:-1]), names[-1]])


# What a value must be, beyond its type, for tables, pages and comparisons to be made of it.
_SENSE: dict[tuple[type, str], tuple[Callable[[Any], bool], str]] = {
    (Measurement, "microseconds"): (_positive, "above 0"),
    (Measurement, "copy_microseconds"): (_positive, "above 0"),
    (Measurement, "direction"): _one_of(*DIRECTIONS),
    (Measurement, "group"): _one_of(*GROUPS),
    (Growth, "direction"): _one_of(*DIRECTIONS),
    (Growth, "sizes"): (_all_positive, "numbers above 0"),
    (Growth, "microseconds"): (_all_positive, "numbers above 0"),
    (Growth, "copy_microseconds"): (_all_positive, "numbers above 0"),
    (Growth, "per_megabyte"): (bool, "other than 0"),
    (Growth, "copy_per_megabyte"): (bool, "other than 0"),
    (Step, "milliseconds"): (_positive, "above 0"),
    (Row, "dtype"): (_is_floating_type, "a floating type of torch, or empty"),
}


def begin(command: str) -> Results:
    """Empty, with today's date and what is installed."""
    versions = {**report.versions(), **{peer.name: peers.version(peer) or "-" for peer in peers.PEERS}}
    return Results(command, datetime.date.today().isoformat(), versions=versions)


def as_json(results: Results) -> dict[str, Any]:
    content = dict(vars(results))
    content["measurements"] = [report.finite(m.as_json()) for m in results.measurements]
    content["accuracy"] = [report.finite(vars(row)) for row in results.accuracy]
    content["scaling"] = [report.finite({**vars(g), "over_copy": g.over_copy}) for g in results.scaling]
    content["steps"] = [report.finite(vars(step)) for step in results.steps]
    content["not_measured"] = [vars(entry) for entry in results.not_measured]
    return {"format": FORMAT, **content}


def write(results: Results, path: Path) -> None:
    files.write(path, _text(as_json(results)))


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


def _text(content: dict[str, Any]) -> str:
    """An entry a line: easy to compare, and quick to write as often as a run does (json.dumps(indent=1) is not)."""
    fields = []
    for name, value in content.items():
        entries = value if isinstance(value, list) else []
        lines = ",\n  ".join(json.dumps(entry, allow_nan=False) for entry in entries)
        fields.append(f' "{name}": ' + (f"[\n  {lines}\n ]" if entries else json.dumps(value, allow_nan=False)))
    return "{\n" + ",\n".join(fields) + "\n}\n"


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
        written = _typed(int, content.get("format", 1), "format")
        if written > FORMAT:
            raise Unreadable(f"written by a newer mhc-ops (format {written}, this reads up to {FORMAT})")
        return _typed(Results, {"command": "bench", **content}, "")
    except Unreadable as error:
        raise Unreadable(f"{path}: {error}") from error


def _typed(kind: Any, value: Any, where: str) -> Any:
    """The value as the type that a field has. JSON has no NaN: null stands for it where a number must be."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # only ever with None
        return None if value is None else _typed(inner[0], value, where)
    if dataclasses.is_dataclass(kind):
        return _entry(kind, _typed(dict, value, where), where)
    if kind is float and value is None:
        return math.nan
    fits = isinstance(value, (int, float) if kind is float else origin)
    if not fits or (isinstance(value, bool) and kind is not bool) or (kind in (int, float) and abs(value) > LARGEST):
        raise Unreadable(f"{where} must be {_WORDS[origin]}, not {_short(value)}")
    if origin is list and inner:
        return [_typed(inner[0], entry, f"{where}.{nth}") for nth, entry in enumerate(value)]
    if origin is dict and inner:
        return {name: _typed(inner[1], entry, f"{where}.{name}") for name, entry in value.items()}
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"


def _entry(kind: Any, content: dict[str, Any], where: str) -> Any:
    """What the class knows of it."""
    found = {}
    for name, (of, required) in _fields(kind).items():
        place = f"{where}.{name}".lstrip(".")
        if name in content:
            found[name] = _typed(of, content[name], place)
            sensible, words = _SENSE.get((kind, name), (None, ""))
            if sensible is not None and not sensible(found[name]):
                raise Unreadable(f"{place} must be {words}, not {_short(content[name])}")
        elif required:
            raise Unreadable(f"{place} is missing")
    return kind(**found)


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Of each field its type, and whether it must be there."""
    types_of = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        f.name: (types_of[f.name], f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(kind)
    }
