"""The files and folders that a command writes, as docs/measure.md says, and the JSON that it reads."""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .report import Refused

DIRECT = ("/dev/", "/proc/")  # names of devices, pipes and open files


def output(text: str) -> Path:
    """The argument of a command as a file that can be written: its folder is tried before the work begins."""
    path = Path(text)
    with refusing(path):
        if path.is_dir():
            raise Refused(f"{path}: is a folder")
        if is_replaced(path):
            _unfinished(Path(os.path.realpath(path)).parent).cleanup()
            if path.exists() and not os.access(path, os.W_OK):
                raise Refused(f"{path}: is read-only")
    return path


def is_replaced(path: Path) -> bool:
    """False for what is written directly, which takes one text."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    return path.is_file() and not str(path).startswith(DIRECT)


def refuse_what_is_not_replaced(path: Path) -> None:
    if not is_replaced(path):
        raise Refused(f"{path}: is a device or a pipe; name a file")


def write(path: Path, text: str) -> None:
    with refusing(path), replaced(path) if is_replaced(path) else contextlib.nullcontext(path) as part:
        sys.stdout.flush()  # which may be the same file
        with open(part, "a", encoding="utf-8", errors="replace") as file:
            file.write(text)


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
        with contextlib.suppress(OSError):  # only root gives files away, and not on all file systems
            os.chown(part, kept.st_uid, kept.st_gid)
        part.chmod(kept.st_mode)
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


def read_json(path: Path, **options: Any) -> Any:
    """options: of json.loads."""
    with refusing(path):
        try:
            return json.loads(path.read_text(encoding="utf-8"), **options)
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
