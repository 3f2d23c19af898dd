"""Which cases there are, and how each provider is checked before it is timed: a backend's kernels, "eager" or
"torch.compile" (the reference, as it is and compiled), or a peer."""

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from ..core import backend as backends
from ..testing import accuracy, cases, conv_cases
from ..testing.cases import Stack
from ..testing.conv_cases import AnyCase
from . import peers
from .report import Refused
from .results import NotMeasured, Wrong

Named = TypeVar("Named")  # a case, or a training step

CHECK: tuple[AnyCase, ...] = (*cases.CHECK, *conv_cases.CHECK)
BENCH: tuple[AnyCase, ...] = (*cases.BENCH, *conv_cases.BENCH)
DECODE: tuple[AnyCase, ...] = (*cases.DECODE, *conv_cases.DECODE)
BENCH_CPU: tuple[AnyCase, ...] = (*cases.BENCH_CPU, *conv_cases.BENCH_CPU)
KERNELS = tuple(backend for backend in backends.BACKENDS if backend != "reference")
OF_TORCH = ("eager", "torch.compile")


def op_of(case: object) -> str:
    """What a name has before its sizes: mhc_pre normed 173x1x257 bfloat16 -> mhc_pre normed"""
    return re.split(r" (?=\d)", str(case))[0]


def named(text: str, cases: Sequence[Named]) -> list[Named]:
    """The cases with the text in their name; without any, Refused with the ops, names and words nearest to it."""
    if found := [case for case in cases if text in str(case)]:
        return found
    ops, names = dict.fromkeys(map(op_of, cases)), [str(case) for case in cases]
    nearest = difflib.get_close_matches(text, dict.fromkeys([*ops, *names, *" ".join(names).split()]))
    meant = f"did you mean {' or '.join(map(repr, nearest))}?" if nearest else f"there are cases of {', '.join(ops)}"
    raise Refused(f"no case matches {text!r}: {meant}")


def absent(wanted: Sequence[str], device: torch.device) -> list[NotMeasured]:
    """Backends that cannot run here, and why."""
    found = [(f, b, backends.why_not(f, b, device)) for f in backends.families() for b in wanted]
    return [NotMeasured(family, backend, reason) for family, backend, reason in found if reason is not None]


def check(case: AnyCase, provider: str, device: torch.device, found: list[accuracy.Row]) -> None:
    """Adds outputs and gradients against fp64 on few tokens; each provider is held to its own precision. Wrong if one
    fails; but eager is timed all the same: it is the formula itself in fewer bits, and its errors are shown."""
    if provider == "torch.compile":
        return  # eager's formula; another compilation for every case would cost more than all the rest
    if peer := peers.by_name(provider):
        rows = peers.measure(peer, case.layer() if isinstance(case, Stack) else case.smaller(), device) or []
    else:
        rows = accuracy.measure(case.smaller(), "reference" if provider == "eager" else provider, device)
    found += [replace(row, backend=provider) for row in rows]
    failed = [row for row in rows if not row.passed]
    if failed and provider != "eager":
        worst = max(failed, key=lambda row: (math.isnan(row.relative_error), row.relative_error))
        off = f"{worst.output} of {worst.case} is off by {worst.relative_error:.1e} (allowed {worst.tolerance:.0e})"
        raise Wrong(f"{off}; wrong in {len(failed)} of {len(rows)} results")
