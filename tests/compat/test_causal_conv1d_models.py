"""Models of transformers with `causal_conv1d` installed by name, against their own torch code, in fp32."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

import mhc_ops
from mhc_ops.compat import causal_conv1d as compat

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
HEADS = {f"linear_{name}": size for name, size in {"num_key_heads": 2, "num_value_heads": 2}.items()}
HEADS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16}
MODELS = {
    "Lfm2": {**SMALL, **ATTENTION, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "Qwen3Next": {**SMALL, **ATTENTION, **EXPERTS, **HEADS, "layer_types": ["linear_attention", "full_attention"]},
    "Mamba2": {**SMALL, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
}
FILES = {"Lfm2": "lfm2", "Qwen3Next": "qwen3_next", "Mamba2": "mamba2"}


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
    name, path = request.param, f"transformers.models.{FILES[request.param]}.modeling_{FILES[request.param]}"
    config = getattr(library, f"{name}Config")(**MODELS[name], **TOKENS)
    sys.modules.pop(path, None)
    own = importlib.import_module(path)
    del sys.modules[path]
    compat.install()
    ours = importlib.import_module(path)
    compat.uninstall()
    del sys.modules[path]
    torch.manual_seed(0)
    made = [getattr(module, f"{name}ForCausalLM")(config).eval() for module in (own, ours)]
    made[1].load_state_dict(made[0].state_dict())
    return SimpleNamespace(own=made[0], ours=made[1])


@pytest.fixture
def calls(monkeypatch):
    """How often each function was called: a test in which neither is would say nothing."""
    counts = dict.fromkeys(("causal_conv1d", "causal_conv1d_update"), 0)
    for name in counts:
        right = getattr(mhc_ops, name)

        def counted(*tensors, name=name, right=right, **options):
            counts[name] += 1
            return right(*tensors, **options)

        monkeypatch.setattr(mhc_ops, name, counted)
    return counts


def relative(one, exact):
    return ((one - exact).norm() / exact.norm()).item()


def tokens(*shape):
    return torch.randint(2, 64, shape, generator=torch.Generator().manual_seed(1))


def logits_and_gradients(model, ids):
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def test_logits_and_gradients(models, calls):
    ids = tokens(2, 13)
    expected, exact = logits_and_gradients(models.own, ids)
    assert not any(calls.values())
    logits, gradients = logits_and_gradients(models.ours, ids)
    assert calls["causal_conv1d"]
    assert relative(logits, expected) < 1e-5
    assert {name for name in exact if not relative(gradients[name], exact[name]) < 1e-4} == set()


def test_generated_tokens(models, calls):
    prompt, options = tokens(2, 7), {"max_new_tokens": 5, "do_sample": False}
    expected = models.own.generate(prompt, **options)
    assert not any(calls.values())
    assert torch.equal(models.ours.generate(prompt, **options), expected)
    assert all(calls.values())


@pytest.mark.parametrize("models", ["Lfm2"], indirect=True)  # the others need fla or mamba-ssm for this
def test_packed_sequences(models):
    """One row, each sequence with its own positions and id: what they give one by one. transformers alone refuses."""
    sequences = tokens(1, 13).split([5, 1, 7], 1)
    lengths = torch.tensor([s.shape[1] for s in sequences])
    places = {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "seq_idx": torch.arange(3).repeat_interleave(lengths).int()[None],
    }
    packed = torch.cat(sequences, 1)
    with pytest.raises(ValueError, match="can't keep packed sequences apart without `causal_conv1d`"):
        models.own(packed, **places, use_cache=False)
    logits = models.ours(packed, **places, use_cache=False).logits
    one_by_one = torch.cat([models.own(sequence).logits for sequence in sequences], 1)
    assert relative(logits, one_by_one) < 1e-5
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    both = (logits, models.ours), (one_by_one, models.own)
    pairs = [torch.autograd.grad(y, model.parameters(), cotangent) for y, model in both]
    assert all(relative(gradient, exact) < 1e-4 for gradient, exact in zip(*pairs))


def test_transformers_finds_the_package(library, monkeypatch):
    """Its question also asks for a GPU."""
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    available = import_utils.is_causal_conv1d_available
    for installed in (False, True):
        if installed:
            compat.install()
        available.cache_clear()
        assert available() is installed
        found = import_utils._is_package_available("causal_conv1d", return_version=True)
        assert found == (installed, "1.7.0" if installed else "N/A")
    compat.uninstall()
    available.cache_clear()
