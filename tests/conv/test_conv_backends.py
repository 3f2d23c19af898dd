"""What every backend of the convolution promises: padding, states, empty tensors, and the same bits twice."""

import pytest
import torch
from conv_oracle import IDS, RETURNS, Case, gradients, loop

import mhc_ops
from mhc_ops.testing import accuracy
from mhc_ops.testing.conv_cases import ConvCase

TYPES = (torch.float32, torch.float16, torch.bfloat16)
NAN = float("nan")


def leaves_of(tensors):
    return {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}


TWICE = {
    "triton": [
        ConvCase(2, 37, 65),
        ConvCase(1, 37, 65, places="cu_seqlens states"),
        ConvCase(1, 20, 40, n=3, residual=True),
        ConvCase(3, 2, 65, update=True),
    ],
    "hip": [ConvCase(2, 700, 257, 4, dtype, places="states") for dtype in TYPES],
}


def test_same_bits_twice(anywhere):
    backend, device = anywhere
    for case in TWICE.get(backend, TWICE["triton"]):
        tensors = case.inputs(device)
        cotangents = accuracy.random_cotangents(case.subject, accuracy.run(case.subject, tensors, backend))
        once, again = (accuracy.run(case.subject, tensors, backend, cotangents) for _ in range(2))
        assert all(torch.equal(once[name], again[name]) for name in once), case


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("places", ["seq_idx", "cu_seqlens"])
def test_padding_is_inert(places, activation, anywhere):
    """NaN in x, residual and cotangent of the padding changes nothing anywhere; y and its gradients are 0 there."""
    backend, device = anywhere
    if (backend, places) == ("hip", "cu_seqlens"):
        pytest.skip("the hip backend has no cu_seqlens")
    case = ConvCase(1, 37, 20, places=places, residual=backend != "hip", dtype=torch.float32)
    tensors = case.inputs(device)
    if places == "cu_seqlens":
        tensors[places] = torch.tensor([3, 11, 30], device=device)
        real = (torch.arange(37, device=device) >= 3) & (torch.arange(37, device=device) < 30)
    else:
        real = tensors[places][0] >= 0
    dy, poison, found = torch.randn_like(tensors["x"]), torch.where(real[:, None], 0.0, NAN), []
    rows = [name for name in ("x", "residual") if name in tensors]
    for given, cotangent in ((tensors, dy), (tensors | {name: tensors[name] + poison for name in rows}, dy + poison)):
        leaves = leaves_of(given)
        y = mhc_ops.causal_conv1d(**leaves, activation=activation, backend=backend)
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        found.append({"y": y} | dict(zip(wanted, torch.autograd.grad(y, list(wanted.values()), cotangent))))
    assert all(torch.equal(*(results[name] for results in found)) for name in found[0])
    assert not any(found[1][name][:, ~real].any() for name in ("y", *rows))
    assert found[1]["x"][:, real].all(), "what is no padding has gradients"


@pytest.mark.parametrize("W", [2, 4, 5])
def test_seq_idx_with_a_state(W, anywhere):
    """The state belongs to the sequence of token 0, wherever that goes on; where token 0 is padding, to none."""
    backend, device = anywhere
    if (backend, W) == ("hip", 5):
        pytest.skip("the hip backend has widths 2 to 4")
    case = Case(W=W, state=True, ids=(RETURNS[0], IDS[1]))
    options = case.options()
    placed = {**options, "seq_idx": options["seq_idx"].to(device), "backend": backend}
    cotangent = torch.randn(case.B, case.L, case.D, generator=torch.Generator().manual_seed(1))
    for dtype in TYPES:
        tensors = {name: t.to(device) for name, t in case.inputs(dtype).items()}
        tensors["initial_state"][1] = NAN
        dy = cotangent.to(dtype)
        (y,), grads = gradients(lambda **t: (mhc_ops.causal_conv1d(**t, **placed),), tensors, [dy.to(device)])
        wide = {name: t.double().cpu() for name, t in tensors.items()}
        (expected,), exact = gradients(lambda **t: loop(**t, **options)[:1], wide, [dy.double()])
        assert accuracy.close(y.cpu(), expected), dtype
        assert {name for name in exact if not accuracy.close(grads[name].cpu(), exact[name])} == set(), dtype


def test_nothing_to_do(anywhere):
    backend, device = anywhere
    for sizes in ((0, 5, 8), (2, 0, 8), (2, 5, 0)):
        tensors = leaves_of(ConvCase(*sizes, places="states").inputs(device))
        y, last = mhc_ops.causal_conv1d(**tensors, output_final_state=True, backend=backend)
        found = torch.autograd.grad([y, last], list(tensors.values()), [torch.ones_like(y), torch.ones_like(last)])
        assert y.shape == sizes and not any(dict(zip(tensors, found))[name].any() for name in ("weight", "bias"))
        if sizes[1] == 0:
            assert torch.equal(last, tensors["initial_state"]) and torch.equal(found[-1], torch.ones_like(last))
