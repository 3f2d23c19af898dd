"""The boundary's kernel, in Gluon: its source on CPU tensors against fp64 and against the order of K of the projection,
and on a GPU the same bits as every other way to the same values. test_compile.py compiles it; test_kernels.py and
test_kernel_bits.py run it on a GPU against fp64, on parts of a batch and past 2^31 elements."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
import cross_compile
import gluon_emulator
from mhc_kernels import bf16, fp32, stored_x_next
from stack_results import assert_equal
from sublayers import sublayers

import mhc_ops
from mhc_ops.core import device
from mhc_ops.core.backend import _INTERPRETED, load
from mhc_ops.core.launch import collected
from mhc_ops.mhc import warmup
from mhc_ops.mhc.options import PreOptions
from mhc_ops.mhc.triton import boundary_fwd, configs
from mhc_ops.mhc.triton.boundary_fwd import post_project
from mhc_ops.mhc.triton.pre_fwd import project
from mhc_ops.testing import accuracy, cases

n, M = 4, 24
KERNEL = "mhc_boundary_fwd_kernel"
SLICE, LANE = 128, 8  # channels
compiled_only = pytest.mark.skipif(_INTERPRETED, reason="the interpreter has no Gluon")


# Without a GPU


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


def emulated(monkeypatch, programs, *, x, h_out, h_post, h_res, parts, transposed=False, read=None):
    """x_next, partial sums and, where it is read, h_in, in memory that was NaN."""

    def emulating(kernel, grid, *, partials_ptr, num_warps, maxnreg, **arguments):
        gluon_emulator.run(kernel, (programs,), partials_ptr=partials_ptr.fill_(torch.nan), **arguments)

    monkeypatch.setattr(boundary_fwd, "launch", emulating)
    monkeypatch.setattr(boundary_fwd, "phi_parts", lambda *_: parts)
    x_next = torch.full_like(x, torch.nan)
    phi = torch.empty(2 * n if h_res is None else M, x[0].numel())
    of_post = {"x": x, "h_out": h_out, "h_post": h_post, "h_res": h_res, "x_next": x_next, "transposed": transposed}
    h_in = None if read is None else torch.full_like(h_out, torch.nan)
    partials, _ = post_project(**of_post, phi=phi, gamma=None, read=read, h_in=h_in)
    return x_next, partials, h_in


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
@pytest.mark.parametrize(
    ("T", "D", "programs", "form"),
    [(64, 256, 1, ""), (130, 512, 1, ""), (33, 768, 5, ""), (1, 256, 2, ""),
     *((100, 512, 3, form) for form in ("", "shifted", "transposed, shifted", "identity, shifted"))],
)  # fmt: skip
def test_emulated(T, D, programs, form, monkeypatch):
    given, rows, of_form = inputs(T, D), slice(None), {"read": torch.rand(T, n) if "shifted" in form else None}
    if "identity" in form:
        of_form |= {"h_res": None, "parts": torch.nn.functional.pad(given["parts"][:, : 2 * n], (0, 0, 0, 8))}
        rows = [*range(2 * n), M]
    elif "transposed" in form:
        of_form |= {"h_res": given["h_res"].mT.contiguous(), "transposed": True}
    x_next, partials, h_in = emulated(monkeypatch, programs, **given | of_form)
    parts, wide = given.pop("parts"), in_order_of_k(x_next.double()).flatten(1)
    exact = torch.cat([wide @ parts.double().sum(0)[:M].T, wide.square().sum(1, keepdim=True)], 1)[:, rows]
    assert torch.equal(x_next, stored_x_next(**given | ({"h_res": None} if "identity" in form else {})))
    assert ((partials.double().sum(0) - exact).norm(dim=0) <= 1e-6 * exact.norm(dim=0)).all()
    assert torch.equal(partials[..., -1], sums_in_order(x_next, parts)[..., M]), "squares in the order of mhc_pre"
    if "shifted" in form:
        assert accuracy.close(h_in, torch.einsum("ti,tid->td", of_form["read"].double(), x_next.double()))


def sensitive_to_order(T, D):
    """x and phi whose products per step are exact and of all sizes, so that their sum tells in which order it was made;
    phi has two parts that are known."""
    generator = torch.Generator().manual_seed(1)

    def whole(*shape):
        return torch.randint(-4, 5, shape, generator=generator).float()

    x = whole(T, n, D).to(bf16)
    scale = 2.0 ** torch.randint(0, 20, (1, n, D // SLICE, 1), generator=generator)
    high, low = ((whole(M, n, D).view(M, n, -1, SLICE) * scale).reshape(M, n, D) for _ in range(2))
    return x, high + low * 2**-12


@compiled_only
def test_order_of_k_emulated(monkeypatch):
    T, D = 40, 768
    x, phi = sensitive_to_order(T, D)
    maps = {"h_out": torch.zeros(T, D, dtype=bf16), "h_post": torch.zeros(T, n), "h_res": torch.eye(n).repeat(T, 1, 1)}
    x_next, partials, _ = emulated(monkeypatch, 2, x=x, **maps, parts=parts_of(phi))
    assert torch.equal(x_next, x)
    expected = sums_in_order(x, parts_of(phi))
    assert torch.equal(partials, expected)
    assert not torch.equal(partials, sums_in_order(x, parts_of(phi.roll(SLICE, 2))))


@pytest.mark.parametrize("T", [5, 1100], ids=["phi cut by the projection", "phi in parts"])
def test_order_of_k_of_the_projection(T, kernel_device, monkeypatch):
    D = 1024
    x, phi = sensitive_to_order(T, D)
    here = device.of(torch.device(kernel_device))
    load("mhc", "triton", "mhc_pre_fwd", torch.device(kernel_device))  # makes the interpreter ready
    tile = configs.project(M, D, False, here)
    if tile.block_d != SLICE:
        pytest.skip("this GPU takes other blocks of K")
    token_blocks = -(-T // tile.block_t)
    monkeypatch.setattr(device, "of", lambda _: replace(here, processors=token_blocks * (D // configs.BUNDLE)))
    partials, split = project(x.to(kernel_device), phi.view(M, -1).to(kernel_device), None)
    assert split == configs.split_k_in_bundles(n, D)
    assert torch.equal(partials.cpu(), sums_in_order(x, parts_of(phi)))


@compiled_only
def test_warmup_compiles_it(monkeypatch):
    with cross_compile.compiling_for("sm_90", monkeypatch, {KERNEL}) as kernels:
        with collected() as compilations:
            x = torch.empty(8192, n, 4096, dtype=bf16, device="meta")
            warmup._step(x, False, True, False, fp32, backend="triton", options=PreOptions())
        for compilation in compilations:
            compilation()
    assert {kernel.name for kernel in kernels} == {KERNEL}


# On a GPU


def ways(x, first, second):
    """x_next, h_in, h_post and h_res of the second sublayer after the first, whose layer is the identity."""
    h_out, h_post, h_res = mhc_ops.mhc_pre(x, **first)
    x_next = mhc_ops.mhc_post(x, h_out, h_post, h_res)
    yield (x_next, *mhc_ops.mhc_pre(x_next, **second))
    yield mhc_ops.mhc_post_pre(x, h_out, h_post, h_res, **second)
    h_out, carry = mhc_ops.mhc_enter(x, **first)
    h_in, carry = mhc_ops.mhc_next(carry, h_out, **second)
    yield (carry.x, h_in, carry.h_post, carry.h_res)
    x_next = mhc_ops.mhc_layer(x, lambda h_in: h_in, **first)
    kept = []
    mhc_ops.mhc_layer(x_next, lambda h_in: (kept.append(h_in), h_in)[1], **second)
    yield (x_next, *kept)


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("norm", "gamma"), [(False, False), (True, True)])
@pytest.mark.parametrize(("T", "D"), [(2048, 4096), (4096, 2560), (1300, 7168), (4001, 1280), (16897, 256)])
def test_same_bits_on_every_way(T, D, norm, gamma, gradients, poisoned):
    x, parameters = sublayers([{}] * 2, (T,), n, D, bf16, gamma, norm, "cuda")
    with torch.set_grad_enabled(gradients):
        expected, *others = ways(x, *parameters)
    for outputs in others:
        assert_equal(outputs, expected[: len(outputs)])


@pytest.mark.gpu
def test_other_tensors_and_unaligned_ones():
    """Calls that are replayed, on tensors that begin elsewhere; those that do not begin in 16 bytes are not copied."""
    T, D = 2048, 4096
    both = [cases.Case(cases.MHC_POST_PRE, (T,), n, D, bf16, seed=seed).inputs("cuda") for seed in (1, 2)]
    expected = [mhc_ops.mhc_post_pre(**tensors) for tensors in both]
    for tensors, outputs in zip(both, expected):
        shifted = {name: t.clone() for name, t in tensors.items()}
        for _ in range(2):
            assert_equal(mhc_ops.mhc_post_pre(**shifted), outputs)
        room = torch.empty(T * D + 1, dtype=bf16, device="cuda")
        shifted["h_out"] = room[1:].view(T, D).copy_(tensors["h_out"])
        assert_equal(mhc_ops.mhc_post_pre(**shifted), outputs)
