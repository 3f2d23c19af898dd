"""Random misuse: calls with an unusual or wrong argument, each rebuilt from a seed and its number.

Half of them are cases of `fuzz` whose tensors have another layout or kind, share memory, or are changed by hooks of
autograd. The others call a public function with any value in place of one argument. An accepted call is compared with
fp64 on plain copies, and where fp32 itself loses the result, with the formula in fp32. A refused call must raise an
error of ours, or the error of torch that the reference raises too. The calls run in a process of their own, which a
call may end or hold.
"""

import inspect
import math
import multiprocessing
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import mhc_ops

from . import accuracy, fuzz
from .cases import Tensors
from .conv_cases import AnyCase
from .fuzz import Outcome
from .unusual import HOOKS, KEEPING, LAYOUTS_AND_KINDS, OF_LAYOUT, calls, leaf, outputs, plain, small_case, values

SPAWN = multiprocessing.get_context("spawn")
LONGEST = 600.0  # seconds without an answer; in the interpreter a case takes up to 10 on an idle machine
_OPS = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
OURS = {*mhc_ops.__all__, *mhc_ops.guide.__all__, *(op for family, op in _OPS if family == mhc_ops.__name__)}
OF_AUTOGRAD = "Inference tensors cannot be saved for backward"
REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Misuse:
    """words: what is unusual. call(backend): outputs by name; exact(results): what they should be, None if the call
    must be refused."""

    words: str
    call: Callable[[str], Tensors]
    exact: Callable[[Tensors], dict[str, accuracy.Exact]] | None
    case: AnyCase | None = None
    is_near: Callable[[Tensors, accuracy.Row], bool] = lambda results, row: False


def run(
    seconds: float,
    device: torch.device | str,
    backends: Sequence[str],
    seed: int,
    progress: Callable[[int], None] = lambda number: None,
) -> Iterator[Outcome]:
    """Calls 0, 1, ... until the time is over; progress(number) before each. A call that ends or holds the process is an
    outcome, and another process goes on."""
    end, drawn = time.monotonic() + seconds, partial(misuse_of, seed, device=torch.device(device))
    ours, child = _started(drawn)
    for number in count():
        progress(number)
        backend = backends[number % len(backends)]
        ours.send((number, backend))
        try:
            detail = ours.recv() if ours.poll(LONGEST) else f"no answer in {LONGEST:g} s"
        except (EOFError, ConnectionResetError):
            child.join()
            detail = f"ended the process with {child.exitcode}"
        words = drawn(number, backend).words if detail else ""
        yield Outcome(f"{seed}:{number} {words}", backend, not detail, detail)
        if time.monotonic() >= end:
            break
        if detail.startswith(("no answer", "ended")):
            child.kill()
            ours, child = _started(drawn)
    child.kill()


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
        return "" if _is_proper(error, drawn) else f"refused by {_said(error)}"
    if any(result is None or result.is_meta for result in results.values()):  # the reference computes shapes there
        return ""
    if drawn.exact is None:
        return "accepted"
    try:
        exact = drawn.exact(results)
        stored = results if drawn.case is None else {n: accuracy.as_computed(drawn.case, results[n]) for n in results}
        rows = [accuracy.judge(drawn.case, backend, name, stored[name], exact[name]) for name in results]
    except Exception as error:
        return f"accepted, but the reference says {_said(error)}"
    wrong = [row for row in rows if not row.passed and exact[row.output].value.isfinite().all()]
    wrong = [row for row in wrong if not drawn.is_near(results, row)]
    return "; ".join(f"{row.output} off by {row.relative_error:.1e} (allowed {row.tolerance:.0e})" for row in wrong)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


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
        return _said(of_reference) == _said(error)
    return False


def misuse_of(seed: int, number: int, backend: str, device: torch.device) -> Misuse:
    draw = random.Random(f"{seed}:{number}")
    if draw.random() < 0.5:
        return _any_value(draw, device)
    case = small_case(draw, seed, number, backend, device)
    how = draw.choice((_other_tensor, _other_tensor, _shared_memory, _hooks))
    return how(draw, case, device, backend)


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

    def exact(results: Tensors) -> dict[str, accuracy.Exact]:
        return accuracy.truth(subject, copies, cotangents, results)

    def is_near(results: Tensors, row: accuracy.Row) -> bool:
        # Equal rows of an expanded phi make a whole dx cancel.
        if fuzz.within_reach(case, accuracy.Ran(copies, cotangents, results), row, most=math.inf):
            return True
        # phi within x makes z large. 1 − σ(z) is 0 in fp32 from z = 17 on, and so is the gradient of z.
        in_fp32 = accuracy.truth(subject, copies, cotangents, results, torch.float32)[row.output].value.double()
        result = accuracy.as_computed(case, results[row.output])
        return accuracy.judge(case, row.backend, row.output, result, accuracy.Exact(in_fp32)).passed

    refused = any(copy is None for copy in copies.values())
    return Misuse(f"{case}: {words}", call, None if refused else exact, case, is_near)


def _other_tensor(draw: random.Random, case: AnyCase, device: torch.device, backend: str) -> Misuse:
    """One or two tensors have another layout or kind."""
    given: dict[str, Any] = dict(case.inputs(device))
    words = []
    # The truth of a boundary is made of tensors only; an x that is alone may be on any device.
    kinds = [
        k for k in LAYOUTS_AND_KINDS if k in OF_LAYOUT or ("link" not in given and (k != "meta" or len(given) > 1))
    ]
    names = [name for name in given if name != "link"]
    for name in draw.sample(names, draw.choice((1, 1, 2)) if len(names) > 1 else 1):
        kind = draw.choice(kinds)
        given[name] = LAYOUTS_AND_KINDS[kind](given[name])
        words.append(f"{name} {kind}")
    return _of_case(" ".join(words), case, given)


def _shared_memory(draw: random.Random, case: AnyCase, device: torch.device, backend: str) -> Misuse:
    """One tensor is another, or lies within it."""
    given: dict[str, Any] = dict(case.inputs(device))
    names = [name for name in given if name != "link"]
    pairs = [(a, b) for a in names for b in names if a != b and given[a].dtype == given[b].dtype]
    pairs = [(a, b) for a, b in pairs if 0 < given[b].numel() <= given[a].numel()]
    if not pairs:
        return _other_tensor(draw, case, device, backend)
    a, b = draw.choice(pairs)
    given[a] = given[a].contiguous()
    given[b] = (
        given[a] if given[a].shape == given[b].shape else given[a].flatten()[: given[b].numel()].view_as(given[b])
    )
    return _of_case(f"{b} within {a}", case, given)


def _hooks(draw: random.Random, case: AnyCase, device: torch.device, backend: str) -> Misuse:
    """torch itself believes what hooks return, so the reference gets only hooks that keep the values."""
    name, hook = draw.choice(list((KEEPING if backend == "reference" else HOOKS).items()))
    return _of_case(f"hooks: {name}", case, dict(case.inputs(device)), hook)


def _any_value(draw: random.Random, device: torch.device) -> Misuse:
    """A public function with any value in place of one argument or option."""
    name, given = draw.choice(list(calls(device).items()))
    function = getattr(mhc_ops, name)
    named = [p.name for p in inspect.signature(function).parameters.values() if "VAR" not in p.kind.name]
    argument = draw.choice(sorted({*given, *named}))
    words, value = draw.choice(list(values().items()))
    arguments = {**given, argument: value}
    of_any_backend = getattr(mhc_ops, re.sub(r"_(triton|tilelang)(_optimized)?$", "", name))

    def exact(results: Tensors) -> dict[str, accuracy.Exact]:
        found = outputs(of_any_backend, arguments, "reference", torch.float64)
        return {name: accuracy.Exact(output.double()) for name, output in found.items()}

    return Misuse(f"{name}: {argument} {words}", partial(outputs, function, arguments), exact)
