"""Docstrings as Sphinx reads them. Ours are plain text:

- paragraphs, in which `name` is code;
- arguments, as "name: what it is": at the start of a line, after a sentence or two spaces after the one before. They
  become the list of parameters, and a line that begins with "Returns" what is returned;
- equations ("h_in = ..." in every line), examples (">>> "), code (indented by four) and lists ("- ") as they are.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator

WIDTH = (
    116  # of a line: where a sentence begins with a word that would have fitted in the line before, it is on its own
)
EQUATION = re.compile(r"\w+(\[[^\]]*\])? /?= ")


def to_restructured_text(lines: Iterable[str], arguments: Iterable[str]) -> list[str]:
    """arguments: the names that the described function or class takes."""
    names = "|".join(map(re.escape, arguments)) or r"(?!)"  # a pattern that nothing matches
    item = re.compile(rf"(?:^|(?<=[.;]) | {{2,}})((?:{names})(?:, (?:{names}))*): ")
    prose: list[str] = []
    fields: list[str] = []
    for paragraph in "\n".join(lines).strip("\n").split("\n\n"):
        own = paragraph.splitlines()
        if paragraph.startswith("    ") or all(map(EQUATION.match, own)):
            prose += ["::", "", *textwrap.indent(textwrap.dedent(paragraph), "    ").splitlines(), ""]
        elif paragraph.startswith(">>> "):
            prose += [*own, ""]
        elif paragraph.startswith("- "):
            prose += [*_escaped(paragraph).splitlines(), ""]
        else:
            for part in _parts(own, item):
                begin, *items = item.split(part)
                if begin.startswith("Returns "):
                    fields.append(f":returns: {_escaped(begin.removeprefix('Returns '))}")
                elif begin:
                    prose += [_escaped(begin), ""]
                for described, words in zip(items[::2], items[1::2]):
                    fields += [f":param {name}: {_escaped(words)}" for name in described.split(", ")]
    return [*prose, *fields, ""]


def _parts(lines: list[str], item: re.Pattern[str]) -> Iterator[str]:
    """Joins the lines that belong together."""
    part, before = "", ""
    for line in lines:
        ended = line[0].isupper() and len(before) + 1 + len(line.split()[0]) <= WIDTH
        if part and (ended or item.match(line) or line.startswith("Returns ")):
            yield part
            part = ""
        part, before = f"{part} {line.strip()}".strip(), line
    yield part


def _escaped(text: str) -> str:
    """Marks `name` as code and escapes the rest. A backslash separates a name from text directly after it."""
    found = ""
    for part in re.split(r"(`[^`]+`)", text.strip()):
        if part.startswith("`"):
            found += "\\ " * found[-1:].isalnum() + f"`{part}`"
        else:
            found += "\\ " * (found.endswith("``") and part[:1].isalnum()) + re.sub(r"([*|_\\])", r"\\\1", part)
    return found
