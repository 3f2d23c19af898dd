"""Tiny plain models of transformers that get n streams, against what they computed before."""

import copy
import functools
import re

import pytest
import torch
from torch import nn

from mhc_ops import HyperConnection, metrics, use_backend
from mhc_ops.compat.transformers import collapse, hyperconnect, load

KINDS = ["Llama", "Mistral", "Qwen2", "Qwen3"]
N, D = 3, 32
LOGITS, GRADIENTS = 1e-5, 1e-4  # fp32: relative to the norm of what the plain model computes
SIZES = {"vocab_size": 64, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 3, "initializer_range": 0.2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 0.01}
SIZES |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
OF_KIND = {"Mistral": {"sliding_window": 8}, "Qwen3": {"head_dim": 8}}
OF_KIND["Qwen2"] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@functools.cache
def made(kind):
    """A model in which no parameter is 0 or 1, and what it computes"""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **OF_KIND.get(kind, {}))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.2 * torch.randn_like(parameter))
    ids = torch.randint(3, 64, (2, 16))
    return model, ids, results(model, ids)


@pytest.fixture(params=KINDS)
def plain(request):
    """The model (a copy), tokens, and its logits and gradients"""
    model, ids, found = made(request.param)
    return copy.deepcopy(model), ids, found


@pytest.fixture
def llama():
    model, ids, found = made("Llama")
    return copy.deepcopy(model), ids, found


def results(model, ids):
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return out.logits.detach(), gradients


def distance(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_same_results(found, expected):
    (logits, gradients), (expected_logits, expected_gradients) = found, expected
    assert distance(logits, expected_logits) < LOGITS
    off = {name: distance(gradients[name], expected_gradients[name]) for name in expected_gradients}
    assert max(off.values()) < GRADIENTS, max(off, key=off.get)


def maps_of(model):
    return {name: p for name, p in model.named_parameters() if re.search(r"\b(attn_hc|ffn_hc|hc_head)\.", name)}


def moved(model):
    """With maps as training leaves them"""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in maps_of(model).values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_same_logits_and_gradients(plain):
    """The gradients of the plain parameters too: each stream has its share of a layer's."""
    model, ids, expected = plain
    keys = set(model.state_dict())
    assert hyperconnect(model, N) is model
    assert_same_results(results(model, ids), expected)
    assert set(model.state_dict()) == keys | set(maps_of(model)) and len(maps_of(model)) == 3 * (2 * 3 + 1)
    assert model(ids, output_hidden_states=True).hidden_states[1].shape == (2, 16, N, D)


def test_on_kernels(kernel_device):
    model, ids, _ = made("Qwen3")
    model, ids = copy.deepcopy(model).to(kernel_device), ids[:1, :4].to(kernel_device)
    del model.model.layers[1:]
    expected = results(model, ids)
    with use_backend("triton"):
        assert_same_results(results(hyperconnect(model, N), ids), expected)


@pytest.mark.thorough
@torch.no_grad()
def test_compiled(llama):
    model, ids, _ = llama
    expected = moved(hyperconnect(model, N))(ids, use_cache=False).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert distance(compiled(ids, use_cache=False).logits, expected) < LOGITS


def test_generates_the_same_tokens(plain):
    """With a cache, a token at a time; and with maps that moved as without a cache."""
    model, ids, _ = plain
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)
    hyperconnect(model, N)
    assert torch.equal(model.generate(ids, **options), expected)
    moved(model)
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


def test_collapsed_has_the_same_bits(plain):
    model, ids, (logits, _) = plain
    modules, before = [type(module) for module in model.modules()], model.config.to_dict()
    hyperconnect(model, N)
    assert model.config.hc_mult == N
    assert collapse(model) is model
    assert [type(module) for module in model.modules()] == modules and model.config.to_dict() == before
    assert torch.equal(model(ids).logits, logits)
    hyperconnect(model, N + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_saved_and_loaded(dtype, plain, tmp_path):
    """The maps stay fp32."""
    model, ids, _ = plain
    model.save_pretrained(tmp_path / "plain")
    model = moved(hyperconnect(type(model).from_pretrained(tmp_path / "plain", dtype=dtype), N))
    model.save_pretrained(tmp_path / "streams")
    loaded = load(tmp_path / "streams", dtype=dtype)
    assert type(loaded) is type(model) and loaded.dtype == dtype
    assert {parameter.dtype for parameter in maps_of(loaded).values()} == {torch.float32}
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert len(loaded(ids, output_hidden_states=True).hidden_states) == 4
    assert not any(module.training for module in (*model.modules(), *loaded.modules()))
    with pytest.raises(ValueError, match=r"^load: .*plain has no streams of hyperconnect: its config has no hc_mult$"):
        load(tmp_path / "plain")


def test_a_map_is_missing(llama, tmp_path):
    model, _, _ = llama
    state = hyperconnect(model, N).state_dict()
    del state["model.layers.1.ffn_hc.bias"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"^load: model\.layers\.1\.ffn_hc\.bias is missing in "):
        load(tmp_path)


def test_maps_of_another_number_of_streams(llama, tmp_path):
    """As `from_pretrained` would leave them: fresh."""
    model, _, _ = llama
    hyperconnect(model, N).save_pretrained(tmp_path)
    model.config.hc_mult = N + 1
    with pytest.raises(ValueError, match=r"^load: model\.layers\.0\.attn_hc\.bias is not of 4 streams in "):
        load(tmp_path, config=model.config, ignore_mismatched_sizes=True)


def test_options_of_load(llama, tmp_path):
    """As `from_pretrained` takes them"""
    model, ids, _ = llama
    hyperconnect(model, N).save_pretrained(tmp_path)
    loaded, info = load(tmp_path, config=str(tmp_path), output_loading_info=True)
    assert torch.equal(loaded(ids).logits, model(ids).logits) and not info["missing_keys"]
    with pytest.raises(TypeError, match=r"^load: config must be a config of transformers or a path, got dict$"):
        load(tmp_path, config={"hc_mult": N})


def test_models_of_one_config(llama):
    """Each has its own number of streams."""
    one, _, _ = llama
    other, third = type(one)(one.config), type(one)(one.config)
    hyperconnect(one, 2)
    hyperconnect(other, 4)
    assert (one.config.hc_mult, other.config.hc_mult) == (2, 4) and not hasattr(third.config, "hc_mult")
    held = [module.config for module in one.modules() if hasattr(module, "config")]
    assert len(held) > 4 and all(config is one.config for config in held)
    del one.config.hc_mult
    for model in (one, other):
        assert collapse(model).config.to_dict() == third.config.to_dict()


def test_a_layer_takes_arguments_by_position(llama):
    model, _, _ = llama
    layer, x, mask = model.model.layers[0], torch.randn(1, 4, D), -torch.eye(4)[None, None]
    cos_and_sin = model.model.rotary_emb(x, torch.arange(4)[None])
    expected = layer(x, mask, position_embeddings=cos_and_sin)
    hyperconnect(model, N)
    found = layer(x, mask, position_embeddings=cos_and_sin)
    assert all(distance(stream, expected) < LOGITS for stream in found.unbind(-2))
    assert torch.equal(found, layer(x, attention_mask=mask, position_embeddings=cos_and_sin))
    with pytest.raises(TypeError, match="multiple values for argument 'attention_mask'"):
        layer(x, mask, attention_mask=mask)


def test_gradient_checkpointing(plain):
    model, ids, expected = plain
    hyperconnect(model, N)
    found = results(model, ids)
    model.train().gradient_checkpointing_enable()
    again = results(model, ids)
    assert_same_results(again, expected)
    assert again[1].keys() == found[1].keys()
    assert all(torch.equal(again[1][name], found[1][name]) for name in maps_of(model))


def test_bf16_is_as_near_to_fp32_as_before():
    """In the mean: which of two roundings of one model lies nearer is chance."""
    errors = []
    for kind in KINDS:
        model, ids, (wide, _) = made(kind)
        narrow = copy.deepcopy(model).bfloat16()
        before = distance(narrow(ids).logits, wide)
        errors.append(distance(hyperconnect(narrow, N)(ids).logits, wide) / before)
    assert torch.tensor(errors).log().mean().exp() < 1.5


def test_a_norm_that_others_changed_is_called(llama):
    model, ids, _ = llama
    model.model.layers[1].input_layernorm.register_forward_hook(lambda module, inputs, output: 0 * output)
    model.model.layers[2].post_attention_layernorm = nn.RMSNorm(D, eps=0.5)
    expected = model(ids).logits
    assert distance(hyperconnect(model, N)(ids).logits, expected) < LOGITS


def test_hooks_of_all_modules_see_the_norms(llama):
    model, ids, _ = llama
    seen, hook = [], nn.modules.module.register_module_forward_hook
    handle = hook(lambda module, inputs, output: seen.append(type(module).__name__))
    try:
        model(ids)
        before = seen.count("LlamaRMSNorm")
        hyperconnect(model, N)(ids)
    finally:
        handle.remove()
    assert (before, seen.count("LlamaRMSNorm")) == (7, 14)


def test_the_streams_are_used(llama):
    """Maps that moved change the logits, and metrics sees each connection."""
    model, ids, (logits, _) = llama
    moved(hyperconnect(model, N))
    with metrics(model) as health:
        loss = model(ids, labels=ids)
        loss.loss.backward()
    assert distance(loss.logits, logits) > 0.01
    found = health.result()
    names = [name for name, module in model.named_modules() if isinstance(module, HyperConnection)]
    assert len(names) == 6
    assert all(found[f"{name}/dphi_norm"] > 0 and found[f"{name}/h_res_row_error"] < 0.2 for name in names)


@pytest.mark.parametrize(
    ("name", "rows", "which"),
    [
        ("layers.1.ffn_hc.phi", slice(0, 1), "h_pre of model.layers.1.ffn_hc is"),
        ("layers.1.ffn_hc.phi", slice(N, N + 1), "h_post of model.layers.1.ffn_hc is"),
        ("layers.0.attn_hc.bias", slice(2 * N, None), "h_res of model.layers.0.attn_hc is"),
        ("layers.0.attn_hc.bias", slice(0, 2 * N), "h_pre, h_post of model.layers.0.attn_hc are"),
        ("norm.hc_head.bias", slice(0, 1), "h_pre of model.norm.hc_head is"),
    ],
)
def test_what_moved_is_named(name, rows, which, llama):
    model, _, _ = llama
    hyperconnect(model, N)
    with torch.no_grad():
        model.model.get_parameter(name)[rows] += 1e-4
    with pytest.raises(ValueError, match=f"^collapse: {re.escape(which)} not as in a fresh model, and a plain one has"):
        collapse(model)
    assert model.config.hc_mult == N  # nothing has changed


def test_a_fresh_model_of_any_seed_collapses(llama):
    """Also where a random h_pre was cut off, as one of a hundred is with 8 streams; and after its maps were rounded."""
    model, ids, (logits, _) = llama
    for seed in range(40):
        torch.manual_seed(seed)
        collapse(hyperconnect(model, 8))
    assert torch.equal(model(ids).logits, logits)
    collapse(hyperconnect(model.bfloat16(), 2).bfloat16())


def test_what_is_refused(llama):
    model, _, _ = llama

    def says(error, message):
        return pytest.raises(error, match=f"^{re.escape(message)}$")

    with says(TypeError, "hyperconnect: model must be a torch.nn.Module, got str"):
        hyperconnect("Qwen/Qwen3-0.6B", 4)
    kinds = "llama, mistral, qwen2, qwen3"
    with says(ValueError, f"hyperconnect: Linear is no plain model of a known kind ({kinds})"):
        hyperconnect(nn.Linear(2, 2), 4)
    with says(ValueError, "hyperconnect: n must be at least 2, got 1: one stream is what the model has"):
        hyperconnect(model, 1)
    with says(ValueError, "collapse: LlamaModel has no streams of hyperconnect"):
        collapse(model)
    layer = model.model.layers[1]
    layer.forward, too_late = layer.forward, "hyperconnect the model before others change it"
    with says(ValueError, f"hyperconnect: model.layers.1 has a forward of its own; {too_late}"):
        hyperconnect(model, 4)
    del layer.forward
    hyperconnect(model, 4)
    with says(ValueError, "hyperconnect: LlamaModel has streams already"):
        hyperconnect(model, 4)
