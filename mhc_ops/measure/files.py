"""The files that a command writes.

A regular file is replaced in one step: whoever reads it, or whatever ends this process, finds the old or the new one
whole. A link is followed to the file that it names. Anything else (a device, a pipe) is written directly, and so is
the file that this process prints to.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from .report import Refused


def why_not(path: Path) -> str | None:
    """Why a file could not be written; tried without leaving anything behind."""
    try:
        direct = not is_replaced(path)
    except OSError as error:
        return error.strerror
    if path.is_dir():
        return "is a folder"
    if path.exists() and not os.access(path, os.W_OK):
        return "is read-only"
    if direct:
        return "is a socket" if path.is_socket() and _stream(path) is None else None
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"nothing can be written to {folder}: {error.strerror}"
    return None


def is_replaced(path: Path) -> bool:
    """Whether it can be written again and again; what is written directly takes one text."""
    return not _exists(path) or (path.is_file() and _stream(path) is None)


def write(path: Path, text: str) -> None:
    if stream := _stream(path):
        stream.write(text)
        return
    with replaced(path) as part:
        part.write_text(text, encoding="utf-8", errors="replace")


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """What to write to: a file beside it, which then replaces it; itself, where it cannot be replaced."""
    try:
        if not is_replaced(path):
            yield path
            return
        final = Path(os.path.realpath(path))
        part = final.with_name(final.name + ".part")
        try:
            yield part
            os.replace(part, final)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error


def _exists(path: Path) -> bool:
    """What the path leads to; OSError where that cannot be said."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _stream(path: Path) -> TextIO | None:
    """stdout or stderr where they are this file: replaced or truncated, it would lose what is printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no such file yet, or a stream without one, as in a notebook
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return stream
    return None
