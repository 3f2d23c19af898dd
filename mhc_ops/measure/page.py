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
from .speed import DIRECTIONS, Measurement
from .training_step import EAGER, PLAIN, backend_of

# Columns: "header = field format", or the field alone if it is the header.
ACCURACY = """op and case = case, backend, output, max error = max_error .2e, relative = relative_error .2e,
    tolerance = tolerance .0e, verdict"""
SUMMARY = "op, backend, cases, results, failed, worst = worst .2f, verdict"
SPEED = """op and case = case, direction, provider, µs = microseconds .1f, ± = spread .1f, GB/s = bandwidth .0f,
    of copy = of_copy .0%, × eager = eager .2f, × compile = torch.compile .2f, host µs = host_microseconds .0f,
    peak MB = peak_megabytes .0f"""
STEPS = """training step = size, provider, mode, ms = milliseconds .2f, ± = spread .2f,
    % over plain = over_plain, in a row = over_plain_in_a_row, peak MB = peak_megabytes .0f,
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
    return Table(list(found), [[figure(getattr(e, name), form) for name, _, form in found.values()] for e in entries])


def figure(value: Any, form: str, missing: str = "") -> str:
    return missing if value is None else format(value, form)


def of_check(results: Results, rows: bool) -> Iterator[Table | str]:
    """What `check` prints. rows: all of them, not only those that failed."""
    failed = [row for row in results.accuracy if not row.passed]
    if shown := results.accuracy if rows else failed:
        yield table(shown, ACCURACY)
    if results.accuracy:
        yield table(_summary(results.accuracy), SUMMARY)
        yield WORST + " --rows shows every result." * (not rows)
    if results.not_measured:
        yield left_out(results.not_measured)
    crashed = sum(entry.failed for entry in results.not_measured)
    counted = f"{len(results.accuracy) - len(failed)} passed, {len(failed)} failed"
    yield counted + f", {crashed} cases crashed" * bool(crashed)


def _summary(rows: Iterable[Row]) -> Iterator[SimpleNamespace]:
    """A line for each op and backend. Few elements of 16 bits are judged one by one, not in norm."""
    for (op, backend), of in _grouped(rows, lambda row: (op_of(row.case), row.backend)).items():
        failed = [row for row in of if not row.passed]
        in_norm = [r for r in of if getattr(torch, r.dtype, None) not in ROUNDING or r.elements >= ENOUGH_TO_AVERAGE]
        shares = [replace(row, relative_error=row.relative_error / row.tolerance) for row in in_norm]
        yield SimpleNamespace(
            op=op,
            backend=backend,
            cases=len({row.case for row in of}),
            results=len(of),
            failed=len(failed),
            worst=worst(shares).relative_error if shares else None,
            verdict=worst(failed or of).verdict,
        )


def of_bench(results: Results) -> Iterator[Table | str]:
    """What `bench` prints."""
    failed = [row for row in results.accuracy if not row.passed]
    if results.steps:
        yield table(results.steps, STEPS)
    if results.measurements or not results.steps:
        yield table(_timed(results), SPEED)
    yield from (f"{name} computes with: {words}" for name, words in results.precision.items())
    yield f"{len(results.accuracy) - len(failed)} results within their tolerance of fp64, {len(failed)} not"
    if failed:
        yield table(failed, ACCURACY)
    if results.not_measured:
        yield left_out(results.not_measured)


def _timed(results: Results) -> Iterator[SimpleNamespace]:
    """By case and direction; and how many times faster than the formula in torch each provider is."""
    shown = Shown(results)
    for case in (*shown.training, *shown.decode):
        for m in sorted(case.every, key=lambda m: DIRECTIONS.index(m.direction)):
            others = {name: case.bar(m.direction, name) if name != m.provider else None for name in OF_TORCH}
            faster = {name: other and other.microseconds / m.microseconds for name, other in others.items()}
            yield SimpleNamespace(**vars(m), of_copy=m.of_copy, **faster)


def by_reason(entries: Iterable[NotMeasured]) -> dict[tuple[str, str], list[str]]:
    """Each provider and reason once, with its cases."""
    found = _grouped(entries, attrgetter("provider", "reason"))
    return {key: [entry.where for entry in of] for key, of in found.items()}


def left_out(entries: Iterable[NotMeasured]) -> str:
    lines = []
    for (provider, reason), where in by_reason(entries).items():
        several = len(where) > 1
        lines += [str(NotMeasured(f"{len(where)} cases" if several else where[0], provider, reason))]
        lines += [f"  {case}" for case in where if several]
    return "\n".join(lines)


def extent(values: Iterable[float | None], form: str, unit: str = "") -> str:
    """1.8 to 4.1×, or one number if both ends are the same; – without values."""
    there = [value for value in values if value is not None]
    ends = dict.fromkeys(f"{end:{form}}" for end in (min(there), max(there))) if there else ()
    return " to ".join(ends) + unit if ends else "–"


def size_of(case: str, subject: str) -> str:
    """mhc_pre 8192x4x4096 bfloat16 no gamma -> 8192 × 4 × 4096 bfloat16 no gamma"""
    return re.sub(r"(?<=\d)x(?=\d)", " × ", case.removeprefix(subject).strip())


class Timed:
    """The measurements of one case; bars: direction -> provider -> measurement, in the order of the providers."""

    def __init__(self, every: Sequence[Measurement], providers: Sequence[str]) -> None:
        self.every, self.subject, self.group = every, every[0].subject, every[0].group
        self.size = size_of(every[0].case, self.subject)
        self.bars: dict[str, dict[str, Measurement]] = {}
        for m in sorted(every, key=lambda m: (DIRECTIONS.index(m.direction), providers.index(m.provider))):
            self.bars.setdefault(m.direction, {})[m.provider] = m

    def bar(self, direction: str, provider: str) -> Measurement | None:
        return self.bars.get(direction, {}).get(provider)

    def ours(self, direction: str) -> Measurement | None:
        """The fastest of our kernels."""
        kernels = [m for provider, m in self.bars.get(direction, {}).items() if provider in BACKENDS]
        return min(kernels, key=lambda m: m.microseconds, default=None)

    def over_ours(self, direction: str, provider: str) -> float | None:
        bar, ours = self.bar(direction, provider), self.ours(direction)
        return bar.microseconds / ours.microseconds if bar and ours else None

    def time(self, direction: str, provider: str) -> str:
        """Ours: µs · share of a copy; others: µs (times the faster of ours)."""
        bar, over_ours = self.bar(direction, provider), self.over_ours(direction, provider)
        if bar is None:
            return "–"
        beside = f" ({over_ours:.1f}×)" if over_ours and provider not in BACKENDS else f" · {bar.of_copy:.0%}"
        return f"{bar.microseconds:.1f}{beside}"

    def peaks(self, provider: str) -> str:
        found = [bar and bar.peak_megabytes for bar in (self.bar("forward", provider), self.bar("both", provider))]
        return " · ".join(figure(value, ".0f", "–") for value in found) if any(found) else "–"


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
        measurements = [m for m in results.measurements if m.group in ("training", "decode")]
        names = dict.fromkeys(m.provider for m in measurements)
        self.providers = [name for name in dict.fromkeys([*PROVIDER_ORDER, *names]) if name in names]
        cases = [Timed(every, self.providers) for every in _grouped(measurements, attrgetter("case")).values()]
        self.training, self.decode = ([c for c in cases if c.group == group] for group in ("training", "decode"))

    def sections(self) -> Iterator[Section]:
        """Those that have content."""
        r = self.results
        if r.steps:
            several = any(backend_of(step.provider) != step.provider for step in r.steps)
            yield Section("A training step", f"{STEP_NOTE} {FORMS * several}", [table(r.steps, STEPS)], True)
        if self.training:
            boundary = any(case.subject.startswith("mhc_next") for case in self.training)
            yield Section("In short", SHORT_NOTE, [self._overview()], True, self.training)
            note = f"{TIME_NOTE} {BOUNDARY * boundary}"
            yield Section("Training sizes", note, [self._times(*alike) for alike in self._alike(self.training)], True)
        if self.decode:
            small = [self._times(*alike) for alike in self._alike(self.decode)]
            yield Section("Small sizes and decoding", "As above. Forward is without gradients.", small)
        if with_memory := [c for c in self.training if any(m.peak_megabytes for m in c.every)]:
            peaks = [
                Table(["op", "size", *ps], [[c.subject, c.size, *map(c.peaks, ps)] for c in cases])
                for ps, cases in self._alike(with_memory)
            ]
            yield Section("Memory", "Peak MB above the inputs: forward · training step.", peaks)
        failed = [row for row in r.accuracy if not row.passed]
        if failed:
            yield Section("Outside their tolerance", "", [table(failed, ACCURACY)])
        if r.not_measured:
            reasons = [[p, why, "; ".join(where)] for (p, why), where in by_reason(r.not_measured).items()]
            yield Section("Not measured", "", [Table(["provider", "reason", "cases"], reasons)])
        found = {"date": r.date, **r.versions, "complete": "yes" if r.complete else "no"}
        found["results within their tolerance of fp64"] = f"{len(r.accuracy) - len(failed)} of {len(r.accuracy)}"
        found |= {f"{name} computes with": words for name, words in r.precision.items()}
        yield Section("Environment", "", [Table(["", ""], list(found.items()))])

    def _alike(self, cases: Sequence[Timed]) -> Iterator[tuple[list[str], list[Timed]]]:
        """Ops that the same providers have share a table: the providers, and the cases."""

        def providers(case: Timed) -> tuple[str, ...]:
            there = {m.provider for c in cases if c.subject == case.subject for m in c.every}
            return tuple(provider for provider in self.providers if provider in there)

        return ((list(names), found) for names, found in _grouped(cases, providers).items())

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

    def _times(self, providers: Sequence[str], cases: Sequence[Timed]) -> Table:
        rows = [[c.subject, c.size, WORDS[d], *(c.time(d, p) for p in providers)] for c in cases for d in c.bars]
        return Table(["op", "size", "", *providers], rows)


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
    environment.filters |= {"slug": lambda name: re.sub(r"\W+", "-", name), "backend_of": backend_of}
    return environment.get_template(template).render(**values).strip() + "\n"
