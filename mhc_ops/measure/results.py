"""What `check` and `bench` found, and the file that keeps it. docs/measure.md says what every field is."""

import dataclasses
import datetime
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..testing.accuracy import Row
from . import files, peers, report
from .report import Refused

FORMAT = 2
LONGEST_REASON = 300  # characters that a table shows of what a compiler says
EAGER, GRAPHS, COMPILED = MODES = ("eager", "graphs", "torch.compile")  # of a model, in the order of `bench`
PLAIN = "plain"  # residuals without streams


class Wrong(Exception):
    """A provider that does not compute the function is not timed."""


@dataclass(frozen=True)
class NotMeasured:
    """where: a case, a family of ops, or "" for all; failed: wrong or crashed, not only absent."""

    where: str
    provider: str
    reason: str
    failed: bool = False

    def __str__(self) -> str:
        return f"{self.where + ': ' if self.where else ''}{self.provider} did not run: {self.reason}"


@dataclass
class Measurement:
    """One provider on one case in one direction: "forward" without gradients, "backward" alone, "both"."""

    case: str
    provider: str
    direction: str
    microseconds: float
    bytes: float
    copy_microseconds: float
    host_microseconds: float | None = None
    peak_megabytes: float | None = None
    group: str = "training"  # or "decode"
    spread: float | None = None
    copy_spread: float | None = None
    samples: int | None = None
    bandwidth: float = field(init=False)
    of_copy: float = field(init=False)

    def __post_init__(self) -> None:
        self.bandwidth = self.bytes / self.microseconds / 1e3
        self.of_copy = self.copy_microseconds / self.microseconds


@dataclass(frozen=True)
class StepTime:
    """One provider at one size in one mode."""

    size: str
    provider: str
    mode: str
    milliseconds: float
    spread: float | None = None
    samples: int | None = None
    ratio: list[float] = field(default_factory=list)
    in_a_row: list[float] = field(default_factory=list)
    peak_megabytes: float | None = None
    difference: float | None = None
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def case(self) -> str:
        return name_of(self.size, self.mode)


def name_of(size: object, mode: str) -> str:
    """The name of a training step."""
    return f"{size}" if mode == EAGER else f"{mode} {size}"


@dataclass
class Results:
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

    @property
    def device(self) -> str:
        return self.versions.get("device", "unknown device")

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.accuracy if not row.passed]

    @contextmanager
    def failures_of(self, where: object, provider: str) -> Iterator[None]:
        """A failure is kept with its reason, and the work goes on."""
        try:
            yield
        except Exception as error:
            what = f"{provider} is wrong, so it is not timed" if isinstance(error, Wrong) else type(error).__name__
            reason = f"{what}: {error}"
            self.not_measured.append(NotMeasured(str(where), provider, " ".join(reason.split())[:LONGEST_REASON], True))


ENTRIES = {"measurements": Measurement, "accuracy": Row, "steps": StepTime, "not_measured": NotMeasured}


def begin(command: str) -> Results:
    """Empty results with today's date and what is installed."""
    versions = {**report.versions(), **{peer.name: peers.version(peer) or "-" for peer in peers.PEERS}}
    return Results(command, datetime.date.today().isoformat(), versions=versions)


def write(results: Results, path: Path | None, last: bool = True) -> None:
    """Writes an entry a line, which is easy to compare. A pipe or a device gets the last text alone."""
    if path is None or not (last or files.is_replaced(path)):
        return
    finite = partial(json.loads, parse_constant=lambda constant: None)  # JSON has neither NaN nor infinity
    fields = []
    for name, value in {"format": FORMAT, **vars(results)}.items():
        entries = [json.dumps(finite(json.dumps(vars(entry)))) for entry in value] if isinstance(value, list) else []
        text = "[\n  " + ",\n  ".join(entries) + "\n ]" if entries else json.dumps(value)
        fields.append(f' "{name}": {text}')
    files.write(path, "{\n" + ",\n".join(fields) + "\n}\n")


def read(path: Path) -> Results:
    """Refused unless the file has our format number and every field that is needed."""
    content = files.read_json(path, object_hook=_printable)
    try:
        if content["format"] != FORMAT:
            raise Refused(f"{path}: written by another mhc-ops (format {content['format']}, this reads {FORMAT})")
        lists = {name: [_entry(kind, entry) for entry in content.get(name, ())] for name, kind in ENTRIES.items()}
        return _entry(Results, {"command": "bench", **content, **lists})
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise Refused(f"{path}: not written by mhc-ops check or bench: a field is missing or wrong") from error


def _entry(kind: Any, content: dict[str, Any]) -> Any:
    """The fields that the class knows. JSON has no NaN: null stands for it in an error."""
    known = {f.name: content[f.name] for f in dataclasses.fields(kind) if f.init and f.name in content}
    return kind(**{name: math.nan if kind is Row and value is None else value for name, value in known.items()})


def _printable(found: dict[str, Any]) -> dict[str, Any]:
    """Foreign texts must not reach a terminal as they are."""
    shown = report.printable
    return {shown(name): shown(value) if isinstance(value, str) else value for name, value in found.items()}
