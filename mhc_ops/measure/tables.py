"""Results as text."""

from collections.abc import Sequence

from .accuracy import Row
from .report import Table
from .results import DIRECTIONS, GROUPS, NotMeasured, Results, by_reason
from .speed import STACKED_LAYERS, Growth, Measurement


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
    parts: list[Table | str] = [speed_table(results.measurements, results.add_microseconds)]
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
