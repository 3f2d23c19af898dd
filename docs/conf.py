"""The documentation as a site that needs no network: python -m sphinx docs build/docs; open build/docs/index.html."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import mhc_ops  # noqa: E402

project = "mhc_ops"
author = "The mhc_ops authors"
release = version = mhc_ops.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"mhc_ops {release}"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["../benchmarks/results"]  # the page of each run and its figures, beside index.html
highlight_language = "text"  # equations stand in code blocks that name no language
nitpicky = True
smartquotes = False  # [..., D] is not […, D]
autodoc_typehints = "none"  # docstrings give types and shapes
autodoc_class_signature = "mixed"


def to_restructured_text(lines):
    """A docstring is plain text: paragraphs, and blocks that are shown as they are, whose lines are aligned (two spaces
    in a row), name an argument ("layer: ...") or start with >>>."""
    found = []
    for paragraph in "\n".join(lines).strip().split("\n\n"):
        as_it_is = re.search(r"\S  |^\w+(, \w+)*: |^>>>", paragraph, re.MULTILINE)
        if as_it_is:
            found += ["::", "", *(f"    {line}" for line in paragraph.splitlines()), ""]
        else:
            found += [*_escaped(paragraph).splitlines(), ""]
    return found


def _escaped(text):
    """`name` is code, all else is what it says."""
    return "".join(
        re.sub(r"`([^`]+)`", r"``\1``", part) if part.startswith("`") else re.sub(r"([*|_\\])", r"\\\1", part)
        for part in re.split(r"(`[^`]+`)", text)
    )


def setup(app):
    def replace(app, what, name, obj, options, lines):
        lines[:] = to_restructured_text(lines)

    app.connect("autodoc-process-docstring", replace)
