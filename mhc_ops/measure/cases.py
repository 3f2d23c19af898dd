"""Cases as data: an op, a shape, types and scales; the same case always makes the same tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import mhc_ops

from ..core.check import name_of

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """An op as the measurements see it: `call(**tensors, backend=...)` returns the outputs in order.

    outputs: their names; the last `intermediates` of them carry no gradient.
    """

    name: str
    family: str
    call: Callable[..., tuple[Tensor, ...]]
    outputs: tuple[str, ...]
    intermediates: int = 0


def _forward_pre(**arguments: Any) -> tuple[Tensor, ...]:
    return mhc_ops.mhc_forward_pre(outflag=True, **arguments)


MHC_FORWARD_PRE = Subject(
    "mhc_forward_pre", "mhc", _forward_pre, ("h_in", "h_post", "h_res", "inv_rms", "h_mix", "h_pre"), intermediates=3
)


@dataclass(frozen=True)
class PreCase:
    """mhc_forward_pre on x [*outer, n, D], with every tensor random, gamma away from ones and odd alphas."""

    outer: tuple[int, ...]
    n: int
    D: int
    dtype: torch.dtype = torch.bfloat16
    gamma: bool = True
    scale: float = 1.0  # of x
    parameter_dtype: torch.dtype = torch.float32
    seed: int = 0
    subject: Subject = field(default=MHC_FORWARD_PRE, repr=False)

    def inputs(self, device: torch.device | str = "cpu") -> Tensors:
        n, D, M = self.n, self.D, self.n * self.n + 2 * self.n
        generator = torch.Generator().manual_seed(self.seed)  # on the CPU: a case is the same on every device

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        x = (normal(*self.outer, n, D) * self.scale).to(self.dtype)
        parameters = {
            "phi": normal(M, n * D) / (n * D) ** 0.5,
            "alpha": torch.tensor([1.1, 0.9, 1.05], device=device),
            "bias": 0.1 * normal(M),
            **({"gamma": 1 + 0.3 * normal(n, D)} if self.gamma else {}),
        }
        return {"x": x, **{name: p.to(self.parameter_dtype) for name, p in parameters.items()}}

    def bytes_moved(self) -> dict[str, float]:
        """What a kernel must move when x does not fit the cache.

        forward: x is read for the projection and again for h_in, which is written
        backward: x and dh_in are read for dh_pre, and again to write dx
        """
        X = math.prod(self.outer) * self.n * self.D * self.dtype.itemsize
        return {"forward": 2 * X + X / self.n, "backward": 3 * X + 2 * X / self.n}

    def __str__(self) -> str:
        sizes = "x".join(map(str, (*self.outer, self.n, self.D)))
        words = [sizes, name_of(self.dtype)]
        if self.parameter_dtype != torch.float32:
            words.append(f"parameters {name_of(self.parameter_dtype)}")
        if self.scale != 1:
            words.append(f"scale {self.scale:g}")
        if not self.gamma:
            words.append("no gamma")
        return " ".join(words)


_bf16, _fp16, _fp32 = torch.bfloat16, torch.float16, torch.float32

# What `mhc-ops check` runs: every stream count, every type, every scale once, sizes that are a multiple of nothing.
CHECK = (
    PreCase((2, 128), 4, 256, _bf16, gamma=False),
    PreCase((2, 128), 4, 256, _bf16),
    PreCase((2, 128), 4, 256, _fp16),
    PreCase((2, 128), 4, 256, _fp32),
    PreCase((2, 128), 4, 256, _bf16, scale=1e-3),
    PreCase((2, 128), 4, 256, _bf16, scale=1e3),
    PreCase((2, 128), 4, 256, _bf16, parameter_dtype=_bf16),
    *(PreCase((173,), n, 257, _bf16) for n in (1, 2, 3, 5, 6, 7, 8)),
    PreCase((1,), 4, 4096, _bf16),
)

# What `mhc-ops bench` runs on a GPU: training sizes of 4 streams, and decode sizes.
BENCH = (
    *(PreCase((T,), 4, D, _bf16, gamma=False) for T, D in ((8192, 4096), (8192, 7168), (4096, 2560), (16384, 1280))),
    *(PreCase((T,), 4, D, _bf16, gamma=False) for D in (4096, 7168) for T in (1, 16, 128)),
)
# and on a CPU, where only the reference can be timed.
BENCH_CPU = (PreCase((256,), 4, 256, _fp32, gamma=False),)
