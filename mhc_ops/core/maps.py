"""Which parameters of a module are maps: those that make the weights of streams, and the norms that go with them."""

from collections.abc import Iterator
from typing import ClassVar

from torch import nn


class HasMaps:
    """A base of modules with maps. map_names: the parameters that are maps, where the module has them."""

    map_names: ClassVar[tuple[str, ...]]


def maps_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """The maps of a model and of the modules within, once for each module that has them."""
    for module in model.modules():
        if isinstance(module, HasMaps):
            own = dict(module.named_parameters())
            yield from (own[name] for name in module.map_names if name in own)
