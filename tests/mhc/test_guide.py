"""The calls of the original guide, with only the import line changed."""

import pytest
import torch

from mhc_ops import (
    MHCBlock,
    mhc_backward_manual,
    mhc_backward_triton,
    mhc_forward_pre,
    mhc_forward_pre_triton,
    mhc_forward_pre_triton_optimized,
)

B, S, n, D = 2, 128, 4, 256
M = n * n + 2 * n


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    x = torch.randn(B, S, n, D, dtype=torch.bfloat16)
    phi = torch.randn(M, n * D)
    alpha = torch.tensor([1.1, 0.9, 1.05])
    bias = torch.randn(M) * 0.1
    return x, phi, alpha, bias


def test_forward(tensors):
    h_in, h_post, h_res = mhc_forward_pre(*tensors)
    assert (h_in.dtype, h_in.shape) == (torch.bfloat16, (B, S, D))
    assert (h_post.dtype, h_post.shape) == (torch.float32, (B, S, n))
    assert (h_res.dtype, h_res.shape) == (torch.float32, (B, S, n, n))


def test_forward_with_intermediates(tensors):
    *_, inv_rms, h_mix, h_pre = mhc_forward_pre(*tensors, outflag=True)
    assert (inv_rms.shape, h_mix.shape, h_pre.shape) == ((B, S), (B, S, M), (B, S, n))


def check_backward(backward, forward, x, phi, alpha, bias):
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = forward(x, phi, alpha, bias, outflag=True)
    dh_in, dh_post, dh_res = (torch.ones_like(t) for t in (h_in, h_post, h_res))
    gamma = torch.ones(n, D, device=x.device)
    gradients = backward(x, phi, alpha, bias, inv_rms, h_mix, h_pre, h_post, dh_in, dh_post, dh_res, gamma)
    shapes = [tuple(gradient.shape) for gradient in gradients]
    assert shapes == [(B, S, n, D), (M, n * D), (3,), (M,), (n, D)]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_backward_manual(tensors):
    check_backward(mhc_backward_manual, mhc_forward_pre, *tensors)


def test_triton(tensors, kernel_device):
    x, phi, alpha, bias = (tensor.to(kernel_device) for tensor in tensors)
    with torch.no_grad():
        small = mhc_forward_pre_triton(x, phi, alpha, bias)
        large = mhc_forward_pre_triton_optimized(x, phi, alpha, bias)
    assert all(torch.equal(one, other) for one, other in zip(small, large))
    check_backward(mhc_backward_triton, mhc_forward_pre_triton, x, phi, alpha, bias)


def test_block_and_training_loop(tensors):
    block = MHCBlock(n=4, D=256)
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-3)
    h_in, h_post, h_res = block(tensors[0])
    (h_in.float().sum() + h_post.sum() + h_res.sum()).backward()
    optimizer.step()
    assert all(parameter.grad is not None for parameter in block.parameters())
