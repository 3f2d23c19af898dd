"""A small character-level transformer on "Pride and Prejudice", once with plain residuals and once with mHC.

    python examples/train_tiny_lm.py                      a few minutes on a CPU
    python examples/train_tiny_lm.py --device cuda
    python examples/train_tiny_lm.py --n 8 --steps 1000 --out streams8.png

Both networks start from the same weights, so that they compute the same at step 0, and see the same batches in the same
order. The script writes the losses and, as ..._health, the `mhc_ops.metrics` of the hyper-connections: as CSV and, if
matplotlib is installed, as pictures.
"""

import argparse
import csv
import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_ops import HyperConnection, HyperHead, HyperStack, metrics, mhc_expand
from mhc_ops.measure.report import progress, table

TEXT = Path(__file__).parent / "data" / "pride_and_prejudice.txt"
EVALUATIONS = 40  # points of a curve
HEAD_DIM = 32


def read_text() -> tuple[list[str], Tensor]:
    """The alphabet in order, and the text as indices into it."""
    letters, text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).unique(return_inverse=True)
    return [chr(letter) for letter in letters], text


# The model. The two sublayers are the same in both networks: [B, S, D] -> [B, S, D], each after an RMSNorm.


class Attention(nn.Module):
    def __init__(self, D: int):
        super().__init__()
        self.heads = max(1, D // HEAD_DIM)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class MLP(nn.Sequential):
    def __init__(self, D: int):
        super().__init__(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))


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
    """n = 0: plain residuals. Otherwise mHC with n residual streams. Three lines depend on n."""

    def __init__(self, vocabulary: int, context: int, D: int, depth: int, n: int):
        super().__init__()
        self.n, self.context = n, context
        self.characters, self.positions = nn.Embedding(vocabulary, D), nn.Embedding(context, D)
        layers: list[nn.Module] = [layer for _ in range(depth) for layer in (Attention(D), MLP(D))]
        self.norm, self.logits = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, vocabulary)
        # Last, so that everything above has drawn the same random weights in both networks.
        self.layers = connect(layers, n, D)
        self.head = HyperHead(n, D) if n else nn.Identity()

    def start(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.positions.weight[: ids.shape[-1]]
        return mhc_expand(x, self.n) if self.n else x

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.norm(self.head(self.layers(self.start(ids)))))


# Training.


@dataclass
class Run:
    name: str
    parameters: int
    curve: list[dict[str, float]] = field(default_factory=list)  # step, val, train
    health: list[dict[str, float]] = field(default_factory=list)  # step, metrics of mHC
    seconds: float = 0.0  # in training steps, without evaluations

    def __str__(self) -> str:
        """The losses so far, for the progress bar."""
        return "  ".join(f"{key} {value:.4g}" for key, value in self.curve[-1].items())


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW; weight decay for matrices, but not for phi, alpha and bias of the hyper-connections."""
    hyper = [module for module in model.modules() if isinstance(module, HyperConnection | HyperHead)]
    kept = {id(p) for module in hyper for p in module.parameters(recurse=False)}
    groups: tuple[list[Tensor], list[Tensor]] = ([], [])
    for p in model.parameters():
        groups[p.dim() >= 2 and id(p) not in kept].append(p)
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1], "weight_decay": 0.1}], lr, betas=(0.9, 0.99)
    )


def learning_rate(step: int, steps: int) -> float:
    """A share of the largest rate: up over the first twentieth, then half a cosine down to a tenth."""
    warmup = steps / 20
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train(name: str, n: int, text: Tensor, vocabulary: int, options: argparse.Namespace) -> tuple[TinyLM, Run]:
    device, context, steps = options.device, options.context, options.steps
    torch.manual_seed(options.seed)
    model = TinyLM(vocabulary, context, options.D, options.depth, n).to(device)
    optimizer = optimizer_of(model, options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    order = torch.Generator().manual_seed(options.seed)
    run = Run(name, sum(p.numel() for p in model.parameters()))

    known, held_out = text.split([len(text) * 9 // 10, len(text) - len(text) * 9 // 10])
    windows = held_out.unfold(0, context + 1, 1)  # every window of the held-out text
    validation = windows[torch.linspace(0, len(windows) - 1, 64).long()].to(device)

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast(torch.device(device).type, options.dtype, enabled=options.dtype != torch.float32):
            return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(step: int, losses: list[float]) -> None:
        point = {"step": step, "val": loss_of(validation).item()}
        if losses:
            point["train"] = sum(losses) / len(losses)
        run.curve.append(point)

    evaluate(0, [])
    every = max(1, steps // EVALUATIONS)
    spans = [range(begin, min(begin + every, steps)) for begin in range(0, steps, every)]
    for _, span in zip(progress([run] * len(spans), f"{name:5}"), spans):  # the bar shows the run's losses
        clock, losses = time.perf_counter(), []
        for step in span:
            starts = torch.randint(len(known) - context, (options.batch, 1), generator=order)
            optimizer.zero_grad()
            with metrics(model) if n and step == span.start else nullcontext() as health:
                loss = loss_of(known[starts + torch.arange(context + 1)].to(device))
                loss.backward()
            if health is not None:
                run.health.append({"step": step, **health.result()})
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        run.seconds += time.perf_counter() - clock
        evaluate(span.stop, losses)
    return model, run


@torch.no_grad()
def sample(model: TinyLM, prompt: list[int], length: int, device: str) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    for _ in range(length):
        probabilities = torch.softmax(model(ids[:, -model.context :])[:, -1].float() / 0.8, -1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)], 1)
    return ids[0].tolist()


# The results.


# The colour-blind can tell orange and blue apart; the wide line shows under the narrow one.
ORANGE, BLUE = {"color": "#E69F00", "linewidth": 3}, {"color": "#0072B2", "linewidth": 1.4}
# Panels: title, and the metrics of each connection in it; the first is a line, others are dotted.
HEALTH = {
    "rows and (dotted) columns of h_res: |sum − 1|": ("h_res_row_error", "h_res_column_error"),
    "entropy of h_res": ("h_res_entropy",),
    "largest entry of h_res": ("h_res_max",),
    "h_pre: mean and (dotted) range": ("h_pre_mean", "h_pre_min", "h_pre_max"),
    "h_post: mean and (dotted) range": ("h_post_mean", "h_post_min", "h_post_max"),
    "logits of h_res beyond ±6: share": ("saturated_res",),
    "gradient of phi: norm": ("dphi_norm",),
}
LOGARITHMIC = ("h_res_row_error", "dphi_norm")


def beside(path: Path, suffix: str) -> Path:
    """The path of the health file."""
    return path.with_name(f"{path.stem}_health{suffix}")


def write_curves(plain: Run, mhc: Run, path: Path) -> None:
    losses = [{"network": run.name, **point} for run in (plain, mhc) for point in run.curve]
    write_rows(losses, ["network", "step", "train", "val"], path.with_suffix(".csv"))
    write_rows(mhc.health, list(mhc.health[0]), beside(path, ".csv"))


def write_rows(points: list[Any], columns: list[str], path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, columns)
        rows.writeheader()
        rows.writerows(points)


def line(axes: Any, points: list[dict[str, float]], key: str, style: str, **look: Any) -> None:
    axes.plot(*zip(*((point["step"], point[key]) for point in points if key in point)), style, **look)


def finish(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
        axes.set(xlabel="step", xlim=(0, None))
    figure.savefig(path)


def draw(plain: Run, mhc: Run, path: Path) -> None:
    from matplotlib.figure import Figure  # not a dependency of the package

    figure = Figure((6, 3.7), dpi=200, layout="constrained")
    axes = figure.subplots()
    for run, look in ((plain, ORANGE), (mhc, BLUE)):
        for key, word, style in (("val", "validation", "-"), ("train", "training", ":")):
            line(axes, run.curve, key, style, label=f"{run.name}, {word}: {run.curve[-1][key]:.3f}", **look)
    first, last = plain.curve[0]["val"], plain.curve[-1]["val"]
    axes.set(title="Loss in nats per character", ylim=(None, last + 0.45 * (first - last)))
    axes.legend(frameon=False, title=f"both start at {first:.3f}", alignment="left")
    finish(figure, path)


def draw_health(run: Run, path: Path) -> None:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure((14, 6), dpi=90, layout="constrained")
    gains, *panels = figure.subplots(2, 4).flat
    for key, look in (("gain_forward", ORANGE), ("gain_backward", BLUE)):
        line(gains, run.health, key, "-", label=key.replace("_", ", "), **look)
    gains.set(title="all h_resᵀ together: gain")
    gains.legend(frameon=False)
    names = [key.partition("/")[0] for key in run.health[0] if key.endswith("/h_pre_mean")]
    for axes, (title, (first, *dotted)) in zip(panels, HEALTH.items(), strict=True):
        for number, name in enumerate(names):
            look = {"color": colormaps["viridis"](number / len(names))}
            line(axes, run.health, f"{name}/{first}", "-", label=name, linewidth=1.4, **look)
            for metric in dotted:
                line(axes, run.health, f"{name}/{metric}", ":", linewidth=0.9, **look)
        axes.set(title=title, yscale="log" if first in LOGARITHMIC else "linear")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False)
    finish(figure, path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4, help="residual streams of mHC (%(default)s)")
    parser.add_argument("--D", type=int, default=128, help=f"channels, a multiple of {HEAD_DIM} (%(default)s)")
    parser.add_argument("--depth", type=int, default=3, help="blocks of attention and MLP (%(default)s)")
    parser.add_argument("--context", type=int, default=64, help="characters the model sees (%(default)s)")
    parser.add_argument("--batch", type=int, help="texts per step (16, on a GPU 64)")
    parser.add_argument("--steps", type=int, default=800, help="(%(default)s)")
    # The best of 1e-3, 3e-3, 6e-3 and 1e-2 for the plain network; both use it.
    parser.add_argument("--lr", type=float, default=6e-3, help="the largest learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches (%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, help="of the layers' products (float32, on a GPU bfloat16)")
    parser.add_argument(
        "--out", type=Path, default=Path("train_tiny_lm.png"), help="picture (%(default)s); more beside it"
    )
    options = parser.parse_args()
    if options.D % HEAD_DIM or min(options.D, options.n, options.depth, options.steps, options.context) < 1:
        parser.error(f"--D must be a multiple of {HEAD_DIM}, and --n, --depth, --steps and --context at least 1")
    if options.out.suffix != ".png":
        parser.error(f"--out must end in .png, got {options.out}")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    on_cpu = torch.device(options.device).type == "cpu"
    options.batch = options.batch or (16 if on_cpu else 64)
    options.dtype = getattr(torch, options.dtype or ("float32" if on_cpu else "bfloat16"))
    return options


def main() -> int:
    options = parse()
    alphabet, text = read_text()
    _, plain = train("plain", 0, text, len(alphabet), options)
    model, mhc = train("mHC", options.n, text, len(alphabet), options)

    first = [run.curve[0]["val"] for run in (plain, mhc)]
    assert math.isclose(*first, rel_tol=1e-5 if options.dtype == torch.float32 else 2**-8), first
    print(f"step 0: validation loss {first[0]:.6f} plain, {first[1]:.6f} mHC, the same up to rounding\n")

    tokens = options.steps * options.batch * options.context
    rows = []
    for run in (plain, mhc):
        last = run.curve[-1]
        speed = tokens / run.seconds
        cells = (f"{last['train']:.4f}", f"{last['val']:.4f}", f"{run.seconds:.0f}", f"{speed:,.0f}")
        rows.append((run.name, f"{run.parameters:,}", *cells))
    print(table(("network", "parameters", "train loss", "val loss", "seconds", "tokens/s"), rows))

    torch.manual_seed(options.seed)
    ids = sample(model, [alphabet.index(character) for character in "Elizabeth "], 200, options.device)
    print("\nA sample of the mHC network:\n" + "".join(alphabet[index] for index in ids) + "\n")

    write_curves(plain, mhc, options.out)
    print(f"curves:  {options.out.with_suffix('.csv')}, {beside(options.out, '.csv')}")
    try:
        draw(plain, mhc, options.out)
        draw_health(mhc, beside(options.out, ".png"))
    except ImportError:
        print("picture: none; `pip install matplotlib` draws it")
    else:
        print(f"picture: {options.out}, {beside(options.out, '.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
