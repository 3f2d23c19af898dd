"""What `check` and `bench` found, and the file it is kept in; docs/measure.md names every field."""

import dataclasses
import datetime
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.check import listed
from ..testing.accuracy import Row
from . import files, peers, report
from .selection import NotMeasured
from .speed import Direction, Group, Growth, Measurement
from .training_step import Step

FORMAT = 2  # 1 had neither accuracy, spread nor scaling
DIRECTIONS: tuple[str, ...] = typing.get_args(Direction)
GROUPS: tuple[str, ...] = typing.get_args(Group)
LONGEST_VALUE = 40  # characters, of a wrong value in a message
LARGEST = 1e100  # of a number: far above anything measured, and its square is still one
KINDS: dict[Any, str] = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}
KINDS |= {list: "a list", dict: "an object"}


class Unreadable(report.Refused):
    """Not a file of results."""


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
    found = read(path) if path.exists() else now
    for name in report.versions():
        if found.versions.get(name) != now.versions[name]:
            there = found.versions.get(name)
            raise report.Refused(f"{path}: measured with {name} {there}, this is {now.versions[name]}")
    found.versions |= now.versions
    return found


def write(results: Results, path: Path) -> None:
    """An entry a line: easy to compare, and quick to write as often as a run does (json.dumps(indent=1) is not)."""
    fields = []
    for name, value in {"format": FORMAT, **vars(results)}.items():
        entries = [json.dumps(_as_json(entry), allow_nan=False) for entry in value] if isinstance(value, list) else []
        text = "[\n  " + ",\n  ".join(entries) + "\n ]" if entries else json.dumps(value, allow_nan=False)
        fields.append(f' "{name}": {text}')
    files.write(path, "{\n" + ",\n".join(fields) + "\n}\n")


def _as_json(entry: Any) -> Any:
    """Its fields, and the ratio to the copy that is derived from them."""
    derived = {name: getattr(entry, name) for name in ("of_copy", "over_copy") if hasattr(entry, name)}
    return report.finite({**vars(entry), **derived})


def save(results: Results, path: Path | None, last: bool = False) -> report.Refused | None:
    """As they come, or once where a file takes one text. A disk that fills up does not end a run, as what was measured
    is still to be printed: the error is returned."""
    try:
        if path is not None and (last or files.is_replaced(path)):
            write(results, path)
    except report.Refused as error:
        return error
    return None


def read(path: Path) -> Results:
    """Also of older files, which have less in them."""
    content = files.read_json(path)
    try:
        if not isinstance(content, dict) or not {"measurements", "accuracy"} & set(content):
            raise Unreadable("not written by mhc-ops check or bench")
        if typed(int, content.get("format", 1), "format") > FORMAT:
            raise Unreadable(f"written by a newer mhc-ops (format {content['format']}, this reads up to {FORMAT})")
        return typed(Results, {"command": "bench", **content}, "")
    except Unreadable as error:
        raise Unreadable(f"{path}: {error}") from error


def typed(kind: Any, value: Any, where: str) -> Any:
    """The value as the type that a field has, its texts printable. JSON has no NaN: null stands for it where a number
    must be."""
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        return _checked(value in inner, value, where, listed(inner))
    if origin in (typing.Union, types.UnionType):  # only ever with None
        return None if value is None else typed(inner[0], value, where)
    if kind is float and value is None:
        return math.nan
    stored = dict if dataclasses.is_dataclass(kind) else origin
    fits = isinstance(value, (int, float) if kind is float else stored) and isinstance(value, bool) == (kind is bool)
    _checked(fits and not (kind in (float, int) and abs(value) > LARGEST), value, where, KINDS[stored])
    if dataclasses.is_dataclass(kind):
        return _entry(kind, value, where)
    if origin is list:
        return [typed(inner[0], entry, f"{where}.{nth}") for nth, entry in enumerate(value)]
    if origin is dict:
        return {report.printable(name): typed(inner[1], entry, f"{where}.{name}") for name, entry in value.items()}
    return report.printable(value) if kind is str else value


def _entry(kind: Any, content: dict[str, Any], where: str) -> Any:
    """What the class knows of it."""
    found = {}
    for known in dataclasses.fields(kind):
        path = f"{where}.{known.name}".lstrip(".")
        if known.name in content:
            value = found[known.name] = typed(_hints(kind)[known.name], content[known.name], path)
            holds, words = RULES.get(known.name, (lambda value: True, ""))
            _checked(bool(holds(value)), content[known.name], path, words)
        elif known.default is MISSING and known.default_factory is MISSING:
            raise Unreadable(f"{path} is missing")
    if kind is Growth:
        for name in ("cases", "megabytes", "microseconds", "copy_microseconds"):
            points = len(found["sizes"])
            _checked(len(found[name]) == points, found[name], f"{where}.{name}", f"a list of {points}, as sizes is")
    return kind(**found)


_hints = functools.cache(typing.get_type_hints)


def _checked(holds: bool, value: Any, where: str, words: str) -> Any:
    if not holds:
        text = report.shortened(json.dumps(value), LONGEST_VALUE)
        raise Unreadable(f"{report.shortened(where)} must be {words}, not {text}")
    return value


def _above_0(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(number > 1 / LARGEST for number in numbers)


def _is_floating_type(name: str) -> bool:
    """Or none, as in older files."""
    dtype = getattr(torch, name, None) if name else torch.float32
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


# Beyond their types, for tables, pages and comparisons to be made of them.
RULES: dict[str, tuple[Callable[[Any], object], str]] = {
    **dict.fromkeys(("sizes", "microseconds", "copy_microseconds", "milliseconds"), (_above_0, "above 0")),
    **dict.fromkeys(("per_megabyte", "copy_per_megabyte"), (bool, "other than 0")),
    **dict.fromkeys(("subject", "case", "provider", "backend", "output", "size"), (str.split, "a name")),
    "dtype": (_is_floating_type, "a floating type of torch"),
}
