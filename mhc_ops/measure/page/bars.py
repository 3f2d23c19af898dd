"""Time as bars, beside the copy of the same bytes: the floor of what moves them."""

from html import escape

from .markup import Value, microseconds, number, percent, shape_of, significant, slug, swatch, times
from .model import WORDS, Bar, CaseBars, Model

CUT = 6  # times the floor, where a bar ends that is longer


def overview(model: Model) -> str:
    """One size of each op: how close every provider comes to the copy."""
    rows = []
    for subject in dict.fromkeys(case.subject for case in model.shown("training")):
        case = next(case for case in model.shown("training") if case.subject == subject)
        columns = "".join(_closeness(direction, bars) for direction, bars in case.bars.items())
        rows.append(
            f'<article class=close><h3><a href="#{slug(subject)}">{escape(subject)}</a>'
            f"<small>{escape(shape_of(case.case, subject))}</small></h3>{columns}</article>"
        )
    return f"<div class=overview>{''.join(rows)}</div>"


def _closeness(direction: str, bars: dict[str, Bar]) -> str:
    lines = "".join(
        f'<div class="bar p-{slug(provider)}" style="--share:{min(1, bar.of_copy.value):.4f}">'
        f"<span class=name>{escape(provider)}</span><span class=track><span class=fill></span></span>"
        f"<span class=figure>{percent(bar.of_copy)}</span></div>"
        for provider, bar in bars.items()
    )
    return f'<div class="group to-copy"><h4>{WORDS[direction]}</h4>{lines}</div>'


def cards(model: Model, cases: list[CaseBars]) -> str:
    return f"<div class=cards>{''.join(_card(case) for case in cases)}</div>"


def _card(case: CaseBars) -> str:
    groups = "".join(_group(direction, bars) for direction, bars in case.bars.items())
    return f"<article class=card><h4>{escape(shape_of(case.case, case.subject))}</h4>{groups}</article>"


def _group(direction: str, bars: dict[str, Bar]) -> str:
    """A scale of its own: the slowest fills it, unless that would leave nothing to see of the others."""
    first = next(iter(bars.values()))
    longest = max(first.copy_time.value, *(bar.time.value for bar in bars.values()))
    end = min(longest, CUT * first.copy_time.value)
    floor = first.copy_time.value / end
    copy_line = _bar_line("copy", first.copy_time, end, floor, _gigabytes(first.copy_bandwidth), "", "the floor")
    lines = "".join(
        _bar_line(provider, bar.time, end, floor, percent(bar.of_copy), _error(bar), _hint(bar))
        for provider, bar in bars.items()
    )
    heads = f"<span>of copy</span><span>{'error' if any(bar.entry.error for bar in bars.values()) else ''}</span>"
    title = f"<h5 class=bar><span class=direction>{WORDS[direction]}</span><span>time</span>{heads}</h5>"
    return f'<div class=group style="--floor:{floor:.4f}">{title}{copy_line}{lines}</div>'


def _bar_line(name: str, time: Value, end: float, floor: float, figure: str, error: str, hint: str) -> str:
    share = min(1, time.value / end)
    cut = " cut" if time.value > end else ""
    return (
        f'<div class="bar p-{slug(name)}{cut}" title="{escape(hint)}" '
        f'style="--share:{share:.4f};--solid:{min(1, floor / share):.4f}"><span class=name>{escape(name)}</span>'
        f"<span class=track><span class=fill></span></span>"
        f"<span class=time>{microseconds(time)}</span><span class=figure>{figure}</span>"
        f"<span class=figure>{error}</span></div>"
    )


def _error(bar: Bar) -> str:
    value = bar.value("error")
    return "" if value is None else number(value, f"{value.value:.1e}")


def _gigabytes(value: Value) -> str:
    return f"{number(value, significant(value.value))}<span class=unit> GB/s</span>"


def _hint(bar: Bar) -> str:
    m = bar.entry
    parts = [f"{m.bandwidth:,.0f} GB/s"]
    if m.spread is not None:
        parts.append(f"interquartile range {m.spread:.2f} µs of {m.samples} samples")
    if m.host_microseconds is not None:
        parts.append(f"{m.host_microseconds:.0f} µs on the host")
    return "; ".join(parts)


def tiles(model: Model) -> str:
    """The first case in a few numbers."""
    cases = model.shown("training") or model.cases
    if not cases:
        return ""
    fastest = max((case.first() for case in cases), key=lambda bar: bar.copy_bandwidth.value)
    found = [_tile(_gigabytes(fastest.copy_bandwidth), "the fastest copy of this run: the floor that times stand on")]
    case = cases[0]
    direction = "both" if "both" in case.bars else "forward"
    bars = case.bars[direction]
    base = next(iter(bars))
    ours = bars[base].time
    shape = escape(shape_of(case.case, case.subject))
    found.append(_tile(microseconds(ours), f"{WORDS[direction]} of {escape(case.subject)}, {shape}: {swatch(base)}"))
    found.append(_tile(percent(bars[base].of_copy), "of the speed of a copy that moves the same bytes"))
    rows = model.results.accuracy
    if rows:
        passed = sum(row.passed for row in rows)
        found.append(_tile(f"{passed} of {len(rows)}", "results of this run within their tolerance of fp64"))
    others = [(other, bar.time.over(ours)) for other, bar in bars.items() if other != base]
    if others:
        items = "".join(f"<li><b>{times(ratio)}</b> {swatch(other)}</li>" for other, ratio in others)
        found.append(
            f"<div class=double><ul>{items}</ul><span>the time of the others over that of {swatch(base)}</span></div>"
        )
    return f"<div class=tiles>{''.join(found)}</div>"


def _tile(big: str, small: str) -> str:
    return f"<div><b>{big}</b><span>{small}</span></div>"
