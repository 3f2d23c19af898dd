"""A computation as named steps. Each can be inspected and changed by itself.

A step has the name of the value it computes; its arguments have the names of the values it reads:

    steps_of(m=lambda h_mix, inv_rms: h_mix * inv_rms[..., None], z=lambda m, alphas, bias: m * alphas + bias)
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

Values = dict[str, Any]
Change = Callable[[Any, Values], Any]  # the right value and all values before it -> the value to take instead
UNCHANGED: Mapping[str, Change] = {}


@dataclass(frozen=True)
class Step:
    name: str
    reads: tuple[str, ...]
    compute: Callable[..., Any]
    is_sum: bool = False  # it adds what it reads

    def names(self) -> set[str]:
        """The names by which a change reaches this step."""
        return {self.name, *self.reads, *(f"{read} for {self.name}" for read in self.reads)}


Steps = tuple[Step, ...]


def steps_of(**functions: Callable[..., Any]) -> Steps:
    return tuple(Step(name, tuple(inspect.signature(f).parameters), f) for name, f in functions.items())


def total(name: str, *terms: str) -> Step:
    """A step that adds these values, in this order."""
    return Step(name, terms, lambda first, *others: sum(others, first), is_sum=True)


def renamed(steps: Sequence[Step], **names: str) -> Steps:
    """The same steps on values with other names: renamed(steps, x="x_next") reads x_next for x."""

    def new(step: Step) -> Step:
        reads = tuple(names.get(read, read) for read in step.reads)
        return replace(step, name=names.get(step.name, step.name), reads=reads)

    return tuple(map(new, steps))


def leading_to(steps: Sequence[Step], last: str) -> Steps:
    """The steps that a value is computed from, its own included."""
    needed, found = {last}, []
    for step in reversed(steps):
        if step.name in needed:
            needed |= set(step.reads)
            found.append(step)
    return tuple(reversed(found))


def evaluate(
    steps: Sequence[Step], inputs: Values, changes: Mapping[str, Change] = UNCHANGED, right: Values | None = None
) -> Values:
    """Every value by its name.

    changes: by the name of an input or a step ("h_mix"), or of what one step reads ("x for h_mix").
    right: all values without changes. A value that no change reaches is taken from there.
    """
    values: Values = {}
    reached = set(changes)

    def taken(name: str, value: Any) -> Any:
        return changes[name](value, values) if name in changes else value

    for name, value in inputs.items():
        values[name] = taken(name, value)
    for step in steps:
        if right is not None and reached.isdisjoint(step.names()):
            values[step.name] = right[step.name]
        else:
            read = [taken(f"{name} for {step.name}", values[name]) for name in step.reads]
            values[step.name] = taken(step.name, step.compute(*read))
            reached.add(step.name)
    return values


def gradients(steps: Sequence[Step], wanted: Collection[str], outputs: Collection[str]) -> Steps:
    """The steps from "cotangent of" each output to d<value> of every wanted value, last read first.

    dx is the sum of one term per step that reads x, "dx via h_mix", which autograd computes.
    """
    depends, terms = set(wanted), {name: [f"cotangent of {name}"] for name in outputs}
    for step in steps:
        depends |= {step.name} if depends.intersection(step.reads) else set()
    found: list[Step] = []
    arriving: dict[str, str] = {}  # the gradient of each step; a summand has that of its sum
    for step in reversed(steps):
        if step.name in terms:
            arriving[step.name] = f"d{step.name}"
            found.append(total(f"d{step.name}", *terms[step.name]))
        if step.is_sum:
            arriving |= dict.fromkeys(step.reads, f"d{step.name}")
        elif step.name in arriving:
            for k, read in enumerate(step.reads):
                if read in depends:
                    term = f"d{read} via {step.name}"
                    terms.setdefault(read, []).append(term)
                    found.append(Step(term, (*step.reads, arriving[step.name]), partial(_backward, step.compute, k)))
    order = dict.fromkeys(read for step in steps for read in step.reads)
    return (*found, *(total(f"d{name}", *terms[name]) for name in reversed(order) if name in wanted))


def _backward(compute: Callable[..., torch.Tensor], k: int, *reads: Any) -> torch.Tensor:
    """The gradient of a step's k-th argument. The last of `reads` is the gradient of the step's own value."""
    *arguments, gradient = reads
    with torch.enable_grad():
        leaf = arguments[k] = arguments[k].detach().requires_grad_()
        return torch.autograd.grad(compute(*arguments), leaf, gradient)[0]


class Computation:
    """Steps on their inputs, to be run again with changes. right: all values without changes."""

    def __init__(self, steps: Steps, inputs: Values) -> None:
        self.steps, self.inputs = steps, inputs
        self.sums = {step.name: step.reads for step in steps if step.is_sum}
        with torch.no_grad():
            self.right = evaluate(steps, inputs)

    def run(self, changes: Mapping[str, Change]) -> Values:
        with torch.no_grad():
            return evaluate(self.steps, self.inputs, changes, self.right)

    def value(self, name: str, changes: Mapping[str, Change]) -> torch.Tensor:
        """One value. Only the steps that lead to it run."""
        with torch.no_grad():
            return evaluate(leading_to(self.steps, name), self.inputs, changes, self.right)[name]

    def depends(self, step: Step, read: str) -> bool:
        """Whether the step's value depends on `read`: a term of a gradient reads all that its step does."""
        return not torch.equal(self.value(step.name, {f"{read} for {step.name}": zeros}), self.right[step.name])

    def sum_of(self, step: str) -> str:
        """The sum that this step is a term of, else the step."""
        return next((name for name, terms in self.sums.items() if step in terms), step)


# Changes.


def always(value: object) -> Change:
    return lambda right, values: value


def ones(right: torch.Tensor, values: Values) -> torch.Tensor:
    return torch.ones_like(right)


def zeros(right: torch.Tensor, values: Values) -> torch.Tensor:
    return torch.zeros_like(right)


def at(index: Any, change: Change, shape: Sequence[int] = ()) -> Change:
    """Applies the change at this index alone. shape: the value's shape for the index, where it differs."""

    def changed(value: torch.Tensor, values: Values) -> torch.Tensor:
        kept = value.reshape(*(shape or value.shape)).clone()
        kept[index] = change(value, values).reshape(kept.shape)[index]
        return kept.reshape(value.shape)

    return changed
