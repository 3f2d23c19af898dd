"""MHCBlock: the guide's module, trainable."""

import copy

import pytest
import torch

import mhc_ops
from mhc_ops import MHCBlock


def test_outputs_and_parameters():
    block = MHCBlock(n=3, D=16)
    h_in, h_post, h_res = block(torch.randn(2, 5, 3, 16))
    assert (h_in.shape, h_post.shape, h_res.shape) == ((2, 5, 16), (2, 5, 3), (2, 5, 3, 3))
    shapes = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    assert shapes == {"phi": (15, 48), "alpha": (3,), "bias": (15,)}


def test_defaults_are_the_guide():
    assert repr(MHCBlock()) == "MHCBlock(n=4, D=256)"
    assert repr(MHCBlock(2, 8, backend="reference")) == "MHCBlock(n=2, D=8, backend='reference')"


def test_is_the_function():
    block = MHCBlock(n=2, D=8, norm_eps=1e-3, hc_eps=1e-2)
    x = torch.randn(4, 2, 8)
    expected = mhc_ops.mhc_forward_pre(x, block.phi, block.alpha, block.bias, norm_eps=1e-3, hc_eps=1e-2)
    assert all(torch.equal(one, other) for one, other in zip(block(x), expected))


def test_fresh_block_reads_the_mean():
    _, h_post, h_res = MHCBlock(n=4, D=64)(100 * torch.randn(50, 4, 64))
    assert (h_post - 1).abs().max() < 0.05
    assert h_res.abs().max() < 0.05


def test_state_survives_a_round_trip():
    block, other = MHCBlock(n=2, D=8), MHCBlock(n=2, D=8)
    other.load_state_dict(copy.deepcopy(block.state_dict()))
    x = torch.randn(3, 2, 8)
    assert all(torch.equal(one, two) for one, two in zip(block(x), other(x)))


def test_device_and_dtype():
    block = MHCBlock(n=2, D=8, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in block.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.interpreted
def test_trains_on_kernels():
    torch.manual_seed(0)
    block = MHCBlock(n=2, D=8, backend="triton")
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    x, target = torch.randn(32, 2, 8), torch.rand(32, 2)
    losses = []
    for _ in range(5):
        loss = (block(x)[1] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
