"""mhc-ops diagnose: its options, the cases that they mean, and what it prints."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ...core import backend as backends
from ...testing.cases import seed
from ...testing.conv_cases import AnyCase
from .. import arguments, page, report, selection
from ..report import Refused
from . import Diagnosis, diagnose

OPS = tuple(dict.fromkeys(case.subject.name.split()[0] for case in selection.CHECK))
SHAPES = {"sinkhorn": "TxNxN", "short_conv": "BxLxNxD"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}  # as reports name them
OUTPUTS = f"{page.ACCURACY.partition('backend, ')[2]}, finding"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("op", metavar="OP", choices=OPS, help=", ".join(OPS))
    add("--backend", choices=backends.BACKENDS, help="default: the one that the op would choose")
    add("--device", type=arguments.device, default=arguments.default_device(), help="default: %(default)s")
    add("--shape", metavar="2x128x4x256", type=arguments.shape, help="of x, instead of those that check takes")
    add("--width", metavar="W", type=int, choices=range(1, 9), help="taps of a convolution")
    add("--dtype", choices=DTYPES, help="of x (default: those that check takes)")
    add("--seed", metavar="N", type=seed, help="of the random tensors")


def run_diagnose(options: argparse.Namespace) -> int:
    """0: nothing found; 1: an output is wrong."""
    try:
        work, backend = _work(options)
    except (RuntimeError, TypeError, ValueError) as error:  # a backend that cannot run
        raise Refused(str(error)) from error
    for done, case in enumerate(report.progress(work, "diagnose")):
        try:
            found = diagnose(case, backend, options.device)
        except Exception as error:  # an op that refuses its input says its name first; a CPU's memory has no type
            full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
            if not full and not str(error).startswith((options.op, "mhc_")):  # a boundary says mhc_enter
                raise
            raise Refused(str(error)) from error
        if found.findings:  # one cause is enough for one command
            off = sum(not output.passed for output in found.outputs)
            report.clear()
            print(f"{case}, {backend}: {off} of {len(found.outputs)} outputs are off")
            print("\n".join(_lines(found)))
            left = f", {len(work) - done - 1} not run" * (done + 1 < len(work))
            print(f"\n{done} of {len(work)} cases right, 1 off{left}")
            return 1
    print(f"{options.op}, {backend}: nothing found in {len(work)} cases")
    return 0


def _lines(found: Diagnosis) -> Iterator[str]:
    """The findings, the table of outputs, then the place of the first output of each finding."""
    numbers: dict[str, int] = {}
    for nth, finding in enumerate(found.findings, 1):
        share = f" ({finding.share:.2%} of the error)" if finding.share else ""
        yield f"  {nth}. {', '.join(finding.outputs)}: {finding.sentence}{share}"
        numbers |= dict.fromkeys(finding.outputs, nth)
    rows = [output.row for output in found.outputs]
    entries = [SimpleNamespace(**vars(r), verdict=r.verdict, finding=numbers.get(r.output)) for r in rows]
    yield "\n" + report.table(*page.table(entries, OUTPUTS))
    first = [finding.outputs[0] for finding in found.findings]
    for output in (output for output in found.outputs if output.name in first):
        axes = ", ".join(f"{size} {axis}{'s' * (size > 1)}" for axis, size in output.axes.items())
        yield f"\n{output.name}  [{axes}]: {output.place.words or 'everywhere'}, {output.place.filled:.1%} of it wrong"


def _work(options: argparse.Namespace) -> tuple[list[AnyCase], str]:
    """The cases of `check` with the options in place of what they have, fp32 first, and the backend."""
    op, shape = options.op, options.shape
    own = [case for case in selection.CHECK if case.subject.name.split()[0] == op]
    family = own[0].subject.family
    if options.width and family == "mhc":
        raise Refused(f"{op} has no --width")
    given = {"dtype": DTYPES.get(options.dtype), "W": options.width, "seed": options.seed}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if shape and family == "mhc":
        changes |= {"outer": shape[:-2], "n": shape[-2:][0], "D": shape[-1]}
    elif shape:
        changes |= dict(zip(("B", "L", "n", "D") if own[0].n else ("B", "L", "D"), shape))
    changed = [replace(case, **changes) for case in own]
    if shape and changed[0].sizes != shape:
        axes = SHAPES.get(op, "Tx…xNxD" if family == "mhc" else "BxLxD")
        raise Refused(f"--shape of {op} must be {axes}, got {'x'.join(map(str, shape))}")
    possible = {str(case): case for case in changed if "cu_seqlens" not in str(case) or case.sizes[0] == 1}  # one row
    work = sorted(possible.values(), key=lambda case: case.dtype != torch.float32)
    backend = backends.choose(op, family, options.backend, options.device)
    runnable = [case for case in work if case.runs_on(backend)]
    if not runnable:
        raise Refused(f"{backend} cannot run {work[0]}")
    return runnable, backend
