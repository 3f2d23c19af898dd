"""The documentation as a site that needs no network: python -m sphinx docs build/docs; open build/docs/index.html."""

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
from docstrings import to_restructured_text  # noqa: E402
from docutils import nodes  # noqa: E402

import mhc_ops  # noqa: E402
from mhc_ops.measure import page, results  # noqa: E402

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
highlight_language = "text"  # equations stand in code blocks that name no language
nitpicky = True
smartquotes = False  # [..., D] is not […, D]
autodoc_typehints = "none"  # docstrings give types and shapes
autodoc_class_signature = "mixed"


def setup(app):
    def replace(app, what, name, obj, options, lines):
        arguments = inspect.signature(obj).parameters if what in ("class", "function", "method") else ()
        lines[:] = to_restructured_text(lines, arguments)

    def draw_dashes(app, doctree):
        """Between a parameter and its description."""
        for text in list(doctree.findall(lambda node: isinstance(node, nodes.Text) and node == " -- ")):
            text.parent.replace(text, nodes.Text(" – "))

    def draw_runs(app, name, source):
        if name == "report":
            for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
                figures = f"{{download}}`Its figures <../benchmarks/results/{file.name}>`"
                source[0] += f"\n{page.markdown([results.read(file)])}\n{figures}\n"

    app.connect("source-read", draw_runs)
    app.connect("autodoc-process-docstring", replace)
    app.connect("doctree-read", draw_dashes)
