"""Ranks that do not make the same call are told so, each of them, before anything is exchanged."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import run, run_each
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


def told(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def difference(one, other, function="causal_conv1d", rank=1):
    """What every rank is told if rank 0 says one and this rank the other."""
    help = ": pad the sequence" if one.split()[0] == "L" else ", in the same order"
    words = f"{function}: all ranks of the group must make the same call, got"
    return f"{words} {one} on rank 0 and {other} on rank {rank}{help}"


def assert_told(calls, expected):
    found = [told(call) for call in calls]
    assert found == expected, found


# What rank 0 and rank 1 call, and what is said of each
DIFFERENT = [
    (partial(conv, dtype=FP16), partial(conv, dtype=BF16), "type float16", "type bfloat16"),
    (partial(conv, B=2, D=6), partial(conv, B=3, D=4), "B 2, D 6", "B 3, D 4"),
    (partial(conv, W=4), partial(conv, W=3), "W 4", "W 3"),
    (conv, partial(conv, dilation=2), "dilation 1", "dilation 2"),
    (conv, partial(conv, layout="zigzag"), "layout contiguous", "layout zigzag"),
    (partial(conv, L=7, layout="zigzag"), partial(conv, layout="zigzag"), "L 7", "L 8"),
    (partial(conv, L=0), conv, "L 0", "L 8"),
    (conv, partial(conv, activation="silu"), "activation 0", "activation 1"),
    (conv, partial(conv, output_final_state=True), "output_final_state 0", "output_final_state 1"),
    (conv, partial(conv, seq_idx=torch.zeros(2, 8, dtype=torch.int32)), "seq_idx 0", "seq_idx 1"),
    (partial(packed, 8, 0, 16), partial(packed, 8, 0, 4, 16), "cu_seqlens 2", "cu_seqlens 3"),
    (partial(short, n=2, D=3), partial(short, n=3, D=2), "n 2, D 3", "n 3, D 2"),
    (short, partial(short, residual=False), "residual 1", "residual 0"),
    (partial(conv, B=1, D=3), short, "causal_conv1d, n 0, residual 0", "short_conv, n 2, residual 1"),
]


def calls_that_differ():
    """After each of them the ranks agree again."""
    for *pair, one, other in DIFFERENT:
        mine = told(pair[dist.get_rank()])
        assert mine.partition(": ")[2] == difference(one, other).partition(": ")[2], mine
        assert conv().shape == (2, 8, 6)


def a_length_of_an_earlier_call():
    """Two lengths that were agreed on; then one on each rank."""
    for L in (8, 12):
        conv(L=L)
    assert_told([partial(conv, L=(8, 12)[dist.get_rank()])], [difference("L 8", "L 12")])


def swapped_backwards(conv, rank):
    ys = [conv(), conv()]
    pairs = ("call 1", "call 2"), ("call 2", "call 1")
    assert_told([y.sum().backward for y in (ys, ys[::-1])[rank]], [difference(*pair) for pair in pairs])


def a_backward_alone(conv, rank):
    """The other rank goes on to its next call."""
    call = (conv().sum().backward, conv)[rank]
    assert_told([call], [difference("call 1, the backward", "call 2, the forward")])


def an_unused_final_state(conv, rank):
    y, state = conv(output_final_state=True)
    call = (y.sum() + state.sum(), y.sum())[rank].backward
    assert_told([call], [difference("the backward of final_state", "the backward")])


def a_call_that_one_rank_refuses(conv, rank):
    conv()
    if rank == 1:
        assert "dilation" in told(partial(conv, dilation=0))
    assert_told([conv], [difference("call 2", "call 3")])


def another_order():
    """Each in a group of its own, since calls are counted in a group."""
    for check in (swapped_backwards, a_backward_alone, an_unused_final_state, a_call_that_one_rank_refuses):
        check(partial(conv, group=dist.new_group()), dist.get_rank())


def stack_of(depth):
    torch.manual_seed(0)
    return HyperStack(*(HyperConnection(nn.Linear(8, 8), 2, 8) for _ in range(depth)))


def unequal_pieces_of_a_parallel_stack():
    """Each process has its piece of the tokens as a plain tensor, and layers gather them."""
    rank, stack, mesh = dist.get_rank(), stack_of(1), init_device_mesh("cpu", (2,))
    layers = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1))
    parallelize_module(stack, mesh, {"": HyperParallel(), "*.layer": layers})
    pieces = torch.randn(1, 4 + rank, 2, 8), torch.randn(1, 4, 2, 8).to((FP32, BF16)[rank]), torch.randn(1, 4, 2, 8)
    pairs = ("L 4", "L 5"), ("type float32", "type bfloat16")
    expected = [difference(*pair, "HyperParallel") for pair in pairs]
    assert_told([partial(stack, piece) for piece in pieces], [*expected, "nothing"])


ONCE = "PipelineStage: the stages must have each connection once, got"
# The cuts of rank 0 and of rank 1, the stage that each makes of them, and what both are told
CUTS = [
    ([2], [1], (0, 1), f"{ONCE} 0 to 2 of 4 in stage 0, 1 to 4 of 4 in stage 1"),
    ([2], [2], (0, 0), f"{ONCE} 0 to 2 of 4 in stage 0"),
    ([2], [2, 3], (0, 1), "PipelineStage: num_stages must be the same on all processes of the group, got [2, 3]"),
]


def stages_of_different_cuts():
    """Each in a group of its own, as in a program."""
    rank = dist.get_rank()
    for *cuts, places, expected in CUTS:
        stages, group = pipeline_stages(stack_of(4), cuts[rank], send="carry"), dist.new_group()
        assert_told([partial(one_step, stages, places[rank], group)], [expected])


def one_step(stages, place, group):
    stage = PipelineStage(stages[place], place, len(stages), torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=lambda out, target: (out - target).square().mean())
    x = torch.randn(1, 4, 2, 8)
    schedule.step(x) if place == 0 else schedule.step(target=x)


def a_rank_that_is_gone():
    """The connections of that process in the group are gone."""
    group = dist.new_group()
    conv(group=group)
    if dist.get_rank() == 1:
        del agree._hosts[group]
        return
    with pytest.raises(RuntimeError, match=r"^causal_conv1d: a rank of the group has ended"):
        conv(group=group)


def test_two_ranks_are_told():
    checks = [calls_that_differ, a_length_of_an_earlier_call, another_order, unequal_pieces_of_a_parallel_stack]
    run_each(2, *checks, stages_of_different_cuts, a_rank_that_is_gone)


def of_three():
    call = partial(conv, dtype=BF16 if dist.get_rank() == 2 else FP32)
    assert_told([call], [difference("type float32", "type bfloat16", rank=2)])


def test_of_more_ranks_the_one_that_differs_is_named():
    run(3, of_three)


def compiled():
    """A graph asks too, forward and backward."""
    weight, rank = torch.randn(3, 3), dist.get_rank()

    def in_graph(x):
        return distributed.causal_conv1d(x, weight, group=dist.group.WORLD, backend="hip")

    function = torch.compile(in_graph, fullgraph=True, backend="aot_eager", dynamic=True)
    short, long = (torch.randn(1, L, 3, requires_grad=True) for L in (8, 12))
    two = function(short), function(long)
    calls = partial(function, (long, short)[rank]), two[rank].sum().backward
    assert_told(calls, [difference("L 12", "L 8"), difference("L 8", "L 12")])


@pytest.mark.thorough
def test_a_graph_asks_too():
    run(2, compiled)
