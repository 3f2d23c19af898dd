"""What hyper-connections cost where they are used: a training step of a small transformer, beside plain residuals.

Every provider connects the same layers with the same weights. A step is a forward and a backward with all gradients; an
optimiser, which would add the same to each, is left out. Its time is the wall clock's, host included, with the device
idle before and after: the median over rounds in which it and plain residuals take turns.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core import backend as backends
from . import peers, providers
from .speed import FEWEST_SAMPLES, SAMPLES, Positive, peak_memory
from .training_model import PLAIN, Size, Training

ALLOWED = 5e-2  # of the relative difference to the reference: bf16 leaves 1e-2 of it, a wrong term far more
SIZES = (Size(8192, 4096, 6, 11008), Size(4096, 2560, 8, 6912))
SIZES_CPU = (Size(64, 128, 2, 256),)


@dataclass(frozen=True)
class Step:
    """One provider at one size. compiled: under torch.compile, and so is the plain model it is compared with."""

    size: str
    provider: str
    compiled: bool
    milliseconds: Positive
    spread: float | None = None  # interquartile range of the samples, ms
    samples: int | None = None
    overhead_percent: float | None = None  # over plain residuals, in the same rounds
    peak_megabytes: float | None = None  # above weights and input
    difference: float | None = None  # relative, to the reference: of the loss or of dx, whichever is larger


@dataclass(frozen=True)
class Race:
    """One provider and plain residuals that take turns at one size: a unit of `bench`, kept as soon as it is over."""

    size: Size
    compiled: bool
    provider: str

    @property
    def case(self) -> str:
        return name_of(self.size, self.compiled)

    def __str__(self) -> str:
        return f"{'torch.compile ' * self.compiled}{self.provider} {self.size}"


def name_of(size: object, compiled: bool) -> str:
    return f"{'torch.compile ' * compiled}{size}"


def named(case: str, device: torch.device) -> list[Size]:
    return [size for size in (SIZES if device.type == "cuda" else SIZES_CPU) if case in str(size)]


def plan(case: str, present: Sequence[str], device: torch.device) -> list[Race]:
    """present: of bench's providers. The formula in torch is "eager" or, where the model is compiled, "torch.compile",
    which stands for the mode too: without it nothing is compiled."""
    return [
        Race(size, formula != "eager", provider)
        for formula in ("eager", "torch.compile")
        if formula == "eager" or formula in present
        for size in named(case, device)
        for provider in present
        if provider == formula or _connects(provider, size, device)
    ]


def _connects(provider: str, size: Size, device: torch.device) -> bool:
    peer = peers.by_name(provider)
    if peer is not None:
        return peer.prepare("mhc_layer", size.case().inputs()) is not None
    return provider in backends.BACKENDS and backends.why_not("mhc", provider, device) is None


class Races:
    """Runs them. Those of a size and mode share the layers, what the reference makes of them and the plain model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of: tuple[Size, bool] | None = None

    def _begin(self, size: Size, compiled: bool) -> None:
        self._of = None
        torch.compiler.reset()
        self._training = Training(size, self._device)
        self._expected = self._training.step("eager")()
        self._plain = self._training.step(PLAIN, compiled)
        self._plain()
        self._plain_peak = peak_memory(self._plain, self._device)
        self._of = size, compiled

    def measure(self, race: Race, until: float) -> list[Step]:
        """Of plain residuals and of the provider. until: from then on few rounds do."""
        if self._of != (race.size, race.compiled):
            self._begin(race.size, race.compiled)
        step = self._training.step(race.provider, race.compiled)
        difference = _checked(race.provider, race.size, step(), self._expected, self._device)
        peak = peak_memory(step, self._device)
        turns: list[tuple[float, float]] = []
        while len(turns) < (SAMPLES if time.perf_counter() < until else FEWEST_SAMPLES):
            turns.append((self._training.milliseconds(self._plain), self._training.milliseconds(step)))
        plain = _step(race, PLAIN, [times[0] for times in turns], peak_megabytes=self._plain_peak)
        own = _step(race, race.provider, [times[1] for times in turns], peak_megabytes=peak, difference=difference)
        return [plain, replace(own, overhead_percent=100 * (own.milliseconds / plain.milliseconds - 1))]


def _step(race: Race, provider: str, samples: Sequence[float], **more: Any) -> Step:
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    step = Step(str(race.size), provider, race.compiled, median, upper - lower, len(samples))
    return replace(step, **more)


def _checked(
    provider: str, size: Size, found: tuple[Tensor, ...], expected: tuple[Tensor, ...], device: torch.device
) -> float:
    """The relative difference of the loss or of dx, whichever is larger; Wrong where it is another function, and where
    one layer is, against fp64."""
    providers.refuse_if_wrong(provider, providers.check(size.case(tokens=size.tokens), provider, device))
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected)]
    worst = torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()  # NaN is the largest
    if not worst <= ALLOWED:
        words = f"its step is off by {worst:.1e} (allowed {ALLOWED:.0e})"
        raise providers.Wrong(f"{provider} is wrong, so it is not timed: {words}")
    return worst
