"""mHC pre without Sinkhorn in Triton, in the interpreter and on a GPU; test_kernels.py has what holds for every op."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from mhc_kernels import backward_by_hand, bf16, fp16, fp32

pytest.importorskip("triton")
import mhc_ops
from mhc_ops.core import call, device
from mhc_ops.core.sizes import cdiv
from mhc_ops.mhc.triton import configs
from mhc_ops.testing import accuracy, cases

SUBJECT = cases.MHC_FORWARD_PRE
Case = partial(cases.Case, SUBJECT)


def test_spreading_slices_over_programs_changes_no_bits(kernel_device, monkeypatch):
    """Programs that walk groups, or take a bundle or a slice each, as on devices of 1, 8 and 1000 multiprocessors."""
    tensors = Case((70,), 4, 2100, bf16).inputs(kernel_device)
    here, results, pieces = device.of(tensors["x"].device), [], set()
    tile = configs.project(24, 2100, False, here)
    for processors in (1, 8, 1000):
        described = replace(here, processors=processors)
        monkeypatch.setattr(device, "of", lambda _, described=described: described)
        call.forget()
        results.append(mhc_ops.mhc_forward_pre(**tensors, outflag=True, backend="triton"))
        pieces.add(configs.split_k(4, 2100, tile.block_d, cdiv(70, tile.block_t), processors).pieces)
    assert len(pieces) == 3, "all ways were taken"
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_backward_function_equals_autograd(kernel_device):
    tensors = Case((9,), 4, 24, bf16).inputs(kernel_device)
    outputs = accuracy.run(SUBJECT, tensors, "triton")
    cotangents = accuracy.random_cotangents(SUBJECT, outputs)
    expected = accuracy.run(SUBJECT, tensors, "triton", cotangents)
    for name, gradient in backward_by_hand(mhc_ops.mhc_backward_triton, tensors, outputs, cotangents).items():
        assert torch.equal(gradient, expected[name])
    del tensors["gamma"]
    assert backward_by_hand(mhc_ops.mhc_backward_triton, tensors, outputs, cotangents)["dgamma"] is None


@pytest.mark.parametrize("seed", range(cases.SEED, cases.SEED + 8))
@pytest.mark.parametrize("zero", [False, True], ids=["alpha", "alpha zero"])
def test_dalpha_includes_what_the_parts_of_phi_leave_out(zero, seed, kernel_device):
    tensors = Case((64,), 2, 24, bf16, seed=seed).inputs(kernel_device)
    if zero:
        tensors["alpha"].zero_()
    outputs = accuracy.run(SUBJECT, tensors, "triton")
    cotangents = accuracy.random_cotangents(SUBJECT, outputs, seed)
    results = accuracy.run(SUBJECT, tensors, "triton", cotangents)
    exact = accuracy.truth(SUBJECT, tensors, cotangents)
    for name in ("dphi", "dalpha", "dbias", "dgamma"):
        assert accuracy.close(results[name], exact[name]), name


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_backward_function_takes_16_bit_maps(dtype, kernel_device):
    """They are widened, not multiplied in 16 bits."""
    tensors = Case((9,), 3, 24, fp32).inputs(kernel_device)
    outputs = {name: output.to(dtype) for name, output in accuracy.run(SUBJECT, tensors, "triton").items()}
    cotangents = accuracy.random_cotangents(SUBJECT, outputs)
    backward = partial(mhc_ops.mhc_backward, backend="reference")
    wide = [{name: t.double() for name, t in given.items()} for given in (tensors, outputs)]
    exact = backward_by_hand(backward, *wide, [c.double() for c in cotangents])
    found = backward_by_hand(partial(mhc_ops.mhc_backward, backend="triton"), tensors, outputs, cotangents)
    assert [name for name in exact if not accuracy.close(found[name], exact[name])] == []


@pytest.mark.gpu
def test_nothing_large_is_saved():
    """Forward keeps x and the small maps; forward and backward make no fp32 copy of x."""
    T, n, D = 4096, 4, 2048
    tensors = {name: t.requires_grad_() for name, t in Case((T,), n, D).inputs("cuda").items()}
    outputs = mhc_ops.mhc_forward_pre(**tensors)  # compiles
    torch.autograd.grad(sum(o.sum() for o in outputs), list(tensors.values()))
    del outputs
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = mhc_ops.mhc_forward_pre(**tensors)
    X = tensors["x"].numel() * 2
    kept = torch.cuda.memory_allocated() - before
    assert kept < 0.25 * X + 0.05 * X, "h_in and the maps"
    cotangents = [torch.ones_like(o) for o in outputs]
    gradients = torch.autograd.grad(outputs, list(tensors.values()), cotangents)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < (0.25 + 0.25 + 1 + 0.5) * X, "h_in, its cotangent, dx, and partial sums"
    assert gradients[0].shape == tensors["x"].shape
