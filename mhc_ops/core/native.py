"""native.c, compiled when the first call is replayed by the compiler that Triton needs anyway, and kept in its cache.

Without a compiler, or with a Triton that compiles in another way, the Python code does the same, more slowly. Where no
call is replayed (MHC_OPS_REPLAY=0, Triton's interpreter), nothing is compiled.
"""

from functools import cache
from pathlib import Path
from typing import Any

from . import backend, private

SOURCE = Path(__file__).with_name("native.c")

code: Any = None  # the module, once it is loaded


def load() -> Any:
    """The module, or None."""
    global code
    code = None if isinstance(found := compiled(), str) else found
    return code


def why_not() -> str | None:
    """Why calls are not replayed in C here."""
    return found if isinstance(found := compiled(), str) else None


@cache
def compiled() -> Any:
    """The module, or why there is none."""
    if not private.keeps_calls or backend._INTERPRETED:
        return "no call is replayed"
    try:
        from triton.runtime.build import compile_module_from_src

        return compile_module_from_src(SOURCE.read_text(encoding="utf-8"), "mhc_ops_native")
    except Exception as error:  # of Triton, compilers, caches and hooks that others may have set
        return f"{type(error).__name__}: {error}"
