"""How far every output and gradient of an op is from the same formula in fp64.

Tolerances follow from the type that a result is stored in:
  16 bits  one rounding of the exact value: 2^-8 (bf16) or 2^-11 (fp16) of the largest magnitude in the row, for every
           element; and in norm, from 1,000 elements up (fewer do not average), 2e-3 or 3e-4, or what rounding the exact
           values gives where that is more (values that repeat do not average either)
  fp32     1e-5 in norm; 3e-5 after Sinkhorn if its logits have σ = 8: errors of the logits grow with them
  fp64     1e-12 in norm

Where the terms of a gradient cancel, the tolerance is a share of their size (docs/measure.md, "check"). A gradient in
16 bits is the sum in fp32, rounded: beside the rounding, each of its N elements is allowed the largest of N errors of
that norm, √(2 ln N) times their mean. 2^-100 of the largest element counts as nothing, because fp32 flushes it to 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.check import name_of
from .cases import SEED, Subject, Tensors
from .conv_cases import AnyCase

Cotangents = list[Tensor | None]
Gradients = Callable[..., Tensors]  # of cotangents: d<input>, in the order of the inputs

NORM_TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-5, torch.float64: 1e-12}
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
ENOUGH_TO_AVERAGE = 1000
SUMMED_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # and stored in 16 bits; others as they are
FLUSHED = 2**-100
OTHER_SIDE = 1.01  # values almost in the middle of two steps may be rounded to the other side
STEEP_TOLERANCE = 3e-5
NOT_AFTER_SINKHORN = ("h_in", "h_post", "inv_rms", "h_mix", "h_pre", "out")
DRAWS = (16, 128)  # of signs: they give the size of a single number's terms to 18 % and to 6 %


class Exact(NamedTuple):
    """A result in fp64. terms: of a gradient, estimates of (Σ terms²)^½, each better, slower, and used where needed."""

    value: Tensor
    terms: Sequence[Callable[[], Tensor]] = ()


@dataclass(frozen=True)
class Row:
    """One output of one case. relative_error: in norm, as a share of the truth or, if it fails so, of its terms."""

    case: str
    backend: str
    output: str
    max_error: float
    relative_error: float
    tolerance: float
    passed: bool
    dtype: str = ""  # that the output is stored in
    elements: int = 0

    @property
    def verdict(self) -> str:
        return "PASS" if self.passed else "FAIL"


class Ran(NamedTuple):
    """A case that was run: its inputs and its results."""

    tensors: Tensors
    cotangents: Cotangents
    results: Tensors


def _forward(
    subject: Subject, call: Callable[[Tensors], Tensors], tensors: Tensors, differentiable: bool
) -> tuple[Tensors, Gradients]:
    """The outputs of call(tensors), and the function that makes their gradients."""
    leaves = {name: tensor.detach() for name, tensor in tensors.items()}
    leaves |= {name: leaves[name].clone() for name in subject.mutated}
    wanted = {name: leaf for name, leaf in leaves.items() if differentiable and leaf.is_floating_point()}
    for leaf in wanted.values():
        leaf.requires_grad_()
    outputs = call(leaves)
    return outputs, partial(gradients_of, outputs, wanted)


def gradients_of(outputs: Tensors, wanted: Tensors, cotangents: Cotangents | None, again: bool = False) -> Tensors:
    """As d<input>. again: keep the graph for another call."""
    used = [(o, c) for o, c in zip(outputs.values(), cotangents or ()) if c is not None]
    if not (used and wanted):
        return {}
    of, given = zip(*used)
    found = torch.autograd.grad(of, list(wanted.values()), given, retain_graph=again, materialize_grads=True)
    return {f"d{name}": gradient for name, gradient in zip(wanted, found)}


def run(subject: Subject, tensors: Tensors, backend: str, cotangents: Cotangents | None = None) -> Tensors:
    """Outputs by name and, where cotangents are given, gradients as d<input>, in the order of the inputs."""
    outputs, gradients = _forward(subject, partial(subject.run, backend=backend), tensors, bool(cotangents))
    return {name: output.detach() for name, output in outputs.items()} | gradients(cotangents)


def random_cotangents(subject: Subject, outputs: Tensors, seed: int = SEED, unused: Sequence[str] = ()) -> Cotangents:
    """One per differentiable output, None for `unused`, divided by the root of the last dimension: each output then has
    about the same weight in the gradients. Drawn on the CPU, a case is the same on every device."""
    generator, cotangents = torch.Generator().manual_seed(seed + 1), list[Tensor | None]()
    for name in subject.differentiable:
        output = outputs[name]
        normal = torch.randn(output.shape, generator=generator) / max(1, output.shape[-1]) ** 0.5
        cotangents.append(None if name in unused else normal.to(output.device, output.dtype))
    return cotangents


def run_case(case: AnyCase, backend: str, device: torch.device | str = "cpu", differentiated: bool = True) -> Ran:
    """Runs a case forward, and backward with random cotangents."""
    subject, tensors = case.subject, case.inputs(device)
    differentiated = differentiated and bool(subject.differentiable)
    outputs, gradients = _forward(subject, partial(subject.run, backend=backend), tensors, differentiated)
    cotangents = random_cotangents(subject, outputs, case.seed, case.unused) if differentiated else []
    results = {name: output.detach() for name, output in outputs.items()} | gradients(cotangents)
    return Ran(tensors, cotangents, results)


def measure(case: AnyCase, backend: str, device: torch.device | str = "cpu") -> list[Row]:
    """Runs a case forward and backward on a backend and compares each result with fp64."""
    return judge_all(case, backend, run_case(case, backend, device))


def judge_all(case: AnyCase, backend: str, ran: Ran) -> list[Row]:
    exact = truth(case.subject, ran.tensors, ran.cotangents, ran.results)
    return [judge(case, backend, name, ran.results[name], exact[name]) for name in exact]


def truth(
    subject: Subject,
    tensors: Tensors,
    cotangents: Cotangents,
    results: Tensors | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Exact]:
    """The reference in fp64 on the same inputs. results: what is judged, for subjects that read it. dtype: fp32 shows
    what the formula itself loses there."""
    wide = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    widened = [None if c is None else c.to(dtype) for c in cotangents]
    outputs, gradients = _forward(subject, partial(subject.truth, results=results or {}), wide, bool(widened))
    exact = {name: Exact(outputs[name].detach()) for name in subject.outputs}
    return exact | exact_gradients(partial(gradients, again=True), list(outputs.values()), widened)


def exact_gradients(gradients: Gradients, outputs: Sequence[Tensor], cotangents: Cotangents) -> dict[str, Exact]:
    """gradients: a function of cotangents in fp64 that can be called again."""
    sizes = [cache(partial(sizes_of_terms, gradients, outputs, cotangents, draws)) for draws in DRAWS]
    return {
        name: Exact(gradient, [lambda of=of, name=name: of()[name] for of in sizes])  # type: ignore[misc]
        for name, gradient in gradients(cotangents).items()
    }


def sizes_of_terms(gradients: Gradients, outputs: Sequence[Tensor], cotangents: Cotangents, draws: int) -> Tensors:
    """(Σ terms²)^½ of every element of the gradients. A term is what one element of the gradient of an output
    contributes; an output may be read by what makes another, as x_next is by the next layer's maps.

    With random signs on those elements a gradient is Σ ± term, and the mean of its square is Σ terms². A table of the
    terms would be as large as x times phi. The signs follow from a seed, so a verdict is the same each time.
    """
    squares: Tensors = {}
    device = next(c.device for c in cotangents if c is not None)
    generator = torch.Generator(device).manual_seed(0)

    def signed(gradient: Tensor) -> Tensor:
        return gradient * (torch.randint(0, 2, gradient.shape, generator=generator, device=device) * 2 - 1)

    hooks = [output.register_hook(signed) for output in outputs if output.requires_grad]
    for _ in range(draws):
        for name, gradient in gradients(cotangents).items():
            squares[name] = squares.get(name, 0) + gradient.square() / draws
    for hook in hooks:
        hook.remove()
    return {name: square.sqrt() for name, square in squares.items()}


def judge(
    case: AnyCase | None, backend: str, name: str, result: Tensor, exact: Exact, norm_tolerance: float | None = None
) -> Row:
    """norm_tolerance: for a library of another precision; None: what the output's type allows."""
    if case is not None and case.dtype != torch.float64 and result.dtype == torch.float64:
        result = result.float()  # the gradient of an fp64 parameter, whose sums were fp32
    words, value, dtype = str(case or ""), exact.value, result.dtype
    if result.shape != value.shape:
        raise AssertionError(f"{words}: {name} is {list(result.shape)}, should be {list(value.shape)}")
    steep = case is not None and case.steep and name not in NOT_AFTER_SINKHORN
    in_norm = NORM_TOLERANCE | ({torch.float32: STEEP_TOLERANCE} if steep else {})
    tolerance = in_norm[dtype] if norm_tolerance is None else norm_tolerance
    rounded = dtype in ROUNDING and norm_tolerance is None
    row = partial(Row, words, backend, name, tolerance=tolerance, dtype=name_of(dtype), elements=value.numel())
    if value.numel() == 0:
        return row(max_error=0.0, relative_error=0.0, passed=True)
    nothing = torch.finfo(SUMMED_IN.get(dtype, dtype)).smallest_normal
    flushed = (value.abs() < nothing) & (result.double().abs() < nothing)
    error = (result.double() - value).abs().masked_fill(flushed, 0.0)
    own = OTHER_SIDE * (value.to(dtype).double() - value).norm().item() if rounded else 0.0

    def judged(of_sums: Tensor) -> Row:
        scale = max(value.norm().item(), own / tolerance, of_sums.norm().item() / tolerance, nothing)
        relative = error.norm().item() / scale
        passed = relative <= tolerance  # False for NaN
        if rounded:
            passed = one_rounding(error, value, dtype, of_sums) and (passed or value.numel() < ENOUGH_TO_AVERAGE)
        return row(max_error=error.max().item(), relative_error=relative, passed=passed)

    verdict = judged(torch.zeros_like(value))
    for terms in exact.terms:
        if not verdict.passed:
            verdict = judged((in_norm[torch.float32] if rounded else tolerance) * terms())
    return verdict


def one_rounding(error: Tensor, value: Tensor, dtype: torch.dtype, of_sums: Tensor) -> bool:
    """Whether every element is within one rounding, beside the error of the sum that is rounded."""
    row_largest = value.abs().amax(-1, keepdim=True).expand_as(value)
    smallest_step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    largest_of_all = math.sqrt(2 * math.log(max(2, value.numel())))
    allowed = (ROUNDING[dtype] * row_largest).clamp(min=smallest_step / 2) + largest_of_all * of_sums
    allowed += FLUSHED * value.abs().max()
    return bool((error <= allowed).all())


def close(result: Tensor, exact: Exact | Tensor) -> bool:
    """The verdict alone."""
    return judge(None, "", "", result, exact if isinstance(exact, Exact) else Exact(exact)).passed
