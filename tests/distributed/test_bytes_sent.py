"""`traffic` computes the bytes that a step sends, in every mesh."""

import doctest
import math
import operator
from collections import Counter
from functools import partial, reduce
from pathlib import Path

import older_torch
import pytest
import torch
from processes import run
from sending import Sending
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import parallelize_module

from mhc_ops import HyperConnection, HyperStack, mhc_expand
from mhc_ops.distributed import (
    HyperParallel,
    MeshSizes,
    ModelSizes,
    PipelineStage,
    boundary_bytes,
    bytes_sent,
    causal_conv1d,
    fully_shard,
    pipeline_stages,
    shard_sequence,
    traffic,
)


class Layer(nn.Module):
    """A convolution alone."""

    def __init__(self, model, **pieces):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(model.D, model.width))
        self.how = {"dilation": model.dilation, **pieces}

    def forward(self, x):
        return causal_conv1d(x, self.weight, **self.how)


def _mean(pieces, h_in):
    """h_in and the mean of the whole sequence, which is gathered, as attention gathers keys and values."""
    whole = DTensor.from_local(h_in, pieces, [Shard(1)]).full_tensor(grad_placements=[Partial()])
    return h_in + whole.mean(1, keepdim=True)


def _counted(model, mesh, way):
    """The bytes of one step, forward and backward, by collective. way: the layout, or what stages of a pipeline send"""
    devices = init_device_mesh("cpu", mesh, mesh_dim_names=mesh._fields)
    group, own = devices["context"], {"layer_norm": model.layer_norm, "gamma": model.gamma}
    layers = [Layer(model, group=group, layout=way) for _ in range(model.convolutions)]
    layers += [partial(_mean, group)] * model.attentions
    layers += [nn.Identity() for _ in range(model.connections - len(layers))]
    stack = HyperStack(*(HyperConnection(layer, model.n, model.D, **own) for layer in layers))
    x = torch.randn(model.batch // (mesh.replicate * mesh.data), model.length, model.D)
    if mesh.pipeline > 1:
        return _counted_of_stages(stack, mhc_expand(x, model.n), devices, mesh, way)
    x = shard_sequence(x, group=group, layout=way)
    if mesh.tensor > 1:
        parallelize_module(stack, devices["tensor"], HyperParallel(use_local_output=True))
        x = shard_sequence(x, group=devices["tensor"])
    network = nn.Sequential(stack)
    if mesh.replicate * mesh.shards > 1:
        sharding = devices["replicate", "data"] if mesh.replicate > 1 else devices["data", "context"]._flatten("shards")
        network = fully_shard(network, mesh=sharding)
    x = mhc_expand(x, model.n)
    network(x).sum().backward()  # the first step also sends other things
    with Sending() as forward:
        y = network(x)
    with Sending() as backward:
        y.sum().backward()
    return forward.bytes, backward.bytes


def _counted_of_stages(stack, x, devices, mesh, send):
    """With two microbatches."""
    rank = devices.get_local_rank("pipeline")
    part = pipeline_stages(nn.Sequential(stack), [len(stack) // mesh.pipeline], send=send)[rank]
    if mesh.data > 1:
        part = fully_shard(part, mesh=devices["data"], reshard_after_forward=False)
    kind = PipelineStage if send == "carry" else pipelining.PipelineStage
    stage = kind(part, rank, mesh.pipeline, torch.device("cpu"), group=devices.get_group("pipeline"))
    schedule = pipelining.Schedule1F1B(stage, 2, loss_fn=lambda out, target: (out * target).sum())
    step = partial(schedule.step, x) if rank == 0 else partial(schedule.step, target=x)
    step()  # the first step also sends shapes
    with Sending() as sending:
        step()
    forward = sending.bytes
    return forward, Counter({"send": forward.pop("send back", 0)})


MODEL = ModelSizes(connections=4, n=3, D=8, batch=4, length=16, itemsize=4, gamma=True)
MIXED = MODEL._replace(convolutions=2, width=3, dilation=2, attentions=1, keys=8)
CASES = [
    *((MIXED, mesh, "contiguous") for mesh in (MeshSizes(data=2), MeshSizes(data=4))),
    *((MIXED, MeshSizes(context=size), layout) for size in (2, 4) for layout in ("contiguous", "zigzag")),
    *((MODEL, mesh, "contiguous") for mesh in (MeshSizes(tensor=2), MeshSizes(data=2, tensor=2))),
    *((MIXED, mesh, "contiguous") for mesh in (MeshSizes(data=2, context=2), MeshSizes(replicate=2, data=2))),
    *((MODEL, MeshSizes(pipeline=2), send) for send in ("x_next", "carry")),
    (MODEL, MeshSizes(data=2, pipeline=2), "carry"),
]


def _all_counted(cases):
    return [_counted(*case) for case in cases]


@pytest.mark.parametrize("world", [2, 4])
@older_torch.MATRIX_PRODUCT
def test_counted_bytes(world):
    """Of the process that sends most in a direction."""
    cases = [case for case in CASES if math.prod(case[1]) == world]
    for (model, mesh, way), *ranks in zip(cases, *run(world, _all_counted, cases)):
        directions = [reduce(operator.or_, counted) for counted in zip(*ranks)]  # | takes the larger counts
        expected = Counter()
        for row in traffic(model, mesh, **({"layout": way} if mesh.pipeline == 1 else {"send": way, "gathers": 1})):
            expected[row.collective] += row.step
        assert sum(directions, Counter()) == expected, (mesh, way)


@pytest.mark.parametrize(
    ("mesh", "sentence"),
    [
        (MeshSizes(data=3), "traffic: 3 rows of processes cannot share 4 sequences equally"),
        (MeshSizes(context=3), "traffic: 3 pieces do not divide a sequence of 16 tokens"),
        (MeshSizes(pipeline=5), "traffic: 5 stages need a connection each, there are 4"),
        (MeshSizes(tensor=0), "traffic: tensor must be at least 1, got 0"),
    ],
)
def test_wrong_meshes_are_told(mesh, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        traffic(MODEL, mesh)


# The tables of the page: layers as wide and as many as DeepSeek's, 8,192 tokens of bf16 on a GPU at a time.

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
TOKENS = 8192
DEEPSEEK = ModelSizes(connections=122, n=4, D=7168, batch=1, length=TOKENS, convolutions=61, width=4)
NVLINK, NETWORK = 450, 50  # GB/s that a GPU sends: within a node of H200s, and by 400 Gb/s between nodes
DIMENSIONS = [  # context shards parameters as data does, and streams have gradients of as many bytes: said once
    (DEEPSEEK._replace(batch=8), MeshSizes(data=8), {}),
    (DEEPSEEK._replace(length=8 * TOKENS), MeshSizes(context=8), {}),
    (DEEPSEEK._replace(length=8 * TOKENS), MeshSizes(tensor=8), {}),
    (DEEPSEEK, MeshSizes(pipeline=8), {"send": "x_next"}),
    (DEEPSEEK, MeshSizes(pipeline=8), {"send": "carry"}),
]
PLAN = DEEPSEEK._replace(batch=32, length=4 * TOKENS), MeshSizes(replicate=4, data=8, context=4, pipeline=8)


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def rows_of(model, mesh, **how):
    """Rows of cells: dimension, what, how, bytes; for a carry also what is sent after the layer."""
    late = TOKENS * boundary_bytes(model.n, model.D, model.itemsize, send="carry", critical=True)
    for row in traffic(model, mesh, **how):
        if row.what == "streams: gradients":
            continue
        words = f"{row.what} ({how['send']})" if row.dimension == "pipeline" else row.what
        yield row.dimension, words, row.collective, row.layer, row.times
        if words.endswith("(carry)"):
            yield row.dimension, f"{words}, after the layer", row.collective, late, row.times


def of_dimensions():
    rows = []
    for model, mesh, how in DIMENSIONS:
        for dimension, what, collective, size, _ in rows_of(model, mesh, **how):
            if dimension == "context" and "tails" not in what:
                continue
            times = [f"{size / speed / 1e3:,.1f}" for speed in (NVLINK, NETWORK)]
            rows.append([dimension, what, collective, f"{size:,}", *times])
    return table(["dimension", "what", "how", "bytes", "µs, NVLink", "µs, network"], rows)


def of_plan(model, mesh):
    rows = []
    for dimension, what, _, size, count in rows_of(model, mesh, gathers=1, send="carry", layout="zigzag"):
        speed = NVLINK if dimension == "context" else NETWORK
        rows.append([what, dimension, f"{size:,}", f"{size / speed / 1e3:,.1f}", str(count)])
    return table(["what", "over", "bytes", "µs", "of these"], rows)


def test_the_tables_of_the_page():
    page = PAGE.read_text(encoding="utf-8")
    for expected in (of_dimensions(), of_plan(*PLAN)):
        assert expected in page, f"docs/distributed.md should have\n{expected}"


def test_the_examples_in_docstrings():
    found = doctest.testmod(bytes_sent)
    assert found.attempted and not found.failed
    assert traffic(MIXED, MeshSizes()) == [], "one process sends nothing"
