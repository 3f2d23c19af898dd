"""Results as the tables that commands print: which columns there are, and how a figure is written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .report import Table
from .results import DIRECTIONS, GROUPS, NotMeasured, Results
from .speed import STACKED_LAYERS, Measurement

# Columns: "header = field format", or the field alone where it is the header.
ACCURACY = """op and case = case, backend, output, max error = max_error .2e, relative = relative_error .2e,
    tolerance = tolerance .0e, verdict"""
SPEED = """op and case = case, direction, provider, µs = microseconds .1f, ± = spread .1f, GB/s = bandwidth .0f,
    of copy = of_copy .0%, × eager = eager .2f, × compile = torch.compile .2f, host µs = host_microseconds .0f,
    host adds = adds .1f, peak MB = peak_megabytes .0f, error = error .1e"""
STEPS = """training step = size, provider, mode, ms = milliseconds .2f, ± = spread .2f,
    % over plain = overhead_percent +.1f, peak MB = peak_megabytes .0f, difference = difference .1e"""
GROWTH = """op = subject, grows with = along, provider, direction, overhead µs = overhead .1f,
    µs per MB = per_megabyte .3f, × copy = over_copy .2f, ± = noise .1%"""


def table(entries: Iterable[Any], columns: str) -> Table:
    """entries: with the fields of the columns, or mappings of them."""
    found = {}
    for column in columns.split(","):
        header, _, field = column.strip().partition(" = ")
        name, _, form = (field or header).partition(" ")
        found[header] = (name, form)
    rows = [[figure(_field(entry, name), form) for name, form in found.values()] for entry in entries]
    return Table(list(found), rows)


def _field(entry: Any, name: str) -> Any:
    return entry.get(name) if isinstance(entry, Mapping) else getattr(entry, name)


def figure(value: Any, form: str, missing: str = "") -> str:
    return missing if value is None else format(value, form)


def speed_table(measurements: Sequence[Measurement], add_microseconds: float | None) -> Table:
    """In the order of the cases, not of the time they were measured at; a direction's providers beside each other, and
    how many times faster than the formula in torch each of them is."""
    order = {case: nth for nth, case in enumerate(dict.fromkeys(m.case for m in measurements))}
    times = {(m.case, m.direction, m.provider): m.microseconds for m in measurements}
    rows = []
    for m in sorted(measurements, key=lambda m: (GROUPS.index(m.group), order[m.case], DIRECTIONS.index(m.direction))):
        others = {name: times.get((m.case, m.direction, name)) for name in ("eager", "torch.compile")}
        faster = {name: time / m.microseconds for name, time in others.items() if time and name != m.provider}
        host = m.host_microseconds
        adds = host / add_microseconds if host and add_microseconds else None
        rows.append({**vars(m), "of_copy": m.of_copy, **faster, "adds": adds})
    return table(rows, SPEED)


def by_reason(entries: Iterable[NotMeasured]) -> dict[tuple[str, str, bool], list[str]]:
    """Each provider, reason and whether it failed once, with where that was."""
    found: dict[tuple[str, str, bool], list[str]] = {}
    for entry in entries:
        found.setdefault((entry.provider, entry.reason, entry.failed), []).append(entry.where)
    return found


def left_out(entries: Iterable[NotMeasured]) -> str:
    """Each reason once, with the cases that it has."""
    lines = []
    for (provider, reason, _), where in by_reason(entries).items():
        one = NotMeasured(where[0] if len(where) == 1 else f"{len(where)} cases", provider, reason)
        lines += [str(one), *(f"  {case}" for case in where if len(where) > 1)]
    return "\n".join(lines)


def of_bench(results: Results) -> Iterator[Table | str]:
    failed = [row for row in results.accuracy if not row.passed]
    if results.steps:
        yield table(results.steps, STEPS)
    if results.measurements or not results.steps:
        yield speed_table(results.measurements, results.add_microseconds)
    if results.scaling:
        yield table(results.scaling, GROWTH)
    for name, megabytes in results.stack_megabytes.items():
        if megabytes is not None:
            yield f"stack of {STACKED_LAYERS} HyperConnections, {name}: peak {megabytes:.0f} MB"
    yield from (f"{name} computes with: {words}" for name, words in results.precision.items())
    yield f"{len(results.accuracy) - len(failed)} results within their tolerance of fp64, {len(failed)} not"
    if failed:
        yield table(failed, ACCURACY)
    if results.not_measured:
        yield left_out(results.not_measured)
