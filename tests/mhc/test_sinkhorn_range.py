"""Numbers at the end of fp32's range: Sinkhorn of logits whose exp underflows, x whose inverse norm is 1e18."""

import pytest
import torch
from mhc_kernels import needs
from sinkhorn_oracle import ITERS, assert_right, drawn

import mhc_ops
from mhc_ops.testing import accuracy, cases

KERNELS = [
    pytest.param(("triton", "cpu"), marks=pytest.mark.interpreted, id="interpreted"),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu, id="triton"),
    pytest.param(("tilelang", "cuda"), marks=pytest.mark.gpu, id="tilelang"),
]
everywhere = pytest.mark.parametrize("place", [pytest.param(("reference", "cpu"), id="reference"), *KERNELS])


@everywhere
@pytest.mark.parametrize(("n", "eps"), [(4, 0.0), (3, 0.0), (4, 1e-6), (4, 1e-3)])
def test_sinkhorn_as_fp64(n, eps, place):
    needs(place[0])
    assert_right(n, eps, *place)


@everywhere
def test_nan_and_inf_stay_in_their_matrix(place):
    """One that is lost is made once more; not these, nor what is beside them."""
    backend, device = place
    needs(backend)
    z = drawn(4, device, T=2)[0].detach().view(-1, 4, 4)
    right = mhc_ops.sinkhorn(z, ITERS, 0.0, backend=backend)
    z[3, 1, 2], z[5, 0, 0], z[-2, 2, 2] = float("nan"), float("inf"), float("nan")
    found = mhc_ops.sinkhorn(z, ITERS, 0.0, backend=backend)
    wrong = torch.zeros(len(z), dtype=torch.bool, device=device)
    wrong[[3, 5, -2]] = True
    assert torch.equal(found.isnan().flatten(1).any(1), wrong)
    assert torch.equal(found[~wrong], right[~wrong])


@pytest.mark.parametrize("place", KERNELS)
@pytest.mark.parametrize("T", [9, 70])
def test_pre_has_the_sinkhorn_of_its_logits(T, place):
    """With few tokens and with many, forward and in the gradient, where half of the matrices are made in logarithms."""
    backend, device = place
    needs(backend)
    tensors = cases.Case(cases.MHC_PRE, (T,), 4, 32, torch.bfloat16, sigma=80).inputs(device)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    *_, h_res = mhc_ops.mhc_pre(**leaves, sinkhorn_iters=5, sinkhorn_eps=0.0, backend=backend)
    *_, logits = mhc_ops.mhc_forward_pre(**leaves, backend=backend)
    apart = mhc_ops.sinkhorn(logits, 5, 0.0, backend=backend)
    assert h_res.isfinite().all() and accuracy.close(h_res, apart.double())
    dh_res = torch.randn(h_res.shape, generator=torch.Generator().manual_seed(cases.SEED)).to(device)
    gradients = [torch.autograd.grad(out, list(leaves.values()), dh_res, allow_unused=True) for out in (h_res, apart)]
    for one, other in zip(*gradients):
        assert one.isfinite().all() and accuracy.close(one, other.double())


@everywhere
@pytest.mark.parametrize("subject", [cases.MHC_PRE, cases.MHC_HEAD, cases.MHC_PRE_NORMED], ids=lambda s: s.name)
def test_gradients_of_tiny_streams(subject, place):
    """The gradient of rsqrt has its cube: 1e54."""
    backend, device = place
    needs(backend)
    case = cases.Case(subject.with_options(norm_eps=0.0), (5,), 4, 24, torch.float32, scale=1e-18)
    if not case.runs_on(backend):
        pytest.skip(f"{backend} does not have it")
    rows = accuracy.measure(case, backend, device)
    assert [row for row in rows if not row.passed] == []
