"""The convolution over a sequence in pieces: the bits of one process, and its gradients."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from processes import run

from mhc_ops import distributed
from mhc_ops.distributed.pieces import pieces_of
from mhc_ops.measure import accuracy
from mhc_ops.measure.conv_cases import PLACES, ConvCase


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
        if not accurate(result, exact[name]):
            told.append(f"{name} is off by {(result.double() - exact[name].value).abs().max():.3g}")
    return [f"{layout} {dist.get_world_size()} {backend} {case}: {words}" for words in told]


def accurate(result, exact):
    """Parts of two ranks are rounded before they are added, which shows in 16 bits."""
    if accuracy.close(result, exact):
        return True
    if result.dtype not in accuracy.ROUNDING:
        return False
    error = (result.double() - exact.value).abs()
    return accuracy.one_rounding(error, exact.value, result.dtype, accuracy.ROUNDING[result.dtype] * exact.terms[-1]())


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


def cases(world):
    """L is a multiple of 2·world; pieces of a zigzag are half as long as the others."""

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
        *(ConvCase(2, L(9), 5, W, FP32) for W in range(1, 9)),
        *(ConvCase(2, L(8), 6, 3, dtype, dilation=d, residual=d > 1) for d in (1, 2, 3) for dtype in (FP32, BF16)),
        *(ConvCase(2, L(7), 5, scale=scale) for scale in (1e-3, 1e3)),
        ConvCase(2, L(7), 5, silu=False, bias=False, dtype=FP32),
        ConvCase(2, L(7), 5, parameter_dtype=BF16),
        *(ConvCase(1, L(11), 5, 3, FP32, dilation=2, places=places, residual=True) for places in PLACES),
        *(ConvCase(1, L(11), 5, 4, BF16, places=places) for places in PLACES),
        *(ConvCase(1, L(7), 5, 2, FP32, places=places) for places in PLACES),
        *(ConvCase(1, L(1), 5, 4, FP32, dilation=2, places=places) for places in ("", *PLACES)),
        *(ConvCase(1, L(3), 5, 3, FP32, dilation=2, places=places) for places in ("", *PLACES)),
        *(ConvCase(2, L(rows), 5, 3, dtype, dilation=2, n=2) for rows in (1, 3, 9) for dtype in (FP32, BF16)),
        ConvCase(1, L(9), 6, 4, FP32, n=3, residual=True, norm_eps=0.0),
        ConvCase(1, L(9), 6, 1, FP32, n=3, residual=True),
        ConvCase(1, L(9), 6, 1, FP32, places="cu_seqlens"),
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_reference(world):
    found = run(world, all_wrong, cases(world), "reference")
    assert not found[0], "\n".join(found[0])


def test_hip():
    plain = [case for case in cases(2) if case.runs_on("hip")]
    found = run(2, all_wrong, plain, "hip")
    assert not found[0], "\n".join(found[0])


# A launch takes a tenth of a second in the interpreter, so every way once
INTERPRETED = {
    "contiguous": [
        ConvCase(1, 12, 3, 3, BF16),
        Packed(1, 14, 3, 3, FP32, places="cu_seqlens states", bounds=(1, 6, 6, 8, 13)),
    ],
    "zigzag": [ConvCase(1, 20, 3, 2, FP32, places="seq_idx states"), ConvCase(1, 20, 3, 3, FP32, n=2, residual=True)],
}


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton(layout):
    found = run(2, all_wrong, INTERPRETED[layout], "triton", (layout,))
    assert not found[0], "\n".join(found[0])
