"""Tiles of the kernel in boundary_bwd.py, in Gluon: where their elements are, and what is made of them.

Four warps hold a tile of 16 tokens × 64 channels of each of 4 streams. A layout says where an element is: each bit of a
register's, a lane's and a warp's number adds a vector to its place in the tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from . import configs
from .boundary_common import n, shared, widen

BLOCK_T = gl.constexpr(configs.BOUNDARY_BWD.block_t)
BLOCK_D = gl.constexpr(configs.BOUNDARY_BWD.block_d)
WARPS = gl.constexpr(configs.BOUNDARY_BWD.warps)
BATCHES = gl.constexpr(configs.BOUNDARY_BWD.block_t // 4)  # of 4 tokens, one for each warp

# Of tiles [tokens, channels] and results of products: a warp has the channels 8·w .. 8·w + 7 and 32 more of these.
TILE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
# Of A [channels of a stream, maps]: a warp has 16 channels.
CHANNELS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
# Of products per batch [batch, 16, 16]: a warp has a batch.
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
# Of phi from memory [maps, channels]: 16 bytes a thread.
FROM_MEMORY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Layout of one value per channel, before and after the loop. With another layout, 8 bytes spill.
ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

Bases = dict[str, list[tuple[int, int, int]]]  # of registers, lanes and warps: where each bit of their number leads

# A batch's products have the rows (stream i, token) of x and the columns (token, stream j) of dlink.
_LEFT = {  # of rows m = i·4 + token and channels k, as the left side of a product is held: [batch, m, k]
    "registers": [(0, 0, 1), (0, 8, 0), (0, 0, 8), (0, 0, 16), (0, 0, 32)],
    "lanes": [(0, 0, 2), (0, 0, 4), (0, 1, 0), (0, 2, 0), (0, 4, 0)],
    "warps": [(1, 0, 0), (2, 0, 0)],
}
_RIGHT = {  # of channels k and columns c = token·4 + j, as the right side is held: [batch, k, c]
    "registers": [(0, 1, 0), (0, 8, 0), (0, 16, 0), (0, 32, 0), (0, 0, 8)],
    "lanes": [(0, 2, 0), (0, 4, 0), (0, 0, 1), (0, 0, 2), (0, 0, 4)],
    "warps": [(1, 0, 0), (2, 0, 0)],
}


def _layout(shape: list[int], of: Bases, place: Callable[..., list[int]]) -> Any:
    """The layout of a tensor in which an element of `of` is at place(*element)."""
    bases = ([place(*element) for element in of[part]] for part in ("registers", "lanes", "warps"))
    return gl.constexpr(gl.DistributedLinearLayout(*bases, [], shape))


def _columns(count: int) -> Any:
    """[tokens, count]: a thread has all columns of the tokens that TILE gives it."""
    columns = [[0, 1 << bit] for bit in range(count.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.constexpr(gl.DistributedLinearLayout([*columns, [8, 0]], lanes, [[0, 0], [0, 0]], [], [16, count]))


COLUMNS_4, COLUMNS_16, COLUMNS_32 = _columns(4), _columns(16), _columns(32)
X_OF_BATCH = _layout([4, 16, 64], _LEFT, lambda q, m, k: [m // 4, q * 4 + m % 4, k])  # [streams, tokens, channels]
X_AS_LEFT = _layout([4, 4, 4, 64], _LEFT, lambda q, m, k: [q, m // 4, m % 4, k])  # [batch, stream, token, channels]
DLINK_OF_BATCH = _layout([4, 16, 64], _RIGHT, lambda q, k, c: [c % 4, q * 4 + c // 4, k])
_OF_ANY_STREAM = {**_LEFT, "registers": [place for place in _LEFT["registers"] if place != (0, 8, 0)]}
H_OUT_OF_BATCH = _layout([16, 64], _OF_ANY_STREAM, lambda q, m, k: [q * 4 + m % 4, k])
HALF_PRODUCTS = gl.constexpr(  # [batch, 16, 8]
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 8, 0]],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, 16, 8],
    )
)
LANES = gl.constexpr(  # [warp, tokens, 4 lanes]: half of HALF_PRODUCTS
    gl.DistributedLinearLayout(
        [[0, 8, 0]],
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]],
        [],
        [4, 16, 4],
    )
)
ALL_WARPS = gl.constexpr(  # [warp, tokens, 4 lanes, streams]: what all warps have, in one thread
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [1, 0, 0, 0], [2, 0, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[0, 8, 0, 0], [0, 0, 0, 2]],
        [],
        [4, 16, 4, 4],
    )
)

SHARED_TILE = gl.constexpr(shared((16, 64), torch.bfloat16))
SHARED_MAPS_32 = gl.constexpr(shared((16, 32), torch.bfloat16))
SHARED_MAPS_16 = gl.constexpr(shared((16, 16), torch.bfloat16))


# Σ over the tokens t and t + 8, which one thread holds: [tokens / 2, channels]
@gluon.jit
def own_sums(tile):
    return gl.sum(gl.reshape(tile, [2, BLOCK_T // 2, BLOCK_D]), axis=0)


# The n tiles of streams, in fp32
@gluon.jit
def load_streams(memory):
    tiles = memory._reinterpret(gl.bfloat16, [n, BLOCK_T, BLOCK_D], SHARED_TILE)
    found = ()
    for i in gl.static_range(n):
        found = found + (widen(tiles.index(i).load(TILE)),)
    return found


# A tile as the left side [channels, tokens] of a product, without shared memory: every block of 8 × 8 is transposed
# between the lanes of its warp. A warp has the channels 8·w + r and 32 + 8·w + r, which become the rows 16·w + r and
# 16·w + 8 + r: see channel_of_row.
@gluon.jit
def transposed(tile):
    turned = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    # token / 8, channel % 8, half of the channels, warp, token % 8
    turned = gl.reshape(turned, [BLOCK_T // 8, 8, 2, BLOCK_D // 16, 8])
    turned = gl.reshape(gl.permute(turned, [3, 2, 1, 0, 4]), [BLOCK_D, BLOCK_T])
    return gl.convert_layout(turned, gl.DotOperandLayout(0, CHANNELS, 2), assert_trivial=True)


@gluon.jit
def channel_of_row(row):
    return row % 8 + row // 16 * 8 + row // 8 % 2 * (BLOCK_D // 2)


# A part of dh_mix [tokens, PADDED] as the right side of a product: its first 16 maps and, of 32, the next 8
@gluon.jit
def maps_as_right(memory, PADDED: gl.constexpr):
    maps = memory.load(gl.DotOperandLayout(1, CHANNELS, 2))
    if PADDED == 16:
        found = (maps,)
    else:
        low, high = gl.split(gl.permute(gl.reshape(maps, [BLOCK_T, 2, 16]), [0, 2, 1]))
        high, _ = gl.split(gl.permute(gl.reshape(high, [BLOCK_T, 2, 8]), [0, 2, 1]))
        low = gl.convert_layout(low, gl.DotOperandLayout(1, CHANNELS, 2), assert_trivial=True)
        found = low, gl.convert_layout(high, gl.DotOperandLayout(1, CHANNELS, 2), assert_trivial=True)
    return found


# A of no tokens: of stream i the first 16 maps and, of 32, then the next 8
@gluon.jit
def no_tokens(PADDED: gl.constexpr):
    A = ()
    for _ in gl.static_range(n):
        A = A + (gl.zeros([BLOCK_D, 16], gl.float32, CHANNELS),)
        if PADDED > 16:
            A = A + (gl.zeros([BLOCK_D, 8], gl.float32, CHANNELS),)
    return A


# A with these tokens. A block's sum starts from zero, as sums on matrix units are cut off, not rounded.
@gluon.jit
def with_tokens(A, x_next, dh_mix, PADDED: gl.constexpr):
    KINDS: gl.constexpr = PADDED // 16
    first = maps_as_right(dh_mix.index(0), PADDED)
    second = maps_as_right(dh_mix.index(1), PADDED)
    zeros = no_tokens(PADDED)
    more = ()
    for i in gl.static_range(n):
        left = transposed(x_next[i])
        for kind in gl.static_range(KINDS):
            product = mma_v2(left, second[kind], mma_v2(left, first[kind], zeros[kind]))
            more = more + (A[KINDS * i + kind] + product,)
    return more


@gluon.jit
def store_A(A_ptr, A, slice, d0, D, kind: gl.constexpr, COUNT: gl.constexpr, PADDED: gl.constexpr, M: gl.constexpr):
    row = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(1, CHANNELS)), 1)
    m = gl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(0, CHANNELS)), 0) + kind * 16
    at = A_ptr + slice.to(gl.int64) * M * (n * D) + (m * (n * D) + d0 + channel_of_row(row))
    for i in gl.static_range(n):
        gl.store(at + i * D, A[PADDED // 16 * i + kind], mask=m < M)


# x (or h_out for every stream) as left sides of products, dlink as right sides
@gluon.jit
def x_as_left(memory):
    x = gl.permute(gl.reshape(memory.load(X_OF_BATCH), [n, BATCHES, 4, BLOCK_D]), [1, 0, 2, 3])
    return gl.convert_layout(x, X_AS_LEFT, assert_trivial=True)


@gluon.jit
def h_out_as_left(memory, x):
    h_out = gl.reshape(memory.load(H_OUT_OF_BATCH), [BATCHES, 4, BLOCK_D])
    h_out = gl.expand_dims(gl.convert_layout(h_out, gl.SliceLayout(1, X_AS_LEFT)), 1)
    h_out, _ = gl.broadcast(h_out, x)
    return h_out


@gluon.jit
def as_left(streams):
    return gl.convert_layout(gl.reshape(streams, [BATCHES, 16, BLOCK_D]), gl.DotOperandLayout(0, PRODUCTS, 2))


@gluon.jit
def dlink_as_right(memory):
    dlink = gl.reshape(memory.load(DLINK_OF_BATCH), [n, BATCHES, 4, BLOCK_D])
    dlink = gl.reshape(gl.permute(dlink, [1, 3, 2, 0]), [BATCHES, BLOCK_D, 16])
    return gl.convert_layout(dlink, gl.DotOperandLayout(1, PRODUCTS, 2))


# The columns of two tokens in a batch's products; one of the two is the row's own
@gluon.jit
def own_half(products, upper):
    low, high = gl.split(gl.permute(gl.reshape(products, [BATCHES, 16, 2, 8]), [0, 1, 3, 2]))
    low = gl.convert_layout(low, HALF_PRODUCTS, assert_trivial=True)
    high = gl.convert_layout(high, HALF_PRODUCTS, assert_trivial=True)
    return gl.where(upper, high, low)


# dots[t, j] = <h_out[t], dlink[t, j]> and, with a map for it, dots[t, n + i·n + j] = <x[t, i], dlink[t, j]>, for `left`
# tokens
@gluon.jit
def store_dots(dots_ptr, x, h_out, dlink, left, DOTS: gl.constexpr, MIXED: gl.constexpr):
    zero = gl.zeros([BATCHES, 16, 16], gl.float32, PRODUCTS)
    q = gl.expand_dims(gl.expand_dims(gl.arange(0, BATCHES, gl.SliceLayout(1, gl.SliceLayout(2, HALF_PRODUCTS))), 1), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, HALF_PRODUCTS))), 0), 2)
    c = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, HALF_PRODUCTS))), 0), 1)
    token, upper = q * 4 + m % 4, m % 4 >= 2
    own = (c // 4 == m % 2) & (token < left)
    at = dots_ptr + (token * DOTS + c % 4)
    if MIXED:
        gl.store(at + (n + m // 4 * n), own_half(mma_v2(x, dlink, zero), upper), mask=own)
    gl.store(at, own_half(mma_v2(h_out, dlink, zero), upper), mask=own & (m < 4))


# A tile as [warp, tokens, channels that it holds]: 8·w + r and 32 + 8·w + r
@gluon.jit
def by_warp(tile):
    channels = gl.permute(gl.reshape(tile, [BLOCK_T, 2, WARPS, 8]), [2, 0, 1, 3])
    return gl.reshape(channels, [WARPS, BLOCK_T, BLOCK_D // WARPS])


# memory[warp, t, .., i] = <dh_in[t], x_next[t, i]> over the channels of a warp, among others. Tiles are held as both
# sides of products of all tokens with all tokens. Their diagonal is in one of the 4 lanes of a token.
@gluon.jit
def store_warps_dots(memory, dh_in, x_next):
    rows = gl.convert_layout(by_warp(dh_in), gl.DotOperandLayout(0, PRODUCTS, 2), assert_trivial=True)
    zero = gl.zeros([WARPS, BLOCK_T, BLOCK_T], gl.float32, PRODUCTS)
    token = gl.arange(0, BLOCK_T, gl.SliceLayout(0, gl.SliceLayout(2, HALF_PRODUCTS)))[None, :, None]
    found = ()
    for i in gl.static_range(n):
        columns = gl.convert_layout(
            gl.permute(by_warp(x_next[i]), [0, 2, 1]), gl.DotOperandLayout(1, PRODUCTS, 2), assert_trivial=True
        )
        half = own_half(mma_v2(rows, columns, zero), token >= 8)
        even, odd = gl.split(gl.reshape(half, [WARPS, BLOCK_T, 4, 2]))
        even = gl.convert_layout(even, LANES, assert_trivial=True)
        odd = gl.convert_layout(odd, LANES, assert_trivial=True)
        is_odd = gl.arange(0, BLOCK_T, gl.SliceLayout(0, gl.SliceLayout(2, LANES)))[None, :, None] % 2 == 1
        found = found + (gl.where(is_odd, odd, even),)
    wide = gl.join(gl.join(found[0], found[2]), gl.join(found[1], found[3]))  # [.., .., .., i // 2, i % 2]
    memory.store(gl.reshape(wide, [WARPS, BLOCK_T, 4, n]))


# dots[t, i] = Σ_warp of what they stored, for `left` tokens
@gluon.jit
def store_read_dots(dots_ptr, memory, left, DOTS: gl.constexpr):
    dots = gl.sum(memory.load(ALL_WARPS), axis=0)  # in one thread
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, ALL_WARPS)
    token = gl.arange(0, BLOCK_T, gl.SliceLayout(1, gl.SliceLayout(2, OF_TOKENS)))[:, None, None]
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, OF_TOKENS)))[None, :, None]
    i = gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(1, OF_TOKENS)))[None, None, :]
    at, own = gl.broadcast(token * DOTS + i, (lane == token % 8 // 2) & (token < left))
    gl.store(dots_ptr + at, dots, mask=own)
