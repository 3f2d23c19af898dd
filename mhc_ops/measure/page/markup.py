"""Text and numbers as HTML. A number says which entries of the JSON file it was made from: see `number`."""

import math
import re
from html import escape
from typing import NamedTuple

MISSING = '<span class="none">–</span>'


class Value(NamedTuple):
    """A number and its origin: paths into the JSON file, joined by " * " and " / " and evaluated from left to right."""

    value: float
    origin: str

    def over(self, other: "Value") -> "Value":
        return Value(self.value / other.value, f"{self.origin} / {other.origin}")


def number(value: Value, text: str) -> str:
    """What stands on the page is `text`; value and origin stay with it, so that a test can hold one to the other."""
    if not math.isfinite(value.value):
        return escape(text)  # which JSON cannot hold
    return f'<data value="{value.value!r}" data-of="{escape(value.origin)}">{escape(text)}</data>'


def significant(value: float) -> str:
    """Three digits, and all that stand before the point: 0.0123, 1.23, 12.3, 123, 12,345"""
    if not math.isfinite(value):
        return str(value)
    digits = 2 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:,.{min(6, max(0, digits))}f}"


def microseconds(value: Value) -> str:
    return f'{number(value, significant(value.value))}<span class="unit"> µs</span>'


def percent(value: Value) -> str:
    return number(value, f"{value.value:.0%}" if value.value >= 0.01 else f"{value.value:.2%}")


def times(value: Value) -> str:
    return number(value, f"{significant(value.value)}×")


def slug(name: str) -> str:
    """For classes and anchors."""
    return re.sub(r"\W+", "-", name)


def swatch(provider: str) -> str:
    """Its colour and its name."""
    return f'<i class="dot p-{slug(provider)}"></i>{escape(provider)}'


def shape_of(case: str, subject: str) -> str:
    """mhc_pre 8192x4x4096 bfloat16 no gamma -> 8192 × 4 × 4096 bfloat16 no gamma"""
    return re.sub(r"(?<=\d)x(?=\d)", " × ", case.removeprefix(subject).strip())


def table(header: list[str], rows: list[list[str]], caption: str = "") -> str:
    """Cells are markup. The first column stays where it is when the table is wider than the screen."""
    head = "".join(f"<th scope=col>{cell}</th>" for cell in header)
    body = "".join(
        "<tr>" + f"<th scope=row>{row[0]}</th>" + "".join(_cell(cell) for cell in row[1:]) + "</tr>" for row in rows
    )
    words = f"<caption>{caption}</caption>" if caption else ""
    return f"<div class=wide><table>{words}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(cell: str) -> str:
    return cell if cell.startswith("<td") else f"<td>{cell}</td>"
