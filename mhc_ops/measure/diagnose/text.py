"""A diagnosis as text: the verdict first, then the table of outputs, then the first output of each finding."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from .. import report
from .diagnosis import Detail, Diagnosis
from .heat import Heat, heat

SHADES = "·░▒▓█"  # within the tolerance, then a decade beyond it each
NAN_SHADE = "N"
COLOURS = ("2", "33", "38;5;208", "31", "1;31")  # of the shades, on a terminal
NAN_COLOUR = "1;35"
LABEL = 22
MARGIN = LABEL + 3
WORTH_SHOWING = 5e-4  # a coefficient


def render(diagnosis: Diagnosis, width: int = 100, colour: bool = False) -> str:
    parts = [verdict(diagnosis, width, colour), table(diagnosis)]
    leads = [finding.outputs[0] for finding in diagnosis.findings]
    parts += [details(detail, width, colour) for detail in diagnosis.details if detail.name in leads]
    return "\n\n".join([*parts, legend()])


def verdict(diagnosis: Diagnosis, width: int, colour: bool) -> str:
    counted = f"{len(diagnosis.details)} of {len(diagnosis.rows)} outputs are off"
    lines = [_paint(f"{diagnosis.case}, {diagnosis.backend}: {counted}", "1", colour)]
    for number, finding in enumerate(diagnosis.findings, 1):
        share = f"  ({finding.share:.2%} of the error)" if finding.share else ""
        line = _wrapped(f"  {number}. {', '.join(finding.outputs)}: {finding.sentence}{share}", width, 5)
        lines.append(_paint(line, "1;31" if number == 1 else "0", colour))
    return "\n".join(lines)


def table(diagnosis: Diagnosis) -> str:
    header = ("output", "max error", "relative", "tolerance", "verdict", "finding")
    found = {name: str(k) for k, finding in enumerate(diagnosis.findings, 1) for name in finding.outputs}
    lines = [
        (
            row.output,
            f"{row.max_error:.2e}",
            f"{row.relative_error:.2e}",
            f"{row.tolerance:.0e}",
            row.verdict,
            found.get(row.output, ""),
        )
        for row in diagnosis.rows
    ]
    return report.table(header, lines)


def details(detail: Detail, width: int, colour: bool) -> str:
    numbers = detail.statistics
    decades = "  ".join(f"{decade} {share:.1%}" for decade, share in numbers.decades.items())
    axes = ", ".join(f"{size} {axis}{'s' * (size > 1)}" for axis, size in detail.layout.items())
    facts = {
        "place": f"{detail.place or 'everywhere'}, {detail.filled:.1%} of it wrong",
        "error / rms of truth": f"max {numbers.max:.2e}, mean {numbers.mean:.2e}, std {numbers.std:.2e}",
        "share by decade": decades,
    }
    if numbers.ratio:
        extremes = f"{numbers.ratio_min:.4g} to {numbers.ratio_max:.4g}"
        facts["result / truth"] = (
            f"{numbers.ratio}: mean {numbers.ratio_mean:.4g}, std {numbers.ratio_std:.2g}, {extremes}"
        )
    if numbers.nan or numbers.zero:
        facts["not written?"] = f"{numbers.nan} not finite, {numbers.zero} exactly 0 where the truth is not"
    shown = [f"{c:+.3g} · {term}" for term, c in detail.coefficients.items() if abs(c) >= WORTH_SHOWING]
    if shown:
        facts["error ≈ Σ c · term"] = ", ".join(shown)
    lines = [_wrapped(f"  {name:{LABEL}} {fact}", width, MARGIN) for name, fact in facts.items()]
    drawn = draw(heat(detail.error, detail.layout, width - MARGIN), colour)
    return "\n".join([_paint(f"{detail.name}  [{axes}]", "1", colour), *lines, *drawn])


def _wrapped(line: str, width: int, indent: int) -> str:
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, drop_whitespace=True)


def draw(map: Heat, colour: bool) -> list[str]:
    """One character per block; below, what the columns are."""
    wide, groups = len(map.columns), len(map.levels[0])
    lines = []
    if map.group_axis:
        titles = [f"{map.group_axis} {g}" for g in range(groups)]
        titles = [title if len(title) <= wide else title.split()[-1] for title in titles]
        lines.append(f"  {'':{LABEL}} {'│'.join(title.center(wide) for title in titles)}".rstrip())
    for label, levels in zip(map.rows, map.levels):
        cells = "│".join("".join(_shades(*run, colour) for run in groupby(group)) for group in levels)
        lines.append(f"  {label:{LABEL}} {cells}")
    per = map.columns[0].last - map.columns[0].first + 1
    unit = f"{map.column_axis}s {map.columns[0].first} to {map.columns[-1].last}"
    unit += f" of each {map.group_axis}" if map.group_axis else ""
    lines.append(f"  {'':{LABEL}} {unit}, {per} per character" if per > 1 else f"  {'':{LABEL}} {unit}")
    return lines


def legend() -> str:
    words = ("allowed", "to 10 ×", "to 100 ×", "to 1000 ×", "more")
    shades = "  ".join(f"{shade} {word}" for shade, word in zip(SHADES, words))
    return f"largest error in a block: {shades}  {NAN_SHADE} not finite"


def _shades(level: int, run: Iterable[int], colour: bool) -> str:
    """Neighbours of one level, painted together."""
    shade, code = (NAN_SHADE, NAN_COLOUR) if level < 0 else (SHADES[level], COLOURS[level])
    return _paint(shade * len(list(run)), code, colour)


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if colour else text


def summary(done: Sequence[Diagnosis], asked: int) -> str:
    """What ran, in a line."""
    last = done[-1]
    if not last.passed:
        rest = f", {asked - len(done)} not run" if asked > len(done) else ""
        return f"{len(done) - 1} of {asked} cases right, 1 off{rest}"
    # Few elements of 16 bits are judged one by one, and may be further off in norm.
    by_norm = [row for d in done for row in d.rows if row.relative_error <= row.tolerance]
    row = max(by_norm, key=lambda row: row.relative_error / row.tolerance)
    largest = f"the largest error is {row.relative_error / row.tolerance:.0%} of what is allowed, in {row.output}"
    return f"{last.case.subject.name.split()[0]}, {last.backend}: nothing found in {asked} cases; {largest}"
