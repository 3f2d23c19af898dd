"""What a command prints: tables, progress on stderr, and the line that says why it was refused."""

import importlib
import os
import platform
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

import mhc_ops

Item = TypeVar("Item")

VERSION = mhc_ops.__version__
BETWEEN_LINES = 10.0  # seconds between two lines of a status without a terminal
ERASE = "\x1b[K"  # a terminal clears from the cursor to the end of the line


class Refused(ArgumentTypeError):
    """The command cannot run like this: the message is the one line that the user sees before exit code 2."""


class Table(NamedTuple):
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Each column is as wide as its widest entry; the first is aligned left, the others right."""
    lines = [header, *rows]
    first, *others = (max(map(len, column)) for column in zip(*lines))
    lines.insert(1, ["-" * width for width in (first, *others)])
    aligned = [[cells[0].ljust(first), *map(str.rjust, cells[1:], others)] for cells in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def show(*parts: Table | str) -> None:
    """Prints tables and texts with an empty line between two."""
    print("\n\n".join(part if isinstance(part, str) else table(*part) for part in parts))


def progress(items: Sequence[Item], label: str) -> Iterator[Item]:
    """Yields the items and says on stderr how far it is."""
    say_place = status(label, between=0.0)
    for nth, item in enumerate(items, 1):
        say_place(f"{nth}/{len(items)}: {' '.join(map(str, item)) if isinstance(item, tuple) else item}")
        yield item
    clear()


def status(label: str, between: float | None = None) -> Callable[[object], None]:
    """Call the result with the current place. It overwrites a terminal's line; elsewhere a line comes now and then."""
    last, pause = time.monotonic(), BETWEEN_LINES if between is None else between

    def say_place(place: object) -> None:
        nonlocal last
        if not _overwrite(f"{label} {place}") and time.monotonic() - last >= pause:
            last = time.monotonic()
            say(f"{label} {place}")

    return say_place


def _overwrite(text: str) -> bool:
    """Overwrites the line of a terminal; returns False and writes nothing if the cursor cannot move."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns - 1  # at the last one, some wrap
    except (OSError, ValueError):  # no terminal, or none that is a file, as in a notebook
        return False
    moves = columns > 0 and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    if moves:
        print(f"\r{text[:columns]}{ERASE}", end="", file=sys.stderr, flush=True)
    return moves


def clear() -> None:
    """Takes the progress off the terminal."""
    _overwrite("")


def say(text: object) -> None:
    """Prints a line on stderr, after all that was printed."""
    sys.stdout.flush()
    clear()
    print(printable(str(text)), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A foreign text in one line without terminal escapes: \\x1b in place of ESC."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, longest: int = 80) -> str:
    """A foreign text in a message."""
    return text if len(text) <= longest else text[:longest] + "…"


def versions() -> dict[str, str]:
    """What a measurement depends on."""
    found = {"mhc_ops": VERSION, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "tilelang"):
        try:
            found[name] = importlib.import_module(name).__version__
        except ImportError:
            found[name] = "not installed"
    if not torch.cuda.is_available():
        return found | {"device": f"CPU ({platform.machine()})"}
    driver = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return found | {"device": torch.cuda.get_device_name(), "driver": driver}
