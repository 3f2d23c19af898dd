"""mhc_ops.convert: round trips bit for bit, and converted parameters compute what they did in their library."""

from types import SimpleNamespace

import pytest
import torch
from compat_oracle import FP32, assert_near, inverse_rms, logits, read, sinkhorn, write
from tiny_models import build
from torch import nn

from mhc_ops import HyperConnection, HyperHead, convert
from mhc_ops.compat.liger import LigerMHC
from mhc_ops.compat.megatron import HyperConnectionModule

FP64 = 1e-12
EPS = 1e-6
N, D = 4, 24
M, K = N * N + 2 * N, N * D
OTHERS = [format.value for format in convert.Format if format is not convert.Format.MHC_OPS]
HEADS = {"deepseek": "hc_head", "transformers": "model.hc_head", "megatron": "decoder.hc_head"}


def drawn(shapes, dtype=torch.float32):
    torch.manual_seed(1)
    return {name: (torch.randn(shape) / (K**0.5 if K in shape else 1)).to(dtype) for name, shape in shapes.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def maps(begin, phi=".phi", scale=".alpha", base=".bias", rows=M, scales=3):
    return {begin + phi: (rows, K), begin + scale: (scales,), begin + base: (rows,)}


def alphas(begin, pre, post=None, res=None):
    shapes = zip(("pre", "post", "res"), (pre, pre if post is None else post, pre if res is None else res))
    return {f"{begin}.alpha_{name}": shape for name, shape in shapes}


OF_DEEPSEEK, OF_TRANSFORMERS = ("_fn", "_scale", "_base"), (".fn", ".scale", ".base")
OF_HEAD = (".hc_fn", ".hc_scale", ".hc_base")
OF_ENGINE = {"phi": (M, K), "alpha": (3,), "beta": (1, M)}


def megatron_maps(begin):
    return {f"{begin}.mapping_proj.weight": (M, K), **alphas(begin, (1,)), f"{begin}.bias": (M,)}


STATES = {
    "deepseek": maps("layers.0.hc_attn", *OF_DEEPSEEK) | maps("hc_head", *OF_DEEPSEEK, N, 1),
    "transformers": maps("model.layers.0.attn_hc", *OF_TRANSFORMERS) | maps("model.hc_head", *OF_HEAD, N, 1),
    "liger": {"0.phi": (K, M), "0.b": (M,), **alphas("0", ())},
    "megatron": megatron_maps("decoder.layers.0.hc") | maps("decoder.hc_head", *OF_DEEPSEEK, N, 1),
    "megatron-main": megatron_maps("0"),
    "transformer-engine": {f"{i}.{name}": OF_ENGINE[name] for i in (0, 1) for name in OF_ENGINE}
    | {"0.norm_weight": (K,)},
}
# Not of mHC. The first is of a quantised weight.
OTHER = {"layers.0.attn.wq.scale": (2, 2), "embed.weight": (9, D), "0.layer.weight": (D, D), "0.linear.bias": (D,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OTHERS)
def test_round_trip(name, dtype):
    state = drawn(STATES[name] | OTHER, dtype)
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
    if name in HEADS:
        model.append(HyperHead(N, D))
    for state in (model.state_dict(), model[0].state_dict()):
        theirs = convert.from_ours(state, name)
        assert equal(convert.to_ours(theirs, name), state)


def x_drawn():
    torch.manual_seed(3)
    return torch.randn(3, 2, N, D, dtype=torch.float64)


def loaded(module, state, name, begin):
    """Our module with the parameters that stand there in a state dict of theirs"""
    ours = {key.removeprefix(f"{begin}."): t for key, t in convert.to_ours(state, name).items() if begin in key}
    module.load_state_dict(ours)
    return module.double()


def doubled(state, begin):
    """The parameters that stand there, by the ends of their names"""
    return {key.removeprefix(begin).strip("."): t.double() for key, t in state.items() if key.startswith(begin)}


def deepseek(own, x):
    pre, post, comb = logits(x, *own.values(), lambda v: inverse_rms(v, EPS))
    return write(x, torch.tanh(read(x, pre.sigmoid() + EPS)), 2 * post.sigmoid(), sinkhorn(comb, 20, EPS))


def liger(own, x):
    theirs = LigerMHC(nn.Identity(), hc=N, c=D, phi_dtype=torch.float64, allow_fp32=True).double()
    theirs.layer.forward = torch.tanh
    theirs.load_state_dict(own)
    return theirs(x)


def megatron(own, x):
    of_config = {"mhc_sinkhorn_iterations": 20, "mhc_init_gating_factor": 0.01, "sequence_parallel": False}
    theirs = HyperConnectionModule(SimpleNamespace(hidden_size=D, num_residual_streams=N, **of_config), 1).double()
    theirs.load_state_dict(own)
    h_in, h_res, h_post, residual = theirs(x.flatten(-2))
    out = theirs.fused_h_res_h_post_bda(h_res, residual, h_post, (torch.tanh(h_in), None), 0.0, True, True)
    return out.unflatten(-1, (N, D))


def megatron_main(own, x):
    """Rows and columns divided by their sums without eps, h_res[new, old], eps of the norm outside of the root."""
    weight, *alphas, bias = own.values()
    pre, post, res = logits(x, weight, alphas, bias, lambda v: 1 / (v.norm(dim=-1, keepdim=True) / K**0.5 + EPS))
    h_res = (res - res.amax(-1, keepdim=True)).exp()
    for _ in range(20):
        h_res = h_res / h_res.sum(-1, keepdim=True)
        h_res = h_res / h_res.sum(-2, keepdim=True)
    return write(x, torch.tanh(read(x, pre.sigmoid())), 2 * post.sigmoid(), h_res.mT)


def transformer_engine(own, x):
    """x is [..., D, n] there, and so are the columns of phi; Sinkhorn in logarithms."""
    phi, alpha, beta, *norm_weight = own.values()
    innermost, eps, sizes = x.mT, torch.finfo(torch.float32).eps, [N, N, N * N]
    v = innermost.flatten(-2)
    mixes = v @ (phi * sum(norm_weight) if norm_weight else phi).T / (v.square().mean(-1, keepdim=True) + eps).sqrt()
    pre, post, res = (m * a + b for m, a, b in zip(mixes.split(sizes, -1), alpha, beta[0].split(sizes)))
    res, g = res.unflatten(-1, (N, N)), torch.zeros(())
    for _ in range(20):
        f = -torch.logsumexp(res + g, -1, keepdim=True)
        g = -torch.logsumexp(res + f, -2, keepdim=True)
    h_out = torch.tanh((innermost @ pre.sigmoid()[..., None]).squeeze(-1))
    return (h_out[..., None] @ (2 * post.sigmoid())[..., None, :] + innermost @ (f + res + g).exp()).mT


CONNECTIONS = [
    ("deepseek", "layers.0.hc_attn", deepseek), ("transformers", "model.layers.0.attn_hc", deepseek),
    ("liger", "0", liger), ("megatron", "decoder.layers.0.hc", megatron), ("megatron-main", "0", megatron_main),
    *(("transformer-engine", begin, transformer_engine) for begin in "01"),  # 1 has no norm weight
]  # fmt: skip


@pytest.mark.parametrize(("name", "begin", "theirs"), CONNECTIONS)
def test_outputs(name, begin, theirs):
    """What the libraries compute around tanh."""
    state, x = drawn(STATES[name]), x_drawn()
    gamma = f"{begin}.norm_weight" in state
    if gamma:
        state[f"{begin}.norm_weight"] += 1
    ours = loaded(HyperConnection(torch.tanh, N, D, gamma=gamma, **convert.options(name)), state, name, begin)
    # rsqrt(rms² + eps²) and 1/(rms + eps) are apart by eps, and with them each logit by as much of itself.
    assert_near([ours(x)], [theirs(doubled(state, begin), x)], EPS if theirs is megatron_main else FP64)
    assert convert.options("megatron-main")["hc_eps"] == 0  # too small a difference for this


def test_outputs_of_hy4():
    """Two scales: the streams are kept as they are; post has an eps."""
    state, x = drawn(maps("0", *OF_DEEPSEEK, 2 * N, 2)), x_drawn()
    fn, scale, base = doubled(state, "0").values()
    v = x.flatten(-2)
    mixes = (v @ fn.T * inverse_rms(v, EPS)).split(N, -1)
    pre, post = (m * a + b for m, a, b in zip(mixes, scale, base.split(N)))
    h_out = torch.tanh(read(x, pre.sigmoid() + EPS))
    expected = x + (2 * post.sigmoid() + EPS)[..., None] * h_out[..., None, :]
    ours = loaded(HyperConnection(torch.tanh, N, D, **convert.options("deepseek", 2)), state, "deepseek", "0")
    assert_near([ours(x)], [expected], FP64)
    with pytest.raises(ValueError, match=r"^convert: liger has no connection of 2 sections"):
        convert.options("liger", sections=2)


@pytest.mark.parametrize(("name", "begin"), HEADS.items())
def test_outputs_of_a_head(name, begin):
    state, x = drawn(STATES[name]), x_drawn()
    fn, scale, base = doubled(state, begin).values()
    v = x.flatten(-2)
    expected = read(x, (v @ fn.T * inverse_rms(v, EPS) * scale + base).sigmoid() + EPS)
    assert_near([loaded(HyperHead(N, D), state, name, begin)(x)], [expected], FP64)


def test_names_of_a_deepseek_v4(tmp_path):
    """The names of its modules, and those of the file that it saves: DeepSeek's, but for the head."""
    model, safetensors = build("deepseek_v4"), pytest.importorskip("safetensors.torch")
    model.save_pretrained(tmp_path)
    modules, saved = (
        {key: tensor for key, tensor in state.items() if "hc_" in key or "_hc" in key}
        for state in (model.state_dict(), safetensors.load_file(tmp_path / "model.safetensors"))
    )
    assert len(modules) == 3 * (2 * 3 + 1)
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
PHI = {"a.phi": (M, K), "a.alpha": (3,)}
WRONG = [
    ("deepsek", STATES["deepseek"], "source must be one of mhc_ops, deepseek, .* got 'deepsek'"),
    ("transformers", {"a.fn": (M, K), "a.base": (M,)}, "a.scale is missing beside a.fn"),
    ("deepseek liger", STATES["deepseek"], "hc_head is a head, and liger has none"),
    ("deepseek liger", maps("a", *OF_DEEPSEEK, 8, 2), "a is a connection that keeps its"),
    ("deepseek", maps("a", *OF_DEEPSEEK, 7), rf"{SHAPE}, got \[7"),
    ("deepseek", maps("a", *OF_DEEPSEEK) | {"a_base": (9,)}, r"bias must be \[24\], got \[9\]"),
    ("deepseek", maps("a", *OF_DEEPSEEK, scales=4), r"1 to 3 scales, got \[4\]"),
    ("transformer-engine", PHI | {"a.beta": (M,)}, NOT_TOGETHER),
    ("transformer-engine", PHI | {"a.beta": (2, M)}, r"bias must be \[24\]"),
    ("transformer-engine", {"a.phi": (8, K), "a.alpha": (2,), "a.beta": (1, 8)}, "has no connection that k"),
    ("megatron", OF_MEGATRON | alphas("a", (3,), (0,), (0,)), NOT_TOGETHER),
    *(("deepseek", {"a_fn": a, "a_base": a[:1], "a_scale": (3,)}, SHAPE) for a in ((), (0, K), (M, 0), (M, K, 1))),
    ("deepseek", maps("a", *OF_DEEPSEEK) | {"a.phi": ()}, "two tensors would be a.phi"),
    # parameters of another format: not even half of them is converted
    ("megatron", STATES["deepseek"], "layers.0.hc_attn_fn, .* and megatron has no connection of these"),
    ("deepseek", STATES["megatron"], "hc.mapping_proj.weight, .* are as megatron has them, not deepseek"),
    ("megatron-main", STATES["megatron"], "hc_head_fn, .* are as deepseek has them, not megatron-main, and"),
    ("deepseek", STATES["liger"], "0.phi, 0.b, .* are as liger has them, not deepseek, and would be left as"),
    ("transformers", maps("a", *OF_TRANSFORMERS, N, 1), "are a head, and transformers has no head of"),
]


@pytest.mark.parametrize(("formats", "state", "message"), WRONG)
def test_what_does_not_fit(formats, state, message):
    source, _, target = formats.partition(" ")
    with pytest.raises(ValueError, match=f"^convert: .*{message}"):
        convert.between(drawn(state), source, target or "mhc_ops")


def test_what_the_target_has_already_may_be_there():
    state = drawn(STATES["deepseek"])
    ours = convert.to_ours(state, "deepseek")
    half = {key: tensor for key, tensor in ours.items() if "head" not in key}
    half |= {key: tensor for key, tensor in state.items() if "head" in key}
    assert equal(convert.to_ours(half, "deepseek"), ours)
    without = drawn(OTHER)
    assert equal(convert.to_ours(without, "deepseek"), without) and convert.groups(without, "deepseek") == {}
