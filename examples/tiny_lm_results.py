"""The files that train_tiny_lm.py writes: curves as CSV and, if matplotlib is installed, pictures."""

import csv
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from tiny_lm import Run

# The colour-blind can tell orange and blue apart; the wide line shows under the narrow one.
ORANGE, BLUE = {"color": "#E69F00", "linewidth": 3}, {"color": "#0072B2", "linewidth": 1.4}
FORMS = {
    "plain": ORANGE,
    "HC-like": {"color": "#D55E00", "linewidth": 1.4},
    "mHC": {"color": "#56B4E9", "linewidth": 3},
    "mHC shifted": BLUE,
}
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
STUDY = {
    "val": "validation loss in nats per character",
    "train": "training loss in nats per character",
    "gradient": "largest norm of the gradients",
    "gain_forward": "all residual maps together: gain, forward",
    "gain_backward": "all residual maps together: gain, backward",
    "activation": "largest |x|",
}


def beside(path: Path, suffix: str) -> Path:
    """The path of the health file."""
    return path.with_name(f"{path.stem}_health{suffix}")


def write_curves(plain: Run, mhc: Run, path: Path) -> None:
    losses = [{"network": run.name, **point} for run in (plain, mhc) for point in run.curve]
    write_rows(losses, ["network", "step", "train", "val", "gradient"], path.with_suffix(".csv"))
    write_rows(mhc.health, list(mhc.health[0]), beside(path, ".csv"))


def write_rows(points: list[Any], columns: list[str], path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.DictWriter(file, columns)
        rows.writeheader()
        rows.writerows(points)


def pictures(drawn: dict[Path, Callable[[Path], None]], *curves: Path) -> None:
    """Draws them, and says which files there are."""
    print("curves:  " + ", ".join(map(str, curves)))
    try:
        for path, draw in drawn.items():
            draw(path)
    except ImportError:
        print("picture: none; `pip install matplotlib` draws it")
    else:
        print("picture: " + ", ".join(map(str, drawn)))


def line(axes: Any, points: list[dict[str, float]], key: str, style: str, **look: Any) -> None:
    axes.plot(*zip(*((point["step"], point[key]) for point in points if key in point)), style, **look)


def finish(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92")
        if not axes.get_xlabel():
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


def draw_study(rows: list[dict[str, Any]], path: Path) -> None:
    """The mean over the seeds, and from the least to the most."""
    from matplotlib.figure import Figure

    figure = Figure((12, 6.4), dpi=110, layout="constrained")
    for axes, (key, title) in zip(figure.subplots(2, 3).flat, STUDY.items(), strict=True):
        points = [row for row in rows if key in row]
        for form, look in FORMS.items():
            band(axes, [row for row in points if row["form"] == form], "step", key, label=form, **look)
        axes.set(title=title, yscale="linear" if key in ("val", "train") else "log")
        if key in ("val", "train"):
            first, last = points[0][key], points[-1][key]
            axes.set_ylim(None, last + 0.45 * (first - last))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(FORMS), frameon=False)
    finish(figure, path)


def draw_sweep(rows: list[dict[str, Any]], path: Path) -> None:
    """The mean over the seeds, and from the least to the most."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3.7), dpi=130, layout="constrained")
    rates, decays = figure.subplots(1, 2, sharey=True)
    band(rates, [row for row in rows if not row["decay"]], "rate", "val", marker="o", **BLUE)
    rates.set(xscale="log", xlabel="learning rate of the maps / of other parameters", ylabel="validation loss")
    wide = {"color": ORANGE["color"], "linewidth": 8, "alpha": 0.4, "solid_capstyle": "butt"}
    at_one = [row for row in rows if row["rate"] == 1]
    for decay, decayed in dict.fromkeys((row["decay"], row["decayed"]) for row in at_one):
        values = [row["val"] for row in at_one if (row["decay"], row["decayed"]) == (decay, decayed)]
        label = f"{decay:g}\n" + decayed.replace(" ", "\n").replace("_", "\n")
        decays.plot([label] * 2, [min(values), max(values)], **wide)
        decays.plot([label], [mean(values)], color=ORANGE["color"], marker="o")
    decays.set(xlabel="weight decay, and the maps that it shrinks")
    decays.tick_params(axis="x", labelsize=8)
    finish(figure, path)


def band(axes: Any, points: list[dict[str, Any]], x: str, y: str, **look: Any) -> None:
    """A line through the means, and a band from the least to the most."""
    places = sorted({point[x] for point in points})
    values = [[point[y] for point in points if point[x] == place] for place in places]
    axes.plot(places, list(map(mean, values)), **look)
    axes.fill_between(
        places, list(map(min, values)), list(map(max, values)), color=look["color"], alpha=0.2, linewidth=0
    )
