"""What a command says: tables (in colour where stdout is a terminal and rich is installed), progress, why it was
refused."""

import importlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import torch

import mhc_ops

Item = TypeVar("Item")

VERSION = mhc_ops.__version__
WIDEST_BAR = 30
NARROWEST_WITH_BAR = 39  # columns
BETWEEN_LINES = 10.0  # seconds, of a status where there is no terminal
BETWEEN_COLUMNS = 2  # spaces, of a table
COLOURS = {"PASS": "green", "FAIL": "bold red"}
ERASE = "\x1b[K"  # a terminal, from the cursor to the end of the line


class Refused(Exception):
    """A command cannot be run like this; the message is the one line that the user sees before exit code 2."""


class Table(NamedTuple):
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def refuse_without(package: str, purpose: str) -> None:
    """Before the work begins, where a package of the extra `bench` is needed."""
    if not _installed(package):
        raise Refused(f"{purpose} needs {package}, which is not installed: pip install mhc-ops[bench]")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def open_streams() -> None:
    """Where the shell closed one (`>&-`) there is none; and no letter may end a run on a terminal that lacks it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="replace")


def discard() -> None:
    """Whatever is still in a buffer fails no more when Python ends; as the documentation of SIGPIPE has it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def table(header: Sequence[str], rows: Iterable[Sequence[str]], columns: int = 0) -> str:
    """Each column as wide as its widest entry; the first one left, the others right.

    columns: of the terminal, if there is one. The first column is wrapped between words to fit it; where a word would
    not fit, each row is a paragraph."""
    lines = [header, *rows]
    first, *others = (max(map(len, column)) for column in zip(*lines))
    if columns:
        left = columns - sum(BETWEEN_COLUMNS + width for width in others)
        if left < min(first, _longest_word(line[0] for line in lines)):
            return "\n".join(_paragraph(header, row, columns) for row in lines[1:])
        first = min(first, left)
    lines.insert(1, ["-" * width for width in (first, *others)])
    return "\n".join(_line(line, first, others) for line in lines)


def _line(cells: Sequence[str], first: int, others: Sequence[int]) -> str:
    begin, *more = _wrapped(cells[0], first) or [""]
    aligned = [begin.ljust(first), *map(str.rjust, cells[1:], others)]
    return "\n".join([(" " * BETWEEN_COLUMNS).join(aligned).rstrip(), *more])


def _paragraph(header: Sequence[str], cells: Sequence[str], columns: int) -> str:
    """The first cell, then the others with their names, as many in a line as fit."""
    lines = _wrapped(cells[0], columns)
    line = ""
    for named in (f"{name} {cell}" for name, cell in zip(header[1:], cells[1:]) if cell):
        if line and len(line) + BETWEEN_COLUMNS + len(named) > columns:
            lines.append(line)
            line = ""
        line += " " * BETWEEN_COLUMNS + named
    return "\n".join([*lines, line])


def _wrapped(text: str, columns: int, indent: str = "") -> list[str]:
    """Between words; indent: of all lines but the first."""
    return textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _longest_word(texts: Iterable[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def show(*parts: Table | str) -> None:
    """On stdout, with an empty line in between. On a terminal nothing is wider than it, and rich colours verdicts."""
    columns = _columns(sys.stdout)
    for nth, part in enumerate(parts):
        print(end="\n" * (nth > 0))
        text = _wrapped_lines(part, columns) if isinstance(part, str) else table(*part, columns)
        if columns and _installed("rich"):
            _print_coloured(text, columns)
        else:
            print(text)


def _wrapped_lines(text: str, columns: int) -> str:
    """What goes on in another line is indented."""
    if not columns:
        return text
    indents = [" " * (len(line) - len(line.lstrip()) + 2) for line in text.splitlines()]
    return "\n".join("\n".join(_wrapped(*line)) for line in zip(text.splitlines(), repeat(columns), indents))


def _print_coloured(text: str, columns: int) -> None:
    import rich.console
    import rich.text

    coloured = rich.text.Text(text)
    for verdict, colour in COLOURS.items():
        coloured.highlight_regex(rf"\b{verdict}\b", colour)
    rich.console.Console(file=sys.stdout, width=columns).print(coloured, soft_wrap=True)


def progress(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Yield the items and say on stderr how far it is: in one line of a terminal, written anew for each item."""
    columns = _columns(sys.stderr)
    width = min(WIDEST_BAR, columns * 3 // 8) if columns >= NARROWEST_WITH_BAR else 0
    for done, item in enumerate(items):
        words = " ".join(map(str, item)) if isinstance(item, tuple) else str(item)
        bar = ("━" * (width * done // len(items)) + "╸").ljust(width + 1) if width else ""
        if not _write_line(f"{label} {done}/{len(items)} {bar} {words}"):
            print(f"{label} {done + 1}/{len(items)}: {words}", file=sys.stderr, flush=True)
        yield item
    clear()


def status(label: str) -> Callable[[object], None]:
    """For work of unknown length: call it with where it is. Without a terminal it speaks now and then."""
    last = time.monotonic()

    def show(where: object) -> None:
        nonlocal last
        if not _write_line(f"{label} {where}") and time.monotonic() - last >= BETWEEN_LINES:
            last = time.monotonic()
            print(f"{label} {where}", file=sys.stderr, flush=True)

    return show


def _write_line(text: str) -> bool:
    """In place of what stands there; False, and nothing, where the cursor does not move."""
    if columns := _columns(sys.stderr):
        print(f"\r{text[:columns]}{ERASE}", end="", file=sys.stderr, flush=True)
    return columns > 0


def clear() -> None:
    """Take the progress off the terminal, to print something in its place."""
    _write_line("")


def say(text: object) -> None:
    """A line on stderr, after all that was printed."""
    sys.stdout.flush()
    clear()
    print(printable(str(text)), file=sys.stderr)


def printable(text: str) -> str:
    """A text of a file that anybody may have written, in one line that no terminal obeys: \\x1b in place of ESC."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, longest: int = 80) -> str:
    """A value of such a file, in a message."""
    return text if len(text) <= longest else text[:longest] + "…"


def _columns(stream: Any) -> int:
    """Of a terminal whose cursor moves, without the last one, where some wrap; 0 elsewhere."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return 0
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a terminal that is no file, as in a notebook
        columns = 0
    return max(1, shutil.get_terminal_size((columns or 80, 24)).columns - 1)


def finite(value: Any) -> Any:
    """For JSON, which has neither NaN nor infinity: null in their place."""
    return json.loads(json.dumps(value), parse_constant=lambda constant: None)


def versions() -> dict[str, str]:
    """What a measurement depends on."""
    found = {"mhc_ops": VERSION, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "tilelang"):
        try:
            found[name] = importlib.import_module(name).__version__
        except ImportError:
            found[name] = "not installed"
    if torch.cuda.is_available():
        driver = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        return {**found, "device": torch.cuda.get_device_name(), "driver": driver}
    return {**found, "device": f"CPU ({platform.machine()})"}
