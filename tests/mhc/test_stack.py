"""HyperStack: connections that hand a carry from one to the next, standard and shifted. test_hooks.py has hooks."""

import copy
import gc
from functools import cache

import pytest
import torch
from mhc_kernels import bf16, fp32
from networks import D, N, connections, step, streams
from stack_results import assert_equal, gradients
from sublayers import both_forms
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mhc_ops import HyperConnection, HyperStack
from mhc_ops.mhc import recompute as recomputing

REFERENCE = ("reference", "cpu")
fp64 = torch.float64


def connections_of(place, dtype):
    made = connections(place, 4)
    for connection in made:
        connection.layer.to(dtype)
    return made


@cache
def sequential_step(place, dtype):
    return step(nn.Sequential(*connections_of(place, dtype)), streams(place, dtype))


KINDS = [(0, bf16), (0, fp32), (1, bf16), (2, fp32), (3, bf16), (7, fp32)]


@pytest.mark.parametrize(("recompute", "dtype"), KINDS, ids=str)
def test_is_the_sequential(recompute, dtype, place, poisoned):
    """Bit for bit the same values and gradients, whatever is made again in the backward."""
    stack, x = HyperStack(*connections_of(place, dtype), recompute=recompute), streams(place, dtype)
    expected = sequential_step(place, dtype)
    assert_equal(step(stack, x), expected)
    with torch.no_grad():
        assert torch.equal(stack(x), expected[0])


def watched(stack, tensors_of):
    """Storages of what each carry of the next forward has, in a list that it fills."""
    found = []
    for connection in stack:  # the hook returns None
        connection.register_forward_hook(lambda module, _, carry: found.extend(map(storage_of, tensors_of(carry))))
    return found


def storage_of(tensor):
    return StorageWeakRef(tensor.untyped_storage())


def alive(storages):
    return [number for number, storage in enumerate(storages) if not storage.expired()]


def test_recompute_keeps_every_kth_x(kernel_device):
    place = ("triton", kernel_device)
    for recompute, expected in ((0, range(5)), (1, range(5)), (2, (0, 2, 4)), (3, (0, 3)), (10, (0,))):
        stack = HyperStack(*connections(place, 5), recompute=recompute)
        found = watched(stack, lambda carry: [carry.x])
        _held = stack(streams(place))
        gc.collect()  # the interpreter holds what it launched last
        assert alive(found) == list(expected)


def test_recompute_forgets_what_it_made(kernel_device, monkeypatch):
    """An x is dropped when the backward has passed its boundary, also where the graph is kept, and made again."""
    place = ("triton", kernel_device)
    counts, made = [], []

    def layer(h):
        h.register_hook(lambda dh: counts.append(len(alive(made))))  # returns None
        return h.tanh()

    post = recomputing.mhc_post

    def watched_post(*arguments, **options):
        x = post(*arguments, **options)
        made.append(storage_of(x))
        return x

    stack = HyperStack(*connections(place, 7, lambda: layer), recompute=3)
    out = stack(x := streams(place)).sum()
    monkeypatch.setattr(recomputing, "mhc_post", watched_post)
    once, again = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)
    assert len(made) == 2 * 4, "x 1, 2, 4 and 5, each once"
    assert len(counts) == 2 * 7 and max(counts) <= 2
    assert alive(made) == []


def test_nothing_is_held_after_the_backward():
    """No cycle of Python objects: a GPU's memory would be full before they are looked for."""
    stack = HyperStack(*connections(REFERENCE, 4), recompute=3)
    found = watched(stack, lambda carry: (carry.carry.h_post, carry.carry.h_res, carry.h_out))
    gc.collect()
    gc.disable()
    try:
        stack(streams(REFERENCE)).sum().backward()
        assert found and alive(found) == []
    finally:
        gc.enable()


@pytest.mark.parametrize("recompute", [0, 1, 3])
@pytest.mark.parametrize("number", [0, 1])
def test_changes_in_place_are_seen(number, recompute, place):
    stack, x, outputs = HyperStack(*connections(place), recompute=recompute), streams(place), []
    for connection in stack:
        connection.layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
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
    """Layers may return more than h_out and take extras, one named x. Stages of a shifted stack hand on a pair."""
    backend, device = place
    layers = [
        lambda h, scale, *, x: (h * scale + x, "cache", 7),
        lambda h, scale, *, x: (h * scale,),
        lambda h, scale, *, x: h * scale - x,
    ]
    made = [HyperConnection(layer, N, D, backend=backend, checkpoint=layer is layers[0]).to(device) for layer in layers]
    stack, x = HyperStack(*made, shifted=shifted), streams(place)
    out, rests = stack(x, 2.0, x=1.0)
    assert rests == [("cache", 7), (), ()]
    if shifted:
        pair, rests = stack[:1](x, 2.0, x=1.0)
        assert rests == [("cache", 7)]
        for stage in (stack[1:](pair, 2.0, x=1.0), stack[1:](*pair, 2.0, x=1.0)):
            assert torch.equal(stage[0], out)
        return
    assert torch.equal(HyperStack(made[2])(x, 2.0, x=1.0), made[2](x, 2.0, x=1.0))
    for connection in made:
        x, *rest = connection(x, 2.0, x=1.0) if connection is not made[2] else [connection(x, 2.0, x=1.0)]
        rests.append(tuple(rest))
    assert torch.equal(out, x) and rests[3:] == rests[:3]


FROZEN = {
    "some connections": lambda name: name.startswith(("0", "2")),
    "all maps": lambda name: "layer." not in name,
    "the layers": lambda name: "layer." in name,
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_frozen_parameters(frozen, place):
    made = connections(place)
    stack, sequential = HyperStack(*made), nn.Sequential(*made)
    for name, parameter in stack.named_parameters():
        parameter.requires_grad_(not frozen(name))
    for x in (streams(place), streams(place).detach()):
        leaves = [leaf for leaf in (x, *stack.parameters()) if leaf.requires_grad]
        assert_equal(*(gradients(network(x), leaves) for network in (stack, sequential)))


def test_slices():
    made = connections(REFERENCE, 4)
    stack = HyperStack(*made, recompute=3)
    some = stack[1:3]
    assert isinstance(some, HyperStack) and some.recompute == 3 and list(some) == made[1:3]
    assert stack[0] is made[0]
    for more in (stack + stack[:1], stack * 2, 2 * stack, HyperStack(*made[1:], recompute=3).insert(0, made[0])):
        assert isinstance(more, HyperStack) and more.recompute == 3 and len(more) > 3
    x = streams(REFERENCE)
    assert HyperStack()(x) is x
    assert torch.equal(HyperStack(shifted=True)(x), x[..., 0, :])
    same, p = HyperStack(shifted=True, last=False)(x)
    later = HyperStack(shifted=True, first=False, recompute=2)
    assert same is x and p.dtype == fp32 and torch.equal(later(x, p.roll(1, -1)), x[..., 1, :])
    assert "recompute=2, shifted=True, first=False" in repr(later)
    assert torch.equal(copy.deepcopy(stack)(x), stack(x))


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
    first_and_last = [(s.first, s.last) for s in (whole[:], whole[:2], whole[1:], whole[1:3], middle * 2)]
    assert first_and_last == [(True, True), (True, False), (False, True), (False, False), (False, False)]
