"""The equations of mHC as other libraries write them, in plain torch, for the tests of their stand-ins."""

import inspect
import re

import pytest
import torch

FP32 = 1e-5
BF16 = 2**-8  # one rounding


def signature(function):
    """The arguments of a function as they are written, without their types."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))[1:-1]


def says(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def in_fp64(tensors):
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def sinkhorn(z, repeat, eps):
    c = z.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def inverse_rms(v, eps):
    """[..., 1], eps within the root"""
    return (v.square().mean(-1, keepdim=True) + eps).rsqrt()


def logits(x, phi, scales, base, inverse):
    """pre, post [..., n] and res [..., n, n]; phi [n² + 2n, nD], inverse(v) is the norm's factor"""
    n, v = x.shape[-2], x.flatten(-2)
    mixes = v @ phi.T * inverse(v)
    z = torch.cat([m * s for m, s in zip(mixes.split([n, n, n * n], -1), scales)], -1) + base
    pre, post, res = z.split([n, n, n * n], -1)
    return pre, post, res.unflatten(-1, (n, n))


def read(x, pre):
    return torch.einsum("...n,...nd->...d", pre, x)


def write(x, out, post, comb):
    """comb[old, new]"""
    return torch.einsum("...mn,...md->...nd", comb, x) + post[..., None] * out[..., None, :]


def total(outputs, seed=0):
    """The sum of all outputs with fixed random weights, which are exact in bf16 cotangents"""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(output.shape, generator=generator).bfloat16().double() for output in outputs]
    return sum((output.double() * weight).sum() for output, weight in zip(outputs, weights))


def gradients(outputs, inputs):
    return torch.autograd.grad(total(outputs), inputs, retain_graph=True)


def distance(found, expected):
    """‖found − expected‖ / ‖expected‖"""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_near(found, expected, tolerance):
    """The distance of each is at most the tolerance, and the shapes are the same."""
    for nth, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape, nth
        assert distance(a, b) <= tolerance, (nth, distance(a, b))
