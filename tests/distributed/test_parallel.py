"""HyperParallel beside tensor-parallel layers: the losses and gradients of one process."""

from collections import OrderedDict
from functools import partial

import older_torch
import pytest
import torch
from networks import MLP, D, N, one_of_each
from one_process import assert_close, assert_means_close, exact_gradients
from processes import run, run_each
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mhc_ops import HyperConnection, HyperHead, HyperStack
from mhc_ops.distributed import HyperParallel

TOKENS = Shard(1)
STYLES = {"up": ColwiseParallel(input_layouts=TOKENS), "down": RowwiseParallel(output_layouts=TOKENS)}
PLAN = dict.fromkeys(("conv", "stack", "alone", "head"), HyperParallel())
PLAN |= {f"{path}.layer.{name}": style for path in ("stack.*", "alone") for name, style in STYLES.items()}


def model_of(backend="reference", recompute=0):
    return nn.Sequential(OrderedDict(one_of_each(backend, recompute)))


def streams(length=8):
    return torch.randn(2, length, N, D, generator=torch.Generator().manual_seed(0))


def loss_of(out):
    return out.square().mean()


def step(model, x):
    """The loss, and the gradients by name; the ones of x too."""
    x = x.detach().requires_grad_()
    loss = loss_of(model(x))
    loss.backward()
    return loss.detach(), {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def exact_step(x):
    """The same of one process in fp64, and how many numbers the loss is the mean of."""
    model, x = model_of().double(), x.double().requires_grad_()
    out = model(x)
    gradients = exact_gradients(lambda outputs: loss_of(*outputs), [out], {"x": x, **dict(model.named_parameters())})
    return loss_of(out).detach(), gradients, out.numel()


def train(world, backend, recompute, length):
    mesh, given = init_device_mesh("cpu", (world,)), streams(length)
    model = parallelize_module(model_of(backend, recompute), mesh, PLAN)
    loss, gradients = step(model, distribute_tensor(given, mesh, [TOKENS]))
    for name, gradient in gradients.items():
        of_layer = ".layer." in name
        assert of_layer or list(gradient.placements) == [TOKENS if name == "x" else Replicate()], name
    expected_loss, expected, count = exact_step(given)
    assert_means_close(loss.full_tensor(), expected_loss, count)
    assert_close({name: gradient.full_tensor() for name, gradient in gradients.items()}, expected)


def forms():
    """Pieces in, pieces out; a stack of two stages that is shifted; what a layer returns besides; a checkpoint."""
    mesh = init_device_mesh("cpu", (2,))
    pieces, mine = HyperParallel(use_local_output=True), streams().chunk(2, 1)[mesh.get_local_rank()]
    wide = streams().double()

    def model(*layers, checkpoint=False, **settings):
        torch.manual_seed(2)
        made = HyperStack(*(HyperConnection(layer, N, D, checkpoint=checkpoint) for layer in layers), **settings)
        return made if len(made) > 1 else made[0]

    for make in (
        partial(model, torch.tanh),
        partial(model, lambda h_in: (h_in.sin(), "besides"), checkpoint=True),
        partial(model, torch.tanh, lambda h_in: (h_in, 3)),
        partial(model, torch.tanh, torch.sin, shifted=True, last=False),
    ):
        assert_pieces(parallelize_module(make(), mesh, pieces)(mine), make().double()(wide), mesh)
    weights = streams()[..., 0]
    stages = [model(torch.tanh, torch.sin, shifted=True, first=False) for _ in range(2)]
    found = parallelize_module(stages[0], mesh, pieces)((mine, weights.chunk(2, 1)[mesh.get_local_rank()]))
    assert_pieces(found, stages[1].double()(wide, weights.double()), mesh)


def assert_pieces(found, expected, mesh):
    """expected: whole, in fp64"""
    if isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor
        assert_close({"piece": found}, {"piece": expected.chunk(2, 1)[mesh.get_local_rank()]})
    elif isinstance(expected, (tuple, list)):
        for one, other in zip(found, expected, strict=True):
            assert_pieces(one, other, mesh)
    else:
        assert found == expected


def wrong_use():
    mesh = init_device_mesh("cpu", (2,))

    def connection(layer):
        return parallelize_module(HyperConnection(layer, N, D), mesh, HyperParallel())

    layer, plain = MLP(), connection(torch.tanh)
    parallelize_module(layer, mesh, {"up": ColwiseParallel(input_layouts=TOKENS), "down": RowwiseParallel()})
    gathering = connection(layer)
    head, square = parallelize_module(HyperHead(N, D), mesh, HyperParallel()), init_device_mesh("cpu", (2, 1))
    for words, use in {
        "takes a HyperConnection, .* or ShortConv, got Linear$": lambda: HyperParallel()._apply(nn.Linear(D, D), mesh),
        "the mesh must have one dimension, got 2: slice it$": lambda: HyperParallel()._apply(HyperHead(N, D), square),
        "every rank must have a token, got 0$": lambda: plain(streams(0)),
        "every rank must have a token, got 1 on 2 ranks$": lambda: plain(distribute_tensor(streams(1), mesh, [TOKENS])),
        r"sequence_dim=1 is not a token dimension of x \[8, 3, 20\]$": lambda: plain(streams()[0]),
        r"the layer returned \[2, 16, 20\] where .* piece is \[2, 8, 20\]; .*Shard\(1\)": lambda: gathering(streams()),
        "x must be given by its position$": lambda: head(x=streams()),
        "the plan must name the HyperStack, not its connections$": lambda: HyperStack(plain)(streams()),
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"^HyperParallel: {words}"):
            use()
    with pytest.raises(TypeError, match=r"^HyperConnection: x must be a torch.Tensor, got NoneType$"):
        plain(None)


@older_torch.MATRIX_PRODUCT
def test_two_ranks():
    run_each(2, partial(train, 2, "reference", 0, 8), forms, wrong_use)


def beside_data_parallel():
    """Half of the batch on two ranks each, which have half of the sequence each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(model_of(), mesh["tensor"], PLAN)
    for connection in (model.stack[0], model.stack[2], model.alone):
        fully_shard(connection.layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    mine = streams().chunk(2)[mesh.get_local_rank("data")]
    _, gradients = step(model, distribute_tensor(mine, mesh["tensor"], [TOKENS]))
    _, expected, _ = exact_step(streams())
    for of_parameters in (gradients, expected):
        del of_parameters["x"]  # of half of the batch
    assert_close({name: gradient.full_tensor() for name, gradient in gradients.items()}, expected)


@older_torch.MATRIX_PRODUCT
def test_four_ranks_that_do_not_divide_the_sequence_and_two_by_two():
    run_each(4, partial(train, 4, "reference", 0, 7), beside_data_parallel)


@pytest.mark.interpreted
def test_kernels_that_leave_x_out_of_what_is_kept():
    run(2, train, 2, "triton", 2, 4)
