"""HyperStack: connections that hand a carry from one to the next, standard and shifted."""

import copy
import gc
from functools import cache

import pytest
import stack_oracle
import torch
from mhc_kernels import bf16, fp16, fp32
from networks import DEPTH, MLP, D, N, connections, step, streams
from stack_results import assert_close, assert_equal, exact, gradients
from sublayers import both_forms, by_options
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import mhc_ops
from mhc_ops import HyperConnection, HyperStack
from mhc_ops.mhc import recompute as recomputing
from mhc_ops.testing import accuracy

REFERENCE = ("reference", "cpu")
fp64 = torch.float64


def connections_of(place, depth, dtype):
    """With layers of this type."""
    made = connections(place, depth)
    for connection in made:
        connection.layer.to(dtype)
    return made


@cache
def sequential_step(place, depth=DEPTH, dtype=fp32):
    """What every stack of these connections is to give."""
    return step(nn.Sequential(*connections_of(place, depth, dtype)), streams(place, dtype))


@pytest.mark.parametrize(
    ("recompute", "dtype"), [(0, bf16), (0, fp32), (1, bf16), (2, fp32), (3, bf16), (7, fp32)], ids=str
)
def test_is_the_sequential(recompute, dtype, place, poisoned):
    """Bit for bit the same values and gradients, whatever is made again in the backward."""
    stack, x = HyperStack(*connections_of(place, 4, dtype), recompute=recompute), streams(place, dtype)
    expected = sequential_step(place, 4, dtype)
    assert_equal(step(stack, x), expected)
    with torch.no_grad():
        assert torch.equal(stack(x), expected[0])


def kept(stack, x):
    """Which x of the stack are still in memory after a forward whose backward is to come."""
    found = []
    hooks = [
        connection.register_forward_hook(
            lambda module, inputs, carry: found.append(StorageWeakRef(carry.x.untyped_storage()))
        )
        for connection in stack
    ]
    _held = stack(x)
    for hook in hooks:
        hook.remove()
    gc.collect()  # the interpreter holds what it launched last
    return [number for number, storage in enumerate(found) if not storage.expired()]


def test_recompute_keeps_every_kth_x(kernel_device):
    place = ("triton", kernel_device)
    made, x = connections(place, 5), streams(place)
    for recompute, expected in ((0, range(5)), (1, range(5)), (2, (0, 2, 4)), (3, (0, 3)), (10, (0,))):
        assert kept(HyperStack(*made, recompute=recompute), x) == list(expected)


def test_recompute_does_not_run_layers_again(place):
    calls = []

    def layer():
        def counted(h_in):
            calls.append(1)
            return torch.tanh(h_in)

        return counted

    step(HyperStack(*connections(place, layer=layer), recompute=2), streams(place))
    assert len(calls) == DEPTH


def test_recompute_forgets_what_it_made(kernel_device):
    """An x is dropped when the backward has passed its boundary, not at the end, also where the graph is kept. A second
    backward makes it again."""
    place = ("triton", kernel_device)
    alive, made = [], []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return h.view_as(h)

        @staticmethod
        def backward(ctx, dh):
            alive.append(sum(not storage.expired() for storage in made))
            return dh

    post = recomputing.mhc_post

    def watched_post(*arguments, **options):
        x = post(*arguments, **options)
        made.append(StorageWeakRef(x.untyped_storage()))
        return x

    stack = HyperStack(*connections(place, 7, lambda: Watched.apply), recompute=3)
    out = stack(x := streams(place)).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputing, "mhc_post", watched_post)
        once, again = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)
    assert len(made) == 2 * 4, "x 1, 2, 4 and 5, each once"
    assert max(alive) <= 2
    assert not any(not storage.expired() for storage in made)


def test_nothing_is_held_after_the_backward():
    """No cycle of Python objects: a GPU's memory would be full before they are looked for."""
    place = REFERENCE
    stack, found = HyperStack(*connections(place, 4), recompute=3), []
    for connection in stack:
        connection.register_forward_hook(
            lambda module, inputs, carry: found.extend(
                StorageWeakRef(tensor.untyped_storage())
                for tensor in (carry.carry.h_post, carry.carry.h_res, carry.h_out)
            )
        )
    gc.collect()
    gc.disable()
    try:
        stack(streams(place)).sum().backward()
        assert [number for number, storage in enumerate(found) if not storage.expired()] == []
    finally:
        gc.enable()


def test_hooks_see_the_carry(place):
    made, x = connections(place), streams(place)
    seen = {"before": [], "after": [], "backward": []}
    for connection in made:
        connection.register_forward_pre_hook(lambda module, inputs: seen["before"].append(inputs[0].x))
        connection.register_forward_hook(lambda module, inputs, carry: seen["after"].append(carry.x))
    stack = HyperStack(*made)
    results = step(stack, x)
    between = [x]
    for connection in copy.deepcopy(made)[:2]:
        connection._forward_hooks.clear()
        connection._forward_pre_hooks.clear()
        between.append(connection(between[-1]))
    assert_equal(seen["after"], between)
    assert_equal(seen["before"], [x, x, between[1]])
    stack[1].register_full_backward_hook(lambda module, dinputs, doutputs: seen["backward"].append(doutputs))
    assert_equal(step(stack, x), results)
    assert len(seen["backward"]) == 1


def test_a_loss_on_x_between(place):
    """What a hook makes of carry.x has its gradient. Connection 2 gets the x that connection 1 read, and its h_out."""

    def with_loss(network, number):
        losses = []

        def look(module, inputs):
            losses.append(getattr(inputs[0], "x", inputs[0]).square().sum())

        handle = network[number].register_forward_pre_hook(look)
        out = network(x)
        handle.remove()
        return torch.autograd.grad(out.sum() + losses[0], [x, *network[0].parameters()])

    made, x = connections(place), streams(place)
    assert_close(with_loss(HyperStack(*made), 2), with_loss(nn.Sequential(*made), 1))


def test_recompute_and_a_hook_that_replaces_x(place):
    """The x of the hook is kept, as nothing says how to make it again."""

    def gradients_with(recompute):
        stack, x = HyperStack(*connections(place, 4), recompute=recompute), streams(place)
        stack[1].register_forward_hook(
            lambda module, inputs, carry: carry._replace(carry=carry.carry._replace(x=carry.x * 2, link=None))
        )
        return step(stack, x)

    assert_equal(gradients_with(3), gradients_with(0))


@pytest.mark.parametrize("recompute", [0, 1, 3])
@pytest.mark.parametrize("number", [0, 1])
def test_changes_in_place_are_seen(number, recompute, place):
    outputs = []

    class Kept(MLP):
        def forward(self, x):
            outputs.append(super().forward(x))
            return outputs[-1]

    stack, x = HyperStack(*connections(place, layer=Kept), recompute=recompute), streams(place)
    out = stack(x)
    with torch.no_grad():
        outputs[number].mul_(3)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|in place \w+ the forward"):
        out.sum().backward()


def test_recompute_where_hooks_are_not_allowed(place):
    stack, x = HyperStack(*connections(place), recompute=2), streams(place)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        results = step(stack, x)
    assert_equal(results, step(stack, x))


@both_forms
def test_rests_and_extras(shifted, place):
    """A layer may return more than h_out; stages of a shifted stack hand on their pair only."""
    backend, device = place

    def several(h, scale, *, shift):
        return h * scale + shift, "cache", 7

    def alone(h, scale, *, shift):
        return (h * scale,)

    def plain(h, scale, *, shift):
        return h * scale - shift

    made = [HyperConnection(layer, N, D, backend=backend).to(device) for layer in (several, alone, plain)]
    stack, x, extras = HyperStack(*made, shifted=shifted), streams(place), {"scale": 2.0, "shift": 1.0}
    out, rests = stack(x, 2.0, shift=1.0)
    assert rests == [("cache", 7), (), ()]
    if shifted:
        pair, rests = stack[:1](x, **extras)
        assert rests == [("cache", 7)]
        for stage in (stack[1:](pair, **extras), stack[1:](*pair, 2.0, shift=1.0)):
            assert torch.equal(stage[0], out)
        return
    for connection in made:
        x_next = connection(x, **extras)
        x = x_next[0] if isinstance(x_next, tuple) else x_next
    assert torch.equal(out, x)
    assert torch.equal(HyperStack(made[2])(x, **extras), made[2](x, **extras))


FROZEN = {
    "some connections": (lambda name: name.startswith(("0", "2")), (True, False)),
    "all maps": (lambda name: "layer." not in name, (False,)),
    "the layers": (lambda name: "layer." in name, (True,)),
}


@pytest.mark.parametrize(("frozen", "of_x"), FROZEN.values(), ids=FROZEN)
def test_frozen_parameters(frozen, of_x, place):
    """of_x: whether x needs a gradient."""
    made = connections(place)
    stack, sequential = HyperStack(*made), nn.Sequential(*made)
    for name, parameter in stack.named_parameters():
        parameter.requires_grad_(not frozen(name))
    for needed in of_x:
        x = streams(place).requires_grad_(needed)
        leaves = [leaf for leaf in (x, *stack.parameters()) if leaf.requires_grad]
        assert_equal(*(gradients(network(x), leaves) for network in (stack, sequential)))


def test_slices_and_repr():
    made = connections(REFERENCE, 4)
    stack = HyperStack(*made, recompute=3)
    some = stack[1:3]
    assert isinstance(some, HyperStack)
    assert some.recompute == 3
    assert list(some) == made[1:3]
    assert stack[0] is made[0]
    assert len(stack) == 4
    assert "recompute=3" in repr(stack)
    for more in (stack + stack[:1], stack * 2, 2 * stack, HyperStack(*made[1:], recompute=3).insert(0, made[0])):
        assert isinstance(more, HyperStack)
        assert more.recompute == 3
        assert len(more) > 3
    assert list(stack.state_dict()) == list(nn.Sequential(*made).state_dict())
    x = streams(REFERENCE)
    assert HyperStack()(x) is x
    assert torch.equal(copy.deepcopy(stack)(x), stack(x))


def test_norm_of_a_connection():
    connection = HyperConnection(nn.Identity(), 2, 8, layer_norm=True, dtype=fp16)
    assert connection.layer_norm_weight.dtype == fp16
    assert connection.layer_norm_weight.tolist() == [1.0] * 8
    assert set(connection.state_dict()) == {"phi", "alpha", "bias", "layer_norm_weight"}
    assert "layer_norm=True" in repr(connection)
    with torch.no_grad():
        connection.layer_norm_weight.zero_()
    connection.reset_parameters()
    assert connection.layer_norm_weight.tolist() == [1.0] * 8
    assert "layer_norm_weight" not in HyperConnection(nn.Identity(), 2, 8).state_dict()


def test_norm_of_a_connection_is_rms_norm(place):
    """As nn.RMSNorm before the layer."""
    backend, device = place
    torch.manual_seed(0)
    inner, norm = nn.Linear(D, D), nn.RMSNorm(D, eps=1e-5)
    nn.init.normal_(norm.weight)
    fused = HyperConnection(inner, N, D, layer_norm=True, layer_norm_eps=1e-5, backend=backend).to(device)
    plain = HyperConnection(nn.Sequential(norm, inner), N, D, backend="reference").to(device)
    with torch.no_grad():
        for name in ("phi", "alpha", "bias"):
            getattr(plain, name).copy_(getattr(fused, name))
        fused.layer_norm_weight.copy_(norm.weight)
    x = streams(place)
    assert accuracy.close(fused(x), plain.double()(x.double()))


# Shifted


@both_forms
@by_options
def test_plain_loops(options, shifted):
    """In fp64; recompute=2 gives the same bits."""
    made = [c.double() for c in connections(REFERENCE, gamma=True, layer_norm=True, **options)]
    x = streams(REFERENCE, fp64)
    names = ("phi", "alpha", "bias", "gamma", "layer_norm_weight")
    parameters = [{name: getattr(connection, name) for name in names} for connection in made]
    own = [{"sinkhorn_iters": 2} | options] * 3
    out = stack_oracle.stack(x, [c.layer for c in made], parameters, own, shifted=shifted)
    networks = [HyperStack(*made, shifted=shifted, recompute=recompute) for recompute in (0, 2)]
    leaves = [x, *networks[0].parameters()]
    truth = exact([stack_oracle.contract(*out) if shifted else out], leaves)
    results, again = (gradients([network(x)], leaves) for network in networks)
    assert_close(results, truth)
    assert_equal(again, results)
    if not shifted:
        assert_close(gradients([nn.Sequential(*made)(x)], leaves), truth)


@pytest.mark.parametrize("options", [{}, {"checkpoint": True}], ids=str)
def test_stages_of_a_pipeline(options):
    made = connections(REFERENCE, 4, norm_eps=1e-20, **options)
    whole, x = HyperStack(*made, shifted=True), streams(REFERENCE)
    leaves = [x, *whole.parameters()]
    expected = gradients([whole(x)], leaves)
    for cut in range(1, 4):
        assert_equal(gradients([whole[cut:](whole[:cut](x))], leaves), expected)
        assert_equal(gradients([whole[cut:](*whole[:cut](x))], leaves), expected)
    first = HyperStack(*made[:1], shifted=True, last=False)
    middle = HyperStack(*made[1:3], shifted=True, first=False, last=False)
    last = HyperStack(made[3], shifted=True, first=False)
    assert_equal(gradients([last(middle(first(x)))], leaves), expected)
    x_next, p = middle(first(x))
    assert (x_next.shape, p.shape, p.dtype) == ((2, 4, N, D), (2, 4, N), fp32)
    assert torch.equal((first + middle + last)(x), whole(x))
    assert [(s.first, s.last) for s in (whole[:2], whole[1:], whole[1:3], whole[:], middle * 2)] == [
        (True, False), (False, True), (False, False), (True, True), (False, False)]  # fmt: skip


@pytest.mark.parametrize("dtype", [bf16, fp32, fp64])
def test_a_shifted_stack_of_nothing(dtype):
    x = streams(REFERENCE, dtype, (5,))
    assert torch.equal(HyperStack(shifted=True)(x), x[:, 0])
    same, p = HyperStack(shifted=True, last=False)(x)
    assert same is x
    assert p.tolist() == [[1.0, 0, 0]] * 5
    assert p.dtype == (fp64 if dtype == fp64 else fp32)
    assert torch.equal(HyperStack(shifted=True, first=False)(x, p.roll(1, -1)), x[:, 1])


def test_hooks_see_a_shifted_carry():
    whole, x, seen = HyperStack(*connections(REFERENCE, 2), shifted=True), streams(REFERENCE), []
    whole[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    whole[1].register_full_backward_hook(lambda module, dinputs, doutputs: None)
    whole(x).sum().backward()
    assert seen[0].carry.read.shape == (2, 4, N)
    assert torch.equal(seen[0].x, x)
    assert x.grad.abs().max() > 0


def test_a_fresh_shifted_model_is_a_residual_network():
    layers = [nn.Linear(D, D) for _ in range(3)]
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    for options in ({}, {"residual": "identity"}, {"residual": "identity", "post_eps": 0.25}, {"transposed": True}):
        made = HyperStack(*(HyperConnection(inner, 4, D, norm_eps=1e-20, **options) for inner in layers), shifted=True)
        expected = x
        for inner in layers:
            expected = expected + inner(expected)
        # h_pre is a sigmoid in fp32 + 1e-6 from a logit, and the columns of h_res sum to 1 up to eps
        assert torch.allclose(made(mhc_ops.mhc_expand(x, 4)), expected, rtol=1e-4, atol=1e-4)


def test_state_and_repr_of_a_shifted_stack():
    """The keys are those of a standard one; the identity has no rows for a map that it does not have."""
    options = {"residual": "identity", "post_eps": 1e-6, "layer_norm": True, "gamma": True}
    stack = HyperStack(*connections(REFERENCE, 2, **options), shifted=True)
    layer = ("layer.up.weight", "layer.up.bias", "layer.down.weight", "layer.down.bias")
    own = ("phi", "alpha", "bias", "gamma", "layer_norm_weight", *layer)
    assert list(stack.state_dict()) == [f"{i}.{name}" for i in range(2) for name in own]
    assert [tuple(t.shape) for t in list(stack.state_dict().values())[:3]] == [(2 * N, N * D), (2,), (2 * N,)]
    other, x = copy.deepcopy(stack), streams(REFERENCE)
    other[0].reset_parameters()
    other.load_state_dict(stack.state_dict())
    assert torch.equal(other(x), stack(x))
    standard, shifted = (HyperStack(*connections(REFERENCE, 2), shifted=shifted) for shifted in (False, True))
    assert list(shifted.state_dict()) == list(standard.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.phi"):
        standard.load_state_dict(stack.state_dict(), strict=False)
    stage = HyperStack(stack[0], shifted=True, first=False, recompute=2)
    assert "recompute=2, shifted=True, first=False" in repr(stage)
    assert "residual='identity'" in repr(stage)
    assert "transposed=True" in repr(HyperConnection(nn.Identity(), 2, 8, transposed=True))
