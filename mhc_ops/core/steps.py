"""A computation as named steps, so that each can be looked at, and done differently, by itself.

A step has the name of what it computes, and its arguments have the names of what it reads:

    steps_of(m=lambda h_mix, inv_rms: h_mix * inv_rms[..., None], z=lambda m, alphas, bias: m * alphas + bias)
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Values = dict[str, Any]
Change = Callable[[Any, Values], Any]  # the right value and all values before it -> the value to take instead
UNCHANGED: Mapping[str, Change] = {}


@dataclass(frozen=True)
class Step:
    name: str
    reads: tuple[str, ...]
    compute: Callable[..., Any]
    is_sum: bool = False  # of what it reads


Steps = tuple[Step, ...]


def steps_of(**functions: Callable[..., Any]) -> Steps:
    return tuple(Step(name, tuple(inspect.signature(f).parameters), f) for name, f in functions.items())


def total(name: str, *terms: str) -> Step:
    """The sum of these values, in this order."""
    return Step(name, terms, lambda first, *others: sum(others, first), is_sum=True)


def renamed(steps: Sequence[Step], **names: str) -> Steps:
    """The same steps between values that have other names: renamed(steps, x="x_next") reads x_next for x."""

    def new(step: Step) -> Step:
        reads = tuple(names.get(read, read) for read in step.reads)
        return replace(step, name=names.get(step.name, step.name), reads=reads)

    return tuple(map(new, steps))


def evaluate(
    steps: Sequence[Step], inputs: Values, changes: Mapping[str, Change] = UNCHANGED, last: str | None = None
) -> Values:
    """Every value by its name, up to the step `last`.

    changes: by the name of an input or a step ("h_mix"), or of what one step reads ("x for h_mix").
    """
    values: Values = {}

    def taken(name: str, value: Any) -> Any:
        return changes[name](value, values) if name in changes else value

    for name, value in inputs.items():
        values[name] = taken(name, value)
    for step in steps:
        read = [taken(f"{name} for {step.name}", values[name]) for name in step.reads]
        values[step.name] = taken(step.name, step.compute(*read))
        if step.name == last:
            break
    return values
