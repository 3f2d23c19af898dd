"""The text, the model and the training of train_tiny_lm.py."""

import argparse
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_ops import HyperConnection, HyperHead, HyperStack, mhc_expand, parameter_groups
from mhc_ops.measure.report import progress

TEXT = Path(__file__).parent / "data" / "pride_and_prejudice.txt"
HEAD_DIM = 32
DECAY, BETAS = 0.1, (0.9, 0.99)  # of AdamW


def read_text() -> tuple[list[str], Tensor]:
    """The alphabet in order, and the text as indices into it."""
    letters, text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).unique(return_inverse=True)
    return [chr(letter) for letter in letters], text


# The model. The two sublayers are the same in all networks: [B, S, D] -> [B, S, D], each after an RMSNorm.


class Attention(nn.Module):
    def __init__(self, D: int):
        super().__init__()
        self.heads = max(1, D // HEAD_DIM)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class MLP(nn.Sequential):
    def __init__(self, D: int, hidden: int | None = None):
        hidden = hidden or 4 * D
        super().__init__(nn.Linear(D, hidden), nn.GELU(), nn.Linear(hidden, D))


class Residual(nn.Module):
    def __init__(self, layer: nn.Module, D: int):
        super().__init__()
        self.layer, self.norm = layer, nn.RMSNorm(D, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))


def connect(layers: list[nn.Module], n: int, D: int) -> nn.Sequential:
    """A HyperConnection includes the norm, which costs no pass of its own."""
    if n:
        return HyperStack(*(HyperConnection(layer, n, D, layer_norm=True) for layer in layers))
    return nn.Sequential(*(Residual(layer, D) for layer in layers))


class TinyLM(nn.Module):
    """n = 0: plain residuals. Otherwise mHC with n residual streams. Three lines depend on n.

    hidden: the width inside the MLPs, 4 D unless given
    """

    def __init__(self, vocabulary: int, context: int, D: int, depth: int, n: int, hidden: int | None = None):
        super().__init__()
        self.n, self.context = n, context
        self.characters, self.positions = nn.Embedding(vocabulary, D), nn.Embedding(context, D)
        layers: list[nn.Module] = [layer for _ in range(depth) for layer in (Attention(D), MLP(D, hidden))]
        self.norm, self.logits = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, vocabulary)
        # Last, so that everything above has drawn the same random weights in both networks.
        self.layers = connect(layers, n, D)
        self.head = HyperHead(n, D) if n else nn.Identity()

    def start(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.positions.weight[: ids.shape[-1]]
        return mhc_expand(x, self.n) if self.n else x

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.norm(self.head(self.layers(self.start(ids)))))


def parameters_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Training.


@dataclass
class Run:
    name: str
    parameters: int
    curve: list[dict[str, float]] = field(default_factory=list)  # step, val; train, gradient of the steps before it
    health: list[dict[str, float]] = field(default_factory=list)  # step, what `watch` found in that step
    seconds: list[float] = field(default_factory=list)  # of each training step

    def __str__(self) -> str:
        """The losses so far, for the progress bar."""
        return "  ".join(f"{key} {value:.4g}" for key, value in self.curve[-1].items())


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW; weight decay for matrices, but not for phi, alpha and bias of the hyper-connections."""
    return torch.optim.AdamW(parameter_groups(model, lr=lr, weight_decay=DECAY), betas=BETAS)


def learning_rate(step: int, steps: int) -> float:
    """A share of the largest rate: up over the first twentieth, then half a cosine down to a tenth."""
    warmup = steps / 20
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def loss_of(model: nn.Module, batch: Tensor, options: argparse.Namespace) -> Tensor:
    with torch.autocast(batch.device.type, options.dtype, enabled=options.dtype != torch.float32):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def train(
    name: str,
    model: TinyLM,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    options: argparse.Namespace,
    watch: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
    evaluations: int = 40,
) -> Run:
    """Runs with one seed see the same batches. The first step after each evaluation runs within watch(model)."""
    device, context, steps = options.device, options.context, options.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    order = torch.Generator().manual_seed(options.seed)
    run = Run(name, parameters_of(model))

    known, held_out = text.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])
    windows = held_out.unfold(0, context + 1, 1)  # every window of the held-out text
    validation = windows[torch.linspace(0, len(windows) - 1, 64).long()].to(device)

    @torch.no_grad()
    def evaluate(step: int, **found: float) -> None:
        run.curve.append({"step": step, "val": loss_of(model, validation, options).item(), **found})

    evaluate(0)
    every = max(1, steps // evaluations)
    spans = [range(begin, min(begin + every, steps)) for begin in range(0, steps, every)]
    for _, span in zip(progress([run] * len(spans), f"{name:5}"), spans):  # the bar shows the run's losses
        losses, norms = [], []
        for step in span:
            clock = time.perf_counter()
            starts = torch.randint(len(known) - context, (options.batch, 1), generator=order)
            optimizer.zero_grad()
            with watch(model) if watch and step == span.start else nullcontext() as health:
                loss = loss_of(model, known[starts + torch.arange(context + 1)].to(device), options)
                loss.backward()
            if health is not None:
                run.health.append({"step": step, **health.result()})
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            norms.append(norm.item())
            run.seconds.append(time.perf_counter() - clock)
        evaluate(span.stop, train=sum(losses) / len(losses), gradient=max(norms))
    return run
