"""Tiny random models of transformers that have hyper-connections, and what a model computes."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from compat_oracle import distance

from mhc_ops.core.backend import too_old

ROOT = Path(__file__).parents[2]
(FLOOR,) = re.findall(r"transformers>=([\d.]+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
KINDS = ["deepseek_v4", "glm5_next", "hy_v4"]
LOGITS, GRADIENTS = 1e-5, 1e-4  # fp32: relative to the norm of what transformers computes

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "initializer_range": 0.2}
SIZES |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
# No two constants alike, and none so small that it would not show.
STREAMS = {"hc_mult": 3, "hc_eps": 0.02, "rms_norm_eps": 0.01, "num_attention_heads": 2, "q_lora_rank": 16}
STREAMS |= {"moe_intermediate_size": 16, "n_routed_experts": 3, "num_experts_per_tok": 3}
STREAMS |= SIZES | {"index_n_heads": 2, "index_head_dim": 16}
LATENT = {"num_key_value_heads": 2, "intermediate_size": 32, "kv_lora_rank": 16, "v_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 16, "index_topk": 8}


def deepseek_v4(transformers):
    layers = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    attention = {"head_dim": 16, "o_groups": 2, "o_lora_rank": 8, "sliding_window": 8, "index_topk": 2}
    own = {"layer_types": layers, "mlp_layer_types": ["hash_moe", "moe", "moe"], "hc_sinkhorn_iters": 3}
    return transformers.DeepseekV4ForCausalLM, transformers.DeepseekV4Config(**STREAMS, **attention, **own)


def glm5_next(transformers):
    if too_old("transformers", version := transformers.__version__, tuple(map(int, FLOOR.split(".")))):
        pytest.skip(f"transformers {version} has other layers of GLM than what mhc-ops[adopt] asks for")
    own = {"layer_types": ["linear_attention", "indexed_attention", "indexed_attention"], "hc_sinkhorn_iters": 3}
    own |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full", "full", "shared"]}
    own |= {"index_kpool": 4, "linear_head_dim": 8, "linear_num_heads": 2}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    vision |= {"projection_intermediate_size": 16}
    config = transformers.Glm5NextConfig(text_config={**STREAMS, **LATENT, **own}, vision_config=vision)
    return transformers.Glm5NextForConditionalGeneration, config


def hy_v4(transformers):
    own = {"qk_rope_head_dim": 8, "hc_magnitude": 1.5}
    return transformers.HYV4ForCausalLM, transformers.HYV4Config(**STREAMS, **LATENT, **own)


def build(kind, seed=0):
    """A model in which no parameter is 0 or 1, and the norms have an eps of their own."""
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'mhc-ops[adopt]'")
    if not find_spec(f"transformers.models.{kind}"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(seed)
    constructor, config = globals()[kind](transformers)
    config._attn_implementation = "eager"  # the others return no attentions
    model = no_zeros_or_ones(constructor(config))
    for module in model.modules():
        if hasattr(module, "tid2eid"):
            module.tid2eid.copy_(torch.arange(3).expand_as(module.tid2eid))
    return with_eps(model)


@torch.no_grad()
def no_zeros_or_ones(model):
    """The model, with biases and norms that are not those of a fresh one."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def with_eps(model):
    for name, module in model.named_modules():
        if name.endswith(("input_layernorm", "post_attention_layernorm")):
            module.variance_epsilon = 0.05
    return model.eval()


class Built:
    def __init__(self, kind, folder):
        self.kind, self.model, self.folder = kind, build(kind), folder
        self.ids = torch.randint(3, 64, (2, 24))
        self.eager = results(self.model, self.ids)
        self.model.save_pretrained(folder)

    def text_layers(self):
        return [module for name, module in self.model.named_modules() if re.search(r"layers\.\d+$", name)]

    def load(self, **options):
        return with_eps(type(self.model).from_pretrained(self.folder, attn_implementation="eager", **options))


def results(model, ids):
    """Logits, and all gradients of the loss."""
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return out.logits.detach(), gradients


def assert_same_results(found, expected, new=()):
    """new: the names of further gradients that are found"""
    (logits, gradients), (expected_logits, expected_gradients) = found, expected
    assert distance(logits, expected_logits) < LOGITS
    assert gradients.keys() == expected_gradients.keys() | set(new)
    pairs = {name: (gradients[name], exact) for name, exact in expected_gradients.items()}
    off = {name: distance(*pair) for name, pair in pairs.items() if not torch.equal(*pair)}  # both may be 0
    assert {name: value for name, value in off.items() if not value < GRADIENTS} == {}
