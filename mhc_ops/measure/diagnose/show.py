"""A diagnosis as text, as a page and as data; text and page share a small map of the largest errors."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..report import Refused
from . import Diagnosis
from .outputs import Layout, Output

ROWS, COLUMNS = 16, 64
SIDE_BY_SIDE = ("stream", "old stream")  # axes whose maps stand beside each other
STEPS = (1.0, 10.0, 100.0, 1000.0, torch.finfo(torch.float64).max)  # what is allowed, decades beyond it, not finite
SHADES = {"·": "allowed", "░": "to 10 ×", "▒": "to 100 ×", "▓": "to 1000 ×", "█": "more", "N": "not finite"}
LEGEND = "largest error in a block: " + "  ".join(f"{shade} {words}" for shade, words in SHADES.items())
COLOURS = dict(zip(SHADES, ("2", "33", "38;5;208", "31", "1;31", "1;35")))  # on a terminal
CLASSES = dict(zip(SHADES, ("within", "tens", "hundreds", "thousands", "more", "lost")))  # on the page
LABEL = 22
MARGIN = LABEL + 3
WORTH_SHOWING = 5e-4  # a coefficient


def blocks_of(size: int, most: int) -> list[range]:
    """Equal blocks of a power of two, as kernels have them."""
    length = 1 << max(0, math.ceil(math.log2(max(1, size) / most)))
    return [range(first, min(size, first + length)) for first in range(0, size, length)]


def largest(excess: Tensor, axis: int, blocks: Sequence[range]) -> Tensor:
    """In each block of an axis."""
    known = excess.nan_to_num(torch.inf, torch.inf)
    return torch.stack([known.narrow(axis, block[0], len(block)).amax(axis) for block in blocks], axis)


def indices(block: Sequence[int]) -> str:
    return f"{block[0]}–{block[-1]}" if block[0] != block[-1] else str(block[0])


def map_of(excess: Tensor, layout: Layout, columns: int = COLUMNS) -> Iterator[tuple[str, str]]:
    """Lines as a label and what stands right of it: a shade per block, rows that look the same as one.

    excess: the error as a multiple of what is allowed, shaped by the layout.
    """
    *above, axis = layout
    group = above.pop() if len(above) > 1 and above[-1] in SIDE_BY_SIDE else ""
    outer, inner = ["", "", *above][-2:]
    shape = [layout.get(name, 1) for name in (outer, inner, group, axis)]
    blocks = (
        blocks_of(shape[0], ROWS // 4),
        blocks_of(shape[1], ROWS // 2 if outer else ROWS),
        blocks_of(shape[3], max(1, columns // shape[2] - 1)),
    )
    found = excess.double().reshape(shape)
    for dim, own in zip((0, 1, 3), blocks):
        found = largest(found, dim, own)
    shades = list(SHADES)
    lines = [
        ["│".join("".join(shades[k] for k in cells) for cells in row) for row in rows]
        for rows in torch.bucketize(found, found.new_tensor(STEPS)).tolist()
    ]
    if group:
        titles = [f"{group} {g}" if len(f"{group} {g}") <= len(blocks[2]) else str(g) for g in range(shape[2])]
        yield "", "│".join(title.center(len(blocks[2])) for title in titles).rstrip()
    for outer_block, rows in zip(blocks[0], lines):
        for line, same in groupby(zip(rows, blocks[1]), key=lambda pair: pair[0]):
            joined = [index for _, block in same for index in block]
            label = f"{outer} {indices(outer_block)}:" if outer else inner
            yield f"{label} {indices(joined)}" * bool(inner), line
    per = f", {len(blocks[2][0])} per character" if len(blocks[2][0]) > 1 else ""
    yield "", f"{axis}s 0 to {shape[3] - 1}{f' of each {group}' * bool(group)}{per}"


def runs(line: str, styles: Mapping[str, str]) -> list[tuple[str, str]]:
    """Neighbours of one style, and that style; "" for what is no shade."""
    return [(style, "".join(same)) for style, same in groupby(line, key=lambda shade: styles.get(shade, ""))]


def axes(output: Output) -> str:
    return ", ".join(f"{size} {axis}{'s' * (size > 1)}" for axis, size in output.layout.items())


def facts(output: Output) -> dict[str, str]:
    """What is known of an output, by what it is."""
    s = output.statistics
    found = {
        "place": f"{output.place.words or 'everywhere'}, {output.place.filled:.1%} of it wrong",
        "error / rms of truth": f"max {s['max']:.2e}, mean {s['mean']:.2e}, std {s['std']:.2e}",
        "share by decade": "  ".join(f"{decade} {share:.1%}" for decade, share in s["decades"].items()),
    }
    if s["ratio"]:
        ratio = f"mean {s['ratio_mean']:.4g}, std {s['ratio_std']:.2g}, {s['ratio_min']:.4g} to {s['ratio_max']:.4g}"
        found["result / truth"] = f"{s['ratio']}: {ratio}"
    if s["nan"] or s["zero"]:
        found["not written?"] = f"{s['nan']} not finite, {s['zero']} exactly 0 where the truth is not"
    shown = [f"{c:+.3g} · {term}" for term, c in output.coefficients.items() if abs(c) >= WORTH_SHOWING]
    return {**found, **({"error ≈ Σ c · term": ", ".join(shown)} if shown else {})}


def table(diagnosis: Diagnosis) -> list[list[str]]:
    """The header, then each output and the number of its finding."""
    found = {name: str(k) for k, finding in enumerate(diagnosis.findings, 1) for name in finding.outputs}
    rows = [["output", "max error", "relative", "tolerance", "verdict", "finding"]]
    for row in diagnosis.rows:
        numbers = f"{row.max_error:.2e} {row.relative_error:.2e} {row.tolerance:.0e}".split()
        rows.append([row.output, *numbers, row.verdict, found.get(row.output, "")])
    return rows


def text(diagnosis: Diagnosis, width: int = 100, colour: bool = False) -> str:
    """The verdict first, then the table of outputs, then the first output of each finding."""

    def paint(words: str, code: str) -> str:
        return f"\033[{code}m{words}\033[0m" if colour else words

    def wrapped(words: str, indent: int) -> str:
        return textwrap.fill(words, width, subsequent_indent=" " * indent, break_long_words=False)

    counted = f"{len(diagnosis.wrong)} of {len(diagnosis.rows)} outputs are off"
    lines = [paint(f"{diagnosis.case}, {diagnosis.backend}: {counted}", "1")]
    for number, finding in enumerate(diagnosis.findings, 1):
        share = f"  ({finding.share:.2%} of the error)" if finding.share else ""
        sentence = f"  {number}. {', '.join(finding.outputs)}: {finding.sentence}{share}"
        lines.append(paint(wrapped(sentence, 5), "1;31" if number == 1 else "0"))
    header, *rows = table(diagnosis)
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines.append("")
    for first, *cells in (header, ["-" * w for w in widths], *rows):
        aligned = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells, widths[1:]))]
        lines.append("  ".join(aligned).rstrip())
    for output in diagnosis.wrong:
        if output.name in (finding.outputs[0] for finding in diagnosis.findings):
            lines += ["", paint(f"{output.name}  [{axes(output)}]", "1")]
            lines += [wrapped(f"  {name:{LABEL}} {fact}", MARGIN) for name, fact in facts(output).items()]
            for label, drawn in map_of(output.excess, output.layout, width - MARGIN):
                painted = "".join(paint(run, code) if code else run for code, run in runs(drawn, COLOURS))
                lines.append(f"  {label:{LABEL}} {painted}")
    return "\n".join([*lines, "", LEGEND])


def template() -> Any:
    """Of the page; Refused where jinja2 is not installed."""
    try:
        import jinja2
    except ImportError as error:
        raise Refused("--html needs jinja2: pip install mhc-ops[bench]") from error
    loader = jinja2.PackageLoader("mhc_ops.measure", "templates")
    return jinja2.Environment(loader=loader, autoescape=True).get_template("diagnose.html.jinja")


def page(diagnosis: Diagnosis) -> str:
    """One HTML file that needs nothing else."""
    return template().render(
        diagnosis=diagnosis,
        table=table(diagnosis),
        legend=LEGEND,
        axes=axes,
        facts=facts,
        map_of=lambda o: [(label, runs(drawn, CLASSES)) for label, drawn in map_of(o.excess, o.layout)],
    )


def data(diagnosis: Diagnosis) -> dict[str, Any]:
    """For JSON."""
    details = [
        {
            "output": output.name,
            "axes": output.layout,
            "statistics": output.statistics,
            "place": output.place.words or "everywhere",
            "filled": output.place.filled,
            "coefficients of terms": output.coefficients,
            "largest error by block, of what is allowed": profile(output.excess, output.layout),
        }
        for output in diagnosis.wrong
    ]
    return {
        "case": str(diagnosis.case),
        "backend": diagnosis.backend,
        "passed": diagnosis.passed,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "outputs": [{**asdict(row), "verdict": row.verdict} for row in diagnosis.rows],
        "details": details,
    }


def profile(excess: Tensor, layout: Layout) -> dict[str, dict[str, float]]:
    """The largest error in each block of each axis."""
    found = {}
    for axis, (name, size) in enumerate(layout.items()):
        blocks = blocks_of(size, ROWS)
        values = largest(excess.movedim(axis, 0).reshape(size, -1), 0, blocks).amax(1)
        found[name] = dict(zip(map(indices, blocks), values.tolist()))
    return found


def summary(done: Sequence[Diagnosis], asked: int) -> str:
    """What ran, in a line."""
    last = done[-1]
    if not last.passed:
        rest = f", {asked - len(done)} not run" if asked > len(done) else ""
        return f"{len(done) - 1} of {asked} cases right, 1 off{rest}"
    # Few elements of 16 bits are judged one by one, and may be further off in norm.
    by_norm = [row for d in done for row in d.rows if row.relative_error <= row.tolerance]
    row = max(by_norm, key=lambda row: row.relative_error / row.tolerance)
    most = f"the largest error is {row.relative_error / row.tolerance:.0%} of what is allowed, in {row.output}"
    return f"{last.case.subject.name.split()[0]}, {last.backend}: nothing found in {asked} cases; {most}"
