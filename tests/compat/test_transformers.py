"""Tiny random models of transformers, patched, against what its own code computes."""

import copy
import importlib.util
import json

import pytest
import torch
from compat_oracle import distance
from tiny_models import GRADIENTS, KINDS, LOGITS, ROOT, assert_same_results, build, results
from torch import nn

from mhc_ops import HyperConnection, HyperHead, metrics, use_backend
from mhc_ops.compat import transformers as on_mhc_ops
from mhc_ops.compat.transformers import patch, patched
from mhc_ops.core.maps import maps_of

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'mhc-ops[adopt]'")


@pytest.mark.parametrize("exact_as_eager", [False, True], ids=["", "exact_as_eager"])
def test_same_logits_and_gradients(tiny, exact_as_eager, called):
    """And with gradient checkpointing. A patch that did nothing would pass every comparison."""
    names = called(on_mhc_ops, "mhc_enter", "mhc_next", "mhc_leave", "mhc_pre", "mhc_head", "mhc_mean")
    with patched(copy.deepcopy(tiny.model), exact_as_eager=exact_as_eager) as model:
        assert_same_results(results(model, tiny.ids), tiny.eager)
        of_layer = ["mhc_pre", "mhc_leave"] * 2 if exact_as_eager else ["mhc_enter", "mhc_next", "mhc_leave"]
        assert names == 3 * of_layer + ["mhc_mean" if tiny.kind == "glm5_next" else "mhc_head"]
        model.train().gradient_checkpointing_enable()
        assert_same_results(results(model, tiny.ids), tiny.eager)


@pytest.mark.parametrize("kind", KINDS)
def test_on_kernels(kind, kernel_device):
    """The model is only run where its kernels are: an attention of fla's that is installed runs on a GPU alone."""
    model, ids = build(kind).to(kernel_device), torch.randint(3, 64, (1, 4), device=kernel_device)
    expected = results(model, ids)
    with patched(model), use_backend("triton"):
        assert_same_results(results(model, ids), expected)


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


@pytest.mark.parametrize("exact_as_eager", [False, True])
def test_bf16(tiny, exact_as_eager):
    """Logits against the fp32 model of the same values: half as far again as transformers' own, at most. Its gradients
    vary by more than that. Attention to all tokens: a rounding decides which are chosen, and with them all else."""
    model = tiny.load(dtype=torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 32
    (wide, _), (eager, own) = results(copy.deepcopy(model).float(), tiny.ids), results(model, tiny.ids)
    with patched(model, exact_as_eager=exact_as_eager):
        logits, gradients = results(model, tiny.ids)
    assert {name: each.dtype for name, each in gradients.items()} == {name: each.dtype for name, each in own.items()}
    assert distance(logits, wide) < 1.5 * distance(eager, wide)


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
    assert [h_in is each for each in normed] == [True] * exact_as_eager
    rounded = all(torch.equal(h, h.bfloat16().float()) for h in (carry.h_post, carry.h_res) if h is not None)
    assert rounded == (exact_as_eager and tiny.kind != "hy_v4")


@torch.no_grad()
def test_a_connection_called_as_in_transformers(tiny):
    connection, x = tiny.text_layers()[1].attn_hc, torch.randn(2, 5, 3, 32)
    expected = connection(x)
    with patched(connection):
        found = connection(x)
    assert len(found) == len(expected) and all(distance(*pair) < LOGITS for pair in zip(found, expected))


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


def types_of_maps(model):
    return {parameter.dtype for parameter in maps_of(model)}


def test_maps_stay_fp32(tiny, mapping):
    """Where transformers loads a patched model in bf16, and where that is cast; GLM's own are bf16."""
    with patched():
        model = tiny.load(dtype=torch.bfloat16)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert types_of_maps(model) == {torch.float32} == types_of_maps(model.half())
    assert model.get_input_embeddings().weight.dtype == torch.float16
    assert model(tiny.ids).logits.dtype == torch.float16


def test_a_model_of_ones_own_loads_in_bf16(tmp_path):
    class Own(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.blocks = nn.ModuleList([HyperConnection(nn.Linear(8, 8), 2, 8, layer_norm=True)])
            self.head = HyperHead(2, 8)
            self.post_init()

    kept = Own(transformers.PretrainedConfig())
    kept.save_pretrained(tmp_path)
    made = Own.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert types_of_maps(made) == {torch.float32} and made.blocks[0].layer.weight.dtype == torch.bfloat16
    assert torch.equal(made.head.bias, kept.head.bias)


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
        truth = {"h_post_mean": h_post.mean(), "dphi_norm": gradients[f"{name}.fn"].norm()}
        for h in h_res:
            truth |= {"h_res_max": h.max(), "h_res_entropy": torch.special.entr(h).sum((-2, -1)).mean() / h.shape[-1]}
        for which, value in truth.items():
            assert numbers[f"{name}/{which}"] == pytest.approx(value.item(), rel=GRADIENTS), (name, which)
        assert ("h_res_max" in truth) == (f"{name}/h_res_max" in numbers) == (tiny.kind != "hy_v4")
    assert numbers["gain_forward"] > 0


def test_the_benchmark_runs(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("transformers_step", ROOT / "benchmarks" / "transformers_step.py")
    spec.loader.exec_module(script := importlib.util.module_from_spec(spec))
    sizes = {"device": "cpu", "hidden": 64, "batch": 1, "seq": 16, "layers": 1, "experts": 2, "steps": 1}
    script.main([f"--{name}={value}" for name, value in {**sizes, "json": tmp_path / "step.json"}.items()])
    found = json.loads((tmp_path / "step.json").read_text())["variants"]
    assert set(found) == {"plain", "eager", "patched", "exact_as_eager"}
    assert abs(found["patched"]["loss"] / found["eager"]["loss"] - 1) < 2**-8  # bf16
    assert "hyper_connections_ms" in capsys.readouterr().out
