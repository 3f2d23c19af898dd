"""Layers in a row and what connects them: of the model of `training_step`, and of the stacks that `bench` times."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mhc_ops import HyperConnection, HyperStack

from ..core import backend as backends
from . import cases, peers
from .peers import Layer

PLAIN = "plain"


def backend_of(provider: str) -> str:
    """Of ours the backend, without the form that may follow it; of others the name."""
    first, *_ = provider.split()
    return first if first in backends.BACKENDS else provider


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


def connect(
    provider: str,
    layers: Sequence[Layer],
    case: cases.Case,
    device: torch.device,
    norms: Sequence[Tensor] = (),
    recompute: int = 0,
    apart: bool = False,
    shifted: bool = False,
    identity: bool = False,
) -> nn.Module:
    """norms: the weights of those that the layers lack. apart: no HyperStack, but one HyperConnection after the other.
    shifted, identity: of ours. The maps of each layer, and its norm where the case has one, are drawn from its number.
    """
    if provider == PLAIN:
        return nn.Sequential(*map(Residual, layers))
    drawn = [replace(case, outer=(1,), seed=case.seed + i).inputs(device) for i in range(len(layers))]
    peer = peers.by_name(provider)
    if peer is not None:
        return nn.Sequential(*(PeerConnection(peer, layer, of) for layer, of in zip(layers, drawn)))
    for of, norm in zip(drawn, norms):
        of["layer_norm_weight"] = norm
    backend = provider if provider in backends.BACKENDS else "reference"

    def connection(layer: Layer, of: cases.Tensors) -> HyperConnection:
        own: dict[str, Any] = {"layer_norm": "layer_norm_weight" in of, "backend": backend, "device": device}
        if identity:
            own["residual"] = "identity"
        found = HyperConnection(layer, case.n, case.D, **own)
        rows = {name: len(parameter) for name, parameter in found.named_parameters()}  # of phi fewer for the identity
        # x and h_out are not its
        found.load_state_dict({name: t[: rows.get(name)] for name, t in of.items()}, strict=False)
        return found

    connections = map(connection, layers, drawn)
    return nn.Sequential(*connections) if apart else HyperStack(*connections, recompute=recompute, shifted=shifted)


def build(case: cases.Stack, provider: str, depth: int, device: torch.device) -> nn.Module | None:
    """A stack around layers that cost nothing; None where a peer lacks it: its norm would be torch's."""
    layer, peer = case.layer(), peers.by_name(provider)
    form: dict[str, Any] = {
        "shifted": case.subject in cases.SHIFTED,
        "identity": case.subject is cases.MHC_NEXT_IDENTITY,
    }
    only_ours = case.recompute or any(form.values())
    if peer is not None and (only_ours or peer.prepare(layer.subject.name, layer.inputs(device)) is None):
        return None
    return connect(provider, [nn.Identity()] * depth, layer, device, recompute=case.recompute, **form)
