"""Small networks of connections for tests: the same each time, and away from the fresh state."""

from collections import OrderedDict

import torch
from mhc_kernels import fp32
from stack_results import exact, gradients, random_cotangents
from torch import nn

from mhc_ops import HyperConnection, HyperHead, HyperStack, ShortConv, mhc_expand

N, D, DEPTH = 3, 20, 3
WORDS, BATCH, LENGTH = 11, 8, 5


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def trained_maps(*modules):
    """Random phi and an alpha of 1, so that every gradient is alive."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in modules:
            module.phi.copy_(torch.randn(module.phi.shape, generator=generator) / module.phi.shape[1] ** 0.5)
            module.alpha.fill_(1.0)
    return modules


def connections(place, depth=DEPTH, layer=MLP, **options):
    """Every other one with a norm and gamma. Two iterations of Sinkhorn make the interpreter quick."""
    backend, device = place
    torch.manual_seed(0)
    iters = {} if options.get("residual") == "identity" else {"sinkhorn_iters": 2}
    own = [{"gamma": i % 2 == 0, "layer_norm": i % 2 == 0} | iters | options for i in range(depth)]
    made = trained_maps(*(HyperConnection(layer(), N, D, backend=backend, **given) for given in own))
    return [connection.to(device) for connection in made]


def streams(place, dtype=fp32, outer=(2, 4)):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*outer, N, D, generator=generator).to(place[1], dtype).requires_grad_()


def step(network, x, *extras):
    """Output, gradient of x, gradients of the parameters."""
    out = network(x, *extras)
    return gradients(out, [x, *(p for p in network.parameters() if p.requires_grad)])


def layers_and_head(place, **options):
    made = connections(place, **options)
    head = trained_maps(HyperHead(N, D, backend=place[0]).to(place[1]))
    return nn.Sequential(*made, *head)


MODELS = {
    "layers": layers_and_head,
    "stack": lambda place, **options: HyperStack(*connections(place, **options)),
    "recompute": lambda place, **options: HyperStack(*connections(place, **options), recompute=2),
    "shifted": lambda place, **options: HyperStack(*connections(place, **options), shifted=True),
}


def unlike_connections(backend="reference", layer=MLP, last=None):
    """No two of these four are alike: the second mixes transposed, the third not at all. last: the fourth's layer"""
    torch.manual_seed(0)
    few = {"sinkhorn_iters": 2, "backend": backend}
    return trained_maps(
        HyperConnection(layer(), N, D, gamma=True, layer_norm=True, **few),
        HyperConnection(layer(), N, D, transposed=True, checkpoint=True, **few),
        HyperConnection(layer(), N, D, residual="identity", backend=backend),
        HyperConnection(last or layer(), N, D, **few),
    )


def one_of_each(backend="reference", recompute=0):
    """Modules by name: a convolution; a stack whose second layer is a function; a connection outside of it; a head."""
    first, third, alone, second = unlike_connections(backend, last=torch.tanh)
    stack = HyperStack(first, second, third, recompute=recompute)
    (head,) = trained_maps(HyperHead(N, D, gamma=True, backend=backend))
    return {"conv": ShortConv(N, D, backend="reference"), "stack": stack, "alone": alone, "head": head}


class Expand(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, h):
        return mhc_expand(h.to(self.dtype), N)


class Logits(nn.Linear):
    def forward(self, h):
        return super().forward(h.to(self.weight.dtype))


def language_model(dtype=fp32, **parts):
    """dtype: of the streams   parts: from the streams to h"""
    torch.manual_seed(1)
    start = {"embedding": nn.Embedding(WORDS, D), "expand": Expand(dtype)}
    return nn.Sequential(OrderedDict(start | parts | {"out": Logits(D, WORDS)}))


def words():
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def of_logits():
    return random_cotangents([torch.empty(BATCH, LENGTH, WORDS)])[0]


def exact_step(model):
    """The logits of a language model whose streams are fp64, and the gradients by name."""
    wide = model.double()
    out, *gradients = exact(wide(words()), list(wide.parameters()))
    return out, dict(zip(dict(wide.named_parameters()), gradients))
