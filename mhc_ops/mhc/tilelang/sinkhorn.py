"""Sinkhorn-Knopp, one thread per token with its n × n matrix in registers: the steps, their exact gradient, the op.

The gradient needs the divisor of every half step: they are recomputed, kept in scratch memory ([half steps, n, T]) and
walked back.

Without eps a row or column whose entries all underflow would be 0 / 0, and one with some such entries would lose them.
A matrix with such small divisors is made again in logarithms: c = exp(z + u + v). A half step makes u, of the rows, or
v, of the columns; they are kept in the place of the divisors.
"""

import functools
from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from ...core import device
from . import configs
from .build import F32, NAMES, grid, kernel, thread

# The least that an entry may be divided by: a denormal one then still counts for nothing. 2^-126 / 2^-23
LEAST = 2.0**-103


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


# c /= colsum(c) + eps where `columns`, else c /= rowsum(c) + eps; where `divisors` are kept, they go to [step, :, t].
# divided, where it is asked for: what columns and then rows were divided by so far, without NaN
@T.macro
def divide(c, eps, *, n, columns, divisors, step, t, divided):
    divisor = T.alloc_local((1,), F32)
    for a in T.unroll(n):
        divisor[0] = eps
        for b in T.unroll(n):
            divisor[0] += c[b * n + a if columns else a * n + b]
        if divisors is not None:
            divisors[step, a, t] = divisor[0]
        if divided is not None:
            if divisor[0] < 1.0:
                divided[a if columns else n + a] *= divisor[0]
        for b in T.unroll(n):
            c[b * n + a if columns else a * n + b] *= 1.0 / divisor[0]


# c = softmax(c) + eps;  c /= colsum + eps;  then iters − 1 times:  c /= rowsum + eps;  c /= colsum + eps
@T.macro
def sinkhorn(c, *, iters, eps, n, divisors=None, t=0, divided=None):
    if divided is not None:
        for a in T.unroll(2 * n):
            divided[a] = 1.0
    softmax(c, n)
    for ij in T.unroll(n * n):
        c[ij] += eps
    divide(c, eps, n=n, columns=True, divisors=divisors, step=0, t=t, divided=divided)
    for round in T.serial(iters - 1):
        divide(c, eps, n=n, columns=False, divisors=divisors, step=2 * round + 1, t=t, divided=divided)
        divide(c, eps, n=n, columns=True, divisors=divisors, step=2 * round + 2, t=t, divided=divided)


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


def least_of(divided: Any, n: int) -> Any:
    """What the entry of a matrix was divided by that was divided by least"""
    columns, rows = ([divided[a] for a in range(first, first + n)] for first in (0, n))
    return functools.reduce(T.min, columns) * functools.reduce(T.min, rows)


# found[a] = −log Σ_b exp(z[a, b] + added[b]), or of z[b, a] where `columns`; kept as divisors are. added: None for 0
@T.macro
def potential(z, added, found, *, n, columns, divisors, step, t):
    own = T.alloc_local((n,), F32)
    largest = T.alloc_local((1,), F32)
    total = T.alloc_local((1,), F32)
    for a in T.unroll(n):
        for b in T.unroll(n):
            own[b] = z[b * n + a if columns else a * n + b] + (0.0 if added is None else added[b])
        largest[0] = own[0]
        for b in T.unroll(1, n):
            largest[0] = T.max(largest[0], own[b])
        total[0] = 0.0
        for b in T.unroll(n):
            total[0] += T.exp(own[b] - largest[0])
        found[a] = -largest[0] - T.log(total[0])
        if divisors is not None:
            divisors[step, a, t] = found[a]


# The same as sinkhorn, of z and without eps
@T.macro
def sinkhorn_in_logs(z, *, iters, n, divisors=None, t=0):
    u = T.alloc_local((n,), F32)
    v = T.alloc_local((n,), F32)
    potential(z, None, u, n=n, columns=False, divisors=None, step=0, t=t)
    potential(z, u, v, n=n, columns=True, divisors=divisors, step=0, t=t)
    for round in T.serial(iters - 1):
        potential(z, v, u, n=n, columns=False, divisors=divisors, step=2 * round + 1, t=t)
        potential(z, u, v, n=n, columns=True, divisors=divisors, step=2 * round + 2, t=t)
    for i in T.unroll(n):
        for j in T.unroll(n):
            z[i * n + j] = T.exp(z[i * n + j] + u[i] + v[j])


# Back through a half step to c = exp(z + u + v):  dlog, the gradient of log c, becomes dlog − c·Σ dlog
@T.macro
def logs_back(z, dlog, u, v, *, n, columns):
    total = T.alloc_local((1,), F32)
    for a in T.unroll(n):
        total[0] = 0.0
        for b in T.unroll(n):
            total[0] += dlog[b * n + a if columns else a * n + b]
        for b in T.unroll(n):
            dlog[b * n + a if columns else a * n + b] -= total[0] * T.exp(
                z[b * n + a if columns else a * n + b] + u[b if columns else a] + v[a if columns else b]
            )


# Back through all of c = sinkhorn_in_logs(z): dlog, of log c, becomes the gradient of z
@T.macro
def sinkhorn_logs_back(z, dlog, *, iters, n, divisors, t):
    u = T.alloc_local((n,), F32)
    v = T.alloc_local((n,), F32)
    for j in T.unroll(n):
        v[j] = divisors[2 * iters - 2, j, t]
    for done in T.serial(iters - 1):
        for i in T.unroll(n):
            u[i] = divisors[2 * (iters - 1 - done) - 1, i, t]
        logs_back(z, dlog, u, v, n=n, columns=True)
        for j in T.unroll(n):
            v[j] = divisors[2 * (iters - 1 - done) - 2, j, t]
        logs_back(z, dlog, u, v, n=n, columns=False)
    potential(z, None, u, n=n, columns=False, divisors=None, step=0, t=t)
    logs_back(z, dlog, u, v, n=n, columns=True)
    for j in T.unroll(n):
        v[j] = 0.0
    logs_back(z, dlog, u, v, n=n, columns=False)


@kernel
def sinkhorn_fwd_kernel(*, n, dtype, without_eps, threads):
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
            divided = T.alloc_local((2 * n,), F32)
            if t < tokens:
                for ij in T.unroll(n * n):
                    c[ij] = T.cast(logits[t, ij], F32)
                sinkhorn(c, iters=iters, eps=eps, n=n, divided=divided if without_eps else None)
                if without_eps:
                    if least_of(divided, n) < LEAST:
                        for ij in T.unroll(n * n):
                            c[ij] = T.cast(logits[t, ij], F32)
                        sinkhorn_in_logs(c, iters=iters, n=n)
                for ij in T.unroll(n * n):
                    h_res[t, ij] = c[ij]

    return sinkhorn_fwd


@kernel
def sinkhorn_bwd_kernel(*, n, dtype, without_eps, threads):
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
            divided = T.alloc_local((2 * n,), F32)
            if t < tokens:
                for ij in T.unroll(n * n):
                    c[ij] = T.cast(logits[t, ij], F32)
                    dc[ij] = dh_res[t, ij]
                sinkhorn(c, iters=iters, eps=eps, n=n, divisors=divisors, t=t, divided=divided if without_eps else None)
                half_steps_back(c, dc, iters=iters, n=n, divisors=divisors, t=t)
                for ij in T.unroll(n * n):
                    c[ij] = T.cast(logits[t, ij], F32)
                softmax_back(c, dc, n)
                if without_eps:
                    if least_of(divided, n) < LEAST:
                        for ij in T.unroll(n * n):
                            c[ij] = T.cast(logits[t, ij], F32)
                        sinkhorn_in_logs(c, iters=iters, n=n, divisors=divisors, t=t)
                        for ij in T.unroll(n * n):
                            dc[ij] = c[ij] * dh_res[t, ij]
                            c[ij] = T.cast(logits[t, ij], F32)
                        sinkhorn_logs_back(c, dc, iters=iters, n=n, divisors=divisors, t=t)
                for ij in T.unroll(n * n):
                    dlogits[t, ij] = T.cast(dc[ij], dtype)

    return sinkhorn_bwd


def divisors(T: int, n: int, iters: int, on: torch.device) -> Tensor:
    """Scratch for the half steps of T tokens."""
    return torch.empty((max(1, 2 * iters - 1), n, T), dtype=torch.float32, device=on)


def sinkhorn_fwd(*, logits: Tensor, iters: int, eps: float, h_res: Tensor) -> None:
    n = logits.shape[-1]
    if logits.numel():
        threads = configs.per_token(device.of(logits.device))
        launch = sinkhorn_fwd_kernel(n=n, dtype=NAMES[logits.dtype], without_eps=not eps, threads=threads)
        launch(logits=logits.view(-1, n * n), h_res=h_res.view(-1, n * n), iters=iters, eps=eps)


def sinkhorn_bwd(*, logits: Tensor, iters: int, eps: float, dh_res: Tensor, dlogits: Tensor) -> None:
    n = logits.shape[-1]
    T = logits.numel() // (n * n)
    if T:
        threads = configs.per_token(device.of(logits.device))
        launch = sinkhorn_bwd_kernel(n=n, dtype=NAMES[logits.dtype], without_eps=not eps, threads=threads)
        launch(
            logits=logits.view(T, n * n),
            dh_res=dh_res.view(T, n * n),
            dlogits=dlogits.view(T, n * n),
            divisors=divisors(T, n, iters, logits.device),
            iters=iters,
            eps=eps,
        )
