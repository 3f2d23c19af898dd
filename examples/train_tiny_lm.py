"""A small character-level transformer on "Pride and Prejudice", once with plain residuals and once with mHC.

    python examples/train_tiny_lm.py                      a few minutes on a CPU
    python examples/train_tiny_lm.py --device cuda
    python examples/train_tiny_lm.py --n 8 --steps 1000 --out streams8.png
    python examples/train_tiny_lm.py --study              plain, HC-like, mHC and mHC shifted, three seeds each
    python examples/train_tiny_lm.py --sweep              mHC: learning rate and weight decay of the maps

Both networks start from the same weights, so that they compute the same at step 0, and see the same batches in the same
order. The script writes the losses and, as ..._health, the `mhc_ops.metrics` of the hyper-connections: as CSV and, if
matplotlib is installed, as pictures.

--study compares networks with equally many parameters, which see the same batches. HC-like is mHC without its
constraint: no Sinkhorn makes h_res doubly stochastic. docs/does_it_help.md says what study and sweep have shown.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from tiny_lm import HEAD_DIM, TinyLM, optimizer_of, read_text, train
from tiny_lm_results import beside, draw, draw_health, pictures, write_curves
from tiny_lm_study import study, sweep

from mhc_ops import metrics
from mhc_ops.measure.report import table

# Where the command line names no size: on a CPU, and what differs on a GPU. The learning rates are the best of 1e-3,
# 3e-3, 6e-3 and 1e-2 for the plain network on a CPU. A study takes a minute or two on two cores. On a GPU it has 48
# sublayers of about 1 ms each (docs/design.md, small models), so about 10 minutes. That time and that learning rate are
# estimates.
SIZES: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "compare": ({"D": 128, "depth": 3, "context": 64, "batch": 16, "steps": 800, "lr": 6e-3}, {"batch": 64}),
    "study": (
        {"D": 32, "depth": 6, "context": 32, "batch": 16, "steps": 120, "lr": 1e-2},
        {"D": 128, "depth": 24, "context": 256, "batch": 64, "steps": 600, "lr": 3e-3},
    ),
    "sweep": (
        {"D": 32, "depth": 3, "context": 32, "batch": 16, "steps": 80, "lr": 1e-2},
        {"D": 128, "depth": 12, "context": 256, "batch": 64, "steps": 400, "lr": 3e-3},
    ),
}


@torch.no_grad()
def sample(model: TinyLM, prompt: list[int], length: int, device: str) -> list[int]:
    ids = torch.tensor([prompt], device=device)
    for _ in range(length):
        probabilities = torch.softmax(model(ids[:, -model.context :])[:, -1].float() / 0.8, -1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)], 1)
    return ids[0].tolist()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group()
    modes.set_defaults(mode="compare")
    for mode, what in (("study", "train four forms"), ("sweep", "train mHC with other rates and decays of the maps")):
        modes.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=what)
    sizes = {
        "D": f"channels, a multiple of {HEAD_DIM}",
        "depth": "blocks of attention and MLP",
        "context": "characters the model sees",
        "batch": "texts per step",
        "steps": "training steps",
        "lr": "the largest learning rate",
    }
    for name, what in sizes.items():
        kind = float if name == "lr" else int
        parser.add_argument(f"--{name}", type=kind, help=f"{what} ({'; '.join(defaults(name))})")
    parser.add_argument("--n", type=int, default=4, help="residual streams of mHC (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the batches (%(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=3, help="of a study or sweep: this many from --seed on (%(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, help="of the layers' products (float32, on a GPU bfloat16)")
    parser.add_argument("--out", type=Path, help="picture (train_tiny_lm.png, ..._study.png); more beside it")
    options = parser.parse_args()
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    on_cpu = torch.device(options.device).type == "cpu"
    for name, size in chosen(options.mode, on_cpu).items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    counts = ("n", "depth", "steps", "context", "batch", "seeds")
    if options.D % HEAD_DIM or options.D < 1 or min(getattr(options, name) for name in counts) < 1:
        names = ", ".join(f"--{name}" for name in counts[:-1])
        parser.error(f"--D must be a multiple of {HEAD_DIM}, and {names} and --{counts[-1]} at least 1")
    options.out = options.out or Path(f"train_tiny_lm{'' if options.mode == 'compare' else '_' + options.mode}.png")
    if options.out.suffix != ".png":
        parser.error(f"--out must end in .png, got {options.out}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.dtype = getattr(torch, options.dtype or ("float32" if on_cpu else "bfloat16"))
    return options


def chosen(mode: str, on_cpu: bool) -> dict[str, float]:
    small, large = SIZES[mode]
    return small if on_cpu else small | large


def defaults(name: str) -> list[str]:
    """The default of an option in each mode, for --help."""
    found = []
    for mode in SIZES:
        small, large = (chosen(mode, on_cpu)[name] for on_cpu in (True, False))
        word = f"{small:g}" if small == large else f"{small:g}, on a GPU {large:g}"
        found.append(word if mode == "compare" else f"--{mode}: {word}")
    return found


def compare(options: argparse.Namespace) -> int:
    """Plain residuals and mHC, from the same weights."""
    alphabet, text = read_text()
    models, runs = [], []
    for name, n, watch in (("plain", 0, None), ("mHC", options.n, metrics)):
        torch.manual_seed(options.seed)
        models.append(TinyLM(len(alphabet), options.context, options.D, options.depth, n).to(options.device))
        runs.append(train(name, models[-1], optimizer_of(models[-1], options.lr), text, options, watch))

    first = [run.curve[0]["val"] for run in runs]
    assert math.isclose(*first, rel_tol=1e-5 if options.dtype == torch.float32 else 2**-8), first
    print(f"step 0: validation loss {first[0]:.6f} plain, {first[1]:.6f} mHC, the same up to rounding\n")

    tokens = options.steps * options.batch * options.context
    rows = []
    for run in runs:
        last, seconds = run.curve[-1], sum(run.seconds)
        cells = (f"{last['train']:.4f}", f"{last['val']:.4f}", f"{seconds:.0f}", f"{tokens / seconds:,.0f}")
        rows.append((run.name, f"{run.parameters:,}", *cells))
    print(table(("network", "parameters", "train loss", "val loss", "seconds", "tokens/s"), rows))

    torch.manual_seed(options.seed)
    ids = sample(models[-1], [alphabet.index(character) for character in "Elizabeth "], 200, options.device)
    print("\nA sample of the mHC network:\n" + "".join(alphabet[index] for index in ids) + "\n")

    plain, mhc = runs
    health = beside(options.out, ".png")
    write_curves(plain, mhc, options.out)
    drawn = {options.out: lambda path: draw(plain, mhc, path), health: lambda path: draw_health(mhc, path)}
    pictures(drawn, options.out.with_suffix(".csv"), beside(options.out, ".csv"))
    return 0


def main() -> int:
    options = parse()
    return {"compare": compare, "study": study, "sweep": sweep}[options.mode](options)


if __name__ == "__main__":
    sys.exit(main())
