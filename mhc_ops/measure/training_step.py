"""What hyper-connections cost where they are used: a training step of a small transformer, beside plain residuals.

Every provider connects the same layers with the same weights. A step is a forward and a backward with all gradients; an
optimiser, which would add the same to each, is left out. Its time is the wall clock's, host included, with the device
idle before and after: the median over rounds in which the providers take turns.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core import backend as backends
from . import peers, providers
from .speed import FEWEST_SAMPLES, SAMPLES, Positive, peak_memory
from .training_model import PLAIN, Size, TakeStep, Training

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
        return f"{self.provider} {self.case}"

    def split(self, skip: Sequence[str]) -> tuple["Race", "Race"]:
        """Those that run, and those whose name has one of these texts in it."""
        mode = "torch.compile " * self.compiled
        left = [p for p in self.providers if any(text in f"{mode}{p} {self.size}" for text in skip)]
        kept = [p for p in self.providers if p not in left]
        return replace(self, providers=tuple(kept)), replace(self, providers=tuple(left))


def named(case: str, device: torch.device) -> list[Size]:
    return [size for size in (SIZES if device.type == "cuda" else SIZES_CPU) if case in str(size)]


def plan(case: str, present: Sequence[str], device: torch.device) -> list[Race]:
    """present: of bench's providers. The formula in torch is "eager" or, where the model is compiled, "torch.compile",
    which stands for the mode too: without it nothing is compiled."""
    races = []
    for size in named(case, device):
        for formula in ("eager", "torch.compile"):
            found = [p for p in present if p == formula or _connects(p, size, device)]
            if found and (formula == "eager" or formula in present):
                races.append(Race(size, formula != "eager", (PLAIN, *found)))
    return races


def _connects(provider: str, size: Size, device: torch.device) -> bool:
    peer = peers.by_name(provider)
    if peer is not None:
        return peer.prepare("mhc_layer", size.case().inputs()) is not None
    return provider in backends.BACKENDS and backends.why_not("mhc", provider, device) is None


def measure(
    race: Race, device: torch.device, until: float, failures_of: Callable[[str, str], AbstractContextManager[None]]
) -> Iterator[Step]:
    """failures_of(case, provider): notes what a provider raises. until: from then on few rounds do."""
    torch.compiler.reset()
    training = Training(race.size, device)
    expected = training.step("eager")()
    steps: dict[str, TakeStep] = {}
    found: dict[str, dict[str, Any]] = {}
    for provider in race.providers:
        with failures_of(race.case, provider):
            step = training.step(provider, race.compiled)
            difference = _checked(provider, race.size, step(), expected, device)
            found[provider] = {"peak_megabytes": peak_memory(step, device), "difference": difference}
            steps[provider] = step
    times: dict[str, list[float]] = {provider: [] for provider in steps}
    for nth in range(SAMPLES):
        if nth < FEWEST_SAMPLES or time.perf_counter() < until:
            for provider, step in steps.items():
                times[provider].append(training.milliseconds(step))
    plain = statistics.median(times[PLAIN]) if PLAIN in times else None
    for provider, samples in times.items():
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        if plain is not None and provider != PLAIN:
            found[provider]["overhead_percent"] = 100 * (median / plain - 1)
        fields = {"milliseconds": median, "spread": upper - lower, "samples": len(samples), **found[provider]}
        yield Step(str(race.size), provider, race.compiled, **fields)


def _checked(
    provider: str, size: Size, found: tuple[Tensor, ...], expected: tuple[Tensor, ...], device: torch.device
) -> float | None:
    """The relative difference of the loss or of dx, whichever is larger; Wrong where it is another function, and where
    one layer is, against fp64. Plain residuals are another one and are not compared."""
    if provider == PLAIN:
        return None
    providers.refuse_if_wrong(provider, providers.check(size.case(tokens=size.tokens), provider, device))
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected)]
    worst = torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()  # NaN is the largest
    if not worst <= ALLOWED:
        words = f"its step is off by {worst:.1e} (allowed {ALLOWED:.0e})"
        raise providers.Wrong(f"{provider} is wrong, so it is not timed: {words}")
    return worst
