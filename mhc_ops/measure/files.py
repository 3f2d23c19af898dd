"""The files and folders that a command writes, and the JSON that it reads.

A regular file is replaced in one step: a reader finds the old file or the new one, never a part. It keeps its mode and
owner. A link is followed. A device, a pipe and the file that this process prints to are written directly. A folder gets
all of its entries or none.
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


def why_not(path: Path) -> str | None:
    """Why a file cannot be written."""
    try:
        direct = not is_replaced(path)
    except OSError as error:
        return error.strerror
    if path.is_dir():
        return "is a folder"
    if path.exists() and not os.access(path, os.W_OK):
        return "is read-only"
    folder = Path(os.path.realpath(path)).parent
    if not direct and not folder.is_dir():
        return f"there is no folder {folder}"
    try:
        if not direct:
            _unfinished(folder).cleanup()
    except OSError as error:
        return f"nothing can be written to {folder}: {error.strerror}"
    return None


def is_replaced(path: Path) -> bool:
    """False for what is written directly, which takes one text."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    return path.is_file() and _stream(path) is None


def refuse_what_is_not_replaced(path: Path) -> None:
    if not is_replaced(path):
        raise Refused(f"{path}: is a device, a pipe or what this command prints to; name a file")


def write(path: Path, text: str) -> None:
    if stream := _stream(path):
        stream.write(text)
        return
    with refusing(path), replaced(path) if is_replaced(path) else contextlib.nullcontext(path) as part:
        part.write_text(text, encoding="utf-8", errors="replace")


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields the file to write to: its own folder beside the target keeps it apart from all others."""
    refuse_what_is_not_replaced(path)
    final = Path(os.path.realpath(path))
    with _unfinished(final.parent) as folder:
        part = Path(folder, final.name)
        part.touch()
        kept = (final if final.exists() else part).stat()
        yield part
        for owner, group in ((kept.st_uid, -1), (-1, kept.st_gid)):
            with contextlib.suppress(OSError):  # only root gives files away, and not on all file systems
                os.chown(part, owner, group)
        part.chmod(stat.S_IMODE(kept.st_mode))  # a new owner has cleared bits
        os.replace(part, final)


@contextlib.contextmanager
def filled(folder: Path, last: str = "") -> Iterator[Path]:
    """Yields a folder to write to. Its entries then move to the target, `last` after all others. If anything fails,
    they and the folders made for them are removed. Entries that the target already has are not replaced."""
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
                with contextlib.suppress(OSError):  # never made, or another process has put something there
                    place.rmdir()
            raise


def read_json(path: Path) -> Any:
    with refusing(path):
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise Refused(f"{path}: not JSON: {error}") from error


def _unfinished(folder: Path) -> "tempfile.TemporaryDirectory[str]":
    """A folder with a name of its own, which only this user may enter."""
    return tempfile.TemporaryDirectory(dir=folder, prefix=".mhc-ops-")


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """An error of the system becomes the one line that the user sees."""
    try:
        yield
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from error


def _stream(path: Path) -> TextIO | None:
    """stdout or stderr if this file is one of them: replaced or truncated, it would lose what is printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no such file yet, or a stream without one, as in a notebook
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return stream
    return None
