"""How time grows with a size, as lines: points are medians, lines are the fits."""

from html import escape

from ..scaling import Growth
from .markup import Value, number, significant, slug, swatch, table
from .model import WORDS, Model

WIDTH, HEIGHT = 360, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 34


def section(model: Model) -> str:
    growths = list(enumerate(model.results.scaling))
    charts: dict[tuple[str, str, str, str], list[tuple[int, Growth]]] = {}
    for index, growth in growths:
        charts.setdefault((growth.subject, growth.axis, growth.at, growth.direction), []).append((index, growth))
    drawn = "".join(_chart(*key, found) for key, found in charts.items() if key[3] != "both" or len(charts) < 5)
    note = "<p class=note>Dashed: a copy that moves the same bytes.</p>"
    return f"{note}<div class=charts>{drawn}</div>{_fits(growths)}"


def _chart(subject: str, axis: str, at: str, direction: str, growths: list[tuple[int, Growth]]) -> str:
    right = max(max(growth.sizes) for _, growth in growths)
    top = max(max(*growth.microseconds, *growth.copy_microseconds) for _, growth in growths)
    x_step, y_step = _step(right), _step(top)

    def x(size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * size / right

    def y(time: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * time / top

    parts = []
    for step in range(int(top / y_step) + 1):
        height = y(step * y_step)
        parts.append(f'<line class=grid x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor=end>{step * y_step:,.6g}</text>')
    for step in range(int(right / x_step) + 1):
        place = f'x="{x(step * x_step):.1f}" y="{HEIGHT - BOTTOM + 16}"'
        parts.append(f"<text {place} text-anchor=middle>{step * x_step:,.6g}</text>")
    parts.append(f'<text class=axis x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor=end>{escape(axis)}</text>')
    _, first = growths[0]
    parts.append(_line("copy", [(x(s), y(t)) for s, t in zip(first.sizes, first.copy_microseconds)]))
    for index, growth in growths:
        points = [(x(size), y(time)) for size, time in zip(growth.sizes, growth.microseconds)]
        parts.append(_line(growth.provider, points))
        for nth, (size, time, (left, up)) in enumerate(zip(growth.sizes, growth.microseconds, points)):
            origin = f"scaling.{index}.microseconds.{nth}"
            words = f"{growth.provider}, {axis} = {size:,}: {significant(time)} µs"
            parts.append(
                f'<circle class="p-{slug(growth.provider)}" cx="{left:.1f}" cy="{up:.1f}" r="3.5" '
                f'data-value="{time!r}" data-of="{origin}"><title>{escape(words)}</title></circle>'
            )
    label = f"{subject}, {WORDS[direction]}: time against {axis} at {at}"
    return (
        f"<figure><figcaption><b>{escape(subject)}</b> {WORDS[direction]}"
        f"<small>µs against {escape(axis)}, {escape(at)}</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{escape(label)}">{"".join(parts)}</svg>'
        "</figure>"
    )


def _line(provider: str, points: list[tuple[float, float]]) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="p-{slug(provider)}" points="{places}"/>'


def _step(largest: float) -> float:
    """1, 2 or 5 times a power of ten, four to nine of them up to the largest."""
    power = 1.0
    while power * 10 <= largest:
        power *= 10
    while power > largest:
        power /= 10
    return next(step * power for step in (0.2, 0.5, 1.0, 2.0) if largest / (step * power) <= 6)


def _fits(growths: list[tuple[int, Growth]]) -> str:
    rows = []
    for index, g in growths:

        def value(name: str, index: int = index, g: Growth = g) -> Value:
            return Value(getattr(g, name), f"scaling.{index}.{name}")

        rows.append(
            [
                f"{escape(g.subject)} <small>{escape(g.axis)} at {escape(g.at)}</small>",
                swatch(g.provider),
                WORDS[g.direction],
                number(value("overhead"), significant(g.overhead)),
                number(value("per_megabyte"), significant(g.per_megabyte)),
                number(value("over_copy"), f"{significant(g.over_copy)}×"),
                number(value("noise"), f"{g.noise:.1%}"),
            ]
        )
    header = ["op", "provider", "direction", "overhead µs", "µs per MB", "of a copy's cost per byte", "noise"]
    return table(header, rows, "time = overhead + cost per byte · bytes")
