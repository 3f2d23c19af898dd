"""What `check` and `bench` found, and the file it is kept in; docs/measure.md names every field."""

import dataclasses
import datetime
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from . import peers, report
from .accuracy import Row
from .scaling import Growth
from .speed import Measurement

FORMAT = 2  # 1 had neither accuracy, spread nor scaling

Entry = TypeVar("Entry")


class Unreadable(Exception):
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
    stack_megabytes: peak of a stack of layers; precision: what a peer computes in, where that is less than ours."""

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
    stack_megabytes: dict[str, float | None] = field(default_factory=dict)
    not_measured: list[NotMeasured] = field(default_factory=list)


def begin(command: str) -> Results:
    """Empty, with today's date and what is installed."""
    versions = {**report.versions(), **{peer.name: peers.version(peer) or "-" for peer in peers.PEERS}}
    return Results(command, datetime.date.today().isoformat(), versions=versions)


def as_json(results: Results) -> dict[str, Any]:
    content = dict(vars(results))
    content["measurements"] = [report.finite(m.as_json()) for m in results.measurements]
    content["accuracy"] = [report.finite(vars(row)) for row in results.accuracy]
    content["scaling"] = [report.finite({**vars(g), "over_copy": g.over_copy}) for g in results.scaling]
    content["not_measured"] = [vars(entry) for entry in results.not_measured]
    return {"format": FORMAT, **content}


def write(results: Results, path: Path) -> None:
    """In one step: whoever reads the file, or whatever ends this process, finds the old or the new one whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(_text(as_json(results)), encoding="utf-8")
    os.replace(part, path)


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
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path}: {error}") from error
    if not isinstance(content, dict) or not {"measurements", "accuracy"} & set(content):
        raise Unreadable(f"{path}: not written by mhc-ops check or bench")
    if content.get("format", 1) > FORMAT:
        raise Unreadable(f"{path}: written by a newer mhc-ops (format {content['format']}, this reads up to {FORMAT})")
    try:
        results = _entry(Results, {"command": "bench", **content})
        kinds = {"measurements": Measurement, "accuracy": Row, "scaling": Growth, "not_measured": NotMeasured}
        for name, kind in kinds.items():
            setattr(results, name, [_entry(kind, entry) for entry in content.get(name, [])])
    except (TypeError, AttributeError) as error:
        raise Unreadable(f"{path}: {error}") from error
    return results


def _entry(kind: type[Entry], content: dict[str, Any]) -> Entry:
    """What the class knows of it. JSON has no NaN: null stands for it where a number must be."""
    known = {f.name: f.type for f in dataclasses.fields(kind) if f.name in content}  # type: ignore[arg-type]
    return kind(**{n: math.nan if content[n] is None and t is float else content[n] for n, t in known.items()})
