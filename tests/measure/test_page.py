"""The page shows every number of the file, and texts of a file are words there."""

import re
from dataclasses import replace
from xml.etree import ElementTree

from mhc_ops import cli
from mhc_ops.measure import page, results
from mhc_ops.measure.results import PLAIN, Measurement, NotMeasured, StepTime
from mhc_ops.testing.accuracy import Row

TIMED = Measurement("op 8x8", "triton", "both", 20.0, 3e5, 10.0, 4.0, 12.5, spread=1.0, copy_spread=1.0)
ROW = Row("op 8x8", "triton", "y", 1.0, 1.5e-4, 2e-3, True, "float32", 7)
STEP = StepTime("training_step 8x4x8", PLAIN, "eager", 2.0)


def a_run(word=""):
    """Results of every kind; word: in every text that is free."""
    found = replace(results.begin("bench"), date=f"today{word}", versions={"device": f"a GPU{word}", f"a{word}": word})
    peer = f"a <peer> & co{word}"
    others = [replace(TIMED, provider=peer, microseconds=60.0, peak_megabytes=None), replace(TIMED, provider="eager")]
    forward = [replace(m, direction="forward", microseconds=m.microseconds / 4) for m in (TIMED, *others)]
    found.measurements = [TIMED, *others, *forward, replace(TIMED, case="op 1x8", group="decode")]
    found.accuracy = [ROW, replace(ROW, backend=peer, relative_error=float("nan"), passed=False)]
    found.steps = [STEP, replace(STEP, provider=peer, milliseconds=3.0, ratio=[1.5], in_a_row=[1.4])]
    found.precision = {peer: f"roundings <galore>{word}"}
    found.not_measured = [NotMeasured(f"case {i}{word}", "fla", f"not there{word}") for i in range(3)]
    return found


def test_the_page_of_one_file_shows_everything():
    text = page.markdown([a_run()])
    titles = ["A training step", "In short", "Training sizes", "All results"]
    assert re.findall(r"^### (.*)", text, re.MULTILINE) == titles
    said = ["20.0 · 50%", "60.0 (3.0×)", "0.33", "12", "nan", "FAIL", "+50.0", "op 1x8", "roundings &lt;galore&gt;"]
    said += [f"case {i}: fla did not run: not there" for i in range(3)] + ["1 passed, 1 failed"]
    assert [words for words in said if words not in text] == []
    of_several = page.markdown([a_run(), a_run()])
    assert re.findall(r"^### (.*)", of_several, re.MULTILINE) == 2 * titles[:3]


HOSTILE = "<img src=x onerror=alert(1)>|[a](javascript:b)`*c*`~~d~~\x1b[2J\n# e\ud800"


def drawn(word, option, folder):
    results.write(a_run(word), folder / "file.json")
    assert cli.main(["page", f"{folder}/file.json", f"--{option}", f"{folder}/page"]) == 0
    text = (folder / "page").read_text(encoding="utf-8")
    assert text.replace("\n", "").isprintable()
    return text


def test_a_hostile_file(tmp_path):
    """Its texts are words, in each format."""
    picture = ElementTree.fromstring(drawn(HOSTILE, "svg", tmp_path))
    assert HOSTILE[:28] in "".join(picture.itertext()) and not list(picture.iter("img"))
    hostile, harmless = (drawn(word, "markdown", tmp_path) for word in (HOSTILE, "word"))
    assert "<img" not in hostile and "[a](" not in hostile and "~~d~~" not in hostile
    structure = [[re.findall(r"^#+|(?<!\\)\|", line) for line in text.splitlines()] for text in (hostile, harmless)]
    assert structure[0] == structure[1]
