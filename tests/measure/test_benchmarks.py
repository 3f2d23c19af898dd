"""docs/benchmarks.md is what the results say, and the front pages say nothing else."""

import re
from pathlib import Path

import pytest

from mhc_ops import cli

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PAGE = ROOT / "docs" / "benchmarks.md"
FRONT_PAGES = ("README.md", "README.zh.md")

NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNITS = {"times": "×", "倍": "×"}  # the same in other words
# 8192×4 is a shape
FIGURE = re.compile(rf"(?:({NUMBER})\s*(?:to|至|到|–)\s*)?({NUMBER})\s*(µs|ms|GB/s|%|×(?!\s*\d)|times\b|倍)")


def figures(text):
    """(numbers, unit) of all figures outside code: ("1.8 to 4.1", "×")."""
    prose = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    return {
        (" to ".join(filter(None, (first, last))).replace(",", ""), UNITS.get(unit, unit))
        for first, last, unit in FIGURE.findall(prose)
    }


def unsaid(text, page):
    """The figures of a text that the page lacks. A range must be there as a range; a time may stand bare in a table."""
    said = figures(page)
    said |= {(end, unit) for numbers, unit in said for end in numbers.split(" to ")}
    bare = {cell.strip("* ") for line in page.splitlines() for cell in re.split(r"[|·(]", line) if line[:1] == "|"}
    return {(numbers, unit) for numbers, unit in figures(text) - said if unit in ("%", "×") or numbers not in bare}


def test_the_page_is_what_the_results_say(tmp_path):
    assert FILES
    written = tmp_path / "benchmarks.md"
    assert cli.main(["page", *map(str, FILES), "--markdown", str(written)]) == 0
    again = "run: mhc-ops page benchmarks/results/*.json --markdown docs/benchmarks.md"
    assert written.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), again


@pytest.mark.parametrize("name", FRONT_PAGES)
def test_front_pages_say_what_was_measured(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert figures(text), "no figure was found, not even one that is right"
    assert unsaid(text, PAGE.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("the backward is 2.7 to 9 times as fast", {("2.7 to 9", "×")}),
        ("快 2.7 至 9 倍", {("2.7 to 9", "×")}),
        ("1.8 to 4.1 times as fast, or 1.8 to 4.1×", set()),
        ("1.8 to 7.1 times as fast", {("1.8 to 7.1", "×")}),  # both ends are there, but of different ranges
        ("takes 832.2 µs at 8192×4×4096, 88% of a copy", set()),
        ("takes 833.2 µs, 38% of a copy, 2 ms", {("833.2", "µs"), ("38", "%"), ("2", "ms")}),
        ("`9 times` and [9 µs](9 ms) in code", {("9", "µs")}),
    ],
)
def test_a_figure_that_was_not_measured_is_found(text, wrong):
    page = "1.8 to 4.1× and 4.2 to 7.1×\n\n| 8192 × 4 × 4096 | **832.2 · 88%** | 1756.9 (2.1×) |\n"
    assert unsaid(text, page) == wrong
