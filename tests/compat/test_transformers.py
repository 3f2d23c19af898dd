"""Tiny random models of transformers, patched against their own code."""

import contextlib
import copy
import functools
import importlib.util
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from mhc_ops import HyperConnection, HyperHead, metrics, use_backend
from mhc_ops.compat import transformers as on_mhc_ops
from mhc_ops.compat.transformers import patch, patched, unpatch
from mhc_ops.core.backend import too_old
from mhc_ops.core.maps import maps_of
from mhc_ops.testing.cases import SEED

ROOT = Path(__file__).parents[2]
HAVE = importlib.util.find_spec("transformers") is not None
needed = pytest.mark.skipif(not HAVE, reason="transformers is not installed: pip install 'mhc-ops[adopt]'")
(FLOOR,) = re.findall(r"transformers>=([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ASKED_FOR = tuple(map(int, FLOOR.split(".")))
KINDS = ["deepseek_v4", "glm5_next", "hy_v4"]
LOGITS, GRADIENTS = 1e-5, 1e-4  # fp32: relative to the norm of what transformers computes

SIZES = {"vocab_size": 64, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3}
SIZES |= {"initializer_range": 0.2, "num_attention_heads": 2, "q_lora_rank": 16, "n_routed_experts": 3}
SIZES |= {"num_experts_per_tok": 3, "index_n_heads": 2, "index_head_dim": 16}
SIZES |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
# No two constants alike, and none so small that it would not show.
SIZES |= {"hc_mult": 3, "hc_eps": 0.02, "rms_norm_eps": 0.01}
LATENT = {"num_key_value_heads": 2, "intermediate_size": 32, "kv_lora_rank": 16, "v_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 16, "index_topk": 8}


def deepseek_v4(transformers):
    layers = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    attention = {"head_dim": 16, "o_groups": 2, "o_lora_rank": 8, "sliding_window": 8, "index_topk": 2}
    own = {"layer_types": layers, "mlp_layer_types": ["hash_moe", "moe", "moe"], "hc_sinkhorn_iters": 3}
    return transformers.DeepseekV4ForCausalLM, transformers.DeepseekV4Config(**SIZES, **attention, **own)


def glm5_next(transformers):
    layers = ["linear_attention", "indexed_attention", "indexed_attention"]
    own = {"layer_types": layers, "mlp_layer_types": ["dense", "sparse", "sparse"], "hc_sinkhorn_iters": 3}
    own |= {"indexer_types": ["full", "full", "shared"], "index_kpool": 4, "linear_head_dim": 8, "linear_num_heads": 2}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    vision |= {"projection_intermediate_size": 16}
    config = transformers.Glm5NextConfig(text_config={**SIZES, **LATENT, **own}, vision_config=vision)
    return transformers.Glm5NextForConditionalGeneration, config


def hy_v4(transformers):
    own = {"qk_rope_head_dim": 8, "hc_magnitude": 1.5}
    return transformers.HYV4ForCausalLM, transformers.HYV4Config(**SIZES, **LATENT, **own)


def build(kind, seed=0):
    """A model in which no parameter is 0 or 1 and the norms have an eps of their own."""
    import transformers

    if kind == "glm5_next" and too_old("transformers", version := transformers.__version__, ASKED_FOR):
        pytest.skip(f"transformers {version} has other layers of GLM than what mhc-ops[adopt] asks for")
    torch.manual_seed(seed)
    constructor, config = globals()[kind](transformers)
    config._attn_implementation = "eager"  # the others return no attentions
    model = constructor(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.2 * torch.randn_like(parameter))
    for module in model.modules():
        if hasattr(module, "tid2eid"):
            module.tid2eid.copy_(torch.arange(3).expand_as(module.tid2eid))
    return with_eps(model)


def with_eps(model):
    """The norms have an eps of their own."""
    for name, module in model.named_modules():
        if name.endswith(("input_layernorm", "post_attention_layernorm")):
            module.variance_epsilon = 0.05
    return model.eval()


class Built:
    """A model and what transformers computes with it, once per kind."""

    def __init__(self, kind, folder):
        self.kind, self.model, self.folder = kind, build(kind), folder
        self.ids = torch.randint(3, 64, (2, 24))
        self.eager = results(self.model, self.ids)
        self.model.save_pretrained(folder)

    def text_layers(self):
        return [module for name, module in self.model.named_modules() if re.search(r"layers\.\d+$", name)]

    def load(self, **options):
        return with_eps(type(self.model).from_pretrained(self.folder, attn_implementation="eager", **options))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'mhc-ops[adopt]'")
    return functools.cache(lambda kind: Built(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(params=KINDS)
def tiny(request, built):
    return built(request.param)


@pytest.fixture
def mapping():
    """What is registered with transformers, which every test leaves empty."""
    from transformers.monkey_patching import get_patch_mapping

    assert get_patch_mapping() == {}
    yield get_patch_mapping
    assert get_patch_mapping() == {}


def results(model, ids):
    """Logits, and all gradients of the loss."""
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return out.logits.detach(), gradients


def distance(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_same_results(found, expected):
    (logits, gradients), (expected_logits, expected_gradients) = found, expected
    assert distance(logits, expected_logits) < LOGITS
    assert gradients.keys() == expected_gradients.keys()
    off = {name: distance(gradients[name], expected_gradients[name]) for name in gradients}
    assert max(off.values()) < GRADIENTS, max(off, key=off.get)


@pytest.mark.parametrize("exact_as_eager", [False, True], ids=["", "exact_as_eager"])
def test_same_logits_and_gradients(tiny, exact_as_eager):
    with patched(tiny.model, exact_as_eager=exact_as_eager) as model:
        assert_same_results(results(model, tiny.ids), tiny.eager)


def test_the_layers_run_on_the_operators(tiny, monkeypatch):
    """A patch that did nothing would pass every comparison."""
    called = []
    for name in ("mhc_enter", "mhc_next", "mhc_leave", "mhc_head", "mhc_mean"):
        ours = getattr(on_mhc_ops, name)
        monkeypatch.setattr(on_mhc_ops, name, lambda *a, _=(name, ours), **k: called.append(_[0]) or _[1](*a, **k))
    with patched(tiny.model), torch.no_grad():
        tiny.model(tiny.ids)
    head = "mhc_mean" if tiny.kind == "glm5_next" else "mhc_head"
    assert called == 3 * ["mhc_enter", "mhc_next", "mhc_leave"] + [head]


@needed
@pytest.mark.parametrize("kind", KINDS)
def test_on_kernels(kind, kernel_device):
    """The model is only run where its kernels are: an attention of fla's that is installed runs on a GPU alone."""
    model, ids = build(kind).to(kernel_device), torch.randint(3, 64, (1, 4), device=kernel_device)
    expected = results(model, ids)
    with patched(model), use_backend("triton"):
        assert_same_results(results(model, ids), expected)


def test_gradient_checkpointing(tiny):
    with patched(copy.deepcopy(tiny.model)) as model:
        model.train().gradient_checkpointing_enable()
        assert_same_results(results(model, tiny.ids), tiny.eager)


def test_generates_the_same_tokens(tiny):
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = tiny.model.generate(tiny.ids, **options)
    with patched(tiny.model):
        assert torch.equal(tiny.model.generate(tiny.ids, **options), expected)


@torch.no_grad()
def test_what_is_recorded(tiny):
    wanted = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    model = copy.deepcopy(tiny.model)
    expected = model(tiny.ids, **wanted)
    with patched(model):
        found = model(tiny.ids, **wanted)
    for name in ("hidden_states", "attentions", "router_logits"):
        assert len(found[name]) == len(expected[name]) > 0, name
        assert all(distance(*pair) < LOGITS for pair in zip(found[name], expected[name])), name
    assert found.hidden_states[1].shape[-2:] == (3, 32)  # the streams, as transformers shows them


def test_unpatched_has_the_same_bits(tiny):
    """Patched classes have other types and the same names, by which device maps and FSDP find layers."""
    modules = list(tiny.model.modules())
    classes = [type(module) for module in modules]
    with patched(tiny.model):
        changed = [type(module) for module in modules]
        assert changed != classes
        assert [one.__name__ for one in changed] == [one.__name__ for one in classes]
        assert type(tiny.text_layers()[0]).__name__ in tiny.model._no_split_modules
    assert [type(module) for module in modules] == classes
    logits, gradients = results(tiny.model, tiny.ids)
    assert torch.equal(logits, tiny.eager[0])
    assert all(torch.equal(gradients[name], tiny.eager[1][name]) for name in gradients)


def test_models_that_are_loaded_later(tiny, mapping):
    with patched():
        loaded = tiny.load()
    assert len(loaded(tiny.ids, output_hidden_states=True).hidden_states) == 4
    assert_same_results(results(loaded, tiny.ids), tiny.eager)
    unpatch(loaded)
    assert torch.equal(results(loaded, tiny.ids)[0], tiny.eager[0])


@torch.no_grad()
def test_models_that_are_not_loaded(built, mapping):
    """A constructor makes a model that is not patched, and that still records what it should."""
    tiny = built("hy_v4")
    with patched():
        from_config = type(tiny.model)._from_config(copy.deepcopy(tiny.model.config))
        constructed = type(tiny.model)(copy.deepcopy(tiny.model.config))
        assert len(constructed(tiny.ids, output_hidden_states=True).hidden_states) == 4
    assert "mhc_ops" in type(from_config.model.layers[0]).__module__
    assert "mhc_ops" not in type(constructed.model.layers[0]).__module__


def test_checkpoints_stay_the_same(tiny, tmp_path):
    from safetensors.torch import load_file

    with patched(tiny.model) as model:
        keys = list(model.state_dict())
        model.save_pretrained(tmp_path)
    assert keys == list(tiny.model.state_dict())
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path, tiny.folder))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert (tmp_path / "config.json").read_text() == (tiny.folder / "config.json").read_text()


def choosing_nothing(model):
    """Attention to all tokens: which are chosen is decided by a rounding, and then all that follows differs."""
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 32
    return model


def bf16_errors(model, ids):
    """Errors of logits and of all gradients against the fp32 model of the same values: of transformers, of ours, and of
    ours with rounded maps."""
    wide = results(copy.deepcopy(model).float(), ids)

    def errors(found):
        flat = (torch.cat([each.flatten() for each in gradients.values()]) for gradients in (found[1], wide[1]))
        return distance(found[0], wide[0]), distance(*flat)

    eager, found = results(model, ids), []
    for exact_as_eager in (False, True):
        with patched(model, exact_as_eager=exact_as_eager):
            found.append(results(model, ids))
        types = [{name: each.dtype for name, each in gradients.items()} for _, gradients in (found[-1], eager)]
        assert types[0] == types[1]
    return errors(eager), *map(errors, found)


def test_bf16(tiny):
    """Logits of one model: half as far again as transformers' own, at most. Its gradients vary by more than that."""
    model = choosing_nothing(tiny.load(dtype=torch.bfloat16))
    (eager, _), (ours, _), (exact, _) = bf16_errors(model, tiny.ids)
    assert max(ours, exact) < 1.5 * eager


def types_of_maps(model):
    return {parameter.dtype for parameter in maps_of(model)}


def test_maps_stay_fp32(tiny, mapping):
    """Where transformers loads a patched model in bf16, and where that is cast; GLM's own are bf16."""
    with patched():
        model = tiny.load(dtype=torch.bfloat16)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert types_of_maps(model) == {torch.float32} == types_of_maps(model.half())
    assert model.get_input_embeddings().weight.dtype == torch.float16
    model = copy.deepcopy(tiny.model)
    patch(model)
    assert types_of_maps(model.bfloat16()) == {torch.float32}
    assert model(tiny.ids).logits.dtype == torch.bfloat16


def test_metrics_say_what_transformers_makes(tiny):
    """The maps and gradients of its own model; the patched model does not notice."""
    model, made = copy.deepcopy(tiny.model), {}
    connections = {name: each for name, each in model.named_modules() if name.endswith(("attn_hc", "ffn_hc"))}
    hooks = [each.register_forward_hook(lambda own, _, out: made.update({own: out})) for each in connections.values()]
    _, gradients = results(model, tiny.ids)
    for hook in hooks:
        hook.remove()
    patch(model)
    logits, _ = results(model, tiny.ids)
    with metrics(model) as health:
        found = model(tiny.ids, labels=tiny.ids)
        found.loss.backward()
    assert torch.equal(found.logits, logits)
    numbers = health.result()
    assert len(connections) == 6 and {name.partition("/")[0] for name in numbers if "/" in name} == set(connections)
    for name, connection in connections.items():
        h_post, *h_res = made[connection][:-1]  # then h_in
        truth = {"h_post_mean": h_post.mean(), "h_post_min": h_post.min(), "h_post_max": h_post.max()}
        for h in h_res:
            truth |= {"h_res_max": h.max(), "h_res_entropy": torch.special.entr(h).sum((-2, -1)).mean() / h.shape[-1]}
        for which, own in {"phi": "fn", "alpha": "scale", "bias": "base"}.items():
            truth[f"d{which}_norm"] = gradients[f"{name}.{own}"].norm()
        for which, value in truth.items():
            assert numbers[f"{name}/{which}"] == pytest.approx(value.item(), rel=GRADIENTS), (name, which)
        assert ("h_res_max" in truth) == (f"{name}/h_res_max" in numbers) == (tiny.kind != "hy_v4")
    assert numbers["gain_forward"] > 0


@needed
def test_a_model_of_ones_own_loads_in_bf16(tmp_path):
    """From a checkpoint in bf16 and by torch_dtype; its maps are fp32."""
    import transformers

    class Own(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.blocks = nn.ModuleList([HyperConnection(nn.Linear(8, 8), 2, 8, layer_norm=True)])
            self.head = HyperHead(2, 8)
            self.post_init()

    kept = Own(transformers.PretrainedConfig())
    for parameter in kept.parameters():
        parameter.data = parameter.data.bfloat16()
    kept.save_pretrained(tmp_path)
    for made in (
        Own.from_pretrained(tmp_path, dtype=torch.bfloat16),
        Own._from_config(kept.config, dtype=torch.bfloat16),
    ):
        assert types_of_maps(made) == {torch.float32}
        assert made.blocks[0].layer.weight.dtype == torch.bfloat16
    assert torch.equal(Own.from_pretrained(tmp_path, dtype=torch.bfloat16).head.bias, kept.head.bias.float())


@needed
@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_on_average(kind):
    """Logits are nearer to the fp32 model than those of transformers in the mean, not in every model."""
    found = []
    for seed in range(SEED, SEED + 16):
        model = choosing_nothing(build(kind, seed)).bfloat16()
        found.append(bf16_errors(model, torch.randint(3, 64, (2, 24))))
    theirs, ours, exact = (torch.tensor(each).log().mean(0).exp() for each in zip(*found))
    assert ours[0] < theirs[0]
    assert all((each < 1.5 * theirs).all() for each in (ours, exact))


@torch.no_grad()
@pytest.mark.parametrize("exact_as_eager", [False, True])
def test_exact_as_eager_rounds_the_maps_and_calls_the_norm(tiny, exact_as_eager, monkeypatch):
    layer = copy.deepcopy(tiny.text_layers()[1]).to(torch.bfloat16)
    patch(layer, exact_as_eager=exact_as_eager)
    norm, normed = type(layer.input_layernorm), []
    forward = norm.forward
    # Not by a hook: a norm that has one is called in any case.
    monkeypatch.setattr(norm, "forward", lambda *given: normed.append(forward(*given)) or normed[-1])
    h_in, carry = layer.attn_hc(torch.randn(2, 5, 3, 32).bfloat16(), norm=layer.input_layernorm)
    maps = [h for h in (carry.h_post, carry.h_res) if h is not None]
    rounded = all(torch.equal(h, h.bfloat16().float()) for h in maps)
    assert rounded == (exact_as_eager and tiny.kind != "hy_v4")
    assert [h_in is each for each in normed] == [True] * exact_as_eager


@torch.no_grad()
def test_a_connection_called_as_in_transformers(tiny):
    connection = tiny.text_layers()[1].attn_hc
    x = torch.randn(2, 5, 3, 32)
    expected = connection(x)
    with patched(connection):
        found = connection(x)
    assert len(found) == len(expected)
    assert all(distance(*pair) < LOGITS for pair in zip(found, expected))


@torch.no_grad()
def test_hooks_run_and_another_norm_is_called(built):
    """A norm with a hook is computed by its module, as is one with another forward or class."""
    tiny = built("hy_v4")
    model = copy.deepcopy(tiny.model)
    layer, calls = model.model.layers[0], []
    with patched(model):
        for each in (layer, layer.attn_hc, layer.ffn_hc, layer.input_layernorm, layer.mlp):
            each.register_forward_hook(lambda module, *_: calls.append(module))
        assert distance(model(tiny.ids).logits, tiny.eager[0]) < LOGITS
    assert len(calls) == len(set(calls)) == 5
    layer.input_layernorm.forward = lambda h: 0 * h
    model.model.layers[1].input_layernorm = nn.RMSNorm(32, eps=0.5)
    expected = model(tiny.ids).logits
    with patched(model):
        assert distance(model(tiny.ids).logits, expected) < LOGITS


def test_copies_and_pickles(tiny):
    model, ways = tiny.model.model, [copy.deepcopy]
    with contextlib.suppress(AttributeError):  # some models of transformers cannot be pickled beside `kernels`
        pickle.dumps(model)
        ways.append(lambda model: pickle.loads(pickle.dumps(model)))
    with patched(model):
        made = [way(model) for way in ways]
        names = [type(module).__name__ for module in model.modules()]
    with torch.no_grad():
        expected = model(tiny.ids).last_hidden_state
        for each in made:
            assert [type(module).__name__ for module in each.modules()] == names
            assert distance(each(tiny.ids).last_hidden_state, expected) < LOGITS
            unpatch(each)
            assert torch.equal(each(tiny.ids).last_hidden_state, expected)


def says(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


@needed
def test_the_kinds_and_wrong_use(built, mapping):
    model = built("hy_v4").model
    assert patch(model) == ("hy_v4",)
    unpatch(model)
    assert patch() == tuple(KINDS)
    unpatch()
    with says(ValueError, "patch: Linear has no hyper-connections of a known kind (deepseek_v4, glm5_next, hy_v4)"):
        patch(nn.Linear(2, 2))
    with says(TypeError, "patch: model must be a torch.nn.Module, got str"):
        patch("tencent/Hy4-preview")


@needed
def test_patching_twice(built, mapping):
    """A call asks for a state. That this state is there already is no error, nor is nothing to undo."""
    tiny, classes = built("hy_v4"), lambda model: [type(module) for module in model.modules()]
    plain = classes(tiny.model)
    unpatch(tiny.model)
    assert patch(tiny.model) == patch(tiny.model) == ("hy_v4",)
    ours = classes(tiny.model)
    with patched(tiny.model, exact_as_eager=True):
        assert classes(tiny.model) not in (ours, plain)
    assert classes(tiny.model) == ours != plain
    tiny.model.model.layers[1].forward = tiny.model.model.layers[1].forward  # too late to patch, if it had to be
    patch(tiny.model)
    with patched(tiny.model):
        pass
    del tiny.model.model.layers[1].forward
    unpatch(tiny.model)
    unpatch(tiny.model)
    assert classes(tiny.model) == plain

    unpatch()
    assert patch() == patch() == tuple(KINDS)
    registered = mapping()
    with patched(exact_as_eager=True):
        assert mapping().keys() == registered.keys() and mapping() != registered
    assert mapping() == registered
    loaded = tiny.load()
    assert patch(loaded) == ("hy_v4",) and classes(loaded) == ours
    unpatch()
    unpatch()


@needed
def test_what_others_registered_stays(mapping):
    from transformers.monkey_patching import register_patch_mapping, unregister_patch_mapping

    register_patch_mapping({"HYV4HyperHead": nn.Identity})
    with says(ValueError, "patch: HYV4HyperHead of transformers is replaced already, by a class of another library"):
        patch()
    unpatch()
    assert mapping() == {"HYV4HyperHead": nn.Identity}
    unregister_patch_mapping(["HYV4HyperHead"])


@needed
def test_without_transformers_or_these_models(monkeypatch):
    monkeypatch.setattr(on_mhc_ops, "find_spec", lambda name: None)
    with says(ModuleNotFoundError, "patch: the package transformers is not installed: pip install transformers"):
        patch()
    monkeypatch.setattr(on_mhc_ops, "find_spec", lambda name: "here" if name == "transformers" else None)
    with pytest.raises(ImportError, match=r"^patch: transformers \S+ has none of deepseek_v4, glm5_next, hy_v4; 5\.8"):
        patch()


@needed
def test_what_others_changed_is_not_patched(built):
    """A forward of its own (accelerate, kernels) or another class (FSDP2) would not run ours."""
    model = copy.deepcopy(built("hy_v4").model)
    layer = model.model.layers[1]
    layer.forward, too_late = layer.forward, "patch the model before others change it"
    with says(ValueError, f"patch: model.layers.1 has a forward of its own; {too_late}"):
        patch(model)
    del layer.forward
    original = type(layer)
    layer.__class__ = type("FSDPLayer", (original,), {})
    with says(ValueError, f"patch: model.layers.1 is a FSDPLayer, not a HYV4DecoderLayer; {too_late}"):
        patch(model)
    layer.__class__ = original
    patch(model)
    layer.__class__ = type("FSDPLayer", (type(layer),), {})
    with pytest.raises(ValueError, match=r"^unpatch: model\.layers\.1 is a FSDPLayer, not a HYV4DecoderLayer"):
        unpatch(model)


@needed
def test_the_benchmark_runs(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("transformers_step", ROOT / "benchmarks" / "transformers_step.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sizes = {"device": "cpu", "hidden": 64, "batch": 1, "seq": 16, "layers": 1, "experts": 2, "steps": 1}
    line = [f"--{name}={value}" for name, value in {**sizes, "json": tmp_path / "step.json"}.items()]
    script.main(line)
    found = json.loads((tmp_path / "step.json").read_text())
    assert set(found["variants"]) == {"plain", "eager", "patched", "exact_as_eager"}
    losses = {name: each["loss"] for name, each in found["variants"].items()}
    assert abs(losses["patched"] / losses["eager"] - 1) < 2**-8  # bf16
    assert "hyper_connections_ms" in capsys.readouterr().out
