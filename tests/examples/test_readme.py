"""The Python code in the READMEs and the documentation runs; README is two screens."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["README.md", "README.zh.md", "docs/index.md", "docs/using.md", "docs/metrics.md", "docs/conv.md"]
)
def test_code_runs(name):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), {})


def test_the_front_page_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
