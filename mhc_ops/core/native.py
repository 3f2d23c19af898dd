"""replay.c, compiled at first use by the compiler that Triton needs anyway, and kept in Triton's cache.

Without a compiler, or with a Triton that compiles in another way, replay.py does the same in Python, more slowly.
"""

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("replay.c")


def replay() -> Callable[..., Any] | None:
    """The function `replay` of replay.c, or None."""
    return None if why_not() else compiled().replay


def why_not() -> str | None:
    """Why calls are replayed in Python here."""
    return found if isinstance(found := compiled(), str) else None


@cache
def compiled() -> Any:
    """The module, or why there is none."""
    try:
        from triton.runtime.build import compile_module_from_src
    except ImportError as error:
        return str(error)
    try:
        return compile_module_from_src(SOURCE.read_text(encoding="utf-8"), "mhc_ops_replay")
    except (OSError, RuntimeError, ImportError, TypeError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
