"""A training step of a small transformer (docs/measure.md), and the stacks that it has, whose boundaries are timed."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import truediv
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_ops import HyperConnection, HyperStack

from ..core import backend as backends
from ..testing import cases
from . import peers, selection
from .peers import Layer
from .results import COMPILED, EAGER, GRAPHS, MODES, PLAIN, Results, StepTime, Wrong, name_of
from .speed import SAMPLES, peak_memory, quartiles, summary

N = 4
ALLOWED = 5e-2  # of the relative difference to the reference: bf16 leaves 1e-2 of it, a wrong term far more
HEAD = 128  # channels of a head of attention
LONGEST = 4096  # tokens of a sequence
DTYPE = torch.bfloat16
IN_A_ROW = 4  # steps that are timed together
# Forms of ours, after the backend's name: what the model is made of, and the `recompute` of the stack.
APART, NO_NORM, RECOMPUTE, SHIFTED = ("HyperConnection", "layer_norm=False", "recompute=4", "shifted")
FORMS = {"": (cases.MHC_NEXT_NORMED, 0), APART: (cases.MHC_LAYER, 0), NO_NORM: (cases.MHC_NEXT, 0)}
FORMS |= {RECOMPUTE: (cases.MHC_NEXT_NORMED, 4), SHIFTED: (cases.MHC_NEXT_SHIFTED_NORMED, 0)}
UNTRACED = "TileKernels"  # only its layers are compiled: a trace does not see an attribute of a storage


@dataclass(frozen=True)
class Size:
    tokens: int
    D: int
    sublayers: int
    F: int

    def __str__(self) -> str:
        return f"training_step {self.tokens}x{N}x{self.D} F={self.F} {self.sublayers} sublayers"

    def case(self, provider: str, tokens: int = 1) -> cases.Stack:
        """What its model is made of: layers, or boundaries of a HyperStack, with the norm if the backend has it."""
        form = provider.partition(" ")[2]
        if form not in FORMS or not form:
            form = {"tilelang": NO_NORM}.get(provider, "" if provider in backends.BACKENDS else APART)
        subject, recompute = FORMS[form]
        return cases.Stack(subject, (tokens,), N, self.D, DTYPE, gamma=False, recompute=recompute)


SIZES = (Size(8192, 4096, 6, 11008), Size(4096, 2560, 8, 6912), Size(4096, 1280, 12, 3456), Size(8192, 768, 12, 2048))
SIZES_CPU = (Size(64, 128, 2, 256),)


def backend_of(provider: str) -> str:
    """The backend of ours, without the form that may follow it; the name of others."""
    first, *_ = provider.split()
    return first if first in backends.BACKENDS else provider


class Connection(nn.Module):
    """A layer within its residuals: call(x, layer, **maps)."""

    def __init__(self, layer: Layer, call: Callable[..., Tensor], maps: cases.Tensors | None = None):
        super().__init__()
        self.layer, self.call = layer, call
        self.maps = nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in (maps or {}).items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.layer, **self.maps)


def _of_peer(peer: peers.Peer, layer: Layer, ours: cases.Tensors) -> Connection:
    """Its mhc_layer, whose maps hold ours."""
    prepared = peer.prepare("mhc_layer", ours)
    assert prepared is not None, f"{peer.name} has no mhc_layer, but was planned"
    theirs, its_call = dict(prepared.tensors), prepared.call
    outer = (1,) * (theirs.pop("x").dim() - ours["x"].dim())  # what it wants before the tokens
    del theirs["h_out"]
    call = lambda x, layer, **maps: its_call(x=x.view(*outer, *x.shape), h_out=layer, **maps)[0]  # noqa: E731
    return Connection(layer, call, theirs)


def connect(
    provider: str, layers: Sequence[Layer], case: cases.Stack, device: torch.device, norms: Sequence[Tensor] = ()
) -> nn.Module:
    """A HyperStack, or HyperConnections in a row if the case is a layer. A layer's maps are drawn from its number.
    norms: the weights of norms that the layers lack."""
    if provider == PLAIN:
        return nn.Sequential(*(Connection(layer, lambda x, layer: x + layer(x)) for layer in layers))
    alone, subject = replace(case.layer(), outer=(1,)), case.subject
    drawn = [replace(alone, seed=case.seed + i).inputs(device) for i in range(len(layers))]
    if peer := peers.by_name(provider):
        return nn.Sequential(*(_of_peer(peer, layer, of) for layer, of in zip(layers, drawn)))
    for of, norm in zip(drawn, norms):
        of["layer_norm_weight"] = norm
    own: dict[str, Any] = {"backend": provider if provider in backends.BACKENDS else "reference", "device": device}
    own |= {"residual": "identity" if subject is cases.MHC_NEXT_IDENTITY else "sinkhorn"}
    connections = [
        HyperConnection(layer, case.n, case.D, layer_norm=subject in cases.NORMED, **own) for layer in layers
    ]
    for connection, of in zip(connections, drawn):
        rows = {name: len(parameter) for name, parameter in connection.named_parameters()}  # fewer for the identity
        # x and h_out are not its
        connection.load_state_dict({name: t[: rows.get(name)] for name, t in of.items()}, strict=False)
    if subject is cases.MHC_LAYER:
        return nn.Sequential(*connections)
    return HyperStack(*connections, recompute=case.recompute, shifted=subject in cases.SHIFTED)


def connects(provider: str, case: cases.Stack, device: torch.device) -> bool:
    """Whether the provider has what the case is made of. A peer has layers: beside others its norm would be torch's."""
    if (peer := peers.by_name(provider)) is None:
        return provider not in selection.KERNELS or backends.why_not("mhc", provider, device) is None
    layer, only_ours = replace(case.layer(), outer=(1,)), case.recompute or case.subject in cases.VARIANTS
    return not only_ours and peer.prepare(layer.subject.name, layer.inputs()) is not None


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


TakeStep = Callable[[], tuple[Tensor, Tensor]]  # the loss and dx


@dataclass(frozen=True)
class Race:
    """A unit of `bench`: the models of all providers take turns at one size, in one mode."""

    size: Size
    mode: str
    providers: tuple[str, ...]

    @property
    def case(self) -> str:
        return name_of(self.size, self.mode)

    @property
    def provider(self) -> str:
        return ", ".join(self.providers)

    def __str__(self) -> str:
        return f"{self.case}: {self.provider}"

    def measure(self, device: torch.device, results: Results) -> None:
        training, steps = Training(self.size, self.mode, device), {}
        for provider in (PLAIN, *self.providers):
            with results.failures_of(self.case, provider):
                steps[provider] = training.checked(provider)
        with results.failures_of(self.case, PLAIN):
            results.steps += training.measure(steps)


def sizes_on(device: torch.device) -> Sequence[Size]:
    return SIZES if device.type == "cuda" else SIZES_CPU


def plan(text: str, present: Sequence[str], device: torch.device) -> list[Race]:
    """Each size in each mode that runs here. Nothing is compiled unless "torch.compile" is present."""
    races = []
    for mode in MODES:
        formula = COMPILED if mode == COMPILED else EAGER
        possible = [p for p in present if p == formula or p not in selection.OF_TORCH]
        forms = [form for form in FORMS if mode != COMPILED or form != RECOMPUTE]  # it decides itself what is kept
        runs = {GRAPHS: device.type == "cuda", COMPILED: COMPILED in present}.get(mode, True)
        for size in (size for size in sizes_on(device) if runs and text in str(size)):
            there = [p for p in possible if connects(p, size.case(p), device)]
            named = [f"{p} {form}".strip() for p in there for form in (forms if p == selection.KERNELS[0] else [""])]
            races += [Race(size, mode, tuple(named))] if there else []
    return races


class Training:
    """Steps of the models of one size and mode, which share layers, norms and x."""

    def __init__(self, size: Size, mode: str, device: torch.device):
        torch.compiler.reset()
        torch.manual_seed(cases.SEED)
        self.size, self.mode, self.device = size, mode, device
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        with torch.device(device):
            self.layers = [(Attention, SwiGLU)[i % 2](size).to(DTYPE) for i in range(size.sublayers)]
            self.norms = [nn.RMSNorm(size.D, eps=1e-6, dtype=DTYPE) for _ in self.layers]
            for norm in self.norms:
                nn.init.normal_(norm.weight, mean=1.0, std=0.1)
            self.x = torch.randn(size.tokens, size.D).to(DTYPE).requires_grad_()

    def step(self, provider: str, mode: str = EAGER) -> TakeStep:
        compiled: Any = partial(torch.compile, dynamic=False) if mode == COMPILED else lambda module: module
        case = self.size.case(provider)
        inside = case.subject in cases.NORMED
        layers = self.layers if inside else [nn.Sequential(*pair) for pair in zip(self.norms, self.layers)]
        layers = [compiled(layer) for layer in layers] if provider == UNTRACED else layers
        norms = [norm.weight for norm in self.norms] if inside else ()
        connected = connect(backend_of(provider), layers, case, self.device, norms)
        wanted = [self.x, *connected.parameters()]

        def loss_of(x: Tensor) -> Tensor:
            """Streams begin as copies of x and end as their mean; a shifted stack has contracted them itself."""
            if provider != PLAIN:
                x = x.unsqueeze(1).expand(-1, N, -1).contiguous()
            x = connected(x)
            return (x.mean(1) if x.dim() > 2 else x).float().square().mean()

        if provider != UNTRACED:
            loss_of = compiled(loss_of)

        def step() -> tuple[Tensor, Tensor]:
            loss = loss_of(self.x)
            return loss.detach(), torch.autograd.grad(loss, wanted)[0]

        return captured(step) if mode == GRAPHS else step

    def sample(self, step: TakeStep) -> list[float]:
        """Milliseconds of a step from an idle device to an idle device, and of one in a row. A step of the same kind
        goes before: a GPU's clocks depend on the power that the work before took."""

        def timed(count: int) -> float:
            begin = time.perf_counter()
            for _ in range(count):
                step()
            self.wait()
            return (time.perf_counter() - begin) * 1e3 / count

        timed(1)
        return [timed(1), timed(IN_A_ROW)]

    def checked(self, provider: str) -> tuple[TakeStep, dict[str, Any]]:
        """A step, and what is known of it: the relative difference of the loss or of dx, whichever is larger, and the
        memory, which a graph takes when it is captured. Wrong if the model or one of its layers is another function."""
        step, difference = self.step(provider, self.mode), None
        if provider != PLAIN:
            selection.check(self.size.case(provider, self.size.tokens), backend_of(provider), self.device, [])
            formula = self.step(f"eager {SHIFTED}" if provider.endswith(SHIFTED) else "eager")
            pairs = [(a.double(), b.double()) for a, b in zip(step(), formula())]
            difference = torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()  # NaN is the largest
            if not difference <= ALLOWED:
                raise Wrong(f"its step is off by {difference:.1e} (allowed {ALLOWED:.0e})")
        peak = peak_memory(step) if self.device.type == "cuda" and self.mode != GRAPHS else None
        return step, {"peak_megabytes": peak, "difference": difference}

    def measure(self, steps: Mapping[str, tuple[TakeStep, dict[str, Any]]]) -> list[StepTime]:
        """The times of the steps, which take turns; each is the first of a round in turn. `plain` is among them."""
        turns, rounds = deque(steps), {name: list[list[float]]() for name in steps}
        for _ in range(SAMPLES):
            for name in turns:
                rounds[name].append([round(ms, 4) for ms in self.sample(steps[name][0])])
            turns.rotate(-1)
        found = []
        for name, (_, known) in steps.items():
            kinds = [] if name == PLAIN else zip(zip(*rounds[name]), zip(*rounds[PLAIN]))  # from idle, in a row
            ratios = [quartiles([*map(truediv, own, plain)]) for own, plain in kinds] or [[], []]
            known["ratio"], known["in_a_row"] = ratios
            idle = summary([idle for idle, _ in rounds[name]])
            found.append(StepTime(str(self.size), name, self.mode, *idle, **known, rounds=rounds[name]))
        return found


def captured(step: TakeStep) -> TakeStep:
    """The step as a CUDA graph, forward and backward."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()

    def replay(model: TakeStep = step) -> tuple[Tensor, Tensor]:
        """The graph reads the parameters of the model, which live as long as this function holds its step."""
        graph.replay()
        return found

    return replay
