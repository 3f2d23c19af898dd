"""CUDA graphs of every module, forward and backward, in the three ways that docs/small_models.md names: the bits of
eager, also in later replays and while other graphs and streams run."""

import copy

import pytest
import torch
from stack_results import assert_equal
from torch import nn

from mhc_ops import HyperConnection, HyperHead, HyperStack, ShortConv
from mhc_ops.mhc.triton import tickets

pytestmark = pytest.mark.gpu
n, D = 4, 512


def stack(connection=None, **options):
    made = (HyperConnection(nn.Linear(D, D), n, D, **(connection or {})) for _ in range(4))
    return HyperStack(*made, **options)


MODELS = {
    "connection": lambda: HyperConnection(nn.Linear(D, D), n, D, gamma=True),
    "stack": stack,
    "normed": lambda: stack({"layer_norm": True}),
    "identity": lambda: stack({"residual": "identity"}),
    "shifted": lambda: nn.Sequential(stack(shifted=True), nn.Unflatten(-1, (1, D))),
    "recompute": lambda: stack({"layer_norm": True}, recompute=2),
    "head": lambda: nn.Sequential(HyperHead(n, D), nn.Unflatten(-1, (1, D))),
    "short_conv": lambda: nn.Sequential(nn.Unflatten(0, (1, -1)), ShortConv(n, D)),
}
by_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
by_tokens = pytest.mark.parametrize("tokens", [16, 2048])  # one launch with tickets, and the boundary's own kernels


def made(model):
    torch.manual_seed(0)
    return model().to("cuda", torch.bfloat16)


def streams(tokens, seed):
    torch.manual_seed(seed)
    return torch.randn(tokens, n, D, device="cuda", dtype=torch.bfloat16)


def step(network, x):
    """The output and all gradients."""
    network.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = network(x)
    out.float().square().sum().backward()
    return [out.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]


@by_model
@by_tokens
def test_make_graphed_callables(model, tokens):
    network = made(model)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(network), (streams(tokens, 0).requires_grad_(),))
    for seed in (1, 2):
        x = streams(tokens, seed)
        assert_equal(step(graphed, x), step(network, x))


@by_model
@by_tokens
def test_reduce_overhead(model, tokens):
    """Both compiled, so that the layers have the same kernels."""
    torch.compiler.reset()
    network = made(model)
    with_graphs = torch.compile(network, mode="reduce-overhead")
    found = [step(with_graphs, streams(tokens, seed)) for seed in (1, 2, 3, 1)]
    torch.compiler.reset()
    compiled = torch.compile(network)
    for seed, results in zip((1, 2, 3, 1), found):
        assert_equal(results, step(compiled, streams(tokens, seed)))


def trained(network, inputs, captured):
    """The parameters after a step of SGD for each input."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    x = inputs[0].clone()

    def train():
        optimizer.zero_grad(set_to_none=not captured)
        network(x).float().square().mean().backward()
        optimizer.step()

    if captured:
        before = copy.deepcopy(network.state_dict())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(stream)
        network.load_state_dict(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train()
    for given in inputs:
        x.copy_(given)
        graph.replay() if captured else train()
    return [parameter.detach().clone() for parameter in network.parameters()]


@by_model
@by_tokens
def test_a_whole_step(model, tokens):
    """Forward, backward and optimizer in one graph."""
    inputs = [streams(tokens, seed) for seed in (1, 2, 3)]
    network = made(model)
    assert_equal(trained(copy.deepcopy(network), inputs, True), trained(network, inputs, False))


def test_tickets_are_bounded():
    """Any number of captures takes no more than one reserve."""
    from mhc_ops.core import private

    if private._capturing_graph is None:
        pytest.skip("before torch 2.13 the graph of a capture is not known")
    network, x = made(stack).requires_grad_(False), streams(16, 0)
    network(x)
    reserve = tickets._reserves[torch.cuda.current_device()]
    for _ in range(3):
        left = len(reserve)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            network(x)
        assert len(reserve) == left - 1
        del graph
    assert len(tickets._returned[torch.cuda.current_device()]) >= 2
