"""What `train_tiny_lm.py --study` and `--sweep` train: four forms of residuals, and the learning rate of the maps."""

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import repeat
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from tiny_lm import BETAS, DECAY, Run, TinyLM, loss_of, optimizer_of, parameters_of, read_text, train
from tiny_lm_results import FORMS, draw_study, draw_sweep, pictures, write_rows
from torch import Tensor, nn

from mhc_ops import HyperConnection, HyperStack, metrics, mhc_maps, mhc_post, mhc_pre, parameter_groups
from mhc_ops.measure.report import table

STUDIED = ("form", "seed", "step", "val", "train", "gradient", "activation", "gain_forward", "gain_backward")


# The forms.


class Unconstrained(HyperConnection):
    """A hyper-connection without the constraint: h_res is its logits, and no Sinkhorn norms its rows and columns.

    Fresh, h_res is the identity. h_pre and h_post are as in mHC, so that h_res alone differs.
    """

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.bias[2 * self.n :] = torch.eye(self.n).flatten()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        maps = (self.phi, self.alpha, self.bias)
        h_in, h_post, h_res = mhc_pre(x, *maps, layer_norm_weight=self.layer_norm_weight, residual="logits")
        return mhc_post(x, self.layer(h_in), h_post, h_res)


def network(form: str, vocabulary: int, options: argparse.Namespace, hidden: int | None = None) -> TinyLM:
    torch.manual_seed(options.seed)
    n, D = options.n, options.D
    model = TinyLM(vocabulary, options.context, D, options.depth, 0 if form == "plain" else n, hidden)
    if form == "mHC shifted":  # the stack itself contracts the streams
        model.layers, model.head = HyperStack(*model.layers, shifted=True), nn.Identity()
    if form == "HC-like":
        layers = (connection.layer for connection in model.layers)
        model.layers = nn.Sequential(*(Unconstrained(layer, n, D, layer_norm=True) for layer in layers))
    return model.to(options.device)


def equal_width(form: str, vocabulary: int, options: argparse.Namespace) -> int:
    """The width inside the MLPs, a multiple of 8, with which a form has as many parameters as mHC with 4 D."""
    target = parameters_of(network("mHC", vocabulary, options))
    least, next_one = (parameters_of(network(form, vocabulary, options, hidden)) for hidden in (8, 16))
    return 8 + 8 * round((target - least) / (next_one - least))


# What is measured.


class Watched:
    """What a training step shows.

    activation: the largest |x| before a sublayer or before the last norm
    gain_forward, gain_backward: as `mhc_ops.metrics` has them
    """

    def __init__(self) -> None:
        self.largest: list[Tensor] = []
        self.product: Tensor | None = None  # of all h_resᵀ, where they are not constrained
        self.health: Any = None

    def see(self, sublayer: nn.Module, inputs: Any, result: Any = None) -> None:
        x = (inputs[0] if isinstance(inputs[0], Tensor) else result.x).detach()
        self.largest.append(x.abs().amax())
        if isinstance(sublayer, Unconstrained):
            with torch.no_grad():
                maps = mhc_maps(x, sublayer.phi, sublayer.alpha, sublayer.bias, residual="logits")
            self.multiply(maps[2].mT)

    def multiply(self, mix: Tensor) -> None:
        """By hand: autocast would round the factors of @."""
        product = self.product
        self.product = mix if product is None else (mix[..., None] * product[..., None, :, :]).sum(-2)

    def result(self) -> dict[str, float]:
        found = {"activation": torch.stack(self.largest).amax().item()}
        if self.health is not None:
            return found | {name: value for name, value in self.health.result().items() if name.startswith("gain_")}
        if self.product is None:
            return found | {"gain_forward": 1.0, "gain_backward": 1.0}
        forward, backward = (self.product.abs().sum(dim).amax(-1).mean().item() for dim in (-1, -2))
        return found | {"gain_forward": forward, "gain_backward": backward}


@contextmanager
def watched(model: nn.Module) -> Iterator[Watched]:
    assert isinstance(model, TinyLM)
    found = Watched()
    with ExitStack() as hooks:
        for sublayer in model.layers:
            hooks.enter_context(sublayer.register_forward_hook(found.see))
        hooks.enter_context(model.norm.register_forward_pre_hook(found.see))
        if isinstance(model.layers, HyperStack):
            found.health = hooks.enter_context(metrics(model))
        yield found


def memory_of(model: TinyLM, options: argparse.Namespace) -> int:
    """Bytes. On a GPU: the peak of a forward and backward, without the model. On a CPU: what the backward needs."""
    batch = torch.zeros(options.batch, options.context + 1, dtype=torch.long, device=options.device)
    if batch.is_cuda:
        for _ in range(2):  # the first allocates workspaces that stay
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss_of(model, batch, options).backward()
            model.zero_grad()
        return torch.cuda.max_memory_allocated() - before
    kept = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _loss = loss_of(model, batch, options)  # lives, so that no storage is used twice
    return sum(kept.values())


# The study.


class Trained(NamedTuple):
    form: str
    seed: int
    run: Run
    memory: int

    def rows(self) -> list[dict[str, Any]]:
        """The points of the curve with what was seen in the step that follows each but the last."""
        seen = {point["step"]: point for point in self.run.health}
        return [{"form": self.form, "seed": self.seed, **p, **seen.get(p["step"], {})} for p in self.run.curve]


def with_seed(options: argparse.Namespace, seed: int) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), "seed": seed})


def study(options: argparse.Namespace) -> int:
    alphabet, text = read_text()
    done = []
    for seed in range(options.seed, options.seed + options.seeds):
        own = with_seed(options, seed)
        for form in FORMS:
            model = network(form, len(alphabet), own, equal_width(form, len(alphabet), own))
            memory = memory_of(model, own)
            run = train(f"{form}, seed {seed}", model, optimizer_of(model, own.lr), text, own, watched)
            done.append(Trained(form, seed, run, memory))
    summary = [summarise([trained for trained in done if trained.form == form]) for form in FORMS]
    print(table(tuple(summary[0]), [[cell(value) for value in each.values()] for each in summary]))
    rows = [row for trained in done for row in trained.rows()]
    write_rows(rows, list(STUDIED), options.out.with_suffix(".csv"))
    made_with = {name: str(value) for name, value in vars(options).items()} | {"torch": torch.__version__}
    options.out.with_suffix(".json").write_text(json.dumps({"options": made_with, "forms": summary}, indent=1) + "\n")
    pictures({options.out: lambda path: draw_study(rows, path)}, options.out.with_suffix(".csv"))
    return 0


def summarise(runs: list[Trained]) -> dict[str, Any]:
    """One form over its seeds."""
    last = [trained.run.curve[-1] for trained in runs]
    points = [point for trained in runs for point in trained.run.curve[1:]]
    health = [point for trained in runs for point in trained.run.health]
    val = [point["val"] for point in last]
    return {
        "form": runs[0].form,
        "parameters": runs[0].run.parameters,
        "val loss": mean(val),
        "least": min(val),
        "most": max(val),
        "best val": mean(min(point["val"] for point in trained.run.curve) for trained in runs),
        "train loss": mean(point["train"] for point in last),
        "largest gain": max(max(point["gain_forward"], point["gain_backward"]) for point in health),
        "gradient": max(point["gradient"] for point in points),
        "activation": max(point["activation"] for point in health),
        "ms per step": 1e3 * median(second for trained in runs for second in trained.run.seconds),
        "MB": runs[0].memory / 1e6,
    }


def cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else value if isinstance(value, str) else f"{value:.4g}"


# The sweep.


class Setting(NamedTuple):
    """rate: of the maps, in the learning rate of the other parameters. decay: of all maps, or of those named."""

    rate: float = 1.0
    decay: float = 0.0
    decayed: str = "all"

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        *others, maps = parameter_groups(model, lr=lr, weight_decay=DECAY, maps={"lr": self.rate * lr})
        names = {id(p): name.rpartition(".")[2] for name, p in model.named_parameters()}
        groups: tuple[list[Tensor], list[Tensor]] = ([], [])
        for p in maps["params"]:
            groups[self.decayed == "all" or names[id(p)] in self.decayed.split()].append(p)
        split = [
            {**maps, "params": params, "weight_decay": d} for params, d in zip(groups, (0.0, self.decay)) if params
        ]
        return torch.optim.AdamW([*others, *split], betas=BETAS)


SETTINGS = (
    *(Setting(rate=rate) for rate in (0.1, 0.3, 1.0, 3.0)),
    *(Setting(decay=decay) for decay in (0.1, 1.0, 10.0)),
    *(Setting(decay=10.0, decayed=name) for name in ("phi alpha bias", "phi", "alpha", "bias", "layer_norm_weight")),
)


def sweep(options: argparse.Namespace) -> int:
    alphabet, text = read_text()
    rows = []
    for seed in range(options.seed, options.seed + options.seeds):
        own = with_seed(options, seed)
        for setting in SETTINGS:
            model = network("mHC", len(alphabet), own)
            optimizer = setting.optimizer(model, own.lr)
            run = train(f"{setting}, seed {seed}", model, optimizer, text, own, evaluations=1)
            rows.append({**setting._asdict(), "seed": seed, "val": run.curve[-1]["val"]})
    print(table(("lr of the maps", "decay", "of", "val loss", "least", "most"), map(swept, SETTINGS, repeat(rows))))
    write_rows(rows, list(rows[0]), options.out.with_suffix(".csv"))
    pictures({options.out: lambda path: draw_sweep(rows, path)}, options.out.with_suffix(".csv"))
    return 0


def swept(setting: Setting, rows: list[dict[str, Any]]) -> list[str]:
    val = [row["val"] for row in rows if setting == tuple(row[name] for name in Setting._fields)]
    return [f"×{setting.rate:g}", f"{setting.decay:g}", setting.decayed, *(f"{f(val):.3f}" for f in (mean, min, max))]
