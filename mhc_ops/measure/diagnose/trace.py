"""An op written out step by step in fp64, with a name for each step, so that one step can be done wrong on purpose.

A model is such a function; a hypothesis says which steps to do differently and, in a sentence, what that fault is.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cases import Tensors

Values = dict[str, Any]
Edit = Callable[[Any, Values], Any]  # a step's right value and all values before it -> the value it has instead


@dataclass(frozen=True)
class Hypothesis:
    """What is wrong, as a sentence, and the steps that are then different."""

    sentence: str
    edits: Mapping[str, Edit]


class _Reached(Exception):
    """The last step that was asked for is done."""


@dataclass
class Trace:
    """The values of a run by the names of its steps. A step is `value = at("name", value)`.

    Steps named "output: term" are the terms that add up to that output. The run ends with the step `last`.
    """

    edits: Mapping[str, Edit] = field(default_factory=dict)
    last: str | None = None
    values: Values = field(default_factory=dict)

    def __call__(self, name: str, value: Any) -> Any:
        if name in self.edits:
            value = self.edits[name](value, self.values)
        self.values[name] = value
        if name == self.last:
            raise _Reached
        return value

    def terms(self, output: str) -> Tensors:
        """The terms of an output, by what they are."""
        prefix = output + ": "
        return {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}

    def sum(self, output: str, terms: Mapping[str, Tensor]) -> Tensor:
        """A step that is a sum of named terms."""
        total = sum(self(f"{output}: {name}", term) for name, term in terms.items())
        return self(output, total)


# inputs by name, cotangents by the name of their output, a trace: runs the op forward and backward
Model = Callable[[Tensors, Tensors, Trace], None]


def run(
    model: Model, tensors: Tensors, cotangents: Tensors, edits: Mapping[str, Edit], last: str | None = None
) -> Trace:
    trace = Trace(edits, last)
    with torch.no_grad(), contextlib.suppress(_Reached):
        model(tensors, cotangents, trace)
    return trace


def always(value: Any) -> Edit:
    """This, whatever it should be."""
    return lambda right, values: value


def zero_from(cut: int, axis: int) -> Edit:
    """Nothing is read from index `cut` of an axis on."""

    def edit(value: Tensor, _: Values) -> Tensor:
        kept = value.clone()
        kept.narrow(axis, cut, value.shape[axis] - cut).zero_()
        return kept

    return edit


def cuts(size: int, smallest: int = 8) -> list[int]:
    """Where a kernel may stop: after its first block, or before a last one that is not full. Blocks: powers of two."""
    blocks = [1 << k for k in range(smallest.bit_length() - 1, size.bit_length()) if 1 << k < size]
    return sorted({cut for block in blocks for cut in (block, size // block * block) if cut < size})
