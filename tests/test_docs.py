"""The site of docs/ builds without a warning, has every page and every public name, and needs no network."""

import importlib.util
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import mhc_ops

ROOT = Path(__file__).parents[1]
NEEDED = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
# What a browser fetches from a network to show a page. Links that a reader may click are not counted.
FETCHED = re.compile(
    r"""<(?:[^>]*\s(?:src|srcset|poster|data)|(?!a\s)[^>]*\shref)\s*=\s*["']?\s*(?:https?:)?//[^>]*"""
    r"""|url\(\s*["']?(?:https?:)?//[^)]*|@import[^;]*//[^;]*"""
)
RULED_OUT = re.compile(r"\b(nobody|whoever|somebody|what\s+is\s+none|behind)\b", re.IGNORECASE)
OF_MHC_OPS = re.compile(r"^\.\. currentmodule:: mhc_ops\n(.*?)^```", re.MULTILINE | re.DOTALL)


def parsed(text):
    """The page of this HTML. furo needs the parser too."""
    bs4 = pytest.importorskip("bs4", reason="furo is not installed: pip install 'mhc-ops[docs]'")
    return bs4.BeautifulSoup(text, "html.parser")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built with warnings as errors, of which one is a page that is in no toctree."""
    if NEEDED:
        pytest.skip(f"{', '.join(NEEDED)} not installed: pip install 'mhc-ops[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    command = [sys.executable, *words, str(ROOT / "docs"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path.name: parsed(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_what_a_docstring_describes_is_listed(pages):
    """As docs/docstrings.py says."""
    listed = {}
    for item in pages["api.html"].select("li > p > strong, dd > p > strong"):
        listed.setdefault(item.find_previous("dt", class_="sig").get("id"), []).append(item.get_text())
    assert listed["mhc_ops.Carry"] == ["x", "h_post", "h_res", "read", "transposed", "link"]


def test_every_name_is_described_once():
    """The guide's names too, which are imported as the guide does."""
    parts = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split("## The guide's names")
    for part, names in zip(parts, (mhc_ops.__all__, mhc_ops.guide.__all__), strict=True):
        assert sorted(re.findall(r"^\.\. auto\w+:: (\w+)$", "".join(OF_MHC_OPS.findall(part)), re.MULTILINE)) == names
    assert not {*mhc_ops.__all__} & {*mhc_ops.guide.__all__}
    for name in mhc_ops.guide.__all__:
        exec(f"from mhc_ops import {name}", found := {})
        assert found[name] is getattr(mhc_ops.guide, name)


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
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 10 and {path.suffix for path in files} == {".html", ".css"}
    found = {path.name: FETCHED.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {name: remote for name, remote in found.items() if remote} == {}
