"""mhc-ops diagnose: its arguments, which cases they mean, what is printed and written, exit codes."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mhc_ops

from ...core import backend as backends
from ...testing import cases
from ...testing.cases import Case, Tensors
from ...testing.conv_cases import AnyCase, ConvCase
from .. import arguments, files, page, report, selection
from ..report import Refused
from . import Diagnosis, diagnose
from .outputs import map_of

OPS = tuple(dict.fromkeys(case.subject.name.split()[0] for case in selection.CHECK))
FORMS = {op: [subject for subject in cases.ALL if subject.name.split()[0] == op] for op in OPS}  # none of a convolution
# The tensors that an op takes; with a question mark those that a file may lack.
TAKES = {
    "causal_conv1d": "x weight bias? residual? seq_idx? cu_seqlens? initial_state?",
    "causal_conv1d_update": "x conv_state weight bias? cache_seqlens? conv_state_indices?",
    "short_conv": "x gamma weight",
}
for _op, _forms in FORMS.items():
    _every = dict.fromkeys(name for form in _forms for name in form.inputs if name != "link")  # which has no values
    _always = {name for name in _every if name != "gamma" and all(name in form.inputs for form in _forms)}
    TAKES.setdefault(_op, " ".join(name if name in _always else f"{name}?" for name in _every))
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
    try:
        work, tensors, backend = _work(options)
    except (RuntimeError, TypeError, ValueError) as error:  # a backend that cannot run, tensors that misfit
        raise Refused(str(error)) from error
    done: list[Diagnosis] = []
    for case in report.progress(work, "diagnose"):
        try:
            done.append(diagnose(case, backend, options.device, tensors))
        except Exception as error:  # an op that refuses its input says its name first; a CPU's memory has no type
            full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
            if not full and not str(error).startswith((options.op, "mhc_")):  # a boundary says mhc_enter
                raise
            raise Refused(str(error)) from error
        if not done[-1].passed:  # one cause is enough for one command
            break
    report.clear()
    last = done[-1]
    found = {
        "case": str(last.case),
        "backend": last.backend,
        "passed": last.passed,
        "findings": [asdict(finding) for finding in last.findings],
        "outputs": [{**asdict(row), "verdict": row.verdict} for row in last.rows],
        "details": [output.details() for output in last.wrong],
    }
    maps = {output.name: partial(map_of, output.excess, output.axes) for output in last.wrong}  # by columns
    if last.passed:
        print(_nothing_found(done))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        values = {**found, "maps": maps, "table": report.table, "width": width, "colour": sys.stdout.isatty()}
        print(page.render("diagnose.txt", **values, done=len(done), asked=len(work)), end="")
    if options.html:
        files.write(options.html, page.render("diagnose.html", **found, maps=maps))
    if options.json:
        content = {"op": options.op, "device": str(options.device), "versions": report.versions(), **found}
        files.write(options.json, json.dumps(report.finite(content), indent=1, allow_nan=False) + "\n")
    return 0 if last.passed else 1


def _nothing_found(done: Sequence[Diagnosis]) -> str:
    """In a line. Few elements of 16 bits are judged one by one, and may be further off in norm."""
    shares = [(row.relative_error / row.tolerance, row.output) for diagnosis in done for row in diagnosis.rows]
    share, output = max(pair for pair in shares if pair[0] <= 1)
    largest = f"the largest error is {share:.0%} of what is allowed, in {output}"
    op = done[-1].case.subject.name.split()[0]
    return f"{op}, {done[-1].backend}: nothing found in {len(done)} cases; {largest}"


def _work(options: argparse.Namespace) -> tuple[list[AnyCase], Tensors | None, str]:
    """The cases, the user's tensors in place of theirs where there are any, and the backend."""
    op, given = options.op, [name for name in ("shape", "width", "dtype") if getattr(options, name) is not None]
    if options.inputs and given:
        raise Refused(f"--{given[0]} and --inputs exclude each other")
    tensors = _load(op, options.inputs, options.device) if options.inputs else None
    work = _from_check(options) if tensors is None else _cases_of(op, tensors)
    if options.seed is not None:
        work = [replace(case, seed=options.seed) for case in work]
    backend = backends.choose(op, work[0].subject.family, options.backend, options.device)
    runnable = [case for case in work if case.runs_on(backend)]
    if not runnable:
        raise Refused(f"{backend} cannot run {work[0]}")
    return runnable, tensors, backend


def _from_check(options: argparse.Namespace) -> list[AnyCase]:
    """The cases of `check`, with what was given in place of what they have. fp32 first: where rounding is least, an
    explanation is clearest.
    """
    if options.width and FORMS[options.op]:
        raise Refused(f"{options.op} has no --width")
    changes = _sizes(options.op, options.shape) if options.shape else {}
    changes |= {"dtype": DTYPES[options.dtype]} if options.dtype else {}
    changes |= {"W": options.width} if options.width else {}
    own = [replace(case, **changes) for case in selection.CHECK if case.subject.name.split()[0] == options.op]
    possible = {str(case): case for case in own if "cu_seqlens" not in str(case) or case.sizes[0] == 1}  # one row
    return sorted(possible.values(), key=lambda case: case.dtype != torch.float32)


def _sizes(op: str, shape: Sequence[int]) -> dict[str, Any]:
    """The sizes of a case whose x has this shape."""
    names = "BLnD" if op == "short_conv" else "BLD"
    fits = len(shape) >= 2 if FORMS[op] else len(shape) == len(names)
    if not fits or (op == "sinkhorn" and shape[-1] != shape[-2]):
        raise Refused(f"--shape of {op} must be {LAYOUTS.get(op, 'Tx…xNxD')}, got {'x'.join(map(str, shape))}")
    if FORMS[op]:
        return {"outer": tuple(shape[:-2]), "n": shape[-2], "D": shape[-1]}
    return dict(zip(names, shape))


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
    names = TAKES[op].split()
    wrong = {
        "missing": [name for name in names if name not in loaded and not name.endswith("?")],
        "unknown": [str(name) for name in loaded if name not in names and f"{name}?" not in names],
        "not dense": [str(name) for name, t in loaded.items() if t.is_meta or t.layout is not torch.strided],
    }
    said = [f"{', '.join(which)} {what}" for what, which in wrong.items() if which]
    if said:
        raise Refused(f"--inputs {path}: {'; '.join(said)}. {op} takes {', '.join(names)}")
    if op == cases.MHC_NEXT.name:
        loaded["link"] = loaded["x"].new_zeros(()).expand_as(loaded["x"])
    return loaded


def _cases_of(op: str, tensors: Tensors) -> list[AnyCase]:
    """The cases that these tensors may be: activation and residual are not in a file, so both."""
    x = tensors["logits" if op == "sinkhorn" else "x"]
    shape = [x.shape[0], 1, *x.shape[1:]] if op == "causal_conv1d_update" and x.dim() == 2 else x.shape
    try:
        sizes = _sizes(op, shape) | {"dtype": x.dtype}
        W = tensors["weight"].shape[1] if "weight" in tensors else 1
        dilation = tensors["initial_state"].shape[-1] // max(1, W - 1) if "initial_state" in tensors else 1
    except (Refused, IndexError) as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise Refused(f"--inputs: {op} cannot have these shapes: {shapes}") from error
    if FORMS[op]:
        form = _form(op, tensors)
        return [Case(form, gamma="gamma" in tensors, sigma=_sigma(form, tensors), seed=0, **sizes)]
    places = [name for name in ("seq_idx", "cu_seqlens") if name in tensors] + ["states"] * ("initial_state" in tensors)
    sizes |= {"W": W, "dilation": dilation, "places": " ".join(places), "update": op == "causal_conv1d_update"}
    case = ConvCase(bias="bias" in tensors, residual="residual" in tensors, seed=0, **sizes)
    return [replace(case, residual=yes) if case.n else replace(case, silu=yes) for yes in (True, False)]


def _form(op: str, tensors: Tensors) -> cases.Subject:
    """The form of the op that takes these tensors; the identity has two sections, as alpha shows."""
    identity = "alpha" in tensors and tensors["alpha"].numel() == 2
    fitting = [form for form in FORMS[op] if set(form.inputs) - {"gamma"} == set(tensors) - {"gamma"}]
    named = [form for form in fitting if form.name.endswith("identity") == identity]
    if not fitting:
        raise Refused(f"--inputs: no form of {op} takes {', '.join(tensors)}")
    return (named or fitting)[0]


def _sigma(form: cases.Subject, tensors: Tensors) -> float:
    """The spread of the logits that Sinkhorn gets; the tolerance behind it depends on it."""
    if form is not cases.SINKHORN and form not in cases.MIXED:
        return Case.sigma
    of_pre: dict[str, Any] = {name: tensors[name] for name in cases.MHC_PRE.inputs if name in tensors}
    if "h_post" in tensors:
        of_post: dict[str, Any] = {name: tensors[name] for name in cases.MHC_POST.inputs}
        of_pre["x"] = mhc_ops.mhc_post(**of_post, backend="reference")
    logits = tensors.get("logits")
    logits = mhc_ops.mhc_forward_pre(**of_pre, backend="reference")[2] if logits is None else logits
    return round(float(logits.double().std()), 3)
