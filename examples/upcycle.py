"""Train a small GPT with plain residuals, give it n residual streams, and go on training.

    python examples/upcycle.py              a few seconds on a CPU
    python examples/upcycle.py --n 8 --steps 500

`mhc_ops.convert.upcycle` moves the plain checkpoint into the same model with hyper-connections. The script prints the
logits and the loss before and after, in fp32 and bf16, and trains both models further on the same batches.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_ops import HyperConnection, HyperHead, HyperStack, convert, mhc_expand
from mhc_ops.measure.report import table

TEXT = Path(__file__).parent / "data" / "pride_and_prejudice.txt"
D, DEPTH, HEADS, CONTEXT, BATCH = 64, 2, 2, 32, 16
EPS = 1e-6  # of the norms: that of layer_norm=True


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))


class Block(nn.Module):
    """Two sublayers with plain residuals"""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(D, eps=EPS), Attention()
        self.norm2, self.mlp = nn.RMSNorm(D, eps=EPS), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(vocabulary, D), nn.Embedding(CONTEXT, D)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.logits = nn.RMSNorm(D, eps=EPS), nn.Linear(D, vocabulary)

    def residual(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.positions.weight[: ids.shape[-1]]
        return self.logits(self.norm(self.residual(x)))


class HyperGPT(GPT):
    """The same with n streams: the sublayers are in one stack, and their norms in the connections."""

    def __init__(self, vocabulary: int, n: int) -> None:
        super().__init__(vocabulary)
        del self.blocks
        layers = [layer for _ in range(DEPTH) for layer in (Attention(), mlp())]
        self.n, self.stack = n, HyperStack(*(HyperConnection(layer, n, D, layer_norm=True) for layer in layers))
        self.head = HyperHead(n, D)

    def residual(self, x: Tensor) -> Tensor:
        return self.head(self.stack(mhc_expand(x, self.n)))


NAMES = {  # where tensors of GPT are in HyperGPT; those of the same name need none
    "blocks.{i}.norm1.weight": "stack.{2i}.layer_norm_weight",
    "blocks.{i}.attn": "stack.{2i}",
    "blocks.{i}.norm2.weight": "stack.{2i+1}.layer_norm_weight",
    "blocks.{i}.mlp": "stack.{2i+1}",
}


def loss_of(model: GPT, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def train(model: GPT, text: Tensor, steps: int, seed: int) -> None:
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=order)
        optimizer.zero_grad()
        loss_of(model, text[starts + torch.arange(CONTEXT + 1)]).backward()
        optimizer.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4, help="residual streams (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="before upcycling, and after it (%(default)s)")
    options = parser.parse_args()
    letters, text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).unique(return_inverse=True)
    known, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    batch = held_out[: 64 * (CONTEXT + 1)].view(64, -1)

    torch.manual_seed(0)
    plain = GPT(len(letters))
    train(plain, known, options.steps, seed=0)

    model = HyperGPT(len(letters), options.n)
    model.load_state_dict(convert.upcycle(plain.state_dict(), model.state_dict(), NAMES))
    with torch.no_grad():
        before, after = (each(batch[:, :-1]) for each in (plain, model))
        narrow = [copy.deepcopy(each).bfloat16()(batch[:, :-1]).float() for each in (plain, model)]
        losses = [loss_of(each, batch).item() for each in (plain, model)]
    logits = [" ".join(f"{logit:9.6f}" for logit in each[0, 0, :3].tolist()) for each in (before, after)]
    errors = [f"{(each - before).abs().max():.1e}" for each in narrow]
    heads = ("", f"loss, {options.steps} steps", "three logits", "bf16: largest error of a logit")
    rows = zip(("plain", f"{options.n} streams"), (f"{loss:.6f}" for loss in losses), logits, errors)
    print(table(heads, list(rows)))
    print(f"fp32: logits up to {before.abs().max():.1f} differ by at most {(after - before).abs().max():.1e}\n")

    for each in (plain, model):
        train(each, known, options.steps, seed=1)
    with torch.no_grad():
        further = [loss_of(each, batch).item() for each in (plain, model)]
    print(f"loss after {options.steps} steps more: plain {further[0]:.4f}, {options.n} streams {further[1]:.4f}")
    if abs(losses[1] - losses[0]) > 1e-5 * losses[0] or max(further) > losses[0]:
        print("the losses are not the same after upcycling, or did not fall after it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
