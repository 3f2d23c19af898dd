"""`traffic` computes the bytes that a step sends. test_pipeline.py counts those between stages."""

import doctest
import math
import operator
import re
from collections import Counter
from functools import partial, reduce
from pathlib import Path

import older_torch
import pytest
import torch
from processes import run
from sending import Sending
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import parallelize_module

from mhc_ops import HyperConnection, HyperStack, distributed, mhc_expand
from mhc_ops.distributed import HyperParallel, MeshSizes, ModelSizes, bytes_sent, shard_sequence, traffic


class Layer(nn.Module):
    def __init__(self, model, **pieces):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(model.D, model.width))
        self.how = {"dilation": model.dilation, **pieces}

    def forward(self, x):
        return distributed.causal_conv1d(x, self.weight, **self.how)


def _mean(pieces, h_in):
    """h_in and the mean of the whole sequence, which is gathered, as attention gathers keys and values."""
    whole = DTensor.from_local(h_in, pieces, [Shard(1)]).full_tensor(grad_placements=[Partial()])
    return h_in + whole.mean(1, keepdim=True)


def _counted(model, mesh, layout):
    """The bytes of one step, forward and backward, by collective."""
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=mesh._fields)
    group, own = devices["context"], {"layer_norm": model.layer_norm, "gamma": model.gamma}
    layers = [Layer(model, group=group, layout=layout) for _ in range(model.convolutions)]
    layers += [partial(_mean, group)] * model.attentions
    layers += [nn.Identity() for _ in range(model.connections - len(layers))]
    stack = HyperStack(*(HyperConnection(layer, model.n, model.D, **own) for layer in layers))
    x = torch.randn(model.batch // (mesh.replicate * mesh.data), model.length, model.D)
    x = shard_sequence(x, group=group, layout=layout)
    if mesh.tensor > 1:
        parallelize_module(stack, devices["tensor"], HyperParallel(use_local_output=True))
        x = shard_sequence(x, group=devices["tensor"])
    network = nn.Sequential(stack)
    if mesh.replicate * mesh.shards > 1:
        sharding = devices["replicate", "data"] if mesh.replicate > 1 else devices["data", "context"]._flatten("shards")
        network = distributed.fully_shard(network, mesh=sharding)
    x = mhc_expand(x, model.n)
    network(x).sum().backward()  # the first step also sends other things
    with Sending() as forward:
        y = network(x)
    with Sending() as backward:
        y.sum().backward()
    return forward.bytes, backward.bytes


MODEL = ModelSizes(connections=4, n=3, D=8, batch=4, length=16, itemsize=4, gamma=True)
MIXED = MODEL._replace(convolutions=2, width=3, dilation=2, attentions=1, keys=8)
CASES = [
    *((MIXED, mesh, "contiguous") for mesh in (MeshSizes(data=2), MeshSizes(data=4))),
    *((MIXED, MeshSizes(context=size), layout) for size in (2, 4) for layout in ("contiguous", "zigzag")),
    *((MODEL, mesh, "contiguous") for mesh in (MeshSizes(tensor=2), MeshSizes(data=2, tensor=2))),
    *((MIXED, mesh, "contiguous") for mesh in (MeshSizes(data=2, context=2), MeshSizes(replicate=2, data=2))),
]


def _all_counted(cases):
    return [_counted(*case) for case in cases]


@pytest.mark.parametrize("world", [2, 4])
@older_torch.MATRIX_PRODUCT
def test_counted_bytes(world):
    """The process that sends most in a direction counts."""
    cases = [case for case in CASES if math.prod(case[1]) == world]
    for (model, mesh, layout), *ranks in zip(cases, *run(world, _all_counted, cases)):
        directions = [reduce(operator.or_, counted) for counted in zip(*ranks)]  # | takes the larger counts
        expected = Counter()
        for row in traffic(model, mesh, layout=layout):
            expected[row.collective] += row.step
        assert sum(directions, Counter()) == expected, (mesh, layout)


def test_wrong_meshes_are_told():
    for mesh, sentence in {
        MeshSizes(data=3): "3 rows of processes cannot share 4 sequences equally",
        MeshSizes(context=3): "3 pieces do not divide a sequence of 16 tokens",
        MeshSizes(tensor=0): "tensor must be at least 1, got 0",
        MeshSizes(pipeline=5): "5 stages need a connection each, there are 4",
    }.items():
        with pytest.raises(ValueError, match=f"^traffic: {sentence}$"):
            traffic(MODEL, mesh)


def test_a_pipeline_sends_streams_once_each_way():
    for send in ("x_next", "carry"):
        *of_maps, there, back = traffic(MODEL, MeshSizes(data=2, pipeline=2), send=send, gathers=1)
        size = 2 * MODEL.length * distributed.boundary_bytes(MODEL.n, MODEL.D, MODEL.itemsize, send=send)
        assert [(row.dimension, row.layer, row.times) for row in (there, back)] == [("pipeline", size, 1)] * 2
        assert [row.times for row in of_maps] == [2, 2]  # of half of the connections: parameters, gradients


# Those of the page: layers as wide and as many as DeepSeek's, 8,192 tokens of bf16 on a GPU at a time.
PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
DEEPSEEK = ModelSizes(connections=122, n=4, D=7168, batch=8, length=8192, convolutions=61, width=4)
ALONE, LONG = DEEPSEEK._replace(batch=1), DEEPSEEK._replace(batch=1, length=8 * 8192)
PLAN = DEEPSEEK._replace(batch=32, length=4 * 8192), MeshSizes(replicate=4, data=8, context=4, pipeline=8)
ON_THE_PAGE = [
    (DEEPSEEK, MeshSizes(data=8), {}),
    *((LONG, mesh, {}) for mesh in (MeshSizes(context=8), MeshSizes(tensor=8))),
    *((ALONE, MeshSizes(pipeline=8), {"send": send}) for send in ("x_next", "carry")),
    (*PLAN, {"gathers": 1, "send": "carry", "layout": "zigzag"}),
]


@pytest.mark.parametrize(("model", "mesh", "how"), ON_THE_PAGE, ids=str)
def test_the_tables_of_the_page(model, mesh, how):
    page = PAGE.read_text(encoding="utf-8")
    for row in traffic(model, mesh, **how):
        what = row.what.removesuffix(": gradients") if row.dimension == "pipeline" else row.what
        times = rf"{row.times} \|" if mesh == PLAN[1] else ""
        assert re.search(rf"\| {what}.* {row.layer:,} \|.* {times}", page), row


def test_the_examples_in_docstrings():
    found = doctest.testmod(bytes_sent)
    assert found.attempted and not found.failed
    assert traffic(MIXED, MeshSizes()) == [], "one process sends nothing"
