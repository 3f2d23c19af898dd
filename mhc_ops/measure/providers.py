"""Whom to time on a case: a backend's kernels, "eager", "torch.compile" or a peer; and how exact each of them is."""

import math
from dataclasses import replace
from functools import partial

import torch

from . import accuracy, peers
from .cases import Subject, Tensors
from .conv_cases import AnyCase
from .speed import Call

OF_TORCH = ("eager", "torch.compile")  # the reference, as it is and compiled


class Wrong(Exception):
    """A provider that does not compute the function is not timed."""


def check(case: AnyCase, provider: str, device: torch.device) -> list[accuracy.Row]:
    """Outputs and gradients against fp64 on few tokens, each provider held to its own precision."""
    if provider == "torch.compile":
        return []  # eager's formula; a compilation more for every case would cost more than all the rest
    peer = peers.by_name(provider)
    if peer is not None:
        return peers.measure(peer, case.smaller(), device) or []
    rows = accuracy.measure(case.smaller(), "reference" if provider == "eager" else provider, device)
    return [replace(row, backend=provider) for row in rows]


def refuse_if_wrong(provider: str, rows: list[accuracy.Row]) -> None:
    """But for eager, which is the formula itself in fewer bits: its errors are shown, and it is timed."""
    failed = [row for row in rows if not row.passed]
    if failed and provider != "eager":
        worst = max(failed, key=lambda row: (math.isnan(row.relative_error), row.relative_error))
        raise Wrong(
            f"{provider} is wrong, so it is not timed: {worst.output} of {worst.case} is off by "
            f"{worst.relative_error:.1e} (allowed {worst.tolerance:.0e}); wrong in {len(failed)} of {len(rows)} results"
        )


def worst_errors(subject: Subject, rows: list[accuracy.Row]) -> dict[str, float]:
    """By direction, the largest relative error: of the outputs, of the gradients, of all."""
    outputs = [r.relative_error for r in rows if r.output.removesuffix(peers.WITH_GRADIENTS) in subject.outputs]
    gradients = [r.relative_error for r in rows if r.output.removesuffix(peers.WITH_GRADIENTS) not in subject.outputs]
    found = {"forward": outputs, "backward": gradients, "both": outputs + gradients}
    return {direction: max(errors) for direction, errors in found.items() if errors}


def prepare(case: AnyCase, provider: str, tensors: Tensors) -> tuple[Tensors, Call] | None:
    """The provider's own tensors, and `call(**tensors)`; None where it lacks the op."""
    call = case.subject.call
    peer = peers.by_name(provider)
    if peer is not None:
        prepared = peer.prepare(case.subject.name, tensors)
        return None if prepared is None else (prepared.tensors, prepared.call)
    if provider == "torch.compile":
        torch.compiler.reset()
        call = torch.compile(call, dynamic=False, fullgraph=True)
    return tensors, partial(call, backend="reference" if provider in OF_TORCH else provider)
