"""Sinkhorn-Knopp, one thread per token with its n × n matrix in registers: the steps, their exact gradient, the op.

The gradient needs the divisor of every half step: they are recomputed, kept in scratch memory ([half steps, n, T]) and
walked back.
"""

import tilelang.language as T
import torch

from ...core import device
from . import configs
from .build import F32, NAMES, grid, kernel, thread


# c = softmax(c, over j)
@T.macro
def softmax(c, n):
    largest = T.alloc_local((1,), F32)
    total = T.alloc_local((1,), F32)
    for i in T.unroll(n):
        largest[0] = c[i * n]
        for j in T.unroll(1, n):
            largest[0] = T.max(largest[0], c[i * n + j])
        total[0] = 0.0
        for j in T.unroll(n):
            c[i * n + j] = T.exp(c[i * n + j] - largest[0])
            total[0] += c[i * n + j]
        for j in T.unroll(n):
            c[i * n + j] *= 1.0 / total[0]


# c /= colsum(c) + eps where `columns`, else c /= rowsum(c) + eps; where `divisors` are kept, they go to [step, :, t]
@T.macro
def divide(c, eps, *, n, columns, divisors, step, t):
    divisor = T.alloc_local((1,), F32)
    for a in T.unroll(n):
        divisor[0] = eps
        for b in T.unroll(n):
            divisor[0] += c[b * n + a if columns else a * n + b]
        if divisors is not None:
            divisors[step, a, t] = divisor[0]
        for b in T.unroll(n):
            c[b * n + a if columns else a * n + b] *= 1.0 / divisor[0]


# c = softmax(c) + eps;  c /= colsum + eps;  then iters − 1 times:  c /= rowsum + eps;  c /= colsum + eps
@T.macro
def sinkhorn(c, *, iters, eps, n, divisors=None, t=0):
    softmax(c, n)
    for ij in T.unroll(n * n):
        c[ij] += eps
    divide(c, eps, n=n, columns=True, divisors=divisors, step=0, t=t)
    for round in T.serial(iters - 1):
        divide(c, eps, n=n, columns=False, divisors=divisors, step=2 * round + 1, t=t)
        divide(c, eps, n=n, columns=True, divisors=divisors, step=2 * round + 2, t=t)


# Back through c' = c / divisor:  dc = (dc' − Σ dc'·c') / divisor,  c = c'·divisor
@T.macro
def divide_back(c, dc, *, n, columns, divisors, step, t):
    divisor = T.alloc_local((1,), F32)
    total = T.alloc_local((1,), F32)
    for a in T.unroll(n):
        divisor[0] = divisors[step, a, t]
        total[0] = 0.0
        for b in T.unroll(n):
            total[0] += c[b * n + a if columns else a * n + b] * dc[b * n + a if columns else a * n + b]
        for b in T.unroll(n):
            dc[b * n + a if columns else a * n + b] -= total[0]
            dc[b * n + a if columns else a * n + b] *= 1.0 / divisor[0]
            c[b * n + a if columns else a * n + b] *= divisor[0]


# Back through the half steps of c = sinkhorn(z): dc becomes the gradient of softmax(z)
@T.macro
def half_steps_back(c, dc, *, iters, n, divisors, t):
    for done in T.serial(iters - 1):
        divide_back(c, dc, n=n, columns=True, divisors=divisors, step=2 * (iters - 1 - done), t=t)
        divide_back(c, dc, n=n, columns=False, divisors=divisors, step=2 * (iters - 1 - done) - 1, t=t)
    divide_back(c, dc, n=n, columns=True, divisors=divisors, step=0, t=t)


# Back through softmax(c): dc becomes the gradient of c
@T.macro
def softmax_back(c, dc, n):
    total = T.alloc_local((1,), F32)
    softmax(c, n)
    for i in T.unroll(n):
        total[0] = 0.0
        for j in T.unroll(n):
            total[0] += c[i * n + j] * dc[i * n + j]
        for j in T.unroll(n):
            dc[i * n + j] = c[i * n + j] * (dc[i * n + j] - total[0])


@kernel
def sinkhorn_fwd_kernel(*, n, dtype, threads):
    tokens = T.dynamic("tokens")

    @T.prim_func
    def sinkhorn_fwd(
        logits: T.Tensor((tokens, n * n), dtype),
        h_res: T.Tensor((tokens, n * n), F32),
        iters: T.int32,
        eps: T.float32,
    ):
        with grid(T.ceildiv(tokens, threads.block), threads=threads) as block:
            t = block * threads.block + thread(threads)
            c = T.alloc_local((n * n,), F32)
            if t < tokens:
                for ij in T.unroll(n * n):
                    c[ij] = T.cast(logits[t, ij], F32)
                sinkhorn(c, iters=iters, eps=eps, n=n)
                for ij in T.unroll(n * n):
                    h_res[t, ij] = c[ij]

    return sinkhorn_fwd


@kernel
def sinkhorn_bwd_kernel(*, n, dtype, threads):
    tokens, half_steps = T.dynamic("tokens, half_steps")

    @T.prim_func
    def sinkhorn_bwd(
        logits: T.Tensor((tokens, n * n), dtype),
        dh_res: T.Tensor((tokens, n * n), F32),
        dlogits: T.Tensor((tokens, n * n), dtype),
        divisors: T.Tensor((half_steps, n, tokens), F32),
        iters: T.int32,
        eps: T.float32,
    ):
        with grid(T.ceildiv(tokens, threads.block), threads=threads) as block:
            t = block * threads.block + thread(threads)
            c = T.alloc_local((n * n,), F32)
            dc = T.alloc_local((n * n,), F32)
            if t < tokens:
                for ij in T.unroll(n * n):
                    c[ij] = T.cast(logits[t, ij], F32)
                    dc[ij] = dh_res[t, ij]
                sinkhorn(c, iters=iters, eps=eps, n=n, divisors=divisors, t=t)
                half_steps_back(c, dc, iters=iters, n=n, divisors=divisors, t=t)
                for ij in T.unroll(n * n):
                    c[ij] = T.cast(logits[t, ij], F32)
                softmax_back(c, dc, n)
                for ij in T.unroll(n * n):
                    dlogits[t, ij] = T.cast(dc[ij], dtype)

    return sinkhorn_bwd


def divisors(T: int, n: int, iters: int, on: torch.device) -> torch.Tensor:
    """Scratch for the half steps of T tokens."""
    return torch.empty((max(1, 2 * iters - 1), n, T), dtype=torch.float32, device=on)


def sinkhorn_fwd(*, logits, iters, eps, h_res):
    n = logits.shape[-1]
    if logits.numel():
        threads = configs.per_token(device.of(logits.device))
        launch = sinkhorn_fwd_kernel(n=n, dtype=NAMES[logits.dtype], threads=threads)
        launch(logits=logits.view(-1, n * n), h_res=h_res.view(-1, n * n), iters=iters, eps=eps)


def sinkhorn_bwd(*, logits, iters, eps, dh_res, dlogits):
    n = logits.shape[-1]
    T = logits.numel() // (n * n)
    if T:
        threads = configs.per_token(device.of(logits.device))
        launch = sinkhorn_bwd_kernel(n=n, dtype=NAMES[logits.dtype], threads=threads)
        launch(
            logits=logits.view(T, n * n),
            dh_res=dh_res.view(T, n * n),
            dlogits=dlogits.view(T, n * n),
            divisors=divisors(T, n, iters, logits.device),
            iters=iters,
            eps=eps,
        )
