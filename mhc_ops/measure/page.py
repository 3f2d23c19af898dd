"""What is shown of results: tables that commands print, one HTML page that needs nothing beside itself, Markdown and a
picture; all drawn from what is in the file. The templates say how pages look; here is what they show."""

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch

from ..core.backend import BACKENDS
from ..testing.accuracy import ENOUGH_TO_AVERAGE, ROUNDING, Row, worst
from .peers import WITH_GRADIENTS
from .report import Refused, Table, refuse_without
from .results import DIRECTIONS, GROUPS, Results
from .selection import OF_TORCH, NotMeasured, op_of
from .speed import STACKED_LAYERS, Measurement
from .training_step import PLAIN, backend_of

# Columns: "header = field format", or the field alone where it is the header.
ACCURACY = """op and case = case, backend, output, max error = max_error .2e, relative = relative_error .2e,
    tolerance = tolerance .0e, verdict"""
SUMMARY = "op, backend, cases, results, failed, worst = worst .2f, verdict"
SPEED = """op and case = case, direction, provider, µs = microseconds .1f, ± = spread .1f, GB/s = bandwidth .0f,
    of copy = of_copy .0%, × eager = eager .2f, × compile = torch.compile .2f, host µs = host_microseconds .0f,
    host adds = adds .1f, peak MB = peak_megabytes .0f, error = error .1e"""
STEPS = """training step = size, provider, mode, ms = milliseconds .2f, ± = spread .2f,
    % over plain = overhead_percent +.1f, peak MB = peak_megabytes .0f, difference = difference .1e"""
GROWTH = """op = subject, grows with = along, provider, direction, overhead µs = overhead .1f,
    µs per MB = per_megabyte .3f, × copy = over_copy .2f, ± = noise .1%"""

WORDS = {"forward": "forward", "backward": "backward", "both": "training step"}
SHORT_WORDS = {"forward": "fwd", "backward": "bwd", "both": "step"}
PROVIDER_ORDER = (*BACKENDS, "torch.compile", "eager")  # then other libraries
WORST = "worst: the largest error of a result, in norm, as a share of what is allowed."
BOUNDARY = "mhc_next is a boundary of a HyperStack: what 12 connections take beyond 4, by 8; so is its memory."
FORMS = "A backend alone is a HyperStack, in Triton with the norms inside; others have them in front of their layers."


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
    """rows: all of them, not only those that failed."""
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
    """A line for each op and backend."""
    for (op, backend), of in _grouped(rows, lambda row: (op_of(row.case), row.backend)).items():
        failed = [row for row in of if not row.passed]
        in_norm = [
            replace(row, relative_error=row.relative_error / row.tolerance) for row in of if _is_judged_in_norm(row)
        ]
        yield SimpleNamespace(
            op=op,
            backend=backend,
            cases=len({row.case for row in of}),
            results=len(of),
            failed=len(failed),
            worst=worst(in_norm).relative_error if in_norm else None,
            verdict=worst(failed or of).verdict,
        )


def _is_judged_in_norm(row: Row) -> bool:
    """Few elements of 16 bits are judged each by itself."""
    return getattr(torch, row.dtype, None) not in ROUNDING or row.elements >= ENOUGH_TO_AVERAGE


def of_bench(results: Results) -> Iterator[Table | str]:
    failed = [row for row in results.accuracy if not row.passed]
    if results.steps:
        yield table(results.steps, STEPS)
    if results.measurements or not results.steps:
        yield table(_timed(results), SPEED)
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


def _timed(results: Results) -> Iterator[SimpleNamespace]:
    """In the order of the cases, not of the time they were measured at; a direction's providers beside each other, and
    how many times faster than the formula in torch each of them is."""
    for case in sorted(Shown(results).cases, key=lambda case: GROUPS.index(case.group)):
        for m in sorted(case.every, key=lambda m: DIRECTIONS.index(m.direction)):
            others = {name: case.bar(m.direction, name) if name != m.provider else None for name in OF_TORCH}
            faster = {name: other and other.microseconds / m.microseconds for name, other in others.items()}
            host, add = m.host_microseconds, results.add_microseconds
            yield SimpleNamespace(**vars(m), of_copy=m.of_copy, **faster, adds=host / add if host and add else None)


def by_reason(entries: Iterable[NotMeasured]) -> dict[tuple[str, str, bool], list[str]]:
    """Each provider, reason and whether it failed once, with where that was."""
    found = _grouped(entries, attrgetter("provider", "reason", "failed"))
    return {key: [entry.where for entry in of] for key, of in found.items()}


def left_out(entries: Iterable[NotMeasured]) -> str:
    """Each reason once, with the cases that it has."""
    lines = []
    for (provider, reason, _), where in by_reason(entries).items():
        several = len(where) > 1
        lines += [str(NotMeasured(f"{len(where)} cases" if several else where[0], provider, reason))]
        lines += [f"  {case}" for case in where if several]
    return "\n".join(lines)


def significant(value: float) -> str:
    """Three digits, and all that stand before the point: 0.0123, 1.23, 12.3, 123, 12,345"""
    if not math.isfinite(value):
        return str(value)
    digits = 2 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:,.{min(6, max(0, digits))}f}"


def grid_step(largest: float) -> float:
    """1, 2 or 5 times a power of ten, at most six of them up to the largest."""
    power = 10.0 ** math.floor(math.log10(largest))
    return next(step * power for step in (0.2, 0.5, 1.0, 2.0) if largest / (step * power) <= 6)


def slug(name: str) -> str:
    """For classes and anchors."""
    return re.sub(r"\W+", "-", name)


def code(subject: str) -> str:
    """`mhc_pre`, no gamma"""
    name, *options = subject.split()
    return _markdown(", ".join([quoted(name), *map(literal, options)]))


def quoted(name: str) -> str:
    """As code of Markdown, within which only its own end and that of a cell mean anything."""
    return _markdown("`" + name.replace("`", "'").replace("|", r"\|") + "`")


def literal(value: Any) -> Any:
    """As words of Markdown: no tags, no links, no end of a cell. What is Markdown already stays as it is."""
    if hasattr(value, "__html__"):
        return value
    return _markdown(re.sub(r"[\\`*\[\]|~#]", r"\\\g<0>", html.escape(str(value), quote=False)))


def _markdown(text: str) -> str:
    """Of a class that templates do not escape."""
    import markupsafe

    return markupsafe.Markup(text)


def extent(values: Iterable[float | None], form: str, unit: str = "") -> str:
    """1.8 to 4.1×, or one number where both are the same; of those that are there."""
    there = [value for value in values if value is not None]
    ends = dict.fromkeys(f"{end:{form}}" for end in (min(there), max(there))) if there else ()
    return " to ".join(ends) + unit if ends else "–"


def size_of(case: str, subject: str) -> str:
    """mhc_pre 8192x4x4096 bfloat16 no gamma -> 8192 × 4 × 4096 bfloat16 no gamma"""
    return re.sub(r"(?<=\d)x(?=\d)", " × ", case.removeprefix(subject).strip())


@dataclass(frozen=True)
class Value:
    """A number and its origin: paths into the JSON file, joined by " * " and " / " and evaluated from left to right."""

    value: float
    origin: str

    def __mul__(self, other: "Value") -> "Value":
        return Value(self.value * other.value, f"{self.origin} * {other.origin}")

    def __truediv__(self, other: "Value") -> "Value":
        return Value(self.value / other.value, f"{self.origin} / {other.origin}")


class CaseBars:
    """All of one case; bars: direction -> provider -> measurement, in the order of the providers."""

    def __init__(self, every: Sequence[Measurement], providers: Sequence[str]) -> None:
        self.every, self.subject, self.group = every, every[0].subject, every[0].group
        self.size = size_of(every[0].case, self.subject)
        self.has_memory = any(m.peak_megabytes for m in every)
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


class Shown:
    """The results of one file in the order in which they are shown."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.device = results.versions.get("device", "unknown device")
        names = dict.fromkeys(m.provider for m in results.measurements)
        self.providers = [name for name in dict.fromkeys([*PROVIDER_ORDER, *names]) if name in names]
        cases = _grouped(results.measurements, attrgetter("case"))
        self.cases = [CaseBars(every, self.providers) for every in cases.values()]
        self.training, self.decode = ([c for c in self.cases if c.group == group] for group in ("training", "decode"))
        self.subjects = list(dict.fromkeys(case.subject for case in (*self.training, *self.decode)))
        self.charts = _grouped(results.scaling, attrgetter("subject", "axis", "at", "direction"))
        self.reasons = by_reason(results.not_measured)
        self.boundary = BOUNDARY if any(subject.startswith("mhc_next") for subject in self.subjects) else ""
        self.forms = FORMS if any(backend_of(step.provider) != step.provider for step in results.steps) else ""
        lists: dict[str, Sequence[Any]]
        lists = {"measurements": results.measurements, "accuracy": results.accuracy, "scaling": results.scaling}
        self._places = {id(e): f"{name}.{nth}" for name, entries in lists.items() for nth, e in enumerate(entries)}

    def of(self, entry: Any, field: str) -> Value | None:
        """What an entry says, with its origin."""
        found = getattr(entry, field)
        return None if found is None else Value(found, f"{self._places[id(entry)]}.{field}")

    def alike(self, cases: Sequence[CaseBars]) -> list[tuple[list[str], list[CaseBars]]]:
        """Ops that the same providers have share a table: the providers, and the cases."""

        def providers(case: CaseBars) -> tuple[str, ...]:
            there = {m.provider for c in cases if (c.subject, c.group) == (case.subject, case.group) for m in c.every}
            return case.group, *(provider for provider in self.providers if provider in there)

        return [(names, found) for (_, *names), found in _grouped(cases, providers).items()]

    def overview(self) -> Table:
        """Over all training sizes: how near ours comes to a copy, and how long the others take."""
        others = [provider for provider in self.providers if provider not in BACKENDS]
        rows = []
        for subject, direction in product(self.subjects, DIRECTIONS):
            cases = [case for case in self.training if case.subject == subject]
            if ours := [m for case in cases if (m := case.ours(direction))]:
                share, bandwidth = extent((100 * m.of_copy for m in ours), ".0f", "%"), (m.bandwidth for m in ours)
                ratios = [extent((case.over_ours(direction, p) for case in cases), ".1f", "×") for p in others]
                rows.append([code(subject), WORDS[direction], share, extent(bandwidth, ".0f"), *ratios])
        return Table(["op", "", "of a copy", "GB/s", *others], rows)

    def accuracy(self) -> dict[str, dict[tuple[str, str], dict[str, Row]]]:
        """Of every op, case, provider and output the row. Some libraries run other kernels where gradients are wanted:
        the larger error counts."""
        found: dict[str, dict[tuple[str, str], dict[str, Row]]] = {}
        for row in self.results.accuracy:
            line, output = found.setdefault(op_of(row.case), {}).setdefault((row.case, row.backend), {}), _output(row)
            line[output] = max(line.get(output, row), row, key=lambda row: (not row.passed, row.relative_error))
        return found

    def errors(self) -> dict[str, dict[str, float]]:
        """The largest of each output and provider."""
        return {
            output: {name: worst(of).relative_error for name, of in _grouped(rows, attrgetter("backend")).items()}
            for output, rows in _grouped(self.results.accuracy, _output).items()
        }


def _output(row: Row) -> str:
    return row.output.removesuffix(WITH_GRADIENTS)


def _grouped(entries: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def draw(results: Results) -> str:
    shown = Shown(results)
    return render("page.html", shown=shown, r=results, of=shown.of)


def markdown(files: Sequence[Results]) -> str:
    return render("benchmarks.md", files=[Shown(results) for results in files])


def picture(results: Results) -> str:
    """An SVG of what each provider adds to a training step."""
    eager = [step for step in results.steps if not step.compiled]
    plain = max((step for step in eager if step.provider == PLAIN), key=lambda step: step.milliseconds, default=None)
    bars = [step for step in eager if plain and step.size == plain.size and step.overhead_percent is not None]
    if not bars:
        raise Refused("--svg draws training steps, and there are none: mhc-ops bench --case training_step --json FILE")
    bars.sort(key=lambda step: step.overhead_percent or 0.0)
    return render("training_step.svg", bars=bars, plain=plain, device=Shown(results).device)


def render(template: str, **values: Any) -> str:
    refuse_without("jinja2", "showing what was found")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mhc_ops.measure"),
        autoescape=template.endswith(("html", "svg", "md")),
        finalize=literal if template.endswith("md") else None,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: list[Callable[..., Any]] = [significant, grid_step, slug, code, quoted, figure, backend_of]
    environment.filters |= {function.__name__: function for function in [*filters, math.isfinite, math.log10]}
    environment.globals |= {"WORDS": WORDS, "SHORT": SHORT_WORDS, "STEPS": STEPS, "GROWTH": GROWTH, "OURS": BACKENDS}
    environment.globals |= {"Value": Value, "size_of": size_of, "tabulate": table}
    return environment.get_template(template).render(**values).strip() + "\n"
