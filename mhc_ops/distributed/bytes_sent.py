"""The bytes that hyper-connections and convolutions send in a training step, from the sizes of a model and of a mesh.

The count is for the process that sends most. A collective counts as the ring that sends least: with w shares, an
all-gather or a reduce-scatter sends w − 1 of them, an all-reduce twice as many. Not counted: what layers send for
themselves (their weights, tensor-parallel products, experts) and the few bytes of a `HyperHead`.
"""

import math
from typing import NamedTuple

from ..core.check import check_count
from .fsdp import by_columns
from .row_exchange import tail_bytes
from .stages import MAP_BYTES, Send, boundary_bytes

SUM_BYTES = 4  # gradients are summed in fp32


class MeshSizes(NamedTuple):
    """The number of processes in each dimension. replicate: groups of data × context with the same shards (HSDP)."""

    replicate: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def shards(self) -> int:
        """The number of processes among which fully_shard divides parameters."""
        return self.data * self.context


class ModelSizes(NamedTuple):
    """The sizes of a model.

    connections: `HyperConnection`s, all in a `HyperStack`   n, D, layer_norm, gamma: as in `HyperConnection`
    batch: sequences per step over all processes   length: tokens of a sequence   itemsize: bytes of x's type
    convolutions: calls of causal_conv1d on [B, L, D] in a forward, each with a weight [D, width] of its own
    attentions: layers that gather keys and values from the context group; keys: channels of both together
    """

    connections: int
    n: int
    D: int
    batch: int
    length: int
    itemsize: int = 2
    layer_norm: bool = True
    gamma: bool = False
    convolutions: int = 0
    width: int = 4
    dilation: int = 1
    attentions: int = 0
    keys: int = 0


class Sent(NamedTuple):
    """One kind of communication. layer: bytes that one layer sends   times: how often in a step"""

    what: str
    dimension: str
    collective: str
    layer: int
    times: int

    @property
    def step(self) -> int:
        return self.layer * self.times


def traffic(
    model: ModelSizes,
    mesh: MeshSizes,
    *,
    layout: str = "contiguous",
    gathers: int = 2,
    send: str = Send.X_NEXT.value,
    stages: int = 1,
) -> list[Sent]:
    """What a process sends in a step, one row for each kind. A dimension of size 1 sends nothing.

    layout: as in `mhc_ops.distributed.causal_conv1d`   send: as in `pipeline_stages`
    gathers: how often fully_shard gathers a parameter in a step: 2, in the forward and in the backward; 1 with
      reshard_after_forward=False, also for all microbatches of a pipeline. Gradients are reduced once in a step.
    stages: how many stages of the pipeline a process has; more than 1 in interleaved schedules

    >>> model = ModelSizes(connections=122, n=4, D=7168, batch=64, length=8192)
    >>> {row.what: row.layer for row in traffic(model, MeshSizes(data=64))}
    {'maps: parameters': 2738232, 'maps: gradients': 2738232}
    """
    _check(model, mesh)
    everywhere = (model.connections, model.convolutions, model.attentions)
    connections, convolutions, attentions = (-(-count // mesh.pipeline) for count in everywhere)
    sent = [
        *_sharded("maps", maps(model), MAP_BYTES, connections, mesh, gathers),
        _summed(model, mesh, connections),
        *_sharded("convolution", convolution(model), model.itemsize, convolutions, mesh, gathers),
        *_tails(model, mesh, convolutions, layout),
        *_keys(model, mesh, attentions),
        *_streams(model, mesh, send, stages),
    ]
    return [row for row in sent if row.step]


def maps(model: ModelSizes) -> list[tuple[int, ...]]:
    """The shapes of a connection's own parameters."""
    n, D = model.n, model.D
    rows = n * n + 2 * n
    optional = [(n, D)] * model.gamma + [(D,)] * model.layer_norm
    return [(rows, n * D), (3,), (rows,), *optional]


def convolution(model: ModelSizes) -> list[tuple[int, ...]]:
    return [(model.D, model.width)]


def _sharded(
    what: str, shapes: list[tuple[int, ...]], itemsize: int, count: int, mesh: MeshSizes, gathers: int
) -> list[Sent]:
    """fully_shard gathers parameters and reduce-scatters gradients; replicas add their shards of gradients."""
    shards = mesh.shards
    share = sum(_share(shape, shards) for shape in shapes)
    over = " × ".join(name for name in ("data", "context") if getattr(mesh, name) > 1)
    replicas = _all_reduce(share * SUM_BYTES, mesh.replicate)
    return [
        Sent(f"{what}: parameters", over, "all-gather", (shards - 1) * share * itemsize, gathers * count),
        Sent(f"{what}: gradients", over, "reduce-scatter", (shards - 1) * share * SUM_BYTES, count),
        Sent(f"{what}: gradients", "replicate", "all-reduce", replicas, count),
    ]


def _summed(model: ModelSizes, mesh: MeshSizes, count: int) -> Sent:
    """HyperParallel sums the gradient of each parameter over the processes, which all have the whole parameter."""
    sent = sum(_all_reduce(math.prod(shape) * SUM_BYTES, mesh.tensor) for shape in maps(model))
    return Sent("maps: gradients", "tensor", "all-reduce", sent, count)


def _share(shape: tuple[int, ...], shards: int) -> int:
    """Elements of a parameter on one process, with the padding that is sent too: see `fully_shard`."""
    rows, columns = shape[0], shape[1] if len(shape) > 1 else 1
    if by_columns(shape, shards):
        return rows * (columns // shards)
    return -(-rows // shards) * columns


def _all_reduce(size: int, world: int) -> int:
    return -(-2 * (world - 1) * size // world)


def _tails(model: ModelSizes, mesh: MeshSizes, count: int, layout: str) -> list[Sent]:
    """The last inputs of a convolution go to the next piece, and their gradients come back."""
    if mesh.context == 1:
        return []
    shape = (_sequences(model, mesh), model.length // mesh.context, model.D)
    ways = [
        tail_bytes(
            shape,
            model.itemsize,
            model.width,
            dilation=model.dilation,
            rank=rank,
            world=mesh.context,
            layout=layout,
        )
        for rank in range(mesh.context)
    ]
    forward, backward = (max(way) for way in zip(*ways))
    return [
        Sent("convolution: tails", "context", "all-to-all", forward, count),
        Sent("convolution: gradients of tails", "context", "all-to-all", backward, count),
    ]


def _sequences(model: ModelSizes, mesh: MeshSizes) -> int:
    """The number of sequences on a process."""
    return model.batch // (mesh.replicate * mesh.data)


def _keys(model: ModelSizes, mesh: MeshSizes, count: int) -> list[Sent]:
    tokens = _sequences(model, mesh) * model.length // mesh.context
    sent = (mesh.context - 1) * tokens * model.keys * model.itemsize
    return [
        Sent("attention: keys and values", "context", "all-gather", sent, count),
        Sent("attention: their gradients", "context", "reduce-scatter", sent, count),
    ]


def _streams(model: ModelSizes, mesh: MeshSizes, send: str, stages: int) -> list[Sent]:
    """x of all microbatches goes to the next stage, its gradients come back. Tensor parallel cuts x into pieces too."""
    tokens = _sequences(model, mesh) * model.length // (mesh.context * mesh.tensor)
    sent = tokens * boundary_bytes(model.n, model.D, model.itemsize, send=send)
    count = stages if mesh.pipeline > 1 else 0
    return [Sent(what, "pipeline", "send", sent, count) for what in ("streams", "streams: gradients")]


def _check(model: ModelSizes, mesh: MeshSizes) -> None:
    for name in ("connections", "n", "D", "batch", "length", "itemsize", "width", "dilation"):
        check_count("traffic", name, getattr(model, name))
    for name, size in mesh._asdict().items():
        check_count("traffic", name, size)
    if model.batch % (mesh.replicate * mesh.data):
        raise ValueError(
            f"traffic: {mesh.replicate * mesh.data} rows of processes cannot share {model.batch} sequences equally"
        )
    if model.length % mesh.context:
        raise ValueError(f"traffic: {mesh.context} pieces do not divide a sequence of {model.length} tokens")
    if model.connections < mesh.pipeline:
        raise ValueError(f"traffic: {mesh.pipeline} stages need a connection each, there are {model.connections}")
