"""The hypotheses that every op has: a step reads only a part of a tensor.

They follow from the names of the steps: "x for h_mix" is x as the step h_mix reads it.
"""

import torch
from torch import Tensor

from .places import BLOCKED, index_words
from .trace import Edit, Hypothesis, Trace, cuts, zero_from

Axes = dict[str, dict[int, str]]  # the axes along which a tensor, by its name, may be cut


def partial_reads(trace: Trace, axes: Axes, together: tuple[tuple[str, ...], ...]) -> list[Hypothesis]:
    """Each tensor cut along each of its axes, in one step, in the steps that one kernel does together, in all steps."""
    reads = [
        name
        for name, value in trace.values.items()
        if " for " in name and name.split(" for ")[0] in axes and isinstance(value, Tensor)
    ]
    groups: list[tuple[str, ...]] = [(name,) for name in reads]
    groups += [group for group in together if len(group) > 1 and all(name in reads for name in group)]
    for tensor in dict.fromkeys(name.split(" for ")[0] for name in reads):
        group = tuple(name for name in reads if name.startswith(tensor + " for "))
        groups += [group] if len(group) > 1 and group not in groups else []
    return [hypothesis for group in groups for hypothesis in _cut(trace, axes, group)]


def _cut(trace: Trace, axes: Axes, group: tuple[str, ...]) -> list[Hypothesis]:
    tensor = group[0].split(" for ")[0]
    steps = " and ".join(", ".join(name.split(" for ")[1] for name in group).rsplit(", ", 1))
    shape = trace.values[group[0]].shape
    found = []
    for axis, word in axes[tensor].items():
        size = shape[axis]
        for cut in cuts(size) if word in BLOCKED else range(1, size):
            where = index_words(list(range(cut, size)), size, word, {})
            verb = "is" if cut == size - 1 else "are"
            sentence = f"{where} of {tensor} {verb} read as zero for {steps}"
            found.append(Hypothesis(sentence, dict.fromkeys(group, zero_from(cut, axis))))
    return found


def flat_reads(x: Tensor, group: tuple[str, ...]) -> list[Hypothesis]:
    """A block over the streams side by side ([nD] as one row) that is shorter than it."""
    n, D = x.shape[-2:]
    steps = " and ".join(name.split(" for ")[1] for name in group)
    found = []
    for cut in cuts(n * D):
        kept = (torch.arange(n * D, device=x.device) < cut).view(n, D)
        if cut % D:  # otherwise whole streams, which are cuts already
            sentence = f"of x as one row of {n * D}, only the first {cut} are read for {steps}"
            found.append(Hypothesis(sentence, dict.fromkeys(group, _times(kept))))
    return found


def _times(kept: Tensor) -> Edit:
    return lambda value, _: value * kept
