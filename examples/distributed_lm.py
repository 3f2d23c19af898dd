"""The texts and the model of train_distributed.py, in pieces among processes."""

import argparse
import random
from collections import OrderedDict
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from train_tiny_lm import HEAD_DIM, MLP, connect

from mhc_ops import HyperHead, causal_conv1d, distributed, mhc_expand
from mhc_ops.distributed import shard_sequence
from mhc_ops.measure.report import Refused

WIDTH = 4  # taps of the convolution


# The data: windows of the text, each once in every pass, in an order that does not depend on how many processes take
# them.


class Windows:
    """The texts of all processes together. The text is cut into windows of `length` characters and the one behind."""

    def __init__(self, text: Tensor, length: int, seed: int):
        self.windows = text[: (len(text) - 1) // length * length + 1].unfold(0, length + 1, length)
        self.seed, self.position = seed, 0  # how many windows were taken

    def take(self, count: int) -> Tensor:
        """The next [count, length + 1]."""
        places = [divmod(self.position + index, len(self.windows)) for index in range(count)]
        self.position += count
        return self.windows[torch.tensor([order(len(self.windows), self.seed, nth)[place] for nth, place in places])]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "length": self.windows.shape[1] - 1, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Elsewhere in another order the position would have no meaning."""
        for name in ("seed", "length"):
            if state[name] != self.state_dict()[name]:
                raise Refused(f"--{name} is {self.state_dict()[name]}, but the run to go on with has {state[name]}")
        self.position = state["position"]


@lru_cache(maxsize=2)
def order(count: int, seed: int, nth_pass: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed(seed, nth_pass))).tolist()


def mixed(*numbers: int) -> int:
    """A seed out of several numbers."""
    return random.Random(str(numbers)).getrandbits(63)


# The model. Each process has a piece of every text; of the others only the two mixers of tokens know.


class Pieces:
    """Of a sequence among the processes of a mesh of one dimension. Tokens are numbered from its begin."""

    def __init__(self, mesh: DeviceMesh, layout: str, length: int, device: torch.device):
        self.mesh, self.layout = mesh, layout
        self.here = shard_sequence(torch.arange(length, device=device), group=mesh, layout=layout, dim=0)
        self.everywhere = self.gathered(self.here, dim=0)

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of all processes, one process behind the other; their gradients go back as sums."""
        return DTensor.from_local(x, self.mesh, [Shard(dim)]).full_tensor(grad_placements=[Partial()])


class Convolution(nn.Module):
    def __init__(self, D: int, pieces: Pieces):
        super().__init__()
        self.pieces, self.out = pieces, nn.Linear(D, D)
        self.weight = nn.Parameter(torch.empty(D, WIDTH).uniform_(-(WIDTH**-0.5), WIDTH**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        pieces = {"group": self.pieces.mesh, "layout": self.pieces.layout}
        convolve = partial(distributed.causal_conv1d, **pieces) if self.pieces.mesh.size() > 1 else causal_conv1d
        return self.out(convolve(x, self.weight, activation="silu"))


class Attention(nn.Module):
    """Queries of the tokens here, keys and values of all that lie before them, gathered from the group."""

    def __init__(self, D: int, pieces: Pieces):
        super().__init__()
        self.pieces, self.heads = pieces, D // HEAD_DIM
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.q(x), *self.pieces.gathered(self.kv(x), dim=1).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        before = self.pieces.here[:, None] >= self.pieces.everywhere
        return self.out(F.scaled_dot_product_attention(q, k, v, before).transpose(1, 2).flatten(-2))


class Start(nn.Module):
    def __init__(self, vocabulary: int, length: int, D: int, n: int, pieces: Pieces):
        super().__init__()
        self.n, self.pieces = n, pieces
        self.characters, self.positions = nn.Embedding(vocabulary, D), nn.Embedding(length, D)

    def forward(self, ids: Tensor) -> Tensor:
        return mhc_expand(self.characters(ids) + self.positions(self.pieces.here), self.n)


def model_of(vocabulary: int, options: argparse.Namespace, pieces: Pieces) -> nn.Sequential:
    n, D = options.n, options.D
    mlps = (nn.Sequential(MLP(D), nn.Dropout(options.dropout)) for _ in range(options.depth))
    layers = [layer for mlp in mlps for layer in (Convolution(D, pieces), Attention(D, pieces), mlp)]
    parts = {"start": Start(vocabulary, options.length, D, n, pieces), "layers": connect(layers, n, D)}
    ends = {"head": HyperHead(n, D), "norm": nn.RMSNorm(D, eps=1e-6), "logits": nn.Linear(D, vocabulary)}
    return nn.Sequential(OrderedDict(**parts, **ends))
