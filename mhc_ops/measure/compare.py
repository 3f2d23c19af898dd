"""What got slower, less exact or larger from one file of results to another, beyond noise.

Times count as multiples of the copy of the same run, so the files may come from different days and machines. The noise
of such a ratio follows from the spread of the samples of both times in both runs, and from how much all ratios scatter
from one file to the other: what a run does to its times that its samples do not show. A change counts when it is larger
than three standard deviations of that. An error counts when a result fails, or has lost a bit: when it is twice as far
from fp64 (and more for few elements, whose error is a draw of few numbers; and not below the rounding of its type).
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.backend import BACKENDS
from .accuracy import Row
from .results import Results
from .speed import Growth, Measurement, deviation

SURE = 3  # standard deviations
A_BIT = 2
DEVIATION_OF_MEDIAN = 1.4826  # standard deviation over median absolute deviation, of normal numbers
MEMORY_ROUNDING = 0.01  # the allocator rounds each of a handful of tensors up, by far less than a percent of large ones
OURS = (*BACKENDS, "eager")

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Change:
    """kind: "slower", "less exact", "more memory", "fails", "faster", "more exact", "less memory", "missing" or "not
    compared"; regression: one that `compare` exits 1 for."""

    kind: str
    what: str
    words: str
    regression: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}{': ' if self.words else ''}{self.words}"


def compare(before: Results, after: Results) -> tuple[list[Change], int]:
    """All that changed, regressions first; and how many entries were in both."""
    failed = {(n.where, n.provider): n.reason for n in after.not_measured if n.failed}
    scatter = _scatter(before.measurements, after.measurements)
    common = 0
    changes: list[Change] = []
    for field, differences in _KINDS.items():
        old, new = (_by_key(getattr(results, field)) for results in (before, after))
        common += len(set(old) & set(new))
        for key in [key for key in old if key in new]:
            changes += differences(key, old[key], new[key], scatter)
        for key in [key for key in old if (key[0], key[1]) in failed and key not in new]:
            changes.append(Change("fails", " ".join(key), failed[key[0], key[1]], key[1] in OURS))
        changes += _missing([key for key in old if key not in new and (key[0], key[1]) not in failed], "first")
        changes += _missing([key for key in new if key not in old], "second")
    return sorted(changes, key=lambda change: not change.regression), common


def _missing(keys: Sequence[Key], file: str) -> list[Change]:
    """One for each case and provider, with what is missing of it."""
    found: dict[str, list[str]] = {}
    for case, provider, what in keys:
        found.setdefault(f"{case} {provider}", []).append(what)
    return [Change("missing", name, f"only in the {file} file: {', '.join(parts)}") for name, parts in found.items()]


def _scatter(before: Sequence[Measurement], after: Sequence[Measurement]) -> float:
    """Relative standard deviation of the change of a ratio, over all of them. From medians: what many entries have in
    common, and a few that changed a lot, do not count as scatter."""
    old, new = _by_key(before), _by_key(after)
    changes = [math.log(old[key].of_copy / new[key].of_copy) for key in old if key in new]
    if not changes:
        return 0.0
    middle = statistics.median(changes)
    return DEVIATION_OF_MEDIAN * statistics.median(abs(change - middle) for change in changes)


def _by_key(entries: Sequence[Any]) -> dict[Key, Any]:
    """By what it was measured on, by whom, and what of it."""
    keys: dict[type, Callable[[Any], Key]] = {
        Measurement: lambda m: (m.case, m.provider, m.direction),
        Growth: lambda g: (f"{g.subject} growing with {g.axis} at {g.at}", g.provider, g.direction),
        Row: lambda row: (row.case, row.backend, row.output),
    }
    return {keys[type(entry)](entry): entry for entry in entries}


def _timing_changes(key: Key, a: Measurement, b: Measurement, scatter: float) -> Iterator[Change]:
    noise = [_noise(a), _noise(b), scatter]
    if None in noise:
        yield Change("not compared", " ".join(key), "there is no spread of the samples in one of the files")
    else:
        yield from _ratio_changes(key, 1 / a.of_copy, 1 / b.of_copy, noise, "the copy's time")  # type: ignore[arg-type]
    if a.peak_megabytes and b.peak_megabytes is not None:
        change = b.peak_megabytes / a.peak_megabytes - 1
        words = f"{a.peak_megabytes:.0f} MB, now {b.peak_megabytes:.0f} MB"
        if change > MEMORY_ROUNDING:
            yield Change("more memory", " ".join(key), words, key[1] in OURS)
        elif change < -MEMORY_ROUNDING:
            yield Change("less memory", " ".join(key), words)


def _noise(m: Measurement) -> float | None:
    """Relative standard deviation of time over copy time."""
    if m.spread is None or m.copy_spread is None:
        return None
    parts = (deviation(m.spread) / m.microseconds, deviation(m.copy_spread) / m.copy_microseconds)
    return sum(part**2 for part in parts) ** 0.5


def _growth_changes(key: Key, a: Growth, b: Growth, scatter: float) -> Iterator[Change]:
    return _ratio_changes(key, a.over_copy, b.over_copy, [a.noise, b.noise, scatter], "the copy's cost per byte")


def _ratio_changes(key: Key, a: float, b: float, noise: Sequence[float], unit: str) -> Iterator[Change]:
    allowed = SURE * sum(part**2 for part in noise) ** 0.5
    words = f"{a:.3g} × {unit}, now {b:.3g} ({b / a - 1:+.1%}, noise {allowed:.1%})"
    if b > a * (1 + allowed):
        yield Change("slower", " ".join(key), words, key[1] in OURS)
    elif a > b * (1 + allowed):
        yield Change("faster", " ".join(key), words)


def _row_changes(key: Key, a: Row, b: Row, scatter: float) -> Iterator[Change]:
    words = f"off by {a.relative_error:.1e}, now {b.relative_error:.1e} (allowed {b.tolerance:.0e})"
    if a.passed and not b.passed:
        yield Change("fails", " ".join(key), words, key[1] in OURS)
    elif _lost_a_bit(a, b):
        yield Change("less exact", " ".join(key), words, key[1] in OURS)
    elif _lost_a_bit(b, a) or (b.passed and not a.passed):
        yield Change("more exact", " ".join(key), words)


def _lost_a_bit(a: Row, b: Row) -> bool:
    """The norm of N random errors has a relative standard deviation of 1/√(2N)."""
    rounding = torch.finfo(getattr(torch, b.dtype)).eps / 2 if b.dtype else 0.0
    luck = 1 + SURE / (2 * max(1, b.elements)) ** 0.5
    return b.relative_error > A_BIT * luck * max(a.relative_error, rounding)


_KINDS: dict[str, Callable[[Key, Any, Any, float], Iterator[Change]]]
_KINDS = {"measurements": _timing_changes, "scaling": _growth_changes, "accuracy": _row_changes}
