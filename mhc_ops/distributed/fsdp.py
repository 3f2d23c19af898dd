"""FSDP2 of models with hyper-connections: maps keep their type when layers are cast to another."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..conv.modules import ShortConv
from ..core.check import name_of
from ..mhc.modules import HyperConnection, HyperHead, MHCBlock
from ..mhc.stack import HyperStack

_MAPS = (HyperStack, HyperConnection, HyperHead, MHCBlock)


def fully_shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    mp_policy: fsdp.MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    offload_policy: fsdp.OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """torch's `fully_shard` for a model with hyper-connections: it shards model in place and returns it.

    Arguments are those of torch. mp_policy applies to layers and to what lies outside of hyper-connections, ShortConv
    included. It does not apply to maps, which are phi, alpha, bias, gamma and layer_norm_weight: they are gathered in
    their own type, and their gradients are reduced in fp32. Inputs and outputs of a connection, such as x, are not
    cast; a layer of another type casts its input itself (mp_policy.cast_forward_inputs).

    Parameters are sharded in groups: one for each layer of a `HyperConnection`; one for the maps of a whole
    `HyperStack`, which costs two or three more collectives per step, not per layer; one for each `HyperConnection`
    outside of a stack, `HyperHead` and `MHCBlock`; one for the rest of the model. Call torch's fully_shard first on
    modules without maps that should be groups of their own (experts, an embedding).

    >>> policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    >>> model = mhc_ops.distributed.fully_shard(model, mesh=init_device_mesh("cuda", (8,)), mp_policy=policy)

    phi [n² + 2n, nD] and gamma [n, D] are sharded by columns if the mesh divides their columns evenly and their rows
    not: torch would pad the rows and send the padding too.
    """
    _check(model, mesh)
    common: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
    }
    common = {name: value for name, value in common.items() if value is not None}  # torch 2.6 does not know them all
    layers = {**common, "mp_policy": mp_policy or fsdp.MixedPrecisionPolicy()}
    in_stacks = {connection for stack in model.modules() if isinstance(stack, HyperStack) for connection in stack}
    for module in _bottom_up(model):
        if isinstance(module, HyperConnection) and _has_own_group(module.layer):
            fsdp.fully_shard(module.layer, **layers)
        if isinstance(module, _MAPS) and module not in in_stacks:
            fsdp.fully_shard(module, **common, **_of_maps(module, mesh))
    if not isinstance(model, fsdp.FSDPModule):
        if any(getattr(part, "keeps_input_types", False) for part in model.modules()):
            layers["mp_policy"] = dataclasses.replace(layers["mp_policy"], cast_forward_inputs=False)
        fsdp.fully_shard(model, **layers)
    return model


def _check(model: nn.Module, mesh: DeviceMesh) -> None:
    for name, value, kind in (("model", model, nn.Module), ("mesh", mesh, DeviceMesh)):
        if not isinstance(value, kind):
            raise TypeError(f"fully_shard: {name} must be a {kind.__name__}, got {type(value).__name__}")
    for name, module in model.named_modules():
        sharded = isinstance(module, fsdp.FSDPModule)
        if sharded and (module is model or any(isinstance(inner, _MAPS) for inner in module.modules())):
            raise ValueError(f"fully_shard: {name or 'the model'} is sharded already; shard a model once, before use")
        if isinstance(module, _MAPS) and len(types := _types(module)) > 1:
            raise ValueError(f"fully_shard: the maps of {name or 'the model'} are {_listed(types)}; give them one type")
        if isinstance(module, ShortConv) and len(types := _types(module)) > 1:
            advice = "leave the model fp32 and cast it by mp_policy, or make the ShortConv with cast_maps=True"
            raise ValueError(
                f"fully_shard: {name or 'the model'} is {_listed(types)}, and a group has one type; {advice}"
            )


def _listed(types: set[torch.dtype]) -> str:
    return " and ".join(sorted(name_of(dtype) for dtype in types))


def _bottom_up(model: nn.Module) -> list[nn.Module]:
    """Each module after its children: a group of torch takes the parameters that no earlier group has taken."""
    return list(model.modules())[::-1]


def _has_own_group(layer: Any) -> bool:
    """False for a function, for a layer without parameters, and for a layer that another connection shares."""
    sharded = isinstance(layer, fsdp.FSDPModule)
    return isinstance(layer, nn.Module) and not sharded and next(layer.parameters(), None) is not None


def _types(module: nn.Module) -> set[torch.dtype]:
    """The types of the parameters of a ShortConv, or of the maps of a connection, a head or a whole stack."""
    own = module.children() if isinstance(module, HyperStack) else (module,)
    return {parameter.dtype for maps in own for parameter in maps.parameters(recurse=False)}


def _of_maps(module: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    """Arguments of torch's fully_shard for a module whose parameters, except those sharded before, are maps."""
    reduced = {torch.promote_types(dtype, torch.float32) for dtype in _types(module)}
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=next(iter(reduced), None), cast_forward_inputs=False)
    shards = mesh.size(mesh.ndim - 1)  # of two dimensions the first replicates

    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if by_columns(parameter.shape, shards) else None

    return {"mp_policy": policy, "shard_placement_fn": place}


def by_columns(shape: Sequence[int], shards: int) -> bool:
    """Whether a parameter is sharded by columns: they divide evenly and rows do not."""
    return len(shape) > 1 and shape[0] % shards > 0 and shape[1] % shards == 0
