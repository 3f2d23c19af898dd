"""The large kernel of a boundary's backward on Hopper, in Gluon: pass B of the next sublayer's pre and the backward of
post of the one before, in one pass over x.

x_next is made again from x and h_out, with the bits of mhc_post, instead of being read. Its gradient dlink goes to
memory once; what post's backward makes of it is made while it is in registers and shared memory.

A program has 64 channels of all streams and a share of the tokens, 16 at a time. One warp copies (TMA), up to 3 blocks
ahead; four warps compute. A thread holds all streams of its channels, so all but these is its own, and these run on
matrix units (boundary_tiles.py):

    A      += x_nextᵀ · dh_mix          x_next is transposed between the lanes of a warp (movmatrix)
    dlink  += dh_mix · phi              the first part of phi stays in registers, the second in shared memory
    dh_res  = x · dlinkᵀ per token      four tokens at once, of which the diagonal blocks are kept
    dh_post = h_out · dlinkᵀ            likewise

The dots of dh_res and dh_post are sums over the program's channels: pre_sums.py adds those of all programs. So are the
dots of dread = <dh_in, x_next>, which pass A makes elsewhere, in a shifted stack. Each warp makes them of its channels,
on matrix units too; they are added after a barrier that the kernel needs anyway.
"""

from functools import partial

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma

from ...core import device
from ...core.launch import launch
from ..records import PassB
from . import configs
from .boundary_common import (
    advance,
    barrier,
    by_rows,
    by_streams,
    columns4,
    columns16,
    described,
    mixed,
    mixing,
    n,
    narrow,
    widen,
)
from .boundary_tiles import (
    BLOCK_D,
    BLOCK_T,
    COLUMNS_4,
    COLUMNS_16,
    COLUMNS_32,
    FROM_MEMORY,
    ONE_EACH,
    SHARED_MAPS_16,
    SHARED_MAPS_32,
    TILE,
    WARPS,
    as_left,
    dlink_as_right,
    h_out_as_left,
    load_streams,
    no_tokens,
    own_sums,
    store_A,
    store_dots,
    store_read_dots,
    store_warps_dots,
    with_tokens,
    x_as_left,
)
from .pre_sums import Dots

STAGES = gl.constexpr(configs.BOUNDARY_BWD.stages)
COPYING_REGISTERS = gl.constexpr(24)  # of a thread that only copies: the least there is; the others share the rest


# Barriers. A stage is filled and emptied in turn; `phase` is the parity of how often it was before, the same in both
# functions, as both take the stages in the same order.
#   full[stage]   ends a phase with the copying warp's one arrival (expect) and the last byte of its copies. Use k of a
#                 stage is read once phase k has ended, of parity k % 2 = phase.
#   empty[stage]  ends a phase with the one arrival of the computing warps, after a barrier of all of them that follows
#                 their last loads. For use k it is filled once phase k − 1 has ended, of parity phase ^ 1; for use 0 at
#                 once, as a fresh barrier counts as one whose last phase had parity 1.
#   phi_full      is used once.
@gluon.jit
def copy_in(descriptors, phi_desc, stages, phi_1, barriers, T, D, MAPS: gl.constexpr, TABLE: gl.constexpr):
    full, empty, phi_full = barriers
    d0 = gl.program_id(0) * BLOCK_D
    mbarrier.expect(phi_full, n * MAPS * BLOCK_D * 2)
    for i in gl.static_range(n):
        tma.async_copy_global_to_shared(phi_desc, [MAPS, i * D + d0], phi_full, phi_1.index(i))
    x_desc, dlink_next_desc, h_out_desc, dh_in_desc, dh_mix_desc, h_post_desc, h_res_desc, table_desc = descriptors
    xs, dlink_nexts, h_outs, dh_ins, dh_mixes, h_posts, h_ress, tables = stages
    MAPS_OF_POST: gl.constexpr = n if h_res_desc is None else n + n * n
    OF_TOKEN: gl.constexpr = 2 * (2 * BLOCK_D * (n + 1) + 2 * MAPS) + 4 * (MAPS_OF_POST + TABLE)
    stage = 0
    phase = 0
    blocks = gl.cdiv(T, BLOCK_T)
    for done in range(gl.program_id(1), blocks, gl.num_programs(1)):
        t = (blocks - 1 - done) * BLOCK_T
        mbarrier.wait(empty.index(stage), phase ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, BLOCK_T * OF_TOKEN)
        tma.async_copy_global_to_shared(x_desc, [0, t, d0], ready, xs.index(stage))
        tma.async_copy_global_to_shared(dlink_next_desc, [0, t, d0], ready, dlink_nexts.index(stage))
        tma.async_copy_global_to_shared(h_out_desc, [t, d0], ready, h_outs.index(stage))
        tma.async_copy_global_to_shared(dh_in_desc, [t, d0], ready, dh_ins.index(stage))
        tma.async_copy_global_to_shared(h_post_desc, [t, 0], ready, h_posts.index(stage))
        if h_res_desc is not None:
            tma.async_copy_global_to_shared(h_res_desc, [t, 0], ready, h_ress.index(stage))
        tma.async_copy_global_to_shared(dh_mix_desc, [0, t, 0], ready, dh_mixes.index(stage))
        tma.async_copy_global_to_shared(table_desc, [t, 0], ready, tables.index(stage))
        stage, phase = advance(stage, phase, STAGES)


# The first part of phi, which stays in registers: of each stream [maps, channels]
@gluon.jit
def load_phi_0(phi_ptr, d0, D, MAPS: gl.constexpr):
    m = gl.expand_dims(gl.arange(0, MAPS, gl.SliceLayout(1, FROM_MEMORY)), 1)
    d = gl.expand_dims(gl.arange(0, BLOCK_D, gl.SliceLayout(0, FROM_MEMORY)), 0)
    phi_0 = ()
    for i in gl.static_range(n):
        part = gl.load(phi_ptr + (m * (n * D) + (i * D + d0) + d))
        phi_0 = phi_0 + (gl.convert_layout(part, gl.DotOperandLayout(1, TILE, 2)),)
    return phi_0


# x_next, made again
@gluon.jit
def mix_streams(xs, h_outs, stage, h_post, h_res):
    streams = load_streams(xs.index(stage))
    h_out = widen(h_outs.index(stage).load(TILE))
    x_next = ()
    for j in gl.static_range(n):
        x_next = x_next + (mixed(streams, h_out, h_post, h_res, j),)
    return x_next


# The columns of the table: h_res_next, if there is one; h_pre or read, x_factor, r, c
@gluon.jit
def load_table(memory, MIXED: gl.constexpr):
    h_res_next = ()
    if MIXED:
        h_res_next, others = gl.split(gl.permute(gl.reshape(memory.load(COLUMNS_32), [BLOCK_T, 2, 16]), [0, 2, 1]))
        h_res_next = columns16(h_res_next, TILE)
    else:
        others = memory.load(COLUMNS_16)
    return h_res_next, columns16(others, TILE)


# dlink of each stream, rounded, and dh_out of them
@gluon.jit
def gradients(x_next, dh_mix, phi, dh_in, dlink_nexts, stage, h_post, h_res_next, others):
    phi_0, phi_1 = phi
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
        if len(h_res_next) == 0:
            value += dlink_next[i]
        else:
            for j in gl.static_range(n):
                value += h_res_next[i * n + j] * dlink_next[j]
        dlink = dlink + (narrow(value),)
        dh_out += h_post[i] * widen(dlink[i])
    return dlink, dh_out


@gluon.jit
def compute(
    parameters,
    outputs,
    stages,
    memory,
    barriers,
    sizes,
    MAPS: gl.constexpr,
    DOTS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    T, D = sizes
    phi_1, weights, dlink_out, dh_out_out, read_dots = memory
    phi_ptr, layer_norm_weight_ptr = parameters
    dlink_desc, dh_out_desc, A_ptr, dweight_ptr, dots_ptr = outputs
    full, empty, phi_full = barriers
    xs, dlink_nexts, h_outs, dh_ins, dh_mixes, h_posts, h_ress, tables = stages
    NORM: gl.constexpr = layer_norm_weight_ptr is not None
    MIXED: gl.constexpr = MAPS > 16
    M: gl.constexpr = 2 * n + n * n if MIXED else 2 * n
    READ_DOTS: gl.constexpr = n + n * n if MIXED else n  # where the dots of dread begin
    SHARED_MAPS: gl.constexpr = SHARED_MAPS_32 if MIXED else SHARED_MAPS_16
    d0 = gl.program_id(0) * BLOCK_D
    dots_ptr += gl.program_id(0).to(gl.int64) * T * DOTS

    phi_0 = load_phi_0(phi_ptr, d0, D, MAPS)
    if NORM:
        channel = d0 + gl.arange(0, BLOCK_D, ONE_EACH)
        weights.store(gl.load(layer_norm_weight_ptr + channel).to(gl.float32))
        barrier()
    mbarrier.wait(phi_full, 0)

    A = no_tokens(MAPS)
    dweight = own_sums(gl.zeros([BLOCK_T, BLOCK_D], gl.float32, TILE))
    stage = 0
    phase = 0
    blocks = gl.cdiv(T, BLOCK_T)
    # Last tokens first: they are what pass A left in the L2 cache. After the last token everything is 0.
    for done in range(gl.program_id(1), blocks, gl.num_programs(1)):
        t = (blocks - 1 - done) * BLOCK_T
        mbarrier.wait(full.index(stage), phase)
        h_post = columns4(h_posts.index(stage).load(COLUMNS_4), TILE)
        h_res = None
        if MIXED:
            h_res = mixing(h_ress.index(stage).load(COLUMNS_16), TILE, TRANSPOSED)
        x_next = mix_streams(xs, h_outs, stage, h_post, h_res)
        dh_mix = dh_mixes.index(stage)._reinterpret(gl.bfloat16, [2, BLOCK_T, MAPS], SHARED_MAPS)
        A = with_tokens(A, x_next, dh_mix, MAPS)

        if DOTS > READ_DOTS:  # without the norm, dh_in is as it was copied. Here registers are free
            store_warps_dots(read_dots, dh_ins.index(stage).load(TILE), x_next)
        h_res_next, others = load_table(tables.index(stage), MIXED)
        dh_in = widen(dh_ins.index(stage).load(TILE))
        if NORM:  # until here it was dy
            h_in = gl.zeros([BLOCK_T, BLOCK_D], gl.float32, TILE)
            for i in gl.static_range(n):
                h_in += others[i] * widen(x_next[i])
            dweight += own_sums(others[n + 1] * h_in * dh_in)
            layer_norm_weight = gl.expand_dims(weights.load(gl.SliceLayout(0, TILE)), 0)
            dh_in = others[n + 1] * (layer_norm_weight * dh_in) - others[n + 2] * h_in
        dlink, dh_out = gradients(x_next, dh_mix, (phi_0, phi_1), dh_in, dlink_nexts, stage, h_post, h_res_next, others)

        # The tiles for the results are free when the copies out of them have read them (the wait, of the thread that
        # began them) and all warps have loaded dlink for their products, in the turn before (the barrier in front of
        # it, which also keeps the wait from being moved up to where those copies still run).
        barrier()
        tma.store_wait(0)
        barrier()  # no warp stores before that thread has waited
        if DOTS > READ_DOTS:
            store_read_dots(dots_ptr + (t.to(gl.int64) * DOTS + READ_DOTS), read_dots, T - t, DOTS)
        wide = gl.join(gl.join(dlink[0], dlink[2]), gl.join(dlink[1], dlink[3]))  # [tokens, channels, i // 2, i % 2]
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
        store_dots(dots_ptr + t.to(gl.int64) * DOTS, x, h_out, right, T - t, DOTS, MIXED)
        stage, phase = advance(stage, phase, STAGES)

    tma.store_wait(0)
    store_A(A_ptr, A, gl.program_id(1), d0, D, 0, 16, MAPS, M)
    if MAPS > 16:
        store_A(A_ptr, A, gl.program_id(1), d0, D, 1, 8, MAPS, M)
    if NORM:
        channel = d0 + gl.arange(0, BLOCK_D, ONE_EACH)
        total = gl.convert_layout(gl.sum(dweight, axis=0), ONE_EACH)
        gl.store(dweight_ptr + gl.program_id(1).to(gl.int64) * D + channel, total)


# x_next[j]  = h_post[j]·h_out + Σ_i h_res[i, j]·x[i], made again
#              Without h_res, x[j] replaces the sum here, and dlink_next[i] replaces it in dlink.
# dlink[i]   = Σ_m dh_mix[m]·alpha[m]·gamma[i]·phi[m, i] + x_factor·x_next[i] + h_pre[i]·dh_in
#              + Σ_j h_res_next[i, j]·dlink_next[j], rounded; dh_in as in mhc_pre_dx_kernel
# A[slice]   = Σ_{t in slice} dh_mix[t] ⊗ x_next[t];  dweight[slice] = Σ_{t in slice} r·h_in ⊙ dy, with the layer's norm
# dh_out     = Σ_j h_post[j]·dlink[j]
# dots[block] = <h_out, dlink[j]>, <x[i], dlink[j]> and, where they are asked for, <dh_in, x_next[i]> over its channels
@gluon.jit(do_not_specialize=["T"])
def mhc_boundary_bwd_kernel(
    x_desc,  # [n, T, D], as dlink_next and dlink
    h_out_desc,
    h_post_desc,
    h_res_desc,  # [T, n·n]
    dh_in_desc,
    dlink_next_desc,
    dh_mix_desc,  # [parts, T, MAPS]
    table_desc,  # [T, TABLE]: h_res_next, if there is one, h_pre, x_factor and, with the norm, r and c
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
    MAPS: gl.constexpr,  # with zeros
    TABLE: gl.constexpr,
    DOTS: gl.constexpr,  # of a token
    TRANSPOSED: gl.constexpr,  # h_res is [new, old]
):
    bf16: gl.constexpr = gl.bfloat16
    fp32: gl.constexpr = gl.float32
    h_posts = gl.allocate_shared_memory(fp32, [STAGES, BLOCK_T, n], h_post_desc.layout)
    h_ress = h_posts  # a map that is absent has no memory of its own
    if h_res_desc is not None:
        h_ress = gl.allocate_shared_memory(fp32, [STAGES, BLOCK_T, n * n], h_res_desc.layout)
    stages = (
        gl.allocate_shared_memory(bf16, [STAGES, n, BLOCK_T, BLOCK_D], x_desc.layout),
        gl.allocate_shared_memory(bf16, [STAGES, n, BLOCK_T, BLOCK_D], dlink_next_desc.layout),
        gl.allocate_shared_memory(bf16, [STAGES, BLOCK_T, BLOCK_D], h_out_desc.layout),
        gl.allocate_shared_memory(bf16, [STAGES, BLOCK_T, BLOCK_D], dh_in_desc.layout),
        gl.allocate_shared_memory(bf16, [STAGES, 2, BLOCK_T, MAPS], dh_mix_desc.layout),
        h_posts,
        h_ress,
        gl.allocate_shared_memory(fp32, [STAGES, BLOCK_T, TABLE], table_desc.layout),
    )
    phi_1 = gl.allocate_shared_memory(bf16, [n, MAPS, BLOCK_D], phi_desc.layout)
    weights = gl.allocate_shared_memory(fp32, [BLOCK_D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    dlink_out = gl.allocate_shared_memory(bf16, [n, BLOCK_T, BLOCK_D], dlink_desc.layout)
    dh_out_out = gl.allocate_shared_memory(bf16, [BLOCK_T, BLOCK_D], dh_out_desc.layout)
    read_dots = weights
    if DOTS > n + (0 if h_res_desc is None else n * n):
        read_dots = gl.allocate_shared_memory(
            fp32, [WARPS, BLOCK_T, 4, n], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    phi_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(phi_full, count=1)
    barrier()  # no warp waits for an mbarrier before it is initialised
    descriptors = (x_desc, dlink_next_desc, h_out_desc, dh_in_desc, dh_mix_desc, h_post_desc, h_res_desc, table_desc)
    parameters = (phi_ptr, layer_norm_weight_ptr)
    outputs = (dlink_desc, dh_out_desc, A_ptr, dweight_ptr, dots_ptr)
    memory = (phi_1, weights, dlink_out, dh_out_out, read_dots)
    barriers = (full, empty, phi_full)
    gl.warp_specialize(
        [
            (compute, (parameters, outputs, stages, memory, barriers, (T, D), MAPS, DOTS, TRANSPOSED)),
            (copy_in, (descriptors, phi_desc, stages, phi_1, barriers, T, D, MAPS, TABLE)),
        ],
        [1],
        [COPYING_REGISTERS],
    )


def boundary_pass(
    *,
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transposed: bool,
    dh_out: Tensor,
    dh_post: Tensor,
    dh_res: Tensor | None,
    dread: Tensor | None,
    pass_b: PassB,
) -> tuple[Tensor, Tensor | None, Dots]:
    """Fills pass_b.dx and dh_out; returns A [slices, M, K], with the norm dweight, and the dots whose sums are dh_post,
    dh_res and, where it is given, dread."""
    layer_norm_weight, dh_mix, parts, table = pass_b.layer_norm_weight, pass_b.dh_mix, pass_b.parts, pass_b.table
    assert dread is None or layer_norm_weight is None, "the norm waits for pass A, which makes dread"
    streams, D = x.shape[-2:]
    mixed = 0 if h_res is None else streams**2
    assert parts.shape[1] == configs.padded_maps(2 * streams + mixed), "both sublayers have a map, or neither has"
    T, K, maps = table.shape[0], streams * D, 2 * streams + mixed
    tile, on = configs.BOUNDARY_BWD, device.of(x.device)
    blocks = D // tile.block_d
    streams_of = partial(by_streams, block_t=tile.block_t, block_d=tile.block_d)
    rows_of = partial(by_rows, block_t=tile.block_t)
    slices = configs.partition_rows(T, maps, blocks, tile, on.processors)

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    A, dots = scratch(slices, maps, K), scratch(blocks, T, streams + mixed + (0 if dread is None else streams))
    dweight = None if layer_norm_weight is None else scratch(slices, D)
    launch(
        mhc_boundary_bwd_kernel,
        (blocks, slices),
        x_desc=streams_of(x),
        h_out_desc=rows_of(h_out, D, block=tile.block_d),
        h_post_desc=rows_of(h_post, streams, block=streams),
        h_res_desc=None if h_res is None else rows_of(h_res, mixed, block=mixed),
        dh_in_desc=rows_of(pass_b.dh_in, D, block=tile.block_d),
        dlink_next_desc=streams_of(pass_b.dx_next),
        dh_mix_desc=described(dh_mix, dh_mix.shape, dh_mix.stride(), [2, tile.block_t, dh_mix.shape[2]]),
        table_desc=rows_of(table, table.shape[1], block=table.shape[1]),
        phi_desc=described(parts, [2 * parts.shape[1], K], [K, 1], [parts.shape[1], tile.block_d]),
        phi_ptr=parts,
        layer_norm_weight_ptr=layer_norm_weight,
        dlink_desc=streams_of(pass_b.dx),
        dh_out_desc=rows_of(dh_out, D, block=tile.block_d),
        A_ptr=A,
        dweight_ptr=dweight,
        dots_ptr=dots,
        T=T,
        D=D,
        MAPS=dh_mix.shape[2],
        TABLE=table.shape[1],
        DOTS=dots.shape[2],
        TRANSPOSED=transposed,
        num_warps=tile.warps,
        maxnreg=configs.BOUNDARY_REGISTERS,
    )
    return A, dweight, Dots(dots, dh_post, None if h_res is None else dh_res, dread, transposed)
