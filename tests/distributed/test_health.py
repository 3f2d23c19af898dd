"""metrics on several processes: what they say together is what one process says."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from networks import MLP, D, N, unlike_connections
from processes import run
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import mhc_ops
from mhc_ops import HyperHead, HyperStack
from mhc_ops.distributed import HyperParallel, PipelineStage, fully_shard, pipeline_stages

WORLD, TOKENS, PIECES = 2, 4, 2


def model(layer=MLP):
    return nn.Sequential(HyperStack(*unlike_connections(layer=layer)), HyperHead(N, D))


def x():
    return torch.randn(WORLD * TOKENS, 3, N, D, generator=torch.Generator().manual_seed(1))


def own_x():
    return x().chunk(WORLD)[dist.get_rank()]


def loss(out, _=None):
    return out.float().square().sum()


def seen(model, step):
    with mhc_ops.metrics(model) as health:
        step()
    return health.result()


def on_one(network):
    return seen(network, lambda: loss(network(x())).backward())


def sharded():
    """FSDP2 trains it, which takes the mean of gradients."""
    network = fully_shard(model(), mesh=init_device_mesh("cpu", (WORLD,)))
    return seen(network, lambda: (WORLD * loss(network(own_x()))).backward())


def in_pieces():
    """x is a DTensor between the connections."""
    (stack, _) = model(layer=nn.Tanh)
    style = HyperParallel(sequence_dim=0, use_local_output=True)
    parallelize_module(stack, init_device_mesh("cpu", (WORLD,)), style)
    return seen(stack, lambda: loss(stack(own_x())).backward())


def piped():
    """Two steps. In the first, torch also runs stages on memory of any content, to find shapes."""
    part, rank = pipeline_stages(model(), [2], send="carry")[dist.get_rank()], dist.get_rank()
    stage = PipelineStage(part, rank, WORLD, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, n_microbatches=PIECES, loss_fn=loss, scale_grads=False)
    found = []
    for _ in range(2):
        part.zero_grad()
        found.append(seen(part, lambda: schedule.step(*([] if rank else [x()]), **({"target": x()} if rank else {}))))
    return found


def on_two():
    return sharded(), in_pieces(), piped()


def together(ranks):
    """What processes with as many tokens each say: the mean of means, the extreme of extremes, gradients once."""
    found = {}
    for name in ranks[0]:
        values = [rank[name] for rank in ranks]
        assert "norm" not in name or len(set(values)) == 1
        extreme = max if name.endswith(("max", "error")) else min if name.endswith("min") else None
        found[name] = extreme(values) if extreme else sum(values) / len(values)
    return found


def assert_alike(found, expected):
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def assert_piped(ranks):
    """Each stage has the numbers of its own connections; its gains are those of its own maps."""
    whole = on_one(model())
    of_stages = {name: value for name, value in whole.items() if "gain" not in name}
    parts = pipeline_stages(model(), [2])
    with ExitStack() as contexts:
        watched = [contexts.enter_context(mhc_ops.metrics(part)) for part in parts]
        parts[1](parts[0](x()))
    for found in zip(*ranks, strict=True):
        assert_alike({name: rank[name] for rank in found for name in rank if "gain" not in name}, of_stages)
        for rank, alone in zip(found, watched, strict=True):
            gains = {name: value for name, value in alone.result().items() if "gain" in name}
            assert_alike({name: rank[name] for name in gains}, gains)


def test_two_processes():
    sharded, pieces, piped = zip(*run(WORLD, on_two))
    assert_alike(together(sharded), on_one(model()))
    assert_alike(together(pieces), on_one(model(layer=nn.Tanh)[0]))
    assert_piped(piped)
