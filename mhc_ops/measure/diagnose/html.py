"""A diagnosis as one page that needs nothing else."""

from html import escape

from .diagnosis import Detail, Diagnosis
from .heat import Heat, heat

LEVELS = ("#e8f0e8", "#ffe9a8", "#ffc266", "#f0803c", "#c62828")  # as the shades of the text
NAN_COLOUR = "#7b1fa2"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.3em }
h2 { font-size: 1.1em; margin-top: 2em }
ol.verdict { background: #fdecea; border-left: 4px solid #c62828; padding: .8em 2.5em }
p.fine { color: #2e7d32 }
table { border-collapse: collapse }
td, th { padding: .15em .7em; text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left }
tr.FAIL td { color: #c62828 }
table.heat td { padding: 0; width: 9px; height: 14px; border: 0 }
table.heat td.label { padding-right: .8em; color: #666; white-space: nowrap }
table.heat td.gap { width: 5px }
table.heat th { font-weight: normal; color: #666; text-align: center; padding: 0 }
p.unit { color: #666; font-size: .85em }
dl { display: grid; grid-template-columns: max-content auto; gap: .1em 1.2em }
dt { color: #666 }
dd { margin: 0 }
"""


def page(diagnosis: Diagnosis) -> str:
    title = escape(f"mhc-ops diagnose: {diagnosis.case}, {diagnosis.backend}")
    parts = [f"<h1>{title}</h1>", _verdict(diagnosis), _table(diagnosis), *map(_details, diagnosis.details)]
    head = f'<meta charset="utf-8"/><title>{title}</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.passed:
        return '<p class="fine">nothing found</p>'
    items = [
        f"<li><b>{escape(', '.join(finding.outputs))}</b>: {escape(finding.sentence)}"
        + (f" ({finding.share:.2%} of the error)" if finding.share else "")
        + "</li>"
        for finding in diagnosis.findings
    ]
    return f'<ol class="verdict">{"".join(items)}</ol>'


def _table(diagnosis: Diagnosis) -> str:
    rows = [
        f'<tr class="{row.verdict}"><td>{escape(row.output)}</td><td>{row.max_error:.2e}</td>'
        f"<td>{row.relative_error:.2e}</td><td>{row.tolerance:.0e}</td><td>{row.verdict}</td></tr>"
        for row in diagnosis.rows
    ]
    header = "".join(f"<th>{word}</th>" for word in ("output", "max error", "relative", "tolerance", "verdict"))
    return f"<table><tr>{header}</tr>{''.join(rows)}</table>"


def _details(detail: Detail) -> str:
    numbers = detail.statistics
    decades = ", ".join(f"{decade}: {share:.1%}" for decade, share in numbers.decades.items())
    coefficients = ", ".join(f"{c:+.3g} · {term}" for term, c in detail.coefficients.items())
    facts = {
        "axes": ", ".join(f"{size} {axis}{'s' * (size > 1)}" for axis, size in detail.layout.items()),
        "error / rms of truth": f"max {numbers.max:.2e}, mean {numbers.mean:.2e}, std {numbers.std:.2e}",
        "share by decade": decades,
        "result / truth": f"{numbers.ratio or 'not finite'}: mean {numbers.ratio_mean:.4g}, "
        f"std {numbers.ratio_std:.2g}, {numbers.ratio_min:.4g} to {numbers.ratio_max:.4g}",
        "place": f"{detail.place or 'everywhere'}, {detail.filled:.1%} of it wrong",
        "not finite; 0 where the truth is not": f"{numbers.nan}; {numbers.zero}",
        **({"error ≈ Σ c · term": coefficients} if coefficients else {}),
    }
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<h2>{escape(detail.name)}</h2><dl>{listed}</dl>{_heat(heat(detail.error, detail.layout))}"


def _heat(map: Heat) -> str:
    wide, groups = len(map.columns), len(map.levels[0])
    gap = '<td class="gap"></td>'
    lines = []
    if map.group_axis:
        titles = "<th></th>".join(f'<th colspan="{wide}">{map.group_axis} {g}</th>' for g in range(groups))
        lines.append(f'<tr><td class="label"></td>{titles}</tr>')
    for label, levels in zip(map.rows, map.levels):
        cells = gap.join(
            "".join(_cell(level, f"{label}, {map.column_axis} {block}") for level, block in zip(group, map.columns))
            for group in levels
        )
        lines.append(f'<tr><td class="label">{escape(label)}</td>{cells}</tr>')
    unit = f"{map.column_axis}s {map.columns[0].first} to {map.columns[-1].last}"
    return f'<table class="heat">{"".join(lines)}</table><p class="unit">{unit}</p>'


def _cell(level: int, where: str) -> str:
    colour = NAN_COLOUR if level < 0 else LEVELS[level]
    return f'<td style="background:{colour}" title="{escape(where)}"></td>'
