"""Sinkhorn: its sums and options, and numbers at the end of fp32's range: logits whose exp underflows, x whose inverse
norm is 1e18. test_sublayers.py has its equations in plain loops."""

import pytest
import torch
from mhc_kernels import failures
from sinkhorn_oracle import ITERS, assert_pre_has_the_sinkhorn_of_its_logits, assert_right, drawn

import mhc_ops
from mhc_ops.testing import cases


def test_options(anywhere):
    for iters, eps in [(iters, eps) for iters in (1, 2, 7, 50) for eps in (0.0, 1e-6, 1e-2)]:
        subject = cases.SINKHORN.with_options(iters=iters, eps=eps)
        assert failures(cases.Case(subject, (9,), 3, 0, torch.float32), *anywhere) == [], (iters, eps)


@pytest.mark.parametrize(("n", "eps"), [(4, 0.0), (3, 0.0), (4, 1e-6), (4, 1e-3)])
def test_sinkhorn_as_fp64(n, eps, anywhere):
    assert_right(n, eps, *anywhere)


def test_nan_and_inf_stay_in_their_matrix(anywhere):
    """A matrix that underflows is made once more; these are not, and their neighbours stay as they were."""
    backend, device = anywhere
    z = drawn(4, device, T=2)[0].detach().view(-1, 4, 4)
    right = mhc_ops.sinkhorn(z, ITERS, 0.0, backend=backend)
    z[3, 1, 2], z[5, 0, 0], z[-2, 2, 2] = float("nan"), float("inf"), float("nan")
    found = mhc_ops.sinkhorn(z, ITERS, 0.0, backend=backend)
    wrong = torch.zeros(len(z), dtype=torch.bool, device=device)
    wrong[[3, 5, -2]] = True
    assert torch.equal(found.isnan().flatten(1).any(1), wrong) and torch.equal(found[~wrong], right[~wrong])
    assert mhc_ops.sinkhorn(z.bfloat16(), backend=backend).dtype == torch.float32


def test_pre_has_the_sinkhorn_of_its_logits(kernels):
    """With few tokens and with many."""
    for T in (9, 70):
        case = cases.Case(cases.MHC_PRE, (T,), 4, 32, torch.bfloat16, sigma=80)
        assert_pre_has_the_sinkhorn_of_its_logits(case, 5, *kernels)


@pytest.mark.parametrize("subject", [cases.MHC_PRE, cases.MHC_HEAD, cases.MHC_PRE_NORMED], ids=lambda s: s.name)
def test_gradients_of_tiny_streams(subject, anywhere):
    """The gradient of rsqrt has its cube: 1e54."""
    backend, device = anywhere
    case = cases.Case(subject.with_options(norm_eps=0.0), (5,), 4, 24, torch.float32, scale=1e-18)
    if not case.runs_on(backend):
        pytest.skip(f"{backend} does not have it")
    assert failures(case, backend, device) == []
