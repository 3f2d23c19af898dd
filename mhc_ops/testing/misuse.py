"""Random misuse (docs/measure.md, "check"): each call is rebuilt from a seed and its number."""

import inspect
import multiprocessing
import os
import random
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import mhc_ops

from . import accuracy, fuzz
from .cases import Case, Tensors
from .conv_cases import AnyCase, runs
from .fuzz import Outcome, Progress, said
from .unusual import HOOKS, KEEPING, LAYOUTS_AND_KINDS, OF_LAYOUT, PUBLIC, calls, leaf, outputs, plain, values

SPAWN = multiprocessing.get_context("spawn")
LONGEST = 600.0  # seconds without an answer; in the interpreter a case takes up to 10 on an idle machine
_OPS = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
OURS = {*PUBLIC, *(op for family, op in _OPS if family == mhc_ops.__name__)}
OF_AUTOGRAD = "Inference tensors cannot be saved for backward"
REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)


class Misuse(NamedTuple):
    """A call and what it should return."""

    words: str  # what is unusual
    call: Callable[[str], Tensors]  # of the backend: outputs by name
    exact: Callable[[Tensors, torch.dtype], dict[str, accuracy.Exact]] | None  # by the formula; None: to be refused
    case: AnyCase | None = None


def run(
    seconds: float, device: torch.device | str, backends: Sequence[str], seed: int, progress: Progress = lambda _: None
) -> Iterator[Outcome]:
    """A call that ends or holds the process is an outcome, and another process goes on."""
    drawn, child = partial(misuse_of, seed, device=torch.device(device)), None
    for number in fuzz.numbers(seconds, progress):
        if child is None or not child.is_alive():
            ours, child = _started(drawn)
        backend = backends[number % len(backends)]
        ours.send((number, backend))
        try:
            detail = ours.recv() if ours.poll(LONGEST) else f"no answer in {LONGEST:g} s"
        except (EOFError, ConnectionResetError):
            child.join()
            detail = f"ended the process with {child.exitcode}"
        if detail.startswith("no answer"):
            child.kill()
            child.join()
        words = drawn(number, backend).words if detail else ""
        yield Outcome(f"{seed}:{number} {words}", backend, not detail, detail)


def _started(drawn: Callable[[int, str], Misuse]) -> tuple[Connection, Any]:
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=answer, args=(theirs, drawn), daemon=True)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process; the other ends with it
    child.start()
    signal.signal(signal.SIGINT, before)
    theirs.close()
    return ours, child


def answer(calls: Connection, drawn: Callable[[int, str], Misuse]) -> None:
    """The process of its own."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    warnings.simplefilter("ignore")
    while True:
        number, backend = calls.recv()
        calls.send(examine(drawn(number, backend), backend))


def examine(drawn: Misuse, backend: str) -> str:
    """What is off; "" if nothing is."""
    try:
        results = drawn.call(backend)
    except Exception as error:
        return "" if _is_proper(error, drawn) else f"refused by {said(error)}"
    if any(result is None or result.is_meta for result in results.values()):  # the reference computes shapes there
        return ""
    if drawn.exact is None:
        return "accepted"
    judged = partial(accuracy.judge, drawn.case, backend)
    try:
        exact = drawn.exact(results, torch.float64)
        rows = [judged(name, results[name], exact[name]) for name in results]
        wrong = [row for row in rows if not row.passed and exact[row.output].value.isfinite().all()]
        if wrong:  # in fp32 the formula itself may lose a result, as 1 − σ(30)
            near = drawn.exact(results, torch.float32)
            wrong = [row for row in wrong if not judged(row.output, results[row.output], near[row.output]).passed]
    except Exception as error:
        return f"accepted, but the reference says {said(error)}"
    return "; ".join(map(fuzz.off_by, wrong))


def _is_proper(error: Exception, drawn: Misuse) -> bool:
    """Our errors begin with the function that was called. The reference must raise any other error too, except those
    of autograd, since it keeps less for a backward."""
    if type(error) not in REFUSALS:
        return False
    begin = re.match(r"(\w+)(\.__init__)?(\(\))?[: ]", str(error))
    if (begin and begin[1].removesuffix("_") in OURS) or str(error).startswith(OF_AUTOGRAD):
        return True
    try:
        drawn.call("reference")
    except Exception as of_reference:
        return said(of_reference) == said(error)
    return False


def misuse_of(seed: int, number: int, backend: str, device: torch.device) -> Misuse:
    draw = random.Random(f"{seed}:{number}")
    if draw.random() < 0.5:
        return _any_value(draw, device)
    case = _small_case(draw, seed, number, backend, device)
    change = draw.choice((_other_tensors, _other_tensors, _shared_memory, None))
    given = dict[str, Any](case.inputs(device))
    if change:
        return _of_case(change(draw, given), case, given)
    # torch itself believes what hooks return, so the reference gets only hooks that keep the values.
    name, hook = draw.choice(list((KEEPING if backend == "reference" else HOOKS).items()))
    return _of_case(f"hooks: {name}", case, given, hook)


def _small_case(draw: random.Random, seed: int, number: int, backend: str, device: torch.device) -> AnyCase:
    """A case of usual scales: only the call is unusual."""
    numbers = count(number * 1000)
    while True:
        case: Any = fuzz.case_of(seed, next(numbers), small=True)
        D = draw.randint(3, 8)
        if isinstance(case, Case):
            sizes: Any = {"outer": (draw.randint(1, 3),), "n": min(case.n, 3), "D": case.D and D, "sigma": Case.sigma}
        else:
            sizes = {"B": 1, "L": draw.randint(1, 5), "D": D, "n": min(case.n, 2), "W": min(case.W, 4)}
        small = replace(case, scale=1.0, **sizes)
        if runs(small, backend, device):
            return small


def _of_case(words: str, case: AnyCase, given: dict[str, Any], hook: Any = None) -> Misuse:
    """The case on these tensors, with gradients. hook: on what autograd keeps."""
    subject, cotangents = case.subject, list[Tensor | None]()
    copies: dict[str, Any] = {name: plain(value) for name, value in given.items()}

    def call(backend: str) -> Tensors:
        leaves = {name: leaf(value) if subject.differentiable else value for name, value in given.items()}
        with saved_tensors_hooks(lambda tensor: tensor, hook) if hook else nullcontext():
            outputs = subject.run(leaves, backend)
        cotangents[:] = accuracy.random_cotangents(subject, outputs, case.seed, case.unused)
        results = {name: plain(output) for name, output in outputs.items()}
        wanted = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.requires_grad}
        found = accuracy.gradients_of(outputs, wanted, cotangents)
        return results | {name: plain(gradient) for name, gradient in found.items()}

    def exact(results: Tensors, dtype: torch.dtype) -> dict[str, accuracy.Exact]:
        found = accuracy.truth(subject, copies, cotangents, results, dtype)
        ran = accuracy.Ran(copies, cotangents, results)
        # Equal rows of an expanded phi make a whole dx cancel.
        return {name: e._replace(terms=[*e.terms, partial(fuzz.reach, case, ran, name)]) for name, e in found.items()}

    refused = any(copy is None for copy in copies.values())
    return Misuse(f"{case}: {words}", call, None if refused else exact, case)


def _other_tensors(draw: random.Random, given: dict[str, Any]) -> str:
    """One or two tensors have another layout or kind."""
    names, words = [name for name in given if name != "link"], []
    # The truth of a boundary is made of tensors only; an x that is alone may be on any device.
    of_any = "link" not in given
    kinds = [k for k in LAYOUTS_AND_KINDS if k in OF_LAYOUT or (of_any and (k != "meta" or len(given) > 1))]
    for name in draw.sample(names, draw.choice((1, 1, 2)) if len(names) > 1 else 1):
        kind = draw.choice(kinds)
        given[name] = LAYOUTS_AND_KINDS[kind](given[name])
        words.append(f"{name} {kind}")
    return " ".join(words)


def _shared_memory(draw: random.Random, given: dict[str, Any]) -> str:
    """One tensor is another, or lies within it."""
    names = [name for name in given if name != "link"]
    pairs = [(a, b) for a in names for b in names if a != b and given[a].dtype == given[b].dtype]
    pairs = [(a, b) for a, b in pairs if 0 < given[b].numel() <= given[a].numel()]
    if not pairs:
        return _other_tensors(draw, given)
    a, b = draw.choice(pairs)
    given[a] = given[a].contiguous()
    within = given[a].flatten()[: given[b].numel()].view_as(given[b])
    given[b] = given[a] if given[a].shape == given[b].shape else within
    return f"{b} within {a}"


def _any_value(draw: random.Random, device: torch.device) -> Misuse:
    """A public function with any value in place of one argument or option."""
    name, given = draw.choice(list(calls(device).items()))
    function = getattr(mhc_ops, name)
    named = [p.name for p in inspect.signature(function).parameters.values() if "VAR" not in p.kind.name]
    argument = draw.choice(sorted({*given, *named}))
    words, value = draw.choice(list(values().items()))
    arguments = {**given, argument: value}
    of_any_backend = getattr(mhc_ops, re.sub(r"_(triton|tilelang)(_optimized)?$", "", name))

    def exact(results: Tensors, dtype: torch.dtype) -> dict[str, accuracy.Exact]:
        found = outputs(of_any_backend, arguments, "reference", dtype)
        return {name: accuracy.Exact(output.double()) for name, output in found.items()}

    return Misuse(f"{name}: {argument} {words}", partial(outputs, function, arguments), exact)
