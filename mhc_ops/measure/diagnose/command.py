"""mhc-ops diagnose: arguments, exit codes, what is printed and written."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ...core import backend as backends
from .. import report
from ..cases import Tensors
from ..conv_cases import AnyCase
from . import html, text
from .chosen import OPS, Wrong, from_check, from_file
from .diagnosis import Diagnosis, diagnose
from .heat import profile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def add_arguments(
    parser: argparse.ArgumentParser, device: Callable[[str], torch.device], default_device: torch.device
) -> None:
    parser.add_argument("op", metavar="OP", choices=OPS, help=", ".join(OPS))
    parser.add_argument("--backend", choices=backends.BACKENDS, help="default: the one that the op would choose")
    parser.add_argument("--device", type=device, default=default_device, help="default: %(default)s")
    parser.add_argument("--shape", metavar="2x128x4x256", type=shape, help="of x, instead of those that check takes")
    parser.add_argument("--width", metavar="W", type=int, choices=range(1, 9), help="taps of a convolution")
    parser.add_argument("--dtype", choices=DTYPES, help="of x (default: those that check takes)")
    parser.add_argument("--seed", type=int, help="of the random tensors")
    parser.add_argument("--inputs", metavar="FILE.pt", type=Path, help="your own tensors: a dict by argument name")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the diagnosis as one page")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything found to this file")


def shape(written: str) -> tuple[int, ...]:
    """2x128x4x256; argparse turns the error into exit code 2."""
    sizes = tuple(int(size) for size in written.split("x"))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{written}: sizes must be at least 1")
    return sizes


def run_diagnose(options: argparse.Namespace) -> int:
    """0: nothing found; 1: something is off; 2: it cannot be run like this."""
    try:
        work, tensors, backend = _chosen(options)
    except (Wrong, RuntimeError, TypeError, ValueError) as error:  # a backend that cannot run, tensors that misfit
        print(f"mhc-ops diagnose: {error}", file=sys.stderr)
        return 2
    done: list[Diagnosis] = []
    for case in report.progress(work, "diagnose"):
        try:
            done.append(diagnose(case, backend, options.device, tensors))
        except (TypeError, ValueError, NotImplementedError) as error:
            if not str(error).startswith(options.op):  # so begins what an op says where it refuses its input
                raise
            print(f"mhc-ops diagnose: {error}", file=sys.stderr)
            return 2
        if not done[-1].passed:  # one cause is enough for one command
            break
    last = done[-1]
    if not last.passed:
        print(text.render(last, shutil.get_terminal_size((100, 24)).columns, sys.stdout.isatty()), end="\n\n")
    print(text.summary(done, len(work)))
    if options.html:
        options.html.write_text(html.page(last), encoding="utf-8")
    if options.json:
        options.json.write_text(
            json.dumps(report.finite(_as_json(last, options)), indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
    return 0 if last.passed else 1


def _chosen(options: argparse.Namespace) -> tuple[list[AnyCase], Tensors | None, str]:
    tensors: Tensors | None = None
    if options.inputs:
        given = [name for name in ("shape", "width", "dtype") if getattr(options, name) is not None]
        if given:
            raise Wrong(f"--{given[0]} and --inputs exclude each other")
        work, tensors = from_file(options.op, options.inputs, options.seed or 0, options.device)
    else:
        dtype = DTYPES.get(options.dtype)
        work = from_check(options.op, options.shape, options.width, dtype, options.seed)
    backend = backends.choose(options.op, work[0].subject.family, options.backend, options.device)
    runnable = [case for case in work if case.runs_on(backend)]
    if not runnable:
        raise Wrong(f"{backend} cannot run {work[0]}")
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
