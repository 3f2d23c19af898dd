"""Tables and progress: a bar on a terminal, plain lines elsewhere."""

import math
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

import mhc_ops

Item = TypeVar("Item")


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
    on_terminal = sys.stderr.isatty()
    for done, item in enumerate(items):
        if on_terminal:
            filled = 30 * done // len(items)
            bar = "█" * filled + "·" * (30 - filled)
            sys.stderr.write(f"\r\033[K{label} {bar} {done}/{len(items)}  {_words(item)}"[:160])
        else:
            sys.stderr.write(f"{label} {done + 1}/{len(items)}: {_words(item)}\n")
        sys.stderr.flush()
        yield item
    if on_terminal:
        sys.stderr.write("\r\033[K")


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
    found = {"mhc_ops": mhc_ops.__version__, "python": platform.python_version(), "torch": torch.__version__}
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
