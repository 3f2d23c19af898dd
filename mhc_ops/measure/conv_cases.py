"""Cases of the convolution, as data: sizes, options, types; the same case always makes the same tensors."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mhc_ops

from ..core.check import name_of
from .cases import SEED, Case, Drawn, Subject, Tensors, sweep


def _conv(output_final_state: bool = False, **arguments: Any) -> tuple[Tensor, ...]:
    result = mhc_ops.causal_conv1d(**arguments, output_final_state=output_final_state)
    return result if isinstance(result, tuple) else (result,)


def _update(conv_state: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    return mhc_ops.causal_conv1d_update(conv_state=conv_state, **arguments), conv_state


def _short_conv(**arguments: Any) -> tuple[Tensor, ...]:
    return (mhc_ops.short_conv(**arguments),)


@dataclass(frozen=True)
class ConvCase(Drawn):
    """causal_conv1d on x [B, L, D], a decoding step of it where `update`, ShortConv on [B, L, n, D] where n is given.

    places: "" for none, "states", "seq_idx" (with padding in between), "cu_seqlens" (with an empty sequence and padding
    at the end) or "cu_seqlens states". In a decoding step: "", "ring" or "slots" (one of them padding).
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
    scale: float = 1.0  # of x
    parameter_dtype: torch.dtype = torch.float32
    norm_eps: float = 1e-5  # of short_conv
    seed: int = SEED
    unused: tuple[str, ...] = ()  # outputs without a cotangent
    layout: str = ""  # one of cases.LAYOUTS

    steep = False  # nothing here grows small errors

    @property
    def subject(self) -> Subject:
        options: dict[str, Any] = {"dilation": self.dilation}
        if self.n:
            call = partial(_short_conv, **options, residual=self.residual, norm_eps=self.norm_eps)
            return Subject("short_conv", "conv", call, (), ("y",), lambda _: (3, 5))
        options["activation"] = "silu" if self.silu else None
        name = " silu" if self.silu else ""
        if self.update:
            call = partial(_update, **options)
            state = ("conv_state",)
            moved = (2 * self.W, 0.0)  # x and y, and all of the state but one row read and written
            return Subject(
                "causal_conv1d_update" + name, "conv", call, (), ("y", *state), lambda _: moved, 2, None, state
            )
        states = ("final_state",) if "states" in self.places else ()
        call = partial(_conv, **options, output_final_state=bool(states))
        return Subject("causal_conv1d" + name, "conv", call, (), ("y", *states), lambda _: (2 + self.residual, 3))

    def _drawn(self, generator: torch.Generator, device: torch.device | str) -> Tensors:
        drawn_on = generator.device
        B, L, D, W, S = self.B, self.L, self.D, self.W, (self.W - 1) * self.dilation

        def normal(*shape: int, dtype: torch.dtype = self.parameter_dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=drawn_on).to(device, dtype)

        def data(*shape: int) -> Tensor:
            return (self.scale * normal(*shape, dtype=torch.float32)).to(self.dtype)

        if self.n:
            tensors = {"x": data(B, L, self.n, D), "gamma": 1 + 0.3 * normal(self.n, D)}
            return {**tensors, "weight": normal(self.n * D, W) / W**0.5}
        x = data(B, D) if self.update and L == 1 else data(B, L, D)
        tensors = {"x": x, "weight": normal(D, W) / W**0.5}
        if self.bias:
            tensors["bias"] = 0.5 * normal(D)
        if self.residual:
            tensors["residual"] = data(B, L, D)
        if self.update:
            length = S + 2 if self.places else S
            slots = torch.randperm(B + 2, generator=generator, device=drawn_on)[:B].to(torch.int32)
            tensors["conv_state"] = data(B + 2 if self.places == "slots" else B, D, length)
            if self.places == "ring":
                lengths = torch.randint(0, 100, (B,), generator=generator, device=drawn_on)
                tensors["cache_seqlens"] = lengths.to(device)
            if self.places == "slots":
                slots[-1] = -1
                tensors["conv_state_indices"] = slots.to(device)
            return tensors
        bounds = torch.tensor([0, L // 5, L // 5, L // 2, L - L // 6], dtype=torch.int32)
        if "cu_seqlens" in self.places:
            tensors["cu_seqlens"] = bounds.to(device)
        if self.places == "seq_idx":
            t = torch.arange(L)
            ids = torch.searchsorted(bounds, t, right=True).to(torch.int32)
            tensors["seq_idx"] = torch.where(t % 11 < 2, -1, ids).expand(B, L).contiguous().to(device)
        if "states" in self.places:
            N = len(bounds) - 1 if "cu_seqlens" in self.places else B
            tensors["initial_state"] = data(N, D, S)
        return tensors

    def runs_on(self, backend: str) -> bool:
        """Whether the backend's kernels have all that the case asks for."""
        plain = self.dilation == 1 and not (self.residual or self.n or self.update)
        return backend != "hip" or (plain and 2 <= self.W <= 4 and "cu_seqlens" not in self.places)

    def smaller(self) -> "ConvCase":
        """As quick to check as to start."""
        return replace(self, B=min(2, self.B), L=min(128, self.L))

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (self.B, self.L, *((self.n,) if self.n else ()), self.D)

    def elements(self) -> int:
        return math.prod(self._sizes)

    def __str__(self) -> str:
        words = [self.subject.name, "x".join(map(str, self._sizes)), f"W{self.W}", name_of(self.dtype)]
        words += ["no bias"] * (not self.bias and not self.n) + [f"dilation {self.dilation}"] * (self.dilation > 1)
        words += ["residual"] * self.residual + [self.places] * bool(self.places)
        own = [f"norm_eps {self.norm_eps:g}"] * (self.n > 0 and self.norm_eps != ConvCase.norm_eps)
        return f"{' '.join(words)} {self._words(*own)}".rstrip()


AnyCase = Case | ConvCase

_bf16, _fp16, _fp32 = torch.bfloat16, torch.float16, torch.float32
PLACES = ("states", "seq_idx", "cu_seqlens", "cu_seqlens states")

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
    *(ConvCase(2, 37, 130, W, n=3, residual=True) for W in (1, 4)),
    ConvCase(1, 37, 65, 3, _fp32, dilation=3, n=4),
)

_TRAINING = ((8, 4096, 4096), (1, 8192, 16384), (4, 2048, 2560))
# The presets of the HIP test program: batch, tokens, channels, bias, silu
_PRESETS = (
    (1, 64, 32, True, False),
    (2, 256, 64, True, False),
    (4, 512, 64, True, False),
    (4, 1024, 64, True, False),
    (2, 256, 64, False, False),
    (2, 256, 64, True, True),
)
# What `mhc-ops bench` runs on a GPU: training sizes,
BENCH = (
    *(ConvCase(*sizes, silu=silu) for sizes in _TRAINING for silu in (False, True)),
    *(ConvCase(2, 4096, D, n=4, residual=True) for D in (4096, 1280)),
)
# small sizes and decoding, beside other kernels only (launches are all there is to see),
DECODE = (
    *(ConvCase(B, L, D, dtype=_fp32, bias=bias, silu=silu) for B, L, D, bias, silu in _PRESETS),
    *(ConvCase(B, 1, D, update=True) for B in (1, 64, 256) for D in (4096, 8192)),
)
# and on a CPU, where only the reference can be timed.
BENCH_CPU = (
    ConvCase(2, 256, 256, dtype=_fp32),
    ConvCase(2, 1, 256, dtype=_fp32, update=True),
    ConvCase(2, 64, 64, dtype=_fp32, n=4),
)
SCALING = (
    sweep("L", "B = 8, D = 4096", (512, 1024, 2048, 4096, 8192), lambda L: ConvCase(8, L, 4096)),
    sweep("D", "B = 8, L = 4096", (1024, 2048, 3072, 4096, 8192), lambda D: ConvCase(8, 4096, D)),
)
SCALING_CPU = (
    sweep("L", "B = 2, D = 256", (128, 256, 512, 1024), lambda L: ConvCase(2, L, 256, dtype=_fp32)),
    sweep("D", "B = 2, L = 256", (64, 128, 256, 512), lambda D: ConvCase(2, 256, D, dtype=_fp32)),
)
