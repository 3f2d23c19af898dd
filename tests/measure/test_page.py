"""The page: it stands alone, shows every number of the file, and a browser shows it without complaint."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from mhc_ops import cli
from mhc_ops.measure import page, results
from mhc_ops.measure.results import PLAIN, Measurement, NotMeasured, StepTime
from mhc_ops.testing.accuracy import Row

VOID = {"meta", "link", "input"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TIMED = Measurement("op", "op 8x8", "triton", "both", 20.0, 3.0, 10.0, 4.0, 12.5, spread=1.0, copy_spread=1.0)
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
    titles = ["A training step", "In short", "Training sizes", "All times"]
    titles += ["Outside their tolerance", "Not measured", "Environment"]
    assert [section.title for section in page.sections(a_run())] == titles
    said = ["20.0 · 50%", "60.0 (3.0×)", "12", "nan", "FAIL", "+50.0"]
    said += ["roundings <galore>", "case 0", "case 1", "case 2", "1 of 2", *titles]
    assert [words for words in said if words not in parser.words] == []


def test_a_check_and_nothing():
    check = replace(results.begin("check"), accuracy=[replace(ROW, passed=False)])
    assert "0 of 1" in Parser(page.draw(check)).words
    for drawn in (page.draw(results.begin("bench")), page.markdown([results.begin("check")])):
        assert "Memory" not in drawn and "CPU" in drawn


HOSTILE = "<img src=x onerror=alert(1)>|[a](javascript:b)`*c*`~~d~~\x1b[2J\n# e\ud800"


def drawn(word, option, folder):
    results.write(a_run(word), folder / "file.json")
    assert cli.main(["page", f"{folder}/file.json", f"--{option}", f"{folder}/page"]) == 0
    text = (folder / "page").read_text(encoding="utf-8")
    assert text.replace("\n", "").isprintable()
    return text


def test_a_hostile_file_as_markdown(tmp_path):
    """Its texts are words: the page has the structure that harmless words give it."""
    reason = "markdown-it-py is not installed: pip install 'mhc-ops[docs]'"
    markdown_it = pytest.importorskip("markdown_it", reason=reason)
    parser = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])

    def structure(text):
        for token in parser.parse(text):
            yield token.type, token.tag
            yield from (child.type for child in token.children or () if child.type not in ("text", "text_special"))

    hostile, harmless = (drawn(word, "markdown", tmp_path) for word in (HOSTILE, "word"))
    assert list(structure(hostile)) == list(structure(harmless))
    assert "&lt;img src=x onerror=alert(1)&gt;" in parser.render(hostile) and "<img" not in parser.render(hostile)


def test_a_hostile_file_as_a_page_and_as_a_picture(tmp_path):
    page_of = Parser(drawn(HOSTILE, "html", tmp_path))
    assert HOSTILE[:28] in page_of.words and "img" not in page_of.tags
    picture = ElementTree.fromstring(drawn(HOSTILE, "svg", tmp_path))
    assert HOSTILE[:28] in "".join(picture.itertext()) and not list(picture.iter("img"))


PROBE = """
<pre id=report></pre><script>
const frames = [...document.querySelectorAll("iframe")];
Promise.all(frames.map(f => new Promise(done => f.addEventListener("load", done)))).then(() => {
  const of = f => {
    const page = f.contentDocument, root = page.documentElement;
    const bars = [...page.querySelectorAll(".track")].map(t => [
      parseFloat(t.firstChild.style.width), 100 * t.firstChild.getBoundingClientRect().width / t.clientWidth]);
    return {width: root.clientWidth, content: root.scrollWidth, bars};
  };
  document.getElementById("report").textContent = JSON.stringify(frames.map(of));
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium in PATH")
def test_in_a_browser(tmp_path):
    """On a desktop and on a phone: nothing in the console, no sideways scrolling, bars as long as they say."""
    styles = [f"width:{width}px;height:900px;border:0" for width in (1280, 390)]
    drawn = html.escape(page.draw(a_run()))
    frames = "".join(f'<iframe style="{style}" srcdoc="{drawn}"></iframe>' for style in styles)
    (tmp_path / "probe.html").write_text(f"<!doctype html><meta charset=utf-8>{frames}{PROBE}", encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --v=0 "
    flags += "--virtual-time-budget=10000 --dump-dom"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'probe.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    (report,) = re.findall(r"<pre id=\"report\">(.+?)</pre>", done.stdout)
    shown = json.loads(html.unescape(report))
    assert [frame["width"] for frame in shown] == [1280, 390]
    for frame in shown:
        assert frame["content"] <= frame["width"]
        assert len(frame["bars"]) == 6
        assert all(said == pytest.approx(drawn, abs=3) for said, drawn in frame["bars"])
