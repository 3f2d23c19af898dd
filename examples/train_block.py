"""Train the maps of one mHC layer: MHCBlock, autograd, an optimizer, a falling loss.

    python examples/train_block.py                  on a GPU if there is one, else on the CPU
    python examples/train_block.py --steps 500 --n 8

The block learns to imitate a teacher, a block with other, larger weights. The loss compares h_in, h_post and h_res of
both.
"""

import argparse
import sys

import torch

from mhc_ops import MHCBlock


def teacher(n: int, D: int, device: str) -> MHCBlock:
    block = MHCBlock(n, D, device=device)
    with torch.no_grad():
        block.alpha.fill_(1.0)
        block.bias.normal_(std=0.5)
    return block.requires_grad_(False)


def distance(outputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return sum((o.float() - t.float()).square().mean() for o, t in zip(outputs, targets))


def train(n: int, D: int, tokens: int, steps: int, device: str, dtype: torch.dtype) -> list[float]:
    torch.manual_seed(0)
    target, block = teacher(n, D, device), MHCBlock(n, D, device=device)
    optimizer = torch.optim.Adam(block.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        x = torch.randn(tokens, n, D, device=device).to(dtype)
        loss = distance(block(x), target(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step:4d}   loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4, help="residual streams")
    parser.add_argument("--D", type=int, default=256, help="channels")
    parser.add_argument("--tokens", type=int, default=512, help="per step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device != "cpu" else torch.float32
    losses = train(options.n, options.D, options.tokens, options.steps, options.device, dtype)
    if losses[-1] > 0.5 * losses[0]:
        print("the loss did not fall by half", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
