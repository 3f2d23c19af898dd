"""mHC pre, backward: two passes over x with a small step per token between them, then sums in fixed order.

1. dh_pre    pass A: dh_pre[t, i] = <dh_in[t], x[t, i]>; with the layer's norm pre_norm.py
2. dmaps     pre_dmaps.py, per token: back through σ and the scales to dh_mix, and the factor of x in dx
3. dx        pass B: dx, and A = Σ_t dh_mix[t] ⊗ x[t] per slice of the tokens
4. sums      pre_sums.py: dphi and dgamma from A, dalpha and dbias from the sums of step 2

dh_mix is kept without its factor alpha, which dx gets through phi and dphi at the end: alpha may be zero, and the sums
without it are still needed.
"""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from ..options import PreOptions
from . import configs
from .parts import phi_parts
from .pre_dmaps import mhc_pre_dmaps_kernel
from .pre_norm import normed_dh_pre
from .pre_sums import sum_gradients
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
        if dx_next_ptr is not None and h_res_ptr is None:
            of_next = tl.load(dx_next_ptr + begin * n * D + (local * (n * D) + k), mask=in_tiles, other=0.0)
            dx += of_next.to(tl.float32)
        if dx_added_ptr is not None:
            added = tl.load(dx_added_ptr + begin * n * D + (local * (n * D) + k), mask=in_tiles, other=0.0)
            dx += added.to(tl.float32)
        dx = dot_parts(dh_mix, phi, dx, PARTS, PRECISION)
        dx = tl.reshape(dx, [BLOCK_T, STREAMS, BLOCK_D])
        if dh_in_ptr is not None:
            dh_in = tl.load(dh_in_ptr + begin * D + (local * D + d), mask=in_tile, other=0.0).to(tl.float32)
            h_pre = tl.load(h_pre_ptr + begin * n + (local * n + stream), mask=in_batch, other=0.0)
            if factors_ptr is not None:
                # Read once more: x above has its streams in other threads.
                h_in = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
                for i in tl.static_range(n):
                    weight = tl.load(h_pre_ptr + begin * n + (local * n + i), mask=in_batch, other=0.0)
                    at = x_ptr + begin * n * D + (local * (n * D) + i * D + d)
                    h_in += weight * tl.load(at, mask=in_tile, other=0.0).to(tl.float32)
                r = tl.load(factors_ptr + begin + local, mask=in_batch, other=0.0)
                c = tl.load(factors_ptr + T64 + begin + local, mask=in_batch, other=0.0)
                dweight += r * h_in * dh_in
                dh_in = r * (layer_norm_weight * dh_in) - c * h_in
            dx += h_pre[:, :, None] * dh_in[:, None, :]
        if h_res_ptr is not None:
            for j in tl.static_range(n):
                at = dx_next_ptr + begin * n * D + (local * (n * D) + j * D + d)
                dx_next = tl.load(at, mask=in_tile, other=0.0).to(tl.float32)
                at = h_res_ptr + begin * (n * n) + ((local * n + j) * n + stream)
                weight = tl.load(at, mask=in_batch, other=0.0)
                dx += weight[:, :, None] * dx_next[:, None, :]
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


def mhc_pre_bwd(
    *,
    x,
    phi,
    alpha,
    bias,
    gamma,
    options,
    inv_rms,
    h_mix,
    dh_in,
    dh_post,
    dh_res,
    dx_next,
    dx,
    dphi,
    dalpha,
    dbias,
    dgamma,
    layer_norm_weight=None,
    dlayer_norm_weight=None,
    read=None,
    dread=None,
    dh_pre=None,
    dx_added=None,
    boundary=None,
):
    """dx_next reaches dx through h_res, dx_added as it is. dh_pre is given where h_in was read with `read`, or is not
    there; dread is then what pass A makes. boundary: what makes dx in pass B's place, and more, so dread, for which
    it does not have to wait; it takes what there is of a token as one table"""
    n, D = x.shape[-2:]
    M, T = phi.shape[0], inv_rms.numel()
    padded = configs.padded_maps(M)
    if T == 0:
        for gradient in (dphi, dalpha, dbias, dgamma, dlayer_norm_weight):
            if gradient is not None:
                gradient.zero_()
        return
    on = device.of(x.device)
    exact = configs.arithmetic(x.dtype, on)
    parts = phi_parts(phi, gamma, alpha, n, exact)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    iters = options.sinkhorn_iters
    has_h_res = dx_next is not None and M > 2 * n
    assert iters > 0 or not has_h_res
    table = None if boundary is None else scratch(T, configs.table_columns(n, M))
    if table is None:
        h_pre, x_factor = scratch(T, n), scratch(T)
        h_res = scratch(T, n, n) if has_h_res else None
    else:
        h_pre = x_factor = h_res = table
    factors = None
    if dh_in is None:
        if read is not None:
            dread.zero_()
    elif layer_norm_weight is not None:
        of_pass_a, factors = normed_dh_pre(
            x=x,
            dy=dh_in,
            layer_norm_weight=layer_norm_weight,
            h_mix=h_mix,
            inv_rms=inv_rms,
            alpha=alpha,
            bias=bias,
            options=options,
            read=read,
            dread=dread,
            table=table,
        )
    elif read is None or boundary is None:
        of_pass_a = scratch(T, n) if read is None else dread
        pass_a = configs.dh_pre(n, D, exact.parts == 1, on)
        launch(
            mhc_pre_dh_pre_kernel,
            (cdiv(T, pass_a.block_t),),
            x_ptr=x,
            dh_in_ptr=dh_in,
            dh_pre_ptr=of_pass_a,
            T=T,
            D=D,
            n=n,
            BLOCK_T=pass_a.block_t,
            BLOCK_N=next_power_of_2(n),
            BLOCK_D=pass_a.block_d,
            num_warps=pass_a.warps,
        )
    if dh_in is not None and read is None:
        dh_pre = of_pass_a

    dmaps = configs.dmaps(n, on, without_eps=not options.sinkhorn_eps)
    programs = cdiv(T, dmaps.block_t)
    dh_mix = scratch(exact.parts, T, padded, dtype=exact.dtype)
    sums = scratch(programs, 2, M)
    through_sinkhorn = iters > 0 and M > 2 * n and not (dh_res is None and h_res is None)
    launch(
        mhc_pre_dmaps_kernel,
        (programs,),
        h_mix_ptr=h_mix,
        inv_rms_ptr=inv_rms,
        dh_pre_ptr=dh_pre,
        dh_post_ptr=dh_post,
        dh_res_ptr=dh_res,
        alpha_ptr=alpha,
        bias_ptr=bias,
        dh_mix_ptr=dh_mix,
        x_factor_ptr=x_factor,
        read_ptr=read,
        h_pre_ptr=h_pre,
        h_res_ptr=h_res,
        sums_ptr=sums,
        divisors_ptr=divisors(T, n, iters, x.device) if through_sinkhorn else None,
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
        TABLE=0 if table is None else table.shape[1],
        BLOCK_T=dmaps.block_t,
        BLOCK_G=next_power_of_2(padded - (n * n if M > 2 * n else 0)),
        BLOCK_M=padded,
        num_warps=dmaps.warps,
        **dmaps.options,
    )

    of_pass_b = {"dh_in": dh_in, "dx_next": dx_next, "dh_mix": dh_mix, "parts": parts, "dx": dx}
    of_pass_b["layer_norm_weight"] = None if factors is None else layer_norm_weight
    if boundary is not None:
        of_boundary = {"dread": dread} if read is not None and factors is None else {}
        A, dweight, dots = boundary(**of_pass_b, **of_boundary, table=table)
    else:
        of_token = {"x_factor": x_factor, "h_pre": h_pre, "h_res": h_res, "factors": factors}
        A, dweight = launch_dx(**of_pass_b, **of_token, x=x, dx_added=dx_added, M=M, exact=exact)
        dots = None

    sum_gradients(
        A=A,
        sums=sums,
        phi=phi,
        gamma=gamma,
        alpha=alpha,
        n=n,
        parts=exact.parts,
        dphi=dphi,
        dgamma=dgamma,
        dalpha=dalpha,
        dbias=dbias,
        dweight=dweight,
        dlayer_norm_weight=None if layer_norm_weight is None else dlayer_norm_weight,
        dots=dots,
    )


def launch_dx(
    *, x, dh_in, dx_next, dx_added, dh_mix, parts, x_factor, h_pre, h_res, layer_norm_weight, factors, dx, M, exact
):
    """Pass B: fills dx; returns A [slices, M, K] and, with the layer's norm, dweight [slices, D]."""
    n, D = x.shape[-2:]
    T, on = x_factor.numel(), device.of(x.device)
    # With the maps of the identity the tile without a residual spills on sm_100.
    wide, residual = exact.parts == 1, M == 2 * n or not (dx_next is None and dx_added is None)
    pass_b = configs.dx(n, D, wide, residual, on) if factors is None else configs.normed_dx(n, D, wide, on)
    blocks = cdiv(D, pass_b.block_d) * (n // pass_b.streams)
    slices = configs.partition_rows(T, M, blocks, pass_b, on.processors)
    A = torch.empty((slices, M, n * D), dtype=torch.float32, device=x.device)
    dweight = None if factors is None else torch.empty((slices, D), dtype=torch.float32, device=x.device)
    launch(
        mhc_pre_dx_kernel,
        (blocks, slices),
        x_ptr=x,
        dh_in_ptr=dh_in,
        dx_next_ptr=dx_next,
        dx_added_ptr=dx_added,
        dh_mix_ptr=dh_mix,
        phi_ptr=parts,
        x_factor_ptr=x_factor,
        h_pre_ptr=h_pre,
        h_res_ptr=h_res,
        layer_norm_weight_ptr=layer_norm_weight,
        factors_ptr=factors,
        dx_ptr=dx,
        A_ptr=A,
        dweight_ptr=dweight,
        T=T,
        D=D,
        K_padded=parts.shape[2],
        n=n,
        M=M,
        PARTS=exact.parts,
        PRECISION=exact.precision,
        EVEN_D=D % pass_b.block_d == 0,
        STREAMS=pass_b.streams,
        A_LAST=pass_b.a_last,
        BLOCK_T=pass_b.block_t,
        BLOCK_M=configs.padded_maps(M),
        BLOCK_D=pass_b.block_d,
        STAGES=pass_b.stages,
        num_warps=pass_b.warps,
    )
    return A, dweight


def mhc_maps_bwd(**arguments):
    """As pre's, without h_in."""
    mhc_pre_bwd(**arguments, dh_in=None, dx_next=None)


def mhc_head_bwd(*, hc_eps, dout, **arguments):
    """As pre's, with h_in alone."""
    options = PreOptions(hc_eps=hc_eps, sinkhorn_iters=0)
    mhc_pre_bwd(**arguments, options=options, dh_in=dout, dh_post=None, dh_res=None, dx_next=None)
