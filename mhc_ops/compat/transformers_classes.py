"""How a module of transformers gets another class, and when it must not."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def replacement(
    original: type, part: type, unpickled: Callable[..., Any], arguments: tuple[Any, ...], kind: Any = type, **own: Any
) -> Any:
    """A subclass of the same name, by which device maps and FSDP find layers. part: what it does differently.
    unpickled(*arguments): an instance without attributes   kind: its metaclass   own: attributes beside `original`"""

    def reduce(self: Any, protocol: Any) -> Any:
        return unpickled, arguments, self.__dict__

    # Pickle finds classes by name, and the original has this name.
    own |= {"original": original, "__module__": __name__, "__doc__": original.__doc__, "__reduce_ex__": reduce}
    return kind(original.__name__, (part, original), own)


def may_be_fused(norm: Any, expected: type) -> bool:
    """Whether not calling the module of a norm has no other effect."""
    has = vars(norm)
    hooked = any(has[hooks] or getattr(of_all_modules, f"_global{hooks}", None) for hooks in HOOKS)
    return type(norm) is expected and "forward" not in has and not hooked


def check_module(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def check_untouched(function: str, name: str, module: nn.Module, expected: type) -> None:
    """A module with another class or another forward would not run ours, or would not stop running it."""
    if type(module) is not expected:
        what = f"is a {type(module).__name__}, not a {expected.__name__}"
    elif "forward" in vars(module):
        what = "has a forward of its own"
    else:
        return
    raise ValueError(f"{function}: {name} {what}; {function} the model before others change it")
