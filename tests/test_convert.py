"""mhc_ops.convert: round trips bit for bit, and converted parameters compute what they did in their library."""

from types import SimpleNamespace

import pytest
import torch
from compat_oracle import FP32, assert_near, inverse_rms, logits, read, sinkhorn, write
from torch import nn

from mhc_ops import HyperConnection, HyperHead, convert
from mhc_ops.compat.liger import LigerMHC
from mhc_ops.compat.megatron import HyperConnectionModule

FP64 = 1e-12
EPS = 1e-6
N, D = 4, 24
M, K = N * N + 2 * N, N * D
OTHERS = [format.value for format in convert.Format if format is not convert.Format.MHC_OPS]
WITH_HEAD = ["deepseek", "transformers", "megatron"]


def drawn(shapes, dtype=torch.float32):
    torch.manual_seed(1)
    return {name: (torch.randn(shape) / (K**0.5 if K in shape else 1)).to(dtype) for name, shape in shapes.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def maps(begin, phi=".phi", scale=".alpha", base=".bias", rows=M, scales=3):
    """The shapes of one connection or head."""
    return {begin + phi: (rows, K), begin + scale: (scales,), begin + base: (rows,)}


def alphas(begin, pre, post=None, res=None):
    shapes = zip(("pre", "post", "res"), (pre, pre if post is None else post, pre if res is None else res))
    return {f"{begin}.alpha_{name}": shape for name, shape in shapes}


OF_DEEPSEEK, OF_TRANSFORMERS = ("_fn", "_scale", "_base"), (".fn", ".scale", ".base")
OF_HEAD = (".hc_fn", ".hc_scale", ".hc_base")
STATES = {
    "deepseek": {
        "embed.weight": (9, D),
        **maps("layers.0.hc_attn", *OF_DEEPSEEK),
        "layers.0.attn.wq.scale": (2, 2),  # of a quantised weight, not of mHC
        **maps("hc_head", *OF_DEEPSEEK, N, 1),
    },
    "transformers": {
        **maps("model.layers.0.attn_hc", *OF_TRANSFORMERS),
        "model.layers.0.input_layernorm.weight": (D,),
        **maps("model.hc_head", *OF_HEAD, N, 1),
    },
    "liger": {"0.layer.weight": (D, D), "0.phi": (K, M), "0.b": (M,), **alphas("0", ())},
    "megatron": {
        "decoder.layers.0.hc.mapping_proj.weight": (M, K),
        **alphas("decoder.layers.0.hc", (1,)),
        "decoder.layers.0.hc.bias": (M,),
        "decoder.layers.0.linear.bias": (D,),
        **maps("decoder.hc_head", *OF_DEEPSEEK, N, 1),
    },
    "megatron-main": {"0.mapping_proj.weight": (M, K), **alphas("0", (1,)), "0.bias": (M,)},
    "transformer-engine": {
        f"{begin}.{name}": shape
        for begin in (0, 1)
        for name, shape in {"phi": (M, K), "alpha": (3,), "beta": (1, M), "norm_weight": (K,)}.items()
        if (begin, name) != (1, "norm_weight")
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OTHERS)
def test_round_trip(name, dtype):
    state = drawn(STATES[name], dtype)
    before = {key: tensor.clone() for key, tensor in state.items()}
    ours = convert.to_ours(state, name)
    assert equal(state, before), "nothing is changed in place"
    assert not any(key.rpartition(".")[2] in ("b", "fn", "beta", "alpha_pre", "hc_fn") for key in ours)
    assert all(tensor.is_contiguous() for tensor in ours.values())
    assert equal(convert.from_ours(ours, name), state)


@pytest.mark.parametrize("name", OTHERS)
def test_round_trip_of_ours(name):
    """A stack with its layers, and a head where the library has one; as a whole, and one connection alone."""
    torch.manual_seed(2)
    model = nn.Sequential(*(HyperConnection(nn.Linear(D, D), N, D, layer_norm=True) for _ in range(2)))
    if name in WITH_HEAD:
        model.append(HyperHead(N, D))
    for state in (model.state_dict(), model[0].state_dict()):
        theirs = convert.from_ours(state, name)
        assert equal(convert.to_ours(theirs, name), state)


def connection(state, name, begin="0", sections=3):
    """Ours around tanh, of a state dict of theirs"""
    ours = convert.to_ours(state, name)
    found = HyperConnection(torch.tanh, N, D, gamma=f"{begin}.gamma" in ours, **convert.options(name, sections))
    mine = {key.removeprefix(f"{begin}."): tensor for key, tensor in ours.items() if key.startswith(f"{begin}.")}
    found.load_state_dict({key: tensor for key, tensor in mine.items() if not key.startswith("layer.")})
    return found.double()


def x_drawn():
    torch.manual_seed(3)
    return torch.randn(3, 2, N, D, dtype=torch.float64)


def of_keys(state, begin, ends):
    return (state[begin + end].double() for end in ends)


@pytest.mark.parametrize("name", ["deepseek", "transformers"])
def test_outputs_of_deepseek(name):
    state, x = drawn(STATES[name]), x_drawn()
    begin, ends = {
        "deepseek": ("layers.0.hc_attn", OF_DEEPSEEK),
        "transformers": ("model.layers.0.attn_hc", OF_TRANSFORMERS),
    }[name]
    pre, post, comb = logits(x, *of_keys(state, begin, ends), lambda v: inverse_rms(v, EPS))
    h_out = torch.tanh(read(x, pre.sigmoid() + EPS))
    expected = write(x, h_out, 2 * post.sigmoid(), sinkhorn(comb, 20, EPS))
    assert_near([connection(state, name, begin)(x)], [expected], FP64)


def test_outputs_of_hy4():
    """Two scales: the streams are kept as they are; post has an eps."""
    state, x = drawn(maps("0", *OF_DEEPSEEK, 2 * N, 2)), x_drawn()
    fn, scale, base = of_keys(state, "0", OF_DEEPSEEK)
    v = x.flatten(-2)
    mixes = (v @ fn.T * inverse_rms(v, 1e-6)).split(N, -1)
    pre, post = (m * a + b for m, a, b in zip(mixes, scale, base.split(N)))
    h_out = torch.tanh(read(x, pre.sigmoid() + 1e-6))
    expected = x + (2 * post.sigmoid() + 1e-6)[..., None] * h_out[..., None, :]
    assert_near([connection(state, "deepseek", sections=2)(x)], [expected], FP64)
    with pytest.raises(ValueError, match=r"^convert: liger has no connection of 2 sections"):
        convert.options("liger", sections=2)


@pytest.mark.parametrize("name", WITH_HEAD)
def test_outputs_of_a_head(name):
    state, x = drawn(STATES[name]), x_drawn()
    begin = {"deepseek": "hc_head", "transformers": "model.hc_head", "megatron": "decoder.hc_head"}[name]
    ours = {key.removeprefix(f"{begin}."): t for key, t in convert.to_ours(state, name).items() if begin in key}
    head = HyperHead(N, D)
    head.load_state_dict(ours)
    fn, scale, base = of_keys(state, begin, OF_HEAD if name == "transformers" else OF_DEEPSEEK)
    v = x.flatten(-2)
    expected = read(x, (v @ fn.T * inverse_rms(v, 1e-6) * scale + base).sigmoid() + 1e-6)
    assert_near([head.double()(x)], [expected], FP64)


def test_outputs_of_liger():
    state, x = drawn(STATES["liger"]), x_drawn()
    theirs = LigerMHC(nn.Identity(), hc=N, c=D, phi_dtype=torch.float32, allow_fp32=True)
    theirs.layer.forward = torch.tanh
    theirs.load_state_dict({key.removeprefix("0."): t for key, t in state.items() if "layer" not in key})
    assert_near([connection(state, "liger")(x)], [theirs.double()(x)], FP64)


def test_outputs_of_megatron():
    state, x = drawn(STATES["megatron"]), x_drawn()
    begin = "decoder.layers.0.hc"
    of_config = {"mhc_sinkhorn_iterations": 20, "mhc_init_gating_factor": 0.01, "sequence_parallel": False}
    theirs = HyperConnectionModule(SimpleNamespace(hidden_size=D, num_residual_streams=N, **of_config), 1)
    theirs.load_state_dict({k.removeprefix(f"{begin}."): t for k, t in state.items() if k.startswith(begin)})
    h_in, h_res, h_post, residual = theirs.double()(x.flatten(-2))
    expected = theirs.fused_h_res_h_post_bda(h_res, residual, h_post, (torch.tanh(h_in), None), 0.0, True, True)
    assert_near([connection(state, "megatron", begin)(x).flatten(-2)], [expected], FP64)


def test_outputs_of_megatron_main():
    """Rows and columns divided by their sums without eps, h_res[new, old], eps of the norm outside of the root."""
    assert convert.options("megatron-main")["hc_eps"] == 0  # too small a difference for what follows
    state, x = drawn(STATES["megatron-main"]), x_drawn()
    alphas = [state[f"0.alpha_{part}"].double() for part in ("pre", "post", "res")]
    weight, bias = state["0.mapping_proj.weight"].double(), state["0.bias"].double()
    pre, post, res = logits(x, weight, alphas, bias, lambda v: 1 / (v.norm(dim=-1, keepdim=True) / K**0.5 + 1e-6))
    h_res = (res - res.amax(-1, keepdim=True)).exp()
    for _ in range(20):
        h_res = h_res / h_res.sum(-1, keepdim=True)
        h_res = h_res / h_res.sum(-2, keepdim=True)
    expected = h_res @ x + 2 * post.sigmoid()[..., None] * torch.tanh(read(x, pre.sigmoid()))[..., None, :]
    # rsqrt(rms² + eps²) and 1/(rms + eps) are apart by eps, and with them each logit by as much of itself.
    assert_near([connection(state, "megatron-main")(x)], [expected], EPS)


@pytest.mark.parametrize("begin", ["0", "1"], ids=["norm weight", "without"])
def test_outputs_of_transformer_engine(begin):
    """x is [..., D, n] there, and so are the columns of phi; Sinkhorn in logarithms."""
    state, x = drawn(STATES["transformer-engine"]), x_drawn()
    state["0.norm_weight"] += 1
    phi, alpha, beta = (state[f"{begin}.{name}"].double() for name in ("phi", "alpha", "beta"))
    phi = phi * state.get(f"{begin}.norm_weight", torch.ones(K)).double()
    innermost = x.mT
    v = innermost.flatten(-2)
    eps = torch.finfo(torch.float32).eps
    mixes = v @ phi.T / (v.square().mean(-1, keepdim=True) + eps).sqrt()
    sizes = [N, N, N * N]
    pre, post, res = (m * a + b for m, a, b in zip(mixes.split(sizes, -1), alpha, beta[0].split(sizes)))
    res = res.unflatten(-1, (N, N))
    g = torch.zeros(())
    for _ in range(20):
        f = -torch.logsumexp(res + g, -1, keepdim=True)
        g = -torch.logsumexp(res + f, -2, keepdim=True)
    h_out = torch.tanh((innermost @ pre.sigmoid()[..., None]).squeeze(-1))
    expected = h_out[..., None] @ (2 * post.sigmoid())[..., None, :] + innermost @ (f + res + g).exp()
    assert_near([connection(state, "transformer-engine", begin)(x).mT], [expected], FP64)


def test_between_two_others():
    state = drawn(STATES["megatron-main"])
    assert equal(convert.between(convert.between(state, "megatron-main", "liger"), "liger", "megatron-main"), state)


def test_names_of_deepseek_and_transformers():
    state = drawn(STATES["deepseek"] | maps("layers.0.hc_ffn", *OF_DEEPSEEK))
    there = convert.between(state, "deepseek", "transformers")
    assert {"layers.0.attn_hc.fn", "layers.0.ffn_hc.scale", "hc_head.hc_base", "embed.weight"} < there.keys()
    assert equal(convert.between(there, "transformers", "deepseek"), state)
    assert equal(convert.from_ours(convert.to_ours(state, "deepseek"), "transformers"), there)


def test_names_of_a_deepseek_v4(tmp_path):
    """The names of its modules, and those of the file that it saves: DeepSeek's, but for the head."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek V4")
    from safetensors.torch import load_file

    sizes = {"vocab_size": 16, "hidden_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 8, "n_routed_experts": 2}
    config = transformers.DeepseekV4Config(**sizes, num_experts_per_tok=1)
    model = transformers.DeepseekV4ForCausalLM(config)
    model.save_pretrained(tmp_path)
    modules, saved = (
        {key: tensor for key, tensor in state.items() if "hc_" in key or "_hc" in key}
        for state in (model.state_dict(), load_file(tmp_path / "model.safetensors"))
    )
    assert len(modules) == 9
    assert equal(convert.between(saved, "deepseek", "transformers"), modules)
    back = convert.between(modules, "transformers", "deepseek")
    assert {key for key in back if "head" not in key} == {key for key in saved if "head" not in key}
    assert {key for key in back if "head" in key} == {f"model.hc_head_{name}" for name in ("fn", "base", "scale")}


def test_fold_gamma():
    torch.manual_seed(4)
    normed = HyperConnection(torch.tanh, N, D, gamma=True)
    with torch.no_grad():
        normed.phi.normal_()
        normed.gamma.normal_()
    with pytest.raises(ValueError, match=r"^convert: gamma: liger has no norm weight; fold it into phi first"):
        convert.from_ours(normed.state_dict(), "liger")
    plain = HyperConnection(torch.tanh, N, D)
    plain.load_state_dict(convert.fold_gamma(normed.state_dict()))
    x = x_drawn().float()
    assert_near([plain(x)], [normed(x)], FP32)


SHAPE = r"must be \[n² \+ 2n, nD\]"
NOT_TOGETHER = "do not fit one another"
OF_MEGATRON = {"a.mapping_proj.weight": (M, K), "a.bias": (M,)}
OF_ENGINE = {"a.phi": (M, K), "a.alpha": (3,)}
WRONG = [
    (STATES["deepseek"], "deepsek", "mhc_ops", "source must be one of mhc_ops, deepseek, .* got 'deepsek'"),
    ({"a.fn": (M, K), "a.base": (M,)}, "transformers", "mhc_ops", "a.scale is missing beside a.fn"),
    (STATES["deepseek"], "deepseek", "liger", "hc_head is a head, and liger has none"),
    (maps("a", *OF_DEEPSEEK, 8, 2), "deepseek", "liger", "a is a connection that keeps its"),
    (maps("a", *OF_DEEPSEEK, 7), "deepseek", "mhc_ops", rf"{SHAPE}, got \[7"),
    (maps("a", *OF_DEEPSEEK) | {"a_base": (9,)}, "deepseek", "mhc_ops", r"bias must be \[24\], got \[9\]"),
    (maps("a", *OF_DEEPSEEK, scales=4), "deepseek", "mhc_ops", r"1 to 3 scales, got \[4\]"),
    (OF_ENGINE | {"a.beta": ()}, "transformer-engine", "mhc_ops", NOT_TOGETHER),
    (OF_ENGINE | {"a.beta": (M,)}, "transformer-engine", "mhc_ops", NOT_TOGETHER),
    (OF_ENGINE | {"a.beta": (2, M)}, "transformer-engine", "mhc_ops", r"bias must be \[24\]"),
    ({"a.phi": (8, K), "a.alpha": (2,), "a.beta": (1, 8)}, "transformer-engine", "mhc_ops", "has no connection that k"),
    (OF_MEGATRON | alphas("a", (3,), (0,), (0,)), "megatron", "mhc_ops", NOT_TOGETHER),
    (OF_MEGATRON | alphas("a", ()), "megatron", "mhc_ops", NOT_TOGETHER),
    (OF_MEGATRON | alphas("a", (2,)), "megatron", "mhc_ops", "1 to 3 scales, got"),
    *(
        ({"a_fn": phi, "a_base": phi[:1], "a_scale": (scales,)}, "deepseek", "mhc_ops", SHAPE)
        for scales in (1, 2, 3)
        for phi in ((), (0,), (0, 0), (0, K), (M, 0), (M, K, 1))
    ),
    ({"a.phi": (), "a.b": (), **alphas("a", ())}, "liger", "mhc_ops", NOT_TOGETHER),
    (maps("a", *OF_DEEPSEEK) | {"a.phi": ()}, "deepseek", "mhc_ops", "two tensors would be a.phi"),
    # parameters of another format: not even half of them is converted
    (STATES["deepseek"], "megatron", "mhc_ops", "layers.0.hc_attn_fn, .* and megatron has no connection of these"),
    (STATES["megatron"], "deepseek", "mhc_ops", "hc.mapping_proj.weight, .* are as megatron has them, not deepseek"),
    (STATES["megatron"], "megatron-main", "mhc_ops", "hc_head_fn, .* are as deepseek has them, not megatron-main, and"),
    (STATES["transformers"], "deepseek", "mhc_ops", "attn_hc.fn, .* are as transformers has them, not deepseek"),
    (
        STATES["liger"],
        "deepseek",
        "mhc_ops",
        "0.phi, 0.b, .* are as liger has them, not deepseek, and would be left as",
    ),
    (maps("a", *OF_TRANSFORMERS, N, 1), "transformers", "mhc_ops", "are a head, and transformers has no head of"),
]


@pytest.mark.parametrize(("state", "source", "target", "message"), WRONG)
def test_what_does_not_fit(state, source, target, message):
    with pytest.raises(ValueError, match=f"^convert: .*{message}"):
        convert.between(drawn(state), source, target)


def test_what_the_target_has_already_may_be_there():
    state = drawn(STATES["deepseek"])
    ours = convert.to_ours(state, "deepseek")
    half = {key: tensor for key, tensor in ours.items() if "head" not in key}
    half |= {key: tensor for key, tensor in state.items() if "head" in key}
    assert equal(convert.to_ours(half, "deepseek"), ours)
    without = {"embed.weight": state["embed.weight"]}
    assert equal(convert.to_ours(without, "deepseek"), without) and convert.groups(without, "deepseek") == {}
