"""What servers call of hyper-connections, in the forms of vLLM and SGLang, against the equations."""

import pytest
import torch
from compat_oracle import inverse_rms, logits, read, sinkhorn, write
from server_adapters import assert_rounded

from mhc_ops.compat import vllm
from mhc_ops.compat.sglang import mhc as sglang
from mhc_ops.compat.vllm import nvidia

N, D = 4, 24
M, K = N * N + 2 * N, N * D
OPTIONS = (0.3, 0.05, 0.02, 1.5, 7)  # large enough that each shows
ALIKE = (0.3, 0.05, 0.05, 2.0, 7)  # where a form has one eps for reading and for Sinkhorn, and no factor
NORM_EPS = 0.2


def of_mhc(maps=M, T=5):
    """residual, x, own (phi, alpha, bias) and weight, then maps: post, comb, pre"""
    torch.manual_seed(1)
    own = torch.randn(maps, K) / K**0.5, torch.tensor([1.1, 0.7, 1.3][: 2 if maps == 2 * N else 3])
    streams, x, weight = torch.randn(T, N, D).bfloat16(), torch.randn(T, D).bfloat16(), torch.rand(D).bfloat16()
    maps_given = torch.rand(T, N, 1), torch.rand(T, N, N), torch.rand(T, N)
    return streams, x, (*own, 0.3 * torch.randn(maps)), weight, *maps_given


def expected_maps(streams, own):
    norm_eps, pre_eps, sinkhorn_eps, post_mult, repeat = OPTIONS
    fn, scale, base = (tensor.double() for tensor in own)
    pre, post, res = logits(streams.double(), fn, scale, base, lambda v: inverse_rms(v, norm_eps))
    return pre.sigmoid() + pre_eps, post_mult * post.sigmoid(), sinkhorn(res, repeat, sinkhorn_eps)


def normed(h_in, weight):
    return h_in if weight is None else weight.double() * h_in * inverse_rms(h_in, NORM_EPS)


def assert_all_rounded(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert_rounded(one, other)


@pytest.mark.parametrize("server", [vllm, sglang], ids=["vllm", "sglang"])
@pytest.mark.parametrize("norm", [False, True])
def test_boundaries(norm, server, each_backend):
    residual, x, own, weight, post, comb, _ = of_mhc()
    of_norm = {"norm_weight": weight if norm else None, "norm_eps": NORM_EPS}
    pre, h_post, h_res = expected_maps(residual, own)
    h_in = normed(read(residual.double(), pre), weight if norm else None)
    assert_all_rounded(server.mhc_pre(residual, *own, *OPTIONS, **of_norm), (h_post[..., None], h_res, h_in))
    streams = server.mhc_post(x, residual, post, comb)
    assert_rounded(streams, write(residual.double(), x.double(), post[..., 0].double(), comb.double()))
    fused = server.mhc_fused_post_pre(x, residual, post, comb, *own, *OPTIONS, **of_norm)
    assert all(map(torch.equal, fused, (streams, *server.mhc_pre(streams, *own, *OPTIONS, **of_norm))))
    head = vllm.hc_head if server is vllm else sglang.fused_hc_head
    fn, scale, base = own[0][:N], own[1][:1], own[2][:N]
    v = residual.double().flatten(-2)
    weights = (v @ fn.double().T * inverse_rms(v, 0.3) * scale.double() + base.double()).sigmoid() + 0.05
    assert_rounded(head(residual, fn, scale, base, 0.3, 0.05), read(residual.double(), weights))


@pytest.mark.parametrize("maps_of", ["streams", "x"])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("entry", ["first", "carried"])
def test_shifted(entry, ended, maps_of, each_backend):
    """Streams are read with earlier weights, or stream 0 alone; new ones come out. With x the maps are of n copies."""
    residual, x, own, weight, post, comb, pre = of_mhc()
    given: dict = {"pre_mix": pre if entry == "carried" else None, "norm_weight": weight, "norm_eps": NORM_EPS}
    expected, fn = residual, own[0]
    if ended:
        given |= {"sublayer_out": x, "post_layer_mix": post, "comb_res_mix": comb}
        expected = vllm.mhc_post(x, residual, post, comb)
    of_maps = expected
    if maps_of == "x":
        given["x"] = x.flip(0)
        fn, of_maps = fn.view(M, N, D).sum(1), given["x"][:, None].expand(-1, N, -1)
    with torch.no_grad():
        streams, *found = vllm.mhc_pre_delayed(residual, fn, *own[1:], *OPTIONS, **given)
    assert torch.equal(streams, expected)
    h_pre, h_post, h_res = expected_maps(of_maps, own)
    h_in = read(expected.double(), pre.double()) if entry == "carried" else expected[:, 0].double()
    assert_all_rounded(found, (h_post[..., None], h_res, normed(h_in, weight), h_pre))


def test_what_a_shifted_form_needs():
    residual, x, own, _, post, comb, _ = of_mhc()
    for given in ({"sublayer_out": x}, {"post_layer_mix": post}, {"comb_res_mix": comb}):
        with pytest.raises(ValueError, match=f"mhc_pre_delayed: {next(iter(given))} needs "):
            vllm.mhc_pre_delayed(residual, *own, *OPTIONS, **given)


def test_what_nvidia_models_call():
    residual, x, own, weight, post, comb, pre = of_mhc()
    functions = nvidia.FUNCTIONS["vllm.model_executor.kernels.mhc.tilelang"]
    norm, copies = {"norm_weight": weight}, x[:, None].expand(-1, N, -1).contiguous()
    found = functions["mhc_pre_broadcast_tilelang"](x, *own, *OPTIONS, **norm, fn_broadcast=own[0].view(M, N, D).sum(1))
    expected = copies, *vllm.mhc_pre(copies, *own, *OPTIONS, **norm, norm_eps=1e-6)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, functions["mhc_pre_tilelang"](copies, *own, *OPTIONS, **norm), expected[1:]))
    delayed = vllm.mhc_pre_delayed(residual, *own, *OPTIONS, pre_mix=pre)
    alone = functions["mhc_pre_delayed_tilelang"]
    assert all(map(torch.equal, alone(residual, *own, *OPTIONS, pre), delayed[1:]))
    ended = {"sublayer_out": x, "post_layer_mix": post, "comb_res_mix": comb}
    delayed = vllm.mhc_pre_delayed(residual, *own, *OPTIONS, pre_mix=pre, **ended)
    for aux in (False, True):
        call = x, residual, post, comb, *own, *OPTIONS, pre, None, 1e-6, aux
        *found, mean = functions["mhc_fused_post_pre_delayed_tilelang"](*call)
        assert all(map(torch.equal, found, delayed)) and mean.shape == (len(x) if aux else 0, D)
    assert_rounded(mean, found[0].double().mean(1))


def test_the_forms_of_sglang_agree(each_backend):
    """V4's functions, the parts that V4.1 calls and GLM's flat form compute the same bits."""
    residual, x, own, weight, *_ = of_mhc()
    norm = {"norm_weight": weight, "norm_eps": NORM_EPS}
    post, comb, h_in = sglang.mhc_pre(residual, *own, *ALIKE)
    pre, *maps = sglang.hc_mix_stats_sinkhorn(residual.flatten(1), *own, N, 7, 0.3, 0.05)
    assert torch.equal(post[..., 0], maps[0]) and torch.equal(comb, maps[1])
    assert torch.equal(sglang.mhc_combine(residual.flatten(1), pre, N, torch.bfloat16), h_in)
    wide = sglang.mhc_combine(residual.flatten(1), pre, N, torch.float32)
    assert_rounded(wide, read(residual.double(), pre.double()))
    streams = sglang.mhc_post(x, residual, post, comb)
    fused = sglang.mhc_fused_post_pre(x, residual, post, comb, *own, *ALIKE, **norm)
    for again in (post, post[..., 0]):
        assert torch.equal(sglang.mhc_post_split_h(x, residual, again, comb), streams)
        found = sglang.mhc_fused_post_pre(x, residual, again, comb, *own, *ALIKE, **norm)
        assert all(map(torch.equal, found, fused))
    gamma = torch.rand(K)
    *flat, is_normed = sglang.hc_pre(streams.flatten(1), *own, N, 0.3, 0.05, 7, hc_norm_weight=gamma)
    assert is_normed is False and flat[1].shape == (5, N * N)
    expected = sglang.mhc_pre(streams, own[0] * gamma, *own[1:], *ALIKE)
    assert_all_rounded(flat, (expected[2], expected[1].flatten(1), expected[0][..., 0]))
    of_norm = {"out_norm_weight": weight, "out_norm_eps": NORM_EPS}
    h_in, h_res, h_post, is_normed = sglang.hc_pre(streams.flatten(1), *own, N, 0.3, 0.05, 7, **of_norm)
    assert is_normed is True and torch.equal(h_in, fused[3])
    written = sglang.hc_post(x, streams.flatten(1), h_post, h_res, N)
    assert torch.equal(written, sglang.mhc_post(x, streams, fused[1], fused[2]).flatten(1))


def test_hy4(each_backend):
    residual, x, own, weight, *_ = of_mhc(2 * N)
    options = 2.0, 0.3, 0.05, weight, NORM_EPS
    h_in, post = sglang.fused_hy4_ihc_pre(residual, *own, *options)
    v = residual.double().flatten(1)
    z = v @ own[0].double().T * inverse_rms(v, 0.3)
    z = z * own[1].double().repeat_interleave(N) + own[2].double()
    assert_rounded(post, 2 * z[:, N:].sigmoid() + 0.05)
    assert_rounded(h_in, normed(read(residual.double(), z[:, :N].sigmoid() + 0.05), weight))
    streams = sglang.fused_hy4_ihc_post(x, residual, post)
    assert_rounded(streams, residual.double() + post.double()[..., None] * x.double()[:, None])
    fused = sglang.fused_hy4_ihc_post_pre(x, residual, post, *own, *options)
    assert all(map(torch.equal, fused, (streams, *sglang.fused_hy4_ihc_pre(streams, *own, *options))))
