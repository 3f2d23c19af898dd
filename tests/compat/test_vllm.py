"""mhc_ops.compat.vllm against the equations, and in the place of vLLM's functions and custom ops."""

import logging
import sys
from importlib import import_module

import pytest
import torch
from compat_oracle import logits, read, signature, sinkhorn, write
from server_adapters import assert_rounded, draw, filtered, package, refusing, window

from mhc_ops.compat import vllm
from mhc_ops.compat.vllm import nvidia

N, D = 4, 24
M, K = N * N + 2 * N, N * D
OF_MAPS = "rms_eps hc_pre_eps hc_sinkhorn_eps hc_post_mult_value sinkhorn_repeat"
OF_PRE = f"fn hc_scale hc_base {OF_MAPS}"
OF_POST = "post_layer_mix comb_res_mix"
SIGNATURES = {
    "causal_conv1d_fn": "x weight bias conv_states query_start_loc cache_indices=None has_initial_state=None "
    "activation=silu pad_slot_id=-1 null_block_id=0 block_idx_first_scheduled_token=None "
    "block_idx_last_scheduled_token=None initial_state_idx=None num_computed_tokens=None block_size_to_align=0 "
    "metadata=None validate_data=False",
    "causal_conv1d_update": "x conv_state weight bias=None activation=None conv_state_indices=None "
    "num_accepted_tokens=None query_start_loc=None max_query_len=-1 null_block_id=0 "
    "block_idx_last_scheduled_token=None initial_state_idx=None validate_data=False out=None",
    "mhc_pre": f"residual {OF_PRE} n_splits=1 norm_weight=None norm_eps=0.0",
    "mhc_fused_post_pre": f"x residual {OF_POST} {OF_PRE} n_splits=1 tile_n=1 norm_weight=None norm_eps=0.0",
    "mhc_pre_delayed": f"residual {OF_PRE} pre_mix=None x=None norm_weight=None norm_eps=1e-06 sublayer_out=None "
    "post_layer_mix=None comb_res_mix=None",
    "mhc_post": f"x residual {OF_POST}",
    "hc_head": "hidden_states hc_fn hc_scale hc_base rms_norm_eps hc_eps",
}


def test_signatures():
    assert {name: signature(getattr(vllm, name)) for name in SIGNATURES} == SIGNATURES


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("x_type", [torch.bfloat16, torch.float32])
def test_prefill_in_chunks(x_type, each_backend):
    """Three sequences in two chunks, one of them shorter than the state, and a null slot; a longer buffer, turned."""
    weight, bias, normal = draw(D)
    whole = [normal(length, D) for length in (9, 3, 6)]
    conv_states = normal(6, 5, D).transpose(1, 2)
    before, slots = conv_states.clone(), (4, 2, 5)
    for begin, ends in ((0, (7, 2, 1)), (10, (9, 3, 6))):
        begins = (0, 0, 0) if begin == 0 else (7, 2, 1)
        chunks = [tokens[first:last] for tokens, first, last in zip(whole, begins, ends)]
        chunks.insert(1, normal(4, D))  # of the null slot
        lengths = torch.tensor([0, *map(len, chunks)])
        y = vllm.causal_conv1d_fn(
            torch.cat(chunks).to(x_type).T,
            weight,
            bias,
            conv_states,
            lengths.cumsum(0).int(),
            cache_indices=ints(slots[0], 0, *slots[1:], 3),  # one more than there are sequences
            has_initial_state=torch.full((4,), begin > 0),
            metadata=object(),
        )
        assert y.dtype == x_type and y.shape == (D, lengths.sum())
        for number, rows in enumerate(y.T.split(lengths[1:].tolist())):
            if number == 1:
                assert not rows.any()
                continue
            i = number - (number > 1)
            assert_rounded(rows, filtered(whole[i], weight, bias)[begins[i] : ends[i]])
            assert torch.equal(conv_states[slots[i], :, :3], window(whole[i][: ends[i]], 4))
    assert torch.equal(conv_states[..., 3:], before[..., 3:]) and torch.equal(conv_states[:2], before[:2])


def test_prefix_cache(each_backend):
    """States at the block boundaries, with a chunk that is shorter than the state: the block it reads stays."""
    weight, bias, normal = draw(D)
    whole, states = normal(12, D), normal(9, D, 3)
    table = ints(3, 5, 7, 1)[None]
    for begin, end, first, last in ((0, 7, 0, 1), (7, 8, 1, 1), (8, 10, 2, 2), (10, 12, 2, 2)):
        y = vllm.causal_conv1d_fn(
            whole[begin:end].T,
            weight,
            bias,
            states,
            ints(0, end - begin),
            cache_indices=table,
            has_initial_state=torch.tensor([begin > 0]),
            block_idx_first_scheduled_token=ints(first),
            block_idx_last_scheduled_token=ints(last),
            initial_state_idx=ints(max(begin - 1, 0) // 4),
            num_computed_tokens=ints(begin),
            block_size_to_align=4,
        )
        assert_rounded(y.T, filtered(whole, weight, bias)[begin:end])
    for block, slot in enumerate((3, 5, 7)):
        assert torch.equal(states[slot], window(whole[: 4 * block + 4], 4))


@pytest.mark.parametrize("form", ["rows", "tokens", "packed"])
def test_decoding(form, each_backend):
    """y takes the place of x, and a null slot leaves both as they are."""
    weight, bias, normal = draw(D)
    T = 1 if form == "rows" else 2
    whole, conv_state = [normal(5 + T, D) for _ in range(2)], normal(4, 6, D).transpose(1, 2)
    for slot, tokens in zip((3, 1), whole):
        conv_state[slot, :, :3] = window(tokens[:5], 4)
    x = torch.stack([whole[0][5:], normal(T, D), whole[1][5:]])  # [3, T, D]
    null = x[1].clone()
    given = {"rows": x[:, 0], "tokens": x.transpose(1, 2), "packed": x.flatten(0, 1)}[form]
    packed = {"query_start_loc": ints(0, 2, 4, 6, 6), "max_query_len": 2} if form == "packed" else {}
    slots = {"conv_state_indices": ints(3, 0, 1), **packed}
    y = vllm.causal_conv1d_update(given, conv_state, weight, bias, True, **slots)
    assert y is given and torch.equal(x[1], null)
    for i, slot, tokens in ((0, 3, whole[0]), (2, 1, whole[1])):
        assert_rounded(x[i], filtered(tokens, weight, bias)[5:])
        assert torch.equal(conv_state[slot, :, :3], window(tokens, 4))


def test_decoding_without_indices(each_backend):
    """Sequence i has slot i; further slots stay as they are."""
    weight, bias, normal = draw(D)
    whole, conv_state = [normal(6, D) for _ in range(2)], normal(4, D, 3)
    for slot, tokens in enumerate(whole):
        conv_state[slot] = window(tokens[:5], 4)
    before = conv_state.clone()
    y = vllm.causal_conv1d_update(torch.stack([tokens[5] for tokens in whole]), conv_state, weight, bias, "silu")
    for slot, tokens in enumerate(whole):
        assert_rounded(y[slot], filtered(tokens, weight, bias)[5])
        assert torch.equal(conv_state[slot], window(tokens, 4))
    assert torch.equal(conv_state[2:], before[2:])


def test_decoding_writes_to_out_and_converts(each_backend):
    weight, bias, normal = draw(D)
    x, states = normal(2, D).float(), [normal(3, D, 3)] * 3
    states = [state.clone() for state in states]
    out, slots = torch.empty_like(x), {"conv_state_indices": ints(2, 1)}
    y = vllm.causal_conv1d_update(x.bfloat16(), states[0], weight, bias, **slots)
    kept = x.clone()
    assert torch.equal(vllm.causal_conv1d_update(x, states[1], weight, bias, **slots), y.float())
    assert vllm.causal_conv1d_update(x, states[2], weight, bias, **slots, out=out) is out
    assert torch.equal(out, y.float()) and torch.equal(x, kept)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])
    for out, message in (
        (x.new_empty(3, 2, D), r"out must be \[2, 24\], got \[3, 2, 24\]"),
        (x.new_empty(1, D).expand(2, D), "out must have memory of its own for each element"),
    ):
        with pytest.raises(ValueError, match=message):
            vllm.causal_conv1d_update(x, states[2], weight, bias, **slots, out=out)
    assert torch.equal(states[0], states[2])  # checked before the state changes


def test_speculation(each_backend):
    """Drafts of which 1, 3 and 2 are accepted, then a step in other slots than those that were read."""
    weight, bias, normal = draw(D)
    true, conv_state, at = normal(20, D), normal(4, D, 5), 6
    conv_state[2, :, :3] = window(true[:at], 4)
    accepted = ints(1)
    for kept in (1, 3, 2):
        drafts = torch.cat([true[at : at + kept], normal(3 - kept, D)])
        y = vllm.causal_conv1d_update(
            drafts.T[None].clone(),
            conv_state,
            weight,
            bias,
            "silu",
            conv_state_indices=ints(2),
            num_accepted_tokens=accepted,
        )
        assert_rounded(y[0].T, filtered(torch.cat([true[:at], drafts]), weight, bias)[at:])
        at, accepted = at + kept, ints(kept)
    before = conv_state.clone()
    y = vllm.causal_conv1d_update(
        true[at : at + 1].clone(),
        conv_state,
        weight,
        bias,
        "silu",
        conv_state_indices=ints(2, 1, 3)[None],
        num_accepted_tokens=accepted,
        initial_state_idx=ints(0),
        block_idx_last_scheduled_token=ints(2),
    )
    assert_rounded(y, filtered(true[: at + 1], weight, bias)[at:])
    assert torch.equal(conv_state[3, :, :3], window(true[: at + 1], 4)) and torch.equal(conv_state[:3], before[:3])


def test_wrong_use():
    weight, bias, normal = draw(D)
    x, state, slots = normal(2, D, 3), normal(4, D, 4), {"conv_state_indices": ints(1, 2)}
    with pytest.raises(
        ValueError, match=r"conv_state must be \[slots, 24, length\] with length at least 5 for 3 tokens"
    ):
        vllm.causal_conv1d_update(x, state, weight, bias, **slots, num_accepted_tokens=ints(1, 1))
    with pytest.raises(ValueError, match="query_start_loc needs conv_state_indices, got None"):
        vllm.causal_conv1d_update(x[..., 0], state, weight, query_start_loc=ints(0, 2))
    with pytest.raises(ValueError, match="max_seqlen must be at least 1, got -1"):
        vllm.causal_conv1d_update(x[..., 0], state, weight, **slots, query_start_loc=ints(0, 1, 2))
    with pytest.raises(ValueError, match=r"x must be \[tokens, D\], got \[2, 24, 3\]"):
        vllm.causal_conv1d_fn(x, weight, bias, state, ints(0, 2), ints(1))
    with pytest.raises(ValueError, match="block_size must be given together, got no tokens_before"):
        given = {"block_idx_first_scheduled_token": ints(0), "block_size_to_align": 8}
        vllm.causal_conv1d_fn(normal(2, D).T, weight, bias, state, ints(0, 2), ints(1)[None], **given)
    tensors = of_mhc()
    call = tensors["residual"], *tensors["own"], *OPTIONS
    with pytest.raises(ValueError, match="sublayer_out needs post_layer_mix and comb_res_mix, got None"):
        vllm.mhc_pre_delayed(*call, sublayer_out=tensors["x"])
    for name, given in (("post_layer_mix", tensors["post"]), ("comb_res_mix", tensors["comb"])):
        with pytest.raises(ValueError, match=f"mhc_pre_delayed: {name} needs sublayer_out, got None"):
            vllm.mhc_pre_delayed(*call, **{name: given})


OPTIONS = (0.3, 0.05, 0.02, 1.5, 7)  # large enough that each shows
NORM_EPS = 0.2


def of_mhc(T=5):
    torch.manual_seed(1)
    own = torch.randn(M, K) / K**0.5, torch.tensor([1.1, 0.7, 1.3]), 0.3 * torch.randn(M)
    maps = {"post": torch.rand(T, N, 1), "comb": torch.rand(T, N, N), "pre": torch.rand(T, N)}
    streams, x = torch.randn(T, N, D).bfloat16(), torch.randn(T, D).bfloat16()
    return {"residual": streams, "x": x, "own": own, "weight": torch.rand(D).bfloat16(), **maps}


def expected_maps(streams, own):
    norm_eps, pre_eps, sinkhorn_eps, post_mult, repeat = OPTIONS
    fn, scale, base = (tensor.double() for tensor in own)
    inverse = lambda v: (v.square().mean(-1, keepdim=True) + norm_eps).rsqrt()  # noqa: E731
    pre, post, res = logits(streams.double(), fn, scale, base, inverse)
    return pre.sigmoid() + pre_eps, post_mult * post.sigmoid(), sinkhorn(res, repeat, sinkhorn_eps)


def normed(h_in, weight, eps):
    return h_in if weight is None else weight.double() * h_in * (h_in.square().mean(-1, keepdim=True) + eps).rsqrt()


@pytest.mark.parametrize("norm", [False, True])
def test_mhc(norm, each_backend):
    given = of_mhc()
    residual, x, own, post, comb = (given[name] for name in ("residual", "x", "own", "post", "comb"))
    weight = given["weight"] if norm else None
    of_norm = {"norm_weight": weight, "norm_eps": NORM_EPS}
    pre, h_post, h_res = expected_maps(residual, own)
    found = vllm.mhc_pre(residual, *own, *OPTIONS, **of_norm)
    expected = h_post[..., None], h_res, normed(read(residual.double(), pre), weight, NORM_EPS)
    for one, other in zip(found, expected, strict=True):
        assert_rounded(one, other)
    streams = vllm.mhc_post(x, residual, post, comb)
    assert_rounded(streams, write(residual.double(), x.double(), post[..., 0].double(), comb.double()))
    fused = vllm.mhc_fused_post_pre(x, residual, post, comb, *own, *OPTIONS, **of_norm)
    apart = streams, *vllm.mhc_pre(streams, *own, *OPTIONS, **of_norm)
    assert all(map(torch.equal, fused, apart))
    head = vllm.hc_head(residual, own[0][:N], own[1][:1], own[2][:N], 0.3, 0.05)
    inverse = (residual.double().flatten(-2).square().mean(-1, keepdim=True) + 0.3).rsqrt()
    gates = residual.double().flatten(-2) @ own[0][:N].double().T * inverse * own[1][0].double() + own[2][:N].double()
    assert_rounded(head, read(residual.double(), gates.sigmoid() + 0.05))


@pytest.mark.parametrize("maps_of", ["streams", "x"])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("entry", ["first", "carried"])
def test_shifted(entry, ended, maps_of, each_backend):
    """Streams are read with the weights of the sublayer before, or stream 0 alone, and the new weights come out.
    With x the maps are those of n copies of x, whatever the streams are."""
    given = of_mhc()
    residual, x, own, weight = (given[name] for name in ("residual", "x", "own", "weight"))
    options: dict = {"pre_mix": given["pre"] if entry == "carried" else None}
    embedding = x.flip(0)
    if maps_of == "x":
        options["x"] = embedding
    of_post = {"sublayer_out": x, "post_layer_mix": given["post"], "comb_res_mix": given["comb"]} if ended else {}
    first = own[0] if maps_of == "streams" else own[0].view(M, N, D).sum(1)
    with torch.no_grad():
        call = residual, first, *own[1:], *OPTIONS
        streams, *found = vllm.mhc_pre_delayed(*call, **options, **of_post, norm_weight=weight, norm_eps=NORM_EPS)
    expected = vllm.mhc_post(x, residual, given["post"], given["comb"]) if ended else residual
    assert torch.equal(streams, expected)
    of_maps = expected if maps_of == "streams" else embedding[:, None].expand(-1, N, -1)
    pre, h_post, h_res = expected_maps(of_maps, own)
    h_in = read(expected.double(), given["pre"].double()) if entry == "carried" else expected[:, 0].double()
    for one, other in zip(found, (h_post[..., None], h_res, normed(h_in, weight, NORM_EPS), pre), strict=True):
        assert_rounded(one, other)


def test_what_nvidia_models_call():
    given = of_mhc()
    residual, x, own, post, comb, pre = (given[name] for name in ("residual", "x", "own", "post", "comb", "pre"))
    functions = nvidia.FUNCTIONS["vllm.model_executor.kernels.mhc.tilelang"]
    norm = {"norm_weight": given["weight"]}
    copies = x[:, None].expand(-1, N, -1).contiguous()
    found = functions["mhc_pre_broadcast_tilelang"](x, *own, *OPTIONS, **norm, fn_broadcast=own[0].view(M, N, D).sum(1))
    expected = copies, *vllm.mhc_pre(copies, *own, *OPTIONS, **norm, norm_eps=1e-6)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, functions["mhc_pre_tilelang"](copies, *own, *OPTIONS, **norm), expected[1:]))
    delayed = vllm.mhc_pre_delayed(residual, *own, *OPTIONS, pre_mix=pre)
    alone = functions["mhc_pre_delayed_tilelang"]
    assert all(map(torch.equal, alone(residual, *own, *OPTIONS, pre), delayed[1:]))
    assert signature(alone) == f"residual {OF_PRE} pre_mix=None x=None norm_weight=None norm_eps=1e-06"
    ended = {"sublayer_out": x, "post_layer_mix": post, "comb_res_mix": comb}
    delayed = vllm.mhc_pre_delayed(residual, *own, *OPTIONS, pre_mix=pre, **ended)
    for aux in (False, True):
        call = x, residual, post, comb, *own, *OPTIONS, pre, None, 1e-6, aux
        *found, mean = functions["mhc_fused_post_pre_delayed_tilelang"](*call)
        assert all(map(torch.equal, found, delayed))
        assert mean.shape == (len(x) if aux else 0, D)
    assert_rounded(mean, found[0].double().mean(1))


CUSTOM_OP = """
from torch import nn

op_registry_oot = {}


class CustomOp(nn.Module):
    def __new__(cls, *given, **named):
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    def __init__(self):
        super().__init__()
        self.chosen = self.forward_cuda

    def forward(self, *given, **named):
        return self.chosen(*given, **named)

    @classmethod
    def register_oot(cls, name):
        assert name not in op_registry_oot
        return lambda replacement: op_registry_oot.setdefault(name, replacement)
"""
CLASS = """
class {}(CustomOp):
    def forward_cuda(self, *given, **named):
        raise AssertionError("its own kernel")

    def forward_hip(self, *given, **named):
        raise AssertionError("its own kernel")
"""
CONV = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
FILES = {
    "vllm/__init__.py": "__version__ = '0.32.0'\n",
    "vllm/model_executor/custom_op.py": CUSTOM_OP,
    "vllm/model_executor/layers/mhc.py": "from vllm.model_executor.custom_op import CustomOp\n"
    + "".join(map(CLASS.format, vllm.CUSTOM_OPS)),
    CONV: refusing("causal_conv1d_fn", "causal_conv1d_update"),
    "vllm/model_executor/layers/mamba/short_conv.py": "from .ops.causal_conv1d import causal_conv1d_update as step\n",
    **{f"{name.replace('.', '/')}.py": refusing(*functions) for name, functions in nvidia.FUNCTIONS.items()},
}


@pytest.fixture
def server(written, monkeypatch):
    """server(changes) writes a vLLM of small files; without changes, one that has every name."""
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    yield lambda changes=(): written(package({**FILES, **dict(changes)}))
    vllm.unregister()


@pytest.mark.parametrize("loaded_before", [False, True])
def test_register(loaded_before, server, caplog):
    server()
    caller, layers = "vllm.model_executor.layers.mamba.short_conv", "vllm.model_executor.layers.mhc"
    if loaded_before:
        import_module(caller)
    caplog.set_level(logging.INFO, "vllm")
    assert vllm.register() == ("causal_conv1d_fn", "causal_conv1d_update", *vllm.CUSTOM_OPS)
    assert "mhc_ops runs causal_conv1d_fn, causal_conv1d_update, MHCPreOp" in caplog.text
    assert vllm.register("mhc") == tuple(vllm.CUSTOM_OPS)  # again
    assert import_module(caller).step is vllm.causal_conv1d_update
    given, module = of_mhc(), import_module(layers)
    found = module.MHCPreOp()(given["residual"], *given["own"], *OPTIONS)
    assert all(map(torch.equal, found, vllm.mhc_pre(given["residual"], *given["own"], *OPTIONS)))
    assert isinstance(module.HCHeadOp(), module.HCHeadOp) and module.MHCPostOp().forward_hip is vllm.mhc_post
    vllm.unregister()
    assert type(module.MHCPreOp()) is module.MHCPreOp
    with pytest.raises(AssertionError, match="its own causal_conv1d_fn"):
        import_module(f"{caller.rpartition('.')[0]}.ops.causal_conv1d").causal_conv1d_fn()


def test_force(server):
    server()
    names = vllm.register("mhc", force=True)
    assert {"mhc_shifted_post_pre", "causal_conv1d_fn"}.isdisjoint(names)
    of_models = import_module("vllm.models.deepseek_v41.nvidia.ops.mhc")
    assert of_models.supports_mhc_overlap(object()) is False
    kernels = import_module("vllm.model_executor.kernels.mhc.tilelang")
    assert kernels.mhc_post_tilelang is vllm.mhc_post
    with pytest.raises(ValueError, match="force=True belongs to the part 'mhc'"):
        vllm.register("conv", force=True)
    with pytest.raises(ValueError, match="the parts are 'conv' or 'mhc', got 'attention'"):
        vllm.register("attention")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({CONV: refusing("causal_conv1d_fn")}, "no causal_conv1d_update in vllm.model_executor.layers.mamba.ops.caus"),
        (
            {"vllm/model_executor/layers/mhc.py": ""},
            "no MHCPreOp in vllm.model_executor.layers.mhc; vllm 0.32.0 has it",
        ),
        ({CONV: "import a_package_of_vllm"}, "No module named 'a_package_of_vllm'"),
    ],
)
def test_a_version_without_a_name(changes, message, server):
    server({**changes, "vllm/__init__.py": "__version__ = '0.9'"})
    with pytest.raises(ImportError, match=message) as raised:
        vllm.register()
    if "a_package" not in message:
        assert str(raised.value).startswith("register: vllm 0.9 has no ")
    module = sys.modules.get("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    assert getattr(module, "causal_conv1d_fn", None) is not vllm.causal_conv1d_fn  # nothing is replaced in part


def test_another_package_has_replaced_an_op(server):
    server()
    import_module("vllm.model_executor.custom_op").op_registry_oot["MHCPostOp"] = CaseOfAnother
    with pytest.raises(RuntimeError, match=r"^register: MHCPostOp is replaced already, by .*test_vllm$"):
        vllm.register()


class CaseOfAnother:
    pass


def test_without_vllm():
    with pytest.raises(ModuleNotFoundError, match="the package vllm is not installed: pip install vllm"):
        vllm.register()


def test_plugin(server, monkeypatch):
    """vLLM calls it always; the environment decides."""
    server()
    for off in (None, "", "0"):
        if off is not None:
            monkeypatch.setenv(vllm.VARIABLE, off)
        vllm.plugin()
        assert "vllm" not in sys.modules
    short_conv = "vllm.model_executor.layers.mamba.short_conv"
    for words, has_conv in (("force", False), ("1, force", True)):
        monkeypatch.setenv(vllm.VARIABLE, words)
        vllm.plugin()
        assert import_module("vllm.model_executor.kernels.mhc.triton").hc_collapse_triton is nvidia.hc_collapse
        assert "MHCPreOp" in import_module("vllm.model_executor.custom_op").op_registry_oot
        assert (import_module(short_conv).step is vllm.causal_conv1d_update) == has_conv
    for words, message in (
        ("yes", "the words must be '0', '1', 'conv', 'mhc' or 'force', got 'yes'"),
        ("0,conv", "the word '0' must stand alone, got '0,conv'"),
    ):
        monkeypatch.setenv(vllm.VARIABLE, words)
        with pytest.raises(ValueError, match=f"MHC_OPS_VLLM: {message}"):
            vllm.plugin()
