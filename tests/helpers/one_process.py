"""Compare what several processes compute with one process in fp64, by the rules of mhc_ops.testing.accuracy."""

import math

import torch

from mhc_ops.testing import accuracy


def exact_gradients(loss_of, outputs, leaves, between=()):
    """The gradients of loss_of(outputs), all fp64, by the names of the leaves, with the sizes of their terms. A term is
    the contribution of one element of the outputs, or of tensors in between, whose terms cancel too."""
    apart = [output.detach().requires_grad_() for output in outputs]  # one may be made of another
    cotangents = torch.autograd.grad(loss_of(apart), apart)

    def by_name(cotangents):
        found = torch.autograd.grad(outputs, list(leaves.values()), cotangents, retain_graph=True)
        return dict(zip(leaves, found))

    return accuracy.exact_gradients(by_name, [*outputs, *between], list(cotangents))


def assert_close(found, expected):
    """Within the tolerance of the types, by name. expected: accuracy.Exact, or fp64 for what is not a gradient"""
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if not accuracy.close(found[name], expected[name])]
    assert not wrong, wrong  # the message is needed in processes, where pytest does not rewrite asserts


def close_in_parts(result, exact):
    """Whether a sum is close whose parts lie on two ranks: in 16 bits each part is rounded too."""
    if accuracy.close(result, exact):
        return True
    if result.dtype not in accuracy.ROUNDING or not exact.terms:
        return False
    error, rounding = (result.double() - exact.value).abs(), accuracy.ROUNDING[result.dtype]
    return accuracy.one_rounding(error, exact.value, result.dtype, rounding * exact.terms[-1]())


def assert_means_close(found, expected, count):
    """Each is a mean of `count` fp32 numbers that may be off by 1e-5 each. Their errors are independent, so the mean is
    off by 1 / √count of that. In later steps of a training the weights differ too, by the rounding of gradients: that
    changes a loss by lr times their error, some percent of this."""
    tolerance = accuracy.NORM_TOLERANCE[torch.float32] / math.sqrt(count)
    assert found.dtype == torch.float32
    error = (found.double() - expected.double()).abs()
    assert (error <= tolerance * expected.double().abs()).all(), (found, expected)


def assert_bf16_close(found, expected):
    """Each is a loss of layers in bf16, within one rounding: weights are rounded alike for all tokens of the mean."""
    error = (found.double() - expected.double()).abs()
    nothing = torch.zeros_like(error)[:, None]
    assert accuracy.one_rounding(error[:, None], expected.double()[:, None], torch.bfloat16, nothing)
