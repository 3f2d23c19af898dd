"""Compile the kernels ahead that servers call, so that the first request does not wait for each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.ahead import compile_ahead, up_to
from ..core.backend import choose
from ..core.check import check_count, check_flag, check_range, checked_sizes
from . import contracts
from .prepare import check_filter, check_kernel_limits

DRAFTS = 3  # of the forms with drafts; another number compiles nothing again


def conv_warmup(
    D: int,
    W: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int | Sequence[int] = 8192,
    bias: bool = False,
    activation: str | None = "silu",
    prefix_cache: bool = False,
    parameter_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    verbose: bool = True,
) -> int:
    """Compile what a server calls of a convolution of D channels, on all cores: `causal_conv1d_prefill`, and
    `causal_conv1d_update` of single tokens and of drafts, in rows and packed, in place and not, with windows and trees.

    tokens: how many a chunk or a batch has at most, or a list of which the largest counts. Slots, sequences and drafts
      may be any number. States are compiled for in both layouts, channels fastest or places fastest
    prefix_cache: also the forms with a table of slots and columns
    parameter_dtype: of weight and bias; None is dtype
    device: None is the GPU where there is one, else the CPU
    verbose: say on stderr what was compiled and how long it took, with a bar on a terminal

    Returns how many kernels it compiled or found in the cache on disk. The reference has none, and HIP's kernels have
    none of these forms.
    """
    function = "conv_warmup"
    largest = max(checked_sizes(function, tokens))
    for name, count in (("D", D), ("W", W)):
        check_count(function, name, count)
    check_range(function, "W", W, 2, 8)
    parameters = dtype if parameter_dtype is None else parameter_dtype
    for name, value in (("dtype", dtype), ("parameter_dtype", parameters)):
        if not isinstance(value, torch.dtype):
            raise TypeError(f"{function}: {name} must be a torch.dtype, got {type(value).__name__}")
    for name, flag in (("bias", bias), ("prefix_cache", prefix_cache), ("verbose", verbose)):
        check_flag(function, name, flag)
    gpu = torch.cuda.is_available()
    where = torch.device(("cuda" if gpu else "cpu") if device is None else device)
    name = choose(function, "conv", backend, where)
    if name != "triton":
        return 0
    if where.type == "cuda" and not gpu:
        raise ValueError(f"{function}: device must be there, got {where} and torch sees no GPU")
    x = torch.zeros(largest, D, dtype=dtype, device=where)
    weight = torch.zeros(D, W, dtype=parameters, device=where)
    silu = check_filter(function, x[None], "[tokens, D]", weight, None, activation, 1)
    check_kernel_limits(function, x, weight, name)
    own: Any = {"weight": weight, "bias": torch.zeros(D, dtype=parameters, device=where) if bias else None}
    own |= {"silu": silu, "pad_slot_id": 0, "backend": name}

    def forms() -> None:
        for state in _states(x, W):
            for size in up_to(largest):
                _prefill(x[:size], state, own, prefix_cache)
            _decode(x[:1], state, own, prefix_cache)

    return compile_ahead(function, forms, x.device, verbose)


def _states(x: Tensor, W: int) -> list[Tensor]:
    """[1, D, length] with channels fastest, and with places fastest; room for drafts"""
    D, length = x.shape[1], W - 2 + DRAFTS
    return [x.new_zeros(1, length, D).transpose(1, 2), x.new_zeros(1, D, length)]


def _index(x: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=x.device)


def _prefill(x: Tensor, state: Tensor, own: dict[str, Any], prefix_cache: bool) -> None:
    """A chunk of one sequence."""
    inputs: Any = {"x": x, "conv_state": state, "cu_seqlens": _index(x, 2), **own}
    inputs["has_initial_state"] = torch.zeros(1, dtype=torch.bool, device=x.device)
    columns = ("read_columns", "write_columns", "first_columns", "tokens_before")
    without: Any = {**dict.fromkeys(columns), "block_size": 0}
    contracts.causal_conv1d_prefill_.launch(**inputs, conv_state_indices=_index(x, 1), **without)
    if prefix_cache:
        given: Any = {**{name: _index(x, 1) for name in columns}, "block_size": 16}
        contracts.causal_conv1d_prefill_.launch(**inputs, conv_state_indices=_index(x, 1, 2), **given)


def _decode(x: Tensor, state: Tensor, own: dict[str, Any], prefix_cache: bool) -> None:
    """A step of one sequence in every form that servers have."""
    D, W = own["weight"].shape
    slots, plain = _index(x, 1), state[..., : W - 1]
    of_update: Any = {"dilation": 1, "cache_seqlens": None, "conv_state_indices": slots}
    contracts.causal_conv1d_update_.launch(x=x[:, None], conv_state=plain, **own, **of_update)
    none: dict[str, Any] = dict.fromkeys(
        ("cu_seqlens", "read_columns", "write_columns", "num_accepted_tokens", "windows", "window_indices", "parents")
    )
    drafts = x.new_zeros(1, DRAFTS, D)
    accepted = {"conv_state": state, "num_accepted_tokens": slots}
    packed = {"rows": drafts[0], "cu_seqlens": _index(x, 2)}
    windows = {"windows": x.new_zeros(1, DRAFTS, D, W - 1), "window_indices": slots}
    tree = {**windows, "parents": _index(x, 1, DRAFTS)}
    columns = {"read_columns": slots, "write_columns": slots, "conv_state_indices": _index(x, 1, 2)}
    in_place: list[dict[str, Any]] = [{"rows": x}, {}, packed, accepted, {**packed, **accepted}]
    if prefix_cache:
        in_place += [{"rows": x, **columns}, {**packed, **accepted, **columns}]
    forms = [(form, True) for form in in_place]
    forms += [({"rows": x, **accepted}, False), (accepted, False), (windows, False), (tree, False)]
    for form, is_in_place in forms:
        given = {"conv_state": plain, "conv_state_indices": slots, **none, **own, **form}
        rows = given.pop("rows", drafts)
        given |= {"x": None, "out": rows} if is_in_place else {"x": rows, "out": None}
        contracts.causal_conv1d_step_.launch(**given, max_seqlen=DRAFTS)
