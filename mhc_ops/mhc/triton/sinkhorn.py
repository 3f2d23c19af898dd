"""Sinkhorn-Knopp on tiles of [tokens, N, N], N the power of two from n up: the steps, their exact gradient, and the op.

The gradient needs the divisor of every half step: they are recomputed, kept in scratch memory ([half steps, T, n]) and
walked back. Rows and columns beyond n are zero; their divisors are 1, so that eps may be 0.
"""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from . import configs


# [1, N, N]: rows and columns that exist
@triton.jit
def inside(n: tl.constexpr, N: tl.constexpr):
    return (tl.arange(0, N)[None, :, None] < n) & (tl.arange(0, N)[None, None, :] < n)


@triton.jit
def softmax(z, n: tl.constexpr, N: tl.constexpr):
    if n < N:
        z = tl.where(inside(n, N), z, -1e30)
    c = tl.exp(z - tl.max(z, axis=2, keep_dims=True))
    return c / tl.sum(c, axis=2, keep_dims=True)


# what c is divided by to make its sums along an axis 1: [tokens, 1, N] for axis 1 (columns), else [tokens, N, 1] (rows)
@triton.jit
def divisor_of(c, axis: tl.constexpr, eps, n: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)[None, None, :] if axis == 1 else tl.arange(0, N)[None, :, None]
    return tl.sum(c, axis=axis, keep_dims=True) + (eps if n == N else tl.where(at < n, eps, 1.0))


@triton.jit
def first_of(z, eps, n: tl.constexpr, N: tl.constexpr):
    c = softmax(z, n, N) + eps
    return c if n == N else tl.where(inside(n, N), c, 0.0)


# c = softmax(z) + eps;  c /= colsum + eps;  then iters − 1 times:  c /= rowsum + eps;  c /= colsum + eps
@triton.jit
def sinkhorn(z, iters, eps, n: tl.constexpr, N: tl.constexpr):
    c = first_of(z, eps, n, N)
    c *= 1.0 / divisor_of(c, 1, eps, n, N)
    for _ in range(1, iters):
        c *= 1.0 / divisor_of(c, 2, eps, n, N)
        c *= 1.0 / divisor_of(c, 1, eps, n, N)
    return c


# divisors[step, t]: pointers and mask, for columns (axis 1) or rows (axis 2)
@triton.jit
def divisors_at(divisors_ptr, step, t, T, axis: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)[None, None, :] if axis == 1 else tl.arange(0, N)[None, :, None]
    t = t[:, None, None]
    return divisors_ptr + (step * T.to(tl.int64) + t) * n + at, (t < T) & (at < n)


# c divided along an axis, the divisor kept
@triton.jit
def divide(c, divisors_ptr, step, t, T, axis: tl.constexpr, eps, n: tl.constexpr, N: tl.constexpr):
    divisor = divisor_of(c, axis, eps, n, N)
    at, present = divisors_at(divisors_ptr, step, t, T, axis, n, N)
    tl.store(at, divisor, mask=present)
    return c * (1.0 / divisor)


# sinkhorn(z), with the divisors of its 2·iters − 1 half steps kept
@triton.jit
def sinkhorn_keeping(z, divisors_ptr, t, T, iters, eps, n: tl.constexpr, N: tl.constexpr):
    c = divide(first_of(z, eps, n, N), divisors_ptr, 0, t, T, 1, eps, n, N)
    for step in range(1, iters):
        c = divide(c, divisors_ptr, 2 * step - 1, t, T, 2, eps, n, N)
        c = divide(c, divisors_ptr, 2 * step, t, T, 1, eps, n, N)
    tl.debug_barrier()  # before other threads read the divisors
    return c


# Back through c' = c / divisor:  dc = (dc' − Σ dc'·c') / divisor,  c = c'·divisor
@triton.jit
def divide_back(c, dc, divisors_ptr, step, t, T, axis: tl.constexpr, n: tl.constexpr, N: tl.constexpr):
    at, present = divisors_at(divisors_ptr, step, t, T, axis, n, N)
    divisor = tl.load(at, mask=present, other=1.0)
    dc = (dc - tl.sum(dc * c, axis=axis, keep_dims=True)) * (1.0 / divisor)
    return c * divisor, dc


# dz of c = sinkhorn_keeping(z)
@triton.jit
def sinkhorn_back(z, c, dc, divisors_ptr, t, T, iters, n: tl.constexpr, N: tl.constexpr):
    for done in range(1, iters):
        step = iters - done
        c, dc = divide_back(c, dc, divisors_ptr, 2 * step, t, T, 1, n, N)
        c, dc = divide_back(c, dc, divisors_ptr, 2 * step - 1, t, T, 2, n, N)
    c, dc = divide_back(c, dc, divisors_ptr, 0, t, T, 1, n, N)
    p = softmax(z, n, N)
    return p * (dc - tl.sum(tl.where(inside(n, N), dc * p, 0.0), axis=2, keep_dims=True))


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
    c = sinkhorn_keeping(z, divisors_ptr, t, T, iters, eps, n, N)
    dz = sinkhorn_back(z, c, dh_res, divisors_ptr, t, T, iters, n, N)
    tl.store(dlogits_ptr + at, dz.to(dlogits_ptr.dtype.element_ty), mask=present)


def divisors(T: int, n: int, iters: int, on: torch.device) -> torch.Tensor:
    """Scratch for the half steps of T tokens."""
    return torch.empty((2 * iters - 1, T, n), dtype=torch.float32, device=on)


def sinkhorn_fwd(*, logits, iters, eps, h_res):
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
        eps=eps,
        n=n,
        N=next_power_of_2(n),
        BLOCK_T=tile.block_t,
        num_warps=tile.warps,
    )


def sinkhorn_bwd(*, logits, iters, eps, dh_res, dlogits):
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
        eps=eps,
        n=n,
        N=next_power_of_2(n),
        BLOCK_T=tile.block_t,
        num_warps=tile.warps,
    )
