"""Tiny plain models of transformers that get n streams, against what they computed before."""

import copy
import functools
import re

import pytest
import torch
from compat_oracle import distance, says
from tiny_models import LOGITS, SIZES, assert_same_results, no_zeros_or_ones, results
from torch import nn

from mhc_ops import HyperConnection, metrics, use_backend
from mhc_ops.compat.transformers import collapse, hyperconnect, load

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'mhc-ops[adopt]'")
N, D = 3, SIZES["hidden_size"]
IDS = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))
OWN = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 0.01}
KINDS = {"Llama": {}, "Mistral": {"sliding_window": 8}, "Qwen3": {"head_dim": 8}}
KINDS["Qwen2"] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@functools.cache
def made(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **OWN, **KINDS[kind])
    model = no_zeros_or_ones(getattr(transformers, f"{kind}ForCausalLM")(config).eval())
    return model, results(model, IDS)


@pytest.fixture(params=KINDS)
def plain(request):
    return copy.deepcopy(made(request.param)[0])


@pytest.fixture
def llama():
    return copy.deepcopy(made("Llama")[0])


def before(model):
    return made(type(model).__name__.removesuffix("ForCausalLM"))[1]


def maps_of(model):
    return {name: p for name, p in model.named_parameters() if re.search(r"\b(attn_hc|ffn_hc|hc_head)\.", name)}


def moved(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in maps_of(model).values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_same_logits_and_gradients(plain):
    """The gradients of the plain parameters too: each stream has its share of a layer's. And with checkpointing."""
    keys = set(plain.state_dict())
    assert hyperconnect(plain, N) is plain
    maps = maps_of(plain)
    assert set(plain.state_dict()) == keys | set(maps) and len(maps) == 3 * (2 * 3 + 1)
    assert_same_results(found := results(plain, IDS), before(plain), new=maps)
    assert plain(IDS, output_hidden_states=True).hidden_states[1].shape == (2, 16, N, D)
    plain.train().gradient_checkpointing_enable()
    assert_same_results(again := results(plain, IDS), before(plain), new=maps)
    assert all(torch.equal(again[1][name], found[1][name]) for name in maps)


def test_on_kernels(kernel_device):
    model, ids = copy.deepcopy(made("Qwen3")[0]).to(kernel_device), IDS[:1, :4].to(kernel_device)
    del model.model.layers[1:]
    expected = results(model, ids)
    with use_backend("triton"):
        found = results(hyperconnect(model, N), ids)
    assert_same_results(found, expected, new=maps_of(model))


@pytest.mark.thorough
@torch.no_grad()
def test_compiled(llama):
    expected = moved(hyperconnect(llama, N))(IDS, use_cache=False).logits
    compiled = torch.compile(llama, backend="eager", fullgraph=True)
    assert distance(compiled(IDS, use_cache=False).logits, expected) < LOGITS


def test_generates_the_same_tokens(plain):
    """With a cache, a token at a time; and with maps that moved as without a cache."""
    generate = functools.partial(plain.generate, IDS, max_new_tokens=6, do_sample=False)
    expected = generate()
    hyperconnect(plain, N)
    assert torch.equal(generate(), expected)
    moved(plain)
    assert torch.equal(generate(), generate(use_cache=False))


def test_collapsed_has_the_same_bits(plain):
    modules, config = [type(module) for module in plain.modules()], plain.config.to_dict()
    hyperconnect(plain, N)
    assert plain.config.hc_mult == N
    assert collapse(plain) is plain
    assert [type(module) for module in plain.modules()] == modules and plain.config.to_dict() == config
    assert torch.equal(plain(IDS).logits, before(plain)[0])
    hyperconnect(plain, N + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_saved_and_loaded(dtype, plain, tmp_path):
    """The maps stay fp32."""
    plain.save_pretrained(tmp_path / "plain")
    model = moved(hyperconnect(type(plain).from_pretrained(tmp_path / "plain", dtype=dtype), N))
    model.save_pretrained(tmp_path / "streams")
    loaded = load(tmp_path / "streams", dtype=dtype)
    assert type(loaded) is type(model) and loaded.dtype == dtype
    assert {parameter.dtype for parameter in maps_of(loaded).values()} == {torch.float32}
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert len(loaded(IDS, output_hidden_states=True).hidden_states) == 4
    assert not any(module.training for module in (*model.modules(), *loaded.modules()))
    with says(ValueError, f"load: {tmp_path}/plain has no streams of hyperconnect: its config has no hc_mult"):
        load(tmp_path / "plain")


def test_what_load_refuses(llama, tmp_path):
    """`from_pretrained` would leave the maps fresh that do not fit or are missing. It takes its options."""
    hyperconnect(llama, N).save_pretrained(tmp_path)
    loaded, info = load(tmp_path, config=str(tmp_path), output_loading_info=True)
    assert torch.equal(loaded(IDS).logits, llama(IDS).logits) and not info["missing_keys"]
    with pytest.raises(TypeError, match=r"^load: config must be a config of transformers or a path, got dict"):
        load(tmp_path, config={"hc_mult": N})
    state = llama.state_dict()
    del state["model.layers.1.ffn_hc.bias"]
    llama.save_pretrained(tmp_path / "less", state_dict=state)
    with says(ValueError, f"load: model.layers.1.ffn_hc.bias is missing in {tmp_path}/less"):
        load(tmp_path / "less")
    llama.config.hc_mult = N + 1
    with says(ValueError, f"load: model.layers.0.attn_hc.bias is not of 4 streams in {tmp_path}"):
        load(tmp_path, config=llama.config, ignore_mismatched_sizes=True)


def test_models_of_one_config(llama):
    other, third = type(llama)(llama.config), type(llama)(llama.config)
    hyperconnect(llama, 2)
    hyperconnect(other, 4)
    assert (llama.config.hc_mult, other.config.hc_mult) == (2, 4) and not hasattr(third.config, "hc_mult")
    held = [module.config for module in llama.modules() if hasattr(module, "config")]
    assert len(held) > 4 and all(config is llama.config for config in held)
    del llama.config.hc_mult
    for model in (llama, other):
        assert collapse(model).config.to_dict() == third.config.to_dict()


def test_a_layer_takes_arguments_by_position(llama):
    layer, x, mask = llama.model.layers[0], torch.randn(1, 4, D), -torch.eye(4)[None, None]
    cos_and_sin = llama.model.rotary_emb(x, torch.arange(4)[None])
    expected = layer(x, mask, position_embeddings=cos_and_sin)
    hyperconnect(llama, N)
    found = layer(x, mask, position_embeddings=cos_and_sin)
    assert all(distance(stream, expected) < LOGITS for stream in found.unbind(-2))
    with pytest.raises(TypeError, match="multiple values for argument 'attention_mask'"):
        layer(x, mask, attention_mask=mask)


def test_norms_that_others_watch_or_changed_are_called(llama):
    """A hook of all modules counts as one of theirs."""
    llama.model.layers[1].input_layernorm.register_forward_hook(lambda module, inputs, output: 0 * output)
    llama.model.layers[2].post_attention_layernorm = nn.RMSNorm(D, eps=0.5)
    expected, seen = llama(IDS).logits, []
    assert distance(hyperconnect(llama, N)(IDS).logits, expected) < LOGITS
    watch = nn.modules.module.register_module_forward_hook
    with watch(lambda module, inputs, output: seen.append(type(module).__name__)):
        llama(IDS)
    assert seen.count("LlamaRMSNorm") == 6 and seen.count("RMSNorm") == 1


def test_the_streams_are_used(llama):
    """Maps that moved change the logits, and metrics sees each connection."""
    moved(hyperconnect(llama, N))
    with metrics(llama) as health:
        loss = llama(IDS, labels=IDS)
        loss.loss.backward()
    assert distance(loss.logits, before(llama)[0]) > 0.01
    found = health.result()
    names = [name for name, module in llama.named_modules() if isinstance(module, HyperConnection)]
    assert len(names) == 6
    assert all(found[f"{name}/dphi_norm"] > 0 and found[f"{name}/h_res_row_error"] < 0.2 for name in names)


MOVED = [
    ("layers.1.ffn_hc.phi", slice(0, 1), "h_pre of model.layers.1.ffn_hc is"),
    ("layers.0.attn_hc.bias", slice(0, 2 * N), "h_pre, h_post of model.layers.0.attn_hc are"),
    ("layers.1.ffn_hc.phi", slice(N, N + 1), "h_post of model.layers.1.ffn_hc is"),
    ("layers.0.attn_hc.bias", slice(2 * N, None), "h_res of model.layers.0.attn_hc is"),
    ("norm.hc_head.bias", slice(0, 1), "h_pre of model.norm.hc_head is"),
]


@pytest.mark.parametrize(("name", "rows", "which"), MOVED)
def test_what_moved_is_named(name, rows, which, llama):
    hyperconnect(llama, N)
    with torch.no_grad():
        llama.model.get_parameter(name)[rows] += 1e-4
    with pytest.raises(ValueError, match=f"^collapse: {which} not as in a fresh model"):
        collapse(llama)
    assert llama.config.hc_mult == N  # nothing has changed


def test_a_fresh_model_of_any_seed_collapses(llama):
    """So does one whose random h_pre was cut off, as one of a hundred is with 8 streams, and one with rounded maps."""
    for seed in range(40):
        torch.manual_seed(seed)
        collapse(hyperconnect(llama, 8))
    assert torch.equal(llama(IDS).logits, before(llama)[0])
    collapse(hyperconnect(llama.bfloat16(), 2).bfloat16())


def test_what_is_refused(llama):
    with pytest.raises(TypeError, match=r"^hyperconnect: model must be "):
        hyperconnect("Qwen/Qwen3-0.6B", 4)
    with pytest.raises(ValueError, match=r"^hyperconnect: Linear is no plain model of a known kind"):
        hyperconnect(nn.Linear(2, 2), 4)
    with pytest.raises(ValueError, match=r"^hyperconnect: n must be at least 2"):
        hyperconnect(llama, 1)
    with pytest.raises(ValueError, match=r"^collapse: LlamaModel has no streams"):
        collapse(llama)
    layer = llama.model.layers[1]
    layer.forward = layer.forward
    with pytest.raises(ValueError, match=r"^hyperconnect: model\.layers\.1 has a forward of its own"):
        hyperconnect(llama, 4)
    del layer.forward
    hyperconnect(llama, 4)
    with pytest.raises(ValueError, match=r"^hyperconnect: LlamaModel has streams already"):
        hyperconnect(llama, 4)
