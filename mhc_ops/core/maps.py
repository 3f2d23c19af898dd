"""Which parameters of a module are maps, and the fp32 that they keep.

Maps are the parameters that make the weights of streams, and the norms that go with them: few numbers, each of which
many tokens use. In bf16 a step of training is often smaller than half the distance to the next number, and is lost.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import private
from .check import FLOATS, check_flag, check_is_dtype, listed, name_of

# Names of what a map is made of: by torch.nn.utils.parametrize, by prune and by the weight_norm of torch.nn.utils.
_MADE_OF = re.compile(r"parametrizations\.(.+)\.original\d*|(.+)_(?:orig|g|v)")
_LOADED = "mhc_ops_loaded"  # an attribute of a parameter that a load replaces: the source, and what replaces it


class HasMaps:
    """A base of modules with maps. map_names: the parameters that are maps, where the module has them."""

    map_names: ClassVar[tuple[str, ...]]


class ReadsStreams(HasMaps):
    """A base of modules that read streams for a layer by their maps, which `metrics` watches.

    map_names begins with what are phi, alpha and bias there.
    """

    def streams_read(self, given: Any, result: Any) -> Tensor:
        """x as a call read it. given: its first argument   result: what it returned"""
        raise NotImplementedError

    def map_options(self) -> Mapping[str, Any]:
        """Options of its maps, all or those that differ from the defaults."""
        raise NotImplementedError


class KeepsMaps(HasMaps):
    """A base of modules, before nn.Module, whose maps are fp32 or wider unless cast_maps is set.

    A cast of the module to a narrower type (`to`, `half`, `bfloat16`) makes its maps fp32 and casts the rest. Other
    casts and moves apply to maps too. load_state_dict widens maps where it takes the tensors themselves (assign=True).
    """

    cast_maps: bool = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        assert isinstance(self, nn.Module)
        if self.cast_maps:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        maps = [each for parameter in own_maps(self) for each in (parameter, parameter.grad)]

        def without_narrowing(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            if not any(tensor is each for each in maps) or found.dtype == tensor.dtype or not is_narrow(found.dtype):
                return found
            wide = tensor.to(torch.float32)
            return wide if wide.device == found.device else wide.to(found.device)

        return super()._apply(without_narrowing, recurse)  # type: ignore[misc]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Mapping[str, Any], *others: Any
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False) and not self.cast_maps:
            assert isinstance(self, nn.Module)
            for name, parameter in _named_maps(self):
                source = state_dict.get(prefix + name)
                if isinstance(source, Tensor) and is_narrow(source.dtype):
                    state_dict[prefix + name] = _widened(source, parameter)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)  # type: ignore[misc]

    def widen_maps(self) -> None:
        """Make the maps fp32 where they are narrower."""
        assert isinstance(self, nn.Module)
        for parameter in own_maps(self):
            if is_narrow(parameter.dtype):
                parameter.data = parameter.data.to(torch.float32)


def own_maps(module: nn.Module) -> Iterator[nn.Parameter]:
    """The maps of one module, also where tools of torch.nn.utils make them of other parameters."""
    return (parameter for _, parameter in _named_maps(module))


def _named_maps(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(module, HasMaps):
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            made = _MADE_OF.fullmatch(name)
            of = (made[1] or made[2]) if made else name
            if name in module.map_names or (of in module.map_names and of not in parameters):
                yield name, parameter


def _widened(source: Tensor, before: nn.Parameter) -> nn.Parameter:
    """The source in fp32: one parameter for all modules that shared the parameter before and load the same values."""
    wide = source.to(torch.float32)
    kept: tuple[Tensor, nn.Parameter] | None = getattr(before, _LOADED, None)
    if kept is not None and private.share_memory(kept[0], source) and (wide.is_meta or torch.equal(kept[1], wide)):
        return kept[1]
    found = nn.Parameter(wide, requires_grad=before.requires_grad)
    setattr(before, _LOADED, (source, found))
    return found


def maps_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """The maps of a model, once for each module that has them."""
    for module in model.modules():
        yield from own_maps(module)


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether this is a float type that is narrower than fp32."""
    return dtype.is_floating_point and dtype.itemsize < 4


def type_of_maps(function: str, dtype: torch.dtype | None, cast_maps: bool) -> tuple[torch.dtype, bool]:
    """The type of new maps: the one asked for, else torch's default but at least fp32. Whether they follow casts: where
    that or a narrower type was asked for."""
    check_flag(function, "cast_maps", cast_maps)
    if dtype is None:
        default = torch.get_default_dtype()
        dtype = default if cast_maps else torch.promote_types(default, torch.float32)
    check_is_dtype(function, "dtype", dtype)
    if dtype not in FLOATS:
        allowed = listed([name_of(each) for each in FLOATS])
        raise TypeError(f"{function}: dtype must be {allowed}, got {name_of(dtype)}")
    return dtype, cast_maps or is_narrow(dtype)
