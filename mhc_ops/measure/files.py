"""The files and folders that a command writes, and the JSON that it reads.

A regular file is replaced in one step: whoever reads it, or whatever ends this process, finds the old or the new one
whole. It keeps its mode and owner; a new one has the mode that umask says. A link is followed to the file that it
names. A device or a pipe is written directly, and so is the file that this process prints to. A folder gets all of its
entries or none.
"""

import contextlib
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from .report import Refused

UNFINISHED = ".mhc-ops-"  # what the name of a folder that is not finished yet begins with


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
        _unfinished(folder).cleanup()
    except OSError as error:
        return f"nothing can be written to {folder}: {error.strerror}"
    return None


def is_replaced(path: Path) -> bool:
    """Whether it can be written again and again; what is written directly takes one text."""
    return not _exists(path) or (path.is_file() and _stream(path) is None)


def refuse_what_is_not_replaced(path: Path) -> None:
    if not is_replaced(path):
        raise Refused(f"{path}: is a device, a pipe, a socket or what this command prints to; name a file")


def write(path: Path, text: str) -> None:
    if stream := _stream(path):
        stream.write(text)
        return
    with refusing(path), replaced(path) if is_replaced(path) else contextlib.nullcontext(path) as part:
        part.write_text(text, encoding="utf-8", errors="replace")


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """What to write to instead of a file: one in a folder of its own beside it, which then replaces it."""
    refuse_what_is_not_replaced(path)
    final = Path(os.path.realpath(path))
    with _unfinished(final.parent) as folder:
        part = Path(folder, final.name)
        part.touch()
        kept = (final if final.exists() else part).stat()
        yield part
        for owner, group in ((kept.st_uid, -1), (-1, kept.st_gid)):
            with contextlib.suppress(OSError):  # only root gives files to others, and not on all file systems
                os.chown(part, owner, group)
        part.chmod(stat.S_IMODE(kept.st_mode))  # a new owner has taken bits away
        os.replace(part, final)


@contextlib.contextmanager
def filled(folder: Path, last: str = "") -> Iterator[Path]:
    """What to write to instead of a folder: one within it, whose entries then move to it, `last` behind all others.
    Where anything fails they are gone again, and so are the folders that were made for them. Entries that the folder
    has already are not replaced."""
    final = Path(os.path.realpath(folder))
    made = [place for place in (final, *final.parents) if not os.path.lexists(place)]
    moved: list[Path] = []
    with refusing(folder):
        try:
            final.mkdir(parents=True, exist_ok=True)
            with _unfinished(final) as part:
                yield Path(part)
                for name in sorted(os.listdir(part), key=lambda name: (name == last, name)):
                    if os.path.lexists(final / name):
                        raise Refused(f"{folder / name} is there already")
                    os.rename(Path(part, name), final / name)
                    moved.append(final / name)
        except BaseException:
            for entry in reversed(moved):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            for place in made:
                with contextlib.suppress(OSError):  # never made, or somebody else has put something there
                    place.rmdir()
            raise


def read_json(path: Path) -> Any:
    with refusing(path):
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise Refused(f"{path}: not JSON: {error}") from error


def _unfinished(folder: Path) -> "tempfile.TemporaryDirectory[str]":
    """Nobody else has its name, and nobody else may look into it."""
    return tempfile.TemporaryDirectory(dir=folder, prefix=UNFINISHED)


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """What the system has to say about it, as the one line that the user sees."""
    try:
        yield
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from error


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
