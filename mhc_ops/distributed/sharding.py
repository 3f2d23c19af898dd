"""DTensor: on which pieces of its tensors every op runs, forward and backward.

An axis is what an op does the same to every element of: tokens, the sequences of a batch, the channels of a
convolution. Where one is sharded, the tensors that have it are sharded along it. An input that does not have it is
replicated; an output that does not is a sum over it, of which every rank has a part (Partial): the gradients of
parameters.

torch is told when the first DTensor arrives or `mhc_ops.distributed` is imported. What no rule allows, as a sequence in
pieces under a convolution or D in pieces anywhere, torch redistributes before the call.
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

Axis = dict[str, int]  # the dimension of each tensor that has it; x stands for dx, x_next and dx_next too
Rule = tuple[list[Placement], list[Placement | None]]  # of the outputs, of the inputs

# mHC: how many dimensions a tensor has behind those of its tokens, each of which is an axis.
BEHIND_TOKENS = {
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
# The convolution. Time is no axis, as a token sees those before it; nor are channels where they have a common norm.
BATCH = dict.fromkeys(("x", "y", "residual", "seq_idx", "initial_state", "final_state", "inv_rms"), 0)
BATCH |= dict.fromkeys(("conv_state", "cache_seqlens"), 0)
CHANNELS = {"x": -1, "y": -1, "residual": -1, "weight": 0, "bias": 0}
CHANNELS |= dict.fromkeys(("initial_state", "final_state", "conv_state"), 1)
OF_CONV = {
    "causal_conv1d_fwd": (BATCH, CHANNELS),
    "causal_conv1d_bwd": (BATCH, CHANNELS),
    "causal_conv1d_update_": (BATCH, CHANNELS),
    "short_conv_fwd": (BATCH,),
    "short_conv_bwd": (BATCH,),
}
# With one of these the batch is none: packed sequences are one row, and any sequence may have any slot of the states.
NO_BATCH = ("cu_seqlens", "conv_state_indices")
# What may have no axis: parameters, and where things are.
WITHOUT = ("phi", "alpha", "bias", "gamma", "layer_norm_weight", "weight", *NO_BATCH)


def ops() -> list[Op]:
    """Of all families."""
    contracts = [importlib.import_module(f"{backends.PACKAGE}.{family}.contracts") for family in backends.families()]
    return [value for module in contracts for value in vars(module).values() if isinstance(value, Op)]


def has_rules(op: Op) -> bool:
    """Whether the tables have all of its tensors."""
    arguments = op.traced._opoverload._schema.arguments
    names = [argument.name for argument in arguments if "Tensor" in str(argument.type)] + list(op.outputs._fields)
    axes = (BEHIND_TOKENS,) if op.family == "mhc" else OF_CONV.get(op.name, ())
    known = {*WITHOUT, *(name for axis in axes for name in axis)}
    return bool(axes) and all(_subject(name) in known for name in names)


def rules(op: Op, *flat: Any) -> list[Rule]:
    """For one dimension of a mesh, as register_sharding takes them. flat: the inputs in the order of the schema, each
    tensor as a DTensorSpec"""
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
    behind = ((tensor, BEHIND_TOKENS.get(_subject(name))) for name, tensor in inputs.items())
    tokens = next(tensor.dim() - count for tensor, count in behind if count is not None)
    return [dict.fromkeys(BEHIND_TOKENS, dimension) for dimension in range(tokens)]


def _placement(axis: Axis, size: int, name: str, tensor: Tensor, without: Placement) -> Placement:
    """without: of a tensor that does not have the axis. An output that is not wanted is empty or a single element."""
    dimension = axis.get(_subject(name))
    if dimension is None:
        return without if tensor.numel() else Replicate()
    there = tensor.dim() > dimension and tensor.shape[dimension] == size
    return Shard(dimension % tensor.dim()) if there else Replicate()


def _subject(name: str) -> str:
    """x of x, dx, x_next and dx_next"""
    return name.removeprefix("d").removesuffix("_next")


def _names(op: Op) -> list[str]:
    """In the order of the schema."""
    return [argument.name for argument in op.traced._opoverload._schema.arguments]


def _shapes(op: Op, flat: tuple[Any, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors among the inputs, and the outputs, without memory. A compiler is not to see how they are made."""
    with disable_proxy_modes_tracing():
        like = [torch.empty(v.shape, device="meta") if isinstance(v, DTensorSpec) else v for v in flat]
        outputs = op.contract(**op.unflattened(like[:-1]))._asdict()  # the backend is last
    return {name: value for name, value in zip(_names(op), like) if isinstance(value, Tensor)}, outputs


def register(op: Op) -> None:
    overload, of_torch = op.traced._opoverload, DTensor._op_dispatcher.sharding_propagator
    register_sharding(overload)(partial(rules, op))
    # What torch found for one call it takes for others that are alike. Left to itself it looks neither at flags nor at
    # which of the optional tensors are given, and both change what is returned.
    of_torch.op_to_schema_info[overload].static_argnum = 0
    if op.mutates:
        of_torch.op_strategy_funcs[overload] = partial(_in_place, op, of_torch.op_strategy_funcs[overload])


def _in_place(op: Op, strategies: Callable[[OpSchema], Any], schema: OpSchema) -> OpStrategy:
    """Those that leave what is written to where it is: else a copy would be written to, and dropped."""
    given = {name: value for name, value in zip(_names(op), schema.args_schema) if isinstance(value, OpStrategy)}
    now = {list(given).index(name): given[name].strategies[0].output_spec.placements for name in op.mutates}
    found: OpStrategy = strategies(schema)
    found.strategies = [s for s in found.strategies if all(s.input_spec(i).placements == now[i] for i in now)]
    if not found.strategies:
        where = ", ".join(f"{name} {list(placements)}" for name, placements in zip(op.mutates, now.values()))
        raise ValueError(f"{op.name}: it cannot write in place to {where} with these shapes and options")
    return found


for _op in filter(has_rules, ops()):
    register(_op)
