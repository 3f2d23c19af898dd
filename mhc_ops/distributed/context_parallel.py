"""Context parallel: causal_conv1d and short_conv of a sequence whose pieces lie on the ranks of a group."""

import warnings
from typing import Any, Literal, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..conv import prepare
from ..core.backend import choose
from ..core.call import run
from . import agree, piecewise_conv, row_exchange
from .piecewise_conv import PiecewiseConv, Tensors
from .row_exchange import Ranks, Routing


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    layout: str = "contiguous",
    activation: str | None = None,
    dilation: int = 1,
    residual: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    layout: str = "contiguous",
    activation: str | None = None,
    dilation: int = 1,
    residual: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    layout: str = "contiguous",
    activation: str | None = None,
    dilation: int = 1,
    residual: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    layout: str = "contiguous",
    activation: str | None = None,
    dilation: int = 1,
    residual: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`mhc_ops.causal_conv1d` of a sequence in pieces: y of this rank's tokens, with the bits of one process.

    Arguments are those of that function. x, residual and seq_idx are this rank's tokens; all others are the same on
    every rank. All ranks have equally many tokens (`shard_sequence` cuts a sequence).

    group: a process group or a mesh of one dimension
    layout: "contiguous": rank r has piece r; "zigzag": of 2·world pieces rank r has r and 2·world − 1 − r, concatenated
    cu_seqlens: positions in the whole sequence. Packed sequences may begin, end and cross pieces anywhere.
    initial_state: of the whole sequence, or of every packed one; with seq_idx, of the sequence of the very first token
    With output_final_state, every rank gets final_state of the whole sequence, or of every packed one.

    Gradients of x and residual are complete. Gradients of weight, bias and initial_state are this rank's share: the
    gradient is their sum over the group. The cotangent of final_state is likewise the sum over the ranks.

    All ranks make the same calls in the same order, forward and backward. Each call begins with a message between the
    hosts. If two ranks differ in function, arguments given, types or sizes, every rank raises an error; if a rank does
    not come, the others raise one after the timeout of the group. Values are not compared. In a group of one this is
    mhc_ops.causal_conv1d, and a warning says so.
    """
    function = "causal_conv1d"
    here = row_exchange.ranks(function, group, layout)
    options: dict[str, Any] = {"activation": activation, "dilation": dilation, "backend": backend}
    tensors: Tensors = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "residual": residual,
        "seq_idx": seq_idx,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
    }
    if here.world == 1:
        _warn_of_one(function)
        return run(prepare.causal_conv1d, **tensors, **options, output_final_state=bool(output_final_state))
    number = agree.next_number(here.group)
    _check_plain(function, x)
    prepare.check_causal_conv1d(
        x=x,
        weight=weight,
        bias=bias,
        activation=activation,
        dilation=dilation,
        residual=residual,
        seq_idx=seq_idx,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        output_final_state=output_final_state,
    )
    statement, none, routing = _agree(
        function,
        here,
        x,
        weight,
        dilation=dilation,
        number=number,
        activation=int(activation is not None),
        bias=int(bias is not None),
        residual=int(residual is not None),
        seq_idx=int(seq_idx is not None),
        cu_seqlens=0 if cu_seqlens is None else cu_seqlens.shape[0],
        initial_state=int(initial_state is not None),
        output_final_state=int(output_final_state),
    )
    if routing.reach == 0:
        tensors["cu_seqlens"] = None if cu_seqlens is None else routing.local(cu_seqlens)
        return run(prepare.causal_conv1d, **tensors, **options, output_final_state=bool(output_final_state))
    options["backend"] = choose(function, "conv", backend, x.device)  # for the backward too
    conv = piecewise_conv.causal_conv1d(options)
    y = PiecewiseConv.apply(conv, routing, statement, none, tuple(tensors), *tensors.values())
    if not output_final_state:
        return y
    return y, piecewise_conv.final_state(x, cu_seqlens, initial_state, routing, here.world, statement)


def short_conv(
    x: Tensor,
    gamma: Tensor,
    weight: Tensor,
    *,
    group: dist.ProcessGroup | DeviceMesh,
    layout: str = "contiguous",
    dilation: int = 1,
    residual: bool = True,
    norm_eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """`mhc_ops.short_conv` of a sequence in pieces: y of this rank's tokens, with the bits of one process.

    x: [B, L, n, D], this rank's tokens; group, layout and gradients as in `mhc_ops.distributed.causal_conv1d`.
    """
    function = "short_conv"
    here = row_exchange.ranks(function, group, layout)
    options: dict[str, Any] = {
        "dilation": dilation,
        "residual": bool(residual),
        "norm_eps": norm_eps,
        "backend": backend,
    }
    tensors: Tensors = {"x": x, "gamma": gamma, "weight": weight}
    if here.world == 1:
        _warn_of_one(function)
        return run(prepare.short_conv, **tensors, **options)
    number = agree.next_number(here.group)
    _check_plain(function, x)
    prepare.check_short_conv(x, gamma, weight, dilation, norm_eps)
    statement, none, routing = _agree(
        function, here, x, weight, dilation=dilation, number=number, residual=int(bool(residual))
    )
    if routing.reach == 0:
        return run(prepare.short_conv, **tensors, **options)
    options["backend"] = choose(function, "conv", backend, x.device)
    conv = piecewise_conv.short_conv(options)
    return PiecewiseConv.apply(conv, routing, statement, none, tuple(tensors), *tensors.values())


def _agree(
    function: str, here: Ranks, x: Tensor, weight: Tensor, *, dilation: int, **fields: int
) -> tuple[agree.Statement, Tensor, Routing]:
    """The statement on which all ranks agree, the empty tensor of `agreed`, and the rows that ranks exchange.

    x: [B, L, D] or [B, L, n, D]   fields: of the statement, besides sizes, layout and dilation
    """
    B, L, *streams, D = x.shape
    W = weight.shape[1]
    statement = agree.Statement.about(
        function,
        here.group,
        x,
        B=B,
        L=L,
        n=streams[0] if streams else 0,
        D=D,
        W=W,
        dilation=dilation,
        layout=agree.LAYOUTS.index(here.layout),
        **fields,
    )
    none = agree.agreed(statement, x)
    length = row_exchange.check_length(statement, here)
    return statement, none, row_exchange.routing(here.rank, here.world, here.layout, length, (W - 1) * dilation)


def _check_plain(function: str, x: object) -> None:
    if hasattr(x, "to_local"):
        raise TypeError(f"{function}: x must be this rank's tokens as a plain tensor, x.to_local(), got a DTensor")


def _warn_of_one(function: str) -> None:
    told = f"{function}: a group of one rank has nothing to exchange: this is mhc_ops.{function}"
    warnings.warn(told, stacklevel=3)
