"""The convolution over a sequence in pieces: the bits of one process, and its gradients."""

import warnings
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from one_process import close_in_parts
from processes import run
from sending import Sending
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import mhc_ops
from mhc_ops import distributed
from mhc_ops.core import call
from mhc_ops.core.op import Op
from mhc_ops.distributed.pieces import pieces_of
from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import PLACES, ConvCase


@dataclass(frozen=True)
class Packed(ConvCase):
    """With these boundaries in the place of its own."""

    bounds: tuple[int, ...] = ()

    def _drawn(self, normal, generator):
        tensors = super()._drawn(normal, generator) | {"cu_seqlens": torch.tensor(self.bounds)}
        if "initial_state" in tensors:
            state = normal(len(self.bounds) - 1, self.D, (self.W - 1) * self.dilation)
            tensors["initial_state"] = state.to(self.dtype)
        return tensors

    def __str__(self):
        return f"{super().__str__()} {self.bounds}"


BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS = ("contiguous", "zigzag")
ROWS = ("x", "residual", "seq_idx")  # what each rank has its own tokens of


def shard(tensor, layout):
    return distributed.shard_sequence(tensor, group=dist.group.WORLD, layout=layout)


def gathered(tensor, layout):
    """The whole sequence, from the tokens of each rank."""
    world = dist.get_world_size()
    parts = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(parts, tensor.contiguous())
    pieces = {}
    for rank, part in enumerate(parts):
        mine = pieces_of(rank, world, layout)
        pieces |= zip(mine, part.chunk(len(mine), 1))
    return torch.cat([pieces[i] for i in sorted(pieces)], 1)


def summed(tensor):
    total = tensor.double()
    dist.all_reduce(total)
    return total.to(tensor.dtype)


def in_pieces(case, backend, layout, ran):
    """The results of the case by name, of this rank's tokens, or this rank's share of them."""
    subject = case.subject
    given = {name: shard(t, layout) if name in ROWS else t.detach().clone() for name, t in ran.tensors.items()}
    leaves = {name: t.detach().clone() for name, t in given.items()}
    wanted = {name: leaf.requires_grad_() for name, leaf in leaves.items() if leaf.is_floating_point()}
    common = {"backend": backend, "group": dist.group.WORLD, "layout": layout, "dilation": case.dilation}
    if case.n:
        outputs = distributed.short_conv(**leaves, **common, residual=case.residual, norm_eps=case.norm_eps)
    else:
        own = {"activation": "silu" if case.silu else None, "output_final_state": "final_state" in subject.outputs}
        outputs = distributed.causal_conv1d(**leaves, **common, **own)
    outputs = dict(zip(subject.outputs, outputs if isinstance(outputs, tuple) else (outputs,)))
    cotangents = dict(zip(subject.outputs, ran.cotangents))
    given = {"y": shard(cotangents["y"], layout)}
    if "final_state" in outputs:  # every rank has a share of it
        given["final_state"] = cotangents["final_state"] * (dist.get_rank() == 1)
    found = torch.autograd.grad([outputs[name] for name in given], list(wanted.values()), list(given.values()))
    return {name: o.detach() for name, o in outputs.items()} | {f"d{n}": g for n, g in zip(wanted, found)}


def wrong(case, backend, layout):
    """What is wrong with this case, as words."""
    ran = accuracy.run_case(case, backend)
    results = in_pieces(case, backend, layout, ran)
    told = []
    whole = {}
    for name, result in results.items():
        if name in ("y", "final_state"):
            whole[name] = gathered(result, layout) if name == "y" else result
            if not torch.equal(whole[name], ran.results[name]):
                told.append(f"{name} has other bits")
        elif name.removeprefix("d") in ROWS:
            whole[name] = gathered(result, layout)
        else:
            whole[name] = summed(result)
    if dist.get_rank() > 0:
        return []
    told += bits_of_dx(case, layout, whole["dx"], ran.results["dx"])
    exact = accuracy.truth(case.subject, ran.tensors, ran.cotangents)
    for name, result in whole.items():
        if not close_in_parts(result, exact[name]):
            told.append(f"{name} is off by {(result.double() - exact[name].value).abs().max():.3g}")
    return [f"{layout} {dist.get_world_size()} {backend} {case}: {words}" for words in told]


def bits_of_dx(case, layout, dx, expected):
    """dx has the bits of one process but where the parts of two ranks meet, in the last S rows of a piece."""
    count = dist.get_world_size() * len(pieces_of(0, 1, layout))
    length, S = case.L // count, (case.W - 1) * case.dilation
    if case.places in ("states", "cu_seqlens states"):
        return []  # the gradient of the final state is added
    inner = [slice(i * length, (i + 1) * length - (S if i < count - 1 else 0)) for i in range(count)]
    inner = [rows for rows in inner if rows.start < rows.stop]
    return [f"dx has other bits in {rows}" for rows in inner if not torch.equal(dx[:, rows], expected[:, rows])]


def all_wrong(cases, backend, layouts=LAYOUTS):
    return [words for case in cases for layout in layouts for words in wrong(case, backend, layout)]


def packed_cases(world):
    """Sequences that cross pieces and pieces that are shorter than the tail. L is a multiple of 2·world; pieces of a
    zigzag are half as long as the others."""

    def L(rows):
        return 2 * world * rows

    # sequences that begin and end right before and behind the begin of a piece, one that is empty there, padding first
    close = (1, L(11) // 2 - 2, L(11) // 2 - 1, L(11) // 2 - 1, L(11) // 2 + 2, L(11) - 1)
    impossible = (-3, 4, 2, L(11) - 5, 9, L(11) + 7)
    return [
        *(
            Packed(1, L(11), 5, 3, dtype, dilation=2, places="cu_seqlens states", residual=True, bounds=bounds)
            for bounds in (close, impossible)
            for dtype in (FP32, BF16)
        ),
        *(ConvCase(1, L(11), 5, 3, FP32, dilation=2, places=places, residual=True) for places in PLACES),
        *(ConvCase(1, L(rows), 5, 4, FP32, dilation=2, places=p) for rows in (1, 3, 5) for p in ("", *PLACES)),
        *(ConvCase(2, L(rows), 5, 3, FP32, dilation=2, n=2) for rows in (1, 3, 9)),
        ConvCase(2, L(9), 5, 3, BF16, places="seq_idx states"),
    ]


def dense_cases(world):
    def L(rows):
        return 2 * world * rows

    return [
        *(ConvCase(2, L(9), 5, W, FP32) for W in range(1, 9)),
        *(ConvCase(2, L(8), 6, 3, dtype, dilation=d, residual=d > 1) for d in (1, 2, 3) for dtype in (FP32, BF16)),
        *(ConvCase(2, L(7), 5, scale=scale) for scale in (1e-3, 1e3)),
        ConvCase(2, L(7), 5, silu=False, bias=False, dtype=FP32),
        ConvCase(2, L(7), 5, parameter_dtype=BF16),
        *(ConvCase(1, L(11), 5, 4, BF16, places=places) for places in PLACES),
        *(ConvCase(2, L(rows), 5, 3, BF16, dilation=2, n=2) for rows in (3, 9)),
        ConvCase(1, L(9), 6, 4, FP32, n=3, residual=True, norm_eps=0.0),
        ConvCase(1, L(9), 6, 1, FP32, n=3, residual=True),
        ConvCase(1, L(9), 6, 1, FP32, places="cu_seqlens"),
    ]


def held(world, cases, backend, layouts=LAYOUTS):
    found = run(world, all_wrong, cases, backend, layouts)
    assert not found[0], "\n".join(found[0])


def test_reference_of_2_ranks():
    held(2, [*packed_cases(2), *dense_cases(2)], "reference")


@pytest.mark.parametrize("world", [3, 4])
def test_reference_of_more_ranks(world):
    held(world, packed_cases(world), "reference")


def test_hip():
    held(2, [case for case in (*packed_cases(2), *dense_cases(2)) if case.runs_on("hip")], "hip")


# A launch takes a tenth of a second in the interpreter, so every way once
INTERPRETED = {
    "contiguous": [
        ConvCase(1, 12, 3, 3, FP32, n=2, residual=True),
        Packed(1, 14, 3, 3, BF16, places="cu_seqlens states", bounds=(1, 6, 6, 8, 13)),
    ],
    "zigzag": [ConvCase(1, 20, 3, 2, FP32, places="seq_idx states")],
}


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton(layout):
    held(2, INTERPRETED[layout], "triton", (layout,))


def sent_by(call):
    """Bytes, without the message in which the ranks agree. And what it returned."""
    with Sending() as sending:
        result = call()
    assert set(sending.bytes) <= {"all-to-all"}
    return sending.bytes.total(), result


def count_sent():
    """Forward and backward, and what tail_bytes says; of several shapes."""
    found, rank, world = [], dist.get_rank(), dist.get_world_size()
    for layout in LAYOUTS:
        for shape, W, dilation, ids in (((2, 12, 5), 4, 2, False), ((1, 12, 3), 3, 1, True), ((2, 2, 4), 3, 2, False)):
            x, weight = torch.randn(shape, dtype=BF16, requires_grad=True), torch.randn(shape[2], W)
            seq_idx = torch.zeros(shape[:2], dtype=torch.int32) if ids else None
            common = {"dilation": dilation, "group": dist.group.WORLD, "layout": layout, "backend": "reference"}
            forward, y = sent_by(partial(distributed.causal_conv1d, x, weight, seq_idx=seq_idx, **common))
            backward, _ = sent_by(partial(y.sum().backward, retain_graph=True))
            known = {"dilation": dilation, "rank": rank, "world": world, "layout": layout, "seq_idx": ids}
            expected = distributed.tail_bytes(shape, x.element_size(), W, **known)
            found.append(((forward, backward), expected))
    x, weight = torch.randn(1, 8, 2, 3, requires_grad=True), torch.randn(6, 3)
    forward, _ = sent_by(partial(distributed.short_conv, x, torch.ones(2, 3), weight, group=dist.group.WORLD))
    expected, _ = distributed.tail_bytes(x.shape, 4, 3, rank=rank, world=world)
    return [*found, (forward, expected)]


def test_sent_bytes():
    ranks = run(3, count_sent)
    for found in ranks:
        for sent, expected in found:
            assert sent == expected
    # S rows of [B, D] to the next rank, and as many back from it
    assert [found[0][0] for found in ranks] == [(6 * 2 * 5 * 2, 0), (6 * 2 * 5 * 2,) * 2, (0, 6 * 2 * 5 * 2)]


class Order(TorchDispatchMode):
    """What is begun, in order: an exchange, the wait for it, and calls of the convolution by the rows they take."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional":
            self.seen.append({"all_to_all_single": "send", "wait_tensor": "wait"}[function._opname])
        elif function.namespace == "mhc_ops":
            self.seen.append(args[0].shape[1])
        return function(*args, **(kwargs or {}))


def in_order(L, W, layout):
    """Of a forward and of its backward."""
    x, weight = torch.randn(1, L, 3, requires_grad=True), torch.randn(3, W, requires_grad=True)
    conv = partial(distributed.causal_conv1d, x, weight, group=dist.group.WORLD, layout=layout, backend="hip")
    with Order() as forward:
        y = conv()
    with Order() as backward:
        y.sum().backward()
    return forward.seen, backward.seen


def test_rows_are_computed_while_others_travel():
    """Sent first, awaited when all rows are computed: behind that come, of each piece that has a history, only the S
    rows at its begin. Backward the gradients of the history, from a call on it and 2·S rows, go first."""
    L, S = 20, 2
    first, second = run(2, in_order, L, S + 1, "contiguous")
    assert first == (["send", L, "wait"], ["send", L, "wait"])
    assert second == (["send", L, "wait", 2 * S], [3 * S, "send", L, 2 * S, "wait"])
    # Two pieces are two rows of a batch; all of the four but the first have a history.
    for pieces, (forward, backward) in zip((1, 2), run(2, in_order, L, S + 1, "zigzag")):
        assert forward == ["send", L // 2, "wait", *[2 * S] * pieces]
        assert backward == [*[3 * S] * pieces, "send", L // 2, *[2 * S] * pieces, "wait"]


def message(call):
    try:
        call()
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misused():
    """What is said, for each wrong use."""
    rank, group, weight = dist.get_rank(), dist.group.WORLD, torch.randn(3, 4)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("context", "other"))

    def conv(rows, weight=weight, **options):
        return distributed.causal_conv1d(torch.randn(1, rows, 3), weight, **{"group": group, **options})

    def twice():
        x = torch.randn(1, 8, 3, requires_grad=True)
        y = distributed.causal_conv1d(x, weight, group=group, activation="silu")
        torch.autograd.grad(y.sum(), x, create_graph=True)

    assert conv(8, group=mesh["context"]).shape == (1, 8, 3)
    whole = DTensor.from_local(torch.randn(1, 8, 3), mesh["context"], [Shard(1)])
    return {
        "lengths": message(lambda: conv(5 if rank else 6)),
        "no tokens": message(lambda: conv(0)),
        "odd": message(lambda: conv(7, layout="zigzag")),
        "short_conv": message(
            lambda: distributed.short_conv(torch.randn(1, 3 + rank, 1, 3), torch.ones(1, 3), weight, group=group)
        ),
        "layout": message(lambda: conv(8, layout="ring")),
        "mesh": message(lambda: conv(8, group=mesh)),
        "no group": message(lambda: conv(8, group=None)),
        "left out": message(lambda: distributed.causal_conv1d(torch.randn(1, 8, 3), weight)),
        "DTensor": message(lambda: distributed.causal_conv1d(whole, weight, group=group)),
        "state": message(lambda: conv(8, initial_state=torch.randn(1, 3, 2))),
        "cut": message(lambda: distributed.shard_sequence(torch.randn(1, 6, 3), group=group, layout="zigzag")),
        "second": message(twice),
    }


def test_wrong_use_is_told():
    one, other = run(2, misused)
    assert one == other
    assert one == {
        "lengths": "ValueError: causal_conv1d: all ranks of the group must make the same call, got L 6 on rank 0 and "
        "L 5 on rank 1: pad the sequence",
        "no tokens": "ValueError: causal_conv1d: every rank must have tokens",
        "odd": "ValueError: causal_conv1d: a rank must have an even number of tokens with layout='zigzag', got 7",
        "short_conv": "ValueError: short_conv: all ranks of the group must make the same call, got L 3 on rank 0 and "
        "L 4 on rank 1: pad the sequence",
        "layout": "ValueError: causal_conv1d: layout must be 'contiguous' or 'zigzag', got 'ring'",
        "mesh": one["mesh"],
        "no group": "TypeError: causal_conv1d: group must be a ProcessGroup that this rank is in or a DeviceMesh, "
        "got NoneType",
        "left out": "TypeError: causal_conv1d() missing 1 required keyword-only argument: 'group'",
        "DTensor": "TypeError: causal_conv1d: x must be this rank's tokens as a plain tensor, x.to_local(), "
        "got a DTensor",
        "state": "ValueError: causal_conv1d: initial_state must be [1, 3, 3], got [1, 3, 2]",
        "cut": "ValueError: shard_sequence: 4 pieces do not divide a sequence of 6 tokens: pad it",
        "second": "NotImplementedError: a convolution over a sequence in pieces has no second derivative",
    }
    assert one["mesh"].startswith("ValueError: causal_conv1d: group must be one dimension of the mesh")


def alone():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = groups[dist.get_rank()]
    x, streams, weight = torch.randn(1, 7, 6), torch.randn(1, 7, 2, 3), torch.randn(6, 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        y, state = distributed.causal_conv1d(x, weight, group=mine, layout="zigzag", output_final_state=True)
        z = distributed.short_conv(streams, torch.ones(2, 3), weight, group=mine)
    expected = (
        *mhc_ops.causal_conv1d(x, weight, output_final_state=True),
        mhc_ops.short_conv(streams, torch.ones(2, 3), weight),
    )
    same = all(torch.equal(one, other) for one, other in zip((y, state, z), expected))
    return same, [str(warning.message) for warning in told]


def test_a_group_of_one_is_the_plain_function_and_told():
    said = "a group of one rank has nothing to exchange: this is mhc_ops."
    words = [f"{function}: {said}{function}" for function in ("causal_conv1d", "short_conv")]
    assert run(2, alone) == [(True, words)] * 2


def compiled():
    """Whether one graph has the bits of the eager call, the next one too, for any length. Ranks that only give or only
    take are those that a compiler could have send in another call than the others, who would then wait."""
    group, weight = dist.group.WORLD, torch.randn(3, 3, requires_grad=True)

    def conv(x, weight, seq_idx):
        return distributed.causal_conv1d(x, weight, seq_idx=seq_idx, activation="silu", group=group, backend="hip")

    in_one_graph, same = torch.compile(conv, fullgraph=True, backend="aot_eager"), []
    for L in (8, 11):
        x, seq_idx = torch.randn(1, L, 3, requires_grad=True), torch.zeros(1, L, dtype=torch.int32)
        ys = [function(x, weight, seq_idx) for function in (in_one_graph, conv)]
        dist.barrier()
        found = [(y, *torch.autograd.grad(y.square().sum(), (x, weight))) for y in ys]
        same += [torch.equal(one, other) for one, other in zip(*found)]
    return same


def test_torch_compile_makes_one_graph():
    assert run(2, compiled) == [[True] * 6] * 2


def with_nan(layout):
    """Whether NaN in padding and in the tokens of one sequence is, in y and dx, where it is in one process."""
    x = torch.ones(1, 24, 3)
    ids = torch.tensor([[0] * 5 + [1] * 6 + [-1] * 2 + [2] * 8 + [-1] * 3], dtype=torch.int32)
    x[:, 5:13] = x[:, 21:] = torch.nan
    results = []
    for whole in (True, False):
        leaf, own_ids = (x.clone(), ids) if whole else (shard(x, layout), shard(ids, layout))
        function = (
            mhc_ops.causal_conv1d
            if whole
            else partial(distributed.causal_conv1d, layout=layout, group=dist.group.WORLD)
        )
        y = function(leaf.requires_grad_(), torch.ones(3, 3), seq_idx=own_ids, activation="silu", backend="reference")
        results.append((y.isnan(), torch.autograd.grad(y, leaf, torch.ones_like(y))[0].isnan()))
    return [torch.equal(shard(one, layout), own) for one, own in zip(*results)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_stays_in_its_sequence(layout):
    assert run(2, with_nan, layout) == [[True, True]] * 2


def in_a_mesh():
    """Whether each row of a mesh of data and context has the bits of one process on its own sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    x = torch.randn(2, 1, 16, 3, generator=torch.Generator().manual_seed(0))[mesh["data"].get_local_rank()]
    weight = torch.ones(3, 4)
    cut = partial(distributed.shard_sequence, group=mesh["context"], layout="zigzag")
    y = distributed.causal_conv1d(cut(x), weight, group=mesh["context"], layout="zigzag")
    return torch.equal(y, cut(mhc_ops.causal_conv1d(x, weight)))


def test_one_dimension_of_a_mesh():
    assert run(4, in_a_mesh) == [True] * 4


def backend_of_backward():
    """Which backends a backward uses whose forward was in a block of use_backend."""
    used, launch = [], Op.launch
    x, weight = torch.randn(1, 12, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with mhc_ops.use_backend("hip"):
        y = distributed.causal_conv1d(x, weight, group=dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "launch", lambda self, **inputs: used.append(inputs["backend"]) or launch(self, **inputs))
        call.forget()  # what was kept does not come by there
        y.sum().backward()
    return set(used)


def test_the_backward_uses_the_backend_of_its_forward():
    assert run(2, backend_of_backward) == [{"hip"}] * 2
