"""How far every output and gradient of an op is from the same formula in fp64.

Tolerances follow from the type that a result is stored in:
  16 bits  one rounding of the exact value: 2^-8 (bf16) or 2^-11 (fp16) of the largest magnitude in the row, for every
           element; and 2e-3 or 3e-4 in norm, from 1,000 elements up (fewer do not average)
  fp32     1e-5 in norm; 3e-5 behind Sinkhorn where its logits have σ = 8: errors of the logits grow with them
  fp64     1e-12 in norm
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.check import name_of
from .cases import Subject, Tensors
from .conv_cases import AnyCase

NORM_TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-5, torch.float64: 1e-12}
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
ENOUGH_TO_AVERAGE = 1000
STEEP_TOLERANCE = 3e-5
NOT_BEHIND_SINKHORN = ("h_in", "h_post", "inv_rms", "h_mix", "h_pre", "out")


@dataclass(frozen=True)
class Row:
    """One output of one case: errors, what is allowed, and the verdict."""

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


def run(subject: Subject, tensors: Tensors, backend: str, cotangents: list[Tensor | None] | None = None) -> Tensors:
    """Outputs by name and, where cotangents are given, gradients as d<input>, in the order of the inputs."""
    return _run(subject, lambda leaves: subject.call(**leaves, backend=backend), tensors, cotangents)


def _run(
    subject: Subject,
    call: Callable[[Tensors], tuple[Tensor, ...]],
    tensors: Tensors,
    cotangents: list[Tensor | None] | None,
) -> Tensors:
    leaves = {name: tensor.detach() for name, tensor in tensors.items()}
    leaves |= {name: leaves[name].clone() for name in subject.mutated}
    wanted = [name for name, tensor in leaves.items() if cotangents and tensor.is_floating_point()]
    for name in wanted:
        leaves[name].requires_grad_()
    outputs = call(leaves)
    results = dict(zip(subject.outputs, outputs))
    if cotangents:
        used = [(o, c) for o, c in zip(outputs, cotangents) if c is not None]
        gradients = torch.autograd.grad(
            [o for o, _ in used], [leaves[name] for name in wanted], [c for _, c in used], materialize_grads=True
        )
        results |= {f"d{name}": gradient for name, gradient in zip(wanted, gradients)}
    return {name: result.detach() for name, result in results.items()}


def random_cotangents(subject: Subject, outputs: Tensors, seed: int) -> list[Tensor | None]:
    """One per differentiable output, typed and shaped as it; sums hide errors that random cotangents show.

    Divided by the root of the last dimension, so that every output reaches the gradients with about the same weight and
    none hides the error of another. Made on the CPU, so that a case is the same on every device.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    cotangents: list[Tensor | None] = []
    for name in subject.differentiable:
        output = outputs[name]
        normal = torch.randn(output.shape, generator=generator) / max(1, output.shape[-1]) ** 0.5
        cotangents.append(normal.to(output.device, output.dtype))
    return cotangents


def measure(case: AnyCase, backend: str, device: torch.device | str = "cpu") -> list[Row]:
    """Run a case forward and backward on a backend and compare each result with fp64."""
    tensors = case.inputs(device)
    outputs = run(case.subject, tensors, backend)
    cotangents = random_cotangents(case.subject, outputs, case.seed)
    results = run(case.subject, tensors, backend, cotangents)
    exact = truth(case.subject, tensors, cotangents, results)
    if case.dtype != torch.float64:  # an fp64 parameter gets an fp64 gradient, of sums that were fp32
        results = {name: r.float() if r.dtype == torch.float64 else r for name, r in results.items()}
    return [judge(case, backend, name, results[name], exact[name]) for name in exact]


def truth(
    subject: Subject, tensors: Tensors, cotangents: list[Tensor | None], results: Tensors | None = None
) -> Tensors:
    """The reference in fp64 on the very same inputs; `results`: what is to be judged, where the subject asks for it."""
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    doubled = [None if c is None else c.double() for c in cotangents]
    return _run(subject, lambda leaves: subject.truth(leaves, results or {}), wide, doubled)


def judge(
    case: AnyCase | None, backend: str, name: str, result: Tensor, exact: Tensor, norm_tolerance: float | None = None
) -> Row:
    """norm_tolerance: all that a library of another precision is held to; None: what the output's type allows."""
    words = str(case or "")
    if result.shape != exact.shape:
        raise AssertionError(f"{words}: {name} is {list(result.shape)}, should be {list(exact.shape)}")
    tolerance = NORM_TOLERANCE[result.dtype] if norm_tolerance is None else norm_tolerance
    steep = case is not None and case.steep and name not in NOT_BEHIND_SINKHORN
    if steep and result.dtype == torch.float32 and norm_tolerance is None:
        tolerance = STEEP_TOLERANCE
    stored = name_of(result.dtype), exact.numel()
    if exact.numel() == 0:
        return Row(words, backend, name, 0.0, 0.0, tolerance, True, *stored)
    error = (result.double() - exact).abs()
    norm = exact.norm().item()
    relative = error.norm().item() / norm if norm else error.norm().item()
    passed = relative <= tolerance  # False for NaN
    if result.dtype in ROUNDING and norm_tolerance is None:
        row_largest = (exact.abs() if exact.dim() == 0 else exact.abs().amax(-1, keepdim=True)).expand_as(exact)
        one_rounding = bool((error <= ROUNDING[result.dtype] * row_largest).all())
        passed = one_rounding and (passed or exact.numel() < ENOUGH_TO_AVERAGE)
    return Row(words, backend, name, error.max().item(), relative, tolerance, passed, *stored)


def close(result: Tensor, exact: Tensor) -> bool:
    """The verdict alone."""
    return judge(None, "", "", result, exact).passed
