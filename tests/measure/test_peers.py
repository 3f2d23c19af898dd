"""Peers: absent ones are said to be absent, present ones compute the same function."""

import importlib.metadata

import pytest
import torch

from mhc_ops.measure import accuracy, cases, peers
from mhc_ops.measure.conv_cases import ConvCase

by_peer = pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
by_subject = pytest.mark.parametrize("subject", cases.SUBJECTS, ids=lambda subject: subject.name)


def tensors_of(subject, n=4, D=64, dtype=torch.bfloat16, gamma=False, device="cpu"):
    T = 8 if device == "cpu" else 256  # some kernels run one token per program, a slow thing to interpret
    return cases.Case(subject, (T,), n, D, dtype, gamma=gamma).inputs(device)


@by_peer
def test_not_installed(peer, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert peers.version(peer) is None
    assert peers.why_not(peer) == f"{peer.name} is not installed: pip install {peer.package}"
    with pytest.raises(RuntimeError, match=f"{peer.name} is not installed: pip install {peer.package}"):
        if peer is peers.FLA:
            peer.prepare("causal_conv1d", ConvCase(1, 8, 16).inputs())
        else:
            peer.prepare("mhc_pre", tensors_of(cases.MHC_PRE))


def test_what_fla_lacks():
    for case in (ConvCase(1, 8, 16, places="seq_idx"), ConvCase(1, 8, 16, n=2), ConvCase(1, 1, 16, update=True)):
        assert peers.FLA.prepare(case.subject.name, case.inputs()) is None


@by_peer
def test_what_a_peer_lacks(peer):
    assert peer.prepare("mhc_forward_pre", tensors_of(cases.MHC_FORWARD_PRE)) is None
    assert peer.prepare("mhc_pre", tensors_of(cases.MHC_PRE, gamma=True)) is None
    assert peer.prepare("mhc_pre", tensors_of(cases.MHC_PRE, n=3)) is None


def test_what_liger_lacks():
    assert peers.LIGER.prepare("mhc_head", tensors_of(cases.MHC_HEAD)) is None
    assert peers.LIGER.prepare("sinkhorn", tensors_of(cases.SINKHORN)) is None


def test_what_tile_kernels_cannot_take():
    assert peers.TILE_KERNELS.prepare("mhc_pre", tensors_of(cases.MHC_PRE, dtype=torch.float32)) is None
    assert peers.TILE_KERNELS.prepare("mhc_pre", tensors_of(cases.MHC_PRE, D=100)) is None
    assert peers.TILE_KERNELS.prepare("sinkhorn", tensors_of(cases.SINKHORN, dtype=torch.float16)) is None


@pytest.mark.interpreted
@by_subject
def test_liger_interpreted(subject):
    """In fp32, where Triton's interpreter is exact. The layer differs by its Sinkhorn of transposed logits."""
    check(peers.LIGER, subject, "cpu", torch.float32, tolerance=1e-3 if subject is cases.MHC_LAYER else 1e-5)


@pytest.mark.gpu
@by_subject
@by_peer
def test_computes_the_same_function(peer, subject):
    """Judged at the peer's own precision (bf16 or tf32 projection, several roundings of dx): 2e-2 is enough to tell a
    transposed or missing term."""
    check(peer, subject, "cuda", torch.float32 if subject is cases.SINKHORN else torch.bfloat16, tolerance=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("silu", [False, True])
def test_fla_computes_the_same_function(silu):
    case = ConvCase(2, 256, 128, silu=silu)
    check_prepared(peers.FLA, case.subject, case.inputs("cuda"), tolerance=2e-2)


def check(peer, subject, device, dtype, tolerance):
    check_prepared(peer, subject, tensors_of(subject, dtype=dtype, device=device), tolerance)


def check_prepared(peer, subject, ours, tolerance):
    """Outputs, with and without gradients, and the gradient of the first input, which every peer lays out as we do."""
    if peers.version(peer) is None:
        pytest.skip(f"needs {peer.package}")
    prepared = peer.prepare(subject.name, ours)
    if prepared is None:
        pytest.skip(f"{peer.name} has no {subject.name}")
    with torch.no_grad():
        plain = prepared.call(**prepared.tensors)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in prepared.tensors.items()}
    outputs = prepared.call(**leaves)
    results = dict(zip(subject.outputs, outputs))
    cotangents = accuracy.random_cotangents(subject, results, seed=0)
    exact = accuracy.truth(subject, ours, cotangents, {name: result.detach() for name, result in results.items()})
    gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    assert all(gradient is not None for gradient in gradients)
    first = next(iter(ours))
    results[f"d{first}"] = gradients[0].view_as(ours[first])
    results |= {f"{name} without gradients": output for name, output in zip(subject.outputs, plain)}
    for name, result in results.items():
        expected = exact[name.removesuffix(" without gradients")]
        assert result.shape == expected.shape, name
        assert (result.double() - expected).norm() <= tolerance * expected.norm(), name
