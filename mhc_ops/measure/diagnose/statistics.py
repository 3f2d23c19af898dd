"""The distribution of an error and of the ratio to the truth."""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_DECADE, LARGEST_DECADE = -8, 1
WORTH_A_RATIO = 1e-3  # of the root mean square; below it a ratio says nothing
CONSTANT = 1e-2  # a spread of the ratio below this is rounding


@dataclass(frozen=True)
class Statistics:
    """Errors relative to the root mean square of the truth; ratios where the truth is not tiny."""

    max: float
    mean: float
    std: float
    decades: dict[str, float]  # share of elements by the decade of their error
    ratio_mean: float
    ratio_std: float
    ratio_min: float
    ratio_max: float
    ratio: str  # in words; "" where no wrong element is finite
    nan: int
    zero: int  # exactly 0 where the truth is not


def statistics(result: Tensor, exact: Tensor, off: Tensor) -> Statistics:
    """`off`: the elements that are wrong; the ratio is theirs."""
    scale = float(exact.square().mean().sqrt()) or 1.0
    error = (result - exact) / scale
    finite = error[error.isfinite()]
    size = finite.abs()
    finite = finite if finite.numel() else error.new_zeros(1)
    worth = off & result.isfinite() & (exact.abs() > WORTH_A_RATIO * scale)
    ratio = (result[worth] / exact[worth]) if bool(worth.any()) else exact.new_ones(1)
    spread = float(ratio.std(correction=0))
    return Statistics(
        max=float(finite.abs().max()),
        mean=float(finite.mean()),
        std=float(finite.std(correction=0)),
        decades=_decades(size, error.numel()),
        ratio_mean=float(ratio.mean()),
        ratio_std=spread,
        ratio_min=float(ratio.min()),
        ratio_max=float(ratio.max()),
        ratio=_words(ratio, spread) if bool(worth.any()) else "",
        nan=int((~result.isfinite()).sum()),
        zero=int(((result == 0) & (exact != 0)).sum()),
    )


def _decades(size: Tensor, count: int) -> dict[str, float]:
    exponents = size.clamp(min=10.0 ** (SMALLEST_DECADE - 1)).log10().floor().long()
    exponents = exponents.clamp(SMALLEST_DECADE - 1, LARGEST_DECADE)
    counts = torch.bincount(exponents - (SMALLEST_DECADE - 1), minlength=LARGEST_DECADE - SMALLEST_DECADE + 2)
    names = [f"below 1e{SMALLEST_DECADE}", *(f"1e{k}" for k in range(SMALLEST_DECADE, LARGEST_DECADE + 1))]
    return {name: int(number) / max(1, count) for name, number in zip(names, counts) if number}


def _words(ratio: Tensor, spread: float) -> str:
    if spread <= CONSTANT * abs(float(ratio.mean())):
        return "constant"
    flipped = float((ratio < 0).double().mean())
    return f"varying, sign flipped in {flipped:.0%}" if flipped > 0.01 else "varying"
