"""Results as one HTML page that needs nothing beside itself, and as Markdown; drawn from the JSON file alone. The
templates say how they look, tables.py what they show."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..core.backend import BACKENDS
from .peers import WITH_GRADIENTS
from .report import Refused, Table
from .results import DIRECTIONS, Results
from .speed import Measurement
from .tables import DIRECTION_WORDS, Bar, CaseBars, Shown, Value, growth_table, size_of, step_table
from .training_model import PLAIN

TEMPLATES = Path(__file__).parent / "templates"
SHORT_WORDS = {"forward": "fwd", "backward": "bwd", "both": "step"}
LONGEST_BAR = 6  # times the floor; a bar that is longer is drawn with a gap


def significant(value: float) -> str:
    """Three digits, and all that stand before the point: 0.0123, 1.23, 12.3, 123, 12,345"""
    if not math.isfinite(value):
        return str(value)
    digits = 2 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:,.{min(6, max(0, digits))}f}"


def percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.01 else f"{value:.2%}"


def grid_step(largest: float) -> float:
    """1, 2 or 5 times a power of ten, at most six of them up to the largest."""
    power = 10.0 ** math.floor(math.log10(largest))
    return next(step * power for step in (0.2, 0.5, 1.0, 2.0) if largest / (step * power) <= 6)


def slug(name: str) -> str:
    """For classes and anchors."""
    return re.sub(r"\W+", "-", name)


def as_markdown(table: Table) -> str:
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(results: Results) -> str:
    shown, steps = Shown(results), step_table(results.steps)
    return _render("page.html", shown=shown, r=results, steps=steps, LONGEST_BAR=LONGEST_BAR)


def markdown(files: Sequence[Results]) -> str:
    tables = (step_table, overview_table, training_tables, small_table, memory_tables, error_table, growth_table)
    return _render("benchmarks.md", files=[Shown(results) for results in files], **{t.__name__: t for t in tables})


def picture(results: Results) -> str:
    """An SVG of what each provider adds to a training step."""
    eager = [step for step in results.steps if not step.compiled]
    plain = max((step for step in eager if step.provider == PLAIN), key=lambda step: step.milliseconds, default=None)
    if plain is None:
        raise Refused("--svg draws training steps, and there are none: mhc-ops bench --case training_step --json FILE")
    bars = [step for step in eager if step.size == plain.size and step.overhead_percent is not None]
    bars.sort(key=lambda step: step.overhead_percent or 0.0)
    return _render("training_step.svg", bars=bars, plain=plain, device=Shown(results).device, OURS=BACKENDS)


def _render(template: str, **values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=not template.endswith(".md"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: list[Callable[..., Any]] = [significant, percent, grid_step, slug, as_markdown, math.isfinite, math.log10]
    environment.filters |= {function.__name__: function for function in filters}
    environment.globals |= {"WORDS": DIRECTION_WORDS, "SHORT": SHORT_WORDS, "Value": Value, "size_of": size_of}
    return environment.get_template(template).render(**values).strip() + "\n"


# The tables of Markdown.


def overview_table(shown: Shown) -> Table:
    """Over all training sizes: how near ours comes to a copy, and how long the others take."""
    others = [provider for provider in shown.providers if provider not in BACKENDS]
    rows = []
    for subject in shown.subjects:
        of_op = [case for case in shown.training if case.subject == subject]
        for direction, words in DIRECTION_WORDS.items():
            pairs = [(case, bar.entry) for case in of_op if (bar := case.ours(direction))]
            if pairs:
                share = _extent([100 * ours.of_copy for _, ours in pairs], ".0f", "%")
                bandwidth = _extent([ours.bandwidth for _, ours in pairs], ".0f", "")
                ratios = [_ratios(pairs, direction, other) for other in others]
                rows.append([_code(subject), words, share, bandwidth, *ratios])
    return Table(["op", "", "of a copy", "GB/s", *others], rows)


def _ratios(pairs: Sequence[tuple[CaseBars, Measurement]], direction: str, other: str) -> str:
    bars = [(case.bar(direction, other), ours) for case, ours in pairs]
    return _extent([bar.entry.microseconds / ours.microseconds for bar, ours in bars if bar], ".1f", "×")


def _extent(values: Sequence[float], form: str, unit: str) -> str:
    """1.8 to 4.1×, or one number where both are the same."""
    ends = dict.fromkeys(f"{end:{form}}" for end in (min(values), max(values))) if values else ()
    return " to ".join(ends) + unit if ends else "–"


def training_tables(shown: Shown) -> list[Table]:
    """Ours: µs · share of a copy; others: µs (times the faster of ours). Ops that the same providers have together."""

    def cell(case: CaseBars, direction: str, provider: str) -> str:
        bar, ours = case.bar(direction, provider), case.ours(direction)
        if bar is None:
            return "–"
        time, fastest = bar.entry.microseconds, min(b.entry.microseconds for b in case.bars[direction].values())
        words = f"{time:.1f} · {bar.entry.of_copy:.0%}"
        if ours is not None and provider not in BACKENDS:
            words = f"{time:.1f} ({time / ours.entry.microseconds:.1f}×)"
        return f"**{words}**" if time == fastest else words

    def row(case: CaseBars, direction: str, providers: Sequence[str]) -> list[str]:
        cells = [cell(case, direction, provider) for provider in providers]
        return [_code(case.subject), case.size, DIRECTION_WORDS[direction], *cells]

    return [
        Table(["op", "size", "", *providers], [row(case, d, providers) for case in cases for d in case.bars])
        for providers, cases in shown.alike(shown.training)
    ]


def small_table(shown: Shown) -> Table:
    """Device and host times; host times also in multiples of torch.add where that was measured."""

    def cells(case: CaseBars, provider: str) -> Iterable[str]:
        for direction in DIRECTIONS:
            bar = case.bar(direction, provider)
            yield f"{bar.entry.microseconds:.1f}" if bar else "–"
            if direction != "backward":
                yield _host(bar, shown.results.add_microseconds)

    header = ["op", "size", "provider", "forward µs", "on the host", "backward µs", "step µs", "on the host"]
    every = [(case, p) for case in shown.decode for p in shown.providers if any(p in b for b in case.bars.values())]
    return Table(header, [[_code(case.subject), case.size, p, *cells(case, p)] for case, p in every])


def _host(bar: Bar | None, add_microseconds: float | None) -> str:
    if bar is None or bar.entry.host_microseconds is None:
        return "–"
    adds = f" ({bar.entry.host_microseconds / add_microseconds:.1f} adds)" if add_microseconds else ""
    return f"{bar.entry.host_microseconds:.0f} µs{adds}"


def memory_tables(shown: Shown) -> list[Table]:
    """Peak MB above the inputs: forward · training step."""

    def cell(case: CaseBars, provider: str) -> str:
        bars = [case.bar(direction, provider) for direction in ("forward", "both")]
        peaks = [None if bar is None else bar.entry.peak_megabytes for bar in bars]
        return " · ".join("–" if peak is None else f"{peak:.0f}" for peak in peaks) if any(peaks) else "–"

    cases = [case for case in shown.with_memory() if case.group == "training"]
    return [
        Table(["op", "size", *providers], [[_code(c.subject), c.size, *(cell(c, p) for p in providers)] for c in found])
        for providers, found in shown.alike(cases)
    ]


def error_table(shown: Shown) -> Table:
    """The largest relative error of each output and gradient, over all cases of the run."""
    providers = list(dict.fromkeys(row.backend for row in shown.results.accuracy))
    found: dict[str, dict[str, float]] = {}
    for row in shown.results.accuracy:
        errors = found.setdefault(row.output.removesuffix(WITH_GRADIENTS), {})
        errors[row.backend] = max(errors.get(row.backend, 0.0), row.relative_error, key=_nan_last)
    rows = [[f"`{o}`", *(f"{e[p]:.1e}" if p in e else "–" for p in providers)] for o, e in found.items()]
    return Table(["output or gradient", *providers], rows)


def _nan_last(error: float) -> tuple[bool, float]:
    return math.isnan(error), error


def _code(subject: str) -> str:
    name, *options = subject.split()
    return ", ".join([f"`{name}`", *options])
