"""What got slower, less exact or larger from one file of results to another, beyond noise (docs/measure.md)."""

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..core.backend import BACKENDS
from ..testing.accuracy import Row
from .results import Results
from .training_step import backend_of

SURE = 3  # standard deviations
A_BIT = 2
QUARTILES_OF_NORMAL = 1.349  # interquartile range over standard deviation
RESOLUTION = 0.5 / 12**0.5  # µs: the standard deviation that an event's steps of 0.5 µs alone cause
DEVIATION_OF_MEDIAN = 1.4826  # standard deviation over median absolute deviation, of normal numbers
MEMORY_ROUNDING = 0.01  # the allocator rounds each of a few tensors up, by far less than a percent of large ones
OURS = (*BACKENDS, "eager")
WORSE = ("slower", "less exact", "more memory", "fails")  # of ours, what `compare` exits 1 for

Key = tuple[str, ...]  # the case, the provider, and what of it
Pairs = Mapping[Key, tuple[Any, Any]]  # the entries of both files


class Change(NamedTuple):
    """kind: of WORSE, or "faster", "more exact", "less memory", "missing", "not compared"; key: a Key, or its begin."""

    kind: str
    key: Key
    words: str

    @property
    def regression(self) -> bool:
        return self.kind in WORSE and backend_of(self.key[1]) in OURS

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join(self.key)}: {self.words}"


class Timed(NamedTuple):
    """ratio: in units of what it is compared with; noise: its relative standard deviation, None without a spread."""

    ratio: float
    noise: float | None
    unit: str
    megabytes: float | None = None


def compare(before: Results, after: Results) -> tuple[list[Change], int]:
    """All changes, regressions first; and how many entries both files have."""
    changes, common = list[Change](), 0
    for entries, differences in ((_kernels, _slower), (_steps, _slower), (_rows, _less_exact)):
        old, new = dict[Key, Any](entries(before)), dict[Key, Any](entries(after))
        both = {key: (old[key], new[key]) for key in old if key in new}
        changes += [*differences(both), *_only_in_one(old, new, after)]
        common += len(both)
    return sorted(changes, key=lambda change: not change.regression), common


def _only_in_one(old: Mapping[Key, Any], new: Mapping[Key, Any], after: Results) -> Iterator[Change]:
    """What failed in the second file; then a line for each case and provider that one file lacks."""
    failed: dict[Key, str] = {(n.where, n.provider): n.reason for n in after.not_measured if n.failed}
    gone, added = [key for key in old if key not in new], [key for key in new if key not in old]
    yield from (Change("fails", key, failed[key[:2]]) for key in gone if key[:2] in failed)
    for file, keys in (("first", [key for key in gone if key[:2] not in failed]), ("second", added)):
        for of in dict.fromkeys(key[:2] for key in keys):
            parts = ", ".join(key[2] for key in keys if key[:2] == of)
            yield Change("missing", of, f"only in the {file} file: {parts}")


def _kernels(results: Results) -> Iterator[tuple[Key, Timed]]:
    for m in results.measurements:
        times = (m.microseconds, m.spread), (m.copy_microseconds, m.copy_spread)
        parts = [max(s / QUARTILES_OF_NORMAL, RESOLUTION) / time for time, s in times if s is not None]
        noise = math.hypot(*parts) if len(parts) == len(times) else None
        yield (m.case, m.provider, m.direction), Timed(1 / m.of_copy, noise, "the copy's time", m.peak_megabytes)


def _steps(results: Results) -> Iterator[tuple[Key, Timed]]:
    for s in results.steps:
        for kind, (ratio, *quartiles) in ((k, r) for k, r in (("step", s.ratio), ("steps in a row", s.in_a_row)) if r):
            noise = (quartiles[1] - quartiles[0]) / QUARTILES_OF_NORMAL / ratio if quartiles else None
            yield (s.case, s.provider, kind), Timed(ratio, noise, "plain residuals", s.peak_megabytes)


def _rows(results: Results) -> Iterator[tuple[Key, Row]]:
    return (((row.case, row.backend, row.output), row) for row in results.accuracy)


def _slower(pairs: Pairs) -> Iterator[Change]:
    """Medians of all changes ignore what the entries have in common, and a few that changed a lot."""
    logs = [math.log(new.ratio / old.ratio) for old, new in pairs.values()] or [0.0]
    middle = statistics.median(logs)
    scatter = DEVIATION_OF_MEDIAN * statistics.median(abs(log - middle) for log in logs)
    for key, (a, b) in pairs.items():
        if a.noise is None or b.noise is None:
            yield Change("not compared", key, "there is no spread of the samples in one of the files")
        else:
            allowed = SURE * math.hypot(a.noise, b.noise, scatter)
            words = f"{a.ratio:.3g} × {a.unit}, now {b.ratio:.3g} ({b.ratio / a.ratio - 1:+.1%}, noise {allowed:.1%})"
            yield from _changed(key, words, a.ratio, b.ratio, allowed, "slower", "faster")
        if a.megabytes and b.megabytes is not None:
            words = f"{a.megabytes:.0f} MB, now {b.megabytes:.0f} MB"
            yield from _changed(key, words, a.megabytes, b.megabytes, MEMORY_ROUNDING, "more memory", "less memory")


def _less_exact(pairs: Pairs) -> Iterator[Change]:
    """The norm of N random errors has a relative standard deviation of 1/√(2N)."""
    for key, (a, b) in pairs.items():
        words = f"off by {a.relative_error:.1e}, now {b.relative_error:.1e} (allowed {b.tolerance:.0e})"
        dtype = getattr(torch, b.dtype, None)
        rounding = torch.finfo(dtype).eps / 2 if isinstance(dtype, torch.dtype) and dtype.is_floating_point else 0.0
        old, new = (max(row.relative_error, rounding) for row in (a, b))
        luck = 1 + SURE / (2 * max(1, b.elements)) ** 0.5
        if a.passed != b.passed:
            yield Change("fails" if a.passed else "more exact", key, words)
        else:
            yield from _changed(key, words, old, new, A_BIT * luck - 1, "less exact", "more exact")


def _changed(key: Key, words: str, old: float, new: float, allowed: float, more: str, less: str) -> Iterator[Change]:
    """allowed: the relative difference that is no change."""
    if new > old * (1 + allowed):
        yield Change(more, key, words)
    elif new * (1 + allowed) < old:
        yield Change(less, key, words)
