"""Groups of parameters for an optimizer: maps do not decay, and may have a learning rate of their own."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .check import check_numbers
from .maps import maps_of

_NOT_OF_MAPS = ("params", "name")


def parameter_groups(
    model: nn.Module, *, lr: float | Tensor, weight_decay: float, maps: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The trainable parameters of a model as groups for an optimizer of torch, each parameter once.

    >>> groups = mhc_ops.parameter_groups(model, lr=3e-4, weight_decay=0.1, maps={"lr": 1e-4})
    >>> optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    A group has "params", "lr", "weight_decay" and a "name". Groups without parameters are left out:

    "matrices": weights of two dimensions, such as that of an nn.Linear; they decay
    "weights": other weights, which decay too: embeddings, also where an output layer shares them, filters of
    convolutions, and what has three dimensions or more, such as experts
    "vectors": what has one dimension or none, such as biases and the weights of norms; it does not decay
    "maps": phi, alpha, bias, gamma and layer_norm_weight of connections and heads, and norm_weight of a `ShortConv`;
    they do not decay

    lr: a number or, for optimizers that take one, a tensor   maps: what the group of the maps has instead, such as
    {"lr": 1e-4} or {"weight_decay": 0.1, "betas": (0.9, 0.99)}; left out for a model without trainable maps

    Muon takes "matrices" alone, another optimizer the rest. Frozen parameters are left out: call this after freezing.
    Models under FSDP2 and DDP work as they are. FSDP1 flattens parameters: call this before, with use_orig_params=True.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"parameter_groups: model must be an nn.Module, got {type(model).__name__}")
    _check_rate("lr", lr, tensor=True)
    _check_rate("weight_decay", weight_decay)
    own = {} if maps is None else _checked(maps)
    params: dict[str, list[nn.Parameter]] = {"matrices": [], "weights": [], "vectors": [], "maps": []}
    of_maps, no_matrices = {id(parameter) for parameter in maps_of(model)}, _no_matrices(model)
    for name, parameter in model.named_parameters():  # each once
        if getattr(parameter, "_fsdp_flattened", False):
            advice = "make the groups before the model is wrapped, with use_orig_params=True"
            raise ValueError(f"parameter_groups: {name} is flattened by FSDP1; {advice}")
        if not parameter.requires_grad:
            continue
        if id(parameter) in of_maps:
            params["maps"].append(parameter)
        elif parameter.dim() < 2:
            params["vectors"].append(parameter)
        else:
            params["weights" if parameter.dim() > 2 or id(parameter) in no_matrices else "matrices"].append(parameter)
    decays = {"lr": lr, "weight_decay": weight_decay}
    does_not = {"lr": lr, "weight_decay": 0.0}
    options = {"matrices": decays, "weights": decays, "vectors": does_not, "maps": {**does_not, **own}}
    groups = [{"params": found, "name": name, **options[name]} for name, found in params.items() if found]
    if not groups:
        raise ValueError(f"parameter_groups: this {type(model).__name__} has no trainable parameters")
    if own and not params["maps"]:
        raise ValueError(
            f"parameter_groups: maps must be left out, because this {type(model).__name__} has no trainable maps"
        )
    return groups


def _no_matrices(model: nn.Module) -> set[int]:
    """Parameters of two dimensions that multiply nothing as a matrix: rows of embeddings, filters of one channel."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, embeddings) or getattr(type(module), "has_filters", False)
        for parameter in module.parameters(recurse=False)
    }


def _checked(maps: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(maps, Mapping):
        raise TypeError(f"parameter_groups: maps must be a mapping of options, got {type(maps).__name__}")
    for name in _NOT_OF_MAPS:
        if name in maps:
            raise ValueError(f"parameter_groups: maps must be options of the optimizer, got {name!r}")
    for name in ("lr", "weight_decay"):
        if name in maps:
            _check_rate(f"maps[{name!r}]", maps[name], tensor=True)
    return dict(maps)


def _check_rate(name: str, value: Any, *, tensor: bool = False) -> None:
    """tensor: whether it may be one. The optimizer checks its shape; one on a GPU is not read, the host would wait."""
    if tensor and isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return
        value = value.item()
    (number,) = check_numbers("parameter_groups", **{name: value})
    if number < 0:
        raise ValueError(f"parameter_groups: {name} must be 0 or more, got {value}")
