"""The modules: what they start as, what they keep, what they print."""

import threading

import pytest
import torch
from networks import D, N, streams, trained_maps
from stack_results import assert_equal, gradients
from torch import nn

import mhc_ops
from mhc_ops import HyperConnection, HyperHead, HyperStack, MHCBlock, ShortConv, mhc_expand
from mhc_ops.core import backend
from mhc_ops.testing import accuracy


def connection(n, D, **options):
    return HyperConnection(nn.Linear(D, D), n, D, **options)


def test_modules_are_the_functions(place):
    """Bit for bit, forward and backward, with their options and on their backend."""
    x, own = streams(place), {"norm_eps": 1e-3, "hc_eps": 1e-2, "backend": place[0]}
    norms = {"gamma": True, "layer_norm": True}
    for module, function, more in (
        (MHCBlock(N, D, **own), mhc_ops.mhc_forward_pre, {}),
        (HyperHead(N, D, **own), mhc_ops.mhc_head, {}),
        (HyperConnection(torch.tanh, N, D, **norms, **own), mhc_ops.mhc_layer, {"layer": torch.tanh}),
    ):
        trained_maps(module.to(place[1]))
        leaves = [x, *module.parameters()]
        expected = function(x, **dict(module.named_parameters()), **own, **more)
        assert_equal(gradients(module(x), leaves), gradients(expected, leaves))


MAPS, LAYER = {"phi": (8, 16), "alpha": (3,), "bias": (8,)}, {"layer.weight": (8, 8), "layer.bias": (8,)}
IDENTITY = {"phi": (4, 16), "alpha": (2,), "bias": (4,)}
NORMS = {"gamma": (2, 8), "layer_norm_weight": (8,)}
KEPT = {
    "block": (MHCBlock, {}, MAPS),
    "head": (HyperHead, {"gamma": True}, {"phi": (2, 16), "alpha": (1,), "bias": (2,), "gamma": (2, 8)}),
    "connection": (connection, {}, MAPS | LAYER),
    "norms": (connection, {"gamma": True, "layer_norm": True, "transposed": True}, MAPS | NORMS | LAYER),
    "identity": (connection, {"residual": "identity", "checkpoint": True, "backend": "reference"}, IDENTITY | LAYER),
}


@pytest.mark.parametrize(("module", "options", "shapes"), KEPT.values(), ids=KEPT)
def test_state(module, options, shapes, tmp_path):
    """It survives a file. Where parameters are reset, norms are 1. A stack has the keys of a sequential."""
    one, other = (module(2, 8, **options) for _ in range(2))
    assert all(f"{name}={value!r}" in repr(one) for name, value in {"n": 2, "D": 8, **options}.items())
    assert [(name, tuple(tensor.shape)) for name, tensor in one.state_dict().items()] == [*shapes.items()]
    for parameter in one.parameters():
        nn.init.normal_(parameter)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    x = torch.randn(3, 2, 8)
    assert_equal(other(x), one(x))
    other.reset_parameters()
    assert all((tensor == 1).all() for name, tensor in other.state_dict().items() if name in NORMS)
    for shifted in (False, True) if module is connection else ():
        stack = HyperStack(one, other, shifted=shifted)
        assert list(stack.state_dict()) == [f"{number}.{name}" for number in range(2) for name in shapes]


def test_fresh_maps_are_near_the_identity_and_finite():
    _, h_post, h_res = MHCBlock(n=4, D=64)(100 * torch.randn(50, 4, 64))
    assert (h_post - 1).abs().max() < 0.05 and h_res.abs().max() < 0.05
    for options in ({"hc_eps": 0.5}, {"post_mult": 0.5}, {"post_mult": 100.0}):
        assert HyperConnection(nn.Identity(), 4, 8, **options).bias.isfinite().all()
    assert HyperHead(4, 8, hc_eps=0.5).bias.isfinite().all()


FRESH = [{}, {"gamma": True}, {"post_mult": 3.0}, {"transposed": True}, {"residual": "identity", "post_eps": 0.25}]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("options", FRESH, ids=str)
def test_fresh_model_is_a_residual_network(options, shifted):
    """In fp64, where only the epsilons of the maps are left: 1e-6 each, over three layers."""
    for n in (2, 3, 4, 8):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
        made = [HyperConnection(layer, n, 16, **options) for layer in layers]
        head = HyperHead(n, 16, gamma="gamma" in options)
        model = (HyperStack(*made, shifted=True) if shifted else nn.Sequential(*made, head)).double()
        x = torch.randn(5, 16, dtype=torch.float64)
        expected = x
        for layer in layers:
            expected = expected + layer(expected)
        assert (model(mhc_expand(x, n)) - expected).norm() <= 1e-5 * expected.norm(), n


def test_one_stream_starts_a_rounding_short():
    """h_pre is 1 − 2⁻⁸, the nearest to 1 at which a sigmoid still learns; h_post and h_res are 1."""
    module = HyperConnection(lambda h: h, 1, 16)
    x = torch.randn(5, 1, 16)
    assert (module(x) - (2 - 2**-8) * x).norm() <= 1e-5 * x.norm()
    assert (HyperHead(1, 16)(x) - (1 - 2**-8) * x[:, 0]).norm() <= 1e-5 * x.norm()


def test_fresh_streams_do_not_stay_equal():
    torch.manual_seed(0)
    model = nn.Sequential(*(HyperConnection(nn.Linear(8, 8), 4, 8) for _ in range(2)), HyperHead(4, 8))
    streams = mhc_expand(torch.randn(3, 8), 4).requires_grad_()
    model(streams).square().sum().backward()
    first, *others = streams.grad.unbind(-2)
    assert all((first - other).norm() > 0.01 * first.norm() for other in others)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert model[0].phi.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_device_of_parameters(dtype):
    """The default type, but at least fp32, or what is asked for."""

    def made(**where):
        connection = HyperConnection(nn.Identity(), 2, 8, gamma=True, layer_norm=True, **where)
        return nn.ModuleList([MHCBlock(2, 8, **where), connection, HyperHead(2, 8, gamma=True, **where)])

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        maps, conv = made(), ShortConv(2, 8)
    finally:
        torch.set_default_dtype(before)
    assert conv.weight.dtype == dtype
    found = (*maps.parameters(), conv.norm_weight)
    assert {parameter.dtype for parameter in found} == {torch.promote_types(dtype, torch.float32)}
    assert all(parameter.isfinite().all() for parameter in (*found, conv.weight))
    assert {parameter.dtype for parameter in made(dtype=torch.float16).parameters()} == {torch.float16}
    asked = {(parameter.device.type, parameter.dtype) for parameter in made(device="meta", dtype=dtype).parameters()}
    assert asked == {("meta", dtype)}


def test_checkpoint_runs_again_on_the_same_backend():
    """This holds where another thread runs the backward too, as autograd does on a GPU."""
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


def test_expand():
    x = torch.randn(2, 5, requires_grad=True)
    streams = mhc_expand(x, 3)
    assert streams.shape == (2, 3, 5) and streams.is_contiguous()
    assert all(torch.equal(stream, x) for stream in streams.unbind(1))
    cotangent = torch.randn(2, 3, 5)
    (dx,) = torch.autograd.grad(streams, x, cotangent)
    assert accuracy.close(dx, cotangent.double().sum(1))
    assert mhc_expand(x, 1).data_ptr() != x.data_ptr(), "a copy, not a view"
