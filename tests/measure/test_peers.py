"""Peers: absent ones are said to be absent, present ones compute the same function."""

import importlib
import importlib.metadata
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from stand_ins import stand_in

from mhc_ops.measure import peers
from mhc_ops.testing import cases
from mhc_ops.testing.conv_cases import ConvCase

named = {"ids": lambda value: getattr(value, "name", str(value))}
IN_COMPAT = {"Liger": "liger", "TileKernels": "tile_kernels", "fla": "fla", "causal-conv1d": "causal_conv1d"}


def small_case(subject, T=8, n=4, D=64, dtype=torch.bfloat16, gamma=False):
    return cases.Case(subject, (T,), n, D, dtype, gamma=gamma)


@pytest.fixture
def stand_ins(monkeypatch):
    """Our functions of the same names, arguments and layouts in place of the libraries."""
    ours = {name: importlib.import_module(f"mhc_ops.compat.{module}") for name, module in IN_COMPAT.items()}
    monkeypatch.setattr(peers.Peer, "load", lambda peer: ours[peer.name])


@pytest.mark.parametrize("peer", peers.PEERS, **named)
def test_not_installed(peer, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    assert peers.version(peer) is None
    assert peers.why_not(peer) == f"{peer.name} is not installed: pip install {peer.package}"
    with pytest.raises(RuntimeError, match=f"{peer.name} is not installed: pip install {peer.package}"):
        peer.prepare("mhc_pre", {})


LACKING = [
    *((peer, small_case(cases.MHC_PRE, **options)) for peer in peers.PEERS for options in ({"gamma": True}, {"n": 3})),
    *((peer, small_case(cases.SINKHORN, dtype=torch.float32)) for peer in peers.PEERS[:2]),
    (peers.TILE_KERNELS, small_case(cases.MHC_PRE, dtype=torch.float32)),
    *((peer, ConvCase(1, 8, 16, n=2)) for peer in (peers.FLA, peers.CAUSAL_CONV1D)),
    (peers.FLA, ConvCase(1, 8, 16, places="seq_idx")),
    *((peers.CAUSAL_CONV1D, case) for case in (ConvCase(1, 8, 16, 5), ConvCase(1, 8, 12))),
]


@pytest.mark.parametrize(("peer", "case"), LACKING, **named)
def test_what_a_peer_lacks(peer, case, stand_ins):
    assert peers.measure(peer, case) is None


OF_MHC = (cases.MHC_PRE, cases.MHC_POST, cases.MHC_POST_PRE, cases.MHC_LAYER)
CONV = {"dtype": torch.float32, "silu": False}
OF_CONV = [ConvCase(2, 9, 16, **CONV | own) for own in ({}, {"silu": True}, {"bias": False})]
UPDATES = [replace(case, L=L, update=True) for case in OF_CONV for L in (1, 3)]
ADAPTED = [
    *((peers.LIGER, small_case(subject, dtype=torch.float32), peers.TENSOR_CORES) for subject in OF_MHC),
    *((peers.TILE_KERNELS, small_case(subject), 5 * 2**-8) for subject in (*OF_MHC, cases.MHC_HEAD)),
    *((peer, case, 1e-5) for peer in (peers.FLA, peers.CAUSAL_CONV1D) for case in OF_CONV),
    *((peers.CAUSAL_CONV1D, case, 1e-5) for case in UPDATES),
]


@pytest.mark.parametrize(("peer", "case", "tolerance"), ADAPTED, **named)
def test_adapters(peer, case, tolerance, stand_ins):
    """Every output and gradient comes back in our layout."""
    rows = peers.measure(peer, case)
    assert all(row.passed and row.tolerance == tolerance for row in rows), rows
    gradients = ["dx", "dweight"] if case in OF_CONV else ["dx"]
    expected = {"y", "conv_state"} if case in UPDATES else {*case.subject.outputs, *gradients}
    assert {row.output for row in rows} >= expected


def test_tile_kernels_finds_the_gradient_of_the_next_post(stand_ins, monkeypatch):
    ours, found = importlib.import_module("mhc_ops.compat.tile_kernels"), []
    right = ours.mhc_pre

    def pre(x, *arguments, **options):
        h_in, maps = right(x, *arguments, **options)
        if h_in.requires_grad:
            h_in.register_hook(lambda _: found.append(x.untyped_storage().grad_from_mhc_post.shape))
        return h_in, maps

    monkeypatch.setattr(ours, "mhc_pre", pre)
    peers.measure(peers.TILE_KERNELS, small_case(cases.MHC_POST_PRE))
    assert found == [(1, 8, 4, 64)]


ON_A_GPU = [
    *((peer, small_case(subject, T=256)) for peer in peers.PEERS[:2] for subject in OF_MHC),
    (peers.TILE_KERNELS, small_case(cases.MHC_HEAD, T=256)),
    *((peer, ConvCase(2, 256, 128, silu=silu)) for peer in peers.PEERS[2:] for silu in (False, True)),
    *((peers.CAUSAL_CONV1D, ConvCase(2, 1, 128, silu=silu, update=True)) for silu in (False, True)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("peer", "case"), ON_A_GPU, **named)
def test_computes_the_same_function(peer, case):
    if peers.version(peer) is None:
        pytest.skip(f"needs {peer.package}")
    assert all(row.passed for row in peers.measure(peer, case, "cuda"))


def test_a_wrong_peer_is_found():
    """Outputs with and without gradients, and gradients, each at the peer's own precision."""

    def fake(factor, gradient_factor):
        def call(x, h_out, h_post, h_res):
            (y,) = cases.MHC_POST.call(x=x, h_out=h_out, h_post=h_post, h_res=h_res, backend="reference")
            return ((y + (gradient_factor - 1) * (y - y.detach())) * (factor if y.requires_grad else 1),)

        return stand_in("fake", lambda subject, ours: peers.Prepared(ours, call, ("x",)))

    def failed(peer):
        return {row.output for row in peers.measure(peer, small_case(cases.MHC_POST)) if not row.passed}

    assert failed(fake(1.0, 1.0)) == set()
    assert failed(fake(1.01, 1.0)) == set()  # bf16 five times over
    assert failed(fake(1.05, 1.0)) == {"x_next with gradients", "dx"}
    assert failed(fake(1.0, 1.05)) == {"dx"}
