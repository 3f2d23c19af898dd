"""Sinkhorn-Knopp on tiles of [tokens, N, N], N the power of two from n up: the steps, their exact gradient, and the op.

The gradient needs the divisor of every half step: they are recomputed, kept in scratch memory ([half steps, T, n]) and
walked back. Rows and columns beyond n are zero; their divisors are 1.

Without eps (None) a row or column whose entries all underflow would be 0 / 0, and one with some such entries would lose
them. Matrices with such small divisors are made again in logarithms: c = exp(z + u + v). A half step makes u, of
the rows, or v, of the columns; they are kept in the place of the divisors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from . import configs

# The least that an entry may be divided by: a denormal one then still counts for nothing. 2^-126 / 2^-23
LEAST = tl.constexpr(2.0**-103)


# [1, N, N]: rows and columns that exist
@triton.jit
def inside(n: tl.constexpr, N: tl.constexpr):
    return (tl.arange(0, N)[None, :, None] < n) & (tl.arange(0, N)[None, None, :] < n)


# z, and −1e30 in rows and columns that do not exist
@triton.jit
def only_inside(z, n: tl.constexpr, N: tl.constexpr):
    return z if n == N else tl.where(inside(n, N), z, -1e30)


@triton.jit
def softmax(z, n: tl.constexpr, N: tl.constexpr):
    z = only_inside(z, n, N)
    c = tl.exp(z - tl.max(z, axis=2, keep_dims=True))
    return c / tl.sum(c, axis=2, keep_dims=True)


# [1, 1, N] for axis 1 (columns), else [1, N, 1] (rows)
@triton.jit
def across(axis: tl.constexpr, N: tl.constexpr):
    return tl.arange(0, N)[None, None, :] if axis == 1 else tl.arange(0, N)[None, :, None]


# what c is divided by to make its sums along an axis 1: [tokens, 1, N] for axis 1 (columns), else [tokens, N, 1] (rows)
@triton.jit
def divisor_of(c, axis: tl.constexpr, eps, n: tl.constexpr, N: tl.constexpr):
    more = 0.0 if eps is None else eps
    return tl.sum(c, axis=axis, keep_dims=True) + (more if n == N else tl.where(across(axis, N) < n, more, 1.0))


@triton.jit
def first_of(z, eps, n: tl.constexpr, N: tl.constexpr):
    c = softmax(z, n, N)
    if eps is not None:
        c += eps
    return c if n == N else tl.where(inside(n, N), c, 0.0)


# [tokens, 1, 1]: whether an entry was divided by less than LEAST, of all that its row and its column were divided by
@triton.jit
def is_lost(rows, columns):
    return tl.min(rows, axis=1, keep_dims=True) * tl.min(columns, axis=2, keep_dims=True) < LEAST


# What rows or columns were divided by, with one more divisor; without NaN. Not needed where there is an eps.
@triton.jit
def with_divisor(divided, divisor, eps):
    return divided * tl.where(divisor < 1.0, divisor, 1.0) if eps is None else divided


# c = softmax(z) + eps;  c /= colsum + eps;  then iters − 1 times:  c /= rowsum + eps;  c /= colsum + eps
@triton.jit
def sinkhorn(z, iters, eps, n: tl.constexpr, N: tl.constexpr):
    c = first_of(z, eps, n, N)
    divisor = divisor_of(c, 1, eps, n, N)
    c *= 1.0 / divisor
    rows = tl.full([c.shape[0], N, 1], 1.0, tl.float32)
    columns = with_divisor(tl.full(divisor.shape, 1.0, tl.float32), divisor, eps)
    for _ in range(1, iters):
        divisor = divisor_of(c, 2, eps, n, N)
        c *= 1.0 / divisor
        rows = with_divisor(rows, divisor, eps)
        divisor = divisor_of(c, 1, eps, n, N)
        c *= 1.0 / divisor
        columns = with_divisor(columns, divisor, eps)
    if eps is None:
        lost = is_lost(rows, columns)
        if tl.max(lost.to(tl.int32)) > 0:
            z = only_inside(z, n, N)
            u = potential(z, 2, n, N)
            v = potential(z + u, 1, n, N)
            for _ in range(1, iters):
                u = potential(z + v, 2, n, N)
                v = potential(z + u, 1, n, N)
            c = tl.where(lost, tl.exp(z + u + v), c)
    return c


# −log Σ exp(z) along an axis: with it added, the sums of exp(z) along the axis are 1
@triton.jit
def potential(z, axis: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    largest = tl.max(z, axis=axis, keep_dims=True)
    found = -largest - tl.log(tl.sum(tl.exp(z - largest), axis=axis, keep_dims=True))
    return found if n == N else tl.where(across(axis, N) < n, found, 0.0)


# divisors[step, t]: pointers and mask, for columns (axis 1) or rows (axis 2)
@triton.jit
def divisors_at(divisors_ptr, step, t, T, axis: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    at, t = across(axis, N), t[:, None, None]
    return divisors_ptr + (step * T.to(tl.int64) + t) * n + at, (t < T) & (at < n)


# Divides c along an axis and keeps the divisor; returns both.
@triton.jit
def divide(c, divisors_ptr, step, t, T, axis: tl.constexpr, eps, n: tl.constexpr, N: tl.constexpr):
    divisor = divisor_of(c, axis, eps, n, N)
    at, present = divisors_at(divisors_ptr, step, t, T, axis, n, N)
    tl.store(at, divisor, mask=present)
    return c * (1.0 / divisor), divisor


# potential(z), kept for the matrices that are lost
@triton.jit
def keep(z, divisors_ptr, step, t, T, lost, axis: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    found = potential(z, axis, n, N)
    at, present = divisors_at(divisors_ptr, step, t, T, axis, n, N)
    tl.store(at, found, mask=present & lost)
    return found


# sinkhorn(z), with the divisors of its 2·iters − 1 half steps kept; [tokens, 1, 1]: where u and v are in their place
@triton.jit
def sinkhorn_keeping(z, divisors_ptr, t, T, iters, eps, n: tl.constexpr, N: tl.constexpr):
    c, divisor = divide(first_of(z, eps, n, N), divisors_ptr, 0, t, T, 1, eps, n, N)
    rows = tl.full([c.shape[0], N, 1], 1.0, tl.float32)
    columns = with_divisor(tl.full(divisor.shape, 1.0, tl.float32), divisor, eps)
    for step in range(1, iters):
        c, divisor = divide(c, divisors_ptr, 2 * step - 1, t, T, 2, eps, n, N)
        rows = with_divisor(rows, divisor, eps)
        c, divisor = divide(c, divisors_ptr, 2 * step, t, T, 1, eps, n, N)
        columns = with_divisor(columns, divisor, eps)
    lost = is_lost(rows, columns)
    if eps is None:  # noqa: SIM102 (known when compiling, then when running)
        if tl.max(lost.to(tl.int32)) > 0:
            tl.debug_barrier()  # other threads may have stored what is stored over
            z = only_inside(z, n, N)
            u = potential(z, 2, n, N)
            v = keep(z + u, divisors_ptr, 0, t, T, lost, 1, n, N)
            for step in range(1, iters):
                u = keep(z + v, divisors_ptr, 2 * step - 1, t, T, lost, 2, n, N)
                v = keep(z + u, divisors_ptr, 2 * step, t, T, lost, 1, n, N)
            c = tl.where(lost, tl.exp(z + u + v), c)
    tl.debug_barrier()  # before other threads read the divisors
    return c, lost


@triton.jit
def load_divisors(divisors_ptr, step, t, T, axis: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    at, present = divisors_at(divisors_ptr, step, t, T, axis, n, N)
    return tl.load(at, mask=present, other=1.0)


# Back through c' = c / divisor:  dc = (dc' − Σ dc'·c') / divisor,  c = c'·divisor
@triton.jit
def divide_back(c, dc, divisors_ptr, step, t, T, axis: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    divisor = load_divisors(divisors_ptr, step, t, T, axis, n, N)
    dc = (dc - tl.sum(dc * c, axis=axis, keep_dims=True)) * (1.0 / divisor)
    return c * divisor, dc


# dz of c, lost = sinkhorn_keeping(z). dc is what lies at dc_ptr, which is read again for matrices that are lost: kept
# meanwhile, it would fill registers.
@triton.jit
def sinkhorn_back(z, c, lost, dc, dc_ptr, divisors_ptr, t, T, iters, eps, n: tl.constexpr, N: tl.constexpr):
    for done in range(1, iters):
        step = iters - done
        c, dc = divide_back(c, dc, divisors_ptr, 2 * step, t, T, 1, n, N)
        c, dc = divide_back(c, dc, divisors_ptr, 2 * step - 1, t, T, 2, n, N)
    c, dc = divide_back(c, dc, divisors_ptr, 0, t, T, 1, n, N)
    p = softmax(z, n, N)
    dz = p * (dc - tl.sum(tl.where(inside(n, N), dc * p, 0.0), axis=2, keep_dims=True))
    if eps is None:  # noqa: SIM102 (known when compiling, then when running)
        if tl.max(lost.to(tl.int32)) > 0:
            dz = tl.where(lost, sinkhorn_logs_back(z, dc_ptr, divisors_ptr, t, T, iters, n, N), dz)
    return dz


# The same of matrices with u and v in the place of divisors. dlog, the gradient of log c, through a half step to c:
# dlog − c·Σ dlog
@triton.jit
def sinkhorn_logs_back(z, dc_ptr, divisors_ptr, t, T, iters, n: tl.constexpr, N: tl.constexpr):
    z = only_inside(z, n, N)
    v = load_divisors(divisors_ptr, 2 * iters - 2, t, T, 1, n, N)
    first = potential(z, 2, n, N)
    u = first
    if iters > 1:
        u = load_divisors(divisors_ptr, 2 * iters - 3, t, T, 2, n, N)
    at, present = matrices(t, T, n, N)
    dlog = tl.exp(z + u + v) * tl.load(dc_ptr + at, mask=present, other=0.0).to(tl.float32)
    for done in range(1, iters):
        step = iters - done
        u = load_divisors(divisors_ptr, 2 * step - 1, t, T, 2, n, N)
        dlog -= tl.exp(z + u + v) * tl.sum(dlog, axis=1, keep_dims=True)
        v = load_divisors(divisors_ptr, 2 * step - 2, t, T, 1, n, N)
        dlog -= tl.exp(z + u + v) * tl.sum(dlog, axis=2, keep_dims=True)
    dlog -= tl.exp(z + first + v) * tl.sum(dlog, axis=1, keep_dims=True)
    return dlog - tl.exp(z + first) * tl.sum(dlog, axis=2, keep_dims=True)


# [tokens, N, N]: where the matrices of these tokens are, and whether they are
@triton.jit
def matrices(t, T, n: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
    t = t[:, None, None]
    return t * (n * n) + i * n + j, (t < T) & inside(n, N)


@triton.jit(do_not_specialize=["T", "iters"])
def sinkhorn_fwd_kernel(logits_ptr, h_res_ptr, T, iters, eps, n: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    at, present = matrices(t, T, n, N)
    z = tl.load(logits_ptr + at, mask=present, other=0.0).to(tl.float32)
    tl.store(h_res_ptr + at, sinkhorn(z, iters, eps, n, N), mask=present)


@triton.jit(do_not_specialize=["T", "iters"])
def sinkhorn_bwd_kernel(
    logits_ptr,
    dh_res_ptr,
    dlogits_ptr,
    divisors_ptr,
    T,
    iters,
    eps,
    n: tl.constexpr,
    N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    at, present = matrices(t, T, n, N)
    z = tl.load(logits_ptr + at, mask=present, other=0.0).to(tl.float32)
    dh_res = tl.load(dh_res_ptr + at, mask=present, other=0.0).to(tl.float32)
    c, lost = sinkhorn_keeping(z, divisors_ptr, t, T, iters, eps, n, N)
    dz = sinkhorn_back(
        z=z,
        c=c,
        lost=lost,
        dc=dh_res,
        dc_ptr=dh_res_ptr,
        divisors_ptr=divisors_ptr,
        t=t,
        T=T,
        iters=iters,
        eps=eps,
        n=n,
        N=N,
    )
    tl.store(dlogits_ptr + at, dz.to(dlogits_ptr.dtype.element_ty), mask=present)


def divisors(T: int, n: int, iters: int, on: torch.device) -> Tensor:
    """Scratch for the half steps of T tokens."""
    return torch.empty((2 * iters - 1, T, n), dtype=torch.float32, device=on)


def sinkhorn_fwd(*, logits: Tensor, iters: int, eps: float, h_res: Tensor) -> None:
    n = logits.shape[-1]
    T, tile = logits.numel() // (n * n), configs.sinkhorn(n, device.of(logits.device))
    if T == 0:
        return
    launch(
        sinkhorn_fwd_kernel,
        (cdiv(T, tile.block_t),),
        logits_ptr=logits,
        h_res_ptr=h_res,
        T=T,
        iters=iters,
        eps=eps or None,
        n=n,
        N=next_power_of_2(n),
        BLOCK_T=tile.block_t,
        num_warps=tile.warps,
    )


def sinkhorn_bwd(*, logits: Tensor, iters: int, eps: float, dh_res: Tensor, dlogits: Tensor) -> None:
    n = logits.shape[-1]
    T, tile = logits.numel() // (n * n), configs.sinkhorn(n, device.of(logits.device))
    if T == 0:
        return
    launch(
        sinkhorn_bwd_kernel,
        (cdiv(T, tile.block_t),),
        logits_ptr=logits,
        dh_res_ptr=dh_res,
        dlogits_ptr=dlogits,
        divisors_ptr=divisors(T, n, iters, logits.device),
        T=T,
        iters=iters,
        eps=eps or None,
        n=n,
        N=next_power_of_2(n),
        BLOCK_T=tile.block_t,
        num_warps=tile.warps,
    )
