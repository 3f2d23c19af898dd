"""The page: it stands alone, and shows every number of the file."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

from mhc_ops import cli
from mhc_ops.measure import page, results
from mhc_ops.measure.results import PLAIN, Measurement, NotMeasured, StepTime
from mhc_ops.testing.accuracy import Row

VOID = {"meta", "link", "input"}
TIMED = Measurement("op 8x8", "triton", "both", 20.0, 3e5, 10.0, 4.0, 12.5, spread=1.0, copy_spread=1.0)
ROW = Row("op 8x8", "triton", "y", 1.0, 1.5e-4, 2e-3, True, "float32", 7)
STEP = StepTime("training_step 8x4x8", PLAIN, "eager", 2.0)


class Parser(HTMLParser):
    """The words, tags and links of a page, each tag closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.words = [], set(), [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def a_run(word=""):
    """Results of every kind; word: in every text that is free."""
    found = replace(results.begin("bench"), date=f"today{word}", versions={"device": f"a GPU{word}", f"a{word}": word})
    peer = f"a <peer> & co{word}"
    others = [replace(TIMED, provider=peer, microseconds=60.0, peak_megabytes=None), replace(TIMED, provider="eager")]
    forward = [replace(m, direction="forward", microseconds=m.microseconds / 4) for m in (TIMED, *others)]
    found.measurements = [TIMED, *others, *forward, replace(TIMED, case="op 1x8", group="decode")]
    found.accuracy = [ROW, replace(ROW, backend=peer, relative_error=float("nan"), passed=False)]
    found.steps = [STEP, replace(STEP, provider=peer, milliseconds=3.0, ratio=[1.5])]
    found.precision = {peer: f"roundings <galore>{word}"}
    found.not_measured = [NotMeasured(f"case {i}{word}", "fla", f"not there{word}") for i in range(3)]
    return found


def test_the_page_stands_alone_and_shows_everything():
    text = page.draw(a_run())
    parser = Parser(text)
    assert "script" not in parser.tags and "peer" not in parser.tags
    assert all(link.startswith(("#", "data:")) for link in parser.links)
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert set(re.findall(r' style="(.*?)"', text)) == {f"--share:{percent}%" for percent in (200, 67, 50, 17)}
    titles = ["A training step", "In short", "Training sizes", "All times"]
    titles += ["Outside their tolerance", "Not measured", "Environment"]
    assert [section.title for section in page.sections(a_run())] == titles
    said = ["20.0 · 50%", "60.0 (3.0×)", "0.33", "12", "nan", "FAIL", "+50.0"]
    said += ["roundings <galore>", "case 0", "case 1", "case 2", "1 of 2", *titles]
    assert [words for words in said if words not in parser.words] == []


HOSTILE = "<img src=x onerror=alert(1)>|[a](javascript:b)`*c*`~~d~~\x1b[2J\n# e\ud800"


def drawn(word, option, folder):
    results.write(a_run(word), folder / "file.json")
    assert cli.main(["page", f"{folder}/file.json", f"--{option}", f"{folder}/page"]) == 0
    text = (folder / "page").read_text(encoding="utf-8")
    assert text.replace("\n", "").isprintable()
    return text


def test_a_hostile_file(tmp_path):
    """Its texts are words, in each format."""
    page_of = Parser(drawn(HOSTILE, "html", tmp_path))
    assert HOSTILE[:28] in page_of.words and "img" not in page_of.tags
    picture = ElementTree.fromstring(drawn(HOSTILE, "svg", tmp_path))
    assert HOSTILE[:28] in "".join(picture.itertext()) and not list(picture.iter("img"))
    hostile, harmless = (drawn(word, "markdown", tmp_path) for word in (HOSTILE, "word"))
    assert "<img" not in hostile and "[a](" not in hostile and "~~d~~" not in hostile
    structure = [[re.findall(r"^#+|(?<!\\)\|", line) for line in text.splitlines()] for text in (hostile, harmless)]
    assert structure[0] == structure[1]
