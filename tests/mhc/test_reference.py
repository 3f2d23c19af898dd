"""The reference: what everything else is compared with."""

import pytest
import torch
from mhc_kernels import leave_out

import mhc_ops
from mhc_ops.testing import accuracy, cases

SUBJECT = cases.MHC_FORWARD_PRE


def doubles(case):
    return {name: tensor.double() for name, tensor in case.inputs().items()}


@pytest.mark.parametrize("case", cases.CHECK, ids=str)
def test_exact_to_one_rounding(case):
    rows = accuracy.measure(case, "reference")
    assert all(row.passed for row in rows), rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("subject", cases.SUBJECTS, ids=lambda subject: subject.name)
def test_any_of_the_outputs_may_be_unused(subject, dtype):
    """Every choice of outputs that have a cotangent, for every n."""
    drawn = [
        cases.Case(subject, (9,), n, 20, dtype, unused=unused) for n in range(1, 9) for unused in leave_out(subject)
    ]
    failed = [row for case in drawn for row in accuracy.measure(case, "reference") if not row.passed]
    assert failed == []


def test_equations():
    """The formulas of the documentation, spelled out for one token in plain loops."""
    x, phi, alpha, bias, gamma = doubles(cases.Case(cases.MHC_FORWARD_PRE, (), 2, 3)).values()
    n, D = 2, 3
    v = x.flatten()
    inv_rms = 1 / ((v * v).mean() + 1e-6).sqrt()
    h_mix = torch.stack([(phi[m] * gamma.flatten() * v).sum() for m in range(8)])
    z = [alpha[0 if m < n else 1 if m < 2 * n else 2] * h_mix[m] * inv_rms + bias[m] for m in range(8)]
    h_pre = [1 / (1 + torch.exp(-z[i])) + 1e-6 for i in range(n)]
    h_post = [2 / (1 + torch.exp(-z[n + i])) for i in range(n)]
    h_res = [[z[2 * n + i * n + j] for j in range(n)] for i in range(n)]
    h_in = [sum(h_pre[i] * x[i, d] for i in range(n)) for d in range(D)]
    expected = [torch.tensor(value) for value in (h_in, h_post, h_res)] + [inv_rms, h_mix, torch.tensor(h_pre)]
    outputs = mhc_ops.mhc_forward_pre(x, phi, alpha, bias, True, gamma=gamma)
    for output, value in zip(outputs, expected):
        assert accuracy.close(output, value.double())


@pytest.mark.parametrize("gamma", [False, True])
def test_gradcheck(gamma):
    tensors = doubles(cases.Case(cases.MHC_FORWARD_PRE, (2, 3), 3, 4, gamma=gamma))
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    names = list(tensors)

    def call(*values):
        return mhc_ops.mhc_forward_pre(**dict(zip(names, values)))

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("outer", [(), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize("n", [1, 3, 4])
def test_manual_backward_is_the_gradient(n, gamma, outer):
    tensors = doubles(cases.Case(cases.MHC_FORWARD_PRE, outer, n, 7, gamma=gamma))
    outputs = accuracy.run(SUBJECT, tensors, "reference")
    cotangents = accuracy.random_cotangents(SUBJECT, outputs)
    expected = accuracy.truth(SUBJECT, tensors, cotangents)
    intermediates = [outputs[name] for name in ("inv_rms", "h_mix", "h_pre", "h_post")]
    x, phi, alpha, bias = (tensors[name] for name in ("x", "phi", "alpha", "bias"))
    gradients = mhc_ops.mhc_backward_manual(x, phi, alpha, bias, *intermediates, *cotangents, tensors.get("gamma"))
    for name, gradient in zip(("dx", "dphi", "dalpha", "dbias", "dgamma"), gradients):
        if name in expected:
            assert accuracy.close(gradient, expected[name])
        else:
            assert gradient is None


def test_manual_backward_keeps_large_logits():
    """Through h_post, 1 − σ cancels: 0.2 off at z = 16."""
    tensors = cases.Case(cases.MHC_FORWARD_PRE, (50,), 2, 8, torch.float32).inputs()
    tensors["bias"] += 16
    outputs = accuracy.run(SUBJECT, tensors, "reference")
    cotangents = accuracy.random_cotangents(SUBJECT, outputs)
    exact = accuracy.truth(SUBJECT, tensors, cotangents)
    intermediates = [outputs[name] for name in ("inv_rms", "h_mix", "h_pre", "h_post")]
    x, phi, alpha, bias, gamma = tensors.values()
    dbias = mhc_ops.mhc_backward(x, phi, alpha, bias, *intermediates, *cotangents, gamma)[3]
    post = slice(2, 4)
    assert accuracy.close(dbias[post], exact["dbias"].value[post])


def test_cotangents_may_be_missing():
    x, phi, alpha, bias = cases.Case(cases.MHC_FORWARD_PRE, (3,), 2, 5, torch.float32, gamma=False).inputs().values()
    _, h_post, _, inv_rms, h_mix, h_pre = mhc_ops.mhc_forward_pre(x, phi, alpha, bias, True)
    zeros = [torch.zeros(3, 5), torch.zeros(3, 2), torch.zeros(3, 2, 2)]
    for missing in range(3):
        given = [torch.ones_like(zero) for zero in zeros]
        filled = [zeros[i] if i == missing else g for i, g in enumerate(given)]
        absent = [None if i == missing else g for i, g in enumerate(given)]
        for one, other in zip(
            mhc_ops.mhc_backward(x, phi, alpha, bias, inv_rms, h_mix, h_pre, h_post, *filled),
            mhc_ops.mhc_backward(x, phi, alpha, bias, inv_rms, h_mix, h_pre, h_post, *absent),
        ):
            assert (one is None and other is None) or torch.equal(one, other)


def test_fp64_stays_fp64():
    outputs = mhc_ops.mhc_forward_pre(**doubles(cases.Case(cases.MHC_FORWARD_PRE, (2,), 3, 4)), outflag=True)
    assert {output.dtype for output in outputs} == {torch.float64}


def test_intermediates_carry_no_gradient():
    tensors = {name: t.requires_grad_() for name, t in doubles(cases.Case(cases.MHC_FORWARD_PRE, (2,), 3, 4)).items()}
    outputs = mhc_ops.mhc_forward_pre(**tensors, outflag=True)
    assert [output.requires_grad for output in outputs] == [True] * 3 + [False] * 3


def test_autocast_changes_nothing():
    tensors = cases.Case(cases.MHC_FORWARD_PRE, (4,), 3, 32, torch.float32).inputs()
    plain = mhc_ops.mhc_forward_pre(**tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(plain, mhc_ops.mhc_forward_pre(**tensors)))


def test_backward_carries_no_graph():
    tensors = {
        name: t.requires_grad_()
        for name, t in cases.Case(cases.MHC_FORWARD_PRE, (3,), 2, 5, torch.float32).inputs().items()
    }
    _, h_post, _, inv_rms, h_mix, h_pre = mhc_ops.mhc_forward_pre(**tensors, outflag=True)
    x, phi, alpha, bias, gamma = tensors.values()
    gradients = mhc_ops.mhc_backward(x, phi, alpha, bias, inv_rms, h_mix, h_pre, h_post, None, h_post, None, gamma)
    assert not any(gradient.requires_grad for gradient in gradients)


def test_meta_tensors():
    outputs = mhc_ops.MHCBlock(3, 20, device="meta")(torch.empty(7, 3, 20, device="meta"))
    assert [tuple(output.shape) for output in outputs] == [(7, 20), (7, 3), (7, 3, 3)]


def test_equations_of_post_and_sinkhorn():
    """The formulas of the documentation, spelled out for one token in plain loops."""
    n, D = 3, 4
    tensors = {name: t.double() for name, t in cases.Case(cases.MHC_POST, (), n, D).inputs().items()}
    x, h_out, h_post, h_res = tensors.values()
    x_next = mhc_ops.mhc_post(x, h_out, h_post, h_res)
    for j in range(n):
        for d in range(D):
            expected = h_post[j] * h_out[d] + sum(h_res[i, j] * x[i, d] for i in range(n))
            assert accuracy.close(x_next[j, d], expected)

    z, eps = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 1e-3
    c = [[torch.exp(z[i, j]) / sum(torch.exp(z[i, k]) for k in range(n)) + eps for j in range(n)] for i in range(n)]
    for half_step in range(2 * 5 - 1):
        if half_step % 2 == 0:
            c = [[c[i][j] / (sum(c[k][j] for k in range(n)) + eps) for j in range(n)] for i in range(n)]
        else:
            c = [[c[i][j] / (sum(c[i][k] for k in range(n)) + eps) for j in range(n)] for i in range(n)]
    assert accuracy.close(mhc_ops.sinkhorn(z, 5, eps), torch.tensor(c, dtype=torch.float64))


def test_equation_of_the_head():
    x, phi, alpha, bias, gamma = doubles(cases.Case(cases.MHC_HEAD, (), 2, 3)).values()
    v = x.flatten()
    inv_rms = 1 / ((v * v).mean() + 1e-6).sqrt()
    h = [
        1 / (1 + torch.exp(-alpha[0] * (phi[i] * gamma.flatten() * v).sum() * inv_rms - bias[i])) + 1e-6 for i in (0, 1)
    ]
    assert accuracy.close(mhc_ops.mhc_head(x, phi, alpha, bias, gamma), h[0] * x[0] + h[1] * x[1])
    assert torch.equal(mhc_ops.mhc_head(x, phi, alpha[0], bias, gamma), mhc_ops.mhc_head(x, phi, alpha, bias, gamma))


@pytest.mark.parametrize("subject", cases.SUBJECTS[1:], ids=lambda subject: subject.name)
def test_gradcheck_of_the_layer(subject):
    tensors = doubles(cases.Case(subject, (2,), 3, 4))
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]
    names = list(tensors)

    def call(*values):
        return subject.call(**dict(zip(names, values)), backend="reference")

    assert torch.autograd.gradcheck(call, leaves)


def test_sinkhorn_is_doubly_stochastic():
    """As far as 20 iterations go: columns come last."""
    logits = cases.Case(cases.SINKHORN, (500,), 4, 0, torch.float32, sigma=1).inputs()["logits"]
    h_res = mhc_ops.sinkhorn(logits)
    assert (h_res.double().sum(-2) - 1).abs().max() < 2e-6
    assert accuracy.close(h_res.sum(-1), mhc_ops.sinkhorn(logits.double()).sum(-1))
    assert mhc_ops.sinkhorn(logits.bfloat16()).dtype == torch.float32


def test_inf_stays_inf_at_the_boundary():
    """x_next of mhc_post_pre has the bits of mhc_post."""
    tensors = cases.Case(cases.MHC_POST_PRE, (3,), 2, 5, torch.bfloat16).inputs()
    tensors["x"][1, 0, 2] = float("inf")
    of_post = {name: tensors[name] for name in cases.MHC_POST.inputs}
    assert torch.equal(mhc_ops.mhc_post_pre(**tensors)[0], mhc_ops.mhc_post(**of_post))
