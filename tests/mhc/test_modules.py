"""The modules: what they start as, what they keep, what they print."""

import copy
import threading
from itertools import product

import pytest
import torch
from stack_results import assert_equal
from torch import nn

import mhc_ops
from mhc_ops import HyperConnection, HyperHead, MHCBlock, ShortConv, mhc_expand
from mhc_ops.core import backend
from mhc_ops.testing import accuracy


def test_block_is_the_function():
    block = MHCBlock(n=3, D=16, norm_eps=1e-3, hc_eps=1e-2)
    shapes = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    assert shapes == {"phi": (15, 48), "alpha": (3,), "bias": (15,)}
    x = torch.randn(2, 5, 3, 16)
    expected = mhc_ops.mhc_forward_pre(x, block.phi, block.alpha, block.bias, norm_eps=1e-3, hc_eps=1e-2)
    assert [output.shape for output in expected] == [(2, 5, 16), (2, 5, 3), (2, 5, 3, 3)]
    assert_equal(block(x), expected)
    other = MHCBlock(n=3, D=16, norm_eps=1e-3, hc_eps=1e-2)
    other.load_state_dict(copy.deepcopy(block.state_dict()))
    assert_equal(other(x), expected)


def test_repr():
    assert repr(MHCBlock()) == "MHCBlock(n=4, D=256)", "as in the guide"
    assert repr(MHCBlock(2, 8, backend="reference")) == "MHCBlock(n=2, D=8, backend='reference')"
    assert repr(HyperHead(4, 64)) == "HyperHead(n=4, D=64)"
    text = repr(HyperConnection(nn.Identity(), 4, 64, gamma=True, checkpoint=True, backend="reference"))
    assert "n=4, D=64, gamma=True, checkpoint=True, backend='reference'" in text
    assert "(layer): Identity()" in text


def test_fresh_block_reads_the_mean():
    _, h_post, h_res = MHCBlock(n=4, D=64)(100 * torch.randn(50, 4, 64))
    assert (h_post - 1).abs().max() < 0.05
    assert h_res.abs().max() < 0.05


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


@pytest.mark.parametrize("gamma", [False, True])
def test_fresh_model_is_a_residual_network(gamma):
    """In fp64, where only the epsilons of the maps are left: 1e-6 each, over three layers."""
    for n, post_mult in product((2, 3, 4, 8), (2.0, 3.0)):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
        wrapped = (HyperConnection(layer, n, 16, gamma=gamma, post_mult=post_mult) for layer in layers)
        model = nn.Sequential(*wrapped, HyperHead(n, 16, gamma=gamma)).double()
        x = torch.randn(5, 16, dtype=torch.float64)
        expected = x
        for layer in layers:
            expected = expected + layer(expected)
        assert (model(mhc_expand(x, n)) - expected).norm() <= 1e-5 * expected.norm(), (n, post_mult)


def test_one_stream_starts_a_rounding_short():
    """h_pre is 1 − 2⁻⁸, the nearest to 1 at which a sigmoid still learns; h_post and h_res are 1."""
    module = HyperConnection(lambda h: h, 1, 16)
    x = torch.randn(5, 1, 16)
    assert (module(x) - (2 - 2**-8) * x).norm() <= 1e-5 * x.norm()
    assert (HyperHead(1, 16)(x) - (1 - 2**-8) * x[:, 0]).norm() <= 1e-5 * x.norm()


def test_fresh_streams_do_not_stay_equal():
    """They get different gradients, though they start with the same values."""
    torch.manual_seed(0)
    model = nn.Sequential(*(HyperConnection(nn.Linear(8, 8), 4, 8) for _ in range(2)), HyperHead(4, 8))
    streams = mhc_expand(torch.randn(3, 8), 4).requires_grad_()
    model(streams).square().sum().backward()
    first, *others = streams.grad.unbind(-2)
    assert all((first - other).norm() > 0.01 * first.norm() for other in others)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model[0].phi.grad.abs().max() > 0


@pytest.mark.parametrize("gamma", [False, True])
def test_layer_state_survives_a_round_trip(gamma, tmp_path):
    one, other = (nn.Sequential(HyperConnection(nn.Linear(8, 8), 2, 8, gamma=gamma), HyperHead(2, 8)) for _ in range(2))
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    x = torch.randn(3, 2, 8)
    assert torch.equal(one(x), other(x))
    names = {"0.phi", "0.alpha", "0.bias", "0.layer.weight", "0.layer.bias", "1.phi", "1.alpha", "1.bias"}
    assert set(one.state_dict()) == names | ({"0.gamma"} if gamma else set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_device_of_parameters(dtype):
    """The default type, but at least fp32 for maps, or what is asked for."""

    def made(**where):
        mixed = {"gamma": True, **where}
        return MHCBlock(2, 8, **where), HyperConnection(nn.Identity(), 2, 8, **mixed), HyperHead(2, 8, **mixed)

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        modules, half = (*made(), ShortConv(2, 8)), made(dtype=torch.float16)
    finally:
        torch.set_default_dtype(before)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    filters = [module.weight for module in modules if isinstance(module, ShortConv)]
    assert [parameter.dtype for parameter in filters] == [dtype]
    maps = [parameter for parameter in parameters if parameter is not filters[0]]
    assert {parameter.dtype for parameter in maps} == {torch.promote_types(dtype, torch.float32)}
    assert all(parameter.isfinite().all() for parameter in parameters)
    assert {parameter.dtype for module in half for parameter in module.parameters()} == {torch.float16}
    asked = {(p.device.type, p.dtype) for module in made(device="meta", dtype=dtype) for p in module.parameters()}
    assert asked == {("meta", dtype)}


def test_checkpoint_runs_again_on_the_same_backend():
    """Also where the backward is run by another thread, as autograd does on a GPU."""
    seen = []

    def layer(h):
        seen.append(backend.chosen())
        return h.tanh()

    module = HyperConnection(layer, 2, 8, checkpoint=True)
    with mhc_ops.use_backend("reference", conv="hip"):
        loss = module(torch.randn(3, 2, 8)).square().sum()
        expected = backend.chosen()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert seen == [expected, expected]


def test_checkpoint_runs_again_for_every_backward():
    module, x = HyperConnection(torch.tanh, 2, 8, checkpoint=True), torch.randn(3, 2, 8, requires_grad=True)
    loss = module(x).square().sum()
    once, again = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)


def test_extreme_options_start_finite():
    for options in ({"hc_eps": 0.5}, {"post_mult": 0.5}, {"post_mult": 100.0}):
        assert HyperConnection(nn.Identity(), 4, 8, **options).bias.isfinite().all()
    assert HyperHead(4, 8, hc_eps=0.5).bias.isfinite().all()


def test_expand():
    x = torch.randn(2, 5, requires_grad=True)
    streams = mhc_expand(x, 3)
    assert streams.shape == (2, 3, 5)
    assert streams.is_contiguous()
    assert all(torch.equal(stream, x) for stream in streams.unbind(1))
    cotangent = torch.randn(2, 3, 5)
    (dx,) = torch.autograd.grad(streams, x, cotangent)
    assert accuracy.close(dx, cotangent.double().sum(1))
    assert mhc_expand(x, 1).data_ptr() != x.data_ptr(), "a copy, not a view"
