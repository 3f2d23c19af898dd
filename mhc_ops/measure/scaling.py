"""How time grows with a size: time = overhead + cost per byte · bytes, for a provider and for a copy.

Least squares of relative residuals, so that small sizes count as much as large ones. The noise of the slope follows
from the spread of the samples behind each point.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .cases import Sweep
from .speed import Measurement, deviation

FEWEST_POINTS = 3  # two make any line fit


@dataclass(frozen=True)
class Line:
    """time = overhead + slope · bytes, and the standard deviation of the slope."""

    overhead: float
    slope: float
    deviation: float


@dataclass(frozen=True)
class Growth:
    """One provider and direction along one axis. Points in the order of the sizes; times in µs."""

    subject: str
    axis: str
    at: str
    provider: str
    direction: str
    sizes: list[int]
    cases: list[str]
    megabytes: list[float]
    microseconds: list[float]
    copy_microseconds: list[float]
    overhead: float  # µs
    per_megabyte: float  # µs
    copy_per_megabyte: float
    noise: float  # standard deviation of per_megabyte over copy_per_megabyte, relative

    @property
    def over_copy(self) -> float:
        """What a byte more costs, in times of what it costs a copy."""
        return self.per_megabyte / self.copy_per_megabyte


def fit_line(sizes: Sequence[float], times: Sequence[float], deviations: Sequence[float]) -> Line:
    weights = [1 / time**2 for time in times]
    total = sum(weights)
    middle = sum(w * size for w, size in zip(weights, sizes)) / total
    moment = sum(w * (size - middle) ** 2 for w, size in zip(weights, sizes))
    shares = [w * (size - middle) / moment for w, size in zip(weights, sizes)]  # slope = Σ share · time
    slope = sum(share * time for share, time in zip(shares, times))
    overhead = sum(w * time for w, time in zip(weights, times)) / total - slope * middle
    return Line(overhead, slope, sum((share * d) ** 2 for share, d in zip(shares, deviations)) ** 0.5)


def fit(sweeps: Sequence[Sweep], measurements: Sequence[Measurement]) -> list[Growth]:
    """Of what was measured of the sweeps: a line for each provider and direction that has enough points."""
    found = {(m.case, m.provider, m.direction): m for m in measurements}
    kinds = dict.fromkeys((m.provider, m.direction) for m in measurements)
    growths = []
    for sweep in sweeps:
        names = [str(case) for case in sweep.cases]
        for provider, direction in kinds:
            points = [(s, found.get((n, provider, direction))) for s, n in zip(sweep.sizes, names)]
            there = [(size, point) for size, point in points if point is not None]
            if len(there) >= FEWEST_POINTS:
                growths.append(_growth(sweep, [size for size, _ in there], [point for _, point in there]))
    return growths


def _growth(sweep: Sweep, sizes: list[int], points: list[Measurement]) -> Growth:
    first = points[0]
    megabytes = [(point.bytes or 0) / 1e6 for point in points]
    times, copies = [p.microseconds for p in points], [p.copy_microseconds for p in points]
    ours = fit_line(megabytes, times, [deviation(p.spread or 0) for p in points])
    copy = fit_line(megabytes, copies, [deviation(p.copy_spread or 0) for p in points])
    return Growth(
        first.subject,
        sweep.axis,
        sweep.at,
        first.provider,
        first.direction,
        sizes,
        [p.case for p in points],
        megabytes,
        times,
        copies,
        ours.overhead,
        ours.slope,
        copy.slope,
        ((ours.deviation / ours.slope) ** 2 + (copy.deviation / copy.slope) ** 2) ** 0.5,
    )
