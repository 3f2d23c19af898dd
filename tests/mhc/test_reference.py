"""The reference: what everything else is compared with."""

import pytest
import stack_oracle as oracle
import torch
from mhc_kernels import backward_by_hand, by
from stack_results import assert_close, assert_equal

import mhc_ops
from mhc_ops.testing import accuracy, cases

SUBJECT = cases.MHC_FORWARD_PRE


def doubles(case):
    return {name: tensor.double() for name, tensor in case.inputs().items()}


def test_equations():
    """The pages' formulas in plain loops, also of a model's ends. fp64 stays; what is kept carries no gradient."""
    n, D = 2, 3
    x, phi, alpha, bias, gamma = doubles(cases.Case(SUBJECT, (), n, D)).values()
    streams = list(x.unbind())
    inv_rms = 1 / (x.square().mean() + 1e-6).sqrt()
    h_mix = torch.stack([(phi[m] * (gamma * x).flatten()).sum() for m in range(8)])
    z = torch.cat(oracle.logits(streams, phi, alpha, bias, gamma, 1e-6))
    h_pre, h_post = oracle.sigmoid(z[:n]) + 1e-6, 2 * oracle.sigmoid(z[n : 2 * n])
    expected = oracle.read(streams, h_pre), h_post, z[2 * n :].view(n, n), inv_rms, h_mix, h_pre
    found = mhc_ops.mhc_forward_pre(x.requires_grad_(), phi, alpha, bias, True, gamma=gamma)
    assert {output.dtype for output in found} == {torch.float64}
    assert [output.requires_grad for output in found] == [True] * 3 + [False] * 3
    assert_close(found, expected)
    assert_close([mhc_ops.mhc_mean(x)], [sum(streams) / n])
    head = phi[:n], alpha[:1], bias[:n], gamma
    of_head = oracle.read(streams, oracle.sigmoid(torch.cat(oracle.logits(streams, *head, 1e-6))) + 1e-6)
    assert_close([mhc_ops.mhc_head(x, *head), mhc_ops.mhc_head(x, head[0], alpha[0], *head[2:])], [of_head] * 2)


GRADCHECK = [*cases.SUBJECTS, *cases.NORMED[:3], cases.MHC_MAPS, cases.MHC_READ]


@by(GRADCHECK)
def test_gradcheck(subject):
    """Second derivatives are checked too, and mhc_forward_pre with gamma and without."""
    for gamma in (False, True) if subject is SUBJECT else (True,):
        tensors = doubles(cases.Case(subject, (2,), 3, 4, gamma=gamma))
        leaves, names = [tensor.requires_grad_() for tensor in tensors.values()], list(tensors)

        def call(*values, names=names):
            outputs = subject.call(**dict(zip(names, values)), backend="reference")
            return outputs[: len(subject.differentiable)]

        assert torch.autograd.gradcheck(call, leaves)
        assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize("outer", [(), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("gamma", [False, True])
def test_manual_backward_is_the_gradient(gamma, outer):
    for n in (1, 3, 4):
        tensors = doubles(cases.Case(SUBJECT, outer, n, 7, gamma=gamma))
        outputs = accuracy.run(SUBJECT, tensors, "reference")
        cotangents = accuracy.random_cotangents(SUBJECT, outputs)
        expected = accuracy.truth(SUBJECT, tensors, cotangents)
        found = backward_by_hand(mhc_ops.mhc_backward_manual, tensors, outputs, cotangents)
        assert gamma or found.pop("dgamma") is None
        assert [name for name in found if not accuracy.close(found[name], expected[name])] == [], n


def test_manual_backward_keeps_large_logits():
    """Through h_post, 1 − σ cancels: 0.2 off at z = 16."""
    tensors = cases.Case(SUBJECT, (50,), 2, 8, torch.float32).inputs()
    tensors["bias"] += 16
    outputs = accuracy.run(SUBJECT, tensors, "reference")
    cotangents = accuracy.random_cotangents(SUBJECT, outputs)
    exact = accuracy.truth(SUBJECT, tensors, cotangents)["dbias"].value
    dbias = backward_by_hand(mhc_ops.mhc_backward, tensors, outputs, cotangents)["dbias"]
    assert_close([dbias[2:4]], [exact[2:4]])


def test_backward_function():
    """A cotangent that is missing is zero; the gradients carry no graph."""
    tensors = {k: t.requires_grad_() for k, t in cases.Case(SUBJECT, (3,), 2, 5, torch.float32).inputs().items()}
    outputs = dict(zip(SUBJECT.outputs, mhc_ops.mhc_forward_pre(**tensors, outflag=True)))
    for missing in SUBJECT.differentiable:
        ones = {name: torch.ones_like(outputs[name]) for name in SUBJECT.differentiable}
        ways = ((ones | {missing: value}).values() for value in (None, 0 * ones[missing]))
        found, expected = (backward_by_hand(mhc_ops.mhc_backward, tensors, outputs, given) for given in ways)
        assert_equal(found.values(), expected.values())
        assert not any(gradient.requires_grad for gradient in found.values())


def test_inf_stays_inf_at_the_boundary():
    """x_next of mhc_post_pre has the bits of mhc_post."""
    tensors = cases.Case(cases.MHC_POST_PRE, (3,), 2, 5, torch.bfloat16).inputs()
    tensors["x"][1, 0, 2] = float("inf")
    of_post = {name: tensors[name] for name in cases.MHC_POST.inputs}
    assert torch.equal(mhc_ops.mhc_post_pre(**tensors)[0], mhc_ops.mhc_post(**of_post))
