"""What hyper-connections cost where they are used: a training step of a small transformer, beside plain residuals.

Every provider has the same layers with the same weights in bf16, attention and SwiGLU in turn, each behind an RMSNorm;
only what connects them differs. A step is a forward and a backward with all gradients; an optimiser, which would add
the same to each, is left out. Its time is the wall clock's, host included, with the device idle before and after, and
the median over rounds in which the providers take turns.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from html import escape

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_ops import HyperConnection

from ..core import backend as backends
from . import cases, peers, providers
from .peers.peer import Layer
from .speed import FEWEST_SAMPLES, SAMPLES, peak_memory

N = 4
HEAD = 128  # channels of a head of attention
LONGEST = 4096  # tokens of a sequence
DTYPE = torch.bfloat16
ALLOWED = 5e-2  # of the relative difference to the reference: bf16 leaves 1e-2 of it, a wrong term far more
PLAIN = "plain"
# Its pre finds the gradient of the streams in an attribute of their storage, which a trace does not see: only the
# layers between its operators are compiled.
UNTRACED = ("TileKernels",)


@dataclass(frozen=True)
class Size:
    tokens: int
    D: int
    sublayers: int
    F: int

    def __str__(self) -> str:
        return f"training_step {self.tokens}x{N}x{self.D} F={self.F} {self.sublayers} sublayers"

    def case(self, sublayer: int = 0, tokens: int = 1) -> cases.Case:
        """What a sublayer's maps are drawn from."""
        return cases.Case(cases.MHC_LAYER, (tokens,), N, self.D, DTYPE, gamma=False, seed=cases.SEED + sublayer)


SIZES = (Size(8192, 4096, 6, 11008), Size(4096, 2560, 8, 6912))
SIZES_CPU = (Size(64, 128, 2, 256),)


@dataclass(frozen=True)
class Step:
    """One provider at one size. compiled: the model under torch.compile, and so the plain one it is compared with."""

    size: str
    provider: str
    compiled: bool
    milliseconds: float
    spread: float | None = None  # interquartile range of the samples, ms
    samples: int | None = None
    overhead_percent: float | None = None  # over plain residuals, in the same rounds
    peak_megabytes: float | None = None  # above weights and input
    difference: float | None = None  # relative, to the reference: of the loss or of dx, whichever is larger


@dataclass(frozen=True)
class Race:
    """Providers that take turns at one size."""

    size: Size
    compiled: bool
    providers: tuple[str, ...]

    @property
    def case(self) -> str:
        return f"{'torch.compile ' * self.compiled}{self.size}"

    @property
    def provider(self) -> str:
        return ", ".join(self.providers)

    def __str__(self) -> str:
        return f"{self.case}: {self.provider}"

    def without(self, skip: Sequence[str]) -> "Race":
        return replace(self, providers=tuple(p for p in self.providers if not self._has(p, skip)))

    def only(self, skip: Sequence[str]) -> "Race":
        return replace(self, providers=tuple(p for p in self.providers if self._has(p, skip)))

    def _has(self, provider: str, texts: Sequence[str]) -> bool:
        return any(text in f"{'torch.compile ' * self.compiled}{provider} {self.size}" for text in texts)


def named(case: str, device: torch.device) -> list[Size]:
    return [size for size in (SIZES if device.type == "cuda" else SIZES_CPU) if case in str(size)]


def plan(device: torch.device, present: Sequence[str], case: str = "") -> list[Race]:
    """present: of bench's providers. The formula in torch is "eager" or, where the model is compiled, "torch.compile",
    which stands for the mode too: without it nothing is compiled."""
    races = []
    for size in named(case, device):
        connected = [p for p in present if _has_connection(p, size, device)]
        for compiled in (False, True)[: 1 + ("torch.compile" in present)]:
            formula = "torch.compile" if compiled else "eager"
            found = [*connected, *(p for p in present if p == formula)]
            if found:
                races.append(Race(size, compiled, (PLAIN, *found)))
    return races


def _has_connection(provider: str, size: Size, device: torch.device) -> bool:
    peer = peers.by_name(provider)
    if peer is not None:
        return peer.prepare("mhc_layer", size.case().inputs()) is not None
    return provider in backends.BACKENDS and backends.why_not("mhc", provider, device) is None


class Attention(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.length = min(size.tokens, LONGEST)
        self.norm, self.qkv = nn.RMSNorm(size.D, eps=1e-6), nn.Linear(size.D, 3 * size.D, bias=False)
        self.out = nn.Linear(size.D, size.D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(-1, self.length, 3, x.shape[-1] // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


class SwiGLU(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm, self.up = nn.RMSNorm(size.D, eps=1e-6), nn.Linear(size.D, 2 * size.F, bias=False)
        self.down = nn.Linear(size.F, size.D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Residual(nn.Module):
    def __init__(self, layer: Layer):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class PeerConnection(nn.Module):
    """A peer's mhc_layer around a layer, on its own copy of the maps."""

    def __init__(self, peer: peers.Peer, layer: Layer, tensors: cases.Tensors):
        super().__init__()
        prepared = peer.prepare("mhc_layer", tensors)
        assert prepared is not None, f"{peer.name} was planned without a connection"
        theirs = {ours: name for name, ours in prepared.same.items()}
        self.layer, self.call, self.streams, self.h_out = layer, prepared.call, theirs["x"], theirs["h_out"]
        self.outer = prepared.tensors[self.streams].dim() - tensors["x"].dim()  # what it wants before the tokens
        maps = {name: t for name, t in prepared.tensors.items() if name not in prepared.same}
        self.maps = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in maps.items()})

    def forward(self, x: Tensor) -> Tensor:
        streams = x.view(*(1,) * self.outer, *x.shape)
        return self.call(**{self.streams: streams, self.h_out: self.layer}, **self.maps)[0]


def _connect(provider: str, layer: Layer, case: cases.Case, device: torch.device) -> nn.Module:
    if provider == PLAIN:
        return Residual(layer)
    tensors, peer = case.inputs(device), peers.by_name(provider)
    if peer is not None:
        return PeerConnection(peer, layer, tensors)
    backend = provider if provider in backends.BACKENDS else "reference"
    connection = HyperConnection(layer, case.n, case.D, backend=backend, device=device)
    with torch.no_grad():
        for name in ("phi", "alpha", "bias"):
            connection.get_parameter(name).copy_(tensors[name])
    return connection


class Model(nn.Module):
    """The mean square of what comes out, of x [T, D]. Streams begin as copies of x and end as their mean, in plain
    torch for every provider."""

    def __init__(self, provider: str, size: Size, layers: Sequence[Layer], device: torch.device):
        super().__init__()
        self.streams = provider != PLAIN
        connections = (_connect(provider, layer, size.case(i), device) for i, layer in enumerate(layers))
        self.connections = nn.ModuleList(connections)

    def forward(self, x: Tensor) -> Tensor:
        if self.streams:
            x = x.unsqueeze(1).expand(-1, N, -1).contiguous()
        for connection in self.connections:
            x = connection(x)
        return (x.mean(1) if self.streams else x).float().square().mean()


class Training:
    """Steps of the models of one size, which share their layers and x."""

    def __init__(self, size: Size, device: torch.device):
        torch.manual_seed(cases.SEED)
        self.size, self.device = size, device
        kinds = (Attention, SwiGLU)
        with torch.device(device):
            self.layers = [kinds[i % len(kinds)](size).to(DTYPE) for i in range(size.sublayers)]
            self.x = torch.randn(size.tokens, size.D).to(DTYPE).requires_grad_()

    def step(self, provider: str, compiled: bool) -> Callable[[], tuple[Tensor, Tensor]]:
        """Of a call: the loss and dx; the gradients of the parameters are gone when it returns."""
        untraced = compiled and provider in UNTRACED
        layers = [torch.compile(layer, dynamic=False) for layer in self.layers] if untraced else self.layers
        model = Model(provider, self.size, layers, self.device)
        loss_of = torch.compile(model, dynamic=False) if compiled and not untraced else model

        def step() -> tuple[Tensor, Tensor]:
            loss = loss_of(self.x)
            loss.backward()
            dx, self.x.grad = self.x.grad, None
            model.zero_grad()
            assert dx is not None
            return loss.detach(), dx

        return step

    def milliseconds(self, step: Callable[[], object]) -> float:
        self._wait()
        begin = time.perf_counter()
        step()
        self._wait()
        return (time.perf_counter() - begin) * 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(
    race: Race, device: torch.device, until: float, failures_of: Callable[[str, str], AbstractContextManager[None]]
) -> Iterator[Step]:
    """failures_of(where, provider): notes what a provider raises. until: from then on few rounds do."""
    torch.compiler.reset()
    training = Training(race.size, device)
    expected = training.step("eager", compiled=False)()
    steps, differences, peaks = {}, {}, {}
    for provider in race.providers:
        with failures_of(race.case, provider):
            step = training.step(provider, race.compiled)
            if provider != PLAIN:
                layer = race.size.case(tokens=race.size.tokens)
                providers.refuse_if_wrong(provider, providers.check(layer, provider, device))
                differences[provider] = _difference(provider, step(), expected)
            peaks[provider] = peak_memory(step, device)
            training.milliseconds(step)
            steps[provider] = step
    times: dict[str, list[float]] = {provider: [] for provider in steps}
    for done in range(SAMPLES if steps else 0):
        if done >= FEWEST_SAMPLES and time.perf_counter() >= until:
            break
        for provider, step in steps.items():
            times[provider].append(training.milliseconds(step))
    plain = statistics.median(times[PLAIN]) if PLAIN in times else None
    for provider, samples in times.items():
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        overhead = None if plain is None or provider == PLAIN else 100 * (median / plain - 1)
        yield Step(
            size=str(race.size),
            provider=provider,
            compiled=race.compiled,
            milliseconds=median,
            spread=upper - lower,
            samples=len(samples),
            overhead_percent=overhead,
            peak_megabytes=peaks[provider],
            difference=differences.get(provider),
        )


def _difference(provider: str, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Relative, of the loss or of dx, whichever is larger; Wrong where it is not the same function."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected)]
    worst = torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()  # NaN is the largest
    if not worst <= ALLOWED:
        raise providers.Wrong(
            f"{provider} is wrong, so it is not timed: a step is off by {worst:.1e} (allowed {ALLOWED:.0e})"
        )
    return worst


def cells(steps: Sequence[Step]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A table's header and rows."""

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    header = ("training step", "provider", "mode", "ms", "±", "over plain", "peak MB", "difference")
    rows: list[tuple[str, ...]] = [
        (
            step.size,
            step.provider,
            "torch.compile" if step.compiled else "eager",
            f"{step.milliseconds:.2f}",
            shown(step.spread, ".2f"),
            "" if step.overhead_percent is None else f"{step.overhead_percent:+.1f} %",
            shown(step.peak_megabytes, ".0f"),
            shown(step.difference, ".1e"),
        )
        for step in steps
    ]
    return header, rows


STYLE = (
    "text{font:15px system-ui,sans-serif;fill:#17202e}.soft{fill:#5a6676;font-size:13px}.end{text-anchor:end}"
    "rect{fill:#9aa4b2}.ours{fill:#2563eb}@media(prefers-color-scheme:dark){text{fill:#e7ecf3}.soft{fill:#9aa6b6}"
    "rect{fill:#7b8696}.ours{fill:#6ea1ff}}"
)
LABELS = {"eager": "eager PyTorch", **{backend: f"mhc_ops ({backend})" for backend in backends.BACKENDS}}
WIDTH, NAMES, FIGURES, ROW = 720, 150, 70, 30  # pixels: in all, for the names, for the figures, from bar to bar
TOP, BAR = 62, 20


def picture(steps: Sequence[Step], device: str = "") -> str:
    """An SVG, light or dark as its reader is: what each provider adds to a step of the largest size in eager mode."""
    eager = [step for step in steps if not step.compiled]
    plain = max((step for step in eager if step.provider == PLAIN), key=lambda step: step.milliseconds)
    found = [(step.overhead_percent, step.provider) for step in eager if step.size == plain.size]
    bars = sorted((percent, provider) for percent, provider in found if percent is not None)
    longest = max((percent for percent, _ in bars), default=1.0)
    size = plain.size.removeprefix("training_step ")
    below = f"{device + ', ' if device else ''}{size}; plain residuals: {plain.milliseconds:.1f} ms"
    lines = [
        '<text x="0" y="18">What hyper-connections add to the time of a training step</text>',
        f'<text x="0" y="40" class="soft">{escape(below)}</text>',
    ]
    for nth, (percent, provider) in enumerate(bars):
        y = TOP + nth * ROW
        length = max(1.0, max(percent, 0.0) / longest * (WIDTH - NAMES - FIGURES))
        ours = ' class="ours"' if provider in backends.BACKENDS else ""
        label = escape(LABELS.get(provider, provider))
        lines += [
            f'<text x="{NAMES - 8}" y="{y + 15}" class="end">{label}</text>',
            f'<rect x="{NAMES}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3"{ours}/>',
            f'<text x="{NAMES + length + 6:.1f}" y="{y + 15}">{percent:+.1f} %</text>',
        ]
    height = TOP + len(bars) * ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *lines, "</svg>"]) + "\n"
