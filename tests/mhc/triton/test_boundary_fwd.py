"""The boundary's kernel, in Gluon: its source on CPU tensors, and the kernel on a GPU, have the bits of every other way
to the same values. test_compile.py compiles it; test_kernels.py and test_kernel_bits.py run it on a GPU against fp64,
on parts of a batch and past 2^31 elements."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
import gluon_emulator
from mhc_kernels import bf16
from mhc_launches import all_calls
from stack_results import assert_equal
from sublayers import sublayers

import mhc_ops
from mhc_ops.core import device
from mhc_ops.mhc import contracts
from mhc_ops.mhc.triton import boundary_fwd, configs
from mhc_ops.testing import cases

n = 4
SLICE = 128  # channels of a product


def inputs(T, D, **form):
    """mhc_next_fwd's. Phi has one value, of two parts, in 128 channels: exact products, whose sums tell their order."""
    generator = torch.Generator().manual_seed(cases.SEED)
    given = dict(all_calls(T, n, D, bf16, gamma=False, on="cpu", **form))["mhc_next_fwd"]
    for tensor in given.values():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    blocks = given["phi"].zero_().unflatten(1, (-1, SLICE))
    sizes = 2.0 ** torch.randint(-12, 0, (*blocks.shape[:2], 1), generator=generator)
    places = torch.randint(0, SLICE, sizes.shape, generator=generator)
    blocks.scatter_(2, places, sizes * torch.randn(sizes.shape, generator=generator).sign() * (1 + 2**-10))
    return given


def outputs(given):
    found = contracts.mhc_next_fwd.launch(backend="triton", **given)
    return {name: output for name, output in found._asdict().items() if output.numel() and name != "link_next"}


def stored_x_next(x, h_out, h_post, h_res):
    """As mhc_post stores it: fp32, one rounding a step, as fma does."""
    if h_res is None:
        return (h_post.double()[:, :, None] * h_out[:, None].double() + x.double()).float().to(x.dtype)
    value = h_post[:, :, None] * h_out[:, None].float()
    for i in range(n):
        value = (h_res[:, i, :, None].double() * x[:, i, None].double() + value.double()).float()
    return value.to(x.dtype)


FORMS = [{"shifted": True}, {"mixed": False}, {"mixed": False, "shifted": True}, {"transposed": True, "shifted": True}]
SIZES = [(64, 256, 1, {}), (130, 512, 1, {}), (33, 768, 5, {}), (1, 256, 2, {}), (100, 512, 3, {"normed": True})]


@pytest.mark.interpreted
@pytest.mark.parametrize(("T", "D", "programs", "form"), [*SIZES, *((100, 512, 3, form) for form in FORMS)], ids=str)
def test_emulated(T, D, programs, form, monkeypatch, poisoned):
    """The bits of the interpreter's post and pre; x_next also those of a GPU, where fma rounds once."""
    given, fma, launched = inputs(T, D, **form), gluon_emulator.fma, []
    monkeypatch.setattr(configs, "few", lambda *_: None)
    expected = outputs(given)

    def launch(kernel, grid, **arguments):
        launched.append(grid)
        gluon_emulator.run(kernel, grid, **arguments)

    here = device.of(given["x"].device)
    monkeypatch.setattr(device, "of", lambda _: replace(here, processors=programs))
    monkeypatch.setattr(configs, "boundary_fwd", lambda *_: configs.BOUNDARY_FWD)
    monkeypatch.setattr(boundary_fwd, "launch", launch)
    monkeypatch.setattr(gluon_emulator, "fma", gluon_emulator.fma_of_the_interpreter)
    found = outputs(given)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    monkeypatch.setattr(gluon_emulator, "fma", fma)
    of_post = {name: given[name] for name in ("x", "h_out", "h_post", "h_res")}
    if "transposed" in form:
        of_post["h_res"] = of_post["h_res"].mT
    assert torch.equal(outputs(given)["x_next"], stored_x_next(**of_post))
    assert [grid for (grid,) in launched] == 2 * [min(programs, -(-T // 32) * D // 256)]


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
