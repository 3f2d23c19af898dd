"""The Python code in the READMEs and the documentation runs; README is two screens."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "README.zh.md", "docs/index.md", "docs/using.md", "docs/metrics.md", "docs/conv.md"]
OF_THEIR_OWN_TESTS = ("adopt_causal_conv1d", "adopt_fla", "adopt_transformers")  # in tests/compat
PAGES += sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("adopt_*.md") if p.stem not in OF_THEIR_OWN_TESTS)
NEEDED = {"docs/adopt_hub.md": "kernels"}  # by the code of a page, beside torch


@pytest.mark.parametrize("name", PAGES)
def test_code_runs(name):
    needed = NEEDED.get(name)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install 'mhc-ops[adopt]'")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), {})


def test_the_front_page_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
