"""What tests of mHC kernels share: for which ops and backends they run."""

from itertools import combinations

import pytest
import torch

from mhc_ops.core.backend import why_not
from mhc_ops.testing import accuracy, cases

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
STREAMED = [subject for subject in cases.SUBJECTS if subject is not cases.SINKHORN]
MOST = [*cases.SUBJECTS, *cases.OF_THE_STACK]
ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "tilelang")]
on_gpu = pytest.mark.parametrize("backend", ON_GPU)


def by(subjects):
    return pytest.mark.parametrize("subject", subjects, ids=lambda subject: subject.name)


def needs(backend):
    """A GPU there is, or an interpreter; perhaps not all the rest."""
    reason = why_not("mhc", backend, "cuda")
    if reason is not None:
        pytest.skip(reason)


def failures(case, backend, device="cpu"):
    rows = accuracy.measure(case, backend, device)
    return [(row.output, row.relative_error) for row in rows if not row.passed]


def cotangents_of(subject, tensors, backend):
    return accuracy.random_cotangents(subject, accuracy.run(subject, tensors, backend))


def backward_by_hand(function, tensors, outputs, cotangents):
    """Gradients of mhc_forward_pre by one of the functions that take its intermediates, by name."""
    kept = [outputs[name] for name in ("inv_rms", "h_mix", "h_pre", "h_post")]
    x, phi, alpha, bias = (tensors[name] for name in ("x", "phi", "alpha", "bias"))
    gradients = function(x, phi, alpha, bias, *kept, *cotangents, tensors.get("gamma"))
    return dict(zip(("dx", "dphi", "dalpha", "dbias", "dgamma"), gradients, strict=True))


def leave_out(subject):
    """Every choice of outputs that have no cotangent, but for all of them."""
    outputs = subject.differentiable
    return [unused for count in range(len(outputs)) for unused in combinations(outputs, count)]
