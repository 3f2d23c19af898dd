"""What `check` and `bench` found, and the file that keeps it; docs/measure.md names every field."""

import dataclasses
import datetime
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from ..testing.accuracy import Row
from . import files, peers, report
from .selection import NotMeasured
from .speed import DIRECTIONS, Measurement
from .training_step import StepTime

FORMAT = 2
SHORTEST, LONGEST = 1e-9, 1e15  # times in a file, in any unit


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
    """Refused unless the file has our format number, every field that is needed, and times that can be compared."""
    content = _printable(files.read_json(path))
    try:
        if content["format"] != FORMAT:
            raise report.Refused(
                f"{path}: written by another mhc-ops (format {content['format']}, this reads {FORMAT})"
            )
        lists = {name: [_entry(kind, entry) for entry in content.get(name, ())] for name, kind in ENTRIES.items()}
        found = _entry(Results, {"command": "bench", **content, **lists})
        times = [time for m in found.measurements for time in (m.microseconds, m.copy_microseconds)]
        times += [time for s in found.steps for time in (s.milliseconds, 100 + (s.overhead_percent or 0))]
        if all(SHORTEST < t < LONGEST for t in times) and all(m.direction in DIRECTIONS for m in found.measurements):
            return found
    except (KeyError, TypeError, AttributeError, OverflowError):
        pass
    raise report.Refused(f"{path}: not written by mhc-ops check or bench: a field is missing or wrong")


def _entry(kind: Any, content: dict[str, Any]) -> Any:
    """The fields that the class knows; TypeError if one has another type."""
    types = {f.name: f.type for f in dataclasses.fields(kind) if f.name in content}
    return kind(**{name: _of_type(content[name], of, kind is Row) for name, of in types.items()})


def _of_type(value: Any, kind: Any, null_is_nan: bool = False) -> Any:
    """The value if it has the type. JSON has no NaN: null stands for it in an error."""
    if null_is_nan and value is None and kind is float:
        return math.nan
    inner = get_args(kind)
    if get_origin(kind) is dict:
        return {name: _of_type(entry, inner[1]) for name, entry in value.items()}
    if get_origin(kind) is list:
        return [_of_type(entry, inner[0]) for entry in value]
    if isinstance(value, int) and not isinstance(value, bool):
        number = float(value)  # OverflowError for one that nothing here is
        value = number if float in (kind, *inner) else value
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(kind)
    return value


def _printable(value: Any) -> Any:
    """Foreign texts must not reach a terminal as they are."""
    if isinstance(value, dict):
        return {report.printable(name): _printable(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_printable(entry) for entry in value]
    return report.printable(value) if isinstance(value, str) else value
