"""A convolution over a sequence in pieces, forward and backward.

A token sees S = (W − 1)·dilation tokens back, so a piece needs the S rows before it, its history (row_exchange.py).

Forward: while the history travels, a first call computes all rows without it. Only the first S rows of a piece are
wrong then. A second call, on the history and these S rows, replaces them. An output is a sum of its own W inputs in a
fixed order, so the result has the bits of the whole sequence. Only a launch on 2·S rows waits for the history.

Backward: a first call, on the history and the first 2·S rows of a piece, computes the gradient of the history and the
final dx of the first S rows. That gradient travels while a second call runs on all rows, without the history. The
second call is wrong in terms of the first S rows: their dx is replaced, and a third call, on the first 2·S rows without
the history, gives what is subtracted from the sums over tokens (dweight, dbias, dgamma), in fp32.

One call that waits for the history and takes it as its state would be fewer launches. But nothing would run meanwhile,
short_conv takes no state, and packed sequences would need a state each. Host time of a call (one CPU core, without
kernels and network), which long pieces hide:

    one process       forward 0.02 ms, with backward 0.07 ms
    in pieces         forward 0.11 ms, with backward 0.39 ms
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..conv import contracts, prepare
from ..core.call import Request, run
from ..core.op import Op
from ..core.precision import accumulate
from .agree import STEPS, Statement, agreed
from .row_exchange import Routing, add_tails, all_sum, histories, send_back, send_tails

Tensors = dict[str, Tensor | None]
PARAMETERS = ("weight", "bias", "gamma")


class Conv(NamedTuple):
    """causal_conv1d or short_conv: the requests of its forward and backward, and the options of both."""

    forward_request: Callable[..., Any]
    backward_request: Callable[..., Any]
    op: Op  # the op of the backward
    options: dict[str, Any]

    def forward(self, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """y, and what the kernel keeps for its backward."""
        return run(self.forward_request, **tensors, **self.options)

    def backward(self, tensors: Tensors, dy: Tensor, left: Tensor | None = None) -> Tensors:
        """Gradients by the names of the inputs. Those of parameters are fp32 or wider: calls are still to be summed."""
        tensors = {name: _wide(value) if name in PARAMETERS else value for name, value in tensors.items()}
        if left is None and "inv_rms" in self.op.inputs:
            _, left = self.forward(tensors)
        gradients = run(self.backward_request, dy=dy, left=left, **tensors, **self.options)
        return {name.removeprefix("d"): value for name, value in zip(self.op.outputs._fields, gradients)}


def _wide(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else accumulate(parameter)


def _causal_conv1d(**arguments: Any) -> Any:
    asked = prepare.causal_conv1d(**arguments, output_final_state=False)
    return asked._replace(returns=("y", None)) if isinstance(asked, Request) else (asked, None)


def _short_conv(**arguments: Any) -> Any:
    asked = prepare.short_conv(**arguments)
    return asked._replace(returns=("y", "inv_rms")) if isinstance(asked, Request) else (asked, None)


def _causal_conv1d_backward(dy: Tensor, left: None, residual: Tensor | None, **arguments: Any) -> Any:
    if arguments["backend"] == "reference":
        return _reference_gradients(_causal_conv1d, contracts.causal_conv1d_bwd, dy, residual=residual, **arguments)
    silu, dilation = arguments["activation"] is not None, arguments["dilation"]
    if arguments["initial_state"] is None:
        dilation = prepare.within(dy.shape[1], dilation)
    return _backward_request(
        contracts.causal_conv1d_bwd, **{**arguments, "dilation": dilation}, silu=silu, dy=dy, dfinal_state=None
    )


def _short_conv_backward(dy: Tensor, left: Tensor | None, **arguments: Any) -> Any:
    if arguments["backend"] == "reference":
        return _reference_gradients(_short_conv, contracts.short_conv_bwd, dy, **arguments)
    dilation = prepare.within(dy.shape[1], arguments["dilation"])
    return _backward_request(contracts.short_conv_bwd, **{**arguments, "dilation": dilation}, dy=dy, inv_rms=left)


def _backward_request(op: Op, backend: str, **values: Any) -> Request:
    """A request without checks: the forward made them, and torch.compile does not trace them in a backward."""
    inputs = {name: values[name] for name in op.inputs}
    return Request(op, backend, inputs, op.outputs._fields)


def _reference_gradients(forward: Callable[..., Any], op: Op, dy: Tensor, **arguments: Any) -> tuple[Any, ...]:
    """Gradients in the order of the op's outputs; None for an input that is absent."""
    names = [name.removeprefix("d") for name in op.outputs._fields]
    leaves = {name: arguments[name].detach().requires_grad_() for name in names if arguments.get(name) is not None}
    with torch.enable_grad():
        y, _ = forward(**{**arguments, **leaves})
    found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy)))
    return tuple([found.get(name) for name in names])


def causal_conv1d(options: dict[str, Any]) -> Conv:
    return Conv(_causal_conv1d, _causal_conv1d_backward, contracts.causal_conv1d_bwd, options)


def short_conv(options: dict[str, Any]) -> Conv:
    return Conv(_short_conv, _short_conv_backward, contracts.short_conv_bwd, options)


# The tensors of one call on some of the rows, by name


def _slice(rows: Tensor, routing: Routing, i: int, count: int) -> Tensor:
    """The first `count` rows of piece i."""
    return rows[:, i * routing.length : i * routing.length + count]


def _window(
    given: Tensors, routing: Routing, i: int, count: int, history: Tensor | None, ids: Tensor | None
) -> Tensors:
    """The tensors of a call on the first `count` rows of piece i, after its history if one is given."""
    tensors = dict(given)
    x, residual, seq_idx, cu_seqlens = (given.get(name) for name in ("x", "residual", "seq_idx", "cu_seqlens"))
    assert x is not None
    begin = routing.starts[i]
    if history is not None:
        begin -= history.shape[1]
    tensors["x"] = _after(history, _slice(x, routing, i, count))
    if residual is not None:
        nothing = None if history is None else residual.new_zeros(history.shape)
        tensors["residual"] = _after(nothing, _slice(residual, routing, i, count))
    if seq_idx is not None:
        tensors["seq_idx"] = _after(ids, _slice(seq_idx, routing, i, count))
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = cu_seqlens - begin  # the op clamps positions outside of the window
    elif "initial_state" in given and (history is None or begin > 0):
        tensors["initial_state"] = None
    return tensors


def _after(first: Tensor | None, then: Tensor) -> Tensor:
    return then if first is None else torch.cat([first, then], 1)


def _wholes(given: Tensors, routing: Routing) -> list[Tensors]:
    """The calls on all rows, without histories. Two pieces are one call on twice the batch; with cu_seqlens, where the
    batch must be 1, each piece is a call of its own."""
    count = len(routing.starts)
    if given.get("cu_seqlens") is not None or count == 1:
        return [_window(given, routing, i, routing.length, None, None) for i in range(count)]
    tensors = dict(given)
    for name in ("x", "residual", "seq_idx"):
        rows = given.get(name)
        if rows is not None:
            tensors[name] = rows.unflatten(1, (count, routing.length)).flatten(0, 1)
    if "initial_state" in given:
        tensors["initial_state"] = None
    return [tensors]


def _as_wholes(rows: Tensor, wholes: Sequence[Tensors]) -> list[Tensor]:
    """Rows [B, L, ...] in the shapes of x in the calls on all rows."""
    shapes = [x.shape for x in (whole["x"] for whole in wholes) if x is not None]
    if len(shapes) == 1:
        return [rows.view(shapes[0])]
    return list(rows.chunk(len(shapes), 1))


def _joined(parts: Sequence[Tensor], x: Tensor) -> Tensor:
    """The results of the calls on all rows as one tensor [B, L, ...]."""
    return parts[0].reshape(x.shape) if len(parts) == 1 else torch.cat(list(parts), 1)


def _incomplete(given: Tensors, routing: Routing) -> list[int]:
    """The pieces whose first rows are wrong in the call on all rows."""
    dense_state = given.get("initial_state") is not None and given.get("cu_seqlens") is None
    return [i for i, start in enumerate(routing.starts) if start > 0 or dense_state]


class PiecewiseConv(torch.autograd.Function):
    """y of this rank's rows.

    statement: the one on which the ranks have agreed   none: the empty tensor of `agreed`   names: of the tensors. x,
    residual and seq_idx are this rank's rows, all others are the same on every rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        conv: Conv,
        routing: Routing,
        statement: Statement,
        none: Tensor,
        names: tuple[str, ...],
        *tensors: Tensor | None,
    ) -> Tensor:
        given: Tensors = dict(zip(names, tensors))
        x, seq_idx = given["x"], given.get("seq_idx")
        assert x is not None
        under_way = send_tails(x, routing, statement.group, none)
        ids_under_way = None if seq_idx is None else send_tails(seq_idx, routing, statement.group, seq_idx[:, :0])
        results = [] if routing.short else [conv.forward(whole) for whole in _wholes(given, routing)]
        before = histories(under_way, routing)
        ids = [None] * len(before) if ids_under_way is None else histories(ids_under_way, routing)
        if routing.short:
            windows = [_window(given, routing, i, routing.length, before[i], ids[i]) for i in range(len(before))]
            y = torch.cat([conv.forward(window)[0][:, n:] for window, n in zip(windows, routing.histories)], 1)
        else:
            y = _joined([y for y, _ in results], x)
            for i in _incomplete(given, routing):
                window = _window(given, routing, i, routing.reach, before[i], ids[i])
                _slice(y, routing, i, routing.reach).copy_(conv.forward(window)[0][:, routing.histories[i] :])
        ctx.conv, ctx.routing, ctx.statement, ctx.names = conv, routing, statement, names
        ctx.save_for_backward(*tensors, *before, *ids, *[left for _, left in results])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError("a convolution over a sequence in pieces has no second derivative")
        conv, routing, count = ctx.conv, ctx.routing, len(ctx.routing.starts)
        saved = list(ctx.saved_tensors)
        given: Tensors = dict(zip(ctx.names, saved))
        before, ids, left = (saved[len(ctx.names) :][k * count : (k + 1) * count] for k in range(3))
        dy = dy.contiguous()

        firsts: dict[int, Tensors] = {}
        for i in range(count) if routing.short else _incomplete(given, routing):
            window = _window(given, routing, i, routing.window, before[i], ids[i])
            silent = dy.new_zeros(before[i].shape)
            firsts[i] = conv.backward(window, torch.cat([silent, _slice(dy, routing, i, routing.window)], 1))
        # An empty history takes its gradient from dy: a compiler would send what does not depend on dy in the forward.
        dhistories = [_dx(firsts[i])[:, :n] if i in firsts else dy[:, :n] for i, n in enumerate(routing.histories)]
        under_way = send_back(dhistories, routing, ctx.statement.backward())

        wholes = _wholes(given, routing)
        if routing.short:
            results: list[Tensors] = []
            wrong: list[Tensors] = []
            dx = torch.cat([_dx(firsts[i])[:, n:] for i, n in enumerate(routing.histories)], 1)
        else:
            parts = zip(wholes, _as_wholes(dy, wholes), left)
            results = [conv.backward(whole, part, kept) for whole, part, kept in parts]
            windows = {i: _window(given, routing, i, routing.window, None, None) for i in firsts}
            wrong = [conv.backward(windows[i], _slice(dy, routing, i, routing.window).contiguous()) for i in firsts]
            dx = _joined([_dx(result) for result in results], dy)
            for i, first in firsts.items():
                n = routing.histories[i]
                _slice(dx, routing, i, routing.reach).copy_(_dx(first)[:, n : n + routing.reach])

        found: Tensors = {"x": dx, "initial_state": _dinitial_state(given, routing, firsts, results)}
        for name in PARAMETERS:
            found[name] = _total(given.get(name), name, [*results, *firsts.values()], wrong)
        if given.get("residual") is not None:
            real = [
                contracts.without_padding(part, whole["seq_idx"], whole["cu_seqlens"])
                for part, whole in zip(_as_wholes(dy, wholes), wholes)
            ]
            found["residual"] = _joined(real, dy)
        add_tails(dx, under_way, routing)
        return None, None, None, None, None, *[found.get(name) for name in ctx.names]


def _dx(gradients: Tensors) -> Tensor:
    dx = gradients["x"]
    assert dx is not None
    return dx


def _total(parameter: Tensor | None, name: str, parts: Sequence[Tensors], wrong: Sequence[Tensors]) -> Tensor | None:
    """The gradient of a parameter: the sum of `parts` minus the terms in `wrong`."""
    if parameter is None:
        return None
    total, *others = [share for share in (part[name] for part in parts) if share is not None]
    for share in others:
        total = total + share
    for part in wrong:
        total = total - part[name]  # type: ignore[operator]
    return total.to(parameter.dtype)


def _dinitial_state(
    given: Tensors, routing: Routing, firsts: dict[int, Tensors], results: Sequence[Tensors]
) -> Tensor | None:
    """This rank's share. If a sequence begins before a piece, its initial state was read in the history of it."""
    state, cu_seqlens = given.get("initial_state"), given.get("cu_seqlens")
    if state is None:
        return None
    shares: list[Tensor] = []
    for i, (start, rows) in enumerate(zip(routing.starts, routing.histories)):
        with_history = firsts[i]["initial_state"] if i in firsts and (cu_seqlens is not None or start == rows) else None
        within = results[i]["initial_state"] if cu_seqlens is not None and not routing.short else None
        if with_history is not None and within is not None:
            assert cu_seqlens is not None
            begins = cu_seqlens.cummax(0).values[:-1, None, None]
            shares.append(torch.where(begins >= start, within, with_history))
        else:
            shares += [share for share in (with_history, within) if share is not None]
    return sum(shares[1:], shares[0]) if shares else torch.zeros_like(state)


class SumOfRanks(torch.autograd.Function):
    """Sum the shares of all ranks. Every rank has a share of the cotangent too. statement: about the backward"""

    @staticmethod
    def forward(ctx: Any, share: Tensor, statement: Statement) -> Tensor:
        ctx.statement = statement
        return all_sum(share, statement.group)

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
        none = agreed(ctx.statement, dtotal)
        return SumOfRanks.apply(torch.cat([none, dtotal], 1), ctx.statement), None


def final_state(
    x: Tensor,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    routing: Routing,
    world: int,
    statement: Statement,
) -> Tensor:
    """[N, D, S] on all ranks: the last S inputs of every sequence, each from the rank that has it. Before the start of
    the sequence they are those of its initial state."""
    S, everything = routing.reach, world * x.shape[1]
    if cu_seqlens is None:
        bounds = torch.tensor([[0, everything]], device=x.device).expand(x.shape[0], 2)
    else:
        within = cu_seqlens.clamp(0, everything).cummax(0).values
        bounds = torch.stack([within[:-1], within[1:]], 1)
    begin, end = bounds[:, :1], bounds[:, 1:]
    time = end - S + torch.arange(S, device=x.device)
    row = torch.full_like(time, -1)
    for i, start in enumerate(routing.starts):
        row = torch.where((time >= start) & (time < start + routing.length), time - start + i * routing.length, row)
    sequence = torch.arange(len(time), device=x.device)[:, None] if cu_seqlens is None else 0
    mine = (row >= 0) & (time >= begin)
    state = SumOfRanks.apply(
        torch.where(mine[..., None], x[sequence, row.clamp(min=0)], 0), statement.backward(STEPS[2])
    )
    if initial_state is not None:
        older = (S + time - begin).clamp(0, S - 1)[..., None].expand_as(state)
        state = torch.where((time < begin)[..., None], initial_state.transpose(1, 2).gather(1, older), state)
    return state.transpose(1, 2)
