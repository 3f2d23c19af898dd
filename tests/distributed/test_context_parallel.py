"""The convolution over a sequence in pieces: the bits of one process, and its gradients."""

import itertools
import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from one_process import close_in_parts
from processes import run, run_each
from recorded import Recorded
from sending import Sending
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import mhc_ops
from mhc_ops import distributed
from mhc_ops.core import call
from mhc_ops.core.op import Op
from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import FINAL, PLACES, ConvCase


@dataclass(frozen=True)
class Packed(ConvCase):
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
ROWS = ("x", "residual", "seq_idx")  # of these each rank has its own tokens


def shard(tensor, layout):
    return distributed.shard_sequence(tensor, group=dist.group.WORLD, layout=layout)


def leaves_of(tensors, layout):
    own = {name: shard(tensor, layout) if name in ROWS else tensor for name, tensor in tensors.items()}
    return {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in own.items()}


def in_pieces(case, leaves, **options):
    """The outputs by name: y of this rank's tokens, and the final state of the whole sequence."""
    options |= {"group": dist.group.WORLD, "dilation": case.dilation}
    names = case.subject.outputs
    if case.n:
        outputs = distributed.short_conv(**leaves, **options, residual=case.residual, norm_eps=case.norm_eps)
    else:
        options |= {"activation": "silu" if case.silu else None, "output_final_state": "final_state" in names}
        outputs = distributed.causal_conv1d(**leaves, **options)
    return dict(zip(names, outputs if isinstance(outputs, tuple) else (outputs,)))


def wrong(case, backend, layout):
    ran, cut = accuracy.run_case(case, backend), partial(shard, layout=layout)
    leaves = leaves_of(ran.tensors, layout)
    outputs = in_pieces(case, leaves, backend=backend, layout=layout)
    of_y, *of_state = ran.cotangents  # every rank has a share of the final state's
    cotangents = [cut(of_y), *(cotangent * (dist.get_rank() == 1) for cotangent in of_state)]
    floating = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = accuracy.gradients_of(outputs, floating, cotangents)
    exact, told = accuracy.truth(case.subject, ran.tensors, ran.cotangents), []
    for name, result in {**outputs, **gradients}.items():
        own = cut if name.removeprefix("d") in (*ROWS, "y") else torch.clone
        if name in gradients and own is torch.clone:
            total = result.double().contiguous()  # ranks give it other strides
            dist.all_reduce(total)
            result = total.to(result.dtype)
        truth = accuracy.Exact(own(exact[name].value), [lambda of=of, own=own: own(of()) for of in exact[name].terms])
        if not close_in_parts(result, truth):
            told.append(f"{name} is off by {(result.double() - truth.value).abs().max():.3g}")
        if name in outputs and not torch.equal(result, own(ran.results[name])):
            told.append(f"{name} has other bits")
    if case.places not in FINAL:  # their gradient is added to dx
        rows = cut(of_one_rank(case, layout)[None])[0]
        if not torch.equal(gradients["dx"][:, rows], cut(ran.results["dx"])[:, rows]):
            told.append("dx has other bits")
    return [f"{layout} {dist.get_world_size()} {backend} {case}: {words}" for words in told]


def of_one_rank(case, layout):
    """Whether one rank alone contributes to dx of a token. Parts of two meet in the last S rows of a piece."""
    rows, S = torch.arange(case.L), (case.W - 1) * case.dilation
    length = case.L // (dist.get_world_size() * (1 + (layout == "zigzag")))
    return (rows % length < length - S) | (rows >= case.L - length)


def all_wrong(cases, backend, layouts=LAYOUTS):
    return [words for case in cases for layout in layouts for words in wrong(case, backend, layout)]


def packed_cases(world):
    """Sequences that cross pieces, and pieces shorter than the tail. A zigzag's pieces are half as long."""
    P = 2 * world  # L is a multiple
    L, half = 11 * P, 11 * P // 2
    # sequences that begin and end right before and after the start of a piece, an empty one there, padding first
    close = (1, half - 2, half - 1, half - 1, half + 2, L - 1)
    impossible = (-3, 4, 2, L - 5, 9, L + 7)
    states = {"dilation": 2, "places": "cu_seqlens states", "residual": True}
    return [
        *(Packed(1, L, 5, 3, dtype, **states, bounds=own) for own in (close, impossible) for dtype in (FP32, BF16)),
        *(ConvCase(1, L, 5, 3, FP32, dilation=2, places=places, residual=True) for places in PLACES),
        *(ConvCase(1, rows * P, 5, 4, FP32, dilation=2, places=p) for rows in (1, 3, 5) for p in ("", *PLACES)),
        *(ConvCase(2, rows * P, 5, 3, FP32, dilation=2, n=2) for rows in (1, 3, 9)),
        ConvCase(2, 9 * P, 5, 3, BF16, places="seq_idx states"),
    ]


DENSE = [  # for two ranks
    *(ConvCase(2, 36, 5, W, FP32) for W in range(1, 9)),
    *(ConvCase(2, 32, 6, 3, dtype, dilation=d, residual=d > 1) for d in (1, 2, 3) for dtype in (FP32, BF16)),
    *(ConvCase(2, 28, 5, scale=scale) for scale in (1e-3, 1e3)),
    ConvCase(2, 28, 5, silu=False, bias=False, dtype=FP32),
    ConvCase(2, 28, 5, parameter_dtype=BF16),
    *(ConvCase(1, 44, 5, 4, BF16, places=places) for places in PLACES),
    *(ConvCase(2, L, 5, 3, BF16, dilation=2, n=2) for L in (12, 36)),
    ConvCase(1, 36, 6, 4, FP32, n=3, residual=True, norm_eps=0.0),
    ConvCase(1, 36, 6, 1, FP32, n=3, residual=True),
    ConvCase(1, 36, 6, 1, FP32, places="cu_seqlens"),
]


def held(world, cases, backend, layouts=LAYOUTS):
    found = run(world, all_wrong, cases, backend, layouts)
    assert found == [[]] * world


@pytest.mark.parametrize(("world", "backend"), [(2, "reference"), (2, "hip"), (3, "reference"), (4, "reference")])
def test_ranks(world, backend):
    drawn = packed_cases(world) + DENSE * (world == 2)
    held(world, [case for case in drawn if case.runs_on(backend)], backend)


# A launch takes a tenth of a second in the interpreter, so every way once
IN_BOUNDS = Packed(1, 14, 3, 3, BF16, places="cu_seqlens states", bounds=(1, 6, 6, 8, 13))
INTERPRETED = {"contiguous": [ConvCase(1, 12, 3, 3, FP32, n=2, residual=True), IN_BOUNDS]}
INTERPRETED["zigzag"] = [ConvCase(1, 20, 3, 2, FP32, places="seq_idx states")]


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton(layout):
    held(2, INTERPRETED[layout], "triton", (layout,))


SENDING = [ConvCase(2, 36, 5, dilation=2), ConvCase(1, 36, 3, 3, places="seq_idx")]  # on three ranks


def sent_bytes():
    """Forward and backward, and what tail_bytes says; without the message in which the ranks agree."""
    for layout, case in itertools.product(LAYOUTS, SENDING):
        leaves = leaves_of(case.inputs(), layout)
        with Sending() as forward:
            outputs = in_pieces(case, leaves, backend="reference", layout=layout)
        with Sending() as backward:
            outputs["y"].sum().backward()
        assert {*forward.bytes, *backward.bytes} <= {"all-to-all"}
        sizes = leaves["x"].shape, leaves["x"].itemsize, case.W
        options = {"dilation": case.dilation, "seq_idx": "seq_idx" in leaves, "layout": layout}
        expected = distributed.tail_bytes(*sizes, **options, rank=dist.get_rank(), world=3)
        assert (forward.bytes.total(), backward.bytes.total()) == expected, (str(case), layout)


def test_sent_bytes():
    run(3, sent_bytes)


def order(recorded):
    """What was begun, in order: an exchange, the wait for it, and calls of the convolution by the rows they take."""
    words = {"all_to_all_single": "send", "wait_tensor": "wait"}
    return [args[0].shape[1] if func.namespace == "mhc_ops" else words[func._opname] for func, args in recorded.calls]


def rows_are_computed_while_others_travel():
    """Rows are sent first and awaited when all others are computed. Afterwards come only the S first rows of each piece
    that has a history. Backward the gradients of the history, from a call on it and 2·S rows, go first."""
    L, S, rank = 20, 2, dist.get_rank()
    x, weight = torch.randn(1, L, 3, requires_grad=True), torch.randn(3, S + 1, requires_grad=True)
    for layout in LAYOUTS:
        with Recorded("_c10d_functional", "mhc_ops") as forward:
            y = distributed.causal_conv1d(x, weight, group=dist.group.WORLD, layout=layout, backend="hip")
        with Recorded("_c10d_functional", "mhc_ops") as backward:
            y.sum().backward()
        # A zigzag's two pieces are two rows of a batch. All pieces of a sequence but the first have a history.
        length, pieces = (L, rank) if layout == "contiguous" else (L // 2, 1 + rank)
        assert order(forward) == ["send", length, "wait", *[2 * S] * pieces], order(forward)
        expected = [*[3 * S] * pieces, "send", length, *[2 * S] * pieces, "wait"]
        assert order(backward) == expected, order(backward)


def wrong_use_is_told():
    """test_agree.py has calls that differ between ranks."""
    group, weight = dist.group.WORLD, torch.randn(3, 4)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("context", "other"))
    x, short = torch.randn(1, 8, 3, requires_grad=True), torch.randn(1, 6, 3)
    whole, state = DTensor.from_local(x, mesh["context"], [Shard(1)]), torch.randn(1, 3, 2)

    def conv(x=x, **options):
        return distributed.causal_conv1d(x, weight, **{"group": group, **options})

    assert conv(group=mesh["context"]).shape == x.shape
    zigzag = partial(conv, layout="zigzag")
    wrong = [
        (partial(conv, x[:, :0]), "every rank must have tokens"),
        (partial(zigzag, x[:, :7]), "a rank must have an even number of tokens with layout='zigzag', got 7"),
        (partial(conv, layout="ring"), "layout must be 'contiguous' or 'zigzag', got 'ring'"),
        (partial(conv, group=None), "group must be a ProcessGroup that this rank is in or a DeviceMesh, got NoneType"),
        (partial(conv, whole), "x must be this rank's tokens as a plain tensor, x.to_local(), got a DTensor"),
        (partial(conv, initial_state=state), "initial_state must be [1, 3, 3], got [1, 3, 2]"),
        (partial(shard, short, "zigzag"), "4 pieces do not divide a sequence of 6 tokens: pad it"),
    ]
    for use, words in wrong:
        with pytest.raises((TypeError, ValueError), match=f"^(causal_conv1d|shard_sequence): {re.escape(words)}"):
            use()
    y, words = conv(activation="silu"), "^a convolution over a sequence in pieces has no second derivative$"
    with pytest.raises(NotImplementedError, match=words):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def a_group_of_one_is_the_plain_function_and_told():
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = groups[dist.get_rank()]
    x, streams, gamma, weight = torch.randn(1, 7, 6), torch.randn(1, 7, 2, 3), torch.ones(2, 3), torch.randn(6, 3)
    with pytest.warns() as told:
        found = distributed.causal_conv1d(x, weight, group=mine, layout="zigzag", output_final_state=True)
        found += (distributed.short_conv(streams, gamma, weight, group=mine),)
    expected = *mhc_ops.causal_conv1d(x, weight, output_final_state=True), mhc_ops.short_conv(streams, gamma, weight)
    assert all(map(torch.equal, found, expected))
    words = "a group of one rank has nothing to exchange: this is mhc_ops."
    functions = ("causal_conv1d", "short_conv")
    assert [str(one.message) for one in told] == [f"{function}: {words}{function}" for function in functions]


def compiled():
    """One graph has the bits of the eager call, the next one too, for any length. A compiler could have ranks that only
    give or only take send in another call than the others, who would then wait."""
    group, weight = dist.group.WORLD, torch.randn(3, 3, requires_grad=True)

    def conv(x, weight, seq_idx):
        return distributed.causal_conv1d(x, weight, seq_idx=seq_idx, activation="silu", group=group, backend="hip")

    in_one_graph = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for L in (8, 11):
        x, seq_idx = torch.randn(1, L, 3, requires_grad=True), torch.zeros(1, L, dtype=torch.int32)
        ys = [function(x, weight, seq_idx) for function in (in_one_graph, conv)]
        dist.barrier()
        found = [(y, *torch.autograd.grad(y.square().sum(), (x, weight))) for y in ys]
        assert all(map(torch.equal, *found)), L


def test_torch_compile_makes_one_graph():
    run(2, compiled)


def nan_stays_in_its_sequence():
    """NaN in padding and in the tokens of one sequence is, in y and dx, where it is in one process."""
    x, group = torch.ones(1, 24, 3), dist.group.WORLD
    ids = torch.tensor([[0] * 5 + [1] * 6 + [-1] * 2 + [2] * 8 + [-1] * 3], dtype=torch.int32)
    x[:, 5:13] = x[:, 21:] = torch.nan

    def where(function, x, ids):
        leaf = x.clone().requires_grad_()
        y = function(leaf, torch.ones(3, 3), seq_idx=ids, activation="silu", backend="reference")
        return y.isnan(), torch.autograd.grad(y, leaf, torch.ones_like(y))[0].isnan()

    whole = where(mhc_ops.causal_conv1d, x, ids)
    for layout in LAYOUTS:
        conv = partial(distributed.causal_conv1d, layout=layout, group=group)
        for one, own in zip(whole, where(conv, shard(x, layout), shard(ids, layout))):
            assert torch.equal(shard(one, layout), own), layout


def the_backward_uses_the_backend_of_its_forward():
    """The forward ran in a block of use_backend, the backward outside of it."""
    used, launch = [], Op.launch
    x, weight = torch.randn(1, 12, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with mhc_ops.use_backend("hip"):
        y = distributed.causal_conv1d(x, weight, group=dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "launch", lambda self, **inputs: used.append(inputs["backend"]) or launch(self, **inputs))
        call.forget()  # kept calls do not launch this way
        y.sum().backward()
    assert set(used) == {"hip"}, used


def test_two_ranks():
    checks = [rows_are_computed_while_others_travel, wrong_use_is_told, nan_stays_in_its_sequence]
    more = [a_group_of_one_is_the_plain_function_and_told, the_backward_uses_the_backend_of_its_forward]
    run_each(2, *checks, *more)
