"""The large kernel of a boundary's forward, for Hopper, in Gluon: post of one layer and the projection of the next
layer's pre, in one pass over x.

A program walks through bundles of K (256 channels of all streams) and, for each, through blocks of 32 tokens: the parts
of phi of a bundle stay in shared memory, so that they are read once per program and bundle. One warp copies (TMA) up to
3 stages ahead, a stage being 128 channels of 32 tokens: half a bundle, and a slice of K. Eight warps compute: x_next
takes the place of x in its stage, from where the matrix units read it and the copy to memory does.

K is summed in the order of mhc_pre_project_kernel and of the same products: that of 128 channels of a stream starts
from zero, on units that take 16 columns of K at a time, with the parts of phi as two rows. So the partial sums have its
bits.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .boundary_common import (
    advance,
    barrier,
    by_rows,
    by_streams,
    columns4,
    described,
    mixed,
    mixing,
    n,
    narrow,
    shared,
    widen,
)
from .exact_products import LANE as COLUMNS_OF_LANE
from .exact_products import phi_parts

BLOCK_T = gl.constexpr(configs.BOUNDARY_FWD.block_t)
BLOCK_D = gl.constexpr(configs.BOUNDARY_FWD.block_d)  # of a stage
STAGES = gl.constexpr(configs.BOUNDARY_FWD.stages)
SLICES = gl.constexpr(configs.BUNDLE // configs.BOUNDARY_FWD.block_d)  # of a bundle: a stage each
TILE_D = gl.constexpr(64)  # channels of a tile in shared memory: rows of 128 bytes, swizzled
TILES = gl.constexpr(configs.BOUNDARY_FWD.block_d // 64)  # of a stream in a stage
LANE = gl.constexpr(COLUMNS_OF_LANE.value)
MAPS = gl.constexpr(8)  # that are copied at once, in both parts: a block of maps
PRODUCT_BLOCKS = gl.constexpr(4)  # of maps that are multiplied, also if there are fewer
SLOTS = gl.constexpr(2)  # for maps of a block of tokens: the copying warp is more than one block ahead
COPYING_REGISTERS = gl.constexpr(56)  # of a thread that only copies: fewer spill; the others share the rest, 224


# ---- layouts of eight warps ------------------------------------------------------------------------------------------

# Of tiles [tokens, channels]: a thread has 8 channels of a token.
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
# Of products [rows of parts, tokens], and of those with both parts of a map added: a thread has both.
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 16, 16]))
SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0], [0, 16]], [], [32, 32]
    )
)


def _columns(count: int) -> Any:
    """[tokens, count]: a thread has all columns of the token that TILE gives it."""
    columns = [[0, 1 << bit] for bit in range(count.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [0, 0], [1, 0], [2, 0]]
    return gl.constexpr(gl.DistributedLinearLayout(columns, lanes, [[4, 0], [8, 0], [16, 0]], [], [32, count]))


COLUMNS_4, COLUMNS_16 = _columns(4), _columns(16)
SHARED_TILE = gl.constexpr(shared((32, 64), torch.bfloat16))
SHARED_PHI = gl.constexpr(shared((64, 64), torch.bfloat16))


# ---- tiles -----------------------------------------------------------------------------------------------------------


# As sum_neighbours in exact_products.py
@gluon.jit
def sum_neighbours(values, COLUMNS: gl.constexpr, TO: gl.constexpr):
    for level in gl.static_range(6):
        if (COLUMNS >> level) > TO:
            values = gl.sum(gl.reshape(values, [BLOCK_T, COLUMNS >> (level + 1), 2]), axis=2)
    return values


# x_next is stored over x and, where it is read with weights, h_in = Σ_j read[j]·x_next[j] over h_out.
# Returns Σ_j x_next[j]² as [tokens, lanes]: one stream after the other, the channels of a lane as in sum_neighbours.
@gluon.jit
def mix_in_place(x_memory, h_out_memory, h_post, h_res, read):
    tiles = x_memory._reinterpret(gl.bfloat16, [n, BLOCK_T, TILE_D], SHARED_TILE)
    h_out = widen(h_out_memory.load(TILE))
    x = ()
    for i in gl.static_range(n):
        x = x + (widen(tiles.index(i).load(TILE)),)
    x_next = ()
    for j in gl.static_range(n):
        x_next = x_next + (mixed(x, h_out, h_post, h_res, j),)
        value = widen(x_next[j])
        more = sum_neighbours(value * value, TILE_D, TILE_D // LANE)
        squares = more if j == 0 else squares + more  # noqa: F821
        if read is not None:
            weight, _ = gl.broadcast(read[j], value)
            # Not a sum of products: of the first two the compiler would choose which to round, and not as elsewhere.
            h_in = weight * value if j == 0 else gl.fma(weight, value, h_in)  # noqa: F821
    # One store for all streams: a barrier stands before each. [.., .., j % 2, j // 2] reversed
    wide = gl.join(gl.join(x_next[0], x_next[2]), gl.join(x_next[1], x_next[3]))
    x_memory.store(gl.reshape(gl.permute(wide, [2, 3, 0, 1]), [n, BLOCK_T, TILE_D]))
    if read is not None:
        h_out_memory.store(narrow(h_in))
    return squares


# Σ over a slice's 128 channels of all streams, of the lanes of its tiles
@gluon.jit
def sum_of_tiles(first, second):
    LANES: gl.constexpr = TILE_D // LANE
    return sum_neighbours(first, LANES, 1) + sum_neighbours(second, LANES, 1)


# ---- products --------------------------------------------------------------------------------------------------------


# Begins the products [rows of parts, tokens] of a stage, one for each stream. A tile of phi has 48 rows: two parts of
# 24 maps, or 16 where there is no h_res. The remaining rows of the 64 that are multiplied are padding; their products
# are ignored.
@gluon.jit
def begin_products(xs, phis, stage, slice: gl.constexpr, zero, MAP_BLOCKS: gl.constexpr):
    products = ()
    for j in gl.static_range(n):
        for q in gl.static_range(TILES):
            at = ((slice * n + j) * TILES + q) * MAP_BLOCKS
            phi = phis.index(at)._reinterpret(gl.bfloat16, [64, TILE_D], SHARED_PHI)
            tiles = xs.index(stage * TILES + q)._reinterpret(gl.bfloat16, [n, BLOCK_T, TILE_D], SHARED_TILE)
            x_next = tiles.index(j).permute([1, 0])
            if q == 0:
                product = warpgroup_mma(phi, x_next, zero, use_acc=False, is_async=True)
            else:
                product = warpgroup_mma(phi, x_next, product, is_async=True)
        products = products + (product,)
    return products


# Σ_j products[j], in order, with both parts of a map added: [maps, tokens]
@gluon.jit
def end_products(products):
    p0, p1, p2, p3 = warpgroup_mma_wait(0, deps=products)
    stacked = gl.reshape(p0 + p1 + p2 + p3, [PRODUCT_BLOCKS, 2, MAPS, BLOCK_T])
    high, low = gl.split(gl.permute(stacked, [0, 2, 3, 1]))
    return gl.convert_layout(gl.reshape(high + low, [PRODUCT_BLOCKS * MAPS, BLOCK_T]), SUMS, assert_trivial=True)


# ---- the kernel ------------------------------------------------------------------------------------------------------


# The program's (bundle, block of tokens), bundle after bundle, and how many blocks of tokens there are
@gluon.jit
def share(T, D):
    blocks = gl.cdiv(T, BLOCK_T)
    items = blocks * (D // (SLICES * BLOCK_D))
    begin = gl.program_id(0) * items // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * items // gl.num_programs(0)
    return begin, end, blocks


# Barriers. Both functions take stages, slots and bundles in the same order, so both know how often (k times) one was
# used before; `phase` is k % 2. A "full" barrier ends its phase k with the copying warp's one arrival (expect) and the
# last byte of its copies; readers wait for parity k % 2. An "empty" barrier ends its phase k with one arrival of the
# computing warps when they have done with use k, after a barrier of all of them; the copying warp waits, before
# use k, for phase k − 1: parity of k + 1, and at first (k = 0) not at all, as a fresh barrier counts as one whose phase
# of parity 1 has ended.
#   full, empty            of a stage: x and h_out of 128 channels, then x_next
#   maps_full, maps_empty  of a slot: h_post, h_res and read of a block of tokens
#   phi_full, phi_empty    of a slice of the bundle: its parts of phi. k: bundles that the program has had before
# No warps wait for each other in a circle: before the copying warp waits for a stage, a slot or phi to become empty, it
# has begun all copies that the computing warps need to empty it, those of the stage before (STAGES ≥ 2).
@gluon.jit
def copy_in(inputs, memory, full, empty, T, D, MAP_BLOCKS: gl.constexpr):
    x_desc, h_out_desc, of_tokens, parts_desc = inputs
    h_post_desc, h_res_desc, read_desc = of_tokens
    xs, outs, posts, ress, reads, phis = memory
    COLUMNS: gl.constexpr = n + (0 if h_res_desc is None else n * n) + (0 if read_desc is None else n)
    stage_full, maps_full, phi_full = full
    stage_empty, maps_empty, phi_empty = empty
    begin, end, blocks = share(T, D)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    for item in range(begin, end):
        bundle = item // blocks
        t = item % blocks * BLOCK_T
        is_new = (item == begin) | (item % blocks == 0)
        phi_phase = (bundle - begin // blocks) & 1
        mbarrier.wait(maps_empty.index(slot), slot_phase ^ 1)
        mbarrier.expect(maps_full.index(slot), BLOCK_T * COLUMNS * 4)
        tma.async_copy_global_to_shared(h_post_desc, [t, 0], maps_full.index(slot), posts.index(slot))
        if h_res_desc is not None:
            tma.async_copy_global_to_shared(h_res_desc, [t, 0], maps_full.index(slot), ress.index(slot))
        if read_desc is not None:
            tma.async_copy_global_to_shared(read_desc, [t, 0], maps_full.index(slot), reads.index(slot))
        slot, slot_phase = advance(slot, slot_phase, SLOTS)
        for slice in gl.static_range(SLICES):
            d = (bundle * SLICES + slice) * BLOCK_D
            ready = stage_full.index(stage)
            mbarrier.wait(stage_empty.index(stage), phase ^ 1)
            mbarrier.expect(ready, (n + 1) * BLOCK_T * BLOCK_D * 2)
            for q in gl.static_range(TILES):
                at = stage * TILES + q
                tma.async_copy_global_to_shared(x_desc, [0, t, d + q * TILE_D], ready, xs.index(at))
                tma.async_copy_global_to_shared(h_out_desc, [t, d + q * TILE_D], ready, outs.index(at))
            if is_new:
                mbarrier.wait(phi_empty.index(slice), phi_phase ^ 1)
                mbarrier.expect(phi_full.index(slice), n * MAP_BLOCKS * 2 * MAPS * BLOCK_D * 2)
                for tile in gl.static_range(n * TILES):
                    for m in gl.static_range(MAP_BLOCKS):
                        at = (slice * n * TILES + tile) * MAP_BLOCKS + m
                        tma.async_copy_global_to_shared(
                            parts_desc, [0, m * MAPS, n * d + tile * TILE_D], phi_full.index(slice), phis.index(at)
                        )
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def compute(outputs, memory, full, empty, T, D, MAP_BLOCKS: gl.constexpr, TRANSPOSED: gl.constexpr):
    x_next_desc, h_in_desc, partials_ptr = outputs
    xs, outs, posts, ress, reads, phis = memory
    M: gl.constexpr = MAP_BLOCKS * MAPS
    stage_full, maps_full, phi_full = full
    stage_empty, maps_empty, phi_empty = empty
    begin, end, blocks = share(T, D)
    m = gl.expand_dims(gl.arange(0, PRODUCT_BLOCKS * MAPS, gl.SliceLayout(1, SUMS)), 1)
    column = gl.expand_dims(gl.arange(0, BLOCK_T, gl.SliceLayout(0, SUMS)), 0)
    token = gl.arange(0, BLOCK_T, gl.SliceLayout(1, TILE))
    zero = gl.zeros([64, BLOCK_T], gl.float32, PRODUCTS)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    for item in range(begin, end):
        bundle = item // blocks
        t = item % blocks * BLOCK_T
        is_last = (item + 1) % blocks == 0
        phi_phase = (bundle - begin // blocks) & 1
        mbarrier.wait(maps_full.index(slot), slot_phase)
        h_post = columns4(posts.index(slot).load(COLUMNS_4), TILE)
        h_res = None
        if MAP_BLOCKS > 1:
            h_res = mixing(ress.index(slot).load(COLUMNS_16), TILE, TRANSPOSED)
        read = None
        if h_in_desc is not None:
            read = columns4(reads.index(slot).load(COLUMNS_4), TILE)
        for slice in gl.static_range(SLICES):
            mbarrier.wait(stage_full.index(stage), phase)
            squares = ()
            for q in gl.static_range(TILES):
                at = stage * TILES + q
                squares = squares + (mix_in_place(xs.index(at), outs.index(at), h_post, h_res, read),)
            fence_async_shared()  # matrix units and copies see what this thread stored, after the barrier below
            if slice > 0:
                total = end_products(products)  # noqa: F821
            tma.store_wait(0)  # of the thread that began it: the copy out of the stage before has read it
            mbarrier.wait(phi_full.index(slice), phi_phase)
            barrier()
            # After this barrier all warps have stored x_next and fenced, have read the maps of this block (their first
            # use is above), and have done with the stage before: its products are waited for, above or at the end of
            # the last item, and so is the copy out of it.
            if slice == 0:
                mbarrier.arrive(maps_empty.index(slot), count=1)
            if (slice > 0) | (item > begin):
                mbarrier.arrive(stage_empty.index((stage + STAGES - 1) % STAGES), count=1)
            if (slice > 0) & is_last:
                mbarrier.arrive(phi_empty.index(slice - 1), count=1)
            products = begin_products(xs, phis, stage, slice, zero, MAP_BLOCKS)
            for q in gl.static_range(TILES):
                d = (bundle * SLICES + slice) * BLOCK_D + q * TILE_D
                tma.async_copy_shared_to_global(x_next_desc, [0, t, d], xs.index(stage * TILES + q))
                if h_in_desc is not None:
                    tma.async_copy_shared_to_global(h_in_desc, [t, d], outs.index(stage * TILES + q))
            more = sum_of_tiles(squares[0], squares[1])  # type: ignore[misc]
            total_squares = more if slice == 0 else total_squares + more  # noqa: F821
            stage, phase = advance(stage, phase, STAGES)
        total += end_products(products)
        if is_last:
            barrier()  # the products of all warps are waited for
            mbarrier.arrive(phi_empty.index(SLICES - 1), count=1)
        slot, slot_phase = advance(slot, slot_phase, SLOTS)

        out = partials_ptr + (bundle.to(gl.int64) * T + t) * (M + 1)
        gl.store(out + (column * (M + 1) + m), total, mask=(m < M) & (column < T - t))
        total_squares = gl.reshape(total_squares, [BLOCK_T])
        total_squares = gl.convert_layout(total_squares, gl.SliceLayout(1, TILE), assert_trivial=True)
        gl.store(out + (token * (M + 1) + M), total_squares, mask=token < T - t)
    tma.store_wait(0)  # shared memory is given back when this returns


# x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i], or + x[j] without h_res
# h_in = Σ_j read[j]·x_next[j], where it is asked for
# partials[bundle, t, m] = Σ_{d in bundle} Σ_j x_next[t, j, d]·phi[m, j, d];  partials[bundle, t, M] = Σ x_next²
@gluon.jit(do_not_specialize=["T"])
def mhc_boundary_fwd_kernel(
    x_desc,  # [n, T, D], as x_next
    h_out_desc,
    h_post_desc,
    h_res_desc,  # [T, n·n]
    read_desc,
    parts_desc,  # [parts, maps, K], in the order of the projection
    x_next_desc,
    h_in_desc,
    partials_ptr,
    T,
    D,
    MAP_BLOCKS: gl.constexpr,
    TRANSPOSED: gl.constexpr,  # h_res is [new, old]
):
    bf16: gl.constexpr = gl.bfloat16
    fp32: gl.constexpr = gl.float32
    posts = gl.allocate_shared_memory(fp32, [SLOTS, BLOCK_T, n], h_post_desc.layout)
    ress = posts  # a map that is absent has no memory of its own
    if h_res_desc is not None:
        ress = gl.allocate_shared_memory(fp32, [SLOTS, BLOCK_T, n * n], h_res_desc.layout)
    reads = posts
    if read_desc is not None:
        reads = gl.allocate_shared_memory(fp32, [SLOTS, BLOCK_T, n], read_desc.layout)
    # The product of the last tile of phi also reads the padding after it.
    PHI: gl.constexpr = SLICES * n * TILES * MAP_BLOCKS + PRODUCT_BLOCKS - MAP_BLOCKS
    memory = (
        gl.allocate_shared_memory(bf16, [STAGES * TILES, n, BLOCK_T, TILE_D], x_desc.layout),
        gl.allocate_shared_memory(bf16, [STAGES * TILES, BLOCK_T, TILE_D], h_out_desc.layout),
        posts,
        ress,
        reads,
        gl.allocate_shared_memory(bf16, [PHI, 2, MAPS, TILE_D], parts_desc.layout),
    )
    full = (
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [SLICES, 1], mbarrier.MBarrierLayout()),
    )
    empty = (
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [SLICES, 1], mbarrier.MBarrierLayout()),
    )
    for s in gl.static_range(STAGES):
        mbarrier.init(full[0].index(s), count=1)
        mbarrier.init(empty[0].index(s), count=1)
    for s in gl.static_range(SLOTS):
        mbarrier.init(full[1].index(s), count=1)
        mbarrier.init(empty[1].index(s), count=1)
    for s in gl.static_range(SLICES):
        mbarrier.init(full[2].index(s), count=1)
        mbarrier.init(empty[2].index(s), count=1)
    barrier()  # no warp waits for an mbarrier before it is initialised
    inputs = (x_desc, h_out_desc, (h_post_desc, h_res_desc, read_desc), parts_desc)
    outputs = (x_next_desc, h_in_desc, partials_ptr)
    gl.warp_specialize(
        [
            (compute, (outputs, memory, full, empty, T, D, MAP_BLOCKS, TRANSPOSED)),
            (copy_in, (inputs, memory, full, empty, T, D, MAP_BLOCKS)),
        ],
        [1],
        [COPYING_REGISTERS],
    )


def post_project(
    *,
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transposed: bool,
    phi: Tensor,
    gamma: Tensor | None,
    x_next: Tensor,
    read: Tensor | None = None,
    h_in: Tensor | None = None,
) -> tuple[Tensor, configs.SplitK]:
    """Fills x_next and, where x_next is read with `read`, h_in; returns the partial sums [bundles, T, M + 1], and how K
    was split."""
    tile, on = configs.BOUNDARY_FWD, device.of(x.device)
    streams, D = x.shape[-2:]
    assert (h_res is None) == (phi.shape[0] == 2 * streams), "the kernel takes both layers with a map, or both without"
    T = x.numel() // (streams * D)
    bundles, token_blocks = D // configs.BUNDLE, cdiv(T, tile.block_t)
    parts = phi_parts(phi, gamma, None, streams, configs.arithmetic(x.dtype, on), tile.block_d)
    partials = torch.empty((bundles, T, phi.shape[0] + 1), dtype=torch.float32, device=x.device)
    launch(
        mhc_boundary_fwd_kernel,
        (min(on.processors, bundles * token_blocks),),
        x_desc=by_streams(x, tile.block_t, TILE_D.value),
        h_out_desc=by_rows(h_out, D, tile.block_t, TILE_D.value),
        h_post_desc=by_rows(h_post, streams, tile.block_t, streams),
        h_res_desc=None if h_res is None else by_rows(h_res, streams**2, tile.block_t, streams**2),
        read_desc=None if read is None else by_rows(read, streams, tile.block_t, streams),
        parts_desc=described(parts, parts.shape, parts.stride(), [2, MAPS.value, TILE_D.value]),
        x_next_desc=by_streams(x_next, tile.block_t, TILE_D.value),
        h_in_desc=None if h_in is None else by_rows(h_in, D, tile.block_t, TILE_D.value),
        partials_ptr=partials,
        T=T,
        D=D,
        MAP_BLOCKS=phi.shape[0] // MAPS.value,
        TRANSPOSED=transposed,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )
    return partials, configs.split_k_in_bundles(streams, D)
