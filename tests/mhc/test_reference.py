"""The reference against fp64 and against itself: what everything else is compared with."""

import pytest
import torch

import mhc_ops
from mhc_ops.measure import accuracy, cases


@pytest.mark.parametrize("case", cases.CHECK, ids=str)
def test_reference_is_exact_to_fp32(case):
    rows = accuracy.measure(case, "reference")
    assert all(row.passed for row in rows), rows


@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize("n", [1, 3, 4])
def test_manual_backward_is_the_gradient(n, gamma):
    tensors = {k: v.double() for k, v in cases.PreCase((2, 5), n, 7, gamma=gamma).inputs().items()}
    outputs = accuracy.run(cases.MHC_FORWARD_PRE, tensors, "reference")
    cotangents = accuracy.random_cotangents(cases.MHC_FORWARD_PRE, outputs, seed=0)
    expected = accuracy.truth(cases.MHC_FORWARD_PRE, tensors, cotangents)
    intermediates = [outputs[name] for name in ("inv_rms", "h_mix", "h_pre", "h_post")]
    x, phi, alpha, bias = (tensors[name] for name in ("x", "phi", "alpha", "bias"))
    gradients = mhc_ops.mhc_backward_manual(x, phi, alpha, bias, *intermediates, *cotangents, tensors.get("gamma"))
    for name, gradient in zip(("dx", "dphi", "dalpha", "dbias", "dgamma"), gradients):
        if name in expected:
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)
        else:
            assert gradient is None
