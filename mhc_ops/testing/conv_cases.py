"""Cases of the convolution, as data: sizes, options, types; the same case always makes the same tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

import mhc_ops

from ..core import backend as backends
from ..core.check import name_of
from .cases import Case, Drawn, Subject, Tensors, public

PLACES = ("states", "seq_idx", "seq_idx states", "cu_seqlens", "cu_seqlens states")
FINAL = ("states", "cu_seqlens states")  # those with final states
CACHE = "cu_seqlens cache"


def _update(conv_state: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    return mhc_ops.causal_conv1d_update(conv_state=conv_state, **arguments), conv_state


def _prefill(x: Tensor, conv_state: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    return mhc_ops.causal_conv1d_prefill(x[0], conv_state, **arguments)[None], conv_state


@dataclass(frozen=True)
class ConvCase(Drawn):
    """causal_conv1d on x [B, L, D], a decoding step of it if `update`, ShortConv on [B, L, n, D] if n is given.

    places: "", "states", "seq_idx" (with padding in between), "cu_seqlens" (with an empty sequence and padding at the
    end), "seq_idx states" (without a final one), "cu_seqlens states", or "cu_seqlens cache", whose states are in slots
    (one of them padding): causal_conv1d_prefill. In a decoding step "", "ring", "slots" (one of them padding) or
    "drafts".
    """

    B: int
    L: int
    D: int
    W: int = 4
    dtype: torch.dtype = torch.bfloat16
    silu: bool = True
    bias: bool = True
    dilation: int = 1
    residual: bool = False
    places: str = ""
    n: int = 0
    update: bool = False
    norm_eps: float = 1e-5  # of short_conv

    steep = False  # nothing here grows small errors
    sections: ClassVar[dict[str, range]] = {}

    @property
    def subject(self) -> Subject:
        activation: dict[str, Any] = {"activation": "silu" if self.silu else None}
        silu, dilated = " silu" * self.silu, dict[str, Any](dilation=self.dilation)
        of_conv = partial(Subject, inputs=(), family="conv")
        with_cache = partial(of_conv, outputs=("y", "conv_state"), intermediates=2, mutated=("conv_state",))
        if self.n:
            call = public("short_conv", residual=self.residual, norm_eps=self.norm_eps, **dilated)
            return of_conv("short_conv", call, outputs=("y",), moved=(3, 0, 5, 0))
        if self.update:  # x and y; of the state all but one row, twice
            update = partial(_update, **activation, **dilated)
            return with_cache("causal_conv1d_update" + silu, update, moved=(2 * self.W, 0, 0, 0))
        if self.places == CACHE:
            return with_cache("causal_conv1d_prefill" + silu, partial(_prefill, **activation), moved=(2, 0, 0, 0))
        states = ("final_state",) if self.places in FINAL else ()
        call = public("causal_conv1d", **activation, **dilated, output_final_state=bool(states))
        return of_conv("causal_conv1d" + silu, call, outputs=("y", *states), moved=(2 + self.residual, 0, 3, 0))

    def _drawn(self, normal: Callable[..., Tensor], generator: torch.Generator) -> Tensors:
        B, L, D, W, S = self.B, self.L, self.D, self.W, (self.W - 1) * self.dilation

        def data(*shape: int) -> Tensor:
            return (self.scale * normal(*shape)).to(self.dtype)

        def parameter(*shape: int) -> Tensor:
            return normal(*shape).to(self.parameter_dtype)

        tensors = {"x": data(B, D) if self.update and L == 1 else data(*self.sizes)}
        if self.n:
            tensors["gamma"] = 1 + 0.3 * parameter(self.n, D)
        tensors["weight"] = parameter(max(1, self.n) * D, W) / W**0.5
        if self.bias and not self.n:
            tensors["bias"] = 0.5 * parameter(D)
        if self.residual and not self.n:
            tensors["residual"] = data(B, L, D)
        if self.update:  # with two unused rows and slots if there are places
            of_case: Any = {"generator": generator, "device": generator.device}
            slots = torch.randperm(B + 2, **of_case)[:B].to(torch.int32)
            slots[-1] = -1
            more = L - 1 if self.places == "drafts" else 2 * bool(self.places)
            tensors["conv_state"] = data(B + 2 * (self.places == "slots"), D, S + more)
            if self.places == "slots":
                tensors["conv_state_indices"] = slots
            if self.places == "drafts":
                tensors["num_accepted_tokens"] = torch.randint(1, L + 1, (B,), **of_case)
            if self.places == "ring":
                tensors["cache_seqlens"] = torch.randint(0, 100, (B,), **of_case)
            return tensors
        bounds = torch.tensor([0, L // 5, L // 5, L // 2, L - L // 6], dtype=torch.int32)
        if "cu_seqlens" in self.places:
            tensors["cu_seqlens"] = bounds
        if "seq_idx" in self.places:
            t = torch.arange(L)
            ids = torch.searchsorted(bounds, t, right=True).to(torch.int32)
            first = 9 if "states" in self.places else 0  # of the padding; a state is of the sequence of token 0
            padding = (t - first) % 11 < 2
            tensors["seq_idx"] = torch.where(padding, -1, ids).expand(B, L).contiguous()
        if self.places == CACHE:
            tensors["conv_state"] = data(7, D, S + 2)
            tensors["conv_state_indices"] = torch.tensor([4, 1, -1, 6], dtype=torch.int32)
            tensors["has_initial_state"] = torch.tensor([True, True, False, True])
        if "states" in self.places:
            tensors["initial_state"] = data(len(bounds) - 1 if "cu_seqlens" in self.places else B, D, S)
        return tensors

    def runs_on(self, provider: str) -> bool:
        plain = self.dilation == 1 and not (self.residual or self.n or self.update or self.places == CACHE)
        return provider != "hip" or (plain and 2 <= self.W <= 4 and "cu_seqlens" not in self.places)

    def smaller(self) -> "ConvCase":
        return replace(self, B=min(2, self.B), L=min(128, self.L))

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.B, self.L, *((self.n,) if self.n else ()), self.D)

    def __str__(self) -> str:
        first = [f"W{self.W}", name_of(self.dtype), "no bias" * (not (self.bias or self.n))]
        first += [f"dilation {self.dilation}" * (self.dilation > 1), "residual" * self.residual, self.places]
        other_norm = self.n > 0 and self.norm_eps != ConvCase.norm_eps
        return self._named(first, [f"norm_eps {self.norm_eps:g}" * other_norm])


AnyCase = Case | ConvCase


def runs(case: AnyCase, backend: str, device: torch.device) -> bool:
    """Whether the backend has the case and runs on the device."""
    return case.runs_on(backend) and backends.why_not(case.subject.family, backend, device) is None


_bf16, _fp16, _fp32 = torch.bfloat16, torch.float16, torch.float32

# What `mhc-ops check` runs: every width, type, option and place once, sizes that are a multiple of nothing.
CHECK = (
    *(ConvCase(2, 37, 65, W) for W in range(1, 9)),
    *(ConvCase(2, 37, 64, dtype=dtype) for dtype in (_bf16, _fp16, _fp32)),
    *(ConvCase(1, 33, D, dtype=_fp32) for D in (1, 7, 4097)),
    ConvCase(2, 37, 64, silu=False, bias=False),
    ConvCase(2, 37, 64, silu=False, dtype=_fp32, residual=True),
    ConvCase(2, 37, 64, parameter_dtype=_bf16),
    *(ConvCase(2, 37, 64, scale=scale) for scale in (1e-3, 1e3)),
    *(ConvCase(2, 37, 65, 3, dilation=dilation, residual=True) for dilation in (2, 5)),
    *(ConvCase(1, 37, 65, places=places, residual=True) for places in PLACES),
    *(ConvCase(1, 37, 65, 3, _fp32, dilation=2, places=places) for places in PLACES),
    ConvCase(2, 2, 20, places="states"),
    *(ConvCase(3, L, 65, places=places, update=True) for L in (1, 3) for places in ("", "ring", "slots")),
    ConvCase(3, 2, 65, 3, dilation=2, update=True),
    *(ConvCase(3, 3, 65, W, places="drafts", update=True) for W in (2, 4, 8)),
    *(ConvCase(1, 37, 65, W, dtype, places=CACHE) for W, dtype in ((2, _bf16), (4, _fp32), (8, _bf16))),
    *(ConvCase(2, 37, 130, W, n=3, residual=True) for W in (1, 4)),
    ConvCase(1, 37, 65, 3, _fp32, dilation=3, n=4),
)
# What `mhc-ops bench` runs on a GPU: training sizes,
_TRAINING = ((8, 4096, 4096), (1, 8192, 16384), (4, 2048, 2560))
BENCH = (
    *(ConvCase(*sizes, silu=silu) for sizes in _TRAINING for silu in (False, True)),
    *(ConvCase(2, 4096, D, n=4, residual=True) for D in (4096, 1280)),
)
# small sizes, the presets of the HIP test program, and decoding, beside other kernels only: they show launches,
_PRESETS = ((1, 64, 32), (2, 256, 64), (4, 512, 64), (4, 1024, 64))
DECODE = (
    *(ConvCase(*sizes, dtype=_fp32, silu=False) for sizes in _PRESETS),
    *(ConvCase(2, 256, 64, dtype=_fp32, bias=silu, silu=silu) for silu in (False, True)),
    *(ConvCase(B, 1, D, update=True) for B in (1, 64, 256) for D in (4096, 8192)),
)
# and on a CPU, where only the reference can be timed.
BENCH_CPU = (
    ConvCase(2, 256, 256, dtype=_fp32),
    ConvCase(2, 1, 256, dtype=_fp32, update=True),
    ConvCase(2, 64, 64, dtype=_fp32, n=4),
)
