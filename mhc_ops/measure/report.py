"""What a command says: tables; progress, as a bar on a terminal and as plain lines elsewhere; why it was refused."""

import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

import mhc_ops

Item = TypeVar("Item")

VERSION = mhc_ops.__version__
WIDEST_BAR = 30
BETWEEN_LINES = 10.0  # seconds, of a status where there is no terminal


class Refused(Exception):
    """A command cannot be run like this; the message is the one line that the user sees before exit code 2."""


def open_streams() -> None:
    """Where the shell closed one (`>&-`) there is none; and no letter may end a run on a terminal that lacks it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
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
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [cell.ljust(w) if column == 0 else cell.rjust(w) for column, (cell, w) in enumerate(zip(line, widths))]
        return "  ".join(cells).rstrip()

    return "\n".join([text(lines[0]), "  ".join("-" * w for w in widths), *map(text, lines[1:])])


def progress(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Yield the items and say on stderr how far it is."""
    for done, item in enumerate(items):
        if sys.stderr.isatty():
            _overwrite(_bar(label, done, len(items), _words(item), _columns()))
        else:
            sys.stderr.write(f"{label} {done + 1}/{len(items)}: {_words(item)}\n")
        sys.stderr.flush()
        yield item
    clear()


def status(label: str) -> Callable[[object], None]:
    """For work of unknown length: call it with where it is. Without a terminal it speaks now and then."""
    last = time.monotonic()

    def show(place: object) -> None:
        nonlocal last
        if sys.stderr.isatty():
            _overwrite(f"{label} {place}"[: max(1, _columns() - 1)])
        elif time.monotonic() - last >= BETWEEN_LINES:
            last = time.monotonic()
            sys.stderr.write(f"{label} {place}\n")
        sys.stderr.flush()

    return show


def clear() -> None:
    """Take the progress off the terminal, to print something in its place."""
    if sys.stderr.isatty():
        _overwrite("")
        sys.stderr.flush()


def say(text: object) -> None:
    """A line on stderr, after all that was printed so far."""
    sys.stdout.flush()
    clear()
    print(text, file=sys.stderr)


def _overwrite(text: str) -> None:
    sys.stderr.write(f"\r\033[K{text}")


def _bar(label: str, done: int, total: int, words: str, columns: int) -> str:
    """One line, and not its last column: there some terminals wrap. The bar gives way to the numbers."""
    room = columns - 1 - len(f"{label}  {done}/{total}")
    length = max(0, min(WIDEST_BAR, columns * 3 // 8, room))
    filled = length * done // total
    return f"{label} {'█' * filled}{'·' * (length - filled)} {done}/{total}  {words}"[: max(1, columns - 1)]


def _columns() -> int:
    """Of the terminal that stderr is; stdout, whose size shutil asks for, may be a file."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return shutil.get_terminal_size((columns or 80, 24)).columns


def _words(item: object) -> str:
    return " ".join(map(str, item)) if isinstance(item, tuple) else str(item)


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
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "not installed"
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["driver"] = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    else:
        found["device"] = f"CPU ({platform.machine()})"
    return found
