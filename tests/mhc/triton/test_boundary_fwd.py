"""The boundary's kernel, in Gluon: its source on CPU tensors against fp64 and against the order of K of the projection, what
it takes on Hopper, and on a GPU the same bits as every other way to the same values."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
import gluon_emulator

from mhc_ops.core import device
from mhc_ops.core.backend import _INTERPRETED
from mhc_ops.core.launch import launch
from mhc_ops.mhc.triton import configs, described

bf16, fp32 = torch.bfloat16, torch.float32
n, M = 4, 24
SLICE, LANE = 128, 8  # channels
compiled_only = pytest.mark.skipif(_INTERPRETED, reason="the interpreter has no Gluon")


def inputs(T, D, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "x": normal(T, n, D).to(bf16),
        "h_out": normal(T, D).to(bf16),
        "h_post": 2 * torch.rand(T, n, generator=generator),
        "h_res": torch.softmax(normal(T, n, n), -1),
        "parts": parts_of(normal(M, n, D) * (n * D) ** -0.5),
    }


def in_order_of_k(tensor):
    """[..., n, D] as [..., steps, channels of a step]"""
    blocks = tensor.unflatten(-1, (-1, SLICE)).transpose(-3, -2)
    return blocks.flatten(-3, -2)


def parts_of(phi):
    """[M, n, D] as [parts, padded maps, K], in the order of the projection"""
    phi = torch.nn.functional.pad(in_order_of_k(phi).flatten(1), (0, 0, 0, 32 - M))
    high = phi.to(bf16)
    return torch.stack([high, (phi - high.float()).to(bf16)])


def emulated(programs, *, x, h_out, h_post, h_res, parts):
    """x_next and partial sums, of memory that was NaN."""
    from mhc_ops.mhc.triton.boundary_fwd import KERNEL

    T, _, D = x.shape
    x_next = torch.full_like(x, torch.nan)
    partials = torch.full((D // configs.BUNDLE, T, M + 1), torch.nan)
    tensors = {
        "x_desc": x.transpose(0, 1),
        "h_out_desc": h_out,
        "h_post_desc": h_post,
        "h_res_desc": h_res.view(T, n * n),
        "parts_desc": parts,
        "x_next_desc": x_next.transpose(0, 1),
    }
    descriptors = {name: described.described(tensor, KERNEL.blocks[name]) for name, tensor in tensors.items()}
    gluon_emulator.run(KERNEL.kernel, (programs,), **descriptors, partials_ptr=partials, T=T, D=D)
    return x_next, partials


def mixed(x, h_out, h_post, h_res):
    """In the order of mhc_post, each sum rounded once."""
    value = h_post[:, :, None] * h_out.float()[:, None]
    for i in range(n):
        value = (h_res[:, i, :, None].double() * x[:, i, None].double() + value.double()).float()
    return value.to(bf16)


def neighbours_added(values, to):
    while values.shape[-1] > to:
        values = values[..., 0::2] + values[..., 1::2]
    return values


def added_in_order(terms, dim):
    """From the first to the last, rounded to fp32 each time."""
    first, *others = terms.unbind(dim)
    for term in others:
        first = first + term
    return first


def sums_in_order(x_next, parts):
    """The partial sums in the order of K that mhc_pre has, each product of a step exact."""
    T = x_next.shape[0]
    steps = in_order_of_k(x_next)  # [T, steps, channels]
    phi = parts[:, :M].unflatten(-1, (-1, SLICE))  # [parts, M, steps, channels]
    products = torch.einsum("tsc,pmsc->ptsm", steps.double(), phi.double()).float()
    high, low = added_in_order(products.unflatten(2, (-1, n)), 3)  # [T, slices, M]
    squares = neighbours_added(steps.float().square(), SLICE // LANE).view(T, -1, n, SLICE // LANE)
    squares = neighbours_added(added_in_order(squares, 2), 1)  # [T, slices, 1]
    slices = torch.cat([high + low, squares], 2)
    return added_in_order(slices.unflatten(1, (-1, configs.BUNDLE // SLICE)), 2).transpose(0, 1)


@compiled_only
@pytest.mark.parametrize(("T", "D", "programs"), [(100, 512, 3), (64, 256, 1), (130, 512, 1), (33, 768, 5), (1, 256, 2)])
def test_emulated(T, D, programs):
    given = inputs(T, D)
    x_next, partials = emulated(programs, **given)
    parts = given.pop("parts")
    assert torch.equal(x_next, mixed(**given))
    phi = parts.double().sum(0)[:M]
    wide = in_order_of_k(x_next.double()).flatten(1)
    total = partials.double().sum(0)
    exact = torch.cat([wide @ phi.T, wide.square().sum(1, keepdim=True)], 1)
    assert ((total - exact).norm(dim=0) <= 1e-6 * exact.norm(dim=0)).all()
    assert torch.equal(partials[..., M], sums_in_order(x_next, parts)[..., M]), "squares in the order of mhc_pre"
