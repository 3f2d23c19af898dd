"""Causal conv1d, one decoding step of a server: drafts, packed rows, slots to read and to write, trees."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .slots import BOUNDS, SlotTable, column_of, rows_of, slot_in
from .walk import filtered, load_filter, sigmoid, widened


class Tokens(NamedTuple):
    """The tokens of a sequence, as kernels see them."""

    count: Any
    x_ptr: Any
    x_row: Any
    y_ptr: Any
    y_row: Any
    own: Any


class Slots(NamedTuple):
    """The slots that a sequence reads and writes, as kernels see them."""

    old_ptr: Any
    new_ptr: Any
    place: Any
    length: Any
    begin: Any  # the place of the window in the slot that is read
    written: Any


class Windows(NamedTuple):
    """Where the taps of each token of a sequence are stored, as kernels see it. ptr: None if they are not asked for"""

    ptr: Any
    step: Any
    place: Any
    own: Any


# bias + Σ_k weight[k]·taps[k], and SiLU of it, as y
@triton.jit
def result_of(taps, weight, bias, y_ptr, SILU: tl.constexpr, CUDA: tl.constexpr, W: tl.constexpr):
    y = filtered(widened(taps, W), weight, bias, W)
    if SILU:
        y *= sigmoid(y, CUDA)
    return y.to(y_ptr.dtype.element_ty)


# What the taps of token t of a tree multiply: the token, the tokens on the way to its root, then the state. A parent
# comes before its child.
@triton.jit
def along_parents(x_ptr, x_row, newest_ptr, state_place, parents_ptr, t, present, W: tl.constexpr):
    at, taps = t, ()
    for k in tl.static_range(W):
        new = tl.load(x_ptr + at * x_row, mask=present & (at >= 0), other=0.0)
        old = tl.load(newest_ptr + (at + 1) * state_place, mask=present & (at < 0), other=0.0)
        taps = (tl.where(at >= 0, new, old),) + taps
        parent = tl.load(parents_ptr + at, mask=at >= 0, other=-1)
        parent = tl.where((parent >= 0) & (parent < at), parent, -1).to(tl.int32)
        at = tl.where(at >= 0, parent, at - 1)
    return taps


@triton.jit
def store_window(taps, t, windows, W: tl.constexpr):
    if windows.ptr is not None:
        window_ptr = windows.ptr + t * windows.step
        for j in tl.static_range(W - 1):
            tl.store(window_ptr + j * windows.place, taps[j + 1], mask=windows.own)


# The steps of a tree, which leave the state as it is
@triton.jit
def step_tree(
    tokens,
    slots,
    windows,
    parents_ptr,
    sequence,
    T,
    weight,
    bias,
    SILU: tl.constexpr,
    CUDA: tl.constexpr,
    W: tl.constexpr,
):
    newest_ptr = slots.old_ptr + (slots.begin + W - 2) * slots.place
    for t in range(tokens.count.to(tl.int32)):
        own_ptr = parents_ptr + sequence * T
        taps = along_parents(
            tokens.x_ptr, tokens.x_row, newest_ptr, slots.place, parents_ptr=own_ptr, t=t, present=tokens.own, W=W
        )
        y = result_of(taps, weight, bias, tokens.y_ptr, SILU, CUDA, W)
        tl.store(tokens.y_ptr + t * tokens.y_row, y, mask=tokens.own)
        store_window(taps, t, windows, W)


# The steps of a sequence. DRAFTS: the slot that is written then has the window, without its first input, and all tokens
@triton.jit
def step_window(
    tokens, slots, windows, weight, bias, DRAFTS: tl.constexpr, SILU: tl.constexpr, CUDA: tl.constexpr, W: tl.constexpr
):
    window = ()
    for j in tl.static_range(W - 1):
        window = window + (tl.load(slots.old_ptr + (slots.begin + j) * slots.place, mask=tokens.own, other=0.0),)
    tl.debug_barrier()  # all threads read their window before one writes
    if DRAFTS:
        for j in tl.static_range(1, W - 1):
            tl.store(slots.new_ptr + (j - 1) * slots.place, window[j], mask=slots.written)
    else:  # places before the window take part in the shift
        for s in range(slots.length - (W - 1)):
            later = s + tokens.count
            old = tl.load(slots.old_ptr + later * slots.place, mask=tokens.own & (later < slots.length), other=0.0)
            is_new = tokens.own & (later >= slots.length)
            new = tl.load(tokens.x_ptr + (later - slots.length) * tokens.x_row, mask=is_new, other=0.0)
            tl.store(slots.new_ptr + s * slots.place, tl.where(later < slots.length, old, new), mask=slots.written)
    for t in range(tokens.count.to(tl.int32)):
        row = tl.load(tokens.x_ptr + t * tokens.x_row, mask=tokens.own, other=0.0)
        taps = window + (row,)
        y = result_of(taps, weight, bias, tokens.y_ptr, SILU, CUDA, W)
        tl.store(tokens.y_ptr + t * tokens.y_row, y, mask=tokens.own)
        if DRAFTS:
            tl.store(slots.new_ptr + (W - 2 + t) * slots.place, row, mask=slots.written)
        store_window(taps, t, windows, W)
        window = taps[1:]
    if not DRAFTS:
        for j in tl.static_range(W - 1):
            tl.store(slots.new_ptr + (slots.length - (W - 1) + j) * slots.place, window[j], mask=slots.written)


# Where sequence b begins in x, and how many rows it has; for b = B, how many rows of padding precede the first sequence
@triton.jit
def rows_given(bounds_ptr, b, T, L, B, BLOCK_N: tl.constexpr):
    none = b * 0
    begin, rows, outside = none, none + T, none
    if bounds_ptr is not None:
        begin, end = rows_of(bounds_ptr, tl.program_id(0), L, B, BLOCK_N)
        rows = (end - begin).to(tl.int64)
        begin = begin.to(tl.int64)
        outside = tl.where(b < B, 0, tl.minimum(tl.maximum(tl.load(bounds_ptr), 0), L)).to(tl.int64)
    return begin, rows, outside


# The place where the window of sequence b begins in its slot, and whether the slot has one there
@triton.jit
def window_of(accepted_ptr, b, real, length, W: tl.constexpr):
    begin = b * 0 + length - (W - 1)
    if accepted_ptr is not None:
        accepted = tl.load(accepted_ptr + b, mask=real, other=0).to(tl.int64)
        real &= (accepted >= 1) & (accepted <= length - (W - 2))
        begin = tl.where(real, accepted - 1, 0)
    return begin, real


# The line of sequence b, for its windows, and whether there is one
@triton.jit
def line_of(lines_ptr, b, real, lines):
    line = b
    if lines_ptr is not None:
        line = tl.load(lines_ptr + b, mask=real, other=-1).to(tl.int64)
    has_line = (line >= 0) & (line < lines)
    return tl.where(has_line, line, 0), has_line


# y[t] = act(bias + Σ_k weight[k]·input[t − (W−1−k)]). Before these tokens, inputs are in the slot that is read: a
# window of W − 1 that ends with the last place or, with accepted_ptr, begins at place accepted − 1. Every element is
# loaded once, and before it is overwritten: y may be in the place of x, and the slot that is written be the one read.
@triton.jit(
    do_not_specialize=[
        "B", "T", "L", "slots", "columns", "length", "lines", "pad_slot_id", "table_row", "table_column",
        "windows_line", "windows_step", "windows_channel", "windows_place",
    ]
)  # fmt: skip
def causal_conv1d_step_kernel(
    x_ptr,
    state_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    bounds_ptr,
    table_ptr,
    read_ptr,
    write_ptr,
    accepted_ptr,
    windows_ptr,
    lines_ptr,
    parents_ptr,
    B,
    T,
    L,
    D,
    x_batch,
    x_row,
    x_channel,
    y_batch,
    y_row,
    y_channel,
    length,
    state_slot,
    state_channel,
    state_place,
    slots,
    pad_slot_id,
    table_row,
    table_column,
    columns,
    lines,
    windows_line,
    windows_step,
    windows_channel,
    windows_place,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CUDA: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row, wide = d < D, d.to(tl.int64)
    none = b * 0  # in 64 bits: offsets are
    x_row, y_row, state_place = none + x_row, none + y_row, none + state_place
    present = b < B
    begin, rows, outside = rows_given(bounds_ptr, b, T, L, B, BLOCK_N)
    count = tl.minimum(rows, T)
    slot, real = b, present & (count > 0)
    if table_ptr is not None:
        table = SlotTable(
            ptr=table_ptr, row=table_row, column=table_column, columns=columns, slots=slots, pad_slot_id=pad_slot_id
        )
        slot, real = slot_in(table, b, column_of(read_ptr, b, real), real)
    window_begin, real = window_of(accepted_ptr, b, real, length, W)
    written_slot, is_written = slot, real
    if write_ptr is not None or read_ptr is not None:
        written_slot, is_written = slot_in(table, b, column_of(write_ptr, b, real), real)
    count = tl.where(real, count, 0)
    own, written = in_row & real, in_row & is_written
    x_ptr += b * x_batch + begin * x_row + wide * x_channel
    y_ptr += b * y_batch + begin * y_row + wide * y_channel
    old_ptr = state_ptr + tl.where(real, slot, 0) * state_slot + wide * state_channel
    new_ptr = state_ptr + tl.where(is_written, written_slot, 0) * state_slot + wide * state_channel
    weight, bias = load_filter(weight_ptr, bias_ptr, d, in_row, W)
    tokens = Tokens(count=count, x_ptr=x_ptr, x_row=x_row, y_ptr=y_ptr, y_row=y_row, own=own)
    both = Slots(
        old_ptr=old_ptr, new_ptr=new_ptr, place=state_place, length=length, begin=window_begin, written=written
    )
    in_window = own
    if windows_ptr is not None:
        line, has_line = line_of(lines_ptr, b, real, lines)
        windows_step, windows_place = none + windows_step, none + windows_place
        in_window &= has_line
        windows_ptr += line * windows_line + wide * windows_channel
    windows = Windows(ptr=windows_ptr, step=windows_step, place=windows_place, own=in_window)
    if parents_ptr is not None:
        step_tree(tokens, both, windows, parents_ptr, b, T, weight, bias, SILU=SILU, CUDA=CUDA, W=W)
    else:
        step_window(tokens, both, windows, weight, bias, accepted_ptr is not None, SILU=SILU, CUDA=CUDA, W=W)
    if not IN_PLACE:
        zero = tl.zeros([BLOCK_D], y_ptr.dtype.element_ty)
        for t in range(count, rows):
            tl.store(y_ptr + t * y_row, zero, mask=in_row)
        if bounds_ptr is not None:
            for t in range(outside):
                tl.store(y_ptr + (t - begin) * y_row, zero, mask=in_row)


def causal_conv1d_step_(
    *,
    x: Tensor | None,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    cu_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    read_columns: Tensor | None,
    write_columns: Tensor | None,
    num_accepted_tokens: Tensor | None,
    windows: Tensor | None,
    window_indices: Tensor | None,
    parents: Tensor | None,
    max_seqlen: int,
    silu: bool,
    pad_slot_id: int,
    y: Tensor,
) -> None:
    given = out if x is None else x
    assert given is not None
    if not given.numel():
        return
    target, D = y if out is None else out, given.shape[-1]
    packed, in_place = cu_seqlens is not None, x is None
    B = given.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    table_strides = (0, 0) if conv_state_indices is None else (*conv_state_indices.stride(), 0)[:2]
    is_table = conv_state_indices is not None and conv_state_indices.dim() == 2
    slots, _, length = conv_state.shape
    on = device.of(given.device)
    block_d = configs.channels(D, on)
    launch(
        causal_conv1d_step_kernel,
        (B + (packed and not in_place), cdiv(D, block_d)),
        x_ptr=given,
        state_ptr=conv_state,
        weight_ptr=weight,
        bias_ptr=bias,
        y_ptr=target,
        bounds_ptr=cu_seqlens,
        table_ptr=conv_state_indices,
        read_ptr=read_columns,
        write_ptr=write_columns,
        accepted_ptr=num_accepted_tokens,
        windows_ptr=windows,
        lines_ptr=window_indices,
        parents_ptr=parents,
        B=B,
        T=max_seqlen,
        L=given.shape[0],
        D=D,
        **_strides("x", given, packed),
        **_strides("y", target, packed),
        length=length,
        **dict(zip(("state_slot", "state_channel", "state_place"), conv_state.stride())),
        slots=slots,
        pad_slot_id=pad_slot_id,
        table_row=table_strides[0],
        table_column=table_strides[1],
        columns=conv_state_indices.shape[1] if is_table and conv_state_indices is not None else 1,
        lines=0 if windows is None else windows.shape[0],
        **dict(
            zip(
                ("windows_line", "windows_step", "windows_channel", "windows_place"),
                (0, 0, 0, 0) if windows is None else windows.stride(),
            )
        ),
        W=weight.shape[1],
        SILU=silu,
        CUDA=on.kind == "cuda",
        IN_PLACE=in_place,
        BLOCK_D=block_d,
        BLOCK_N=BOUNDS,
        num_warps=configs.UPDATE_WARPS,
    )


def _strides(name: str, tensor: Tensor, packed: bool) -> dict[str, int]:
    """The strides of a tensor [B, D], [B, T, D] or, packed, [tokens, D]."""
    batch = 0 if packed else tensor.stride(0)
    row = tensor.stride(0) if packed else tensor.stride(1) if tensor.dim() == 3 else 0
    return {f"{name}_batch": batch, f"{name}_row": row, f"{name}_channel": tensor.stride(-1)}
