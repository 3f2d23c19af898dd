"""The hyper-connections of transformers' models are those of `mhc_pre` and `mhc_post` with the right options.

Decoder layers of transformers run with two small sublayers in the place of attention and experts, so that the way in
which a layer writes its output back is transformers' own.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from mhc_ops import mhc_head, mhc_maps, mhc_mean, mhc_post, mhc_pre, mhc_read
from mhc_ops.testing import accuracy

N, D = 4, 24
# Large, so that one that is left out shows.
SIZES = {"hidden_size": D, "hc_mult": N, "hc_eps": 0.02, "rms_norm_eps": 0.1}


class Model(NamedTuple):
    config: Any
    layer: type  # of the decoder
    connection: type
    head: nn.Module  # the mean, where it has no parameters
    attention: int  # how much it returns
    options: dict[str, Any]


# They import when they are called: that takes seconds, which only the process that runs these tests should spend.


def deepseek_v4():
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    config = DeepseekV4Config(**SIZES, hc_sinkhorn_iters=3)
    head, options = theirs.DeepseekV4HyperHead(config), deepseek_options(config)
    return Model(config, theirs.DeepseekV4DecoderLayer, theirs.DeepseekV4HyperConnection, head, 2, options)


def glm5_next():
    from transformers import Glm5NextTextConfig
    from transformers.models.glm5_next import modeling_glm5_next as theirs

    config = Glm5NextTextConfig(**SIZES, hc_sinkhorn_iters=3)
    head, options = theirs.Glm5NextTextHyperHead(), deepseek_options(config)
    return Model(config, theirs.Glm5NextTextDecoderLayer, theirs.Glm5NextTextHyperConnection, head, 3, options)


def hy_v4():
    from transformers import HYV4Config
    from transformers.models.hy_v4 import modeling_hy_v4 as theirs

    config = HYV4Config(**SIZES, hc_magnitude=1.7)
    head, options = theirs.HYV4HyperHead(config), hy_options(config)
    return Model(config, theirs.HYV4DecoderLayer, theirs.HYV4HyperConnection, head, 3, options)


def deepseek_options(config):
    iters, eps = config.hc_sinkhorn_iters, config.hc_eps
    return {"norm_eps": config.rms_norm_eps, "hc_eps": eps, "sinkhorn_eps": eps, "sinkhorn_iters": iters}


def hy_options(config):
    options = {"norm_eps": config.rms_norm_eps, "hc_eps": config.hc_eps, "post_eps": config.hc_eps}
    return {**options, "post_mult": config.hc_magnitude, "residual": "identity"}


@pytest.fixture(params=[deepseek_v4, glm5_next, hy_v4])
def model(request):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'mhc-ops[adopt]'")
    if not hasattr(transformers, "HYV4Config"):
        pytest.skip(f"transformers {transformers.__version__} has neither GLM-5.3 nor Hy4: 5.18 and newer do")
    return request.param()


class Sublayer(nn.Module):
    """In the place of attention, which returns more than its output, and of the experts."""

    def __init__(self, *further):
        super().__init__()
        self.linear, self.further = nn.Linear(D, D), further

    def forward(self, hidden_states, **_):
        out = torch.tanh(self.linear(hidden_states))
        return (out, *self.further) if self.further else out


def decoder_layer(model):
    """transformers' own, with random weights, without what its constructor would build of attention and experts."""
    torch.manual_seed(0)
    layer = model.layer.__new__(model.layer)
    nn.Module.__init__(layer)
    layer.block_type = "full_attention"
    layer.self_attn = Sublayer(*[None] * (model.attention - 1))
    layer.mlp = Sublayer()
    layer.input_layernorm, layer.post_attention_layernorm = nn.RMSNorm(D), nn.RMSNorm(D)
    layer.attn_hc, layer.ffn_hc = model.connection(model.config), model.connection(model.config)
    layer.head = model.head
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "hc" in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 1.0)
    return layer


def streams():
    return torch.randn(2, 5, N, D, generator=torch.Generator().manual_seed(1)).requires_grad_()


def parameters_of(connection):
    return connection.fn, connection.scale, connection.base


def theirs(layer, x):
    out = layer(x)
    return layer.head(out[0] if isinstance(out, tuple) else out)


def ours(layer, x, options):
    for connection, norm, sublayer in (
        (layer.attn_hc, layer.input_layernorm, layer.self_attn),
        (layer.ffn_hc, layer.post_attention_layernorm, layer.mlp),
    ):
        h_in, h_post, h_res = mhc_pre(x, *parameters_of(connection), **options)
        h_out = sublayer(norm(h_in))
        x = mhc_post(x, h_out[0] if isinstance(h_out, tuple) else h_out, h_post, h_res)
    if not list(layer.head.parameters()):
        return mhc_mean(x)
    head, eps = layer.head, {name: options[name] for name in ("norm_eps", "hc_eps")}
    return mhc_head(x, head.hc_fn, head.hc_scale, head.hc_base, **eps)


def assert_same(ours, theirs, leaves):
    """Outputs, and gradients of all leaves for random cotangents."""
    torch.manual_seed(2)
    cotangents = [torch.randn_like(output) for output in theirs]
    results = [
        [*outputs, *torch.autograd.grad(outputs, leaves, cotangents, materialize_grads=True)]
        for outputs in (ours, theirs)
    ]
    assert all(accuracy.close(one, other.double()) for one, other in zip(*results, strict=True))


def test_the_maps(model):
    connection, x = decoder_layer(model).attn_hc, streams()
    h_pre, *maps = mhc_maps(x, *parameters_of(connection), **model.options)
    *expected, h_in = connection(x)
    found = [h for h in maps if h is not None]
    assert len(found) == len(expected) == (1 if "residual" in model.options else 2)
    leaves = [x, *connection.parameters()]
    assert_same([*found, mhc_read(x, h_pre)], [*expected, h_in], leaves)


def test_a_decoder_layer(model):
    """With the head of the model behind it."""
    layer, x = decoder_layer(model), streams()
    assert_same([ours(layer, x, model.options)], [theirs(layer, x)], [x, *layer.parameters()])
