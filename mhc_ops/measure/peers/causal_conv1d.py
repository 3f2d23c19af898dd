"""causal-conv1d, the CUDA package: x is [B, D, L] there; ours transposed is its channel-last layout, without a copy.

It takes widths of 2 to 4, channels in multiples of 8, and a bias in the type of the weight.
"""

from types import ModuleType

from torch import Tensor

from ..cases import Tensors
from .peer import NO_TENSOR_CORES, Peer, Prepared, load_module

_TRAINING, _UPDATE = ("causal_conv1d", "causal_conv1d silu"), ("causal_conv1d_update", "causal_conv1d_update silu")


def _prepare(subject: str, ours: Tensors) -> Prepared | None:
    known = {"x", "weight", "bias"} | ({"conv_state"} if subject in _UPDATE else set())
    if subject not in (*_TRAINING, *_UPDATE) or not known >= set(ours) or not _takes(ours):
        return None
    module = _load()
    activation = "silu" if subject.endswith("silu") else None

    def train(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        return (module.causal_conv1d_fn(x.mT, weight, bias, activation=activation).mT,)

    def update(x: Tensor, weight: Tensor, conv_state: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        steps = x if x.dim() == 2 else x.mT
        y = module.causal_conv1d_update(steps, conv_state, weight, bias, activation)
        return y if x.dim() == 2 else y.mT, conv_state

    tensors = {name: tensor.detach() for name, tensor in ours.items()}
    return Prepared(tensors, update if subject in _UPDATE else train, {name: name for name in ours})


def _takes(ours: Tensors) -> bool:
    D, W = ours["weight"].shape
    return 2 <= W <= 4 and D % 8 == 0 and ("bias" not in ours or ours["bias"].dtype == ours["weight"].dtype)


def _load() -> ModuleType:
    return load_module("causal_conv1d", CAUSAL_CONV1D)


CAUSAL_CONV1D = Peer("causal-conv1d", "causal-conv1d", "sums in fp32", NO_TENSOR_CORES, _load, _prepare)
