"""Peers: absent ones are said to be absent, present ones compute the same function."""

import importlib.metadata
import sys
from dataclasses import replace

import pytest
import torch

import mhc_ops
import mhc_ops.compat.causal_conv1d
from mhc_ops.measure import peers
from mhc_ops.testing import cases
from mhc_ops.testing.conv_cases import ConvCase

by_peer = pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
by_subject = pytest.mark.parametrize("subject", cases.SUBJECTS, ids=lambda subject: subject.name)


def small_case(subject, T=8, n=4, D=64, dtype=torch.bfloat16, gamma=False):
    return cases.Case(subject, (T,), n, D, dtype, gamma=gamma)


@by_peer
def test_not_installed(peer, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert peers.version(peer) is None
    assert peers.why_not(peer) == f"{peer.name} is not installed: pip install {peer.package}"
    with pytest.raises(RuntimeError, match=f"{peer.name} is not installed: pip install {peer.package}"):
        case = ConvCase(1, 8, 16) if peer in (peers.FLA, peers.CAUSAL_CONV1D) else small_case(cases.MHC_PRE)
        peer.prepare(case.subject.name, case.inputs())


LACKING = [
    *((peer, small_case(cases.MHC_FORWARD_PRE)) for peer in peers.PEERS),
    *((peer, small_case(cases.MHC_PRE, **options)) for peer in peers.PEERS for options in ({"gamma": True}, {"n": 3})),
    *((peers.LIGER, small_case(subject)) for subject in (cases.MHC_HEAD, cases.SINKHORN)),
    *((peers.TILE_KERNELS, small_case(cases.MHC_PRE, **options)) for options in ({"dtype": torch.float32}, {"D": 100})),
    (peers.TILE_KERNELS, small_case(cases.SINKHORN, dtype=torch.float16)),
    *((peer, ConvCase(1, 8, 16, n=2)) for peer in (peers.FLA, peers.CAUSAL_CONV1D)),
    *((peers.FLA, case) for case in (ConvCase(1, 8, 16, places="seq_idx"), ConvCase(1, 1, 16, update=True))),
    *((peers.CAUSAL_CONV1D, case) for case in (ConvCase(1, 8, 16, 5), ConvCase(1, 8, 12))),
    (peers.CAUSAL_CONV1D, ConvCase(1, 8, 16, places="states")),
]


@pytest.mark.parametrize(("peer", "case"), LACKING, ids=lambda value: getattr(value, "name", str(value)))
def test_what_a_peer_lacks(peer, case):
    assert peer.prepare(case.subject.name, case.inputs()) is None


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_adapter_of_causal_conv1d(step, bias, silu, monkeypatch):
    """With functions of the same names and layouts in place of the CUDA package."""
    monkeypatch.setitem(sys.modules, "causal_conv1d", mhc_ops.compat.causal_conv1d)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "1.6")
    case = ConvCase(2, step or 9, 16, dtype=torch.float32, silu=silu, bias=bias, update=bool(step))
    rows = peers.measure(peers.CAUSAL_CONV1D, case)
    assert {row.output for row in rows} >= ({"y", "conv_state"} if step else {"y", "dx", "dweight"})
    assert all(row.passed and row.tolerance == 1e-5 for row in rows), rows


class TileKernels:
    """Functions of the names, arguments and layouts of the library, in plain torch."""

    @staticmethod
    def mhc_pre(x, fn, scale, base, **options):
        names = {"norm_eps": "norm_eps", "pre_eps": "hc_eps", "sinkhorn_eps": "sinkhorn_eps"}
        names |= {"sinkhorn_repeat": "sinkhorn_iters", "post_mult_value": "post_mult"}
        ours = {names[name]: value for name, value in options.items()}
        h_in, h_post, h_res = mhc_ops.mhc_pre(x, fn, scale, base, **ours, backend="reference")
        return h_in, (h_post[..., None], h_res)

    @staticmethod
    def mhc_post(h_out, x, post_mix, comb_mix):
        return mhc_ops.mhc_post(x, h_out, post_mix[..., 0], comb_mix, backend="reference")

    @staticmethod
    def mhc_pre_norm_fn(x, fn, gamma, eps, fuse_grad_acc):
        assert gamma is None and not fuse_grad_acc
        v = x.flatten(-2).float()
        return v @ fn.T * (v.square().mean(-1, keepdim=True) + eps).rsqrt()

    @staticmethod
    def mhc_pre_split_mixes(mixes, scale, base, n, post_mult, eps):
        z = mixes * torch.repeat_interleave(scale, torch.tensor([n, n, n * n])) + base
        pre, post, logits = z.split([n, n, n * n], -1)
        return pre.sigmoid()[..., None] + eps, post_mult * post.sigmoid()[..., None], logits.unflatten(-1, (n, n))

    @staticmethod
    def mhc_pre_apply_mix(x, mix):
        return (mix * x.float()).sum(-2).to(x.dtype)

    @staticmethod
    def mhc_head_compute_mix(mixes, scale, base, eps):
        return (mixes * scale + base).sigmoid() + eps

    @staticmethod
    def sinkhorn_normalize(logits, repeat, eps):
        return mhc_ops.sinkhorn(logits, iters=repeat, eps=eps, backend="reference")


@by_subject
def test_adapter_of_tile_kernels(subject):
    """Every output and gradient comes back in our layout."""
    dtype = torch.float32 if subject is cases.SINKHORN else torch.bfloat16
    rows = peers.measure(replace(peers.TILE_KERNELS, load=lambda peer: TileKernels), small_case(subject, dtype=dtype))
    if subject is cases.MHC_FORWARD_PRE:
        assert rows is None
    else:
        assert all(row.passed for row in rows), rows
        assert any(row.output in ("dx", "dlogits") for row in rows)


@pytest.mark.interpreted
@by_subject
def test_liger_interpreted(subject):
    """In fp32, where Triton's interpreter is exact. The layer differs by its Sinkhorn of transposed logits."""
    rows = measured(peers.LIGER, small_case(subject, dtype=torch.float32), "cpu")
    assert all(row.relative_error <= (1e-3 if subject is cases.MHC_LAYER else 1e-5) for row in rows), rows


@pytest.mark.gpu
@by_subject
@by_peer
def test_computes_the_same_function(peer, subject):
    dtype = torch.float32 if subject is cases.SINKHORN else torch.bfloat16
    assert all(row.passed for row in measured(peer, small_case(subject, dtype=dtype, T=256), "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("peer", [peers.FLA, peers.CAUSAL_CONV1D], ids=lambda peer: peer.name)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("update", [False, True])
def test_convolutions_compute_the_same_function(update, silu, peer):
    case = ConvCase(2, 1 if update else 256, 128, silu=silu, update=update)
    assert all(row.passed for row in measured(peer, case, "cuda"))


def measured(peer, case, device):
    if peers.version(peer) is None:
        pytest.skip(f"needs {peer.package}")
    rows = peers.measure(peer, case, device)
    if rows is None:
        pytest.skip(f"{peer.name} has no {case.subject.name}")
    return rows


def test_a_wrong_peer_is_found():
    """Outputs with and without gradients, and gradients, each at the peer's own precision."""

    def fake(factor, gradient_factor):
        def call(x, h_out, h_post, h_res):
            (y,) = cases.MHC_POST.call(x=x, h_out=h_out, h_post=h_post, h_res=h_res, backend="reference")
            return ((y + (gradient_factor - 1) * (y - y.detach())) * (factor if y.requires_grad else 1),)

        return peers.Peer("fake", "fake", "fake", "", 1e-5, lambda load, *ours: peers.Prepared(ours[1], call, ("x",)))

    def failed(peer):
        return {row.output for row in peers.measure(peer, small_case(cases.MHC_POST)) if not row.passed}

    assert failed(fake(1.0, 1.0)) == set()
    assert failed(fake(1.01, 1.0)) == set()  # bf16 five times over
    assert failed(fake(1.05, 1.0)) == {"x_next with gradients", "dx"}
    assert failed(fake(1.0, 1.05)) == {"dx"}
