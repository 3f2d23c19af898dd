"""The site of docs/ builds without a warning, and has every page and every public name."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from processes import output_of

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


@pytest.mark.skipif(bool(NEEDED), reason=f"{', '.join(NEEDED)} not installed: pip install 'mhc-ops[docs]'")
def test_the_site(tmp_path):
    """Built with warnings as errors, of which one is a page in no toctree. It needs no network, has the page of each
    run and lists what a docstring describes, as docs/docstrings.py says. furo needs the parser too."""
    words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    output_of(sys.executable, *words, ROOT / "docs", site := tmp_path, PYTHONPATH=str(ROOT))
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    found = {path.name: FETCHED.findall(path.read_text(encoding="utf-8")) for path in files}
    assert len(files) > 10 and {name: remote for name, remote in found.items() if remote} == {}
    bs4 = pytest.importorskip("bs4", reason="furo is not installed: pip install 'mhc-ops[docs]'")
    page = bs4.BeautifulSoup((site / "api.html").read_text(encoding="utf-8"), "html.parser")
    assert not re.search("`| -- ", page.get_text())
    listed = {}
    for item in page.select("li > p > strong, dd > p > strong"):
        listed.setdefault(item.find_previous("dt", class_="sig").get("id"), []).append(item.get_text())
    runs, report = [*(ROOT / "benchmarks/results").glob("*.json")], (site / "report.html").read_text(encoding="utf-8")
    assert 0 < len(runs) == report.count("<h2>") == len(set(re.findall(r"_downloads/\w+/(\w+\.json)", report)))
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


def test_no_word_is_ruled_out():
    """CONTRIBUTING.md rules them out; inline code may have them."""
    folders = (ROOT / name for name in ("benchmarks", "docs", "examples", "mhc_ops", "scripts", "tests"))
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.sh"), *(path for folder in folders for path in folder.rglob("*"))]
    kinds = (".c", ".cpp", ".h", ".hip", ".html", ".md", ".py", ".sh")
    written = [path for path in files if path.suffix in kinds and path != Path(__file__)]
    found = {str(path): RULED_OUT.findall(re.sub(r"`[^`\n]*`", "", path.read_text("utf-8"))) for path in written}
    assert len(found) > 100 and {path: words for path, words in found.items() if words} == {}
