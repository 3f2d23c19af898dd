"""The input checks and their one wording: function: argument must be this, got that."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
KERNEL_FLOATS = FLOATS[:3]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(names: Sequence[str]) -> str:
    """a, b or c"""
    return " or ".join([", ".join(names[:-1])] * (len(names) > 1) + [names[-1]])


def check_tensors(function: str, **arguments: object) -> None:
    """Each is a dense tensor of a float type, on the device of the first. Optional ones are left out by the caller."""
    first_name, first = next(iter(arguments.items()))
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(value).__name__}")
        if value.layout is not torch.strided or value.is_nested:
            layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").strip("_")
            raise TypeError(f"{function}: {name} must be a dense (strided) tensor, got {layout}")
        check_dtype(function, name, value, FLOATS)
        assert isinstance(first, Tensor)
        if value.device != first.device:
            raise ValueError(f"{function}: {name} must be on {first.device} as {first_name} is, got {value.device}")


def check_dtype(function: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype], context: str = "") -> None:
    if tensor.dtype not in allowed:
        names = listed([name_of(dtype) for dtype in allowed])
        raise TypeError(f"{function}: {name} must be {names}{context}, got {name_of(tensor.dtype)}")


def check_shapes(function: str, **arguments: tuple[Tensor, tuple[int, ...]]) -> None:
    """check_shapes("mhc_post", h_out=(h_out, (*outer, D)))"""
    for name, (tensor, expected) in arguments.items():
        if tensor.shape != expected:
            raise ValueError(f"{function}: {name} must be {list(expected)}, got {list(tensor.shape)}")


def check_range(function: str, name: str, value: int, low: int, high: int, context: str = "") -> None:
    if not low <= value <= high:
        raise ValueError(f"{function}: {name} must be {low} to {high}{context}, got {value}")


def check_count(function: str, name: str, value: object) -> None:
    """A whole number from 1 up."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{function}: {name} must be at least 1, got {value}")


def check_flag(function: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be a bool, got {type(value).__name__}")


def check_word(function: str, name: str, value: object, allowed: Sequence[str]) -> None:
    if type(value) is not str:
        raise TypeError(f"{function}: {name} must be a str, got {type(value).__name__}")
    if value not in allowed:
        raise ValueError(f"{function}: {name} must be {listed([repr(word) for word in allowed])}, got {value!r}")


def check_numbers(function: str, **values: object) -> tuple[float, ...]:
    """The finite values as floats, as kernels are compiled for the type of a number. An eps is 0 or more."""
    for name, value in values.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{function}: {name} must be a number, got {type(value).__name__}")
        if name.endswith("eps") and not 0 <= value < math.inf:
            raise ValueError(f"{function}: {name} must be finite and 0 or more, got {value}")
        if not -math.inf < value < math.inf:
            raise ValueError(f"{function}: {name} must be finite, got {value}")
    return tuple(float(value) for value in values.values())  # type: ignore[arg-type]
