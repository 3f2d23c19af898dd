"""The calls of the original guide, with only the import line changed."""

import pytest
import torch

from mhc_ops import (
    MHCBackwardTileLang,
    MHCBlock,
    MHCForwardPreTileLang,
    mhc_backward_manual,
    mhc_backward_tilelang,
    mhc_backward_triton,
    mhc_forward_pre,
    mhc_forward_pre_tilelang,
    mhc_forward_pre_triton,
    mhc_forward_pre_triton_optimized,
)
from mhc_ops.testing import accuracy

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
    outputs = mhc_forward_pre(*tensors, outflag=True)
    shapes = [(B, S, D), (B, S, n), (B, S, n, n), (B, S), (B, S, M), (B, S, n)]
    assert [output.shape for output in outputs] == shapes
    assert [output.dtype for output in outputs[:3]] == [torch.bfloat16, torch.float32, torch.float32]
    assert len(mhc_forward_pre(*tensors)) == 3


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


@pytest.mark.gpu
def test_tilelang(tensors):
    """The guide's "cross-platform" snippet, and the rest of its TileLang names."""
    pytest.importorskip("tilelang")
    x, phi, alpha, bias = (tensor.cuda() for tensor in tensors)
    op = MHCForwardPreTileLang(B, S, n, D)
    results = op(x, phi, alpha, bias)
    expected = mhc_forward_pre(x, phi, alpha, bias, backend="reference")
    assert all(accuracy.close(result, e.double()) for result, e in zip(results[1:], expected[1:]))
    assert all(torch.equal(r, e) for r, e in zip(results, mhc_forward_pre_tilelang(x, phi, alpha, bias)))
    check_backward(MHCBackwardTileLang(B, S, n, D), mhc_forward_pre_tilelang, x, phi, alpha, bias)
    check_backward(mhc_backward_tilelang, op, x, phi, alpha, bias)
    with pytest.raises(
        ValueError, match=r"^MHCForwardPreTileLang: x must be \[2, 128, 4, 256\], got \[1, 128, 4, 256\]$"
    ):
        op(x[:1], phi, alpha, bias)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_tilelang_without_a_gpu(tensors):
    for call in (lambda: MHCForwardPreTileLang(B, S, n, D), lambda: mhc_forward_pre_tilelang(*tensors)):
        with pytest.raises(RuntimeError, match=r"^mhc_forward_pre: backend 'tilelang' cannot run here: "):
            call()


def test_block_and_training_loop(tensors):
    block = MHCBlock(n=4, D=256)
    optimizer = torch.optim.SGD(block.parameters(), lr=1e-3)
    h_in, h_post, h_res = block(tensors[0])
    (h_in.float().sum() + h_post.sum() + h_res.sum()).backward()
    optimizer.step()
    assert all(parameter.grad is not None for parameter in block.parameters())
