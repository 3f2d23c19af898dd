"""Results as text."""

from collections.abc import Sequence

from .accuracy import Row
from .report import table
from .results import DIRECTIONS, GROUPS, NotMeasured, Results
from .scaling import Growth
from .speed import STACKED_LAYERS, Measurement
from .training_step import cells


def accuracy_table(rows: Sequence[Row]) -> str:
    header = ("op and case", "backend", "output", "max error", "relative", "tolerance", "verdict")
    lines = [
        (
            row.case,
            row.backend,
            row.output,
            f"{row.max_error:.2e}",
            f"{row.relative_error:.2e}",
            f"{row.tolerance:.0e}",
            row.verdict,
        )
        for row in rows
    ]
    return table(header, lines)


def by_case(measurements: Sequence[Measurement]) -> list[Measurement]:
    """In the order of the cases, not of the time they were measured at; a direction's providers beside each other."""
    order = {case: i for i, case in enumerate(dict.fromkeys(m.case for m in measurements))}
    return sorted(measurements, key=lambda m: (GROUPS.index(m.group), order[m.case], DIRECTIONS.index(m.direction)))


def speed_table(measurements: Sequence[Measurement]) -> str:
    header = (
        "op and case",
        "direction",
        "provider",
        "µs",
        "±",
        "GB/s",
        "of copy",
        "× eager",
        "× compile",
        "host µs",
        "peak MB",
        "error",
    )
    times = {(m.case, m.direction, m.provider): m.microseconds for m in measurements}

    def faster(m: Measurement, other: str) -> str:
        """How many times faster than another provider of the same run."""
        time = times.get((m.case, m.direction, other))
        return "" if time is None or m.provider == other else f"{time / m.microseconds:.2f}"

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    lines = [
        (
            m.case,
            m.direction,
            m.provider,
            f"{m.microseconds:.1f}",
            shown(m.spread, ".1f"),
            f"{m.bandwidth:.0f}",
            f"{m.of_copy:.0%}",
            faster(m, "eager"),
            faster(m, "torch.compile"),
            shown(m.host_microseconds, ".0f"),
            shown(m.peak_megabytes, ".0f"),
            shown(m.error, ".1e"),
        )
        for m in by_case(measurements)
    ]
    return table(header, lines)


def growth_table(growths: Sequence[Growth]) -> str:
    header = ("op", "grows with", "provider", "direction", "overhead µs", "µs per MB", "× copy", "±")
    lines = [
        (
            g.subject,
            f"{g.axis} at {g.at}",
            g.provider,
            g.direction,
            f"{g.overhead:.1f}",
            f"{g.per_megabyte:.3f}",
            f"{g.over_copy:.2f}",
            f"{g.noise:.1%}",
        )
        for g in growths
    ]
    return table(header, lines)


def left_out(entries: Sequence[NotMeasured]) -> str:
    """Each reason once, with the cases that it has."""
    cases: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        cases.setdefault((entry.provider, entry.reason), []).append(entry.where)
    lines = []
    for (provider, reason), where in cases.items():
        one = NotMeasured(where[0] if len(where) == 1 else f"{len(where)} cases", provider, reason)
        lines += [str(one), *(f"  {place}" for place in where if len(where) > 1)]
    return "\n".join(lines)


def bench_text(results: Results) -> str:
    parts = [speed_table(results.measurements)] if results.measurements or not results.steps else []
    if results.steps:
        parts.append(table(*cells(results.steps)))
    if results.scaling:
        parts.append(growth_table(results.scaling))
    parts += [
        f"stack of {STACKED_LAYERS} HyperConnections, {name}: peak {megabytes:.0f} MB"
        for name, megabytes in results.stack_megabytes.items()
        if megabytes is not None
    ]
    parts += [f"{name} computes with: {words}" for name, words in results.precision.items()]
    failed = [row for row in results.accuracy if not row.passed]
    parts.append(f"{len(results.accuracy) - len(failed)} results within their tolerance of fp64, {len(failed)} not")
    if failed:
        parts.append(accuracy_table(failed))
    if results.not_measured:
        parts.append(left_out(results.not_measured))
    return "\n\n".join(parts)
