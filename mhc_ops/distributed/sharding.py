"""Sharding rules for DTensors: how the tensors of every op may be placed, forward and backward.

An axis is a dimension along which an op treats every index alike: tokens, sequences of a batch, channels of a
convolution. If an axis is sharded, all tensors that have it are sharded along it. An input without the axis is
replicated. An output without it, such as the gradient of a parameter, is a sum over the axis: every rank has a part of
it (Partial).

The rules are registered when the first DTensor arrives or `mhc_ops.distributed` is imported. torch redistributes what
no rule allows, such as a sharded sequence in a convolution, or a sharded D.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor.experimental import register_sharding
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ..core import backend as backends
from ..core.op import Op

Axis = dict[str, int]  # tensor: its dimension; x stands for dx, x_next and dx_next too
Rule = tuple[list[Placement], list[Placement | None]]  # placements of the outputs, of the inputs

# mHC: how many dimensions a tensor has after those of its tokens. Each dimension of tokens is an axis.
AFTER_TOKENS = {
    "x": 2,
    "link": 2,
    "h_res": 2,
    "logits": 2,
    "h_in": 1,
    "h_out": 1,
    "h_pre": 1,
    "h_post": 1,
    "h_mix": 1,
    "read": 1,
    "out": 1,
    "inv_rms": 0,
}
# The convolution. Time is not an axis: a token sees those before it. Nor are channels that share a norm.
BATCH = dict.fromkeys(("x", "y", "residual", "seq_idx", "initial_state", "final_state", "inv_rms"), 0)
BATCH |= dict.fromkeys(("conv_state", "cache_seqlens"), 0)
CHANNELS = {"x": -1, "y": -1, "residual": -1, "weight": 0, "bias": 0}
CHANNELS |= dict.fromkeys(("initial_state", "final_state", "conv_state"), 1) | {"out": -1, "windows": 2}
OF_CONV = {
    "causal_conv1d_fwd": (BATCH, CHANNELS),
    "causal_conv1d_bwd": (BATCH, CHANNELS),
    "causal_conv1d_update_": (BATCH, CHANNELS),
    "causal_conv1d_prefill_": (CHANNELS,),
    "causal_conv1d_step_": (CHANNELS,),
    "short_conv_fwd": (BATCH,),
    "short_conv_bwd": (BATCH,),
}
# With one of these inputs the batch is not an axis: packed sequences are one row, a sequence may have any state slot.
NO_BATCH = ("cu_seqlens", "conv_state_indices")
# Tensors that may have no axis: parameters and indices, of a cache too.
COLUMNS = ("read_columns", "write_columns", "first_columns", "tokens_before")
OF_A_CACHE = (*COLUMNS, "has_initial_state", "num_accepted_tokens", "window_indices", "parents")
WITHOUT = ("phi", "alpha", "bias", "gamma", "layer_norm_weight", "weight", *NO_BATCH, *OF_A_CACHE)


def ops() -> list[Op]:
    """The ops of all families."""
    contracts = [importlib.import_module(f"{backends.PACKAGE}.{family}.contracts") for family in backends.families()]
    return [value for module in contracts for value in vars(module).values() if isinstance(value, Op)]


def has_rules(op: Op) -> bool:
    """Whether the tables above name all of its tensors."""
    arguments = op.traced._opoverload._schema.arguments
    names = [argument.name for argument in arguments if "Tensor" in str(argument.type)] + list(op.outputs._fields)
    axes = (AFTER_TOKENS,) if op.family == "mhc" else OF_CONV.get(op.name, ())
    known = {*WITHOUT, *(name for axis in axes for name in axis)}
    return bool(axes) and all(_subject(name) in known for name in names)


def rules(op: Op, *flat: Any) -> list[Rule]:
    """The rules for one dimension of a mesh, as register_sharding takes them. flat: the inputs in the order of the
    schema, each tensor as a DTensorSpec"""
    inputs, outputs = _shapes(op, flat)
    names = _names(op)
    everywhere: list[Placement | None] = [Replicate() if name in inputs else None for name in names]
    found: list[Rule] = [([Replicate()] * len(outputs), everywhere)]
    for axis in _axes(op, inputs):
        size = next(tensor.shape[axis[_subject(name)]] for name, tensor in inputs.items() if _subject(name) in axis)
        of_inputs = {name: _placement(axis, size, name, inputs[name], Replicate()) for name in inputs}
        of_outputs = [_placement(axis, size, name, tensor, Partial()) for name, tensor in outputs.items()]
        found.append((of_outputs, [of_inputs.get(name) for name in names]))
    return found


def _axes(op: Op, inputs: dict[str, Tensor]) -> list[Axis]:
    if op.family == "conv":
        without = [BATCH] if any(name in inputs for name in NO_BATCH) else []
        return [axis for axis in OF_CONV[op.name] if axis not in without]
    after = ((tensor, AFTER_TOKENS.get(_subject(name))) for name, tensor in inputs.items())
    tokens = next(tensor.dim() - count for tensor, count in after if count is not None)
    return [dict.fromkeys(AFTER_TOKENS, dimension) for dimension in range(tokens)]


def _placement(axis: Axis, size: int, name: str, tensor: Tensor, without: Placement) -> Placement:
    """without: the placement of a tensor without the axis. An unwanted output is empty or has one element."""
    dimension = axis.get(_subject(name))
    if dimension is None:
        return without if tensor.numel() else Replicate()
    there = tensor.dim() > dimension and tensor.shape[dimension] == size
    return Shard(dimension % tensor.dim()) if there else Replicate()


def _subject(name: str) -> str:
    """x for x, dx, x_next and dx_next"""
    return name.removeprefix("d").removesuffix("_next")


def _names(op: Op) -> list[str]:
    """The names of the inputs in the order of the schema."""
    return [argument.name for argument in op.traced._opoverload._schema.arguments]


def _shapes(op: Op, flat: tuple[Any, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The input tensors and the outputs, on the meta device; a compiler does not trace how they are made."""
    with disable_proxy_modes_tracing():
        like = [torch.empty(v.shape, device="meta") if isinstance(v, DTensorSpec) else v for v in flat]
        outputs = op.contract(**op.unflattened(like[:-1]))._asdict()  # the backend is last
    return {name: value for name, value in zip(_names(op), like) if isinstance(value, Tensor)}, outputs


def register(op: Op) -> None:
    overload, of_torch = op.traced._opoverload, DTensor._op_dispatcher.sharding_propagator
    register_sharding(overload)(partial(rules, op))
    # torch caches the rules of a call. By default its key has neither flags nor which optional tensors are given, but
    # both change the outputs: static_argnum 0 puts all arguments into the key.
    of_torch.op_to_schema_info[overload].static_argnum = 0
    if op.mutates:
        of_torch.op_strategy_funcs[overload] = partial(_in_place, op, of_torch.op_strategy_funcs[overload])


def _in_place(op: Op, strategies: Callable[[OpSchema], Any], schema: OpSchema) -> OpStrategy:
    """Only the strategies that do not move a tensor that is written to: its moved copy would be written and dropped."""
    given = {name: value for name, value in zip(_names(op), schema.args_schema) if isinstance(value, OpStrategy)}
    written = [name for name in op.mutates if name in given]
    now = {list(given).index(name): given[name].strategies[0].output_spec.placements for name in written}
    found: OpStrategy = strategies(schema)
    found.strategies = [s for s in found.strategies if all(s.input_spec(i).placements == now[i] for i in now)]
    if not found.strategies:
        where = ", ".join(f"{name} {list(placements)}" for name, placements in zip(written, now.values()))
        raise ValueError(f"{op.name}: cannot write in place to {where} with these shapes and options")
    return found


for _op in filter(has_rules, ops()):
    register(_op)
