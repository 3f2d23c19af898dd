"""The first step of what servers call, as in prepare.py: prefill and decoding on a cache of states by slot."""

from typing import Any

import torch
from torch import Tensor

from ..core.backend import choose
from ..core.call import Request
from ..core.check import (
    check_apart,
    check_count,
    check_dtype,
    check_in_memory,
    check_shapes,
    check_tensor,
    check_tensors,
    check_whole,
    check_writable,
)
from ..core.modes import is_plain
from . import contracts, prepare, serving_reference
from .prepare import INTEGERS, check_filter, check_index, check_kernel_limits, check_not_hip, exclude

# What only a step of `causal_conv1d_step_` has. Without all of these a step is `causal_conv1d_update_`.
OF_STEPS = (
    "num_accepted_tokens",
    "cu_seqlens",
    "max_seqlen",
    "read_columns",
    "write_columns",
    "out",
    "windows",
    "window_indices",
    "parents",
)


def causal_conv1d_prefill(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor,
    conv_state_indices: Tensor,
    has_initial_state: Tensor | None,
    pad_slot_id: int,
    read_columns: Tensor | None,
    write_columns: Tensor | None,
    first_columns: Tensor | None,
    tokens_before: Tensor | None,
    block_size: int | None,
    backend: str | None,
) -> Any:
    function = "causal_conv1d_prefill"
    check_tensors(function, x=x, conv_state=conv_state)
    tokens = x[None] if x.dim() == 2 else x
    if x.dim() != 2:
        raise ValueError(f"{function}: x must be [tokens, D], got {list(x.shape)}")
    silu = check_filter(function, tokens, "[tokens, D]", weight, bias, activation, 1)
    _check_width(function, weight)
    _check_bounds(function, cu_seqlens, x)
    N = cu_seqlens.shape[0] - 1
    _check_state(function, conv_state, x, weight.shape[1] - 1, "")
    _check_table(function, conv_state_indices, N, x)
    columns = {
        "read_columns": read_columns,
        "write_columns": write_columns,
        "first_columns": first_columns,
        "tokens_before": tokens_before,
    }
    _check_columns(function, conv_state_indices, N, x, columns)
    if has_initial_state is not None:
        check_index(function, "has_initial_state", has_initial_state, x, (torch.bool,))
        check_shapes(function, has_initial_state=(has_initial_state, (N,)))
    together = {"first_columns": first_columns, "tokens_before": tokens_before, "block_size": block_size}
    missing = [name for name, value in together.items() if value is None]
    if 0 < len(missing) < len(together):
        raise ValueError(f"{function}: {', '.join(together)} must be given together, got no {missing[0]}")
    if block_size is not None:
        check_count(function, "block_size", block_size)
    check_whole(function, "pad_slot_id", pad_slot_id)
    _check_written(function, conv_state=conv_state)
    name = choose(function, "conv", backend, x.device)
    check_not_hip(function, name)
    indices: dict[str, Any] = {"cu_seqlens": cu_seqlens, "has_initial_state": has_initial_state, **columns}
    numbers: dict[str, Any] = {"block_size": block_size or 0, "silu": silu, "pad_slot_id": pad_slot_id}
    if name == "reference":
        with torch.no_grad():
            state, table = conv_state.transpose(1, 2), _as_table(conv_state_indices)
            assert table is not None
            y, after = serving_reference.causal_conv1d_prefill(
                x=x, state=state, weight=weight, bias=bias, table=table, **indices, **numbers
            )
            state.copy_(after)
            return y
    check_kernel_limits(function, x, weight, name)
    check_in_memory(function, "conv_state", conv_state, f" for backend {name!r}")
    inputs: dict[str, Any] = {"x": x, "conv_state": conv_state, "weight": weight, "bias": bias}
    inputs |= {"conv_state_indices": conv_state_indices, **indices, **numbers}
    return Request(contracts.causal_conv1d_prefill_, name, inputs, "y")


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dilation: int,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    pad_slot_id: int,
    backend: str | None,
    in_place: bool = False,
    **of_steps: Any,
) -> Any:
    """in_place: y takes the place of x. of_steps: arguments of OF_STEPS; None without them."""
    of_steps = {**dict.fromkeys(OF_STEPS), **of_steps}
    given = [name for name in OF_STEPS if of_steps[name] is not None]
    if in_place:
        given.append("out")
    table = isinstance(conv_state_indices, Tensor) and conv_state_indices.dim() == 2
    filters: dict[str, Any] = {
        "x": x,
        "conv_state": conv_state,
        "weight": weight,
        "bias": bias,
        "activation": activation,
    }
    places: dict[str, Any] = {"conv_state_indices": conv_state_indices, "pad_slot_id": pad_slot_id, "backend": backend}
    if not given and not table:
        return prepare.causal_conv1d_update(**filters, dilation=dilation, cache_seqlens=cache_seqlens, **places)
    context = f" with {given[0]}" if given else " with conv_state_indices [B, blocks]"
    if dilation != 1:
        raise ValueError(f"causal_conv1d_update: dilation must be 1{context}, got {dilation!r}")
    if cache_seqlens is not None:
        raise ValueError(f"causal_conv1d_update: cache_seqlens must be None{context}")
    return causal_conv1d_step(**filters, **places, **of_steps, in_place=in_place)


def causal_conv1d_step(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
    pad_slot_id: int,
    backend: str | None,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    read_columns: Tensor | None,
    write_columns: Tensor | None,
    out: Tensor | None,
    windows: Tensor | None,
    window_indices: Tensor | None,
    parents: Tensor | None,
    in_place: bool,
) -> Any:
    function = "causal_conv1d_update"
    check_tensors(function, x=x, conv_state=conv_state)
    exclude(function, cu_seqlens=cu_seqlens, parents=parents)
    exclude(function, num_accepted_tokens=num_accepted_tokens, parents=parents)
    exclude(function, write_columns=write_columns, parents=parents)
    if cu_seqlens is None:
        layout, tokens = "[B, D] or [B, T, D]", x[:, None] if x.dim() == 2 else x
        if max_seqlen is not None:
            raise ValueError(f"{function}: max_seqlen must be None without cu_seqlens, got {max_seqlen!r}")
    else:
        layout, tokens = "[tokens, D]", x[None] if x.dim() == 2 else x
        if x.dim() != 2:
            raise ValueError(f"{function}: x must be {layout} with cu_seqlens, got {list(x.shape)}")
        _check_bounds(function, cu_seqlens, x)
        check_count(function, "max_seqlen", max_seqlen)
    silu = check_filter(function, tokens, layout, weight, bias, activation, 1)
    _check_width(function, weight)
    B, T = tokens.shape[:2]
    if cu_seqlens is not None:
        B, T = cu_seqlens.shape[0] - 1, max_seqlen or 0
    S = weight.shape[1] - 1
    if num_accepted_tokens is None:
        _check_state(function, conv_state, x, S, "")
    else:
        check_index(function, "num_accepted_tokens", num_accepted_tokens, x, INTEGERS)
        check_shapes(function, num_accepted_tokens=(num_accepted_tokens, (B,)))
        _check_state(function, conv_state, x, max(S, S - 1 + T), f" for {T} tokens with num_accepted_tokens")
    if conv_state_indices is not None:
        _check_table(function, conv_state_indices, B, x)
    elif conv_state.shape[0] != B:
        raise ValueError(
            f"{function}: conv_state must have a slot for each of {B} sequences, got {conv_state.shape[0]}"
        )
    columns = {"read_columns": read_columns, "write_columns": write_columns}
    _check_columns(function, conv_state_indices, B, x, columns)
    _check_windows(function, windows, window_indices, x, B, T, S)
    if parents is not None:
        check_index(function, "parents", parents, x, INTEGERS)
        check_shapes(function, parents=(parents, (B, T)))
    check_whole(function, "pad_slot_id", pad_slot_id)
    if out is not None:
        check_tensors(function, x=x, out=out)
        check_dtype(function, "out", out, (x.dtype,), " as x is")
        check_shapes(function, out=(out, tuple(x.shape)))
    if in_place and parents is not None:
        raise ValueError(f"{function}: out must not be x with parents: later tokens read x")
    target = x if in_place else out
    if target is not None and target.requires_grad:
        raise ValueError(f"{function}: out must not require a gradient, which y does not have")
    _check_written(function, conv_state=conv_state, out=target, windows=windows)
    name = choose(function, "conv", backend, x.device)
    check_not_hip(function, name)
    numbers: dict[str, Any] = {"max_seqlen": T, "silu": silu, "pad_slot_id": pad_slot_id}
    indices: dict[str, Any] = {"num_accepted_tokens": num_accepted_tokens, **columns}
    indices |= {"windows": windows, "window_indices": window_indices, "parents": parents}
    if name == "reference":
        bounds = torch.arange(B + 1, device=x.device) * T if cu_seqlens is None else cu_seqlens
        filters = {"weight": weight, "bias": bias, "table": _as_table(conv_state_indices), "cu_seqlens": bounds}
        return _step_by_reference(x, conv_state, out, windows, in_place, {**filters, **indices, **numbers})
    check_kernel_limits(function, x, weight, name)
    for written_name, written in {"conv_state": conv_state, "out": target, "windows": windows}.items():
        if written is not None:
            check_in_memory(function, written_name, written, f" for backend {name!r}")
    inputs: dict[str, Any] = {"x": None if in_place else x, "conv_state": conv_state, "weight": weight, "bias": bias}
    inputs |= {"out": target}
    inputs |= {"cu_seqlens": cu_seqlens, "conv_state_indices": conv_state_indices, **indices, **numbers}
    return Request(contracts.causal_conv1d_step_, name, inputs, "y")


def _step_by_reference(
    x: Tensor, conv_state: Tensor, out: Tensor | None, windows: Tensor | None, in_place: bool, others: dict[str, Any]
) -> Tensor:
    """y, after it has been written where it is asked for. others: arguments of the formula"""
    with torch.no_grad():
        state = conv_state.transpose(1, 2)
        found = serving_reference.causal_conv1d_step(x=x.reshape(-1, x.shape[-1]), state=state, **others)
        y = found.y.view(x.shape)
        state.copy_(found.state)
        if windows is not None:
            assert found.windows is not None
            windows.copy_(found.windows)
        if in_place:
            x.copy_(torch.where(found.real.view(*x.shape[:-1], 1), y, x))
        elif out is not None:
            out.copy_(y)
        return y


def _as_table(indices: Tensor | None) -> Tensor | None:
    return indices[:, None] if indices is not None and indices.dim() == 1 else indices


def _check_width(function: str, weight: Tensor) -> None:
    if weight.shape[1] < 2:
        raise ValueError(f"{function}: weight must have a width of at least 2 on a cache, got {weight.shape[1]}")


def _check_bounds(function: str, cu_seqlens: Tensor, x: Tensor) -> None:
    check_index(function, "cu_seqlens", cu_seqlens, x, INTEGERS)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{function}: cu_seqlens must be [N + 1], got {list(cu_seqlens.shape)}")


def _check_state(function: str, conv_state: Tensor, x: Tensor, least: int, context: str) -> None:
    check_dtype(function, "conv_state", conv_state, (x.dtype,), " as x is")
    D = x.shape[-1]
    if conv_state.dim() != 3 or conv_state.shape[1] != D or conv_state.shape[2] < least:
        expected = f"[slots, {D}, length] with length at least {least}{context}"
        raise ValueError(f"{function}: conv_state must be {expected}, got {list(conv_state.shape)}")


def _check_table(function: str, indices: Tensor, N: int, x: Tensor) -> None:
    check_index(function, "conv_state_indices", indices, x, INTEGERS)
    if indices.dim() not in (1, 2) or indices.shape[0] != N or (indices.dim() == 2 and indices.shape[1] < 1):
        expected = f"[{N}] or [{N}, blocks] with blocks at least 1"
        raise ValueError(f"{function}: conv_state_indices must be {expected}, got {list(indices.shape)}")


def _check_columns(function: str, table: Tensor | None, N: int, x: Tensor, columns: dict[str, Tensor | None]) -> None:
    for name, column in columns.items():
        if column is None:
            continue
        if table is None or table.dim() != 2:
            raise ValueError(f"{function}: {name} must be None without conv_state_indices [N, blocks]")
        check_index(function, name, column, x, INTEGERS)
        check_shapes(function, **{name: (column, (N,))})


def _check_windows(
    function: str, windows: Tensor | None, lines: Tensor | None, x: Tensor, B: int, T: int, S: int
) -> None:
    if windows is None:
        if lines is not None:
            raise ValueError(f"{function}: window_indices must be None without windows")
        return
    check_tensor(function, "windows", windows, (x.dtype,), " as x is")
    check_tensors(function, x=x, windows=windows)
    D = x.shape[-1]
    if windows.dim() != 4 or windows.shape[1] < T or windows.shape[2:] != (D, S):
        expected = f"[lines, steps, {D}, {S}] with steps at least {T}"
        raise ValueError(f"{function}: windows must be {expected}, got {list(windows.shape)}")
    if lines is not None:
        check_index(function, "window_indices", lines, x, INTEGERS)
        check_shapes(function, window_indices=(lines, (B,)))
    elif windows.shape[0] != B:
        raise ValueError(f"{function}: windows must have a line for each of {B} sequences, got {windows.shape[0]}")


def _check_written(function: str, **written: Tensor | None) -> None:
    """Each has memory of its own, also against the others."""
    if torch.compiler.is_compiling():  # the op itself checks again
        return
    given = {name: tensor for name, tensor in written.items() if tensor is not None}
    for name, tensor in given.items():
        check_writable(function, name, tensor)
    check_apart(function, {name: tensor for name, tensor in given.items() if is_plain(tensor)})
