"""docs/benchmarks.md is what the results say, and the front pages say nothing else."""

import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

from mhc_ops import cli
from mhc_ops.measure import page, results

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
    written = tmp_path / "benchmarks.md"
    assert FILES and cli.main(["page", *map(str, FILES), "--markdown", str(written)]) == 0
    again = "run: mhc-ops page benchmarks/results/*.json --markdown docs/benchmarks.md"
    assert written.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), again


def stated(file):
    """The percentages over plain of every training step, as they are shown: recomputed from what was timed."""
    every = json.loads(file.read_text()).get("steps", ())
    for step in every:
        if step["provider"] != "plain":
            same = (other for other in every if (other["size"], other["mode"]) == (step["size"], step["mode"]))
            (plain,) = (other for other in same if other["provider"] == "plain")
            for kind, nth in (("ratio", 0), ("in_a_row", 1)):
                ratios = [own[nth] / of_plain[nth] for own, of_plain in zip(step["rounds"], plain["rounds"])]
                lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
                assert step[kind] == pytest.approx([median, lower, upper]), (file, step["provider"], kind)
                yield page.percent([median, lower, upper])


def test_every_ratio_to_plain_that_a_page_states():
    """The picture is of the file that it names. Where a page gives quartiles, they are those of the median."""
    measured = {text for file in FILES for text in stated(file)}
    percents = {percent for text in measured for percent in re.findall(r"[+-]\d+\.\d", text)}
    picture = (ROOT / "docs" / "images" / "training_step.svg").read_text(encoding="utf-8")
    assert picture == page.picture(results.read(ROOT / "benchmarks" / "results" / "h200_training_step.json"))
    for name in (*FRONT_PAGES, "docs/benchmarks.md", "docs/images/training_step.svg"):
        text = (ROOT / name).read_text(encoding="utf-8")
        said = set(re.findall(r"[+−]\d+\.\d\b", text))
        assert said and said <= percents, (name, said - percents)
        with_quartiles = set(re.findall(r"[+−]\d+\.\d \([+−]\d+\.\d to [+−]\d+\.\d\)", text))
        assert with_quartiles and with_quartiles <= measured, (name, with_quartiles - measured)


def test_the_table_of_small_models():
    """Each row has the milliseconds in a row and, beside those of plain residuals, the ratio."""
    table = (ROOT / "docs" / "small_models.md").read_text(encoding="utf-8")
    steps = results.read(ROOT / "benchmarks" / "results" / "h200_training_step.json").steps
    for mode, D in itertools.product(("eager", "graphs"), (768, 1280, 2560)):
        of = {step.provider: step for step in steps if step.mode == mode and f"x4x{D} " in step.size}
        ms = {name: f"{statistics.median(ms for _, ms in step.rounds):.2f}" for name, step in of.items()}
        names = ("triton", "triton HyperConnection", "TileKernels", "Liger")
        others = [f"{ms[name]} ({of[name].in_a_row[0]:.2f})" for name in names]
        assert f"| {mode.removesuffix('s')} | {' | '.join([ms['plain'], *others])} |" in table, (mode, D)


@pytest.mark.parametrize("name", FRONT_PAGES)
def test_front_pages_say_what_was_measured(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert figures(text), "no figure was found, not even one that is right"
    assert unsaid(text, PAGE.read_text(encoding="utf-8")) == set()
