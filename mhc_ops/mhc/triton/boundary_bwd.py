"""The large kernel of a boundary's backward, for Hopper, in Gluon: pass B of the next sublayer's pre and the backward of
post of the one before, in one pass over x.

x_next is made again from x and h_out, with the bits of mhc_post, instead of being read; dlink, its gradient, goes to
memory once and from there on stays in registers and shared memory for what post's backward makes of it.

A program has 64 channels of all streams, and every so-manieth block of 16 tokens. One warp copies (TMA) up to 3 blocks
ahead; four warps compute: a thread holds all streams of its channels, so everything but the sums is its own. Sums run on
matrix units:

    A      += x_nextᵀ · dh_mix          x_next is transposed between the lanes of a warp (movmatrix)
    dlink  += dh_mix · phi              the first part of phi stays in registers, the second in shared memory
    dh_res  = x · dlinkᵀ per token      four tokens at once, of which the diagonal blocks are kept
    dh_post = h_out · dlinkᵀ            likewise

The dots of dh_res and dh_post are of the program's channels only: mhc_boundary_dots_kernel adds them up.
"""

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name up to triton 3.6

n = gl.constexpr(configs.BOUNDARY_STREAMS)
M = gl.constexpr(configs.maps(configs.BOUNDARY_STREAMS))
MAPS = gl.constexpr(configs.padded_maps(configs.maps(configs.BOUNDARY_STREAMS)))  # with zeros
TABLE = gl.constexpr(configs.TABLE)
DOTS = gl.constexpr(configs.BOUNDARY_STREAMS * (configs.BOUNDARY_STREAMS + 1))  # of a token: dh_post, then dh_res
BLOCK_T = gl.constexpr(configs.BOUNDARY_BWD.block_t)
BLOCK_D = gl.constexpr(configs.BOUNDARY_BWD.block_d)
STAGES = gl.constexpr(configs.BOUNDARY_BWD.stages)
BATCHES = gl.constexpr(configs.BOUNDARY_BWD.block_t // 4)  # of 4 tokens, one for each warp
COPYING_REGISTERS = gl.constexpr(24)  # of a thread that only copies: the least there is; the others share the rest


# ---- layouts: where an element is, as sums of the places of its index bits. Four warps, 16 tokens × 64 channels --------

# Of tiles [tokens, channels] and results of products: a warp has the channels 8·w .. 8·w + 7 and 32 more of these.
TILE = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
# Of A [channels of a stream, maps]: a warp has 16 channels.
CHANNELS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
# Of products per batch [batch, 16, 16]: a warp has a batch.
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
# Of phi from memory [maps, channels]: 16 bytes a thread.
FROM_MEMORY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# Of what there is one of a channel, before and after the loop. With another layout, 8 bytes spill.
ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

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


def _layout(shape, of, place):
    """The layout of a tensor in which an element of `of` is at place(*element)."""
    bases = ([place(*element) for element in of[part]] for part in ("registers", "lanes", "warps"))
    return gl.constexpr(gl.DistributedLinearLayout(*bases, [], shape))


def _columns(count):
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


def _shared(shape, dtype):
    return gl.NVMMASharedLayout.get_default_for(shape, dtype)


SHARED_TILE = gl.constexpr(_shared([16, 64], gl.bfloat16))
SHARED_MAPS = gl.constexpr(_shared([16, 32], gl.bfloat16))


# ---- tiles -------------------------------------------------------------------------------------------------------------


# fp32 to bf16 and back, two at a time: one at a time each takes an instruction at a quarter of the rate.
@gluon.jit
def narrow(tile):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def widen(tile):
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [tile], dtype=gl.float32, is_pure=True, pack=2
    )


# One column of a table as [tokens, 1], beside a tile
@gluon.jit
def beside_tile(column):
    return gl.expand_dims(gl.convert_layout(column, gl.SliceLayout(1, TILE), assert_trivial=True), 1)


# The columns of a table, of which a thread holds all
@gluon.jit
def columns4(table):
    even, odd = gl.split(gl.reshape(table, [BLOCK_T, 2, 2]))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    return beside_tile(c0), beside_tile(c1), beside_tile(c2), beside_tile(c3)


@gluon.jit
def columns16(table):
    even, odd = gl.split(gl.reshape(table, [BLOCK_T, 8, 2]))
    by4_0, by4_2 = gl.split(gl.reshape(even, [BLOCK_T, 4, 2]))
    by4_1, by4_3 = gl.split(gl.reshape(odd, [BLOCK_T, 4, 2]))
    c0, c4, c8, c12 = columns4(by4_0)
    c1, c5, c9, c13 = columns4(by4_1)
    c2, c6, c10, c14 = columns4(by4_2)
    c3, c7, c11, c15 = columns4(by4_3)
    return c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13, c14, c15


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


# x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i], with the roundings of `mix` in post.py, stored ones included
@gluon.jit
def mixed(x, h_out, h_post, h_res):
    x_next = ()
    for j in gl.static_range(n):
        value = h_post[j] * h_out
        for i in gl.static_range(n):
            weight, _ = gl.broadcast(h_res[i * n + j], x[i])
            value = gl.fma(weight, x[i], value)
        x_next = x_next + (narrow(value),)
    return x_next


# ---- A -----------------------------------------------------------------------------------------------------------------


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


# A part of dh_mix [tokens, 32] as the right side of a product: its first 16 maps and the next 8
@gluon.jit
def maps_as_right(memory):
    maps = memory.load(gl.DotOperandLayout(1, CHANNELS, 2))
    low, high = gl.split(gl.permute(gl.reshape(maps, [BLOCK_T, 2, 16]), [0, 2, 1]))
    high, _ = gl.split(gl.permute(gl.reshape(high, [BLOCK_T, 2, 8]), [0, 2, 1]))
    low = gl.convert_layout(low, gl.DotOperandLayout(1, CHANNELS, 2), assert_trivial=True)
    return low, gl.convert_layout(high, gl.DotOperandLayout(1, CHANNELS, 2), assert_trivial=True)


# A with these tokens: of stream i the first 16 maps at 2·i, the next 8 at 2·i + 1. A block's sum starts from zero, as
# sums on matrix units are cut off, not rounded.
@gluon.jit
def with_tokens(A, x_next, dh_mix):
    low_0, high_0 = maps_as_right(dh_mix.index(0))
    low_1, high_1 = maps_as_right(dh_mix.index(1))
    zero_16 = gl.zeros([BLOCK_D, 16], gl.float32, CHANNELS)
    zero_8 = gl.zeros([BLOCK_D, 8], gl.float32, CHANNELS)
    more = ()
    for i in gl.static_range(n):
        left = transposed(x_next[i])
        more = more + (A[2 * i] + mma_v2(left, low_1, mma_v2(left, low_0, zero_16)),)
        more = more + (A[2 * i + 1] + mma_v2(left, high_1, mma_v2(left, high_0, zero_8)),)
    return more


@gluon.jit
def store_A(A_ptr, A, slice, d0, D, first: gl.constexpr, COUNT: gl.constexpr):
    row = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(1, CHANNELS)), 1)
    m = gl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(0, CHANNELS)), 0) + first * 16
    at = A_ptr + slice.to(gl.int64) * M * (n * D) + (m * (n * D) + d0 + channel_of_row(row))
    for i in gl.static_range(n):
        gl.store(at + i * D, A[2 * i + first])


# ---- dots --------------------------------------------------------------------------------------------------------------


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


# Of a batch's products the columns of two tokens, of which one is the row's own
@gluon.jit
def own_half(products, upper):
    low, high = gl.split(gl.permute(gl.reshape(products, [BATCHES, 16, 2, 8]), [0, 1, 3, 2]))
    low = gl.convert_layout(low, HALF_PRODUCTS, assert_trivial=True)
    high = gl.convert_layout(high, HALF_PRODUCTS, assert_trivial=True)
    return gl.where(upper, high, low)


# dots[t, j] = <h_out[t], dlink[t, j]>, dots[t, n + i·n + j] = <x[t, i], dlink[t, j]>, for `left` tokens
@gluon.jit
def store_dots(dots_ptr, x, h_out, dlink, left):
    zero = gl.zeros([BATCHES, 16, 16], gl.float32, PRODUCTS)
    q = gl.expand_dims(gl.expand_dims(gl.arange(0, BATCHES, gl.SliceLayout(1, gl.SliceLayout(2, HALF_PRODUCTS))), 1), 2)
    m = gl.expand_dims(gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, HALF_PRODUCTS))), 0), 2)
    c = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, HALF_PRODUCTS))), 0), 1)
    token, upper = q * 4 + m % 4, m % 4 >= 2
    own = (c // 4 == m % 2) & (token < left)
    at = dots_ptr + (token * DOTS + c % 4)
    gl.store(at + (n + m // 4 * n), own_half(mma_v2(x, dlink, zero), upper), mask=own)
    gl.store(at, own_half(mma_v2(h_out, dlink, zero), upper), mask=own & (m < 4))


# ---- the kernel --------------------------------------------------------------------------------------------------------


@gluon.jit
def advance(stage, phase):
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


# Barriers. A stage is filled and emptied in turn; `phase` is the parity of how often it was before, the same in both
# functions, as both take the stages in the same order.
#   full[stage]   ends a phase with the copying warp's one arrival (expect) and the last byte of its copies: the k-th use
#                 of a stage is read after its k-th phase, parity k % 2 = phase.
#   empty[stage]  ends a phase with the one arrival of the computing warps, behind a barrier of all of them that follows
#                 their last loads: the k-th use is filled after phase k − 1, parity phase ^ 1, and at first (k = 0) at
#                 once, as a fresh barrier counts as one whose phase of parity 1 has ended.
#   phi_full      is used once.
@gluon.jit
def copy_in(descriptors, phi_desc, stages, phi_1, barriers, T, D):
    full, empty, phi_full = barriers
    d0 = gl.program_id(0) * BLOCK_D
    mbarrier.expect(phi_full, n * MAPS * BLOCK_D * 2)
    for i in gl.static_range(n):
        tma.async_copy_global_to_shared(phi_desc, [MAPS, i * D + d0], phi_full, phi_1.index(i))
    x_desc, dlink_next_desc, h_out_desc, dh_in_desc, dh_mix_desc, h_post_desc, h_res_desc, table_desc = descriptors
    xs, dlink_nexts, h_outs, dh_ins, dh_mixes, h_posts, h_ress, tables = stages
    stage = 0
    phase = 0
    blocks = gl.cdiv(T, BLOCK_T)
    for done in range(gl.program_id(1), blocks, gl.num_programs(1)):
        t = (blocks - 1 - done) * BLOCK_T
        mbarrier.wait(empty.index(stage), phase ^ 1)
        ready = full.index(stage)
        BYTES: gl.constexpr = (2 * n + 2) * BLOCK_T * BLOCK_D * 2 + 2 * BLOCK_T * MAPS * 2 + (n + n * n + TABLE) * BLOCK_T * 4
        mbarrier.expect(ready, BYTES)
        tma.async_copy_global_to_shared(x_desc, [0, t, d0], ready, xs.index(stage))
        tma.async_copy_global_to_shared(dlink_next_desc, [0, t, d0], ready, dlink_nexts.index(stage))
        tma.async_copy_global_to_shared(h_out_desc, [t, d0], ready, h_outs.index(stage))
        tma.async_copy_global_to_shared(dh_in_desc, [t, d0], ready, dh_ins.index(stage))
        tma.async_copy_global_to_shared(h_post_desc, [t, 0], ready, h_posts.index(stage))
        tma.async_copy_global_to_shared(h_res_desc, [t, 0], ready, h_ress.index(stage))
        tma.async_copy_global_to_shared(dh_mix_desc, [0, t, 0], ready, dh_mixes.index(stage))
        tma.async_copy_global_to_shared(table_desc, [t, 0], ready, tables.index(stage))
        stage, phase = advance(stage, phase)


@gluon.jit
def compute(parameters, outputs, stages, phi_1, weights, dlink_out, dh_out_out, barriers, T, D):
    phi_ptr, layer_norm_weight_ptr = parameters
    dlink_desc, dh_out_desc, A_ptr, dweight_ptr, dots_ptr = outputs
    full, empty, phi_full = barriers
    xs, dlink_nexts, h_outs, dh_ins, dh_mixes, h_posts, h_ress, tables = stages
    NORM: gl.constexpr = layer_norm_weight_ptr is not None
    d0 = gl.program_id(0) * BLOCK_D
    dots_ptr += gl.program_id(0).to(gl.int64) * T * DOTS

    m = gl.expand_dims(gl.arange(0, MAPS, gl.SliceLayout(1, FROM_MEMORY)), 1)
    d = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, FROM_MEMORY)), 0)
    phi_0 = ()
    for i in gl.static_range(n):
        part = gl.load(phi_ptr + (m * (n * D) + (i * D + d0) + d))
        phi_0 = phi_0 + (gl.convert_layout(part, gl.DotOperandLayout(1, TILE, 2)),)
    if NORM:
        channel = d0 + gl.arange(0, BLOCK_D, ONE_EACH)
        weights.store(gl.load(layer_norm_weight_ptr + channel).to(gl.float32))
        barrier()
    mbarrier.wait(phi_full, 0)

    A = ()
    for _ in gl.static_range(n):
        A = A + (gl.zeros([BLOCK_D, 16], gl.float32, CHANNELS), gl.zeros([BLOCK_D, 8], gl.float32, CHANNELS))
    dweight = own_sums(gl.zeros([BLOCK_T, BLOCK_D], gl.float32, TILE))
    stage = 0
    phase = 0
    blocks = gl.cdiv(T, BLOCK_T)
    # Last tokens first: they are what pass A left in the L2 cache. Behind the last token everything is 0.
    for done in range(gl.program_id(1), blocks, gl.num_programs(1)):
        t = (blocks - 1 - done) * BLOCK_T
        mbarrier.wait(full.index(stage), phase)
        h_post = columns4(h_posts.index(stage).load(COLUMNS_4))
        h_res = columns16(h_ress.index(stage).load(COLUMNS_16))
        x_next = mixed(load_streams(xs.index(stage)), widen(h_outs.index(stage).load(TILE)), h_post, h_res)

        dh_mix = dh_mixes.index(stage)._reinterpret(gl.bfloat16, [2, BLOCK_T, MAPS], SHARED_MAPS)
        A = with_tokens(A, x_next, dh_mix)

        table = tables.index(stage).load(COLUMNS_32)
        h_res_next, others = gl.split(gl.permute(gl.reshape(table, [BLOCK_T, 2, 16]), [0, 2, 1]))
        h_res_next = columns16(h_res_next)
        others = columns16(others)  # h_pre, x_factor, r, c
        dh_in = widen(dh_ins.index(stage).load(TILE))
        if NORM:  # until here it was dy
            h_in = gl.zeros([BLOCK_T, BLOCK_D], gl.float32, TILE)
            for i in gl.static_range(n):
                h_in += others[i] * widen(x_next[i])
            dweight += own_sums(others[n + 1] * h_in * dh_in)
            layer_norm_weight = gl.expand_dims(weights.load(gl.SliceLayout(0, TILE)), 0)
            dh_in = others[n + 1] * (layer_norm_weight * dh_in) - others[n + 2] * h_in
        dh_mix_0 = dh_mix.index(0).load(gl.DotOperandLayout(0, TILE, 2))
        dh_mix_1 = dh_mix.index(1).load(gl.DotOperandLayout(0, TILE, 2))
        dlink_next = load_streams(dlink_nexts.index(stage))
        dh_out = gl.zeros([BLOCK_T, BLOCK_D], gl.float32, TILE)
        dlink = ()
        for i in gl.static_range(n):
            value = others[n] * widen(x_next[i])
            value = mma_v2(dh_mix_0, phi_0[i], value)
            value = mma_v2(dh_mix_0, phi_1.index(i).load(gl.DotOperandLayout(1, TILE, 2)), value)
            value = mma_v2(dh_mix_1, phi_0[i], value)
            value += others[i] * dh_in
            for j in gl.static_range(n):
                value += h_res_next[i * n + j] * dlink_next[j]
            dlink = dlink + (narrow(value),)
            dh_out += h_post[i] * widen(dlink[i])

        # The tiles for the results are free when the copies out of them have read them (the wait, of the thread that
        # began them) and all warps have loaded dlink for their products, in the turn before (the barrier in front of
        # it, which also keeps the wait from being moved up to where those copies still run).
        barrier()
        tma.store_wait(0)
        barrier()  # no warp stores before that thread has waited
        wide = gl.join(gl.join(dlink[0], dlink[2]), gl.join(dlink[1], dlink[3]))  # [.., .., i % 2, i // 2] reversed
        dlink_out.store(gl.reshape(gl.permute(wide, [2, 3, 0, 1]), [n, BLOCK_T, BLOCK_D]))
        dh_out_out.store(narrow(dh_out))
        fence_async_shared()  # what a warp stored is seen by copies,
        barrier()  # once all warps have stored and fenced
        tma.async_copy_shared_to_global(dlink_desc, [0, t, d0], dlink_out)
        tma.async_copy_shared_to_global(dh_out_desc, [t, d0], dh_out_out)

        right = dlink_as_right(dlink_out)
        x = x_as_left(xs.index(stage))
        h_out = as_left(h_out_as_left(h_outs.index(stage), x))
        x = as_left(x)
        barrier()  # all warps have read the stage
        mbarrier.arrive(empty.index(stage), count=1)
        store_dots(dots_ptr + t.to(gl.int64) * DOTS, x, h_out, right, T - t)
        stage, phase = advance(stage, phase)

    tma.store_wait(0)
    store_A(A_ptr, A, gl.program_id(1), d0, D, 0, 16)
    store_A(A_ptr, A, gl.program_id(1), d0, D, 1, 8)
    if NORM:
        channel = d0 + gl.arange(0, BLOCK_D, ONE_EACH)
        total = gl.convert_layout(gl.sum(dweight, axis=0), ONE_EACH)
        gl.store(dweight_ptr + gl.program_id(1).to(gl.int64) * D + channel, total)


# x_next[j]  = h_post[j]·h_out + Σ_i h_res[i, j]·x[i], made again
# dlink[i]   = Σ_m dh_mix[m]·alpha[m]·gamma[i]·phi[m, i] + x_factor·x_next[i] + h_pre[i]·dh_in
#              + Σ_j h_res_next[i, j]·dlink_next[j], rounded; dh_in as in mhc_pre_dx_kernel
# A[slice]   = Σ_{t in slice} dh_mix[t] ⊗ x_next[t];  dweight[slice] = Σ_{t in slice} r·h_in ⊙ dy, with the layer's norm
# dh_out     = Σ_j h_post[j]·dlink[j];  dots[block] = <h_out, dlink[j]>, <x[i], dlink[j]> over the block's channels
@gluon.jit(do_not_specialize=["T"])
def mhc_boundary_bwd_kernel(
    x_desc,  # [n, T, D], as dlink_next and dlink
    h_out_desc,
    h_post_desc,
    h_res_desc,  # [T, n·n]
    dh_in_desc,
    dlink_next_desc,
    dh_mix_desc,  # [parts, T, MAPS]
    table_desc,  # [T, TABLE]: h_res_next, h_pre, x_factor and, with the norm, r and c
    phi_desc,  # [parts·MAPS, n·D]
    phi_ptr,
    layer_norm_weight_ptr,
    dlink_desc,
    dh_out_desc,
    A_ptr,
    dweight_ptr,
    dots_ptr,
    T,
    D,
):
    bf16: gl.constexpr = gl.bfloat16
    fp32: gl.constexpr = gl.float32
    stages = (
        gl.allocate_shared_memory(bf16, [STAGES, n, BLOCK_T, BLOCK_D], x_desc.layout),
        gl.allocate_shared_memory(bf16, [STAGES, n, BLOCK_T, BLOCK_D], dlink_next_desc.layout),
        gl.allocate_shared_memory(bf16, [STAGES, BLOCK_T, BLOCK_D], h_out_desc.layout),
        gl.allocate_shared_memory(bf16, [STAGES, BLOCK_T, BLOCK_D], dh_in_desc.layout),
        gl.allocate_shared_memory(bf16, [STAGES, 2, BLOCK_T, MAPS], dh_mix_desc.layout),
        gl.allocate_shared_memory(fp32, [STAGES, BLOCK_T, n], h_post_desc.layout),
        gl.allocate_shared_memory(fp32, [STAGES, BLOCK_T, n * n], h_res_desc.layout),
        gl.allocate_shared_memory(fp32, [STAGES, BLOCK_T, TABLE], table_desc.layout),
    )
    phi_1 = gl.allocate_shared_memory(bf16, [n, MAPS, BLOCK_D], phi_desc.layout)
    weights = gl.allocate_shared_memory(fp32, [BLOCK_D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    dlink_out = gl.allocate_shared_memory(bf16, [n, BLOCK_T, BLOCK_D], dlink_desc.layout)
    dh_out_out = gl.allocate_shared_memory(bf16, [BLOCK_T, BLOCK_D], dh_out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    phi_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(phi_full, count=1)
    barrier()  # nobody waits for a barrier before it is one
    descriptors = (x_desc, dlink_next_desc, h_out_desc, dh_in_desc, dh_mix_desc, h_post_desc, h_res_desc, table_desc)
    parameters = (phi_ptr, layer_norm_weight_ptr)
    outputs = (dlink_desc, dh_out_desc, A_ptr, dweight_ptr, dots_ptr)
    barriers = (full, empty, phi_full)
    gl.warp_specialize(
        [
            (compute, (parameters, outputs, stages, phi_1, weights, dlink_out, dh_out_out, barriers, T, D)),
            (copy_in, (descriptors, phi_desc, stages, phi_1, barriers, T, D)),
        ],
        [1],
        [COPYING_REGISTERS],
    )


# dh_post[t, j], dh_res[t, i, j] = Σ_block dots[block, t], in a fixed order
@triton.jit(do_not_specialize=["T", "blocks"])
def mhc_boundary_dots_kernel(
    dots_ptr,
    dh_post_ptr,
    dh_res_ptr,
    T,
    blocks,
    n: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    WIDTH: tl.constexpr = n + n * n
    e = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    size = T.to(tl.int64) * WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, blocks, ROWS):
        block = start + tl.arange(0, ROWS)[:, None]
        present = (block < blocks) & (e < size)[None, :]
        total += tl.sum(tl.load(dots_ptr + block * size + e[None, :], mask=present, other=0.0), axis=0)
    t, c = e // WIDTH, e % WIDTH
    in_post = (e < size) & (c < n)
    in_res = (e < size) & (c >= n)
    tl.store(dh_post_ptr + t * n + c, total.to(dh_post_ptr.dtype.element_ty), mask=in_post)
    tl.store(dh_res_ptr + t * (n * n) + (c - n), total.to(dh_res_ptr.dtype.element_ty), mask=in_res)
