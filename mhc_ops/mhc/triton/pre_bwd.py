"""mHC pre, backward: two passes over x with a small step per token between them, then sums in fixed order.

1. dh_pre    pass A: dh_pre[t, i] = <dh_in[t], x[t, i]>; with the layer's norm pre_norm.py
2. dmaps     pre_dmaps.py, per token: back through σ and the scales to dh_mix, and the factor of x in dx
3. dx        pass B: dx, and A = Σ_t dh_mix[t] ⊗ x[t] per slice of the tokens
4. sums      pre_sums.py: dphi and dgamma from A, dalpha and dbias from the sums of step 2

dh_mix is kept without its factor alpha, which dx gets through phi and dphi at the end: alpha may be zero, and the sums
without it are still needed.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from ..options import PreOptions
from ..records import PreBackward
from . import configs
from .exact_products import phi_parts
from .pre_dmaps import mhc_pre_dmaps_kernel
from .pre_norm import normed_dh_pre
from .pre_sums import Dots, sum_gradients
from .sinkhorn import divisors


# dh_pre[t, i] = Σ_d dh_in[t, d]·x[t, i, d]
@triton.jit(do_not_specialize=["T"])
def mhc_pre_dh_pre_kernel(
    x_ptr,
    dh_in_ptr,
    dh_pre_ptr,
    T,
    D,
    n: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_N)
    rows = (t[:, None] * n + i[None, :])[:, :, None]
    present = ((t < T)[:, None] & (i < n)[None, :])[:, :, None]
    products = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = (start + tl.arange(0, BLOCK_D))[None, None, :]
        x = tl.load(x_ptr + rows * D + d, mask=present & (d < D), other=0.0).to(tl.float32)
        in_row = (t < T)[:, None, None] & (d < D)
        dh_in = tl.load(dh_in_ptr + t[:, None, None] * D + d, mask=in_row, other=0.0).to(tl.float32)
        products += x * dh_in
    dh_pre = tl.sum(products, axis=2).to(dh_pre_ptr.dtype.element_ty)
    tl.store(dh_pre_ptr + t[:, None] * n + i[None, :], dh_pre, mask=(t < T)[:, None] & (i < n)[None, :])


# total + left · right for factors in parts: the parts of the smallest order are left out, 2^-16 of the product
@triton.jit
def dot_parts(left, right, total, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    total = tl.dot(left[0], right[0], total, input_precision=PRECISION)
    if PARTS == 2:
        total = tl.dot(left[0], right[1], total)
        total = tl.dot(left[1], right[0], total)
    return total


# minus_A - xᵀ · dh_mix: subtracted for the reason given in mhc_pre_project_kernel
@triton.jit
def less_product(minus_A, x, dh_mix, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    left = (x if PARTS == 2 else x.to(tl.float32)).T
    product = tl.zeros(minus_A.shape, tl.float32)
    for p in tl.static_range(PARTS):
        product = tl.dot(left, dh_mix[p], product, input_precision=PRECISION)
    return minus_A - product


# dx + what the pointer has for these tokens and columns; dx where it is None
@triton.jit
def plus(dx, ptr, begin, local, k, in_tiles, D, n: tl.constexpr):
    if ptr is not None:
        more = tl.load(ptr + begin * n * D + (local * (n * D) + k), mask=in_tiles, other=0.0)
        dx += more.to(tl.float32)
    return dx


# Σ_i h_pre[i]·x[i] of these tokens and channels, from memory: pass B has the streams of x in several threads
@triton.jit
def read_again(x_ptr, h_pre_ptr, local, d, in_batch, in_tile, D, n: tl.constexpr):
    h_in = tl.zeros([local.shape[0], d.shape[1]], tl.float32)
    for i in tl.static_range(n):
        weight = tl.load(h_pre_ptr + (local * n + i), mask=in_batch, other=0.0)
        h_in += weight * tl.load(x_ptr + (local * (n * D) + i * D + d), mask=in_tile, other=0.0).to(tl.float32)
    return h_in


# dx + Σ_j h_res[i, j]·dx_next[j], as [tokens, streams, channels]
@triton.jit
def plus_mixed(dx, dx_next_ptr, h_res_ptr, tokens, d, stream, masks, D, n: tl.constexpr):
    begin, local = tokens
    in_batch, in_tile = masks
    for j in tl.static_range(n):
        at = dx_next_ptr + begin * n * D + (local * (n * D) + j * D + d)
        dx_next = tl.load(at, mask=in_tile, other=0.0).to(tl.float32)
        at = h_res_ptr + begin * (n * n) + ((local * n + j) * n + stream)
        weight = tl.load(at, mask=in_batch, other=0.0)
        dx += weight[:, :, None] * dx_next[:, None, :]
    return dx


# dx[t, i] = Σ_m dh_mix[t, m]·alpha[m]·gamma[i]·phi[m, i] + x_factor[t]·x[t, i] + h_pre[t, i]·dh_in[t]
#            + Σ_j h_res[t, i, j]·dx_next[t, j] (dx_next[t, i] without h_res) + dx_added[t, i], each where it is given
# A[slice, m, i] = Σ_{t in slice} dh_mix[t, m]·x[t, i]
# With the layer's norm, dh_in is of its output: dh_in = r·(weight ⊙ dh_in) − c·h_in in the above, and
# dweight[slice] = Σ_{t in slice} r·h_in ⊙ dh_in
@triton.jit(do_not_specialize=["T"])
def mhc_pre_dx_kernel(
    x_ptr,
    dh_in_ptr,
    dx_next_ptr,
    dx_added_ptr,
    dh_mix_ptr,
    phi_ptr,
    x_factor_ptr,
    h_pre_ptr,
    h_res_ptr,
    layer_norm_weight_ptr,
    factors_ptr,  # r of all tokens, then c
    dx_ptr,
    A_ptr,
    dweight_ptr,
    T,
    D,
    K_padded,
    n: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_D: tl.constexpr,
    STREAMS: tl.constexpr,  # of a program; divides n
    A_LAST: tl.constexpr,  # A's product after dx, else before it: what fills registers differs
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    # All streams of a program are one tile [BLOCK_T, STREAMS·BLOCK_D], column s·BLOCK_D + d: few, large operations.
    GROUPS: tl.constexpr = n // STREAMS
    first = tl.program_id(0) % GROUPS * STREAMS
    begin_d = tl.program_id(0) // GROUPS * BLOCK_D
    column = tl.arange(0, STREAMS * BLOCK_D)[None, :]
    in_rows = begin_d + column % BLOCK_D < D
    k = (first + column // BLOCK_D) * D + begin_d + column % BLOCK_D
    d = begin_d + tl.arange(0, BLOCK_D)[None, :]
    in_row = d < D
    stream = first + tl.arange(0, STREAMS)[None, :]
    m = tl.arange(0, BLOCK_M)
    slices = tl.num_programs(1)
    T64 = T.to(tl.int64)

    phi = ()
    for p in tl.static_range(PARTS):
        rows = (p * BLOCK_M + m)[:, None] * K_padded
        phi = phi + (tl.load(phi_ptr + (rows + k), mask=in_rows, other=0.0),)
    minus_A = tl.zeros([STREAMS * BLOCK_D, BLOCK_M], tl.float32)
    if factors_ptr is not None:
        layer_norm_weight = tl.load(layer_norm_weight_ptr + d, mask=in_row, other=0.0).to(tl.float32)
        dweight = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)

    # Last tokens first: they are what pass A left in the L2 cache.
    blocks = tl.cdiv(T, BLOCK_T)
    local = tl.arange(0, BLOCK_T)[:, None]
    for done in tl.range(tl.program_id(1), blocks, slices, num_stages=STAGES):
        # Addresses are 64 bits of the block's first token and 32 bits from there: half the registers.
        begin = (blocks - 1 - done).to(tl.int64) * BLOCK_T
        in_batch = local < T - begin
        in_tile = in_batch if EVEN_D else in_batch & in_row
        in_tiles = in_batch if EVEN_D else in_batch & in_rows
        dh_mix = ()
        for p in tl.static_range(PARTS):
            at = dh_mix_ptr + (p * T64 + begin) * BLOCK_M
            dh_mix = dh_mix + (tl.load(at + (local * BLOCK_M + m[None, :]), mask=in_batch, other=0.0),)
        x = tl.load(x_ptr + begin * n * D + (local * (n * D) + k), mask=in_tiles, other=0.0)
        wide = x.to(tl.float32)
        x_factor = tl.load(x_factor_ptr + begin + local, mask=in_batch, other=0.0)
        if not A_LAST:
            minus_A = less_product(minus_A, x, dh_mix, PARTS, PRECISION)
        dx = x_factor * wide
        if h_res_ptr is None:
            dx = plus(dx, dx_next_ptr, begin, local, k, in_tiles, D, n)
        dx = plus(dx, dx_added_ptr, begin, local, k, in_tiles, D, n)
        dx = tl.reshape(dot_parts(dh_mix, phi, dx, PARTS, PRECISION), [BLOCK_T, STREAMS, BLOCK_D])
        if dh_in_ptr is not None:
            dh_in = tl.load(dh_in_ptr + begin * D + (local * D + d), mask=in_tile, other=0.0).to(tl.float32)
            h_pre = tl.load(h_pre_ptr + begin * n + (local * n + stream), mask=in_batch, other=0.0)
            if factors_ptr is not None:
                h_in = read_again(x_ptr + begin * n * D, h_pre_ptr + begin * n, local, d, in_batch, in_tile, D, n)
                r = tl.load(factors_ptr + begin + local, mask=in_batch, other=0.0)
                c = tl.load(factors_ptr + T64 + begin + local, mask=in_batch, other=0.0)
                dweight += r * h_in * dh_in
                dh_in = r * (layer_norm_weight * dh_in) - c * h_in
            dx += h_pre[:, :, None] * dh_in[:, None, :]
        if h_res_ptr is not None:
            dx = plus_mixed(dx, dx_next_ptr, h_res_ptr, (begin, local), d, stream, (in_batch, in_tile), D, n)
        dx = tl.reshape(dx, [BLOCK_T, STREAMS * BLOCK_D]).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + begin * n * D + (local * (n * D) + k), dx, mask=in_tiles)
        if A_LAST:
            minus_A = less_product(minus_A, x, dh_mix, PARTS, PRECISION)

    out = A_ptr + (tl.program_id(1) * M + m).to(tl.int64)[:, None] * (n * D) + k
    tl.store(out, -minus_A.T, mask=(m < M)[:, None] & in_rows)
    if factors_ptr is not None:  # the programs of other streams have the same sums
        channel = begin_d + tl.arange(0, BLOCK_D)
        at = dweight_ptr + tl.program_id(1).to(tl.int64) * D + channel
        tl.store(at, tl.sum(dweight, axis=0), mask=(channel < D) & (first == 0))


class PerToken(NamedTuple):
    """What the per-token step makes for pass B: tensors of their own or, at a boundary, columns of one table.

    h_pre: [T, n]   x_factor: [T]   h_res: [T, n, n], or None where dx_next is not mixed   table: [T, columns] or None
    """

    h_pre: Tensor
    x_factor: Tensor
    h_res: Tensor | None
    table: Tensor | None = None


def mhc_pre_bwd(**arguments: Any) -> None:
    pre_bwd(PreBackward(**arguments))


def mhc_maps_bwd(**arguments: Any) -> None:
    """Pre's backward without h_in."""
    pre_bwd(PreBackward(**arguments, dh_in=None, dx_next=None))


def mhc_head_bwd(*, hc_eps: float, dout: Tensor, **arguments: Any) -> None:
    """As pre's, with h_in alone."""
    options = PreOptions(hc_eps=hc_eps, sinkhorn_iters=0)
    pre_bwd(PreBackward(**arguments, options=options, dh_in=dout, dh_post=None, dh_res=None, dx_next=None))


def pre_bwd(pre: PreBackward) -> None:
    """The four steps one after the other. boundary.py takes the same, with a kernel of its own for pass B."""
    if pre.zero_without_tokens():
        return
    parts = scaled_phi(pre)
    dh_pre, factors = pass_a(pre)
    token = token_tensors(pre)
    dh_mix, sums = maps_backward(pre, token, dh_pre)
    A, dweight = pass_b(pre, token, parts, dh_mix, factors)
    sum_up(pre, A, sums, dweight)


def scaled_phi(pre: PreBackward) -> Tensor:
    """alpha · gamma ⊙ phi in parts, as dx gets it."""
    n, exact = pre.x.shape[-2], configs.arithmetic(pre.x.dtype, device.of(pre.x.device))
    return phi_parts(pre.phi, pre.gamma, pre.alpha, n, exact)


def scratch(pre: PreBackward, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=pre.x.device)


def token_tensors(pre: PreBackward) -> PerToken:
    n, T = pre.x.shape[-2], pre.inv_rms.numel()
    is_mixed = pre.dx_next is not None and pre.phi.shape[0] > 2 * n
    assert pre.options.sinkhorn_iters > 0 or not is_mixed
    return PerToken(scratch(pre, T, n), scratch(pre, T), scratch(pre, T, n, n) if is_mixed else None)


def token_table(pre: PreBackward) -> PerToken:
    table = scratch(pre, pre.inv_rms.numel(), configs.table_columns(pre.x.shape[-2], pre.phi.shape[0]))
    return PerToken(table, table, table, table)


def pass_a(pre: PreBackward, table: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
    """dh_pre for the maps, and with the layer's norm the factors that pass B makes dh_in with, or the table with them.

    Where h_in was read with `read`, the pass makes dread, and dh_pre is the one that is given."""
    if pre.dh_in is None:
        if pre.read is not None:
            pre.filled_by_pass_a().zero_()
        return pre.dh_pre, None
    if pre.layer_norm_weight is not None:
        made, factors = normed_dh_pre(pre, table)
        return (made if pre.read is None else pre.dh_pre), factors
    made = plain_dh_pre(pre)
    return (made if pre.read is None else pre.dh_pre), None


def plain_dh_pre(pre: PreBackward) -> Tensor:
    """dh_pre [T, n], in dread where h_in was read with `read`."""
    n, D = pre.x.shape[-2:]
    T, on = pre.inv_rms.numel(), device.of(pre.x.device)
    dh_pre = pre.filled_by_pass_a()
    tile = configs.dh_pre(n, D, configs.arithmetic(pre.x.dtype, on).parts == 1, on)
    launch(
        mhc_pre_dh_pre_kernel,
        (cdiv(T, tile.block_t),),
        x_ptr=pre.x,
        dh_in_ptr=pre.dh_in,
        dh_pre_ptr=dh_pre,
        T=T,
        D=D,
        n=n,
        BLOCK_T=tile.block_t,
        BLOCK_N=next_power_of_2(n),
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )
    return dh_pre


def maps_backward(pre: PreBackward, token: PerToken, dh_pre: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fills `token`; returns dh_mix in parts [parts, T, padded_maps], and Σ dz and Σ dz·m [programs, 2, M]."""
    n, D = pre.x.shape[-2:]
    M, T, options, on = pre.phi.shape[0], pre.inv_rms.numel(), pre.options, device.of(pre.x.device)
    exact, padded = configs.arithmetic(pre.x.dtype, on), configs.padded_maps(M)
    tile = configs.dmaps(n, on, without_eps=not options.sinkhorn_eps)
    programs, iters = cdiv(T, tile.block_t), options.sinkhorn_iters
    dh_mix, sums = scratch(pre, exact.parts, T, padded, dtype=exact.dtype), scratch(pre, programs, 2, M)
    through_sinkhorn = iters > 0 and M > 2 * n and not (pre.dh_res is None and token.h_res is None)
    launch(
        mhc_pre_dmaps_kernel,
        (programs,),
        h_mix_ptr=pre.h_mix,
        inv_rms_ptr=pre.inv_rms,
        dh_pre_ptr=dh_pre,
        dh_post_ptr=pre.dh_post,
        dh_res_ptr=pre.dh_res,
        alpha_ptr=pre.alpha,
        bias_ptr=pre.bias,
        dh_mix_ptr=dh_mix,
        x_factor_ptr=token.x_factor,
        read_ptr=pre.read,
        h_pre_ptr=token.h_pre,
        h_res_ptr=token.h_res,
        sums_ptr=sums,
        divisors_ptr=divisors(T, n, iters, pre.x.device) if through_sinkhorn else None,
        T=T,
        D=D,
        hc_eps=options.hc_eps,
        post_mult=options.post_mult,
        iters=iters,
        sinkhorn_eps=options.sinkhorn_eps or None,
        n=n,
        N=next_power_of_2(n),
        M=M,
        PARTS=exact.parts,
        TRANSPOSED=options.transposed,
        TABLE=0 if token.table is None else token.table.shape[1],
        BLOCK_T=tile.block_t,
        BLOCK_G=next_power_of_2(padded - (n * n if M > 2 * n else 0)),
        BLOCK_M=padded,
        num_warps=tile.warps,
        **tile.options,
    )
    return dh_mix, sums


def pass_b(
    pre: PreBackward, token: PerToken, parts: Tensor, dh_mix: Tensor, factors: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Fills dx; returns A [slices, M, K] and, with the layer's norm, dweight [slices, D]."""
    n, D = pre.x.shape[-2:]
    M, T, on = pre.phi.shape[0], pre.inv_rms.numel(), device.of(pre.x.device)
    exact = configs.arithmetic(pre.x.dtype, on)
    # With the maps of the identity the tile without a residual spills on sm_100.
    wide, residual = exact.parts == 1, M == 2 * n or not (pre.dx_next is None and pre.dx_added is None)
    tile = configs.dx(n, D, wide, residual, on) if factors is None else configs.normed_dx(n, D, wide, on)
    blocks = cdiv(D, tile.block_d) * (n // tile.streams)
    slices = configs.partition_rows(T, M, blocks, tile, on.processors)
    A = scratch(pre, slices, M, n * D)
    dweight = None if factors is None else scratch(pre, slices, D)
    launch(
        mhc_pre_dx_kernel,
        (blocks, slices),
        x_ptr=pre.x,
        dh_in_ptr=pre.dh_in,
        dx_next_ptr=pre.dx_next,
        dx_added_ptr=pre.dx_added,
        dh_mix_ptr=dh_mix,
        phi_ptr=parts,
        x_factor_ptr=token.x_factor,
        h_pre_ptr=token.h_pre,
        h_res_ptr=token.h_res,
        layer_norm_weight_ptr=None if factors is None else pre.layer_norm_weight,
        factors_ptr=factors,
        dx_ptr=pre.dx,
        A_ptr=A,
        dweight_ptr=dweight,
        T=T,
        D=D,
        K_padded=parts.shape[2],
        n=n,
        M=M,
        PARTS=exact.parts,
        PRECISION=exact.precision,
        EVEN_D=D % tile.block_d == 0,
        STREAMS=tile.streams,
        A_LAST=tile.a_last,
        BLOCK_T=tile.block_t,
        BLOCK_M=configs.padded_maps(M),
        BLOCK_D=tile.block_d,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return A, dweight


def sum_up(pre: PreBackward, A: Tensor, sums: Tensor, dweight: Tensor | None, dots: Dots | None = None) -> None:
    """The gradients of parameters. dots: what a boundary's kernel leaves to be added up"""
    sum_gradients(
        A=A,
        sums=sums,
        phi=pre.phi,
        gamma=pre.gamma,
        alpha=pre.alpha,
        n=pre.x.shape[-2],
        parts=configs.arithmetic(pre.x.dtype, device.of(pre.x.device)).parts,
        dphi=pre.dphi,
        dgamma=pre.dgamma,
        dalpha=pre.dalpha,
        dbias=pre.dbias,
        dweight=dweight,
        dlayer_norm_weight=None if pre.layer_norm_weight is None else pre.dlayer_norm_weight,
        dots=dots,
    )
