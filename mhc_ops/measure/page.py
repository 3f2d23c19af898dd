"""The tables that commands print, and what is drawn from files of results: a page in Markdown, a picture in SVG."""

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..core.backend import BACKENDS
from ..testing.accuracy import ENOUGH_TO_AVERAGE, ROUNDING, Row
from .report import Refused, Table
from .results import EAGER, PLAIN, Measurement, Results
from .selection import OF_TORCH, op_of
from .training_step import backend_of

# Columns: "header = field format", or the field alone if it is the header.
ACCURACY = """op and case = case, backend, output, max error = max_error .2e, relative = relative_error .2e,
    tolerance = tolerance .0e, verdict"""
SUMMARY = "op, backend, cases, results, failed, worst = worst .2f, verdict"
SPEED = """op and case = case, direction, provider, µs = microseconds .1f, ± = spread .1f, GB/s = bandwidth .0f,
    of copy = of_copy .0%, × eager = eager .2f, × compile = torch.compile .2f, host µs = host_microseconds .0f,
    peak MB = peak_megabytes .0f"""
STEPS = """training step = size, provider, mode, ms = milliseconds .2f, ± = spread .2f,
    % over plain = ratio, in a row = in_a_row, peak MB = peak_megabytes .0f,
    difference = difference .1e"""
WORST = "worst: the largest error of a result, in norm, as a share of what is allowed."
WORDS = {"forward": "forward", "backward": "backward", "both": "training step"}
PROVIDER_ORDER = (*BACKENDS, "torch.compile", "eager")  # then other libraries

STEP_NOTE = """A small transformer in bf16 with plain residuals and with hyper-connections of 4 streams on the same
weights: wall clock of a forward and backward, host included, from idle to idle, in ms; the percentage over plain; peak
memory above weights and input; difference of the loss or of dx from the formula in PyTorch. A backend alone is a
HyperStack, in Triton with the norms inside; HyperConnection and layer_norm=False have them in front of their layers.
The rows of a size and mode took turns. A percentage is the median over the rounds, with quartiles; also for steps in a
row."""
SHORT_NOTE = """Over all training sizes: the share of a copy's speed that the faster of our kernels reaches, its
bandwidth, and the time of the others over its time."""
TIME_NOTE = """Ours: µs · of a copy. Others: µs (times the faster of ours). mHC has 4 streams and 20 Sinkhorn
iterations; mhc_layer, which HyperConnection calls, stands around a layer that costs nothing. The convolution has a
bias, short_conv (which ShortConv calls) a residual."""
ALL_NOTE = """Median and interquartile range in µs; GB/s of the bytes that an op must move; the time of a copy of them,
and of the formula in torch, over its time; µs until the call returns; the peak above the inputs in MB."""
BOUNDARY = """mhc_next is a boundary of a HyperStack: what 12 connections take beyond 4, divided by 8; so is its
memory."""
STYLE = """text{font:15px system-ui,sans-serif;fill:#17202e}.soft{fill:#5a6676;font-size:13px}.end{text-anchor:end}
rect{fill:#9aa4b2}.ours{fill:#2563eb}@media(prefers-color-scheme:dark){text{fill:#e7ecf3}.soft{fill:#9aa6b6}
rect{fill:#7b8696}.ours{fill:#6ea1ff}}""".replace("\n", "")
MARKDOWN_HEAD = """# Measured

<!-- Written by `mhc-ops page benchmarks/results/*.json --markdown docs/benchmarks.md`; a test holds this file to the
results. -->

Times are medians of device time in µs, with a cold L2. *Of a copy*: the time that a copy of the same bytes takes in the
same run, over the operator's time; 100% is the memory limit. Kernels and libraries were checked against fp64 before
they were timed. [How it is measured](measure.md). The [page of a run](report.md) has small sizes and memory. Figures
are of the code of their date. What has changed since then was not timed again.
"""


def table(entries: Iterable[Any], columns: str) -> Table:
    """A line for each entry, with the fields of the columns."""
    split = [column.strip().partition(" = ") for column in columns.split(",")]
    fields = [(field or header).partition(" ") for header, _, field in split]

    def cell(value: Any, form: str) -> str:
        return percent(value) if isinstance(value, list) else "" if value is None else format(value, form)

    rows = [[cell(getattr(entry, name), form) for name, _, form in fields] for entry in entries]
    return Table([header for header, *_ in split], rows)


def percent(ratio: Sequence[float]) -> str:
    """[1.067, 1.061, 1.072] -> "+6.7 (+6.1 to +7.2)\""""
    median, *quartiles = [f"{100 * (r - 1):+.1f}" for r in ratio] or [""]
    return f"{median} ({' to '.join(quartiles)})" if quartiles else median


def printed(r: Results, rows: bool = False) -> Iterator[Table | str]:
    """What `check` and `bench` print. rows: every result, not only those that failed."""
    judged = table(r.accuracy if rows else r.failed, ACCURACY), table(_summary(r.accuracy), SUMMARY)
    yield from filter(lambda table: table.rows, (table(r.steps, STEPS), table(_timed(r.measurements), SPEED), *judged))
    if r.accuracy:
        yield WORST + " --rows shows every result." * (r.command == "check" and not rows)
    texts = [f"{name} computes with: {words}" for name, words in r.precision.items()], map(str, r.not_measured)
    yield from filter(None, map("\n".join, texts))
    lost, failed = sum(entry.failed for entry in r.not_measured), len(r.failed)
    yield f"{len(r.accuracy) - failed} passed, {failed} failed" + f", {lost} did not run" * bool(lost)


def _summary(rows: Iterable[Row]) -> Iterator[SimpleNamespace]:
    """A line for each op and backend. Few elements of 16 bits are judged one by one, not in norm."""
    for (op, backend), of in _grouped(rows, lambda row: (op_of(row.case), row.backend)).items():
        cases, failed = len({row.case for row in of}), sum(not row.passed for row in of)
        in_norm = [r for r in of if getattr(torch, r.dtype, None) not in ROUNDING or r.elements >= ENOUGH_TO_AVERAGE]
        shares = [row.relative_error / row.tolerance for row in in_norm]
        largest = max(shares, key=lambda share: (math.isnan(share), share), default=None)
        found = {"cases": cases, "results": len(of), "failed": failed, "verdict": "FAIL" if failed else "PASS"}
        yield SimpleNamespace(op=op, backend=backend, worst=largest, **found)


def _grouped(entries: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


class Line(NamedTuple):
    """A case in one direction. times: provider -> its measurement; words: the direction's; ours: the fastest kernel."""

    subject: str
    size: str
    words: str
    times: dict[str, Measurement]
    ours: Measurement | None

    def over_ours(self, provider: str) -> float | None:
        other = self.times.get(provider)
        return other.microseconds / self.ours.microseconds if other and self.ours else None

    def time(self, provider: str) -> str:
        """Ours: µs · share of a copy; others: µs (times the faster of ours)."""
        if (m := self.times.get(provider)) is None:
            return "–"
        over_ours = self.over_ours(provider) if provider not in BACKENDS else None
        return f"{m.microseconds:.1f}" + (f" ({over_ours:.1f}×)" if over_ours else f" · {m.of_copy:.0%}")


def _lines(measurements: Iterable[Measurement]) -> Iterator[Line]:
    """mhc_pre 8192x4x4096 bfloat16 no gamma has the size 8192 × 4 × 4096 bfloat16 no gamma."""
    for case, of_case in _grouped(measurements, lambda m: m.case).items():
        for direction, of in _grouped(of_case, lambda m: m.direction).items():
            subject, ours = op_of(case), [m for m in of if m.provider in BACKENDS]
            size = re.sub(r"(?<=\d)x(?=\d)", " × ", case.removeprefix(subject).strip())
            fastest = min(ours, key=lambda m: m.microseconds, default=None)
            yield Line(subject, size, WORDS.get(direction, direction), {m.provider: m for m in of}, fastest)


def _timed(measurements: Iterable[Measurement]) -> Iterator[SimpleNamespace]:
    """By case and direction; and how many times faster than the formula in torch each provider is."""
    for line in _lines(measurements):
        for m in line.times.values():
            others = {name: line.times.get(name) if name != m.provider else None for name in OF_TORCH}
            faster = {name: other and other.microseconds / m.microseconds for name, other in others.items()}
            yield SimpleNamespace(**vars(m), **faster)


def _providers(lines: Iterable[Line]) -> tuple[str, ...]:
    names = dict.fromkeys(name for line in lines for name in line.times)
    return tuple(sorted(names, key=lambda name: (*PROVIDER_ORDER, name).index(name)))


def _overview(lines: Sequence[Line]) -> Table:
    others = [name for name in _providers(lines) if name not in BACKENDS]
    rows = []
    for key, of in _grouped(lines, lambda line: (line.subject, line.words)).items():
        if ours := [line.ours for line in of if line.ours]:
            share, bandwidth = extent((100 * m.of_copy for m in ours), ".0f", "%"), (m.bandwidth for m in ours)
            ratios = [extent((line.over_ours(name) for line in of), ".1f", "×") for name in others]
            rows.append([*key, share, extent(bandwidth, ".0f"), *ratios])
    return Table(["op", "", "of a copy", "GB/s", *others], rows)


def extent(values: Iterable[float | None], form: str, unit: str = "") -> str:
    """1.8 to 4.1×, or one number if both ends are the same; – without values."""
    there = [value for value in values if value is not None]
    ends = dict.fromkeys(f"{end:{form}}" for end in (min(there), max(there))) if there else ()
    return " to ".join(ends) + unit if ends else "–"


def _times(lines: Sequence[Line]) -> Iterator[Table]:
    """Ops that the same providers have share a table."""
    names_of = {op: _providers(of) for op, of in _grouped(lines, lambda line: line.subject).items()}
    for names, of in _grouped(lines, lambda line: names_of[line.subject]).items():
        rows = [[line.subject, line.size, line.words, *map(line.time, names)] for line in of]
        yield Table(["op", "size", "", *names], rows)


def _sections(r: Results, whole: bool) -> Iterator[tuple[str, str, Sequence[Table | str]]]:
    """Title, note and content of those that have content. whole: with all that the run printed."""
    lines = list(_lines(m for m in r.measurements if m.group == "training"))
    boundary = any(line.subject.startswith("mhc_next") for line in lines)
    if r.steps:
        yield "A training step", STEP_NOTE, [table(r.steps, STEPS)]
    if (overview := _overview(lines)).rows:
        yield "In short", SHORT_NOTE, [overview]
    if lines:
        yield "Training sizes", f"{TIME_NOTE} {BOUNDARY * boundary}", list(_times(lines))
    if whole:
        yield "All results", ALL_NOTE * bool(r.measurements), list(printed(replace(r, steps=[])))


def markdown(files: Sequence[Results]) -> str:
    """The whole page of one file, or the main tables of several."""
    whole = len(files) == 1
    parts = [*([] if whole else [MARKDOWN_HEAD]), *(part for r in files for part in _page(r, whole))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _page(r: Results, whole: bool) -> Iterator[str]:
    versions = [f"{n} {v}" for n, v in r.versions.items() if n not in ("device", "python") and v != "-"]
    ops = dict.fromkeys(op_of(name) for name in [m.case for m in r.measurements] + [s.size for s in r.steps])
    yield "## " + literal(f"{r.device}, {r.date}" + f": {', '.join(ops)}" * bool(ops))
    yield f"{literal(', '.join(versions))}."
    if not r.complete:
        yield "The run was interrupted: it lacks some cases. The times that it has are whole."
    for title, note, content in _sections(r, whole):
        yield from filter(None, (f"### {title}", literal(note), *map(_in_markdown, content)))


def _in_markdown(part: Table | str) -> str:
    if isinstance(part, str):
        return literal(part).replace("\n", "\\\n")
    lines = [map(literal, cells) for cells in (part.header, ["---"] * len(part.header), *part.rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def literal(text: str) -> str:
    """Words of Markdown: no tags, no links, no end of a cell."""
    return re.sub(r"[\\`*\[\]|~#]", r"\\\g<0>", html.escape(text, quote=False))


def picture(results: Results) -> str:
    """An SVG of what each provider adds to a training step."""
    eager = [step for step in results.steps if step.mode == EAGER]
    plain = max((step for step in eager if step.provider == PLAIN), key=lambda step: step.milliseconds, default=None)
    bars = [step for step in eager if plain and step.size == plain.size and step.in_a_row]
    if not (plain and bars):
        raise Refused("--svg draws training steps, and there are none: mhc-ops bench --case training_step --json FILE")
    bars.sort(key=lambda step: step.in_a_row)
    names = 8.5 * (max(len(step.provider) for step in bars) + 11)  # a letter is 8.5 wide, the longest bar 340
    width = 32 + names + 340 + 8.5 * max(len(percent(step.in_a_row)) for step in bars)
    height, longest = 62 + 30 * len(bars), max(1.01, *(step.in_a_row[0] for step in bars)) - 1
    size = plain.size.removeprefix("training_step ")
    title = f"{results.device}, {size}, steps in a row: the median over the rounds, and quartiles"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        '<text y="18">What hyper-connections add to the time of a training step, in %</text>',
        f'<text y="40" class="soft">{html.escape(title)}</text>',
    ]
    for y, step in zip(range(62, height, 30), bars):
        ours, long = backend_of(step.provider) in BACKENDS, max(1, (step.in_a_row[0] - 1) / longest * 340)
        colour = ' class="ours"' * ours
        name = f"mhc_ops ({step.provider})" if ours else {EAGER: "eager PyTorch"}.get(step.provider, step.provider)
        lines += [
            f'<text x="{names - 8}" y="{y + 15}" class="end">{html.escape(name)}</text>',
            f'<rect x="{names}" y="{y}" width="{long:.1f}" height="20" rx="3"{colour}/>',
            f'<text x="{names + long + 6:.1f}" y="{y + 15}">{percent(step.in_a_row)}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])
