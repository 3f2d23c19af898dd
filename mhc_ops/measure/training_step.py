"""What hyper-connections cost where they are used: a training step of a small transformer, beside plain residuals.

Every provider connects the same layers with the same weights. A step is a forward and a backward with all gradients; an
optimiser, which would add the same to each, is left out. Its time is the wall clock's, host included, with the device
idle before and after: the median over rounds in which it and plain residuals take turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core import backend as backends
from . import peers, selection
from .speed import Timing, peak_memory, samples, summary
from .stacks import PLAIN, backend_of
from .training_model import APART, RECOMPUTE, Size, Training, subject_of

ALLOWED = 5e-2  # of the relative difference to the reference: bf16 leaves 1e-2 of it, a wrong term far more
SIZES = (Size(8192, 4096, 6, 11008), Size(4096, 2560, 8, 6912))
SIZES_CPU = (Size(64, 128, 2, 256),)


@dataclass(frozen=True)
class Step:
    """One provider at one size. compiled: under torch.compile, and so is the plain model it is compared with."""

    size: str
    provider: str
    compiled: bool
    milliseconds: float
    spread: float | None = None  # interquartile range of the samples, ms
    samples: int | None = None
    overhead_percent: float | None = None  # over plain residuals, in the same rounds
    peak_megabytes: float | None = None  # above weights and input
    difference: float | None = None  # relative, to the reference: of the loss or of dx, whichever is larger

    @property
    def mode(self) -> str:
        return "torch.compile" if self.compiled else "eager"


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
        return name_of(f"{self.provider} {self.size}", self.compiled)


def name_of(what: object, compiled: bool) -> str:
    return f"{'torch.compile ' * compiled}{what}"


def named(case: str, device: torch.device) -> list[Size]:
    return [size for size in (SIZES if device.type == "cuda" else SIZES_CPU) if case in str(size)]


def plan(case: str, present: Sequence[str], device: torch.device) -> list[Race]:
    """present: of bench's selection. The formula in torch is "eager" or, where the model is compiled, "torch.compile",
    which stands for the mode too: without it nothing is compiled."""
    return [
        Race(size, formula != "eager", form)
        for formula in ("eager", "torch.compile")
        if formula == "eager" or formula in present
        for size in named(case, device)
        for provider in present
        if provider == formula or _connects(provider, size, device)
        for form in _forms(provider, formula != "eager")
    ]


def _forms(provider: str, compiled: bool) -> list[str]:
    """A stack; beside the first backend's the same layers apart, and with less kept (which torch.compile decides)."""
    more = (APART,) if compiled else (APART, RECOMPUTE)
    return [provider, *(f"{provider} {form}" for form in more if provider == selection.KERNELS[0])]


def _connects(provider: str, size: Size, device: torch.device) -> bool:
    peer = peers.by_name(provider)
    if peer is not None:
        return peer.prepare("mhc_layer", size.case().inputs()) is not None
    return provider in selection.KERNELS and backends.why_not("mhc", provider, device) is None


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
        step, time = self._training.step(race.provider, race.compiled), self._training.microseconds
        difference = _checked(race, step(), self._expected, self._device)
        peak = peak_memory(step, self._device)
        turns = samples(lambda: (time(self._plain), time(step)), until)
        plain, own = (summary(times) for times in zip(*turns))
        overhead = 100 * (own.microseconds / plain.microseconds - 1)
        return [
            _step(race, PLAIN, plain, peak_megabytes=self._plain_peak),
            _step(race, race.provider, own, peak_megabytes=peak, overhead_percent=overhead, difference=difference),
        ]


def _step(race: Race, provider: str, timing: Timing, **more: Any) -> Step:
    times = timing.microseconds / 1e3, timing.spread / 1e3, timing.samples
    return replace(Step(str(race.size), provider, race.compiled, *times), **more)


def _checked(race: Race, found: Sequence[Tensor], expected: Sequence[Tensor], device: torch.device) -> float:
    """The relative difference of the loss or of dx, whichever is larger; Wrong where it is another function, and where
    one layer or boundary is, against fp64."""
    layer = race.size.case(subject_of(race.provider), race.size.tokens)
    selection.refuse_if_wrong(race.provider, selection.check(layer, backend_of(race.provider), device))
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected)]
    worst = torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()  # NaN is the largest
    if not worst <= ALLOWED:
        words = f"its step is off by {worst:.1e} (allowed {ALLOWED:.0e})"
        raise selection.Wrong(f"{race.provider} is wrong, so it is not timed: {words}")
    return worst
