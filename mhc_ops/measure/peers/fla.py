"""flash-linear-attention: causal_conv1d on the same tensors; weights of any type."""

from types import ModuleType

from torch import Tensor

from ..cases import Tensors
from .peer import NO_TENSOR_CORES, Peer, Prepared, load_module


def _prepare(subject: str, ours: Tensors) -> Prepared | None:
    if subject not in ("causal_conv1d", "causal_conv1d silu") or not {"x", "weight", "bias"} >= set(ours):
        return None
    conv = _load().causal_conv1d
    activation = "silu" if subject.endswith("silu") else None

    def call(**tensors: Tensor) -> tuple[Tensor, ...]:
        return (conv(**tensors, activation=activation)[0],)

    return Prepared({name: tensor.detach() for name, tensor in ours.items()}, call, {name: name for name in ours})


def _load() -> ModuleType:
    return load_module("fla.modules.causal_conv1d", FLA)


FLA = Peer("fla", "flash-linear-attention", "sums in fp32", NO_TENSOR_CORES, _load, _prepare)
