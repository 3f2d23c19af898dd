"""The page: it stands alone, its numbers are those of the JSON file, and a browser shows it without complaint."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

from mhc_ops import cli
from mhc_ops.measure import page, results, selection
from mhc_ops.measure.results import NotMeasured
from mhc_ops.testing import cases
from mhc_ops.testing.accuracy import Row
from mhc_ops.testing.conv_cases import ConvCase

VOID = {"meta", "link", "input", "line", "polyline"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Parser(HTMLParser):
    """Every number with its value, its origin and what is shown; and whatever should not be there."""

    def __init__(self):
        super().__init__()
        self.open, self.numbers, self.tags, self.links, self.words = [], [], set(), [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.add(tag)
        self.links += [found[name] for name in ("src", "href", "srcset", "action", "data") if name in found]
        if "data-of" in found:
            self.numbers.append([float(found.get("value") or found["data-value"]), found["data-of"], ""])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] == "data":
            self.numbers[-1][2] += data


def parsed(text):
    parser = Parser()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def look_up(content, origin):
    """a * b / c, from left to right; each a path into the JSON file."""
    first, *rest = re.split(r" ([*/]) ", origin)

    def entry(path):
        found = content
        for part in path.split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        return found

    value = entry(first)
    for operator, path in zip(rest[::2], rest[1::2]):
        value = value * entry(path) if operator == "*" else value / entry(path)
    return value


def agrees(text, value):
    """Half of the last digit that is shown; a percentage has two digits more."""
    plain = text.replace(",", "").rstrip("×%")
    mantissa, _, exponent = plain.partition("e")
    step = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(plain) - value * (100 if text.endswith("%") else 1)) <= step * 0.5001


def assert_numbers(numbers, content):
    for value, origin, text in numbers:
        assert value == pytest.approx(look_up(content, origin), rel=1e-12), origin
        assert text == "" or agrees(text, value), (origin, text, value)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A run on the CPU, kept and drawn by the command line; the files, and the content of the JSON file."""
    folder = tmp_path_factory.mktemp("page")
    post = cases.Case(cases.MHC_POST, (16,), 2, 8)
    step = ConvCase(2, 1, 16, dtype=torch.float32, update=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "BENCH_CPU", (post, step))
        patch.setattr(
            selection, "SCALING_CPU", (cases.Sweep("T", "D = 8", {T: replace(post, outer=(T,)) for T in (8, 16, 32)}),)
        )
        options = ["--skip", "torch.compile", "--json", f"{folder}/bench.json", "--html", f"{folder}/bench.html"]
        assert cli.main(["bench", "--device", "cpu", *options]) == 0
    return folder, json.loads((folder / "bench.json").read_text())


def rich(folder):
    """What a GPU adds, on top of a run: two more providers, memory, results that fail or were not measured."""
    found = results.read(folder / "bench.json")
    others = [
        replace(m, provider=name, microseconds=factor * m.microseconds, peak_megabytes=memory, group=group)
        for m in found.measurements
        if m.group == "training"
        for name, factor, memory, group in (("triton", 0.03, 12.5, "training"), ("a <peer> & co", 0.8, None, "decode"))
    ]
    found.measurements += others
    found.accuracy.append(Row("mhc_post 16x2x8 bfloat16", "a <peer> & co", "x_next", 1.0, float("nan"), 2e-3, False))
    found.precision = {"a <peer> & co": "roundings <galore>"}
    found.stack_megabytes = {"without": 3000.0, "with checkpoint": 2000.0}
    found.not_measured = [NotMeasured(f"case {i}", "eager", "out of time") for i in range(3)]
    results.write(found, folder / "rich.json")
    return found, json.loads((folder / "rich.json").read_text())


def test_numbers_are_those_of_the_file(bench):
    folder, content = bench
    parser = parsed((folder / "bench.html").read_text(encoding="utf-8"))
    assert_numbers(parser.numbers, content)
    shown = {origin for _, origin, _ in parser.numbers}
    drawn = [i for i, m in enumerate(content["measurements"]) if m["group"] != "sweep"]
    assert {f"measurements.{i}.{name}" for i in drawn for name in ("microseconds", "of_copy")} <= shown
    assert {f"accuracy.{i}.relative_error" for i in range(len(content["accuracy"]))} <= shown
    points = [(i, nth) for i, growth in enumerate(content["scaling"]) for nth in range(len(growth["sizes"]))]
    assert {f"scaling.{i}.microseconds.{nth}" for i, nth in points} <= shown
    assert content["versions"]["torch"] in parser.words


def test_numbers_can_disagree(bench):
    """What the test above would say to a number that is not the file's."""
    folder, content = bench
    numbers = parsed((folder / "bench.html").read_text(encoding="utf-8")).numbers
    content = json.loads(json.dumps(content))
    next(m for m in content["measurements"] if m["group"] == "training")["microseconds"] *= 1.001
    with pytest.raises(AssertionError):
        assert_numbers(numbers, content)
    assert not agrees("309", 309.6)
    assert not agrees("1.7e-03", 1.6e-3)
    assert agrees("93%", 0.934)


def test_the_page_is_drawn_from_the_file_alone(bench):
    folder, _ = bench
    assert cli.main(["page", f"{folder}/bench.json", "--html", f"{folder}/again.html"]) == 0
    assert (folder / "again.html").read_bytes() == (folder / "bench.html").read_bytes()


def test_the_page_stands_alone(bench):
    found, content = rich(bench[0])
    text = page.draw(found)
    parser = parsed(text)
    assert_numbers(parser.numbers, content)
    assert "script" not in parser.tags
    assert all(link.startswith(("#", "data:")) for link in parser.links)
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert "<peer>" not in text  # names are escaped
    words = "".join(parser.words)
    assert "roundings <galore>" in words
    assert "out of time 3 cases" in words
    assert re.search(r"\d+ of \d+ fail", words)


def test_a_file_with_less_in_it(bench):
    """As of format 1: no accuracy, spread, scaling or groups."""
    folder, content = bench
    old = ("subject", "case", "provider", "direction", "microseconds", "bandwidth", "copy_microseconds")
    measurements = [{name: m[name] for name in old} for m in content["measurements"]]
    (folder / "old.json").write_text(json.dumps({"measurements": measurements}))
    parser = parsed(page.draw(results.read(folder / "old.json")))
    with_ratio = [{**m, "of_copy": m["copy_microseconds"] / m["microseconds"]} for m in measurements]
    assert_numbers(parser.numbers, {"measurements": with_ratio})


def test_a_page_of_a_check_and_of_nothing():
    found = results.begin("check")
    found.accuracy = [Row("mhc_post 1x2x8 bfloat16", "triton", "x_next", 1.0, 0.5, 2e-3, False)]
    assert "1 of 1 fail" in "".join(parsed(page.draw(found)).words)
    assert "Environment" in page.draw(results.begin("bench"))


HOSTILE = "<img src=x onerror=alert(1)>|[a](javascript:b)`*c*`~~d~~\x1b[2J\n# e\ud800"


def with_every_text(content, word):
    """A file in which whoever wrote it has put this into every text that may be any."""
    content = json.loads(json.dumps(content))
    step = {"size": "a", "provider": "plain", "compiled": False, "milliseconds": 2.0}
    content["steps"] = [step, {**step, "provider": "b", "overhead_percent": 3.0}]
    content["precision"] = {"a": "b"}
    content["stack_megabytes"] = {"c": 1.0}
    content["not_measured"] = [{"where": "d", "provider": "e", "reason": "f"}]

    def put(value, name=""):
        if isinstance(value, dict):
            free = name in ("versions", "precision", "stack_megabytes")
            return {key + word * (free and key != "device"): put(entry, key) for key, entry in value.items()}
        if isinstance(value, list):
            return [put(entry, name) for entry in value]
        chosen = name in ("direction", "group", "dtype", "command") or value == "plain"
        return value + word if isinstance(value, str) and not chosen else value

    return json.dumps(put(content))


def drawn(bench, word, option, folder):
    (folder / "file.json").write_text(with_every_text(bench[1], word))
    assert cli.main(["page", f"{folder}/file.json", f"--{option}", f"{folder}/page"]) == 0
    text = (folder / "page").read_text(encoding="utf-8")
    assert text.replace("\n", "").isprintable()
    return text


def test_a_hostile_file_as_markdown(bench, tmp_path):
    """Its texts are words wherever they stand: what is made of the page is what would be made of harmless ones."""
    markdown_it = pytest.importorskip(
        "markdown_it", reason="markdown-it-py is not installed: pip install 'mhc-ops[bench]'"
    )
    parser = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])

    def structure(text):
        for token in parser.parse(text):
            yield token.type, token.tag
            yield from (child.type for child in token.children or () if child.type not in ("text", "text_special"))

    hostile, harmless = (drawn(bench, word, "markdown", tmp_path) for word in (HOSTILE, "word"))
    assert list(structure(hostile)) == list(structure(harmless))
    assert "&lt;img src=x onerror=alert(1)&gt;" in parser.render(hostile) and "<img" not in parser.render(hostile)


def test_a_hostile_file_as_a_page_and_as_a_picture(bench, tmp_path):
    page_of = parsed(drawn(bench, HOSTILE, "html", tmp_path))
    assert HOSTILE[:28] in "".join(page_of.words) and "img" not in page_of.tags
    picture = ElementTree.fromstring(drawn(bench, HOSTILE, "svg", tmp_path))
    assert HOSTILE[:28] in "".join(picture.itertext()) and not list(picture.iter("img"))


PROBE = """
<pre id=report></pre><script>
const frames = [...document.querySelectorAll("iframe")];
const round = x => Math.round(x * 1000) / 1000;
Promise.all(frames.map(f => new Promise(done => f.addEventListener("load", done)))).then(() => {
  const of = f => {
    const page = f.contentDocument, root = page.documentElement;
    const bars = [...page.querySelectorAll(".track")].filter(t => t.offsetWidth > 0).map(t => [
      parseFloat(t.parentElement.style.getPropertyValue("--share")),
      round(t.firstChild.getBoundingClientRect().width / t.getBoundingClientRect().width)]);
    const numbers = [...page.querySelectorAll("[data-of]")].map(
      e => [Number(e.value ?? e.dataset.value), e.dataset.of, e.tagName == "DATA" ? e.textContent : ""]);
    const visible = page.querySelector("data").getBoundingClientRect().height > 0;
    return {width: root.clientWidth, content: root.scrollWidth, bars, numbers, visible};
  };
  document.getElementById("report").textContent = JSON.stringify(frames.map(of));
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium in PATH")
def test_in_a_browser(bench, tmp_path):
    """On a desktop and on a phone: nothing in the console, no sideways scrolling, bars as long as they say."""
    found, content = rich(bench[0])
    page_text = html.escape(page.draw(found))
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{page_text}"></iframe>' for width in (1280, 390)
    )
    (tmp_path / "probe.html").write_text(f"<!doctype html><meta charset=utf-8>{frames}{PROBE}", encoding="utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --v=0 "
        "--virtual-time-budget=10000 --dump-dom"
    )
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'probe.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    (report,) = re.findall(r"<pre id=\"report\">(.+?)</pre>", done.stdout)
    shown = json.loads(html.unescape(report))
    assert [frame["width"] for frame in shown] == [1280, 390]
    for frame in shown:
        assert frame["content"] <= frame["width"]
        assert frame["visible"]
        assert_numbers(frame["numbers"], content)
        assert len(frame["bars"]) > 10
        assert all(abs(share - length) < 0.05 for share, length in frame["bars"]), frame["bars"]
