"""Random cases (docs/measure.md, "check"): each is rebuilt from a seed and its number."""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import accuracy, cases
from .cases import LAYOUTS, Case, Subject, Tensors
from .conv_cases import FINAL, PLACES, AnyCase, ConvCase, runs

Progress = Callable[[int], object]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PARAMETERS = (*FLOATS, torch.float32, torch.float64)
SCALES = (1e-3, 0.1, 1.0, 30.0, 1e3)
EPSILONS = (0.0, 1e-6, 1e-3)
MOVES = 8
ALIKE = 4  # cases in a row that share what kernels are compiled for, which on a GPU takes longer than all the rest
A_FEW = 16
SHORTEST_NORM = 3  # channels: a norm over one or two leaves almost nothing to differentiate
LARGEST_IN_FP16 = 30.0  # scale of x where gradients are stored in fp16, which ends at 65504
ROWS = ("x", "y", "residual", "seq_idx")  # of a convolution
PER_TOKEN = ("x", "h_out", "h_post", "h_res", "logits", "link", "h_pre", "read")
# Tokens: kernels change at 64 and at about 256 and 512. Interpreted, most are few.
BATCHES, BATCHES_ON_CPU = (9, 70, 300, 600), (9, 9, 9, 70)
SHARES = (1, 2, 3, 7, 63, 65, 257)  # of a batch
# A size that takes Hopper's kernels for boundaries. Their backward adds in another order: gradients are not compared.
FILLED = {"n": 4, "D": 1024, "dtype": torch.bfloat16, "outer": (4352,)}
OFTEN = (*(subject for subject in cases.SUBJECTS if subject is not cases.SINKHORN), cases.MHC_NEXT, *cases.NORMED)
MHC = (*OFTEN, *OFTEN, *cases.VARIANTS, cases.MHC_MAPS, cases.MHC_READ, cases.SINKHORN)
CONV = ("causal_conv1d", "causal_conv1d", "causal_conv1d", "causal_conv1d_update", "short_conv", "short_conv")


class Outcome(NamedTuple):
    """One case on one backend. detail: what is off; "" if nothing is."""

    case: str
    backend: str
    passed: bool
    detail: str


def numbers(seconds: float, progress: Progress) -> Iterator[int]:
    """0, 1, ... until the time is over; progress(number) before each."""
    end = time.monotonic() + seconds
    for number in takewhile(lambda number: time.monotonic() < end, count()):
        progress(number)
        yield number


def run(
    seconds: float, device: torch.device | str, backends: Sequence[str], seed: int, progress: Progress = lambda _: None
) -> Iterator[Outcome]:
    place = torch.device(device)
    for number in numbers(seconds, progress):
        case = case_of(seed, number, small=place.type == "cpu")
        for backend in backends:
            if runs(case, backend, place):
                detail = examine(case, backend, place)
                yield Outcome(f"{seed}:{number} {case}", backend, not detail, detail)


def examine(case: AnyCase, backend: str, device: torch.device) -> str:
    """What is off; "" if nothing is. A crash is a finding, and the next case runs."""
    wrong, where = list[str](), ""
    try:
        ran = accuracy.run_case(case, backend, device)
        again = accuracy.run(case.subject, ran.tensors, backend, ran.cotangents)
        rows = [row for row in accuracy.judge_all(case, backend, ran) if not row.passed]
        wrong += [off_by(row) for row in rows if not within_reach(case, ran, row)]
        if backend != "reference":  # torch adds indexed gradients in any order on a GPU
            others = [name for name in again if differ(ran.results[name], again[name])]
            wrong += [f"{name} has other bits in a second run" for name in others]
            where = "in another batch: "
            wrong += [f"{name} has other bits in another batch" for name in in_any_batch(case, backend, device)]
    except Exception as error:
        wrong.append(where + said(error))
    return "; ".join(wrong)


def off_by(row: accuracy.Row) -> str:
    return f"{row.output} off by {row.relative_error:.1e} (allowed {row.tolerance:.0e})"


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def in_any_batch(case: AnyCase, backend: str, device: torch.device) -> list[str]:
    """Outputs, and gradients of what is not a parameter, whose bits depend on what else is in the batch."""
    draw, filled, wrong = random.Random(case.seed), False, set[str]()
    if isinstance(case, Case):
        T = draw.choice(BATCHES_ON_CPU if device.type == "cpu" else BATCHES)
        filled = device.type != "cpu" and case.D > 0 and draw.random() < 1 / 8
        case = replace(case, **(FILLED if filled else {"outer": (T,)}))
    whole = accuracy.run_case(case, backend, device, differentiated=not filled)

    def alone(part: dict[str, Any], differentiated: bool = True, **others: Tensor | None) -> Tensors:
        """Runs these parts of the inputs, others in place of theirs, and compares the same parts of the outputs."""
        some = {name: tensor[part.get(name, ...)] for name, tensor in whole.tensors.items()} | others
        cotangents = zip(case.subject.differentiable, whole.cotangents if differentiated else ())
        of_some = [None if c is None else c[part.get(name, ...)] for name, c in cotangents]
        given = {name: tensor for name, tensor in some.items() if tensor is not None}
        results = accuracy.run(case.subject, given, backend, of_some)
        for name, result in results.items():
            of = name if name in case.subject.outputs else name[1:]
            if of in part and differ(result + 0, whole.results[name][part[of]] + 0):  # −0 is 0: masked taps add 0
                wrong.add(name)
        return results

    if isinstance(case, Case):
        T = case.outer[0]
        tokens = draw.choice([count for count in SHARES if count < T])
        begin = draw.randint(0, T - tokens)
        for differentiated in (True, False):
            alone(dict.fromkeys((*PER_TOKEN, *case.subject.outputs), slice(begin, begin + tokens)), differentiated)
    elif "cu_seqlens" in whole.tensors:
        for s, (begin, end) in enumerate(pairwise(whole.tensors["cu_seqlens"].tolist())):
            states = dict.fromkeys(("initial_state", "final_state"), slice(s, s + 1))
            alone(dict.fromkeys(ROWS, (slice(None), slice(begin, end))) | states, cu_seqlens=None)
    else:
        of_state = "conv_state_indices" if case.places == "slots" else "conv_state"
        for b in range(case.B if case.B > 1 else 0):
            of_batch = (*ROWS, "initial_state", "final_state", "cache_seqlens", of_state)
            alone(dict.fromkeys(of_batch, slice(b, b + 1)))
        if case.L > 1 and not case.update:
            end = draw.randint(1, case.L - 1)
            first = alone(dict.fromkeys(ROWS, (slice(None), slice(end))), differentiated=False)
            if "final_state" in first:  # the rest, from that state on
                rest = dict.fromkeys(ROWS, (slice(None), slice(end, None))) | {"final_state": ...}
                alone(rest, differentiated=False, initial_state=first["final_state"])
    return [name for name in whole.results if name in wrong]


def within_reach(case: AnyCase, ran: accuracy.Ran, row: accuracy.Row) -> bool:
    """Whether the truth moves as far when every input and cotangent moves by the tolerance of fp32: a few numbers are
    zero but for rounding, as the slope of SiLU at its turning point. In larger tensors they are single elements."""
    if row.elements > A_FEW and not row.relative_error <= row.tolerance:
        return False
    exact = accuracy.truth(case.subject, ran.tensors, ran.cotangents, ran.results)[row.output]
    exact = exact._replace(terms=[partial(reach, case, ran, row.output)])
    return accuracy.judge(case, row.backend, row.output, ran.results[row.output], exact).passed


def reach(case: AnyCase, ran: accuracy.Ran, output: str) -> Tensor:
    """How far the truth moves for each share by which every input and cotangent moves."""
    size, generator = accuracy.NORM_TOLERANCE[torch.float32], torch.Generator().manual_seed(0)

    def truth(tensors: Any, cotangents: Any) -> Tensor:
        return accuracy.truth(case.subject, tensors, cotangents, ran.results)[output].value

    def moved(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
        return tensor.double() * (1 + size * signs)

    exact = truth(ran.tensors, ran.cotangents)
    squares = torch.zeros_like(exact)
    for _ in range(MOVES):
        there = truth({name: moved(tensor) for name, tensor in ran.tensors.items()}, [moved(c) for c in ran.cotangents])
        squares += ((there - exact) / size).square() / MOVES
    return squares.sqrt()


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether any bit differs: NaN equals itself, 0 does not equal −0."""
    # A copy: to torch, a single element is contiguous with any stride, and then it has no view as bytes.
    bits = [tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8) for tensor in (one, other)]
    return not torch.equal(*bits)


def case_of(seed: int, number: int, small: bool = False) -> AnyCase:
    """small: for the CPU, which interprets kernels."""
    kernels, draw = random.Random(f"{seed}:{number // ALIKE}"), random.Random(f"{seed}:{number} of its kind")
    return (_mhc if kernels.random() < 0.55 else _conv)(kernels, draw, small)


def _mhc(kernels: random.Random, draw: random.Random, small: bool) -> Case:
    """kernels: draws what they are compiled for; draw: the rest."""
    subject, n, D = kernels.choice(MHC), kernels.randint(1, 8), _size(kernels, 80 if small else 1100)
    D = max(D, SHORTEST_NORM if subject in cases.NORMED else -(-SHORTEST_NORM // n))
    dtype, parameters, T = kernels.choice(FLOATS), kernels.choice(PARAMETERS), _tokens(draw, small)
    drawn: dict[str, Any] = {"subject": subject.with_options(**_options(draw, subject))}
    drawn |= {"outer": draw.choice([(T,), (T,), (1, T), (T, 1)]), "gamma": kernels.random() < 0.5}
    drawn |= {"scale": _scale(draw, parameters), "sigma": draw.choice((0.1, 1.05, 3.0))}
    drawn |= _shared(kernels, draw, subject.differentiable)
    return Case(n=n, D=0 if subject is cases.SINKHORN else D, dtype=dtype, parameter_dtype=parameters, **drawn)


def _options(draw: random.Random, subject: Subject) -> dict[str, float]:
    """Some options of the op."""
    drawn: dict[str, float] = {}
    if subject is cases.SINKHORN:
        drawn |= {"iters": draw.randint(1, 25), "eps": draw.choice(EPSILONS)}
    if "phi" in subject.inputs:
        drawn |= {"norm_eps": draw.choice(EPSILONS), "hc_eps": draw.choice(EPSILONS)}
    if subject in cases.MIXED:
        drawn |= {"post_mult": draw.choice((0.5, 1.0, 3.0)), "post_eps": draw.choice(EPSILONS)}
        drawn |= {"sinkhorn_iters": draw.randint(1, 25), "sinkhorn_eps": draw.choice(EPSILONS)}
    if subject in (cases.MHC_LAYER, cases.MHC_LAYER_NORMED):
        drawn |= {"transposed": True}
    if subject in cases.NORMED:
        drawn |= {"layer_norm_eps": draw.choice(EPSILONS)}
    return {name: value for name, value in drawn.items() if draw.random() < 0.5}


def _conv(kernels: random.Random, draw: random.Random, small: bool) -> ConvCase:
    op, D, places = kernels.choice(CONV), _size(kernels, 80 if small else 1100), kernels.choice(("", *PLACES))
    L, B, n, update = _tokens(draw, small), draw.choice((1, 1, 2, 3)), 0, op == "causal_conv1d_update"
    if update:
        L, places = draw.randint(1, 4), kernels.choice(("", "ring", "slots"))
    if op == "short_conv":
        places, n, D = "", draw.randint(1, 2 if small else 8), min(max(D, SHORTEST_NORM), 300)
    slow = op == "short_conv" and small  # ten seconds in the interpreter with another sequence and phase
    parameters = kernels.choice(PARAMETERS)
    drawn: dict[str, Any] = {"W": kernels.randint(1, 8), "dtype": kernels.choice(FLOATS)}
    drawn |= {"silu": kernels.random() < 0.5, "bias": kernels.random() < 0.5}
    drawn |= {"dilation": draw.choice((1, 1, 2) if slow else (1, 1, 2, 3, 5))}
    drawn |= {"residual": kernels.random() < 0.5 and not update, "scale": _scale(draw, parameters)}
    drawn |= {"norm_eps": draw.choice(EPSILONS), "parameter_dtype": parameters}
    drawn |= _shared(kernels, draw, ("y", "final_state") if places in FINAL else ())
    return ConvCase(1 if "cu_seqlens" in places or slow else B, L, D, places=places, n=n, update=update, **drawn)


def _shared(kernels: random.Random, draw: random.Random, outputs: Sequence[str]) -> dict[str, Any]:
    """Half of the time all outputs are used; at least one always is."""
    unused: tuple[str, ...] = ()
    if kernels.random() >= 0.5:
        kept = kernels.choice(outputs) if outputs else ""
        unused = tuple(name for name in outputs if name != kept and kernels.random() < 0.5)
    return {"seed": draw.randrange(1 << 30), "unused": unused, "layout": draw.choice(LAYOUTS)}


def _size(draw: random.Random, largest: int) -> int:
    """Every magnitude is as likely: 1 to 10 as 100 to 1000."""
    return min(largest, int(2 ** draw.uniform(0, largest.bit_length())))


def _tokens(draw: random.Random, small: bool) -> int:
    """Sometimes 0."""
    return 0 if draw.random() < 0.03 else _size(draw, 12 if small else 300)


def _scale(draw: random.Random, parameter_dtype: torch.dtype) -> float:
    return min(LARGEST_IN_FP16 if parameter_dtype == torch.float16 else math.inf, draw.choice(SCALES))
