"""mhc-ops diagnose: arguments, exit codes, what is printed and written."""

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ...core import backend as backends
from .. import arguments, files, report
from ..cases import Tensors
from ..conv_cases import AnyCase
from ..report import Refused
from . import html, text
from .chosen import OPS, from_check, from_file
from .diagnosis import Diagnosis, diagnose
from .heat import profile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("op", metavar="OP", choices=OPS, help=", ".join(OPS))
    add("--backend", choices=backends.BACKENDS, help="default: the one that the op would choose")
    add("--device", type=arguments.device, default=arguments.default_device(), help="default: %(default)s")
    add("--shape", metavar="2x128x4x256", type=arguments.shape, help="of x, instead of those that check takes")
    add("--width", metavar="W", type=int, choices=range(1, 9), help="taps of a convolution")
    add("--dtype", choices=DTYPES, help="of x (default: those that check takes)")
    add("--seed", metavar="N", type=arguments.seed, help="of the random tensors")
    add("--inputs", metavar="FILE.pt", type=Path, help="your own tensors: a dict by argument name")
    add("--html", metavar="FILE", type=arguments.output, help="write the diagnosis as one page")
    add("--json", metavar="FILE", type=arguments.output, help="write everything found to this file")


def run_diagnose(options: argparse.Namespace) -> int:
    """0: nothing found; 1: something is off."""
    work, tensors, backend = _chosen(options)
    done: list[Diagnosis] = []
    for case in report.progress(work, "diagnose"):
        try:
            done.append(diagnose(case, backend, options.device, tensors))
        except Exception as error:
            if not str(error).startswith(options.op) and not _out_of_memory(error):
                raise
            raise Refused(str(error)) from error  # with the op's name begins what an op says where it refuses its input
        if not done[-1].passed:  # one cause is enough for one command
            break
    report.clear()
    last = done[-1]
    if not last.passed:
        print(text.render(last, shutil.get_terminal_size((100, 24)).columns, sys.stdout.isatty()), end="\n\n")
    print(text.summary(done, len(work)))
    if options.html:
        files.write(options.html, html.page(last))
    if options.json:
        content = report.finite(_as_json(last, options))
        files.write(options.json, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return 0 if last.passed else 1


def _out_of_memory(error: Exception) -> bool:
    """The CPU's has no type of its own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _chosen(options: argparse.Namespace) -> tuple[list[AnyCase], Tensors | None, str]:
    try:
        return _found(options)
    except (RuntimeError, TypeError, ValueError) as error:  # a backend that cannot run, tensors that misfit
        raise Refused(str(error)) from error


def _found(options: argparse.Namespace) -> tuple[list[AnyCase], Tensors | None, str]:
    tensors: Tensors | None = None
    if options.inputs:
        given = [name for name in ("shape", "width", "dtype") if getattr(options, name) is not None]
        if given:
            raise Refused(f"--{given[0]} and --inputs exclude each other")
        work, tensors = from_file(options.op, options.inputs, options.seed or 0, options.device)
    else:
        dtype = DTYPES.get(options.dtype)
        work = from_check(options.op, options.shape, options.width, dtype, options.seed)
    backend = backends.choose(options.op, work[0].subject.family, options.backend, options.device)
    runnable = [case for case in work if case.runs_on(backend)]
    if not runnable:
        raise Refused(f"{backend} cannot run {work[0]}")
    return runnable, tensors, backend


def _as_json(diagnosis: Diagnosis, options: argparse.Namespace) -> dict[str, object]:
    return {
        "op": options.op,
        "case": str(diagnosis.case),
        "backend": diagnosis.backend,
        "device": str(options.device),
        "versions": report.versions(),
        "passed": diagnosis.passed,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "outputs": [{**asdict(row), "verdict": row.verdict} for row in diagnosis.rows],
        "details": [
            {
                "output": detail.name,
                "axes": detail.layout,
                "statistics": asdict(detail.statistics),
                "place": detail.place or "everywhere",
                "filled": detail.filled,
                "coefficients of terms": detail.coefficients,
                "largest error by block, of what is allowed": profile(detail.error, detail.layout),
            }
            for detail in diagnosis.details
        ],
    }
