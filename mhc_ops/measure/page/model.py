"""The results in the order in which a page shows them, each number with its place in the JSON file."""

from dataclasses import dataclass

from ...core.backend import BACKENDS
from ..results import DIRECTIONS, Results
from ..speed import Measurement
from .markup import Value

WORDS = {"forward": "forward", "backward": "backward", "both": "training step"}
OTHERS = ("torch.compile", "eager")


@dataclass(frozen=True)
class Bar:
    """One measurement."""

    index: int
    entry: Measurement

    def value(self, name: str) -> Value | None:
        found = getattr(self.entry, name)
        return None if found is None else Value(found, f"measurements.{self.index}.{name}")

    @property
    def time(self) -> Value:
        return Value(self.entry.microseconds, f"measurements.{self.index}.microseconds")

    @property
    def of_copy(self) -> Value:
        return Value(self.entry.of_copy, f"measurements.{self.index}.of_copy")

    @property
    def copy_time(self) -> Value:
        return Value(self.entry.copy_microseconds, f"measurements.{self.index}.copy_microseconds")

    @property
    def copy_bandwidth(self) -> Value:
        """GB/s of the copy."""
        place = f"measurements.{self.index}"
        value = self.entry.bandwidth * self.entry.microseconds / self.entry.copy_microseconds
        return Value(value, f"{place}.bandwidth * {place}.microseconds / {place}.copy_microseconds")


@dataclass(frozen=True)
class CaseBars:
    """All of one case: direction -> provider -> measurement."""

    subject: str
    case: str
    group: str
    bars: dict[str, dict[str, Bar]]

    def first(self) -> Bar:
        return next(bar for found in self.bars.values() for bar in found.values())


class Model:
    def __init__(self, results: Results) -> None:
        self.results = results
        names = dict.fromkeys(m.provider for m in results.measurements)
        self.providers = sorted(names, key=lambda name: (rank(name), list(names).index(name)))
        found: dict[str, list[Bar]] = {}
        for index, entry in enumerate(results.measurements):
            found.setdefault(entry.case, []).append(Bar(index, entry))
        self.cases = [self._case(bars) for bars in found.values()]

    def _case(self, bars: list[Bar]) -> CaseBars:
        first = bars[0].entry
        sorted_bars = sorted(bars, key=lambda bar: self.providers.index(bar.entry.provider))
        by_direction = {
            direction: {bar.entry.provider: bar for bar in sorted_bars if bar.entry.direction == direction}
            for direction in DIRECTIONS
        }
        return CaseBars(first.subject, first.case, first.group, {d: b for d, b in by_direction.items() if b})

    def shown(self, group: str) -> list[CaseBars]:
        return [case for case in self.cases if case.group == group]

    def subjects(self) -> list[str]:
        """Those with bars; a sweep has lines."""
        return list(dict.fromkeys(case.subject for group in ("training", "decode") for case in self.shown(group)))


def rank(provider: str) -> int:
    """Our kernels, torch.compile, eager, then other libraries."""
    order = [*BACKENDS, *OTHERS]
    return order.index(provider) if provider in order else len(order)
