"""Ranks that do not make the same call are told so, each of them, before anything is exchanged."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from mhc_ops import HyperConnection, HyperStack, distributed
from mhc_ops.distributed import HyperParallel, PipelineStage, agree, pipeline_stages

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def conv(B=2, L=8, D=6, W=4, dtype=FP32, **options):
    x, weight = torch.randn(B, L, D).to(dtype).requires_grad_(), torch.randn(D, W).to(dtype)
    return distributed.causal_conv1d(x, weight, **{"group": dist.group.WORLD, "backend": "reference", **options})


def short(n=2, D=3, dtype=FP32, **options):
    x, gamma, weight = torch.randn(1, 8, n, D).to(dtype), torch.ones(n, D).to(dtype), torch.randn(n * D, 4).to(dtype)
    return distributed.short_conv(x, gamma, weight, group=dist.group.WORLD, backend="reference", **options)


def packed(L, *bounds):
    return conv(B=1, L=L, cu_seqlens=torch.tensor(bounds))


# What rank 0 and rank 1 call, and what is said of each
DIFFERENT = [
    (partial(conv, dtype=FP16), partial(conv, dtype=BF16), "type float16", "type bfloat16"),
    (partial(conv, dtype=FP32), partial(conv, dtype=BF16), "type float32", "type bfloat16"),
    (partial(conv, B=2, D=6), partial(conv, B=3, D=4), "B 2, D 6", "B 3, D 4"),
    (partial(conv, W=4), partial(conv, W=3), "W 4", "W 3"),
    (partial(conv, W=1), partial(conv, W=2), "W 1", "W 2"),
    (partial(conv), partial(conv, dilation=2), "dilation 1", "dilation 2"),
    (partial(conv), partial(conv, layout="zigzag"), "layout contiguous", "layout zigzag"),
    (partial(conv, L=7, layout="zigzag"), partial(conv, layout="zigzag"), "L 7", "L 8"),
    (partial(conv, L=0), partial(conv), "L 0", "L 8"),
    (partial(conv), partial(conv, activation="silu"), "activation 0", "activation 1"),
    (partial(conv), partial(conv, output_final_state=True), "output_final_state 0", "output_final_state 1"),
    (partial(conv), partial(conv, seq_idx=torch.zeros(2, 8, dtype=torch.int32)), "seq_idx 0", "seq_idx 1"),
    (partial(packed, 8, 0, 16), partial(packed, 8, 0, 4, 16), "cu_seqlens 2", "cu_seqlens 3"),
    (partial(conv, B=1), partial(packed, 8, 0, 16), "cu_seqlens 0", "cu_seqlens 2"),
    (partial(short, n=2, D=3), partial(short, n=3, D=2), "n 2, D 3", "n 3, D 2"),
    (partial(short), partial(short, residual=False), "residual 1", "residual 0"),
    (partial(conv, B=1, D=3), short, "causal_conv1d, n 0, residual 0", "short_conv, n 2, residual 1"),
]
HELP = {"L": ": pad the sequence"}


def said(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def differently(pairs):
    """What each pair of calls says on this rank, and whether the two agree again afterwards."""
    return [(said(pair[dist.get_rank()]), conv().shape) for pair in pairs]


def test_calls_that_differ_are_told_on_every_rank():
    ranks = run(2, differently, DIFFERENT)
    for call, found in enumerate(zip(*ranks)):
        _, _, one, other = DIFFERENT[call]
        help = HELP.get(one.split()[0], ", in the same order")
        words = f"all ranks of the group must make the same call, got {one} on rank 0 and {other} on rank 1{help}"
        assert [told.partition(": ")[2] for told, _ in found] == [words] * 2
        assert [shape for _, shape in found] == [(2, 8, 6)] * 2


def after_agreeing():
    """Two lengths that were agreed on, with and without packed sequences; then one on each rank; then a new one."""
    rank = dist.get_rank()
    for L in (8, 12):
        conv(L=L), packed(L, 0, 5, 2 * L)
    lengths = (8, 12)[rank], (8, 20)[rank]
    return [said(partial(packed, L, 0, 5, 16)) for L in lengths] + [said(partial(conv, L=L)) for L in lengths]


def test_a_length_of_an_earlier_call_is_asked_about_again():
    words = "causal_conv1d: all ranks of the group must make the same call, got L 8 on rank 0 and L {} on rank 1"
    expected = [f"{words.format(L)}: pad the sequence" for L in (12, 20, 12, 20)]
    assert run(2, after_agreeing) == [expected] * 2


def of_three():
    return said(partial(conv, dtype=BF16 if dist.get_rank() == 2 else FP32))


def test_of_more_ranks_one_that_differs_is_named():
    assert all("type float32 on rank 0 and type bfloat16 on rank 2" in told for told in run(3, of_three))


def swapped(conv, rank):
    """The backwards of two calls that are alike."""
    ys = [conv(), conv()]
    return [said(y.sum().backward) for y in (ys, ys[::-1])[rank]]


def alone(conv, rank):
    """A backward of one rank, while the other goes on to its next call."""
    y = conv()
    return [said((y.sum().backward, conv)[rank])]


def unused(conv, rank):
    """A final state that one rank has no use for."""
    y, state = conv(output_final_state=True)
    return [said((y.sum() + state.sum(), y.sum())[rank].backward)]


def refused(conv, rank):
    """A call that an error of its own keeps one rank from."""
    conv()
    if rank == 1:
        assert "dilation" in said(partial(conv, dilation=0))
    return [said(conv)]


ORDERS = {
    swapped: [("call 1", "call 2"), ("call 2", "call 1")],
    alone: [("call 1, the backward", "call 2, the forward")],
    unused: [("the backward of final_state", "the backward")],
    refused: [("call 2", "call 3")],
}


def in_another_order():
    """Each in a group of its own, since calls are counted in a group."""
    return [order(partial(conv, group=dist.new_group()), dist.get_rank()) for order in ORDERS]


def test_the_order_of_calls_is_compared():
    words = "causal_conv1d: all ranks of the group must make the same call, got {} on rank 0 and {} on rank 1"
    words += ", in the same order"
    expected = [[words.format(*pair) for pair in pairs] for pairs in ORDERS.values()]
    assert run(2, in_another_order) == [expected] * 2


def compiled():
    """In a graph the ranks ask too, forward and backward."""
    weight, rank = torch.randn(3, 3), dist.get_rank()

    def in_graph(x):
        return distributed.causal_conv1d(x, weight, group=dist.group.WORLD, backend="hip")

    function = torch.compile(in_graph, fullgraph=True, backend="aot_eager", dynamic=True)
    short, long = (torch.randn(1, L, 3, requires_grad=True) for L in (8, 12))
    two = function(short), function(long)
    return said(partial(function, (long, short)[rank])), said(two[rank].sum().backward)


@pytest.mark.thorough
def test_a_graph_asks_too():
    words = "causal_conv1d: all ranks of the group must make the same call, got L {} on rank 0 and L {} on rank 1"
    expected = [f"{words.format(*lengths)}: pad the sequence" for lengths in ((12, 8), (8, 12))]
    assert run(2, compiled) == [tuple(expected)] * 2


def left_alone():
    """What rank 0 is told when rank 1 is gone, as far as its connections say."""
    conv()
    if dist.get_rank() == 1:
        agree._hosts.clear()
        return "gone"
    try:
        conv()
    except RuntimeError as error:
        return str(error)


def test_a_rank_that_has_ended_is_told():
    assert run(2, left_alone)[0] == (
        "causal_conv1d: a rank of the group has ended, or has not come to the forward of this call in time: "
        "all ranks must make the same calls in the same order"
    )


def stack_of(depth=4):
    torch.manual_seed(0)
    return HyperStack(*(HyperConnection(nn.Linear(8, 8), 2, 8) for _ in range(depth)))


def in_unequal_pieces():
    """Each process has its piece of the tokens as a plain tensor, and layers gather them."""
    rank, stack, mesh = dist.get_rank(), stack_of(1), init_device_mesh("cpu", (2,))
    layers = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1))
    parallelize_module(stack, mesh, {"": HyperParallel(), "*.layer": layers})
    pieces = torch.randn(1, 4 + rank, 2, 8), torch.randn(1, 4, 2, 8).to((FP32, BF16)[rank]), torch.randn(1, 4, 2, 8)
    return [said(partial(stack, piece)) for piece in pieces]


def test_pieces_of_a_parallel_stack_are_asked_about():
    words = "HyperParallel: all ranks of the group must make the same call, got {} on rank 0 and {} on rank 1{}"
    lengths = words.format("L 4", "L 5", ": pad the sequence")
    types = words.format("type float32", "type bfloat16", ", in the same order")
    assert run(2, in_unequal_pieces) == [[lengths, types, "nothing"]] * 2


# The cuts of rank 0 and of rank 1, and the stage that each makes of them
CUTS = [([2], [1], (0, 1)), ([1], [2], (0, 1)), ([2], [2], (0, 0)), ([2], [2, 3], (0, 1))]


def in_other_stages():
    """What each pair of stages says that are none of one pipeline. Each in a group of its own, as a program would."""
    rank, told = dist.get_rank(), []
    for *cuts, places in CUTS:
        stages, group = pipeline_stages(stack_of(), cuts[rank], send="carry"), dist.new_group()
        told.append(said(partial(one_step, stages, places[rank], group)))
    return told


def one_step(stages, place, group):
    stage = PipelineStage(stages[place], place, len(stages), torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=lambda out, target: (out - target).square().mean())
    x = torch.randn(1, 4, 2, 8)
    schedule.step(x) if place == 0 else schedule.step(target=x)


def test_stages_of_different_cuts_are_told():
    words = "PipelineStage: the stages must have each connection once, got {}"
    assert (
        run(2, in_other_stages)
        == [
            [
                words.format("0 to 2 of 4 in stage 0, 1 to 4 of 4 in stage 1"),
                words.format("0 to 1 of 4 in stage 0, 2 to 4 of 4 in stage 1"),
                words.format("0 to 2 of 4 in stage 0"),
                "PipelineStage: num_stages must be the same on all processes of the group, got [2, 3]",
            ]
        ]
        * 2
    )
