"""Which cases there are, and which backends can run them here."""

import difflib
from collections.abc import Sequence

import torch

from ..core import backend as backends
from . import cases, conv_cases
from .cases import Sweep
from .conv_cases import AnyCase
from .report import Refused
from .results import NotMeasured

CHECK: tuple[AnyCase, ...] = (*cases.CHECK, *conv_cases.CHECK)
BENCH: tuple[AnyCase, ...] = (*cases.BENCH, *conv_cases.BENCH)
DECODE: tuple[AnyCase, ...] = (*cases.DECODE, *conv_cases.DECODE)
SCALING: tuple[Sweep, ...] = (*cases.SCALING, *conv_cases.SCALING)
BENCH_CPU: tuple[AnyCase, ...] = (*cases.BENCH_CPU, *conv_cases.BENCH_CPU)
SCALING_CPU: tuple[Sweep, ...] = (*cases.SCALING_CPU, *conv_cases.SCALING_CPU)


ALIKE = 0.6  # of difflib's 0 to 1, below which a name is not what somebody meant


def refuse_wrong_environment() -> None:
    """What the variables say is chosen as the package is imported, which is too early for one line."""
    for wrong in (backends.wrong_environment, cases.WRONG_SEED):
        if wrong:
            raise Refused(wrong)


def named(text: str, cases: Sequence[AnyCase]) -> list[AnyCase]:
    """Those with the text in their name; Refused where there is none, with the names nearest to it."""
    found = [case for case in cases if text in str(case)]
    if not found:
        raise Refused(f"no case matches {text!r}: {_nearest(text, cases)}")
    return found


def _nearest(text: str, cases: Sequence[AnyCase]) -> str:
    """Ops, whole names and their words: any of them may be asked for."""
    ops = list(dict.fromkeys(case.subject.name for case in cases))
    names = [str(case) for case in cases]
    words = [word for name in names for word in name.split()]
    nearest = difflib.get_close_matches(text, dict.fromkeys([*ops, *names, *words]), cutoff=ALIKE)
    return f"did you mean {' or '.join(map(repr, nearest))}?" if nearest else f"there are cases of {', '.join(ops)}"


def runs(case: AnyCase, backend: str, device: torch.device) -> bool:
    return case.runs_on(backend) and backends.why_not(case.subject.family, backend, device) is None


def absent(wanted: Sequence[str], device: torch.device) -> list[NotMeasured]:
    """Backends that cannot run here, and why."""
    reasons = [
        (family, backend, backends.why_not(family, backend, device))
        for family in backends.families()
        for backend in wanted
    ]
    return [NotMeasured(family, backend, reason) for family, backend, reason in reasons if reason is not None]
