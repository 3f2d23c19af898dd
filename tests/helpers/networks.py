"""Small networks of connections for tests: the same each time, and away from the fresh state."""

import torch
from mhc_kernels import fp32
from stack_results import gradients
from torch import nn

from mhc_ops import HyperConnection, HyperHead, HyperStack

N, D, DEPTH = 3, 20, 3


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
