"""mhc_ops.compat.liger against the equations of Liger-Kernel, forward and backward."""

import pytest
import torch
from compat_oracle import BF16, FP32, assert_near, gradients, in_fp64, inverse_rms, logits, read, sinkhorn, write
from torch import nn

from mhc_ops.compat import liger

N, C = 4, 24
M, K = N * N + 2 * N, N * C
OPTIONS = {"tmax": 7, "rms_eps": 1e-5, "pre_eps": 1e-3, "sinkhorn_eps": 1e-4, "post_mult": 1.5}


def draw(dtype=torch.float32):
    """x, phi, b, alpha_pre, alpha_post, alpha_res; all leaves"""
    torch.manual_seed(1)
    x, phi, b = torch.randn(2, 5, N, C).to(dtype), torch.randn(K, M) / K**0.5, 0.3 * torch.randn(M)
    alphas = torch.tensor(1.1), torch.tensor(0.7), torch.tensor(1.3)
    return [tensor.requires_grad_() for tensor in (x, phi, b, *alphas)]


def expected_coeffs(x, phi, b, *alphas, tmax=20, rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6, post_mult=2.0):
    pre, post, res = logits(x, phi.T, alphas, b, lambda v: inverse_rms(v, rms_eps))
    return pre.sigmoid() + pre_eps, post_mult * post.sigmoid(), sinkhorn(res, tmax, sinkhorn_eps)


def expected_layer(x, layer, *parameters, **options):
    h_pre, h_post, h_res = expected_coeffs(x, *parameters, **options)
    return write(x, layer(read(x, h_pre)), h_post, h_res.mT)  # the mix is h_res[new, old]


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["defaults", "options"])
def test_coeffs_and_forward(options):
    x, *parameters = given = draw()
    found = liger.liger_mhc_coeffs(*given, allow_fp32=True, **options)
    maps = expected_coeffs(*(truth := in_fp64(given)), **options)
    assert_near([*found, *gradients(found, given)], [*maps, *gradients(maps, truth)], FP32)
    expected = expected_layer(truth[0], torch.tanh, *truth[1:], **options)
    call, options = (x, torch.tanh, *parameters), {"allow_fp32": True, **options}
    x_out, coeffs = liger.liger_mhc_forward(*call, return_coeffs=True, **options)
    for result in (liger.liger_mhc_forward(*call, **options), x_out):
        assert_near([result, *gradients([result], given)], [expected, *gradients([expected], truth)], FP32)
    assert_near(coeffs, maps, FP32)


def test_the_steps_are_the_layer():
    x, *parameters = draw(torch.bfloat16)
    h_pre, h_post, h_res = liger.liger_mhc_coeffs(x, *parameters)
    assert {tensor.dtype for tensor in (h_pre, h_post, h_res)} == {torch.float32}
    x_in = liger.liger_mhc_pre(x, h_pre)
    x_out = liger.liger_mhc_post_res(x, torch.tanh(x_in), h_post, h_res)
    assert x_in.dtype == x_out.dtype == torch.bfloat16
    assert torch.equal(x_out, liger.liger_mhc_forward(x, torch.tanh, *parameters))
    applied = liger.liger_mhc_apply(x, torch.tanh(x_in), h_pre, h_post, h_res, return_x_in=True)
    assert torch.equal(applied[0], x_out) and torch.equal(applied[1], x_in)
    assert torch.equal(liger.liger_mhc_apply(x, torch.tanh(x_in), h_pre, h_post, h_res), x_out)


def test_module():
    """bf16 streams, phi in fp16, a layer in fp32: types as there, values within one rounding."""
    torch.manual_seed(2)
    mhc = liger.LigerMHC(nn.Linear(C, C, bias=False), hc=N, c=C)
    parameters = [mhc.phi, mhc.b, mhc.alpha_pre, mhc.alpha_post, mhc.alpha_res]
    assert [*map(id, mhc.parameters())] == [*map(id, [*parameters, mhc.layer.weight])]
    assert [tuple(p.shape) for p in parameters] == [(K, M), (M,), (), (), ()]
    assert [p.dtype for p in mhc.parameters()] == [torch.float16] + 5 * [torch.float32]
    assert repr(mhc).startswith("LigerMHC(\n  hc=4, c=24, tmax=20")
    x = torch.randn(3, N, C).bfloat16().requires_grad_()
    truth = in_fp64([x, *parameters, mhc.layer.weight])
    found = mhc(x)
    expected = expected_layer(truth[0], lambda h_in: h_in @ truth[-1].T, *truth[1:-1])
    assert found.dtype == torch.bfloat16
    assert_near([found], [expected], BF16)
    # The layer's input and its gradient are rounded to bf16: more than one rounding in what follows.
    assert_near(gradients([found], [x, mhc.phi, mhc.b]), gradients([expected], truth[:3]), 2 * BF16)


def test_what_is_refused():
    mhc, of_any_type = (liger.LigerMHC(nn.Identity(), hc=N, c=C, allow_fp32=allowed) for allowed in (False, True))
    with pytest.raises(AssertionError, match="x must be bfloat16 or float16 without allow_fp32=True"):
        mhc(torch.randn(2, N, C))
    with pytest.raises(ValueError, match="LigerMHC: x must be "):
        mhc(torch.randn(2, 3, C).bfloat16())
    assert of_any_type(torch.randn(2, N, C)).dtype == torch.float32
