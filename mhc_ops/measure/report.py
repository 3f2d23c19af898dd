"""What a command says: tables (in colour where stdout is a terminal and rich is installed), progress, why it was
refused."""

import importlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

import mhc_ops

Item = TypeVar("Item")

VERSION = mhc_ops.__version__
WIDEST_BAR = 30
NARROWEST_WITH_BAR = 39  # columns
BETWEEN_LINES = 10.0  # seconds, of a status where there is no terminal
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


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest entry; the first column left, the others right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    aligned = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def show(*parts: Table | str) -> None:
    """On stdout, with an empty line in between; tables in colour, and wrapped, by rich where there is a terminal."""
    columns = _columns(sys.stdout) if _installed("rich") else 0
    for nth, part in enumerate(parts):
        print(end="\n" * (nth > 0))
        if isinstance(part, Table) and columns:
            _show_coloured(part, columns)
        else:
            print(part if isinstance(part, str) else table(*part))


def _show_coloured(part: Table, columns: int) -> None:
    """The first column is wrapped where the terminal is narrow; the others, too, where that is not enough."""
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    _, *others = (3 + max(map(len, column)) for column in zip(part.header, *part.rows))
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column, name in enumerate(part.header):
        whole = column > 0 and sum(others) < columns
        drawn.add_column(name, justify="right" if column else "left", overflow="fold", no_wrap=whole)
    for row in part.rows:
        drawn.add_row(*(rich.text.Text(cell, COLOURS.get(cell, "")) for cell in row))
    rich.console.Console(file=sys.stdout, width=columns).print(drawn)


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
