"""What a command says: tables, progress, why it was refused. In colour where stdout or stderr is a terminal and rich is
installed, in plain lines elsewhere."""

import importlib
import importlib.util
import math
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
NARROWEST_WITH_BAR = 40  # columns of a terminal
BETWEEN_LINES = 10.0  # seconds, of a status where there is no terminal
COLOURS = {"PASS": "green", "FAIL": "bold red"}
_display: Any = None  # rich's, while there is progress to see


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
    """On stdout, with an empty line in between."""
    console = _console(sys.stdout)
    for nth, part in enumerate(parts):
        print(end="\n" * (nth > 0))
        if isinstance(part, Table) and console is not None:
            console.print(_coloured(part, console.width))
        else:
            print(part if isinstance(part, str) else table(*part))


def _coloured(part: Table, width: int) -> Any:
    """The first column is wrapped where the terminal is narrow; the others, too, where that is not enough."""
    from rich import box, text
    from rich import table as rich_table

    _, *others = (2 + max(map(len, column)) for column in zip(part.header, *part.rows))
    drawn = rich_table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column, name in enumerate(part.header):
        whole = column > 0 and sum(others) < width
        drawn.add_column(name, justify="right" if column else "left", overflow="fold", no_wrap=whole)
    for row in part.rows:
        drawn.add_row(*(text.Text(cell, COLOURS.get(cell, "")) for cell in row))
    return drawn


def progress(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Yield the items and say on stderr how far it is."""
    update = _start_display(label, len(items))
    for done, item in enumerate(items):
        words = " ".join(map(str, item)) if isinstance(item, tuple) else str(item)
        if update is None:
            print(f"{label} {done + 1}/{len(items)}: {words}", file=sys.stderr, flush=True)
        else:
            update(done, words)
        yield item
    clear()


def status(label: str) -> Callable[[object], None]:
    """For work of unknown length: call it with where it is. Without a terminal it speaks now and then."""
    update, last = _start_display(label, None), [time.monotonic()]

    def show(where: object) -> None:
        if update is not None:
            update(0, str(where))
        elif time.monotonic() - last[0] >= BETWEEN_LINES:
            last[0] = time.monotonic()
            print(f"{label} {where}", file=sys.stderr, flush=True)

    return show


def clear() -> None:
    """Take the progress off the terminal, to print something in its place."""
    if _display is not None:
        _display.stop()


def say(text: object) -> None:
    """On stderr, after all that was printed."""
    sys.stdout.flush()
    clear()
    print(text, file=sys.stderr)


def _console(stream: Any) -> Any:
    """rich's for a terminal whose cursor moves; None elsewhere."""
    if not stream.isatty() or not _installed("rich"):
        return None
    from rich.console import Console

    # Not in the last column: there some terminals wrap. rich asks stdin and stdout for a size, which may be files.
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a terminal that is no file, as in a notebook
        columns = 0
    width = shutil.get_terminal_size((columns or 80, 24)).columns - 1
    console = Console(file=stream, width=max(1, width), highlight=False, emoji=False)
    return console if console.is_interactive else None


def _start_display(label: str, total: int | None) -> Callable[[int, str], None] | None:
    """A line that is written anew by update(done, words); None where there is no terminal, or no rich."""
    global _display
    console = _console(sys.stderr)
    if console is None:
        return None
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    def text(field: str, ratio: int | None = None) -> TextColumn:
        column = Column(no_wrap=True, overflow="crop", ratio=ratio)
        return TextColumn(f"{{task.{field}}}", markup=False, table_column=column)

    width = min(WIDEST_BAR, console.width * 3 // 8)
    with_bar = total is not None and console.width + 1 >= NARROWEST_WITH_BAR
    bar = [BarColumn(width, table_column=Column(width=width))] if with_bar else []
    columns = (text("description"), *bar, text("fields[words]", ratio=1))
    # Drawn only when it is told to: a thread that draws would disturb what is being timed.
    quiet: Any = dict.fromkeys(("auto_refresh", "redirect_stdout", "redirect_stderr"), False)
    line = Progress(*columns, console=console, transient=True, expand=True, **quiet)
    _display, task = line, line.add_task(label, total=total, words="")

    def update(done: int, words: str) -> None:
        count = label if total is None else f"{label} {done}/{total}"
        line.update(task, completed=done, description=count, words=words)
        line.start()
        line.refresh()

    return update


def finite(value: Any) -> Any:
    """For JSON, which has neither NaN nor infinity: null in their place."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
