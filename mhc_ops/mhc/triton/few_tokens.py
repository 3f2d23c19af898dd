"""Few tokens: a whole boundary, or a whole pre, in one launch.

A program takes one slice of K and a group of tokens: it makes x_next of its channels, cuts its share of phi into parts
and stores its partial sums. With so few tokens phi is most of the bytes, and it comes from memory to as many
multiprocessors as there are slices. What is left then is short, but each step waits for the one before: add up the
sums, make the maps, sum the streams to h_in, norm that.

Where all programs of a launch fit on the GPU at once, they wait for one another, and that rest is spread over them: one
makes h_in of a token, another its maps with Sinkhorn. The launch is cooperative then: the driver starts all programs at
once, or refuses. Elsewhere no program waits, and the last of a group to arrive does all of it; groups are small there,
and read phi again from the L2 cache.

Slices are those of mhc_pre_project_kernel and summed as there; the steps after that are the code of
mhc_pre_finish_kernel. So the bits are those of many tokens. The product has phi on the side where the projection has x,
because the matrix units of Hopper take 64 rows on one side and as few as 8 on the other: here 64 rows of phi in parts,
and 16 tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from ..records import Post, Pre
from . import configs
from .exact_products import LANE, load_phi, rest_of, sum_neighbours
from .post import load_maps
from .pre_finish import gates_of, load_streams, store_gates, store_h_in, store_h_res, sum_squares, weigh
from .tickets import Ticketed, draw

ROWS = tl.constexpr(8)  # maps whose parts follow one another, as in stacked_rows


# Both parts of phi as rows of a product: the high ones of 8 maps, then their low ones, then the next 8 maps
@triton.jit
def stack_parts(phi, dtype: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    both = tl.join(phi.to(dtype), rest_of(phi, 1, dtype).to(dtype))
    both = tl.permute(tl.reshape(both, [BLOCK_M // ROWS, ROWS, COLUMNS, 2]), [0, 3, 1, 2])
    return tl.reshape(both, [2 * BLOCK_M, COLUMNS])


# [2·BLOCK_M, tokens] of stacked rows to [BLOCK_M, tokens]
@triton.jit
def sum_stacked(stacked, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr):
    parts = tl.reshape(stacked, [BLOCK_M // ROWS, 2, ROWS, TOKENS])
    return tl.reshape(tl.sum(parts, axis=1), [BLOCK_M, TOKENS])


# values[first + j] of a tuple
@triton.jit
def chosen_of(values, j, first: tl.constexpr, n: tl.constexpr):
    value = values[first]
    for i in tl.static_range(1, n):
        value = tl.where(j == i, values[first + i], value)
    return value


# x_next[j] as `mix` in post.py makes it, of a j that is known when running
@triton.jit
def mix_stream(x, h_out, h_post, h_res, j, n: tl.constexpr):
    h_out, weight = h_out.to(tl.float32), chosen_of(h_post, j, 0, n)
    if len(h_res) == 0:
        own = chosen_of(x, j, 0, n).to(tl.float32)
        mixed = tl.fma(tl.broadcast_to(weight, h_out.shape), h_out, own)
    else:
        mixed = weight * h_out
        for i in tl.static_range(n):
            weight = tl.broadcast_to(chosen_of(h_res, j, i * n, n), mixed.shape)
            mixed = tl.fma(weight, x[i].to(tl.float32), mixed)
    return mixed


# The first token that this program finishes, and whether it makes h_in and the maps from there on
@triton.jit
def share_of(
    count_ptr,
    piece,
    first,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
    FINISHED: tl.constexpr,
):
    drawn = draw(count_ptr)
    if TOGETHER:  # the launch is cooperative: all programs run, or none does
        while drawn < PIECES:
            drawn = tl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu")
        # A second ticket, so that the last one can set the count back: no program reads it any more.
        if tl.atomic_add(count_ptr, 1, sem="relaxed", scope="gpu") == 2 * PIECES - 1:
            tl.store(count_ptr, 0)
        FINISHERS: tl.constexpr = TOKENS // FINISHED
        first += piece % FINISHERS * FINISHED
        makes_h_in = piece < FINISHERS
        makes_maps = (piece >= FINISHERS) & (piece < 2 * FINISHERS)
    else:
        makes_h_in = drawn == PIECES
        makes_maps = makes_h_in
        if makes_h_in:
            tl.store(count_ptr, 0)  # no other program draws; the next kernel of the stream sees it
    return first, makes_h_in, makes_maps


# h_in of a few whole tokens, and its norm. x: of all channels where BLOCKS is 1, else it is read here
@triton.jit
def finish_h_in(
    x,
    x_next_ptr,
    weights_ptr,
    layer_norm_weight_ptr,
    h_in_ptr,
    rows,
    in_batch,
    D,
    layer_norm_eps,
    n: tl.constexpr,
    FINISHED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    h_pre = ()
    for i in tl.static_range(n):
        weight = tl.load(weights_ptr + rows * n + i, mask=in_batch[:, None], other=0.0)
        h_pre = h_pre + (weight.to(tl.float32),)
    factor = None
    if BLOCKS == 1:
        d = tl.arange(0, BLOCK_D)[None, :]
        h_in = weigh(x, h_pre, n)
        if layer_norm_weight_ptr is not None:
            factor = tl.rsqrt(sum_squares(h_in, FINISHED, BLOCK_D) / D + layer_norm_eps)
        store_h_in(h_in_ptr, layer_norm_weight_ptr, h_in, factor, rows, d, in_batch, D)
    else:
        if layer_norm_weight_ptr is not None:
            of_blocks = tl.zeros([FINISHED, BLOCKS], tl.float32)
            for block in range(BLOCKS):
                d = block * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
                h_in = weigh(load_streams(x_next_ptr, rows, d, in_batch, D, n), h_pre, n)
                of_block = sum_squares(h_in, FINISHED, BLOCK_D)[:, None]
                of_blocks = tl.where(tl.arange(0, BLOCKS)[None, :] == block, of_block, of_blocks)
            total = tl.reshape(sum_neighbours(of_blocks, FINISHED, BLOCKS, 1), [FINISHED])
            factor = tl.rsqrt(total / D + layer_norm_eps)
        for block in range(BLOCKS):
            d = block * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            h_in = weigh(load_streams(x_next_ptr, rows, d, in_batch, D, n), h_pre, n)
            store_h_in(h_in_ptr, layer_norm_weight_ptr, h_in, factor, rows, d, in_batch, D)


# x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i], or + x[j] without h_res; without h_out x_next is x, and given
# partials[piece, t, m] = Σ_{k in slice} x_next[t, k]·phi[m, k];  partials[piece, t, M] = Σ_{k in slice} x_next[t, k]²
# then, by the programs of a group of tokens together or by the last of them, what mhc_pre_finish_kernel computes
@triton.jit(do_not_specialize=["T", "iters"])
def mhc_few_fwd_kernel(
    tickets_ptr,  # zero, also when the kernel has ended
    x_ptr,
    h_out_ptr,
    h_post_ptr,
    h_res_ptr,
    x_next_ptr,
    phi_ptr,
    gamma_ptr,
    partials_ptr,
    alpha_ptr,
    bias_ptr,
    read_ptr,
    layer_norm_weight_ptr,
    h_in_ptr,
    h_post_next_ptr,
    h_res_next_ptr,
    inv_rms_ptr,
    h_mix_ptr,
    h_pre_ptr,  # also scratch between threads; never None
    T,
    D,
    norm_eps,
    hc_eps,
    post_mult,
    post_eps,
    iters,
    sinkhorn_eps,
    layer_norm_eps,
    n: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,  # n in the head
    TRANSPOSED: tl.constexpr,
    SLICE_BLOCKS: tl.constexpr,  # of channels
    PIECES: tl.constexpr,
    BUNDLE_PIECES: tl.constexpr,
    GROUP_PIECES: tl.constexpr,
    TOKENS: tl.constexpr,  # of a group
    TOGETHER: tl.constexpr,  # all programs run at once and wait for one another
    FINISHED: tl.constexpr,  # tokens that a program finishes: a power of two
    BLOCK_T: tl.constexpr,  # tokens of a product, most of them padding
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,  # channels of a product
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,  # channels of h_in at a time
    BLOCKS: tl.constexpr,  # of BLOCK_D: a power of two
    STAGES: tl.constexpr,
):
    LANES: tl.constexpr = BLOCK_K // LANE
    piece, group = tl.program_id(0) % PIECES, tl.program_id(0) // PIECES
    of_group = tl.arange(0, BLOCK_T)
    token = group * TOKENS + of_group
    is_token = (of_group < TOKENS) & (token < T)
    row, is_row = token[:, None], is_token[:, None]
    m = tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    dtype = x_ptr.dtype.element_ty

    if h_out_ptr is not None:
        h_post, h_res = load_maps(h_post_ptr, h_res_ptr, row, is_row, n, TRANSPOSED)
    minus_mix = tl.zeros([2 * BLOCK_M, BLOCK_T], tl.float32)
    squares = tl.zeros([BLOCK_T, LANES], tl.float32)
    begin = piece * SLICE_BLOCKS
    for block in tl.range(begin, tl.minimum(begin + SLICE_BLOCKS, tl.cdiv(D, BLOCK_K)), num_stages=1):
        d = block * BLOCK_K + column
        in_tile = is_row & (d < D)
        # Nothing waits for these loads before those of the first phi have begun too.
        streams = ()
        for i in tl.static_range(n):
            streams = streams + (tl.load(x_ptr + (row * n + i) * D + d, mask=in_tile, other=0.0),)
        if h_out_ptr is not None:
            h_out = tl.load(h_out_ptr + row * D + d, mask=in_tile, other=0.0)
        for j in tl.range(n, num_stages=STAGES):
            phi = load_phi(phi_ptr, gamma_ptr, m, j * D + d, d < D, n * D, M)
            if h_out_ptr is None:
                x = chosen_of(streams, j, 0, n)
            else:
                x = mix_stream(streams, h_out, h_post, h_res, j, n).to(dtype)
                tl.store(x_next_ptr + (row * n + j) * D + d, x, mask=in_tile)
            # Subtracted as in mhc_pre_project_kernel.
            minus_mix -= tl.dot(stack_parts(phi, dtype, BLOCK_M, BLOCK_K), x.T)
            value = x.to(tl.float32)
            squares += sum_neighbours(value * value, BLOCK_T, BLOCK_K, LANES)

    out = partials_ptr + (piece * T + token) * (M + 1)
    tl.store(out[None, :] + m, 0.0 - sum_stacked(minus_mix, BLOCK_M, BLOCK_T), mask=is_token[None, :] & (m < M))
    tl.store(out + M, tl.reshape(sum_neighbours(squares, BLOCK_T, LANES, 1), [BLOCK_T]), mask=is_token)

    first, makes_h_in, makes_maps = share_of(
        tickets_ptr + group, piece, group * TOKENS, PIECES, TOKENS, TOGETHER, FINISHED
    )
    if makes_h_in | makes_maps:
        t = first + tl.arange(0, FINISHED)
        in_batch = t < T
        rows = t[:, None]
        x = ()
        if BLOCKS == 1 and h_in_ptr is not None:  # on its way while the gates are made
            d = tl.arange(0, BLOCK_D)[None, :]
            x = load_streams(x_next_ptr, rows, d, in_batch & makes_h_in, D, n)
        h_mix, inv_rms, gate = gates_of(
            partials_ptr=partials_ptr,
            alpha_ptr=alpha_ptr,
            bias_ptr=bias_ptr,
            t=t,
            in_batch=in_batch,
            T=T,
            D=D,
            norm_eps=norm_eps,
            n=n,
            M=M,
            PIECES=PIECES,
            BUNDLE_PIECES=BUNDLE_PIECES,
            GROUP_PIECES=GROUP_PIECES,
            BLOCK_G=BLOCK_G,
        )
        # Through memory, where every thread finds the weights of its tokens. Without it, triton sums the pieces again
        # in the layout of h_in, eight of them in each thread.
        g = tl.arange(0, BLOCK_G)[None, :]
        tl.store(h_pre_ptr + rows * n + g, gate + hc_eps, mask=in_batch[:, None] & (g < n))
        tl.debug_barrier()
        if h_in_ptr is not None:  # noqa: SIM102 (known when compiling, then when running)
            if makes_h_in:
                finish_h_in(
                    x=x,
                    x_next_ptr=x_next_ptr,
                    weights_ptr=h_pre_ptr if read_ptr is None else read_ptr,
                    layer_norm_weight_ptr=layer_norm_weight_ptr,
                    h_in_ptr=h_in_ptr,
                    rows=rows,
                    in_batch=in_batch,
                    D=D,
                    layer_norm_eps=layer_norm_eps,
                    n=n,
                    FINISHED=FINISHED,
                    BLOCK_D=BLOCK_D,
                    BLOCKS=BLOCKS,
                )
        if makes_maps:
            store_gates(
                mix=h_mix,
                inv_rms=inv_rms,
                gate=gate,
                h_post_ptr=h_post_next_ptr,
                inv_rms_ptr=inv_rms_ptr,
                h_mix_ptr=h_mix_ptr,
                h_pre_ptr=None,
                t=t,
                in_batch=in_batch,
                hc_eps=hc_eps,
                post_mult=post_mult,
                post_eps=post_eps,
                n=n,
                M=M,
                BLOCK_G=BLOCK_G,
            )
            store_h_res(
                partials_ptr=partials_ptr,
                alpha_ptr=alpha_ptr,
                bias_ptr=bias_ptr,
                h_res_ptr=h_res_next_ptr,
                h_mix_ptr=h_mix_ptr,
                inv_rms=inv_rms,
                t=t,
                T=T,
                iters=iters,
                sinkhorn_eps=sinkhorn_eps,
                n=n,
                N=N,
                M=M,
                PIECES=PIECES,
                BUNDLE_PIECES=BUNDLE_PIECES,
                GROUP_PIECES=GROUP_PIECES,
            )


KERNEL = Ticketed(mhc_few_fwd_kernel)


def chosen(x: Tensor, T: int, M: int) -> configs.Few | None:
    """How so few tokens are taken. None where there are too many of them, or where many tokens with these maps are
    summed in blocks of another size, as on some GPUs without h_res."""
    (n, D), on = x.shape[-2:], device.of(x.device)
    if x.dtype != configs.FEW_DTYPE or not configs.same_blocks_of_k(n, M, D, on):
        return None
    return configs.few(n, D, T, on)


def few_fwd(tile: configs.Few, pre: Pre, post: Post | None = None) -> None:
    """tile: as chosen   post: at a boundary, whose x_next is the x of pre"""
    x, options = pre.x, pre.options
    n, D = x.shape[-2:]
    M, K = pre.phi.shape
    T, width, split = x.numel() // K, next_power_of_2(D), configs.split_k_few(n, D, device.of(x.device))
    partials = torch.empty((split.pieces, T, M + 1), dtype=torch.float32, device=x.device)
    launch(
        KERNEL,
        (cdiv(T, tile.tokens) * split.pieces,),
        x_ptr=x if post is None else post.x,
        h_out_ptr=None if post is None else post.h_out,
        h_post_ptr=None if post is None else post.h_post,
        h_res_ptr=None if post is None else post.h_res,
        x_next_ptr=x,
        phi_ptr=pre.phi,
        gamma_ptr=pre.gamma,
        partials_ptr=partials,
        alpha_ptr=pre.alpha,
        bias_ptr=pre.bias,
        read_ptr=pre.read,
        layer_norm_weight_ptr=pre.layer_norm_weight,
        h_in_ptr=pre.h_in,
        h_post_next_ptr=pre.h_post,
        h_res_next_ptr=pre.h_res,
        inv_rms_ptr=pre.inv_rms,
        h_mix_ptr=pre.h_mix,
        h_pre_ptr=torch.empty((T, n), dtype=torch.float32, device=x.device) if pre.h_pre is None else pre.h_pre,
        T=T,
        D=D,
        norm_eps=options.norm_eps,
        hc_eps=options.hc_eps,
        post_mult=options.post_mult,
        post_eps=options.post_eps,
        iters=options.sinkhorn_iters,
        sinkhorn_eps=options.sinkhorn_eps or None,
        layer_norm_eps=None if pre.layer_norm_weight is None else options.layer_norm_eps,
        n=n,
        N=next_power_of_2(n),
        M=M,
        TRANSPOSED=options.transposed,
        SLICE_BLOCKS=split.steps // n,
        PIECES=split.pieces,
        BUNDLE_PIECES=split.bundle_pieces,
        GROUP_PIECES=split.group_pieces,
        TOKENS=tile.tokens,
        TOGETHER=tile.together,
        FINISHED=tile.finished,
        BLOCK_T=tile.block_t,
        BLOCK_M=configs.FEW_MAPS,
        BLOCK_K=tile.block_k,
        BLOCK_G=next_power_of_2(2 * n + 1),
        BLOCK_D=tile.block_d,
        BLOCKS=width // tile.block_d,
        STAGES=tile.stages,
        num_warps=tile.warps,
        launch_cooperative_grid=tile.together,
    )
