"""Which terms of a sum, left out or scaled, explain an error: least squares on error ≈ Σ_k c_k · term_k."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from ..cases import Tensors

WHOLE = 2e-3  # a coefficient this close to a round one is taken as it
MAX_TOGETHER = 2


@dataclass(frozen=True)
class Fit:
    """Terms that are taken `times` instead of once; candidate: what the output then is."""

    times: dict[str, float]
    candidate: Tensor

    def words(self, sizes: dict[str, int]) -> str:
        return " and ".join(f"{name} {_counted(times, sizes)}" for name, times in self.times.items())


def coefficients(error: Tensor, terms: Tensors) -> dict[str, float]:
    """c of each term, all of them fitted together."""
    return dict(zip(terms, _solve(error, list(terms.values()))))


def fits(error: Tensor, exact: Tensor, terms: Tensors, box: Tensor) -> Iterator[Fit]:
    """Single terms first, then pairs; only elements in the box are wrong."""
    inside = {name: term * box for name, term in _with_groups(terms).items() if bool((term * box).any())}
    for together in range(1, MAX_TOGETHER + 1):
        for names in combinations(inside, together):
            solved = _solve(error * box, [inside[name] for name in names])
            times = {name: _rounded(1 + c) for name, c in zip(names, solved)}
            change = sum((factor - 1) * inside[name] for name, factor in times.items())
            yield Fit(times, exact + change)


def _with_groups(terms: Tensors) -> Tensors:
    """ "a of p" and "a of q" are also a; the group of all terms is the output itself, and left out."""
    groups: dict[str, list[Tensor]] = {}
    for name, term in terms.items():
        groups.setdefault(name.split(" of ")[0], []).append(term)
    sums = {name: torch.stack(parts).sum(0) for name, parts in groups.items() if 1 < len(parts) < len(terms)}
    return {**sums, **terms}


def scaled(result: Tensor, exact: Tensor, box: Tensor) -> tuple[float, Tensor]:
    """The one factor between result and truth in the box, and what the output is with it."""
    inside = exact * box
    size = float(inside.square().sum())
    factor = _rounded(float((result.nan_to_num(0.0, 0.0, 0.0) * inside).sum()) / size) if size else 1.0
    return factor, exact + (factor - 1) * inside


def _solve(error: Tensor, columns: list[Tensor]) -> list[float]:
    """Normal equations in fp64 of columns scaled to 1: few terms, and none nearly the sum of others. What is not finite
    has no say.
    """
    matrix = torch.stack([column.flatten() for column in columns]).nan_to_num(0.0, 0.0, 0.0)
    norms = matrix.norm(dim=1).clamp(min=torch.finfo(matrix.dtype).tiny)
    matrix = matrix / norms[:, None]
    gram, right = matrix @ matrix.T, matrix @ error.flatten().nan_to_num(0.0, 0.0, 0.0)
    return (torch.linalg.pinv(gram, hermitian=True, rtol=1e-10) @ right / norms).tolist()


def _rounded(factor: float) -> float:
    """Not to 1: that would be no fault."""
    whole = round(factor)
    return float(whole) if whole != 1 and abs(factor - whole) <= WHOLE * max(1.0, abs(factor)) else factor


def _counted(times: float, sizes: dict[str, int]) -> str:
    if times == 0:
        return "is left out"
    if times == -1:
        return "has the wrong sign"
    return f"counts {number(times, sizes)} times"


def number(value: float, sizes: dict[str, int]) -> str:
    """16 -> "16 (n²)" where n is 4"""
    names = [
        f"{name}{more}" for name, size in sizes.items() for more, by in (("", 0), (" + 1", 1)) if size + by == value
    ]
    return f"{value:.4g}" + (f" ({names[0]})" if names and value > 2 else "")
