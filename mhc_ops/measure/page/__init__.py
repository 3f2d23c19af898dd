"""One page of results that needs nothing beside itself: no network, no script. Drawn from the JSON file alone."""

from html import escape
from pathlib import Path

from .. import files
from ..results import Results
from . import bars, lines, sections
from .markup import slug, swatch
from .model import Model
from .style import STYLE, provider_rules

CLOSE = "The speed of a copy that moves the same bytes is the dashed line. Longer is faster."
HOW_TO_READ = (
    "A bar is the median time on the device. Its solid part, up to the dashed line, is what a copy takes that moves "
    "the bytes the op must move, measured in the same run: no kernel that moves them can end before it. Each group of "
    "bars has its own scale, and a bar with a gap near its end is longer than is drawn: six times the floor. The error "
    "is the largest relative error against fp64. Hold the pointer over a bar for bandwidth, spread and host time; use "
    "the names above to hide a provider."
)


def write(results: Results, path: Path) -> None:
    files.write(path, draw(results))


def draw(results: Results) -> str:
    model = Model(results)
    device = results.versions.get("device", "unknown device")
    title = f"mhc_ops on {device}"
    training, decode = model.shown("training"), model.shown("decode")
    parts: list[tuple[str, str]] = []
    if training:
        parts.append(("How close to a copy", f"<p class=note>{CLOSE}</p>{bars.overview(model)}"))
    if model.subjects():
        parts.append(("Time", f"<p class=note>{HOW_TO_READ}</p>" + "".join(_op(model, s) for s in model.subjects())))
        parts.append(("Speed-up", sections.speed_up(model, [*training, *decode])))
    if results.scaling:
        parts.append(("How time grows", lines.section(model)))
    if model.subjects():
        parts.append(("Memory", sections.memory(model, [*training, *decode])))
    if results.accuracy:
        parts.append(("Accuracy", sections.accuracy(model)))
    parts.append(("Not measured", sections.left_out(model)))
    parts.append(("Environment", sections.environment(model)))
    nav = "".join(f'<a href="#{slug(name)}">{name}</a>' for name, _ in parts)
    body = "".join(f'<section id="{slug(name)}"><h2>{name}</h2>{content}</section>' for name, content in parts)
    versions = ", ".join(f"{n} {results.versions[n]}" for n in ("torch", "triton") if n in results.versions)
    partial = "" if results.complete else " <b class=bad>not complete</b>"
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1"><link rel=icon href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}{provider_rules(model.providers)}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{escape(results.date)} · {escape(versions)}{partial}</p>"
        f"{bars.tiles(model)}</header><nav>{nav}</nav>{_legend(model)}<main>{body}</main></body></html>\n"
    )


def _op(model: Model, subject: str) -> str:
    large, small = ([c for c in model.shown(group) if c.subject == subject] for group in ("training", "decode"))
    content = bars.cards(model, large) if large else ""
    if small:
        words = f"{len(small)} small size{'s' * (len(small) > 1)}, where launches are all there is to see"
        content += f"<details><summary>{words}</summary>{bars.cards(model, small)}</details>"
    return f'<section id="{slug(subject)}"><h3>{escape(subject)}</h3>{content}</section>'


def _legend(model: Model) -> str:
    chips = "".join(
        f'<label class=chip><input type=checkbox checked id="show-{slug(p)}">{swatch(p)}</label>'
        for p in model.providers
    )
    return f"<div class=legend>{chips}</div>" if len(model.providers) > 1 else ""
