"""Models of transformers with `causal_conv1d` installed by name, against their own torch code, in fp32."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_models import assert_same_results, results

import mhc_ops
from mhc_ops.compat import causal_conv1d as compat

ATTENTION = {"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
EXPERTS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MODELS = {  # by the name of their file
    "lfm2": ("Lfm2", {**ATTENTION, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3_next": ("Qwen3Next", {**ATTENTION, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]}),
    "mamba2": ("Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8}),
}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


@pytest.fixture(scope="module")
def library():
    """transformers, with nothing that would run other parts of these models in kernels of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fla", "mamba_ssm"):
            patch.setitem(sys.modules, name, None)
        yield pytest.importorskip("transformers", reason="needs transformers: pip install 'mhc-ops[adopt]'")


@pytest.fixture(scope="module", params=MODELS)
def models(request, library):
    """A model with its own torch code, and the same one from a file that was imported after `install()`."""
    (name, own), path = MODELS[request.param], f"transformers.models.{request.param}.modeling_{request.param}"
    config, made = getattr(library, f"{name}Config")(**{**SMALL, **own}), []
    sys.modules.pop(path, None)
    for installed in (False, True):
        if installed:
            compat.install()
        torch.manual_seed(0)
        made.append(getattr(importlib.import_module(path), f"{name}ForCausalLM")(config).eval())
        del sys.modules[path]
    compat.uninstall()
    return SimpleNamespace(own=made[0], ours=made[1])


def test_logits_gradients_and_generated_tokens(models, called):
    """It sees the functions that are called: where neither is, it would say nothing."""
    calls, options = called(mhc_ops, "causal_conv1d", "causal_conv1d_update"), {"max_new_tokens": 5, "do_sample": False}
    ids, prompt = (torch.randint(2, 64, (2, length), generator=torch.Generator().manual_seed(1)) for length in (13, 7))
    expected, generated = results(models.own, ids), models.own.generate(prompt, **options)
    assert not calls
    assert_same_results(results(models.ours, ids), expected)
    assert set(calls) == {"causal_conv1d"}
    calls.clear()
    assert torch.equal(models.ours.generate(prompt, **options), generated)
    assert set(calls) == {"causal_conv1d", "causal_conv1d_update"}
