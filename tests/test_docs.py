"""The site of docs/ builds without a warning, has every page and every public name, and needs no network."""

import ast
import contextlib
import importlib.util
import inspect
import io
import os
import re
import subprocess
import sys
import tokenize
from html.parser import HTMLParser
from pathlib import Path

import pytest

import mhc_ops

ROOT = Path(__file__).parents[1]
NEEDED = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
VOID = {"br", "hr", "img", "input", "link", "meta", "path", "source", "wbr"}
REMOTE = re.compile(r"^\s*(https?:)?//")
IN_CSS = re.compile(r"""url\(\s*["']?(?:https?:)?//[^)]*|@import[^;]*//[^;]*""")
RULED_OUT = re.compile(r"\b(nobody|whoever|somebody|what\s+is\s+none|behind)\b", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if NEEDED:
        pytest.skip(f"{', '.join(NEEDED)} not installed: pip install 'mhc-ops[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    command = [sys.executable, *words, str(ROOT / "docs"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


class Attributes(HTMLParser):
    """found: (tag, attribute, value) for each attribute of a page   styles: the text of its style sheets"""

    def __init__(self, text):
        super().__init__()
        self.found, self.styles, self.in_style = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found += [(tag, name, value or "") for name, value in attributes]
        self.in_style = tag == "style"

    def handle_endtag(self, tag):
        self.in_style = False

    def handle_data(self, data):
        self.styles += data if self.in_style else ""


def loaded_from_elsewhere(text):
    """What a browser would fetch from a network to show the page. Links that a reader may click are not counted."""
    page = Attributes(text)
    tags = [
        (tag, value)
        for tag, name, value in page.found
        if (name in ("src", "srcset", "poster", "data") or (name == "href" and tag != "a")) and REMOTE.match(value)
    ]
    inline = " ".join(value for _, name, value in page.found if name == "style")
    return tags + IN_CSS.findall(page.styles + inline)


class Text(HTMLParser):
    """text: the page without its scripts   boxes: the text of each code box in a docstring   parameters: for each name,
    the parameters that are listed with a description"""

    def __init__(self, text):
        super().__init__()
        self.text, self.boxes, self.parameters, self.inside, self.name = "", [], {}, [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in VOID:
            self.inside.append(tag)
        if tag == "pre" and "dd" in self.inside:
            self.boxes.append("")
        if tag == "dt" and "sig" in (attributes.get("class") or ""):
            self.name = attributes.get("id", "")
        if self.inside[-3:] in (["li", "p", "strong"], ["dd", "p", "strong"]):
            self.parameters.setdefault(self.name, []).append("")

    def handle_endtag(self, tag):
        while tag in self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if {"script", "style"} & set(self.inside):
            return
        self.text += data
        if {"dd", "pre"} <= set(self.inside):
            self.boxes[-1] += data
        if self.inside[-1:] == ["strong"] and self.name in self.parameters:
            self.parameters[self.name][-1] += data


def is_code(box):
    """Whether it is Python, a session of it, one of our commands, or equations without a sentence."""
    lines = [line for line in box.strip().splitlines() if line.strip()]
    if lines[0].startswith(">>> "):
        return all(not part.lower().startswith("returns") for part in lines)
    if lines[0].startswith("mhc-ops "):
        lines = lines[1:]
    with contextlib.suppress(SyntaxError):
        return bool(ast.parse("\n".join(lines)))
    return all("=" in line for line in lines) and not re.search(r"`|[a-z)]\. [A-Z]|\w\w+ \w\w+ \w\w+", box)


@pytest.mark.parametrize(
    ("box", "code"),
    [
        (">>> HyperHead(4, 64)(x).shape\ntorch.Size([2, 10, 64])", True),
        ("mhc-ops hub DIR\nkernels.get_local_kernel(Path(DIR))  # or LOCAL_KERNELS", True),
        ("z = (α0, α1) · phi @ v    v = x as [nD]\nh_in = Σ_i h_pre[i]·x[i]", True),
        ("x: [..., n, D]   phi: [n² + 2n, nD]", False),
        ("layer: any module or function from [..., D] to [..., D]. Where it returns a tuple, so does this.", False),
        ("c = softmax(z);  c /= sum(c). Rows sum over j, columns over i.\nReturns fp32, as maps are.", False),
    ],
)
def test_what_is_code(box, code):
    assert is_code(box) == code


@pytest.mark.parametrize("name", ["api", "distributed", "adopt_transformers"])
def test_what_docstrings_show_as_code_is_code(site, name):
    page = Text((site / f"{name}.html").read_text(encoding="utf-8"))
    assert [box for box in page.boxes if not is_code(box)] == []
    assert len(page.boxes) > 5 or name == "adopt_transformers"
    assert "`" not in page.text


def test_no_argument_is_described_in_the_middle_of_prose(site):
    """Wherever a docstring has "name: what it is", the name is listed."""
    page = Text((site / "api.html").read_text(encoding="utf-8"))
    assert page.parameters["mhc_ops.Carry"] == ["x", "h_post", "h_res", "read", "transposed", "link"]
    assert " -- " not in page.text
    for name in (*mhc_ops.__all__, *mhc_ops.guide.__all__):
        found = getattr(mhc_ops, name)
        if callable(found):
            described = re.findall(r"(?:^|\. |  )(\w+): ", inspect.getdoc(found), re.MULTILINE)
            wanted = [each for each in described if each in inspect.signature(found).parameters]
            assert set(wanted) <= set(page.parameters.get(f"mhc_ops.{name}", [])), name


def ruled_out(path):
    """Words that CONTRIBUTING.md rules out: in comments and strings of Python, elsewhere in all but inline code."""
    text = path.read_text(encoding="utf-8")
    parts = [(1, re.sub(r"`[^`\n]*`", "", text))]
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        parts = [(t.start[0], t.string) for t in tokens if re.search("STRING|COMMENT", tokenize.tok_name[t.type])]
    for line, part in parts:
        for word in RULED_OUT.finditer(part):
            yield f"{path.relative_to(ROOT)}:{line + part.count(chr(10), 0, word.start())}: {word[0]}"


def test_no_word_is_ruled_out():
    folders = (ROOT / name for name in ("docs", "examples", "mhc_ops"))
    files = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*"))]
    written = [path for path in files if path.suffix in (".md", ".py", ".h", ".hip", ".html")]
    found = [word for path in written for word in ruled_out(path)]
    assert len(written) > 100 and not found, "\n".join(found)


def test_nothing_is_loaded_from_a_network(site):
    pages, sheets = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) > 10 and sheets
    found = {file: loaded_from_elsewhere(file.read_text(encoding="utf-8")) for file in pages}
    found |= {file: IN_CSS.findall(file.read_text(encoding="utf-8")) for file in sheets}
    assert {file.name: remote for file, remote in found.items() if remote} == {}


def test_what_needs_a_network_is_found():
    """A link to click is allowed."""
    for remote in (
        '<script src="https://example.org/mathjax.js"></script>',
        '<link rel="stylesheet" href="//example.org/style.css">',
        "<style>@font-face { src: url(https://example.org/font.woff2) }</style>",
        '<style>@import "https://example.org/style.css";</style>',
        "<p style=\"background: url('http://example.org/a.png')\">",
        '<iframe src="http://example.org">',
    ):
        assert loaded_from_elsewhere(f"<p>a page</p>{remote}"), remote
    assert not loaded_from_elsewhere('<a href="https://arxiv.org">a paper</a><img src="_images/a.png">')


def test_every_page_is_reached_from_the_first(site):
    pages = {file.stem for file in (ROOT / "docs").glob("*.md")}
    first = Attributes((site / "index.html").read_text(encoding="utf-8"))
    linked = {value.partition("#")[0] for tag, name, value in first.found if (tag, name) == ("a", "href")}
    assert {f"{page}.html" for page in pages - {"index"}} <= linked
    assert all((site / f"{page}.html").is_file() for page in pages)


def test_the_page_of_the_run_is_in_it(site):
    report = Attributes((site / "report.html").read_text(encoding="utf-8"))
    frames = [value for tag, name, value in report.found if (tag, name) == ("iframe", "src")]
    assert frames and all((site / frame).is_file() for frame in frames)
