"""The tables of a page: speed-up, memory, accuracy, what was left out, and where it all ran."""

import math
from collections.abc import Callable
from html import escape

from ..accuracy import Row
from ..peers import WITH_GRADIENTS
from .markup import MISSING, Value, number, shape_of, significant, swatch, table, times
from .model import WORDS, Bar, CaseBars, Model

SHORT = {"forward": "fwd", "backward": "bwd", "both": "step"}


def speed_up(model: Model, cases: list[CaseBars]) -> str:
    """How many times as long as the first of our kernels everybody else takes."""
    drawn = [_ratios(base, others, found) for (base, *others), found in _alike(model, cases) if others]
    return "".join(drawn) or "<p>One provider: there is nothing to compare.</p>"


def _alike(model: Model, cases: list[CaseBars]) -> list[tuple[list[str], list[CaseBars]]]:
    """Ops that the same providers have share a table."""
    tables: dict[tuple[str, ...], list[CaseBars]] = {}
    for case in cases:
        of_op = [c for c in cases if c.subject == case.subject and c.group == case.group]
        present = {name for c in of_op for bars in c.bars.values() for name in bars}
        tables.setdefault((case.group, *(name for name in model.providers if name in present)), []).append(case)
    return [(providers, found) for (_, *providers), found in tables.items()]


def _ratios(base: str, others: list[str], cases: list[CaseBars]) -> str:
    def cell(case: CaseBars, direction: str, bar: Bar) -> str:
        ours = case.bars[direction].get(base)
        if ours is None:
            return f"<span>{MISSING}</span>"
        ratio = bar.time.over(ours.time)
        tint = min(1.0, abs(math.log10(ratio.value)))
        better = "win" if ratio.value >= 1 else "loss"
        return f'<span class={better} style="--tint:{tint:.2f}">{times(ratio)}</span>'

    caption = f"time of the others over that of {swatch(base)}: above 1 the others are slower, below 1 (red) faster"
    return _matrix(cases, others, cell, caption)


def memory(model: Model, cases: list[CaseBars]) -> str:
    def cell(case: CaseBars, direction: str, bar: Bar) -> str:
        value = bar.value("peak_megabytes")
        return f"<span>{MISSING if value is None else number(value, significant(value.value))}</span>"

    measured = [
        case for case in cases if any(bar.entry.peak_megabytes for b in case.bars.values() for bar in b.values())
    ]
    if not measured:
        return "<p>Peak memory is measured on a GPU only.</p>"
    stack = "".join(
        f"<p>A training step through a stack of layers, {escape(name)}: "
        f"{number(Value(value, f'stack_megabytes.{name}'), significant(value))} MB at its peak.</p>"
        for name, value in model.results.stack_megabytes.items()
        if value is not None
    )
    caption = "peak MB above the inputs"
    tables = [_matrix(found, present, cell, caption, ("backward",)) for present, found in _alike(model, measured)]
    return "".join(tables) + stack


def _matrix(
    cases: list[CaseBars],
    providers: list[str],
    cell: Callable[[CaseBars, str, Bar], str],
    caption: str,
    skip: tuple[str, ...] = (),
) -> str:
    """A row for each case; under each provider a number for each direction."""
    directions = [d for d in WORDS if d not in skip and any(d in case.bars for case in cases)]
    rows = []
    for case in cases:
        row = [f"{escape(case.subject)} <small>{escape(shape_of(case.case, case.subject))}</small>"]
        for provider in providers:
            numbers = []
            for direction in directions:
                bar = case.bars.get(direction, {}).get(provider)
                numbers.append(f"<span>{MISSING}</span>" if bar is None else cell(case, direction, bar))
            row.append(f"<div class=trio>{''.join(numbers)}</div>")
        rows.append(row)
    heads = "".join(f"<span>{SHORT[d]}</span>" for d in directions)
    header = ["op and size", *(f"{swatch(p)}<div class=trio>{heads}</div>" for p in providers)]
    return table(header, rows, caption)


def accuracy(model: Model) -> str:
    """A table for each op: a row for each case and provider, a column for each output and gradient."""
    rows: dict[str, dict[tuple[str, str], dict[str, tuple[int, Row]]]] = {}
    for index, row in enumerate(model.results.accuracy):
        subject = _subject(row.case)
        rows.setdefault(subject, {}).setdefault((row.case, row.backend), {})[row.output] = (index, row)
    parts = []
    for subject, lines in rows.items():
        outputs = list(dict.fromkeys(name for line in lines.values() for name in line if WITH_GRADIENTS not in name))
        found = [row for line in lines.values() for _, row in line.values()]
        failed = sum(not row.passed for row in found)
        verdict = f"<b class=bad>{failed} of {len(found)} fail</b>" if failed else f"all {len(found)} pass"
        body = [
            [
                escape(shape_of(case, subject)),
                swatch(provider),
                *(_error(line.get(name + WITH_GRADIENTS), line.get(name)) for name in outputs),
            ]
            for (case, provider), line in lines.items()
        ]
        content = table(["size", "provider", *map(escape, outputs)], body, "relative error against fp64, in norm")
        parts.append(
            f"<details{' open' if failed else ''}><summary>{escape(subject)}: {verdict}</summary>{content}</details>"
        )
    precision = "".join(f"<li>{swatch(name)}: {escape(words)}</li>" for name, words in model.results.precision.items())
    own = f"<p>Other libraries are held to their own precision:</p><ul>{precision}</ul>" if precision else ""
    return "".join(parts) + own


def _subject(case: str) -> str:
    """The words before the sizes."""
    words = case.split()
    return " ".join(words[: next((i for i, word in enumerate(words) if word[0].isdigit()), 1)])


def _error(*found: tuple[int, Row] | None) -> str:
    """The larger of what there is: some libraries run other kernels where gradients are wanted."""
    there = [entry for entry in found if entry is not None]
    if not there:
        return f"<td>{MISSING}</td>"
    index, row = max(there, key=lambda entry: (not entry[1].passed, entry[1].relative_error))
    value = Value(row.relative_error, f"accuracy.{index}.relative_error")
    hint = f"{row.verdict}: allowed {row.tolerance:.0e}, largest single error {row.max_error:.1e}"
    mark = "" if row.passed else " class=bad"
    return f'<td{mark} title="{escape(hint)}">{number(value, f"{row.relative_error:.1e}")}</td>'


def left_out(model: Model) -> str:
    reasons: dict[tuple[str, str, bool], list[str]] = {}
    for entry in model.results.not_measured:
        reasons.setdefault((entry.provider, entry.reason, entry.failed), []).append(entry.where)
    items = []
    for (provider, reason, failed), places in reasons.items():
        named = "; ".join(place for place in places if place)
        where = (
            f"<details><summary>{len(places)} cases</summary>{escape(named)}</details>"
            if len(places) > 1
            else escape(named)
        )
        items.append(
            f"<li{' class=bad' if failed else ''}>{swatch(provider)}: {escape(reason)} <small>{where}</small></li>"
        )
    return f"<ul>{''.join(items)}</ul>" if items else "<p>The file names nothing that was left out.</p>"


def environment(model: Model) -> str:
    results = model.results
    facts = {"date": results.date, **results.versions, "complete": "yes" if results.complete else "no"}
    if results.budget_seconds is not None:
        facts["budget"] = f"{results.budget_seconds:g} s"
    return "<dl>" + "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in facts.items()) + "</dl>"
