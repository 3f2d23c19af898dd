"""Causal conv1d of packed sequences whose states are in a cache by slot.

One program reads the state of a sequence for a block of channels, and it alone: the one of the sequence's first piece.
After it has read, it also writes the final state and the states at multiples of block_size that the old one is part of.
The others come from x alone. A second launch writes them, so that none of them is in a slot before it has been read.
The final state stays where one of them would have its slot.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .slots import BOUNDS, SlotTable, column_of, sequence_of, slot_in
from .walk import filtered, load_filter, load_row, sigmoid, widened


# The inputs of the W − 1 tokens up to x_ptr
@triton.jit
def rows_up_to(x_ptr, x_row, present, W: tl.constexpr):
    rows = ()
    for j in tl.static_range(W - 1):
        rows = rows + (tl.load(x_ptr - (W - 1 - j) * x_row, mask=present, other=0.0),)
    return rows


@triton.jit
def store_state(rows, state_ptr, state_place, present, W: tl.constexpr):
    for j in tl.static_range(W - 1):
        tl.store(state_ptr + j * state_place, rows[j], mask=present)


# How many tokens of its block a sequence had before these; a negative number of tokens counts as 0
@triton.jit
def begun_of(before_ptr, sequence, block_size, present):
    before = tl.load(before_ptr + sequence, mask=present, other=0)
    return tl.maximum(before, 0) % block_size


# y[t] = act(bias + Σ_k weight[k]·x[t − (W−1−k)]) of each sequence, before its first token the state in its slot; 0 at
# padding. After it, the slot that it writes holds its last W − 1 inputs.
@triton.jit(
    do_not_specialize=[
        "L", "N", "rows_each", "columns", "slots", "pad_slot_id", "block_size", "table_row", "table_column",
    ]
)  # fmt: skip
def causal_conv1d_prefill_kernel(
    x_ptr,
    state_ptr,
    weight_ptr,
    bias_ptr,
    bounds_ptr,
    table_ptr,
    goes_on_ptr,
    read_ptr,
    write_ptr,
    first_ptr,
    before_ptr,
    y_ptr,
    L,
    D,
    N,
    x_row,
    rows_each,
    state_slot,
    state_channel,
    state_place,
    table_row,
    table_column,
    columns,
    slots,
    pad_slot_id,
    block_size,
    W: tl.constexpr,
    SILU: tl.constexpr,
    CUDA: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    blocks = tl.cdiv(D, BLOCK_D)
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = d < D if not EVEN_D else d >= 0
    i, piece, begin, end = sequence_of(tl.program_id(0) // blocks, bounds_ptr, rows_each, L, N, BLOCK_N)
    first = begin + piece * rows_each
    rows = tl.minimum(rows_each, end - first)
    if rows <= 0:
        return
    sequence, present = i.to(tl.int64), (i >= 0) & (i < N)
    table = SlotTable(
        ptr=table_ptr, row=table_row, column=table_column, columns=columns, slots=slots, pad_slot_id=pad_slot_id
    )
    slot, real = slot_in(table, sequence, column_of(read_ptr, sequence, present), present)
    goes_on = real & (i < 0)  # none does
    if goes_on_ptr is not None:
        goes_on = real & (tl.load(goes_on_ptr + sequence, mask=present, other=0) != 0)
    own = in_row & real
    x_step, y_step, state_place = sequence * 0 + x_row, sequence * 0 + D, sequence * 0 + state_place  # in 64 bits
    x_ptr += first * x_step + d
    y_ptr += first * y_step + d
    state_ptr += d.to(tl.int64) * state_channel
    before = ()  # what the taps of the first row reach back to
    for j in tl.static_range(W - 1):
        row = tl.load(x_ptr - (W - 1 - j) * x_step, mask=own & (piece > 0), other=0.0)
        old_ptr = state_ptr + slot * state_slot + j * state_place
        old = tl.load(old_ptr, mask=in_row & goes_on & (piece == 0), other=0.0)
        before = before + (tl.where(piece > 0, row, old),)
    if piece == 0:
        length = end - begin
        start = before
        for t in tl.static_range(W - 2):
            start = start + (tl.load(x_ptr + t * x_step, mask=own & (t < length), other=0.0),)
        tl.debug_barrier()  # all threads read the state before one writes
        slot, there = slot_in(table, sequence, column_of(write_ptr, sequence, present), real)
        last_ptr = state_ptr + slot * state_slot
        for e in tl.static_range(1, W - 1):  # the states after e tokens
            state = start[e : e + W - 1]
            store_state(state, last_ptr, state_place, in_row & there & (length == e), W)
            if first_ptr is not None:
                since = begun_of(before_ptr, sequence, block_size, present) + e
                column = column_of(first_ptr, sequence, present) + since // block_size - 1
                is_multiple = real & (e <= length) & (since % block_size == 0)
                slot, is_kept = slot_in(table, sequence, column, is_multiple)
                store_state(state, state_ptr + slot * state_slot, state_place, in_row & is_kept, W)
        is_last = in_row & there & (length >= W - 1)
        store_state(rows_up_to(x_ptr + length * x_step, x_step, is_last, W), last_ptr, state_place, is_last, W)
    window = widened(before, W - 1)
    weight, bias = load_filter(weight_ptr, bias_ptr, d, in_row, W)
    for r0 in tl.range(0, rows, STEP, num_stages=STAGES):
        all_rows = window
        for r in tl.static_range(STEP):
            all_rows = all_rows + (load_row(x_ptr + (r0 + r) * x_step, own & (r0 + r < rows)),)
        for r in tl.static_range(STEP):
            y = filtered(all_rows[r : r + W], weight, bias, W)
            if SILU:
                y *= sigmoid(y, CUDA)
            y = tl.where(real, y, 0.0).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + (r0 + r) * y_step, y, mask=in_row & (r0 + r < rows))
        window = all_rows[STEP:]


# Stores the states at multiples of block_size whose W − 1 inputs all lie in x.
@triton.jit(
    do_not_specialize=[
        "L", "N", "columns", "slots", "pad_slot_id", "block_size", "table_row", "table_column", "x_row",
    ]
)  # fmt: skip
def block_states_kernel(
    x_ptr,
    state_ptr,
    bounds_ptr,
    table_ptr,
    read_ptr,
    write_ptr,
    first_ptr,
    before_ptr,
    L,
    D,
    N,
    x_row,
    state_slot,
    state_channel,
    state_place,
    table_row,
    table_column,
    columns,
    slots,
    pad_slot_id,
    block_size,
    W: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    i, k, begin, end = sequence_of(tl.program_id(0), bounds_ptr, block_size, L, N, BLOCK_N)
    sequence, present = i.to(tl.int64), (i >= 0) & (i < N)
    length = (k.to(tl.int64) + 1) * block_size - begun_of(before_ptr, sequence, block_size, present)
    present &= (length >= W - 1) & (length <= end - begin)
    table = SlotTable(
        ptr=table_ptr, row=table_row, column=table_column, columns=columns, slots=slots, pad_slot_id=pad_slot_id
    )
    _, real = slot_in(table, sequence, column_of(read_ptr, sequence, present), present)
    slot, there = slot_in(table, sequence, column_of(first_ptr, sequence, present) + k, real)
    last, is_last = slot_in(table, sequence, column_of(write_ptr, sequence, present), real)
    there &= (is_last == 0) | (slot != last) | (length == end - begin)  # the final state stays
    state_place = sequence * 0 + state_place
    in_state = (d < D) & there
    state_ptr += slot * state_slot + d.to(tl.int64) * state_channel
    rows = rows_up_to(x_ptr + (begin + length) * x_row + d, sequence * 0 + x_row, in_state, W)
    store_state(rows, state_ptr, state_place, in_state, W)


def causal_conv1d_prefill_(
    *,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    conv_state_indices: Tensor,
    has_initial_state: Tensor | None,
    read_columns: Tensor | None,
    write_columns: Tensor | None,
    first_columns: Tensor | None,
    tokens_before: Tensor | None,
    block_size: int,
    silu: bool,
    pad_slot_id: int,
    y: Tensor,
) -> None:
    if not x.numel():
        return
    (L, D), W, N = x.shape, weight.shape[1], cu_seqlens.shape[0] - 1
    on = device.of(x.device)
    state_slot, state_channel, state_place = conv_state.stride()
    march = configs.march(
        kernel=configs.Kernel.FORWARD,  # as that, a program holds a window and a filter
        rows=L,
        D=D,
        W=W,
        itemsize=x.element_size(),
        aligned=D % 16 == 0 and x.stride(0) % 16 == 0,  # Triton specialises on multiples of 16
        on=on,
    )
    shared = {
        "x_ptr": x,
        "state_ptr": conv_state,
        "bounds_ptr": cu_seqlens,
        "table_ptr": conv_state_indices,
        "read_ptr": read_columns,
        "write_ptr": write_columns,
        "first_ptr": first_columns,
        "before_ptr": tokens_before,
        "L": L,
        "D": D,
        "N": N,
        "x_row": x.stride(0),
        "state_slot": state_slot,
        "state_channel": state_channel,
        "state_place": state_place,
        "table_row": conv_state_indices.stride(0),
        "table_column": conv_state_indices.stride(1) if conv_state_indices.dim() == 2 else 0,
        "columns": conv_state_indices.shape[1] if conv_state_indices.dim() == 2 else 1,
        "slots": conv_state.shape[0],
        "pad_slot_id": pad_slot_id,
        "block_size": block_size,
        "W": W,
        "BLOCK_N": BOUNDS,
    }
    launch(
        causal_conv1d_prefill_kernel,
        ((cdiv(L, march.rows) + N + 1) * cdiv(D, march.block_d),),
        **shared,
        weight_ptr=weight,
        bias_ptr=bias,
        goes_on_ptr=has_initial_state,
        y_ptr=y,
        rows_each=march.rows,
        SILU=silu,
        CUDA=on.kind == "cuda",
        EVEN_D=D % march.block_d == 0,
        BLOCK_D=march.block_d,
        STEP=march.step,
        STAGES=march.stages,
        num_warps=march.warps,
    )
    if block_size:
        block_d = configs.channels(D, on)
        launch(
            block_states_kernel,
            (cdiv(L, block_size) + N + 1, cdiv(D, block_d)),
            **shared,
            BLOCK_D=block_d,
            num_warps=4,
        )
