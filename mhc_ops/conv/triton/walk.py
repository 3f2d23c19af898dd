"""Walking through time, as forward and backward do.

A program owns a block of channels and a range of rows of one phase: the tokens t = phase + dilation·row. Taps reach
only tokens of the same phase. The last W − 1 rows stay in registers, so every element of x is loaded once for any W and
dilation.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.sizes import cdiv
from . import configs


class Pieces(NamedTuple):
    """How the rows of all sequences are cut into pieces. A piece is a range of rows of one phase of one sequence; one
    program per block of channels walks through it."""

    march: configs.March
    ranges: int  # of one phase of one sequence
    total: int
    blocks: int  # of channels

    @property
    def programs(self) -> int:
        return self.total * self.blocks

    def arguments(self, D: int) -> dict[str, Any]:
        """The arguments that every walking kernel takes, by name."""
        return {
            "rows_each": self.march.rows,
            "ranges": self.ranges,
            "EVEN_D": D % self.march.block_d == 0,
            "BLOCK_D": self.march.block_d,
            "STEP": self.march.step,
            "STAGES": self.march.stages,
            "num_warps": self.march.warps,
        }


def partition_rows(
    x: Tensor, *, kernel: configs.Kernel, sequences: int, L: int, D: int, W: int, dilation: int
) -> Pieces:
    march = configs.march(
        kernel=kernel,
        rows=sequences * L,
        D=D,
        W=W,
        itemsize=x.element_size(),
        aligned=D % 16 == 0 and x.stride(1) % 16 == 0,  # Triton specialises on multiples of 16
        on=device.of(x.device),
    )
    ranges = cdiv(cdiv(L, dilation), march.rows)
    return Pieces(march, ranges, total=sequences * dilation * ranges, blocks=cdiv(D, march.block_d))


class Piece(NamedTuple):
    """What one program walks through, as kernels see it."""

    number: Any  # among all pieces
    sequence: Any
    t: Any  # the time of the first row
    rows: Any  # of this piece
    left: Any  # rows from the first one to the end of the sequence
    d: Any  # channels
    in_row: Any  # those that exist
    L: Any
    D: Any
    dilation: Any


# The piece of this program
@triton.jit
def piece_of(L, D, rows_each, ranges, dilation, EVEN_D: tl.constexpr, BLOCK_D: tl.constexpr):
    blocks = tl.cdiv(D, BLOCK_D)
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    number = (tl.program_id(0) // blocks).to(tl.int64)
    sequence, phase = number // ranges // dilation, (number // ranges % dilation).to(tl.int32)
    first = (number % ranges).to(tl.int32) * rows_each
    left = tl.cdiv(L - phase, dilation) - first
    t, rows = phase + first * dilation, tl.minimum(rows_each, left)
    in_row = d < D if not EVEN_D else d >= 0
    return Piece(
        number=number, sequence=sequence, t=t, rows=rows, left=left, d=d, in_row=in_row, L=L, D=D, dilation=dilation
    )  # fmt: skip


# A row in fp32 where `present`, else 0
@triton.jit
def load_row(row_ptr, present):
    return tl.load(row_ptr, mask=present, other=0.0).to(tl.float32)


# The sequence of token t; −1 for padding, and for a t that is not within 0 and L
@triton.jit
def load_id(ids_ptr, t, L):
    return tl.load(ids_ptr + t, mask=(t >= 0) & (t < L), other=-1)


# The initial state of a sequence at the time `back` tokens before its start; 0 outside of the state
@triton.jit
def load_state(state_ptr, sequence, back, S, D, d, present):
    row = sequence.to(tl.int64) * S + S - back
    return load_row(state_ptr + row * D + d, present & (back > 0) & (back <= S))


# The W − 1 rows before the piece, and their sequences. Rows before time 0 are those of the initial state, which belongs
# to the sequence of token 0.
@triton.jit
def rows_before(piece, x_ptr, x_step, ids_ptr, state_ptr, PACKED: tl.constexpr, W: tl.constexpr):
    window, ids = (), ()
    for j in tl.static_range(W - 1):
        back = W - 1 - j
        time = piece.t - back * piece.dilation
        row = load_row(x_ptr - back * x_step, piece.in_row & (time >= 0) & (time < piece.L))
        if state_ptr is not None and not PACKED:
            S = (W - 1) * piece.dilation
            state = load_state(
                state_ptr, sequence=piece.sequence, back=-time, S=S, D=piece.D, d=piece.d, present=piece.in_row
            )
            row = tl.where(time >= 0, row, state)
        window = window + (row,)
        if ids_ptr is not None:
            known = time
            if state_ptr is not None and not PACKED:
                known = tl.maximum(time, 0)
            ids = ids + (load_id(ids_ptr, known, piece.L),)
    return window, ids


# What the taps of the row at index r + W − 1 of `rows`, at time t, multiply: rows of its own sequence, else 0. With
# packed sequences and initial states, a tap that reaches to before the start of its sequence takes a row of the state.
@triton.jit
def under_taps(piece, rows, ids, r: tl.constexpr, state_ptr, bounds_ptr, t, HAS_IDS: tl.constexpr, W: tl.constexpr):
    taps = ()
    for k in tl.static_range(W):
        tap = rows[r + k]
        if HAS_IDS:
            own = ids[r + W - 1]
            tap = tl.where((own >= 0) & (ids[r + k] == own), tap, 0.0)
            if state_ptr is not None and bounds_ptr is not None:
                start = tl.load(bounds_ptr + own, mask=own >= 0, other=0)
                back = start - (t - (W - 1 - k) * piece.dilation)
                S, present = (W - 1) * piece.dilation, piece.in_row & (own >= 0)
                state = load_state(state_ptr, sequence=own, back=back, S=S, D=piece.D, d=piece.d, present=present)
                tap = tl.where((own >= 0) & (back > 0), state, tap)
        taps = taps + (tap,)
    return taps


# The first COUNT rows in fp32
@triton.jit
def widened(rows, COUNT: tl.constexpr):
    wide = ()
    for k in tl.static_range(COUNT):
        wide = wide + (rows[k].to(tl.float32),)
    return wide


# bias + Σ_k weight[k]·taps[k]
@triton.jit
def filtered(taps, weight, bias, W: tl.constexpr):
    z = bias + weight[0] * taps[0]
    for k in tl.static_range(1, W):
        z += weight[k] * taps[k]
    return z


# Σ_k weight[k]·gs[W − 1 − k]: the gradient of a row, from gs of that row and of the W − 1 rows after it
@triton.jit
def filtered_back(gs, weight, W: tl.constexpr):
    dx = weight[W - 1] * gs[0]
    for j in tl.static_range(1, W):
        dx += weight[W - 1 - j] * gs[j]
    return dx


# weight[:, k] for each k, and the bias, in fp32
@triton.jit
def load_filter(weight_ptr, bias_ptr, d, in_row, W: tl.constexpr):
    weight = ()
    for k in tl.static_range(W):
        weight = weight + (load_row(weight_ptr + d.to(tl.int64) * W + k, in_row),)
    bias = tl.zeros(d.shape, tl.float32)
    if bias_ptr is not None:
        bias = load_row(bias_ptr + d, in_row)
    return weight, bias


# σ(z) to 2^-22. Triton's own takes 14 instructions, which would limit a kernel that reads and writes 2 bytes each.
# It holds for any finite z: where −z·log2(e) overflows, ex2 of ∓inf is 0 or inf, rcp of 1 is exactly 1 and of inf 0.
@triton.jit
def sigmoid(z, CUDA: tl.constexpr):
    if CUDA:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.sigmoid(z)


# g = dy, or with SiLU dy·σ(z)(1 + z(1 − σ(z))). In this order: 1 + z − z·σ(z) loses the 1 where z is large.
@triton.jit
def through_activation(dy, z, SILU: tl.constexpr, CUDA: tl.constexpr):
    if SILU:
        gate = sigmoid(z, CUDA)
        dy *= gate * (1 + z * (1 - gate))
    return dy
