"""Where hooks go in a HyperStack, and what they see there, beside an nn.Sequential of the same connections."""

import pytest
import torch
from networks import connections, step, streams
from stack_results import assert_equal
from torch import nn

from mhc_ops import HyperStack


def seen_by(modules, run):
    """What each kind of hook on each of these modules sees, in the order of the calls"""
    seen, handles = [], []
    for number, module in enumerate(modules):

        def note(*tensors, number=number):
            seen.append(
                (number, *(each for given in tensors for each in (given if isinstance(given, tuple) else (given,))))
            )

        handles += [
            module.register_forward_pre_hook(lambda module, inputs, note=note: note(inputs)),
            module.register_forward_hook(lambda module, inputs, output, note=note: note(inputs, output)),
            module.register_full_backward_pre_hook(lambda module, doutputs, note=note: note(doutputs)),
            module.register_full_backward_hook(lambda module, dinputs, doutputs, note=note: note(dinputs, doutputs)),
        ]
    results = run()
    for handle in handles:
        handle.remove()
    return seen, results


def assert_same_calls(found, expected):
    assert [call[0] for call in found] == [call[0] for call in expected]
    for one, other in zip(found, expected):
        assert_equal(one[1:], other[1:])


@pytest.mark.parametrize("recompute", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_on_the_layers_they_see_what_they_do_in_a_sequential(recompute, place):
    made, x = connections(place, 2), streams(place)
    layers = [connection.layer for connection in made]
    found, results = seen_by(layers, lambda: step(HyperStack(*made, recompute=recompute), x))
    expected, of_sequential = seen_by(layers, lambda: step(nn.Sequential(*made), x))
    assert len(found) == 4 * len(made)
    assert_same_calls(found, expected)
    assert_equal(results, of_sequential)


def test_on_the_connections_of_a_sequential_of_the_stack(place):
    """They see x and its gradients between connections, which a stack does not make apart. Results are the same."""
    stack, x = HyperStack(*connections(place, 2)), streams(place)
    expected = step(stack, x)
    seen, results = seen_by(stack, lambda: step(nn.Sequential(*stack), x))
    assert_equal(results, expected)
    out, dx = results[:2]
    assert torch.equal(seen[0][1], x) and torch.equal(seen[2 * len(stack) - 1][2], out)
    assert torch.equal(seen[-1][1], dx)


def test_backward_hooks_on_the_connections(place):
    """They run, and see the gradient of h_out; results keep their bits."""
    made, x = connections(place, 2), streams(place)
    of_layers, expected = [], step(HyperStack(*made), x)
    for connection in made:
        connection.layer.register_full_backward_hook(lambda module, dinputs, doutputs: of_layers.append(doutputs[0]))
        connection.register_full_backward_pre_hook(lambda module, doutputs: of_layers.append(doutputs[1]))
    assert_equal(step(HyperStack(*made), x), expected)
    assert_equal(of_layers[::2], of_layers[1::2])


def test_a_hook_that_takes_a_carry_for_a_tensor():
    stack = HyperStack(*connections(("reference", "cpu")))
    stack[1].register_forward_hook(lambda module, inputs, output: output.norm())
    with pytest.raises(
        AttributeError, match=r"^a carry of a HyperStack has no norm; hooks that take tensors go on the"
    ):
        stack(streams(("reference", "cpu")))
