"""mhc-ops diagnose: its arguments, which cases they mean, what is printed and written, exit codes."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mhc_ops

from ...core import backend as backends
from .. import arguments, cases, files, report, selection
from ..cases import Case, Tensors
from ..conv_cases import AnyCase, ConvCase
from ..report import Refused
from . import Diagnosis, diagnose, show

# The formulas of the stack are not written out in steps.
CHECK = tuple(case for case in selection.CHECK if case.subject not in cases.OF_THE_STACK)
OPS = tuple(dict.fromkeys(case.subject.name.split()[0] for case in CHECK))
SUBJECTS = {subject.name: subject for subject in cases.SUBJECTS}
# What a file may hold for an op: the arguments that must be there, and those that may.
TAKES = {
    **{
        name: (tuple(i for i in s.inputs if i != "gamma"), ("gamma",) * ("gamma" in s.inputs))
        for name, s in SUBJECTS.items()
    },
    "causal_conv1d": (("x", "weight"), ("bias", "residual", "seq_idx", "cu_seqlens", "initial_state")),
    "causal_conv1d_update": (("x", "conv_state", "weight"), ("bias", "cache_seqlens", "conv_state_indices")),
    "short_conv": (("x", "gamma", "weight"), ()),
}
LAYOUTS = {"sinkhorn": "TxNxN", "causal_conv1d": "BxLxD", "causal_conv1d_update": "BxLxD", "short_conv": "BxLxNxD"}
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
    if options.html:
        show.template()  # where there is none, that is said before the work
    try:
        work, tensors, backend = _work(options)
    except (RuntimeError, TypeError, ValueError) as error:  # a backend that cannot run, tensors that misfit
        raise Refused(str(error)) from error
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
        print(show.text(last, shutil.get_terminal_size((100, 24)).columns, sys.stdout.isatty()), end="\n\n")
    print(show.summary(done, len(work)))
    if options.html:
        files.write(options.html, show.page(last))
    if options.json:
        content = {"op": options.op, "device": str(options.device), "versions": report.versions(), **show.data(last)}
        files.write(options.json, json.dumps(report.finite(content), indent=1, allow_nan=False) + "\n")
    return 0 if last.passed else 1


def _out_of_memory(error: Exception) -> bool:
    """The CPU's has no type of its own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _work(options: argparse.Namespace) -> tuple[list[AnyCase], Tensors | None, str]:
    """The cases, the user's tensors in place of theirs where there are any, and the backend."""
    tensors: Tensors | None = None
    if options.inputs:
        given = [name for name in ("shape", "width", "dtype") if getattr(options, name) is not None]
        if given:
            raise Refused(f"--{given[0]} and --inputs exclude each other")
        tensors = _load(options.op, options.inputs, options.device)
        work = _cases_of(options.op, tensors, options.seed or 0)
    else:
        work = _from_check(options.op, options.shape, options.width, DTYPES.get(options.dtype), options.seed)
    backend = backends.choose(options.op, work[0].subject.family, options.backend, options.device)
    runnable = [case for case in work if case.runs_on(backend)]
    if not runnable:
        raise Refused(f"{backend} cannot run {work[0]}")
    return runnable, tensors, backend


def _from_check(
    op: str, shape: Sequence[int] | None, width: int | None, dtype: torch.dtype | None, seed: int | None
) -> list[AnyCase]:
    """The cases of `check`, with what was given in place of what they have. fp32 first: where rounding is least, an
    explanation is clearest.
    """
    if width is not None and op in SUBJECTS:
        raise Refused(f"{op} has no --width")
    given: dict[str, Any] = {"W": width, "dtype": dtype, "seed": seed, **(_sizes(op, shape) if shape else {})}
    given = {name: value for name, value in given.items() if value is not None}
    found: dict[str, AnyCase] = {}
    for case in (case for case in CHECK if case.subject.name.split()[0] == op):
        changed: AnyCase = replace(case, **given)
        if not (isinstance(changed, ConvCase) and "cu_seqlens" in changed.places and changed.B > 1):  # that is one row
            found.setdefault(str(changed), changed)
    return sorted(found.values(), key=lambda case: case.dtype != torch.float32)


def _sizes(op: str, shape: Sequence[int]) -> dict[str, Any]:
    """The sizes of a case whose x has this shape."""
    fits = len(shape) >= 2 if op in SUBJECTS else len(shape) == (4 if op == "short_conv" else 3)
    if not fits or (op == "sinkhorn" and shape[-1] != shape[-2]):
        raise Refused(f"--shape of {op} must be {LAYOUTS.get(op, 'Tx…xNxD')}, got {'x'.join(map(str, shape))}")
    if op in SUBJECTS:
        return {"outer": tuple(shape[:-2]), "n": shape[-2], "D": shape[-1]}
    B, L, *n, D = shape
    return {"B": B, "L": L, "D": D, **({"n": n[0]} if n else {})}


def _load(op: str, path: Path, device: torch.device) -> Tensors:
    """The user's own tensors."""
    try:
        loaded = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise Refused(f"--inputs {path}: {error.strerror}") from error
    except Exception as error:  # pickle, zip and torch have many; some say nothing
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise Refused(f"--inputs {path}: torch.load cannot read it ({type(error).__name__} {reason})") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise Refused(f"--inputs {path}: must hold a dict of tensors by argument name")
    without = [str(name) for name, value in loaded.items() if value.is_meta or value.layout is not torch.strided]
    if without:
        raise Refused(f"--inputs {path}: {', '.join(without)} must be dense, with data (neither sparse nor meta)")
    required, optional = TAKES[op]
    missing = [name for name in required if name not in loaded]
    unknown = [str(name) for name in loaded if name not in (*required, *optional)]
    if missing or unknown:
        takes = ", ".join(required) + (f" and optionally {', '.join(optional)}" if optional else "")
        wrong = [f"{', '.join(missing)} missing"] * bool(missing) + [f"no such {', '.join(unknown)}"] * bool(unknown)
        raise Refused(f"--inputs {path}: {'; '.join(wrong)}. {op} takes {takes}")
    return loaded


def _cases_of(op: str, tensors: Tensors, seed: int) -> list[AnyCase]:
    """The cases that these tensors may be: activation and residual are not in a file, so both."""
    x = tensors[TAKES[op][0][0]]
    shape = [x.shape[0], 1, *x.shape[1:]] if op == "causal_conv1d_update" and x.dim() == 2 else x.shape
    try:
        sizes = _sizes(op, shape)
        W = tensors["weight"].shape[1] if "weight" in tensors else 1
        dilation = tensors["initial_state"].shape[-1] // max(1, W - 1) if "initial_state" in tensors else 1
    except (Refused, IndexError) as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise Refused(f"--inputs: {op} cannot have these shapes: {shapes}") from error
    if op in SUBJECTS:
        return [
            Case(SUBJECTS[op], dtype=x.dtype, gamma="gamma" in tensors, sigma=_sigma(op, tensors), seed=seed, **sizes)
        ]
    places = " ".join(name for name in ("seq_idx", "cu_seqlens") if name in tensors)
    places = f"{places} {'states' * ('initial_state' in tensors)}".strip()
    case = ConvCase(W=W, dtype=x.dtype, bias="bias" in tensors, places=places, dilation=dilation, seed=seed, **sizes)
    if op == "short_conv":
        return [replace(case, residual=residual) for residual in (True, False)]
    case = replace(case, residual="residual" in tensors, update=op == "causal_conv1d_update")
    return [replace(case, silu=silu) for silu in (True, False)]


def _sigma(op: str, tensors: Tensors) -> float:
    """The spread of the logits that Sinkhorn gets; the tolerance behind it depends on it."""
    if op == "sinkhorn":
        return round(float(tensors["logits"].double().std()), 3)
    if op not in (subject.name for subject in cases.MIXED):
        return Case.sigma
    x = tensors["x"]
    if op == cases.MHC_POST_PRE.name:
        x = mhc_ops.mhc_post(**{name: tensors[name] for name in cases.MHC_POST.inputs}, backend="reference")
    parameters: dict[str, Any] = {name: tensors[name] for name in cases.MHC_PRE.inputs[1:] if name in tensors}
    return round(float(mhc_ops.mhc_forward_pre(x, **parameters, backend="reference")[2].double().std()), 3)
