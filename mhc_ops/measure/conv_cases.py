"""Cases of the convolution, as data: sizes, options, types; the same case always makes the same tensors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

import mhc_ops

from ..core.check import name_of
from .cases import Case, Drawn, Subject, Sweep, Tensors, public


def _update(conv_state: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    return mhc_ops.causal_conv1d_update(conv_state=conv_state, **arguments), conv_state


@dataclass(frozen=True)
class ConvCase(Drawn):
    """causal_conv1d on x [B, L, D], a decoding step of it where `update`, ShortConv on [B, L, n, D] where n is given.

    places: "" for none, "states", "seq_idx" (with padding in between), "cu_seqlens" (with an empty sequence and padding
    at the end), "seq_idx states" (there is no final one) or "cu_seqlens states". In a decoding step: "", "ring" or
    "slots" (one of them padding).
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
        if self.n:
            call = public("short_conv", dilation=self.dilation, residual=self.residual, norm_eps=self.norm_eps)
            return Subject("short_conv", call, (), ("y",), (3, 0, 5, 0), family="conv")
        options: dict[str, Any] = {"dilation": self.dilation, "activation": "silu" if self.silu else None}
        silu = " silu" * self.silu
        if self.update:
            outputs, moved = ("y", "conv_state"), (2 * self.W, 0, 0, 0)  # x and y; of the state all but one row, twice
            call = partial(_update, **options)
            more: Any = {"intermediates": 2, "mutated": ("conv_state",), "family": "conv"}
            return Subject("causal_conv1d_update" + silu, call, (), outputs, moved, **more)
        states = ("final_state",) if self.places in FINAL else ()
        call = public("causal_conv1d", **options, output_final_state=bool(states))
        moved = (2 + self.residual, 0, 3, 0)
        return Subject("causal_conv1d" + silu, call, (), ("y", *states), moved, family="conv")

    def _drawn(self, normal: Callable[..., Tensor], generator: torch.Generator) -> Tensors:
        B, L, D, W, S = self.B, self.L, self.D, self.W, (self.W - 1) * self.dilation

        def data(*shape: int) -> Tensor:
            return (self.scale * normal(*shape)).to(self.dtype)

        def parameter(*shape: int) -> Tensor:
            return normal(*shape).to(self.parameter_dtype)

        if self.n:
            tensors = {"x": data(*self.sizes), "gamma": 1 + 0.3 * parameter(self.n, D)}
            return {**tensors, "weight": parameter(self.n * D, W) / W**0.5}
        tensors = {"x": data(B, D) if self.update and L == 1 else data(B, L, D), "weight": parameter(D, W) / W**0.5}
        if self.bias:
            tensors["bias"] = 0.5 * parameter(D)
        if self.residual:
            tensors["residual"] = data(B, L, D)
        if self.update:
            return tensors | self._state(data, S, generator)
        bounds = torch.tensor([0, L // 5, L // 5, L // 2, L - L // 6], dtype=torch.int32)
        if "cu_seqlens" in self.places:
            tensors["cu_seqlens"] = bounds
        if "seq_idx" in self.places:
            t = torch.arange(L)
            ids = torch.searchsorted(bounds, t, right=True).to(torch.int32)
            first = 9 if "states" in self.places else 0  # of the padding; a state is of the sequence of token 0
            padding = (t - first) % 11 < 2
            tensors["seq_idx"] = torch.where(padding, -1, ids).expand(B, L).contiguous()
        if "states" in self.places:
            tensors["initial_state"] = data(len(bounds) - 1 if "cu_seqlens" in self.places else B, D, S)
        return tensors

    def _state(self, data: Callable[..., Tensor], S: int, generator: torch.Generator) -> Tensors:
        """Of a decoding step, with two rows and slots that nobody reads where there are places."""
        B, drawn_on = self.B, generator.device
        slots = torch.randperm(B + 2, generator=generator, device=drawn_on)[:B].to(torch.int32)
        state = data(B + 2 if self.places == "slots" else B, self.D, S + 2 if self.places else S)
        if self.places == "ring":
            lengths = torch.randint(0, 100, (B,), generator=generator, device=drawn_on)
            return {"conv_state": state, "cache_seqlens": lengths}
        slots[-1] = -1
        return {"conv_state": state} | ({"conv_state_indices": slots} if self.places == "slots" else {})

    def runs_on(self, backend: str) -> bool:
        """Whether the backend's kernels have all that the case asks for."""
        plain = self.dilation == 1 and not (self.residual or self.n or self.update)
        return backend != "hip" or (plain and 2 <= self.W <= 4 and "cu_seqlens" not in self.places)

    def smaller(self) -> "ConvCase":
        """As quick to check as to start."""
        return replace(self, B=min(2, self.B), L=min(128, self.L))

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.B, self.L, *((self.n,) if self.n else ()), self.D)

    def __str__(self) -> str:
        first = {f"W{self.W}": True, name_of(self.dtype): True, "no bias": not (self.bias or self.n)}
        first |= {f"dilation {self.dilation}": self.dilation > 1, "residual": self.residual}
        other_norm = self.n > 0 and self.norm_eps != ConvCase.norm_eps
        return self._named(first | {self.places: bool(self.places)}, {f"norm_eps {self.norm_eps:g}": other_norm})


AnyCase = Case | ConvCase

_bf16, _fp16, _fp32 = torch.bfloat16, torch.float16, torch.float32
PLACES = ("states", "seq_idx", "seq_idx states", "cu_seqlens", "cu_seqlens states")
FINAL = ("states", "cu_seqlens states")  # those with final states

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
    Sweep("L", "B = 8, D = 4096", {L: ConvCase(8, L, 4096) for L in (512, 1024, 2048, 4096, 8192)}),
    Sweep("D", "B = 8, L = 4096", {D: ConvCase(8, 4096, D) for D in (1024, 2048, 3072, 4096, 8192)}),
)
SCALING_CPU = (
    Sweep("L", "B = 2, D = 256", {L: ConvCase(2, L, 256, dtype=_fp32) for L in (128, 256, 512, 1024)}),
    Sweep("D", "B = 2, L = 256", {D: ConvCase(2, 256, D, dtype=_fp32) for D in (64, 128, 256, 512)}),
)
