"""The tables that commands print, and the pages that are drawn from a file of results: HTML, Markdown and SVG."""

import html
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..core.backend import BACKENDS
from ..testing.accuracy import ENOUGH_TO_AVERAGE, ROUNDING, Row, worst
from .report import Refused, Table, refuse_without
from .results import Results
from .selection import OF_TORCH, NotMeasured, op_of
from .speed import DIRECTIONS, EAGER, PLAIN, Measurement, percent
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
weights: wall clock of a forward and backward, host included, from idle to idle, in ms; the percentage over the plain
model that took turns with it, with quartiles, and the same for steps in a row; peak memory above weights and input;
difference of the loss or of dx from the formula in PyTorch."""
FORMS = """A backend alone is a HyperStack, in Triton with the norms inside; HyperConnection and layer_norm=False have
them in front of their layers."""
SHORT_NOTE = """Over all training sizes: the share of a copy's speed that the faster of our kernels reaches, its
bandwidth, and the time of the others over its time."""
TIME_NOTE = """Ours: µs · of a copy. Others: µs (times the faster of ours). mHC has 4 streams and 20 Sinkhorn
iterations; mhc_layer, which HyperConnection calls, stands around a layer that costs nothing. The convolution has a
bias, short_conv (which ShortConv calls) a residual."""
ALL_NOTE = """Median and interquartile range in µs; GB/s of the bytes that an op must move; the time of a copy of them,
and of the formula in torch, over its time; µs until the call returns; the peak above the inputs in MB."""
BOUNDARY = """mhc_next is a boundary of a HyperStack: what 12 connections take beyond 4, divided by 8; so is its
memory."""
MARKDOWN_HEAD = """# Measured

<!-- Written by `mhc-ops page benchmarks/results/*.json --markdown docs/benchmarks.md`; a test holds this file to the
results. -->

Times are medians of device time in µs, with a cold L2. *Of a copy*: the time that a copy of the same bytes takes in the
same run, over the operator's time; 100% is the memory limit. Kernels and libraries were checked against fp64 before
they were timed. [How it is measured](measure.md). The [page of a run](report.md) has small sizes and memory.
"""


def table(entries: Iterable[Any], columns: str) -> Table:
    """A line for each entry, with the fields of the columns."""
    found = {}
    for column in columns.split(","):
        header, _, field = column.strip().partition(" = ")
        found[header] = (field or header).partition(" ")

    def cell(value: Any, form: str) -> str:
        return percent(value) if isinstance(value, list) else "" if value is None else format(value, form)

    return Table(list(found), [[cell(getattr(e, name), form) for name, _, form in found.values()] for e in entries])


def of_check(results: Results, rows: bool) -> Iterator[Table | str]:
    """What `check` prints. rows: all of them, not only those that failed."""
    if shown := results.accuracy if rows else _failed(results):
        yield table(shown, ACCURACY)
    if results.accuracy:
        yield table(_summary(results.accuracy), SUMMARY)
        yield WORST + " --rows shows every result." * (not rows)
    yield from left_out(results.not_measured)
    crashed, failed = sum(entry.failed for entry in results.not_measured), len(_failed(results))
    yield f"{len(results.accuracy) - failed} passed, {failed} failed" + f", {crashed} cases crashed" * bool(crashed)


def _failed(results: Results) -> list[Row]:
    return [row for row in results.accuracy if not row.passed]


def _summary(rows: Iterable[Row]) -> Iterator[SimpleNamespace]:
    """A line for each op and backend. Few elements of 16 bits are judged one by one, not in norm."""
    for (op, backend), of in _grouped(rows, lambda row: (op_of(row.case), row.backend)).items():
        failed, cases = [row for row in of if not row.passed], len({row.case for row in of})
        in_norm = [r for r in of if getattr(torch, r.dtype, None) not in ROUNDING or r.elements >= ENOUGH_TO_AVERAGE]
        shares = [replace(row, relative_error=row.relative_error / row.tolerance) for row in in_norm]
        largest, verdict = worst(shares).relative_error if shares else None, worst(failed or of).verdict
        counts = {"cases": cases, "results": len(of), "failed": len(failed)}
        yield SimpleNamespace(op=op, backend=backend, **counts, worst=largest, verdict=verdict)


def of_bench(results: Results) -> Iterator[Table | str]:
    """What `bench` prints."""
    if results.steps:
        yield table(results.steps, STEPS)
    if results.measurements or not results.steps:
        yield table(_timed(results.measurements), SPEED)
    yield from (f"{name} computes with: {words}" for name, words in results.precision.items())
    failed = _failed(results)
    yield f"{len(results.accuracy) - len(failed)} results within their tolerance of fp64, {len(failed)} not"
    if failed:
        yield table(failed, ACCURACY)
    yield from left_out(results.not_measured)


def _timed(measurements: Sequence[Measurement]) -> Iterator[SimpleNamespace]:
    """By case and direction; and how many times faster than the formula in torch each provider is."""
    cases, known = list(dict.fromkeys(m.case for m in measurements)), {}
    for m in measurements:
        known[m.case, m.direction, m.provider] = m.microseconds
    for m in sorted(measurements, key=lambda m: (cases.index(m.case), DIRECTIONS.index(m.direction))):
        others = {name: known.get((m.case, m.direction, name)) for name in OF_TORCH if name != m.provider}
        faster = {name: other and other / m.microseconds for name, other in others.items()}
        yield SimpleNamespace(**vars(m), of_copy=m.of_copy, **{**dict.fromkeys(OF_TORCH), **faster})


def by_reason(entries: Iterable[NotMeasured]) -> dict[tuple[str, str], list[str]]:
    """Each provider and reason once, with its cases."""
    found = _grouped(entries, attrgetter("provider", "reason"))
    return {key: [entry.where for entry in of] for key, of in found.items()}


def left_out(entries: Sequence[NotMeasured]) -> Iterator[str]:
    lines = []
    for (provider, reason), where in by_reason(entries).items():
        several = len(where) > 1
        lines += [str(NotMeasured(f"{len(where)} cases" if several else where[0], provider, reason))]
        lines += [f"  {case}" for case in where if several]
    yield from ["\n".join(lines)] if lines else []


def extent(values: Iterable[float | None], form: str, unit: str = "") -> str:
    """1.8 to 4.1×, or one number if both ends are the same; – without values."""
    there = [value for value in values if value is not None]
    ends = dict.fromkeys(f"{end:{form}}" for end in (min(there), max(there))) if there else ()
    return " to ".join(ends) + unit if ends else "–"


class Timed:
    """The measurements of one case; bars: direction -> provider -> measurement, in the order of the providers."""

    def __init__(self, every: Sequence[Measurement], order: Sequence[str]) -> None:
        self.subject, self.providers = every[0].subject, {m.provider for m in every}
        # mhc_pre 8192x4x4096 bfloat16 no gamma -> 8192 × 4 × 4096 bfloat16 no gamma
        self.size = re.sub(r"(?<=\d)x(?=\d)", " × ", every[0].case.removeprefix(self.subject).strip())
        self.bars: dict[str, dict[str, Measurement]] = {}
        for m in sorted(every, key=lambda m: (DIRECTIONS.index(m.direction), order.index(m.provider))):
            self.bars.setdefault(m.direction, {})[m.provider] = m

    def ours(self, direction: str) -> Measurement | None:
        """The fastest of our kernels."""
        kernels = [m for provider, m in self.bars.get(direction, {}).items() if provider in BACKENDS]
        return min(kernels, key=lambda m: m.microseconds, default=None)

    def over_ours(self, direction: str, provider: str) -> float | None:
        bar, ours = self.bars.get(direction, {}).get(provider), self.ours(direction)
        return bar.microseconds / ours.microseconds if bar and ours else None

    def time(self, direction: str, provider: str) -> str:
        """Ours: µs · share of a copy; others: µs (times the faster of ours)."""
        if (bar := self.bars[direction].get(provider)) is None:
            return "–"
        over_ours = self.over_ours(direction, provider) if provider not in BACKENDS else None
        return f"{bar.microseconds:.1f}" + (f" ({over_ours:.1f}×)" if over_ours else f" · {bar.of_copy:.0%}")


class Section(NamedTuple):
    """bars: cases that HTML draws; brief: Markdown has the section too."""

    title: str
    note: str
    tables: Sequence[Table]
    brief: bool = False
    bars: Sequence[Timed] = ()


class Shown:
    """The results of one file in the order in which they are shown."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.device = results.versions.get("device", "unknown device")
        training = [m for m in results.measurements if m.group == "training"]
        names = dict.fromkeys(m.provider for m in training)
        self.providers = [name for name in dict.fromkeys([*PROVIDER_ORDER, *names]) if name in names]
        self.training = [Timed(every, self.providers) for every in _grouped(training, attrgetter("case")).values()]

    def sections(self) -> Iterator[Section]:
        """Those that have content."""
        r = self.results
        if r.steps:
            several = any(backend_of(step.provider) != step.provider for step in r.steps)
            yield Section("A training step", f"{STEP_NOTE} {FORMS * several}", [table(r.steps, STEPS)], True)
        if self.training:
            yield Section("In short", SHORT_NOTE, [self._overview()], True, self.training)
            boundary = any(case.subject.startswith("mhc_next") for case in self.training)
            yield Section("Training sizes", f"{TIME_NOTE} {BOUNDARY * boundary}", list(self._times()), True)
        if r.measurements:
            yield Section("All times", ALL_NOTE, [table(_timed(r.measurements), SPEED)])
        if failed := _failed(r):
            yield Section("Outside their tolerance", "", [table(failed, ACCURACY)])
        if r.not_measured:
            reasons = [[p, why, "; ".join(where)] for (p, why), where in by_reason(r.not_measured).items()]
            yield Section("Not measured", "", [Table(["provider", "reason", "cases"], reasons)])
        found = {"date": r.date, **r.versions, "complete": "yes" if r.complete else "no"}
        found["results within their tolerance of fp64"] = f"{len(r.accuracy) - len(failed)} of {len(r.accuracy)}"
        found |= {f"{name} computes with": words for name, words in r.precision.items()}
        yield Section("Environment", "", [Table(["", ""], list(found.items()))])

    def _overview(self) -> Table:
        others = [provider for provider in self.providers if provider not in BACKENDS]
        rows = []
        for subject, direction in product(dict.fromkeys(case.subject for case in self.training), DIRECTIONS):
            cases = [case for case in self.training if case.subject == subject]
            if ours := [m for case in cases if (m := case.ours(direction))]:
                share, bandwidth = extent((100 * m.of_copy for m in ours), ".0f", "%"), (m.bandwidth for m in ours)
                ratios = [extent((case.over_ours(direction, p) for case in cases), ".1f", "×") for p in others]
                rows.append([subject, WORDS[direction], share, extent(bandwidth, ".0f"), *ratios])
        return Table(["op", "", "of a copy", "GB/s", *others], rows)

    def _times(self) -> Iterator[Table]:
        """Ops that the same providers have share a table."""

        def providers(case: Timed) -> tuple[str, ...]:
            there = set().union(*(c.providers for c in self.training if c.subject == case.subject))
            return tuple(provider for provider in self.providers if provider in there)

        for names, cases in _grouped(self.training, providers).items():
            rows = [[c.subject, c.size, WORDS[d], *(c.time(d, p) for p in names)] for c in cases for d in c.bars]
            yield Table(["op", "size", "", *names], rows)


def _grouped(entries: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def draw(results: Results) -> str:
    """A page that needs no other file."""
    return _render("page.html", shown=Shown(results), r=results, WORDS=WORDS)


def markdown(files: Sequence[Results]) -> str:
    """The main tables of several files."""
    parts = [MARKDOWN_HEAD]
    for shown in map(Shown, files):
        r = shown.results
        versions = [f"{n} {v}" for n, v in r.versions.items() if n not in ("device", "python") and v != "-"]
        parts.append(f"## {literal(shown.device)}\n\n{literal(', '.join([r.date, *versions]))}.")
        parts[-1] += "\n\nThe run was interrupted." * (not r.complete)
        for section in shown.sections():
            if section.brief:
                parts += [f"### {section.title}", literal(section.note.strip())]
                parts += ["\n".join(map(_line, [t.header, ["---"] * len(t.header), *t.rows])) for t in section.tables]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(literal, cells))} |"


def literal(text: str) -> str:
    """Words of Markdown: no tags, no links, no end of a cell."""
    return re.sub(r"[\\`*\[\]|~#]", r"\\\g<0>", html.escape(text, quote=False))


def picture(results: Results) -> str:
    """An SVG of what each provider adds to a training step."""
    eager = [step for step in results.steps if step.mode == EAGER]
    plain = max((step for step in eager if step.provider == PLAIN), key=lambda step: step.milliseconds, default=None)
    bars = [step for step in eager if plain and step.size == plain.size and step.ratio]
    if not bars:
        raise Refused("--svg draws training steps, and there are none: mhc-ops bench --case training_step --json FILE")
    bars.sort(key=lambda step: step.ratio)
    return _render("training_step.svg", bars=bars, plain=plain, device=Shown(results).device, OURS=BACKENDS)


def _render(template: str, **values: Any) -> str:
    refuse_without("jinja2", "a page")
    import jinja2

    loader = jinja2.PackageLoader("mhc_ops.measure")
    options: Any = {"trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=loader, autoescape=True, **options)
    filters: dict[str, Any] = {"slug": lambda name: re.sub(r"\W+", "-", name), "backend_of": backend_of}
    environment.filters |= filters | {"percent": percent}
    return environment.get_template(template).render(**values).strip() + "\n"
