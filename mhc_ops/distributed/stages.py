"""Stages of a pipeline: slices of a HyperStack, and what one stage hands to the next.

A boundary between stages lies between two connections. A stage sends either x_next, after it has written back its last
sublayer's output, or a carry: x as that sublayer read it, its output h_out and its maps; the next stage writes back.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..core.check import check_count, check_word
from ..mhc import carry as between
from ..mhc.carry import StackCarry
from ..mhc.modules import HyperConnection
from ..mhc.ops import Carry, mhc_expand
from ..mhc.stack import HyperStack, split

MAP_BYTES = 4  # maps are fp32


class Send(str, Enum):
    """What one stage sends to the next, besides p of a shifted stack."""

    X_NEXT = "x_next"  # x after the last sublayer
    CARRY = "carry"  # x before it, h_out, and the maps that write h_out back


def boundary_bytes(
    n: int,
    D: int,
    itemsize: int,
    *,
    send: str = Send.X_NEXT.value,
    shifted: bool = False,
    identity: bool = False,
    critical: bool = False,
) -> int:
    """Bytes per token that cross a boundary of stages in the forward; the backward sends as many.

    itemsize: of x and h_out   identity: the sublayer before the boundary has residual="identity", hence no h_res
    critical: count only what is sent after the layer: all of x_next; all of a carry but x, which
      `mhc_ops.distributed.PipelineStage` sends earlier

    >>> boundary_bytes(4, 4096, 2, send="x_next"), boundary_bytes(4, 4096, 2, send="carry")
    (32768, 41040)
    >>> boundary_bytes(4, 4096, 2, send="carry", critical=True)
    8272
    """
    check_word("boundary_bytes", "send", send, [way.value for way in Send])
    for name, value in (("n", n), ("D", D), ("itemsize", itemsize)):
        check_count("boundary_bytes", name, value)
    streams, p = n * D * itemsize, n * MAP_BYTES if shifted else 0
    if send == Send.X_NEXT:
        return streams + p
    maps = n if identity else n + n * n
    late = D * itemsize + maps * MAP_BYTES + p
    return late if critical else streams + late


class Outlet(Protocol):
    """Sends x of one microbatch from a stage before its layer runs, and waits for the gradient of x."""

    def send(self, x: Tensor) -> None: ...

    def await_gradient(self) -> None: ...


class HyperStage(HyperStack):
    """The connections start to stop of a stack: one stage of a pipeline, with the keys of the whole stack's state.

    A stage takes what the stage before returns; torch's PipelineStage sends it. The first takes x [..., n, D], the
    last returns what the stack does. The others return, with send="x_next", x, or (x, p) of a shifted stack; with
    send="carry", (x, h_out, h_post, h_res) and p, without h_res if the last sublayer has residual="identity".

    Outputs have the bits of the stack. Gradients do too with "x_next"; with "carry" the gradient of x is a sum of two,
    which is rounded once more. All stages of a stack have the same `send`.

    Keywords are passed on to every layer. A layer of a stage must return h_out alone.

    >>> stages = [HyperStage(stack, 0, 3), HyperStage(stack, 3, len(stack))]
    >>> x = stages[1](stages[0](x))  # in one process: stack(x)
    """

    outlet: Outlet | None = None  # set by a PipelineStage while it runs this stage

    def __init__(self, stack: HyperStack, start: int, stop: int, *, send: str = Send.X_NEXT.value):
        check_word("HyperStage", "send", send, [way.value for way in Send])
        _check_span("HyperStage", stack, start, stop)
        super().__init__(recompute=stack.recompute, shifted=stack.shifted)
        for number in range(start, stop):
            self.add_module(str(number), stack[number])
        self.begins, self.ends, self.send = start == 0, stop == len(stack), send
        self.span = start, stop, len(stack)
        if self.shifted:
            self.first, self.last = self.begins and stack.first, self.ends and stack.last
        self.n = stack[start].n
        # What the carry of the stage before contains.
        before: HyperConnection | None = None if self.begins else stack[start - 1]
        self.mixed = before is not None and before.has_h_res
        self.transposed = before is not None and before.options["transposed"]

    @property
    def keeps_input_types(self) -> bool:
        """Whether `fully_shard` must not cast the inputs: a later stage takes maps and p, all fp32."""
        return not self.begins

    def expand(self, h: Tensor) -> Tensor:
        """The start of a model, n copies of h [..., D]; only the first stage has it."""
        if not self.begins:
            first = next(iter(self._modules))
            raise ValueError(f"HyperStage: only the first stage expands; this one begins with connection {first}")
        return mhc_expand(h, self.n)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        carry, ending = self._begun(inputs), len(self._modules) - 1
        for place, (name, connection) in enumerate(self._modules.items()):
            if place == ending and self._sends_carry():
                carry = carry._replace(leaving=self._leaving)
            carry, rest = split(name, connection(carry, **kwargs))
            if rest is not None:
                raise TypeError(f"HyperStage: the layer of connection {name} must return h_out alone in a pipeline")
            backend = getattr(connection, "backend", None)
        if not self._sends_carry():
            return between.end(carry, backend, contracted=self.shifted and self.last)
        ended = carry.carry
        assert isinstance(ended, Carry)
        sent = (ended.x, carry.h_out, ended.h_post, ended.h_res, ended.read)
        return tuple(_Sent.apply(tensor) for tensor in sent if tensor is not None)

    def _sends_carry(self) -> bool:
        return self.send == Send.CARRY and not self.ends

    def _takes(self) -> tuple[str, ...]:
        """The names of the inputs."""
        p = ("p",) if self.shifted and not self.first else ()
        if self.begins or self.send == Send.X_NEXT:
            return "x", *p
        return "x", "h_out", "h_post", *(("h_res",) if self.mixed else ()), *p

    def _begun(self, inputs: tuple[Any, ...]) -> StackCarry:
        names = self._takes()
        if len(inputs) == 1 and isinstance(inputs[0], tuple):
            (inputs,) = inputs
        if len(inputs) != len(names) or not all(isinstance(tensor, Tensor) for tensor in inputs):
            got = ", ".join(type(value).__name__ for value in inputs)
            raise TypeError(f"HyperStage: the input must be ({', '.join(names)}) of the stage before, got ({got})")
        given = dict(zip(names, inputs if self.begins else map(_Received.apply, inputs)))
        x, p = given.pop("x"), given.pop("p", None)
        if not given:
            return between.begin(x, self.recompute, self.shifted, p)
        carry = Carry(x, given["h_post"], given.get("h_res"), read=p, transposed=self.transposed)
        return between.resume(carry, given["h_out"], self.recompute)

    def _leaving(self, h_in: Tensor, carry: StackCarry) -> tuple[Tensor, StackCarry]:
        h_in, x = _Leave.apply(h_in, carry.x, self.outlet)
        return h_in, carry._replace(carry=carry.carry._replace(x=x))

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"send={self.send!r}")))


def pipeline_stages(model: nn.Module, cuts: Sequence[int], *, send: str = Send.X_NEXT.value) -> list[nn.Module]:
    """The stages of a model, cut before these connections of its HyperStack; a process keeps the ones that it runs.

    model: a `HyperStack`, or an nn.Sequential with one in it. Modules before the stack are in the first stage, modules
    after it in the last. Every stage has the model's keys for its part, so that checkpoints of the model or of any
    other cut fit. Parameters are shared with the model, not copied.

    >>> model = nn.Sequential(OrderedDict(embedding=..., stack=HyperStack(...), head=HyperHead(4, 64), out=...))
    >>> parts = pipeline_stages(model, [3, 6])  # connections 0 to 2, 3 to 5, and the rest
    >>> stage = PipelineStage(parts[rank], rank, len(parts), device)
    """
    stacks = {name: part for name, part in _named_parts(model) if isinstance(part, HyperStack)}
    if len(stacks) != 1:
        raise TypeError(
            "pipeline_stages: model must be a HyperStack or an nn.Sequential with one in it, "
            f"got {type(model).__name__} with {len(stacks)}"
        )
    ((own_name, stack),) = stacks.items()
    edges = [0, *cuts, len(stack)]
    for start, stop in pairwise(edges):
        _check_span("pipeline_stages", stack, start, stop)
    stages = [HyperStage(stack, start, stop, send=send) for start, stop in pairwise(edges)]
    if stack is model:
        return list(stages)
    parts = [_Part() for _ in stages]
    place = 0  # the first stage before the stack, the last after it
    for name, module in _named_parts(model):
        if name == own_name:
            for part, stage in zip(parts, stages):
                part.add_module(name, stage)
            place = -1
        else:
            parts[place].add_module(name, module)
    return list(parts)


class _Part(nn.Sequential):
    """A stage with the model's modules before or after the stack."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        given: Any = inputs
        for module in self:
            if isinstance(module, HyperStage):
                given = module(*given, **kwargs) if isinstance(given, tuple) else module(given, **kwargs)
            else:
                given = module(*given) if isinstance(given, tuple) else module(given)
        return given


class _Leave(torch.autograd.Function):
    """Passes h_in on to the layer and sends x out of the stage. The backward runs when the layer's backward has made
    dh_in. Until then dx may still be arriving in the buffer that autograd was given: nothing reads it earlier."""

    @staticmethod
    def forward(ctx: Any, h_in: Tensor, x: Tensor, outlet: Outlet | None) -> tuple[Tensor, Tensor]:
        ctx.outlet = outlet
        x = x.contiguous()
        if outlet is not None:
            outlet.send(x.detach())
        return h_in.view_as(h_in), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dh_in: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        if ctx.outlet is not None:
            ctx.outlet.await_gradient()
        return dh_in, dx, None


class _Sent(torch.autograd.Function):
    """The same memory, contiguous, as a tensor of its own: schedules that split the backward detach it in place, which
    torch refuses for a view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        if hasattr(tensor, "to_local"):
            raise TypeError("HyperStage: a carry of DTensors cannot be sent: cut first, with send='x_next'")
        memory = tensor.detach().contiguous()
        return tensor.new_empty(0).set_(
            memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride()
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Received(torch.autograd.Function):
    """Makes the gradient contiguous, as it must be to be sent back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _named_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if isinstance(model, HyperStack):
        return [("", model)]
    return list(model.named_children()) if isinstance(model, nn.Sequential) else []


def _check_span(function: str, stack: HyperStack, start: int, stop: int) -> None:
    if not isinstance(stack, HyperStack):
        raise TypeError(f"{function}: stack must be a HyperStack, got {type(stack).__name__}")
    for cut in (start, stop):
        if not isinstance(cut, int) or isinstance(cut, bool):
            raise TypeError(f"{function}: a cut must be an int, got {type(cut).__name__}")
        if not 0 <= cut <= len(stack):
            raise ValueError(f"{function}: cut {cut} is outside of the stack, which has {len(stack)} connections")
    if start >= stop:
        raise ValueError(f"{function}: a stage from connection {start} to {stop} is empty")
