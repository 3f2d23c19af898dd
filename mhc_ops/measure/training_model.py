"""The small transformer of which `training_step` times a training step, with what connects its layers to choose.

Attention and SwiGLU in turn, each behind an RMSNorm, in bf16. The models of a size share their layers; the maps of all
hyper-connections hold the same numbers.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_ops import HyperConnection

from ..core import backend as backends
from . import cases, peers
from .peers import Layer

N = 4
HEAD = 128  # channels of a head of attention
LONGEST = 4096  # tokens of a sequence
DTYPE = torch.bfloat16
PLAIN = "plain"
# Its pre finds the gradient of the streams in an attribute of their storage, which a trace does not see: only the
# layers between its operators are compiled.
UNTRACED = ("TileKernels",)


@dataclass(frozen=True)
class Size:
    tokens: int
    D: int
    sublayers: int
    F: int

    def __str__(self) -> str:
        return f"training_step {self.tokens}x{N}x{self.D} F={self.F} {self.sublayers} sublayers"

    def case(self, sublayer: int = 0, tokens: int = 1) -> cases.Case:
        """What the maps of a sublayer are drawn from."""
        return cases.Case(cases.MHC_LAYER, (tokens,), N, self.D, DTYPE, gamma=False, seed=cases.SEED + sublayer)


class Attention(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.length, self.norm = min(size.tokens, LONGEST), nn.RMSNorm(size.D, eps=1e-6)
        self.qkv, self.out = (nn.Linear(size.D, wide * size.D, bias=False) for wide in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(-1, self.length, 3, x.shape[-1] // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


class SwiGLU(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm, self.down = nn.RMSNorm(size.D, eps=1e-6), nn.Linear(size.F, size.D, bias=False)
        self.up = nn.Linear(size.D, 2 * size.F, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Residual(nn.Module):
    def __init__(self, layer: Layer):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class PeerConnection(nn.Module):
    """A peer's mhc_layer around a layer, with maps of its own that hold ours."""

    def __init__(self, peer: peers.Peer, layer: Layer, ours: cases.Tensors):
        super().__init__()
        prepared = peer.prepare("mhc_layer", ours)
        assert prepared is not None, f"{peer.name} has no mhc_layer, but was planned"
        self.layer, self.call = layer, prepared.call
        self.outer = (1,) * (prepared.tensors["x"].dim() - ours["x"].dim())  # what it wants before the tokens
        maps = {name: nn.Parameter(t) for name, t in prepared.tensors.items() if name not in ("x", "h_out")}
        self.maps = nn.ParameterDict(maps)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x=x.view(*self.outer, *x.shape), h_out=self.layer, **self.maps)[0]


def _connection(provider: str, layer: Layer, case: cases.Case, device: torch.device) -> nn.Module:
    if provider == PLAIN:
        return Residual(layer)
    tensors, peer = case.inputs(device), peers.by_name(provider)
    if peer is not None:
        return PeerConnection(peer, layer, tensors)
    backend = provider if provider in backends.BACKENDS else "reference"
    connection = HyperConnection(layer, case.n, case.D, backend=backend, device=device)
    with torch.no_grad():
        for name in ("phi", "alpha", "bias"):
            connection.get_parameter(name).copy_(tensors[name])
    return connection


class Model(nn.Module):
    """The mean square of what comes out, for x [T, D]. Streams begin as copies of x and end as their mean, in plain
    torch whoever connects the layers."""

    def __init__(self, connections: Sequence[nn.Module], streams: bool):
        super().__init__()
        self.connections, self.streams = nn.ModuleList(connections), streams

    def forward(self, x: Tensor) -> Tensor:
        if self.streams:
            x = x.unsqueeze(1).expand(-1, N, -1).contiguous()
        for connection in self.connections:
            x = connection(x)
        return (x.mean(1) if self.streams else x).float().square().mean()


TakeStep = Callable[[], tuple[Tensor, Tensor]]  # the loss and dx


class Training:
    """Steps of the models of one size, which share their layers and x."""

    def __init__(self, size: Size, device: torch.device):
        torch.manual_seed(cases.SEED)
        self.size, self.device = size, device
        with torch.device(device):
            self.layers = [(Attention, SwiGLU)[i % 2](size).to(DTYPE) for i in range(size.sublayers)]
            self.x = torch.randn(size.tokens, size.D).to(DTYPE).requires_grad_()

    def step(self, provider: str, compiled: bool = False) -> TakeStep:
        compiles: Callable[[Any], Any] = partial(torch.compile, dynamic=False) if compiled else lambda module: module
        layers = [compiles(layer) for layer in self.layers] if provider in UNTRACED else self.layers
        connected = [_connection(provider, layer, self.size.case(i), self.device) for i, layer in enumerate(layers)]
        model = Model(connected, provider != PLAIN)
        loss_of, wanted = model if provider in UNTRACED else compiles(model), [self.x, *model.parameters()]

        def step() -> tuple[Tensor, Tensor]:
            loss = loss_of(self.x)
            return loss.detach(), torch.autograd.grad(loss, wanted)[0]

        return step

    def microseconds(self, step: TakeStep) -> float:
        """From an idle device to an idle device, after a step of the same kind: the clocks of a GPU depend on the
        power that the work before it took."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        step()
        wait()
        begin = time.perf_counter()
        step()
        wait()
        return (time.perf_counter() - begin) * 1e6
