"""Which cases there are, and which backends can run them here."""

from collections.abc import Sequence

import torch

from ..core import backend as backends
from . import cases, conv_cases
from .cases import Sweep
from .conv_cases import AnyCase
from .results import NotMeasured

CHECK: tuple[AnyCase, ...] = (*cases.CHECK, *conv_cases.CHECK)
BENCH: tuple[AnyCase, ...] = (*cases.BENCH, *conv_cases.BENCH)
DECODE: tuple[AnyCase, ...] = (*cases.DECODE, *conv_cases.DECODE)
SCALING: tuple[Sweep, ...] = (*cases.SCALING, *conv_cases.SCALING)
BENCH_CPU: tuple[AnyCase, ...] = (*cases.BENCH_CPU, *conv_cases.BENCH_CPU)
SCALING_CPU: tuple[Sweep, ...] = (*cases.SCALING_CPU, *conv_cases.SCALING_CPU)


def runs(case: AnyCase, backend: str, device: torch.device) -> bool:
    return case.runs_on(backend) and backends.why_not(case.subject.family, backend, device.type) is None


def absent(wanted: Sequence[str], device: torch.device) -> list[NotMeasured]:
    """Backends that cannot run here, and why."""
    reasons = [
        (family, backend, backends.why_not(family, backend, device.type))
        for family in backends.families()
        for backend in wanted
    ]
    return [NotMeasured(family, backend, reason) for family, backend, reason in reasons if reason is not None]
