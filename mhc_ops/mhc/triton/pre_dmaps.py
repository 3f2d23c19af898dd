"""mHC pre, backward: the step per token between the two passes over x, back through σ, Sinkhorn and the scales."""

import triton
import triton.language as tl

from .exact_products import alpha_of_row, part_of
from .sinkhorn import matrices, sinkhorn_back, sinkhorn_keeping


# dz_pre = dh_pre·slope;  dz_post = post_mult·dh_post·slope, each where it is given
@triton.jit
def through_gates(slope, dh_pre_ptr, dh_post_ptr, rows, in_batch, post_mult, n: tl.constexpr, GATES: tl.constexpr):
    g = tl.arange(0, slope.shape[1])[None, :]
    dz = tl.zeros(slope.shape, tl.float32)
    if dh_pre_ptr is not None:
        dh_pre = tl.load(dh_pre_ptr + rows * n + g, mask=in_batch & (g < n), other=0.0)
        dz += slope * dh_pre.to(tl.float32)
    if dh_post_ptr is not None:
        dh_post = tl.load(dh_post_ptr + rows * n + (g - n), mask=in_batch & (g < GATES) & (g >= n), other=0.0)
        dz += post_mult * slope * dh_post.to(tl.float32)
    return dz


# h_res = sinkhorn(z), stored where pass B asks for it: [T, new, old], in a table [T, old, new]. Returns dz
@triton.jit
def through_sinkhorn(
    z,
    dz,
    dh_res_ptr,
    h_res_ptr,
    divisors_ptr,
    t,
    T,
    iters,
    eps,
    n: tl.constexpr,
    N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TABLE: tl.constexpr,
):
    at, present = matrices(t, T, n, N)
    token = t[:, None, None]
    h_res, lost = sinkhorn_keeping(z, divisors_ptr, t, T, iters, eps, n, N)
    if h_res_ptr is not None:
        i, j = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
        if TRANSPOSED:
            h_res_at = h_res_ptr + (at if TABLE == 0 else token * TABLE + j * n + i)
        else:
            h_res_at = h_res_ptr + (token * (n * n) + j * n + i if TABLE == 0 else token * TABLE + i * n + j)
        tl.store(h_res_at, h_res, mask=present)
    if dh_res_ptr is not None:
        dz = sinkhorn_back(
            z=z,
            c=h_res,
            lost=lost,
            dc=dz,
            dc_ptr=dh_res_ptr,
            divisors_ptr=divisors_ptr,
            t=t,
            T=T,
            iters=iters,
            eps=eps,
            n=n,
            N=N,
        )
        dz = tl.where(present, dz, 0.0)
    return dz


# m = h_mix·inv_rms;  z = alpha·m + bias;  dz_pre = dh_pre·σ(z)σ(−z);  dz_post = post_mult·dh_post·σ(z)σ(−z)
# dz_res = dh_res back through Sinkhorn, or dh_res where iters is 0; absent where M is 2n
# dh_mix = dz·inv_rms, stored in parts;  x_factor = −inv_rms³/(nD)·Σ_M alpha·dz·h_mix
# h_pre, what pass B weighs dh_in with: σ(z_pre) + hc_eps, or `read` where that is given
# sums[program] = Σ_t dz, Σ_t dz·m
@triton.jit(do_not_specialize=["T", "iters"])
def mhc_pre_dmaps_kernel(
    h_mix_ptr,
    inv_rms_ptr,
    dh_pre_ptr,
    dh_post_ptr,
    dh_res_ptr,
    alpha_ptr,
    bias_ptr,
    dh_mix_ptr,
    x_factor_ptr,
    read_ptr,
    h_pre_ptr,
    h_res_ptr,
    sums_ptr,
    divisors_ptr,
    T,
    D,
    hc_eps,
    post_mult,
    iters,
    sinkhorn_eps,
    n: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # h_res as it is made and differentiated is [new, old]
    TABLE: tl.constexpr,  # columns of one table with h_res, h_pre and x_factor of a token in a row; 0: they are apart
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch, rows = (t < T)[:, None], t[:, None]
    inv_rms = tl.load(inv_rms_ptr + rows, mask=in_batch, other=0.0).to(tl.float32)
    sums = sums_ptr + tl.program_id(0).to(tl.int64) * (2 * M)

    # The rows of phi that a sigmoid follows, and the padding, whose values are all 0.
    GATES: tl.constexpr = n if M == n else 2 * n
    g = tl.arange(0, BLOCK_G)[None, :]
    m = tl.where(g < GATES, g, g + (M - GATES))
    is_gate = in_batch & (g < GATES)
    h_mix = tl.load(h_mix_ptr + rows * M + g, mask=is_gate, other=0.0).to(tl.float32)
    alpha = alpha_of_row(alpha_ptr, g, GATES, n)
    bias = tl.load(bias_ptr + g, mask=g < GATES, other=0.0).to(tl.float32)
    normed = h_mix * inv_rms
    z = alpha * normed + bias
    gate = tl.sigmoid(z)
    slope = gate * tl.sigmoid(-z)
    dz = through_gates(slope, dh_pre_ptr, dh_post_ptr, rows, in_batch, post_mult, n, GATES)
    dinv = tl.sum(alpha * dz * h_mix, axis=1)[:, None]
    RES: tl.constexpr = M - 2 * n if M > 2 * n else 0
    h_pre_at = h_pre_ptr + (rows * n + g if TABLE == 0 else rows * TABLE + RES + g)
    if read_ptr is None:
        h_pre = gate + hc_eps
    else:
        h_pre = tl.load(read_ptr + rows * n + g, mask=in_batch & (g < n), other=0.0).to(tl.float32)
    tl.store(h_pre_at, h_pre, mask=in_batch & (g < n))
    store_parts(dh_mix_ptr, rows, m, dz * inv_rms, in_batch & (m < BLOCK_M), T, PARTS, BLOCK_M)
    in_sums = tl.arange(0, BLOCK_G) < GATES
    tl.store(sums + tl.arange(0, BLOCK_G), tl.sum(dz, axis=0), mask=in_sums)
    tl.store(sums + M + tl.arange(0, BLOCK_G), tl.sum(dz * normed, axis=0), mask=in_sums)

    if M > 2 * n:
        at, present = matrices(t, T, n, N)
        token = t[:, None, None]
        m = 2 * n + at - token * (n * n)
        h_mix = tl.load(h_mix_ptr + token * M + m, mask=present, other=0.0).to(tl.float32)
        alpha_res = tl.load(alpha_ptr + 2).to(tl.float32)
        normed = h_mix * inv_rms[:, :, None]
        dz = tl.zeros([BLOCK_T, N, N], tl.float32)
        if dh_res_ptr is not None:
            dz += tl.load(dh_res_ptr + at, mask=present, other=0.0).to(tl.float32)
        if divisors_ptr is not None:
            bias = tl.load(bias_ptr + m, mask=present, other=0.0).to(tl.float32)
            z = alpha_res * normed + bias
            dz = through_sinkhorn(
                z=z,
                dz=dz,
                dh_res_ptr=dh_res_ptr,
                h_res_ptr=h_res_ptr,
                divisors_ptr=divisors_ptr,
                t=t,
                T=T,
                iters=iters,
                eps=sinkhorn_eps,
                n=n,
                N=N,
                TRANSPOSED=TRANSPOSED,
                TABLE=TABLE,
            )
        dinv += alpha_res * tl.sum(tl.sum(dz * h_mix, axis=2), axis=1)[:, None]
        store_parts(dh_mix_ptr, token, m, dz * inv_rms[:, :, None], present, T, PARTS, BLOCK_M)
        row, col = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
        in_sums = (row < n) & (col < n)
        tl.store(sums + 2 * n + row * n + col, tl.sum(dz, axis=0), mask=in_sums)
        tl.store(sums + M + 2 * n + row * n + col, tl.sum(dz * normed, axis=0), mask=in_sums)

    x_factor_at = x_factor_ptr + (rows if TABLE == 0 else rows * TABLE + RES + n)
    tl.store(x_factor_at, -dinv * inv_rms * inv_rms * inv_rms / (n * D), mask=in_batch)


# dh_mix[part, t, m]
@triton.jit
def store_parts(dh_mix_ptr, t, m, dh_mix, present, T, PARTS: tl.constexpr, BLOCK_M: tl.constexpr):
    for p in tl.static_range(PARTS):
        at = dh_mix_ptr + (p * T.to(tl.int64) + t) * BLOCK_M + m
        tl.store(at, part_of(dh_mix, p, dh_mix_ptr.dtype.element_ty), mask=present)
