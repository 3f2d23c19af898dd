"""Sinkhorn in fp64 and in logarithms, where nothing underflows, and logits so far apart that in fp32 much does."""

import torch

import mhc_ops
from mhc_ops.testing import accuracy, cases

SCALES, SEEDS, ITERS = (1.0, 8.0, 20.0, 50.0, 100.0), 3, 20


def in_fp64(z, iters, eps):
    log_eps = torch.tensor(eps, dtype=torch.float64, device=z.device).log()

    def plus_eps(log):
        return torch.logaddexp(log, log_eps.expand_as(log)) if eps else log

    log = plus_eps(z.double().log_softmax(-1))
    for axis in (-2, *(-1, -2) * (iters - 1)):
        log = log - plus_eps(log.logsumexp(axis, keepdim=True))
    return log.exp()


def drawn(n, device, T=20):
    """Logits of every scale and as many cotangents, of several seeds"""
    generators = [torch.Generator().manual_seed(cases.SEED + seed) for seed in range(SEEDS)]
    of_seeds = [torch.randn(2, len(SCALES), T, n, n, generator=generator) for generator in generators]
    z, dc = torch.stack(of_seeds, -4).to(device)
    z *= torch.tensor(SCALES, device=device).view(-1, 1, 1, 1, 1)
    return z.requires_grad_(), dc


def assert_right(n, eps, backend, device):
    """Finite, and as far from fp64 as rounding z in each half step may bring log c, or a sum of as many gradients."""
    z, dc = drawn(n, device)
    c, exact = mhc_ops.sinkhorn(z, ITERS, eps, backend=backend), in_fp64(z, ITERS, eps)
    (dz,), (exact_dz,) = (torch.autograd.grad(out, z, dc.to(out.dtype)) for out in (c, exact))
    allowed = 1e-5 + (2 * ITERS + 1) * 2**-24 * z.detach().abs().amax((-2, -1), keepdim=True)
    assert c.isfinite().all() and dz.isfinite().all() and ((c - exact).abs() <= allowed).all()
    assert ((dz - exact_dz).abs() <= allowed * n * dc.abs().amax((-2, -1), keepdim=True)).all()


def assert_pre_has_the_sinkhorn_of_its_logits(case, iters, backend, device):
    """Forward and in the gradient, where half of the matrices are made in logarithms."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in case.inputs(device).items()}
    *_, h_res = mhc_ops.mhc_pre(**leaves, sinkhorn_iters=iters, sinkhorn_eps=0.0, backend=backend)
    *_, logits = mhc_ops.mhc_forward_pre(**leaves, backend=backend)
    apart = mhc_ops.sinkhorn(logits, iters, 0.0, backend=backend)
    assert h_res.isfinite().all() and accuracy.close(h_res, apart.double())
    dh_res = torch.randn(h_res.shape, generator=torch.Generator().manual_seed(cases.SEED)).to(device)

    def gradients(cotangents):
        found = accuracy.gradients_of({"h_res": apart}, leaves, cotangents, again=True)
        return {name: gradient.double() for name, gradient in found.items()}

    # A matrix near a corner has a gradient of terms that cancel, so the last bit of its logits decides.
    exact = accuracy.exact_gradients(gradients, [apart], [dh_res])
    for name, gradient in accuracy.gradients_of({"h_res": h_res}, leaves, [dh_res]).items():
        assert gradient.isfinite().all() and accuracy.close(gradient, exact[name]), name
