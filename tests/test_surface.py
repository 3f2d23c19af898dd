"""The public names: each stands on docs/api.md once, and the guide's are imported as its snippets import them."""

import re
from pathlib import Path

import mhc_ops

API = Path(__file__).parents[1] / "docs" / "api.md"
OF_MHC_OPS = re.compile(r"^\.\. currentmodule:: mhc_ops\n(.*?)^```", re.MULTILINE | re.DOTALL)


def described(text):
    return re.findall(r"^\.\. auto(?:function|class):: (\w+)$", "".join(OF_MHC_OPS.findall(text)), re.MULTILINE)


def test_every_name_is_described_once():
    new, guide = API.read_text(encoding="utf-8").split("## The guide's names")
    assert sorted(described(new)) == mhc_ops.__all__
    assert sorted(described(guide)) == mhc_ops.guide.__all__


def test_the_guides_names_are_imported_as_it_does():
    for name in mhc_ops.guide.__all__:
        found = {}
        exec(f"from mhc_ops import {name}", found)
        assert found[name] is getattr(mhc_ops.guide, name)
        assert name not in mhc_ops.__all__
