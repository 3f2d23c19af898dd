"""The operators of other libraries on our tensors, to be timed beside ours.

Each peer runs the way its own modules run it, with our options: 20 Sinkhorn iterations, post_mult 2, every eps 1e-6.
"""

from .causal_conv1d import CAUSAL_CONV1D
from .fla import FLA
from .liger import LIGER
from .peer import WITH_GRADIENTS, Peer, Prepared, measure, version, why_not
from .tile_kernels import TILE_KERNELS

PEERS: tuple[Peer, ...] = (LIGER, TILE_KERNELS, FLA, CAUSAL_CONV1D)


def by_name(name: str) -> Peer | None:
    return next((peer for peer in PEERS if peer.name == name), None)


__all__ = [
    "CAUSAL_CONV1D",
    "FLA",
    "LIGER",
    "PEERS",
    "TILE_KERNELS",
    "WITH_GRADIENTS",
    "Peer",
    "Prepared",
    "by_name",
    "measure",
    "version",
    "why_not",
]
