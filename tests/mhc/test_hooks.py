"""Where hooks go in a HyperStack, and what they see there, beside an nn.Sequential of the same connections."""

from functools import partial

import pytest
import torch
from networks import connections, step, streams
from stack_results import assert_close, assert_equal
from sublayers import both_forms
from torch import nn
from torch.utils._pytree import tree_leaves

from mhc_ops import HyperStack


def seen_on_layers(made, network, x):
    """What hooks on the layers see, in the order of the calls; the results of a step."""
    seen = []
    for number, connection in enumerate(made):
        note = partial(lambda number, layer, *given: seen.append((number, *tree_leaves(given))), number)
        connection.layer.register_forward_pre_hook(note)
        connection.layer.register_forward_hook(note)
        connection.layer.register_full_backward_pre_hook(note)
        connection.layer.register_full_backward_hook(note)
    return seen, step(network, x)


@pytest.mark.parametrize("recompute", [0, 2])
def test_on_the_layers_they_see_what_they_do_in_a_sequential(recompute, place):
    """The number of calls is the same too: recompute does not run layers again."""
    (made, others), x = (connections(place) for _ in range(2)), streams(place)
    found, results = seen_on_layers(made, HyperStack(*made, recompute=recompute), x)
    expected, of_sequential = seen_on_layers(others, nn.Sequential(*others), x)
    assert len(found) == 4 * len(made)
    for (number, *tensors), (expected_number, *expected_tensors) in zip(found, expected, strict=True):
        assert number == expected_number
        assert_equal(tensors, expected_tensors)
    assert_equal(results, of_sequential)


@both_forms
def test_on_the_connections_they_see_the_carry(shifted, place):
    """x as the connection read it, and in the backward the gradient of h_out. Results keep their bits."""
    stack, x = HyperStack(*connections(place), shifted=shifted), streams(place)
    expected, ends = step(stack, x), [stack[:count](x) for count in (1, 2)]
    between = [x, *(end[0] if shifted else end for end in ends)]
    before, after, of_connections, of_layers = [], [], [], []
    for connection in stack:
        connection.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0]))
        connection.register_forward_hook(lambda module, inputs, carry: after.append(carry))
        connection.register_full_backward_pre_hook(lambda module, doutputs: of_connections.append(doutputs[1]))
        connection.register_full_backward_hook(lambda module, dinputs, doutputs: of_connections.append(doutputs[1]))
        connection.layer.register_full_backward_hook(lambda module, dinputs, doutputs: of_layers.append(doutputs[0]))
    assert_equal(step(stack, x), expected)
    assert_equal([carry.x for carry in after], between)
    assert_equal([carry.x for carry in before], [x, *between[:2]])
    assert [carry.carry.read is not None for carry in after] == [shifted] * 3
    assert_equal(of_connections[::2], of_layers)


def test_a_loss_on_x_between(place):
    """What a hook makes of carry.x has its gradient. Connection 2 gets the x that connection 1 read, and its h_out."""

    def with_loss(network, number):
        losses = []
        network[number].register_forward_pre_hook(
            lambda module, inputs: losses.append(getattr(inputs[0], "x", inputs[0]).square().sum())
        )
        return torch.autograd.grad(network(x).sum() + losses[0], [x, *network[0].parameters()])

    x = streams(place)
    of_stack = with_loss(HyperStack(*connections(place)), 2)
    assert_close(of_stack, with_loss(nn.Sequential(*connections(place)), 1))


def test_recompute_and_a_hook_that_replaces_x(place):
    """The x of the hook is kept, as nothing says how to make it again."""

    def gradients_with(recompute):
        stack, x = HyperStack(*connections(place, 4), recompute=recompute), streams(place)
        stack[1].register_forward_hook(
            lambda module, inputs, carry: carry._replace(carry=carry.carry._replace(x=carry.x * 2, link=None))
        )
        return step(stack, x)

    assert_equal(gradients_with(3), gradients_with(0))
