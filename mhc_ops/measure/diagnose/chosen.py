"""Which cases a command line means: those of `check`, with what was given in place of what they have; or a file."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mhc_ops

from .. import cases
from ..cases import Case, Tensors
from ..conv_cases import AnyCase, ConvCase
from ..report import Refused
from ..selection import CHECK

OPS = tuple(dict.fromkeys(case.subject.name.split()[0] for case in CHECK))
OPTIONAL = {
    "causal_conv1d": ("bias", "residual", "seq_idx", "cu_seqlens", "initial_state"),
    "causal_conv1d_update": ("bias", "cache_seqlens", "conv_state_indices"),
}
REQUIRED = {
    "causal_conv1d": ("x", "weight"),
    "causal_conv1d_update": ("x", "conv_state", "weight"),
    "short_conv": ("x", "gamma", "weight"),
}
LAYOUTS = {"sinkhorn": "TxNxN", "causal_conv1d": "BxLxD", "causal_conv1d_update": "BxLxD", "short_conv": "BxLxNxD"}


def from_check(
    op: str, shape: Sequence[int] | None, width: int | None, dtype: torch.dtype | None, seed: int | None
) -> list[AnyCase]:
    """fp32 first: where rounding is least, an explanation is clearest."""
    found: dict[str, AnyCase] = {}
    for case in CHECK:
        if case.subject.name.split()[0] != op:
            continue
        changes: dict[str, Any] = {} if shape is None else sizes(op, case, shape)
        changes |= {"dtype": dtype} if dtype is not None else {}
        changes |= {"seed": seed} if seed is not None else {}
        if width is not None:
            if not isinstance(case, ConvCase):
                raise Refused(f"{op} has no --width")
            changes["W"] = width
        changed: AnyCase = replace(case, **changes)
        packed = isinstance(changed, ConvCase) and "cu_seqlens" in changed.places and changed.B > 1
        if not packed:  # packed sequences are one row
            found.setdefault(str(changed), changed)
    return sorted(found.values(), key=lambda case: case.dtype != torch.float32)


def sizes(op: str, case: AnyCase, shape: Sequence[int]) -> dict[str, Any]:
    layout = LAYOUTS.get(op, "Tx…xNxD")
    if isinstance(case, Case):
        if len(shape) < 2 or (op == "sinkhorn" and shape[-1] != shape[-2]):
            raise Refused(f"--shape of {op} must be {layout}, got {'x'.join(map(str, shape))}")
        return {"outer": tuple(shape[:-2]), "n": shape[-2], "D": shape[-1]}
    if len(shape) != (4 if op == "short_conv" else 3):
        raise Refused(f"--shape of {op} must be {layout}, got {'x'.join(map(str, shape))}")
    B, L, *n, D = shape
    return {"B": B, "L": L, "D": D, **({"n": n[0]} if n else {})}


def from_file(op: str, path: Path, seed: int, device: torch.device) -> tuple[list[AnyCase], Tensors]:
    """The user's own tensors, and the cases they may be: activation and residual are not in the file, so both."""
    try:
        loaded = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise Refused(f"--inputs {path}: {error.strerror}") from error
    except Exception as error:  # pickle, zip and torch have many; some say nothing
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise Refused(f"--inputs {path}: torch.load cannot read it ({type(error).__name__} {reason})") from error
    subject = next(subject for subject in cases.SUBJECTS if subject.name == op) if op not in REQUIRED else None
    optional = OPTIONAL.get(op, () if subject is None or "gamma" not in subject.inputs else ("gamma",))
    required = tuple(name for name in subject.inputs if name not in optional) if subject else REQUIRED[op]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise Refused(f"--inputs {path}: must hold a dict of tensors by argument name")
    without = [str(name) for name, value in loaded.items() if value.is_meta or value.layout is not torch.strided]
    if without:
        raise Refused(f"--inputs {path}: {', '.join(without)} must be dense, with data (neither sparse nor meta)")
    missing = [name for name in required if name not in loaded]
    unknown = [str(name) for name in loaded if name not in (*required, *optional)]
    if missing or unknown:
        takes = ", ".join(required) + (f" and optionally {', '.join(optional)}" if optional else "")
        wrong = [f"{', '.join(missing)} missing"] * bool(missing) + [f"no such {', '.join(unknown)}"] * bool(unknown)
        raise Refused(f"--inputs {path}: {'; '.join(wrong)}. {op} takes {takes}")
    return _cases_of(op, loaded, seed), loaded


def _cases_of(op: str, tensors: Tensors, seed: int) -> list[AnyCase]:
    try:
        if op not in REQUIRED:
            subject = next(subject for subject in cases.SUBJECTS if subject.name == op)
            x = tensors[subject.inputs[0]]
            *outer, n, D = x.shape
            return [
                Case(subject, tuple(outer), n, D, x.dtype, "gamma" in tensors, sigma=_sigma(op, tensors), seed=seed)
            ]
        x, weight = tensors["x"], tensors["weight"]
        B, L, *n_and_D = x.shape if op != "causal_conv1d_update" or x.dim() == 3 else (x.shape[0], 1, x.shape[1])
        D, W = n_and_D[-1], weight.shape[1]
        dilation = tensors["initial_state"].shape[-1] // max(1, W - 1) if "initial_state" in tensors else 1
    except (ValueError, IndexError) as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise Refused(f"--inputs: {op} cannot have these shapes: {shapes}") from error
    places = " ".join(name for name in ("seq_idx", "cu_seqlens") if name in tensors)
    places += " states" * ("initial_state" in tensors)
    case = ConvCase(B, L, D, W, x.dtype, bias="bias" in tensors, places=places.strip(), dilation=dilation, seed=seed)
    if op == "short_conv":
        return [replace(case, n=n_and_D[0], residual=residual) for residual in (True, False)]
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
