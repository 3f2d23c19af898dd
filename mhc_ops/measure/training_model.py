"""The small transformer of which `training_step` times a training step, with what connects its layers to choose.

Attention and SwiGLU in turn, each behind an RMSNorm, in bf16. The models of a size share their layers; the maps of all
hyper-connections hold the same numbers. Ours is a HyperStack, with the norms inside where the backend has them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import backend as backends
from . import cases, stacks
from .stacks import PLAIN, backend_of

N = 4
HEAD = 128  # channels of a head of attention
LONGEST = 4096  # tokens of a sequence
DTYPE = torch.bfloat16
APART, RECOMPUTE = "HyperConnection", "recompute=4"  # forms of ours, behind the name of the backend
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

    def case(self, subject: cases.Subject = cases.MHC_LAYER, tokens: int = 1) -> cases.Case:
        """What the maps are drawn from."""
        return cases.Case(subject, (tokens,), N, self.D, DTYPE, gamma=False)


def subject_of(provider: str) -> cases.Subject:
    """What its model is made of: layers, or the boundaries of a HyperStack, with the norm where the backend has it."""
    backend = backend_of(provider)
    if backend not in backends.BACKENDS or provider.endswith(APART):
        return cases.MHC_LAYER
    return cases.MHC_NEXT if backend == "tilelang" else cases.MHC_NEXT_NORMED


class Attention(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.length = min(size.tokens, LONGEST)
        self.qkv, self.out = (nn.Linear(size.D, wide * size.D, bias=False) for wide in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, self.length, 3, x.shape[-1] // HEAD, HEAD).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))


class SwiGLU(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.up, self.down = nn.Linear(size.D, 2 * size.F, bias=False), nn.Linear(size.F, size.D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Model(nn.Module):
    """The mean square of what comes out, for x [T, D]. Streams begin as copies of x and end as their mean, in plain
    torch whoever connects the layers."""

    def __init__(self, connected: nn.Module, streams: bool):
        super().__init__()
        self.connected, self.streams = connected, streams

    def forward(self, x: Tensor) -> Tensor:
        if self.streams:
            x = x.unsqueeze(1).expand(-1, N, -1).contiguous()
        x = self.connected(x)
        return (x.mean(1) if self.streams else x).float().square().mean()


TakeStep = Callable[[], tuple[Tensor, Tensor]]  # the loss and dx


class Training:
    """Steps of the models of one size, which share their layers, norms and x."""

    def __init__(self, size: Size, device: torch.device):
        torch.manual_seed(cases.SEED)
        self.size, self.device = size, device
        with torch.device(device):
            self.layers = [(Attention, SwiGLU)[i % 2](size).to(DTYPE) for i in range(size.sublayers)]
            self.norms = [nn.RMSNorm(size.D, eps=1e-6, dtype=DTYPE) for _ in self.layers]
            for norm in self.norms:
                nn.init.normal_(norm.weight, mean=1.0, std=0.1)
            self.x = torch.randn(size.tokens, size.D).to(DTYPE).requires_grad_()

    def step(self, provider: str, compiled: bool = False) -> TakeStep:
        compiles: Callable[[Any], Any] = partial(torch.compile, dynamic=False) if compiled else lambda module: module
        subject = subject_of(provider)
        inside = subject is cases.MHC_NEXT_NORMED
        layers = self.layers if inside else [nn.Sequential(*pair) for pair in zip(self.norms, self.layers)]
        layers = [compiles(layer) for layer in layers] if provider in UNTRACED else layers
        form: Any = {"recompute": 4 * provider.endswith(RECOMPUTE), "apart": subject is cases.MHC_LAYER}
        form["norms"] = [norm.weight for norm in self.norms] if inside else ()
        connected = stacks.connect(backend_of(provider), layers, self.size.case(), self.device, **form)
        model = Model(connected, provider != PLAIN)
        loss_of, wanted = model if provider in UNTRACED else compiles(model), [self.x, *model.parameters()]

        def step() -> tuple[Tensor, Tensor]:
            loss = loss_of(self.x)
            return loss.detach(), torch.autograd.grad(loss, wanted)[0]

        return step

    def microseconds(self, step: TakeStep) -> float:
        """From an idle device to an idle device, after a step of the same kind: the clocks of a GPU depend on the
        power that the work before it took."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        step()
        wait()
        begin = time.perf_counter()
        step()
        wait()
        return (time.perf_counter() - begin) * 1e6
