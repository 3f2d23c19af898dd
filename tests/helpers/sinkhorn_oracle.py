"""Sinkhorn in fp64 and in logarithms, where nothing underflows, and logits so far apart that in fp32 much does."""

import torch

import mhc_ops
from mhc_ops.testing import accuracy, cases

SCALES, SEEDS, ITERS, DRAWS = (1.0, 8.0, 20.0, 50.0, 100.0), 3, 20, 16


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
    """Forward and in the gradient. Allowed is what errors of the logits change in fp64: theirs, and a rounding in each
    half step, which also rounds sums of n numbers up to 1 or of n cotangents."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in case.inputs(device).items()}
    doubles = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    *_, h_res = mhc_ops.mhc_pre(**leaves, sinkhorn_iters=iters, sinkhorn_eps=0.0, backend=backend)
    *_, logits = mhc_ops.mhc_forward_pre(**leaves, backend=backend)
    *_, z = mhc_ops.mhc_forward_pre(**doubles, backend="reference")
    half_steps, generator = 2 * iters + 1, torch.Generator().manual_seed(cases.SEED)
    dh_res = torch.randn(h_res.shape, generator=generator).to(device)

    def of(logits):
        c = in_fp64(logits := logits.detach().requires_grad_(), iters, 0.0)
        return c.detach(), torch.autograd.grad(c, logits, dh_res.double())[0]

    errors = half_steps * ((logits - z).abs() + 2**-24 * z.abs())
    signs = torch.randint(0, 2, (DRAWS, *z.shape), generator=generator).to(device) * 2 - 1
    (exact, dz), *moved = map(of, (z, *(z + signs * errors)))

    def allowed(right, others, largest):
        change = torch.stack([(other - right).abs() for other in others]).amax((0, -2, -1), keepdim=True)[0]
        return 1e-5 * right.abs() + half_steps * 2**-24 * case.n * largest + change

    of_c, of_dz = map(allowed, (exact, dz), zip(*moved), (1, dh_res.abs().amax((-2, -1), keepdim=True)))
    assert accuracy.close(logits, z), "their error is part of what is allowed"
    assert h_res.isfinite().all() and ((h_res - exact).abs() <= of_c).all()
    each = torch.eye(z.numel(), dtype=z.dtype, device=device).view(-1, *z.shape)  # one logit each
    found = accuracy.gradients_of({"h_res": h_res}, leaves, [dh_res])
    for name, part in zip(doubles, torch.autograd.grad(z, list(doubles.values()), each, is_grads_batched=True)):
        gradient = found[f"d{name}"].flatten()
        right, error = (torch.tensordot(a.flatten(), b.flatten(1), 1) for a, b in ((dz, part), (of_dz, part.abs())))
        error += accuracy.ROUNDING.get(gradient.dtype, 1e-5) * right.abs()
        assert gradient.isfinite().all() and ((gradient - right).abs() <= error).all(), name
