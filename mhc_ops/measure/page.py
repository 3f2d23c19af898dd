"""Results as one HTML page that needs nothing beside itself, and as Markdown; drawn from the JSON file alone.

The templates say how they look. Here is what they show: each number with its origin in the JSON file.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..core.backend import BACKENDS
from .accuracy import Row
from .peers import WITH_GRADIENTS
from .results import DIRECTIONS, Results, by_reason
from .speed import STACKED_LAYERS, Growth, Measurement

TEMPLATES = Path(__file__).parent / "templates"
DIRECTION_WORDS = {"forward": "forward", "backward": "backward", "both": "training step"}
SHORT_WORDS = {"forward": "fwd", "backward": "bwd", "both": "step"}
PROVIDER_ORDER = (*BACKENDS, "torch.compile", "eager")  # then other libraries
LONGEST_BAR = 6  # times the floor; a bar that is longer is drawn with a gap
COLOURS = {  # light, dark
    "triton": ("#2563eb", "#6ea1ff"),
    "tilelang": ("#0d9488", "#3fcdb8"),
    "hip": ("#7c3aed", "#b39bff"),
    "torch.compile": ("#d97706", "#f0ac52"),
    "eager": ("#7b8696", "#9aa4b2"),
    "Liger": ("#d6336c", "#f27ea8"),
    "TileKernels": ("#3f8f2f", "#7fcf6d"),
    "fla": ("#a8551f", "#e09a6a"),
    "causal-conv1d": ("#0e7490", "#67c7dd"),
    "copy": ("#475569", "#aab6c5"),
}
OTHER_COLOUR = ("#6b7280", "#a1a8b3")


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

    def largest_errors(self) -> tuple[list[str], dict[str, dict[str, float]]]:
        """The providers, and by output the largest relative error of each."""
        providers = list(dict.fromkeys(row.backend for row in self.results.accuracy))
        found: dict[str, dict[str, float]] = {}
        for row in self.results.accuracy:
            errors = found.setdefault(row.output.removesuffix(WITH_GRADIENTS), {})
            errors[row.backend] = max(errors.get(row.backend, 0.0), row.relative_error, key=_nan_last)
        return providers, found

    def environment(self) -> dict[str, str]:
        r = self.results
        budget = {} if r.budget_seconds is None else {"budget": f"{r.budget_seconds:g} s"}
        return {"date": r.date, **r.versions, "complete": "yes" if r.complete else "no", **budget}


def _badness(entry: tuple[int, Row]) -> tuple[bool, float]:
    return not entry[1].passed, entry[1].relative_error


def _nan_last(error: float) -> tuple[bool, float]:
    return math.isnan(error), error


def _subject(case: str) -> str:
    """The words before the sizes."""
    words = case.split()
    return " ".join(words[: next((i for i, word in enumerate(words) if word[0].isdigit()), 1)])


def size_of(case: str, subject: str) -> str:
    """mhc_pre 8192x4x4096 bfloat16 no gamma -> 8192 × 4 × 4096 bfloat16 no gamma"""
    return re.sub(r"(?<=\d)x(?=\d)", " × ", case.removeprefix(subject).strip())


def significant(value: float) -> str:
    """Three digits, and all that stand before the point: 0.0123, 1.23, 12.3, 123, 12,345"""
    if not math.isfinite(value):
        return str(value)
    digits = 2 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:,.{min(6, max(0, digits))}f}"


def percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.01 else f"{value:.2%}"


def extent(values: Iterable[float], form: str, unit: str) -> str:
    """1.8 to 4.1×, or one number where both are the same."""
    ends = list(dict.fromkeys(f"{end:{form}}" for found in [list(values)] if found for end in (min(found), max(found))))
    return " to ".join(ends) + unit if ends else "–"


def grid_step(largest: float) -> float:
    """1, 2 or 5 times a power of ten, at most six of them up to the largest."""
    power = 10.0 ** math.floor(math.log10(largest))
    return next(step * power for step in (0.2, 0.5, 1.0, 2.0) if largest / (step * power) <= 6)


def draw(results: Results) -> str:
    shown = Shown(results)
    colours = {name: COLOURS.get(name, OTHER_COLOUR) for name in [*shown.providers, "copy"]}
    return _render("page.html", shown=shown, r=results, colours=colours, LONGEST_BAR=LONGEST_BAR)


def markdown(files: Sequence[Results]) -> str:
    return _render("benchmarks.md", files=[Shown(results) for results in files])


def _render(template: str, **values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: list[Callable[..., Any]] = [significant, percent, extent, grid_step, math.isfinite, math.log10]
    environment.filters |= {function.__name__: function for function in filters}
    environment.filters["slug"] = lambda name: re.sub(r"\W+", "-", name)
    environment.globals |= {"WORDS": DIRECTION_WORDS, "SHORT": SHORT_WORDS, "Value": Value}
    environment.globals |= {"BACKENDS": BACKENDS, "STACKED_LAYERS": STACKED_LAYERS, "size_of": size_of}
    return environment.get_template(template).render(**values).strip() + "\n"
