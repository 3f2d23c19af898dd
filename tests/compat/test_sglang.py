"""mhc_ops.compat.sglang against the equations, and in the place of SGLang's functions."""

import sys
from importlib import import_module

import pytest
import torch
from compat_oracle import read, signature, write
from server_adapters import assert_rounded, draw, filtered, package, refusing, window

from mhc_ops.compat import sglang
from mhc_ops.compat.sglang import conv, mhc

N, D = 4, 24
M, K = N * N + 2 * N, N * D
OF_MAPS = "hc_scale hc_base rms_eps hc_pre_eps hc_sinkhorn_eps hc_post_mult_value sinkhorn_repeat"
OF_HY4 = "hc_fn hc_scale hc_base magnitude norm_eps hc_eps rms_weight=None rms_eps=0.0"
SIGNATURES = {
    conv.causal_conv1d_fn: "x weight bias conv_states query_start_loc seq_lens_cpu cache_indices=None "
    "has_initial_state=None activation=silu pad_slot_id=-1 validate_data=False block_table=None",
    conv.causal_conv1d_update: "x conv_state weight bias=None activation=None cache_seqlens=None "
    "conv_state_indices=None num_accept_tokens=None intermediate_conv_window=None intermediate_state_indices=None "
    "retrieve_next_token=None retrieve_next_sibling=None retrieve_parent_token=None pad_slot_id=-1 metadata=None "
    "validate_data=False",
    conv.causal_conv1d_fn_cuda: "x weight bias=None query_start_loc=None cache_indices=None has_initial_state=None "
    "conv_states=None activation=silu pad_slot_id=-1 seq_lens_cpu=None block_table=None",
    conv.causal_conv1d_update_cuda: "x conv_state weight bias=None activation=None cache_seqlens=None "
    "conv_state_indices=None pad_slot_id=-1",
    mhc.mhc_pre: f"residual fn {OF_MAPS} n_splits=1 n_splits_pre=32 norm_weight=None norm_eps=None",
    mhc.mhc_fused_post_pre: f"x residual post_layer_mix comb_res_mix fn {OF_MAPS} n_splits=1 tile_n=1 "
    "norm_weight=None norm_eps=None",
    mhc.mhc_post: "x residual post_layer_mix comb_res_mix",
    mhc.hc_pre: "x hc_fn hc_scale hc_base hc_mult rms_eps hc_eps sinkhorn_iters post_mult_value=2.0 "
    "hc_norm_weight=None out_norm_weight=None out_norm_eps=None",
    mhc.hc_post: "x residual h_post h_res hc_mult",
    mhc.fused_hc_head: "x hc_fn hc_scale hc_base norm_eps hc_eps",
    mhc.fused_hy4_ihc_pre: f"x {OF_HY4}",
    mhc.fused_hy4_ihc_post_pre: f"output residual post {OF_HY4}",
}


def test_signatures():
    assert {function: signature(function) for function in SIGNATURES} == SIGNATURES


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("variant", ["triton", "cuda"])
def test_prefill(variant, each_backend):
    """A sequence that goes on, one that begins, and padding; each variant has its own order of arguments."""
    weight, bias, normal = draw(D)
    whole, x, states = normal(9, D), normal(10, D), normal(4, D, 5)
    x[:4], states[2, :, :3] = whole[5:], window(whole[:5], 4)
    slots, goes_on = ints(2, -1, 1), torch.tensor([True, True, False])
    if variant == "triton":
        block_table = {"block_table": ints(0, 0, -1, -1).view(2, 2)}
        y = conv.causal_conv1d_fn(x.T, weight, bias, states, ints(0, 4, 6, 9), None, slots, goes_on, **block_table)
    else:
        of_states = {"conv_states": states, "seq_lens_cpu": [4, 2, 3]}
        y = conv.causal_conv1d_fn_cuda(x.T, weight, bias, ints(0, 4, 6, 9), slots, goes_on, **of_states)
    assert_rounded(y.T[:4], filtered(whole, weight, bias)[5:])
    assert_rounded(y.T[6:9], filtered(x[6:9], weight, bias))
    assert not y.T[4:6].any() and not y.T[9:].any()
    assert torch.equal(states[2, :, :3], window(whole, 4)) and torch.equal(states[1, :, :3], window(x[6:9], 4))


def test_prefill_of_a_batch_and_without_states(each_backend):
    weight, bias, normal = draw(D)
    x, states = normal(2, D, 5), normal(2, D, 3)
    given = {"has_initial_state": torch.zeros(2, dtype=torch.bool), "conv_states": states}
    for y in (conv.causal_conv1d_fn_cuda(x, weight, bias, **given), conv.causal_conv1d_fn_cuda(x, weight, bias)):
        for i in range(2):
            assert_rounded(y[i].T, filtered(x[i].T, weight, bias))
    assert torch.equal(states[1], x[1, :, 2:])


@pytest.mark.parametrize("tree", [False, True])
def test_verification(tree, each_backend):
    """The window after each draft token, along its parents if the drafts are a tree:
    0 has the children 1 and 2, and 2 the child 3."""
    weight, bias, normal = draw(D)
    T, before, drafts = 4, normal(2, 5, D), normal(2, 4, D)
    states, windows = normal(4, D, 3), normal(5, T, D, 3)
    for slot, tokens in zip((1, 3), before):
        states[slot] = window(tokens, 4)
    kept, parents = states.clone(), torch.full((2, 6), -7)
    of_tree = {
        "retrieve_next_token": torch.tensor([[1, -1, 3, -1, -1, -1]] * 2),
        "retrieve_next_sibling": torch.tensor([[-1, 2, -1, -1, -1, -1]] * 2),
        "retrieve_parent_token": parents,
    }
    x = drafts.transpose(1, 2)
    y = conv.causal_conv1d_update(
        x,
        states,
        weight,
        bias,
        "silu",
        conv_state_indices=ints(1, 3),
        intermediate_conv_window=windows,
        intermediate_state_indices=ints(4, 0),
        **(of_tree if tree else {}),
    )
    paths = [(0,), (0, 1), (0, 2), (0, 2, 3)] if tree else [tuple(range(t + 1)) for t in range(T)]
    for i, line in ((0, 4), (1, 0)):
        for t, path in enumerate(paths):
            inputs = torch.cat([before[i], drafts[i][list(path)]])
            assert_rounded(y[i, :, t], filtered(inputs, weight, bias)[-1])
            assert torch.equal(windows[line, t], window(inputs, 4))
    if tree:
        assert parents.tolist() == [[0, 0, 0, 2, -7, -7]] * 2 and torch.equal(states, kept)
    else:
        assert torch.equal(states[3], x[1, :, 1:])


def test_parents_of_random_trees():
    """Against the rule, one token after the other."""
    generator = torch.Generator().manual_seed(0)
    for T in (1, 2, 5, 16, 33):
        parents = torch.tensor([[0, *(int(torch.randint(t, (), generator=generator)) for t in range(1, T))]])
        child, sibling, last = torch.full((1, T), -1), torch.full((1, T), -1), {}
        for t in range(1, T):
            parent = int(parents[0, t])
            (sibling if parent in last else child)[0, last.get(parent, parent)] = t
            last[parent] = t
        assert torch.equal(conv.parents_in(child, sibling), parents)


def test_decoding_in_the_cuda_form(each_backend):
    """y takes the place of x; padding stays, of each kind. A ring buffer with cache_seqlens."""
    weight, bias, normal = draw(D)
    whole, states = normal(6, D), normal(3, D, 3)
    states[2] = window(whole[:5], 4)
    x = torch.stack([whole[5], normal(D)])
    padding = x[1].clone()
    assert conv.causal_conv1d_update_cuda(x, states, weight, bias, "silu", conv_state_indices=ints(2, -1)) is x
    assert_rounded(x[0], filtered(whole, weight, bias)[5])
    assert torch.equal(x[1], padding) and torch.equal(states[2], window(whole, 4))
    ring = normal(1, D, 4)
    for t in range(6):
        y = conv.causal_conv1d_update_cuda(whole[t : t + 1].clone(), ring, weight, bias, None, ints(t))
        if t > 2:
            assert_rounded(y[0], filtered(whole, weight, bias, silu=False)[t])
    slots, lengths = ints(0, -1, 5, 6, 0), ints(6, 6, 6, 6, -1)
    rings, x = normal(6, D, 4), normal(5, D)
    rings[0], before, kept = ring[0], rings.clone(), x.clone()
    y = conv.causal_conv1d_update_cuda(x, rings, weight, bias, None, lengths, slots, pad_slot_id=5)
    assert y is x and torch.equal(x[1:], kept[1:]) and torch.equal(rings[1:], before[1:])
    assert_rounded(x[0], filtered(torch.cat([whole, kept[:1]]), weight, bias, silu=False)[6])


def test_speculation(each_backend):
    weight, bias, normal = draw(D)
    true, states, at, accepted = normal(9, D), normal(3, D, 5), 4, ints(1)
    states[1, :, :3] = window(true[:at], 4)
    for kept in (2, 1):
        drafts = torch.cat([true[at : at + kept], normal(3 - kept, D)])
        slots = {"conv_state_indices": ints(1), "num_accept_tokens": accepted}
        y = conv.causal_conv1d_update(drafts.T[None], states, weight, bias, True, **slots)
        assert_rounded(y[0].T, filtered(torch.cat([true[:at], drafts]), weight, bias)[at:])
        at, accepted = at + kept, ints(kept)


def of_mhc(maps=M, T=5):
    torch.manual_seed(1)
    own = torch.randn(maps, K) / K**0.5, torch.rand(2 if maps == 2 * N else 3), 0.3 * torch.randn(maps)
    return torch.randn(T, N, D).bfloat16(), torch.randn(T, D).bfloat16(), own, torch.rand(D).bfloat16()


def test_the_forms_of_mhc_agree(each_backend):
    """V4's functions, the parts that V4.1 calls and GLM's flat form compute the same bits. test_vllm.py compares them
    with the equations."""
    residual, x, own, weight = of_mhc()
    options = (0.3, 0.05, 0.05, 2.0, 7)
    norm = {"norm_weight": weight, "norm_eps": 0.2}
    post, comb, h_in = mhc.mhc_pre(residual, *own, *options)
    pre, *maps = mhc.hc_mix_stats_sinkhorn(residual.flatten(1), *own, N, 7, 0.3, 0.05)
    assert torch.equal(post[..., 0], maps[0]) and torch.equal(comb, maps[1])
    assert torch.equal(mhc.mhc_combine(residual.flatten(1), pre, N, torch.bfloat16), h_in)
    assert_rounded(mhc.mhc_combine(residual.flatten(1), pre, N, torch.float32), read(residual.double(), pre.double()))
    streams = mhc.mhc_post(x, residual, post, comb)
    assert_rounded(streams, write(residual.double(), x.double(), post[..., 0].double(), comb.double()))
    for again in (post, post[..., 0]):
        assert torch.equal(mhc.mhc_post_split_h(x, residual, again, comb), streams)
        fused = mhc.mhc_fused_post_pre(x, residual, again, comb, *own, *options, **norm)
        assert all(map(torch.equal, fused, (streams, *mhc.mhc_pre(streams, *own, *options, **norm))))
    gamma = torch.rand(K)
    *flat, is_normed = mhc.hc_pre(streams.flatten(1), *own, N, 0.3, 0.05, 7, hc_norm_weight=gamma)
    assert is_normed is False and flat[1].shape == (5, N * N)
    expected = mhc.mhc_pre(streams, own[0] * gamma, *own[1:], *options)
    for found, other in zip(flat, (expected[2], expected[1].flatten(1), expected[0][..., 0]), strict=True):
        assert_rounded(found, other)
    normed, h_res, h_post, is_normed = mhc.hc_pre(streams.flatten(1), *own, N, 0.3, 0.05, 7, 2.0, None, weight, 0.2)
    assert is_normed is True and torch.equal(normed, fused[3])
    written = mhc.hc_post(x, streams.flatten(1), h_post, h_res, N)
    assert torch.equal(written, mhc.mhc_post(x, streams, fused[1], fused[2]).flatten(1))
    head = mhc.fused_hc_head(residual, own[0][:N], own[1][:1], own[2][:N], 1e-6, 2e-6)
    assert head.shape == (5, D) and head.dtype == torch.bfloat16


def test_hy4(each_backend):
    residual, x, own, weight = of_mhc(2 * N)
    h_in, post = mhc.fused_hy4_ihc_pre(residual, *own, 2.0, 0.3, 0.05, weight, 0.2)
    v = residual.double().flatten(1)
    z = v @ own[0].double().T * (v.square().mean(-1, keepdim=True) + 0.3).rsqrt()
    z = z * own[1].double().repeat_interleave(N) + own[2].double()
    assert_rounded(post, 2 * z[:, N:].sigmoid() + 0.05)
    merged = read(residual.double(), z[:, :N].sigmoid() + 0.05)
    assert_rounded(h_in, weight.double() * merged * (merged.square().mean(-1, keepdim=True) + 0.2).rsqrt())
    streams = mhc.fused_hy4_ihc_post(x, residual, post)
    assert_rounded(streams, residual.double() + post.double()[..., None] * x.double()[:, None])
    fused = mhc.fused_hy4_ihc_post_pre(x, residual, post, *own, 2.0, 0.3, 0.05, weight, 0.2)
    assert all(map(torch.equal, fused, (streams, *mhc.fused_hy4_ihc_pre(streams, *own, 2.0, 0.3, 0.05, weight, 0.2))))


def test_wrong_use():
    weight, _, normal = draw(D)
    x, states = normal(2, D), normal(2, D, 3)
    with pytest.raises(ValueError, match="cache_seqlens must be None"):
        conv.causal_conv1d_update(x, states, weight, cache_seqlens=ints(1, 1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        conv.causal_conv1d_fn_cuda(x.T, weight, scale=2)
    with pytest.raises(ValueError, match="has_initial_state needs conv_states, got None"):
        conv.causal_conv1d_fn_cuda(x.T, weight, query_start_loc=ints(0, 2), has_initial_state=torch.ones(1).bool())
    with pytest.raises(ValueError, match="needs retrieve_next_sibling and x"):
        conv.causal_conv1d_update(x, states, weight, retrieve_next_token=ints(0, 0)[:, None])
    for name in ("retrieve_next_sibling", "retrieve_parent_token"):
        with pytest.raises(ValueError, match=f"causal_conv1d_update: {name} needs retrieve_next_token, got None"):
            conv.causal_conv1d_update(x, states, weight, **{name: ints(0, 0)[:, None]})


FILES = {
    "sglang/__init__.py": "__version__ = '0.5.23'\n",
    **{f"{m.replace('.', '/')}.py": refusing(*names) for m, names in (sglang.CONV | mhc.FUNCTIONS).items()},
    "sglang/srt/layers/backend.py": "from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn as a\n"
    "from sglang.srt.layers.attention.mamba.causal_conv1d import causal_conv1d_fn as b\n",
}


@pytest.fixture
def server(written, monkeypatch):
    monkeypatch.delenv(sglang.VARIABLE, raising=False)
    yield lambda changes=(): written(package({**FILES, **dict(changes)}))
    sglang.unregister()


def test_register(server):
    """A module that was loaded before gets ours too, each variant its own."""
    server()
    caller = import_module("sglang.srt.layers.backend")
    names = sglang.register()
    assert {"causal_conv1d_fn", "mhc_pre", "hc_pre", "fused_hc_head", "fused_hy4_ihc_post_pre"} < set(names)
    assert caller.a is conv.causal_conv1d_fn and caller.b is conv.causal_conv1d_fn_cuda
    assert sglang.register("conv") == ("causal_conv1d_fn", "causal_conv1d_update") * 2
    sglang.unregister()
    for function in (caller.a, caller.b):
        with pytest.raises(AssertionError, match="its own causal_conv1d_fn"):
            function()


def test_a_version_without_a_name(server):
    server({"sglang/__init__.py": "__version__ = '0.4'", "sglang/kernels/ops/layernorm/mhc_head.py": ""})
    with pytest.raises(ImportError, match=r"^register: sglang 0.4 has no fused_hc_head in .*; sglang 0.5.23 has it$"):
        sglang.register()
    assert len(sglang.register("conv")) == 4


def test_plugin(server, monkeypatch):
    server()
    sglang.plugin()
    assert "sglang" not in sys.modules
    monkeypatch.setenv(sglang.VARIABLE, "conv")
    sglang.plugin()
    assert import_module("sglang.srt.layers.backend").a is conv.causal_conv1d_fn
    assert "sglang.kernels.ops.layernorm.mhc" not in sys.modules
    monkeypatch.setenv(sglang.VARIABLE, "force")
    with pytest.raises(ValueError, match="MHC_OPS_SGLANG: the words must be '0', '1', 'conv' or 'mhc', got 'force'"):
        sglang.plugin()
