"""What `check` and `bench` found, and the file that keeps it; docs/measure.md names every field."""

import dataclasses
import datetime
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..testing.accuracy import Row
from . import files, peers, report
from .report import Refused
from .selection import NotMeasured
from .speed import COMPILED, EAGER, Measurement, StepTime

FORMAT = 2


@dataclass
class Results:
    """command: "check" or "bench"; complete: not interrupted; selection: what bench was limited to; precision: what a
    peer computes in, if less than ours."""

    command: str
    date: str = ""
    complete: bool = False
    selection: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    precision: dict[str, str] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    accuracy: list[Row] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    not_measured: list[NotMeasured] = field(default_factory=list)


ENTRIES = {"measurements": Measurement, "accuracy": Row, "steps": StepTime, "not_measured": NotMeasured}


def begin(command: str) -> Results:
    """Empty results with today's date and what is installed."""
    versions = {**report.versions(), **{peer.name: peers.version(peer) or "-" for peer in peers.PEERS}}
    return Results(command, datetime.date.today().isoformat(), versions=versions)


def write(results: Results, path: Path) -> None:
    """Writes an entry a line: easy to compare, and faster than json.dumps(indent=1) for a run that writes often."""
    fields = []
    for name, value in {"format": FORMAT, **vars(results)}.items():
        entries = [json.dumps(report.finite(_fields(entry))) for entry in value] if isinstance(value, list) else []
        text = "[\n  " + ",\n  ".join(entries) + "\n ]" if entries else json.dumps(value)
        fields.append(f' "{name}": {text}')
    files.write(path, "{\n" + ",\n".join(fields) + "\n}\n")


def _fields(entry: Any) -> dict[str, Any]:
    return {**vars(entry), "of_copy": entry.of_copy} if isinstance(entry, Measurement) else vars(entry)


def save(results: Results, path: Path | None, last: bool = False) -> None:
    """Writes to a regular file each time, to a pipe or a device once."""
    if path is not None and (last or files.is_replaced(path)):
        write(results, path)


def read(path: Path) -> Results:
    """Refused unless the file has our format number and every field that is needed."""
    content = files.read_json(path, object_hook=_printable)
    try:
        if content["format"] != FORMAT:
            raise Refused(f"{path}: written by another mhc-ops (format {content['format']}, this reads {FORMAT})")
        lists = {name: [_entry(kind, entry) for entry in content.get(name, ())] for name, kind in ENTRIES.items()}
        return _entry(Results, {"command": "bench", **content, **lists})
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path}: not written by mhc-ops check or bench: a field is missing or wrong") from error


def _entry(kind: Any, content: dict[str, Any]) -> Any:
    """The fields that the class knows. JSON has no NaN: null stands for it in an error."""
    if kind is StepTime and "compiled" in content:  # as files were written until 2026-11-17
        mode, percent = COMPILED if content["compiled"] else EAGER, content.get("overhead_percent")
        content = {**content, "mode": mode, "ratio": [] if percent is None else [1 + percent / 100]}
    known = {f.name: content[f.name] for f in dataclasses.fields(kind) if f.name in content}
    return kind(**{name: math.nan if kind is Row and value is None else value for name, value in known.items()})


def _printable(found: dict[str, Any]) -> dict[str, Any]:
    """Foreign texts must not reach a terminal as they are."""
    shown = report.printable
    return {shown(name): shown(value) if isinstance(value, str) else value for name, value in found.items()}
