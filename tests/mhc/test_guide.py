"""The calls of the original guide, with only the import line changed."""

import pytest
import torch
from stack_results import assert_close, assert_equal

from mhc_ops import (
    MHCBackwardTileLang,
    MHCForwardPreTileLang,
    mhc_backward_manual,
    mhc_backward_tilelang,
    mhc_backward_triton,
    mhc_forward_pre,
    mhc_forward_pre_tilelang,
    mhc_forward_pre_triton,
    mhc_forward_pre_triton_optimized,
)

B, S, n, D = 2, 128, 4, 256
M = n * n + 2 * n


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    x, phi = torch.randn(B, S, n, D, dtype=torch.bfloat16), torch.randn(M, n * D)
    return x, phi, torch.tensor([1.1, 0.9, 1.05]), torch.randn(M) * 0.1


def check(backward, forward, x, *parameters):
    outputs = h_in, h_post, h_res, inv_rms, h_mix, h_pre = forward(x, *parameters, outflag=True)
    shapes = [(B, S, D), (B, S, n), (B, S, n, n), (B, S), (B, S, M), (B, S, n)]
    assert [output.shape for output in outputs] == shapes
    assert [output.dtype for output in outputs[:3]] == [torch.bfloat16, torch.float32, torch.float32]
    assert len(forward(x, *parameters)) == 3
    cotangents, gamma = (torch.ones_like(t) for t in (h_in, h_post, h_res)), torch.ones(n, D, device=x.device)
    gradients = backward(x, *parameters, inv_rms, h_mix, h_pre, h_post, *cotangents, gamma)
    assert [tuple(gradient.shape) for gradient in gradients] == [(B, S, n, D), (M, n * D), (3,), (M,), (n, D)]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_reference(tensors):
    check(mhc_backward_manual, mhc_forward_pre, *tensors)


def test_triton(tensors, kernel_device):
    x, *parameters = (tensor.to(kernel_device) for tensor in tensors)
    with torch.no_grad():
        results = [forward(x, *parameters) for forward in (mhc_forward_pre_triton, mhc_forward_pre_triton_optimized)]
    assert_equal(*results)
    check(mhc_backward_triton, mhc_forward_pre_triton, x, *parameters)


@pytest.mark.gpu
def test_tilelang(tensors):
    """The guide's "cross-platform" snippet, and the rest of its TileLang names."""
    pytest.importorskip("tilelang")
    x, *parameters = (tensor.cuda() for tensor in tensors)
    op = MHCForwardPreTileLang(B, S, n, D)
    results = op(x, *parameters)
    assert_close(results[1:], mhc_forward_pre(x, *parameters, backend="reference")[1:])
    assert_equal(results, mhc_forward_pre_tilelang(x, *parameters))
    check(MHCBackwardTileLang(B, S, n, D), mhc_forward_pre_tilelang, x, *parameters)
    check(mhc_backward_tilelang, op, x, *parameters)
    message = r"^MHCForwardPreTileLang: x must be \[2, 128, 4, 256\], got \[1, 128, 4, 256\]$"
    with pytest.raises(ValueError, match=message):
        op(x[:1], *parameters)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_tilelang_without_a_gpu():
    with pytest.raises(RuntimeError, match=r"^mhc_forward_pre: backend 'tilelang' cannot run here: "):
        MHCForwardPreTileLang(B, S, n, D)
