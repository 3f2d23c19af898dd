"""Results in the order in which they are shown, each number with its origin in the JSON file; and as the
tables that a command prints."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.backend import BACKENDS
from .accuracy import Row
from .peers import WITH_GRADIENTS
from .report import Table
from .results import DIRECTIONS, GROUPS, NotMeasured, Results, by_reason
from .speed import STACKED_LAYERS, Growth, Measurement
from .training_step import Step

DIRECTION_WORDS = {"forward": "forward", "backward": "backward", "both": "training step"}
PROVIDER_ORDER = (*BACKENDS, "torch.compile", "eager")  # then other libraries


class Value(NamedTuple):
    """A number and its origin: paths into the JSON file, joined by " * " and " / " and evaluated from left to right."""

    value: float
    origin: str

    def over(self, other: "Value") -> "Value":
        return Value(self.value / other.value, f"{self.origin} / {other.origin}")


@dataclass(frozen=True)
class Bar:
    """One measurement and its number in the file."""

    index: int
    entry: Measurement

    def of(self, name: str) -> Value | None:
        found = getattr(self.entry, name)
        return None if found is None else Value(found, f"measurements.{self.index}.{name}")

    @property
    def time(self) -> Value:
        return Value(self.entry.microseconds, f"measurements.{self.index}.microseconds")

    @property
    def copy_bandwidth(self) -> Value:
        """GB/s of the copy."""
        at, m = f"measurements.{self.index}", self.entry
        origin = f"{at}.bandwidth * {at}.microseconds / {at}.copy_microseconds"
        return Value(m.bandwidth * m.microseconds / m.copy_microseconds, origin)


@dataclass(frozen=True)
class CaseBars:
    """All of one case: direction -> provider -> measurement."""

    subject: str
    case: str
    group: str
    bars: dict[str, dict[str, Bar]]

    @property
    def size(self) -> str:
        return size_of(self.case, self.subject)

    @property
    def every(self) -> list[Bar]:
        return [bar for found in self.bars.values() for bar in found.values()]

    def bar(self, direction: str, provider: str) -> Bar | None:
        return self.bars.get(direction, {}).get(provider)

    def ours(self, direction: str) -> Bar | None:
        """The fastest of our kernels."""
        kernels = [bar for provider, bar in self.bars.get(direction, {}).items() if provider in BACKENDS]
        return min(kernels, key=lambda bar: bar.entry.microseconds, default=None)


class Shown:
    """The results of one file in the order in which they are shown."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.device = results.versions.get("device", "unknown device")
        names = list(dict.fromkeys(m.provider for m in results.measurements))
        order = [*PROVIDER_ORDER, *(name for name in names if name not in PROVIDER_ORDER)]
        self.providers = sorted(names, key=order.index)
        found: dict[str, list[Bar]] = {}
        for index, entry in enumerate(results.measurements):
            found.setdefault(entry.case, []).append(Bar(index, entry))
        self.cases = [self._case(bars) for bars in found.values()]
        self.training, self.decode = ([c for c in self.cases if c.group == group] for group in ("training", "decode"))
        self.subjects = list(dict.fromkeys(case.subject for case in (*self.training, *self.decode)))
        self.reasons = by_reason(results.not_measured)

    def _case(self, bars: list[Bar]) -> CaseBars:
        first = bars[0].entry
        ordered = sorted(bars, key=lambda bar: self.providers.index(bar.entry.provider))
        by_direction = {d: {b.entry.provider: b for b in ordered if b.entry.direction == d} for d in DIRECTIONS}
        return CaseBars(first.subject, first.case, first.group, {d: b for d, b in by_direction.items() if b})

    def alike(self, cases: Sequence[CaseBars]) -> list[tuple[list[str], list[CaseBars]]]:
        """Ops that the same providers have share a table: the providers, and the cases."""
        tables: dict[tuple[str, ...], list[CaseBars]] = {}
        for case in cases:
            of_op = [c for c in cases if c.subject == case.subject and c.group == case.group]
            there = {provider for c in of_op for bars in c.bars.values() for provider in bars}
            tables.setdefault((case.group, *(p for p in self.providers if p in there)), []).append(case)
        return [(providers, found) for (_, *providers), found in tables.items()]

    def with_memory(self) -> list[CaseBars]:
        return [c for c in (*self.training, *self.decode) if any(bar.entry.peak_megabytes for bar in c.every)]

    @staticmethod
    def directions(cases: Sequence[CaseBars]) -> list[str]:
        return [direction for direction in DIRECTIONS if any(direction in case.bars for case in cases)]

    def charts(self) -> dict[tuple[str, str, str, str], list[tuple[int, Growth]]]:
        """By subject, axis, what stays and direction; a training step only where there are few."""
        found: dict[tuple[str, str, str, str], list[tuple[int, Growth]]] = {}
        for index, g in enumerate(self.results.scaling):
            found.setdefault((g.subject, g.axis, g.at, g.direction), []).append((index, g))
        return {key: growths for key, growths in found.items() if key[3] != "both" or len(found) < 5}

    def accuracy(self) -> dict[str, dict[tuple[str, str], dict[str, tuple[int, Row]]]]:
        """Of every op, case, provider and output the row. Some libraries run other kernels where gradients are wanted:
        the larger error counts."""
        found: dict[str, dict[tuple[str, str], dict[str, tuple[int, Row]]]] = {}
        for index, row in enumerate(self.results.accuracy):
            line = found.setdefault(_subject(row.case), {}).setdefault((row.case, row.backend), {})
            output = row.output.removesuffix(WITH_GRADIENTS)
            line[output] = max(filter(None, [line.get(output), (index, row)]), key=_badness)
        return found

    def environment(self) -> dict[str, str]:
        r = self.results
        budget = {} if r.budget_seconds is None else {"budget": f"{r.budget_seconds:g} s"}
        return {"date": r.date, **r.versions, "complete": "yes" if r.complete else "no", **budget}


def _badness(entry: tuple[int, Row]) -> tuple[bool, float]:
    return not entry[1].passed, entry[1].relative_error


def _subject(case: str) -> str:
    """The words before the sizes."""
    words = case.split()
    return " ".join(words[: next((i for i, word in enumerate(words) if word[0].isdigit()), 1)])


def size_of(case: str, subject: str) -> str:
    """mhc_pre 8192x4x4096 bfloat16 no gamma -> 8192 × 4 × 4096 bfloat16 no gamma"""
    return re.sub(r"(?<=\d)x(?=\d)", " × ", case.removeprefix(subject).strip())


def accuracy_table(rows: Sequence[Row]) -> Table:
    header = ("op and case", "backend", "output", "max error", "relative", "tolerance", "verdict")
    errors = [(f"{r.max_error:.2e}", f"{r.relative_error:.2e}", f"{r.tolerance:.0e}", r.verdict) for r in rows]
    return Table(header, [(r.case, r.backend, r.output, *numbers) for r, numbers in zip(rows, errors)])


def speed_table(measurements: Sequence[Measurement], add_microseconds: float | None) -> Table:
    """In the order of the cases, not of the time they were measured at; a direction's providers beside each other."""
    header = "op and case,direction,provider,µs,±,GB/s,of copy,× eager,× compile,host µs,host adds,peak MB,error"
    order = {case: i for i, case in enumerate(dict.fromkeys(m.case for m in measurements))}
    times = {(m.case, m.direction, m.provider): m.microseconds for m in measurements}

    def faster(m: Measurement, other: str) -> float | None:
        """How many times faster than another provider of the same run."""
        time = times.get((m.case, m.direction, other))
        return None if time is None or m.provider == other else time / m.microseconds

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def line(m: Measurement) -> tuple[str, ...]:
        host = m.host_microseconds
        numbers = (
            (m.microseconds, ".1f"),
            (m.spread, ".1f"),
            (m.bandwidth, ".0f"),
            (m.of_copy, ".0%"),
            (faster(m, "eager"), ".2f"),
            (faster(m, "torch.compile"), ".2f"),
            (host, ".0f"),
            (host / add_microseconds if host and add_microseconds else None, ".1f"),
            (m.peak_megabytes, ".0f"),
            (m.error, ".1e"),
        )
        return m.case, m.direction, m.provider, *(shown(value, form) for value, form in numbers)

    def key(m: Measurement) -> tuple[int, ...]:
        return GROUPS.index(m.group), order[m.case], DIRECTIONS.index(m.direction)

    return Table(header.split(","), map(line, sorted(measurements, key=key)))


def step_table(steps: Sequence[Step]) -> Table:
    forms = {"milliseconds": ".2f", "spread": ".2f", "overhead_percent": "+.1f", "peak_megabytes": ".0f"}
    forms["difference"] = ".1e"

    def row(step: Step) -> tuple[str, ...]:
        numbers = (("" if (v := getattr(step, name)) is None else format(v, form)) for name, form in forms.items())
        return (step.size, step.provider, "torch.compile" if step.compiled else "eager", *numbers)

    header = ("training step", "provider", "mode", "ms", "±", "% over plain", "peak MB", "difference")
    return Table(header, map(row, steps))


def growth_table(growths: Sequence[Growth]) -> Table:
    header = ("op", "grows with", "provider", "direction", "overhead µs", "µs per MB", "× copy", "±")
    numbers = [(f"{g.overhead:.1f}", f"{g.per_megabyte:.3f}", f"{g.over_copy:.2f}", f"{g.noise:.1%}") for g in growths]
    lines = [(g.subject, f"{g.axis} at {g.at}", g.provider, g.direction, *n) for g, n in zip(growths, numbers)]
    return Table(header, lines)


def left_out(entries: Sequence[NotMeasured]) -> str:
    """Each reason once, with the cases that it has."""
    lines = []
    for (provider, reason, _), where in by_reason(entries).items():
        one = NotMeasured(where[0] if len(where) == 1 else f"{len(where)} cases", provider, reason)
        lines += [str(one), *(f"  {case}" for case in where if len(where) > 1)]
    return "\n".join(lines)


def of_bench(results: Results) -> list[Table | str]:
    parts: list[Table | str] = [step_table(results.steps)] * bool(results.steps)
    if results.measurements or not results.steps:
        parts.append(speed_table(results.measurements, results.add_microseconds))
    parts += [growth_table(results.scaling)] * bool(results.scaling)
    parts += [
        f"stack of {STACKED_LAYERS} HyperConnections, {name}: peak {megabytes:.0f} MB"
        for name, megabytes in results.stack_megabytes.items()
        if megabytes is not None
    ]
    parts += [f"{name} computes with: {words}" for name, words in results.precision.items()]
    failed = [row for row in results.accuracy if not row.passed]
    parts.append(f"{len(results.accuracy) - len(failed)} results within their tolerance of fp64, {len(failed)} not")
    parts += [accuracy_table(failed)] * bool(failed)
    return parts + [left_out(results.not_measured)] * bool(results.not_measured)
