"""The input checks and their one wording: function: argument must be this, got that."""

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from . import private

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
KERNEL_FLOATS = FLOATS[:3]
MOST_FINITE = sys.float_info.max
LARGEST = 2**63 - 1  # the largest whole number that a kernel takes


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(names: Sequence[str]) -> str:
    """a, b or c"""
    return " or ".join([", ".join(names[:-1])] * (len(names) > 1) + [names[-1]])


def check_tensors(function: str, **arguments: object) -> None:
    """Each is a dense tensor of a float type, on the device of the first. The caller leaves out missing ones."""
    first_name, first = next(iter(arguments.items()))
    for name, value in arguments.items():
        check_tensor(function, name, value, FLOATS)
        assert isinstance(first, Tensor) and isinstance(value, Tensor)
        if value.device != first.device:
            raise ValueError(f"{function}: {name} must be on {first.device} as {first_name} is, got {value.device}")


def check_tensor(function: str, name: str, value: object, allowed: Sequence[torch.dtype], context: str = "") -> None:
    """A dense tensor of one of these types."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").strip("_")
        raise TypeError(f"{function}: {name} must be a dense (strided) tensor, got {layout}")
    check_dtype(function, name, value, allowed, context)


def check_memory(function: str, name: str, tensor: Tensor) -> None:
    """Checks that the tensor has its storage. FSDP frees it between two uses."""
    if not tensor.data_ptr() and tensor.numel() and tensor.device.type != "meta":
        raise ValueError(f"{function}: {name} must have memory, but its storage was freed")


def check_writable(function: str, name: str, tensor: Tensor) -> None:
    """A tensor that is written to has memory of its own for each element, and torch may count the write."""
    if overlaps_itself(tensor):
        raise ValueError(f"{function}: {name} must have memory of its own for each element: pass {name}.contiguous()")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{function}: {name} must be no inference tensor outside of inference mode: pass a clone")


def check_apart(function: str, tensors: Mapping[str, Tensor]) -> None:
    """Tensors that are written to lie in different ranges of memory."""
    spans: list[tuple[str, int, int]] = []
    for name, tensor in tensors.items():
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        begin = tensor.data_ptr()
        reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
        end = begin + (reach + 1) * tensor.element_size()
        for other, first, last in spans:
            if begin < last and first < end:
                raise ValueError(f"{function}: {other} and {name} must not share memory")
        spans.append((name, begin, end))


def check_in_memory(function: str, name: str, tensor: Tensor, context: str) -> None:
    """Refuses a lazily negated or zero tensor that kernels would write to. torch.compile refuses it when it traces the
    op."""
    if not torch.compiler.is_compiling() and (tensor.is_neg() or private.is_zerotensor(tensor)):
        raise ValueError(f"{function}: {name} must be no negated view{context}: pass {name}.resolve_neg()")


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may share memory. Not where each dimension steps over all that smaller strides reach."""
    if not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


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


def check_whole(function: str, name: str, value: object) -> None:
    """A whole number of 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be an int, got {type(value).__name__}")
    if not -LARGEST - 1 <= value <= LARGEST:
        raise ValueError(f"{function}: {name} must fit 64 bits, got {shown(value)}")


def check_is_dtype(function: str, name: str, value: object) -> None:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{function}: {name} must be a torch.dtype, got {type(value).__name__}")


def check_count(function: str, name: str, value: object) -> None:
    """A whole number from 1 up."""
    check_whole(function, name, value)
    assert isinstance(value, int)
    if value < 1:
        raise ValueError(f"{function}: {name} must be at least 1, got {value}")


def checked_sizes(function: str, sizes: int | Sequence[int], name: str = "tokens") -> Sequence[int]:
    """One count, or several."""
    several = sizes if isinstance(sizes, Sequence) and not isinstance(sizes, str) else (sizes,)
    if not several:
        raise ValueError(f"{function}: {name} must be a count or a list of them, got an empty list")
    for size in several:
        check_count(function, name, size)
    return several


def shown(value: object) -> str:
    """A number as it is; of a very long one, how many bits it has."""
    if not isinstance(value, int) or abs(value) < 10**30:
        return str(value)
    return f"one of {value.bit_length()} bits"


def check_flag(function: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {name} must be a bool, got {type(value).__name__}")


def check_word(function: str, name: str, value: object, allowed: Sequence[str]) -> None:
    if type(value) is not str:
        raise TypeError(f"{function}: {name} must be a str, got {type(value).__name__}")
    if value not in allowed:
        raise ValueError(f"{function}: {name} must be {listed([repr(word) for word in allowed])}, got {value!r}")


def check_numbers(function: str, **values: object) -> tuple[float, ...]:
    """The finite values as floats, because kernels are compiled for the type of a number. An eps is 0 or more."""
    for name, value in values.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{function}: {name} must be a number, got {type(value).__name__}")
        if name.endswith("eps") and not 0 <= value <= MOST_FINITE:
            raise ValueError(f"{function}: {name} must be finite and 0 or more, got {shown(value)}")
        if not -MOST_FINITE <= value <= MOST_FINITE:
            raise ValueError(f"{function}: {name} must be finite, got {shown(value)}")
    return tuple(float(value) for value in values.values())  # type: ignore[arg-type]
