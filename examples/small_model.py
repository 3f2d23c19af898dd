"""Train a small model with hyper-connections in the mode that its size needs: eager, compiled, or as CUDA graphs.

    python examples/small_model.py --mode graphs      the model by torch.cuda.make_graphed_callables
    python examples/small_model.py --mode step        forward, backward and optimizer as one graph
    python examples/small_model.py --mode reduce-overhead | compile | eager

CUDA graphs need a GPU. On a CPU the modes that use them say so and run eagerly. docs/small_models.md says which mode
serves which size.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mhc_ops import HyperConnection, HyperHead, HyperStack, mhc_expand

MODES = ("eager", "compile", "reduce-overhead", "graphs", "step")
GRAPHS = ("reduce-overhead", "graphs", "step")


class Model(nn.Module):
    def __init__(self, n: int, D: int, depth: int):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(depth))
        self.n, self.stack = n, HyperStack(*(HyperConnection(layer, n, D, layer_norm=True) for layer in layers))
        self.head = HyperHead(n, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stack(mhc_expand(x, self.n)))


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step as one graph. It runs a few times first, on a stream of its own: kernels are compiled, gradients and the
    optimizer's state allocated."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def train(mode: str, n: int, D: int, depth: int, tokens: int, steps: int, lr: float, device: str) -> list[float]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Model(n, D, depth).to(device, dtype)
    x, y = torch.randn(tokens, D, device=device, dtype=dtype), torch.randn(tokens, D, device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, capturable=mode == "step")
    network: Callable[[Tensor], Tensor] = model
    if mode == "graphs":
        network = torch.cuda.make_graphed_callables(model, (x.clone(),))
    elif mode in ("compile", "reduce-overhead"):
        network = torch.compile(model, mode=None if mode == "compile" else mode)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=mode != "step")  # a graph adds to the same gradients in every replay
        loss = (network(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = captured(step) if mode == "step" else step
    losses, begin = [], time.perf_counter()
    for number in range(steps):
        losses.append(run().item())
        if number % max(1, steps // 5) == 0 or number == steps - 1:
            print(f"step {number:4d}   loss {losses[-1]:.4f}", flush=True)
    print(f"{(time.perf_counter() - begin) / steps * 1e3:.2f} ms for a step, the first ones included")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="graphs")
    parser.add_argument("--n", type=int, default=4, help="residual streams")
    parser.add_argument("--D", type=int, default=768, help="channels")
    parser.add_argument("--depth", type=int, default=12, help="sublayers")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = vars(parser.parse_args())
    if options["mode"] in GRAPHS and options["device"] == "cpu":
        print(f"--mode {options['mode']} uses CUDA graphs, which need a GPU: this run is eager, on the CPU")
        options["mode"] = "eager"
    train(**options)


if __name__ == "__main__":
    main()
