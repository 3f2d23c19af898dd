"""Context parallel: causal_conv1d and short_conv over a sequence that lies in pieces on the ranks of a group."""

import warnings
from typing import Any, Literal, overload

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..conv import prepare
from ..core.backend import choose
from ..core.call import run
from . import agree, in_pieces, pieces
from .in_pieces import InPieces, Tensors


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

    Arguments are those of that function, of which x, residual and seq_idx are this rank's tokens of the sequence and
    all others the same on every rank. group: a process group or a mesh of one dimension. layout: "contiguous", rank r
    has piece r of the sequence; "zigzag", of 2·world pieces rank r has r and 2·world − 1 − r, one behind the other.
    All ranks have equally many tokens (`shard_sequence` cuts); the sequence has world times as many.

    cu_seqlens: positions in the whole sequence. Packed sequences may begin, end and cross pieces anywhere.
    seq_idx: this rank's tokens of the ids of the whole sequence.
    initial_state: of the whole sequence, or of every packed one; with seq_idx, of the sequence of the very first token.
    With output_final_state, final_state is that of the whole sequence or of every packed one, on every rank.
    Gradients of weight, bias and initial_state are this rank's share: their sum over the group is the gradient. So is
    the gradient of final_state the sum of what it is on each rank. Those of x and residual are whole.

    All ranks make the same calls in the same order, forward and backward. They ask one another in each, by a message
    between the hosts, and where two differ in what they call or give, in types or in sizes, there is an error on every
    rank; where one comes to none, after the timeout of the group. Values are not compared. In a group of one this is
    mhc_ops.causal_conv1d, and a warning says so.
    """
    function = "causal_conv1d"
    here = pieces.ranks(function, group, layout)
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
    call = agree.call(
        function,
        here.group,
        x,
        number=number,
        **agree.sizes(x, weight),
        layout=agree.LAYOUTS.index(layout),
        dilation=dilation,
        activation=int(activation is not None),
        bias=int(bias is not None),
        residual=int(residual is not None),
        seq_idx=int(seq_idx is not None),
        cu_seqlens=0 if cu_seqlens is None else cu_seqlens.shape[0],
        initial_state=int(initial_state is not None),
        output_final_state=int(output_final_state),
    )
    none = agree.agreed(call, x)
    S = (weight.shape[1] - 1) * dilation
    plan = pieces.plan(here.rank, here.world, layout, pieces.check_length(call, here), S)
    if S == 0:
        tensors["cu_seqlens"] = None if cu_seqlens is None else plan.local(cu_seqlens)
        return run(prepare.causal_conv1d, **tensors, **options, output_final_state=bool(output_final_state))
    options["backend"] = choose(function, "conv", backend, x.device)  # the backward's too
    conv = in_pieces.causal_conv1d(options)
    y = InPieces.apply(conv, plan, call, none, tuple(tensors), *tensors.values())
    return (y, in_pieces.final_state(x, S, cu_seqlens, initial_state, plan, here, call)) if output_final_state else y


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
    here = pieces.ranks(function, group, layout)
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
    call = agree.call(
        function,
        here.group,
        x,
        number=number,
        **agree.sizes(x, weight),
        layout=agree.LAYOUTS.index(layout),
        dilation=dilation,
        residual=int(bool(residual)),
    )
    none = agree.agreed(call, x)
    S = (weight.shape[1] - 1) * dilation
    plan = pieces.plan(here.rank, here.world, layout, pieces.check_length(call, here), S)
    if S == 0:
        return run(prepare.short_conv, **tensors, **options)
    options["backend"] = choose(function, "conv", backend, x.device)
    conv = in_pieces.short_conv(options)
    return InPieces.apply(conv, plan, call, none, tuple(tensors), *tensors.values())


def _check_plain(function: str, x: object) -> None:
    if hasattr(x, "to_local"):
        raise TypeError(f"{function}: x must be this rank's tokens as a plain tensor, x.to_local(), got a DTensor")


def _warn_of_one(function: str) -> None:
    told = f"{function}: a group of one rank has nothing to exchange: this is mhc_ops.{function}"
    warnings.warn(told, stacklevel=3)
