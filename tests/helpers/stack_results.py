"""Where a stack is tested, what it gives, and what that is held to."""

from functools import partial

import pytest
import torch

from mhc_ops.testing import accuracy, cases

# a backend, and a device where it runs
PLACES = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(("triton", "cpu"), marks=pytest.mark.interpreted, id="interpreted"),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu, id="triton"),
]


def random_cotangents(outputs):
    generator = torch.Generator().manual_seed(cases.SEED + 3)
    return [torch.randn(o.shape, generator=generator).to(o) for o in outputs]


def gradients(out, leaves):
    """The outputs, and their gradients for random cotangents."""
    outputs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    found = torch.autograd.grad(outputs, leaves, random_cotangents(outputs), materialize_grads=True)
    return [*outputs, *found]


def exact(out, leaves, scaled=(), dtypes=None):
    """The same of fp64 tensors, and of each gradient the size of the terms that it adds up.

    scaled: tensors in between whose gradients have terms of their own; dtypes: of the outputs, and so of their
    cotangents, that these are compared with
    """
    outputs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    cotangents = random_cotangents(outputs)
    if dtypes is not None:
        cotangents = [c.to(dtype).double() for c, dtype in zip(cotangents, dtypes, strict=True)]
    by_place = partial(accuracy.gradients_of, dict(enumerate(outputs)), dict(enumerate(leaves)), again=True)
    found = accuracy.exact_gradients(by_place, [*outputs, *scaled], cotangents)
    return [*(accuracy.Exact(output.detach()) for output in outputs), *found.values()]


def assert_close(results, expected):
    truths = [e if isinstance(e, accuracy.Exact) else e.double() for e in expected]
    pairs = enumerate(zip(results, truths, strict=True))
    assert [number for number, (result, truth) in pairs if not accuracy.close(result, truth)] == []


def assert_equal(results, expected):
    assert [torch.equal(r, e) for r, e in zip(results, expected, strict=True)].count(False) == 0
