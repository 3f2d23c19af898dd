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


@pytest.fixture
def calls(called):
    """The functions that were called: a test in which neither is would say nothing."""
    return called(mhc_ops, "causal_conv1d", "causal_conv1d_update")


def tokens(*shape):
    return torch.randint(2, 64, shape, generator=torch.Generator().manual_seed(1))


def test_logits_and_gradients(models, calls):
    expected = results(models.own, tokens(2, 13))
    assert not calls
    assert_same_results(results(models.ours, tokens(2, 13)), expected)
    assert set(calls) == {"causal_conv1d"}


def test_generated_tokens(models, calls):
    prompt, options = tokens(2, 7), {"max_new_tokens": 5, "do_sample": False}
    expected = models.own.generate(prompt, **options)
    assert not calls
    assert torch.equal(models.ours.generate(prompt, **options), expected)
    assert set(calls) == {"causal_conv1d", "causal_conv1d_update"}
