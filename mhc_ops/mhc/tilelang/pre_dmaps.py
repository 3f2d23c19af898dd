"""mHC pre, backward, second step, per token: back through σ, Sinkhorn and the scales to dh_mix."""

from typing import Any, NamedTuple

import tilelang.language as T
import torch
from torch import Tensor

from ...core import device
from ...core.sizes import cdiv
from ..options import PreOptions
from . import configs
from .build import F32, TYPES, grid, kernel, lane_sum, thread
from .exact_products import section
from .sinkhorn import (
    LEAST,
    divisors,
    half_steps_back,
    least_of,
    sinkhorn,
    sinkhorn_in_logs,
    sinkhorn_logs_back,
    softmax_back,
)


class Token(NamedTuple):
    """What the logits of h_res of a token are made of."""

    t: Any
    h_mix: Any
    inv: Any
    alpha: Any
    bias: Any


# m = h_mix·inv_rms;  z = alpha·m + bias;  dz_pre = dh_pre·σ(z)σ(−z);  dz_post = post_mult·dh_post·σ(z)σ(−z)
# dz_res = dh_res back through Sinkhorn, or as it is where iters is 0
# dh_mix = dz·inv_rms, stored in parts;  h_pre = σ(z_pre) + hc_eps
# x_factor = −inv_rms³/(nD)·Σ_M alpha·dz·h_mix;  factor = x_factor, h_pre, h_res
# sums[0 or 1, m, group] = Σ_t dz or Σ_t dz·m over the tokens of a group of lanes
@kernel
def mhc_pre_dmaps_kernel(*, n, M, K, parts, dtype, without_eps, threads):
    """In the head, M is n, and dh_post and dh_res are empty."""
    tokens, groups, half_steps = T.dynamic("tokens, groups, half_steps")
    head = M == n
    rows, columns = configs.padded_maps(M), configs.mix_columns(M, parts)
    numbered = tuple(range(parts))

    @T.macro
    def finish(*, dz, mix, inv, alpha, m, dinv, dh_mix, sums, t, group, lane):
        rest = T.alloc_local((1,), F32)
        part = T.alloc_local((1,), dtype)
        if t < tokens:
            dinv[0] += alpha[section(m, n, head)] * dz * mix
            rest[0] = dz * inv
            for p in numbered:
                part[0] = T.cast(rest[0], dtype)
                dh_mix[t, p * rows + m] = part[0]
                rest[0] -= T.cast(part[0], F32)
        rest[0] = lane_sum(dz, threads)
        if lane == 0 and group < groups:
            sums[0, m, group] = rest[0]
        rest[0] = lane_sum(dz * (mix * inv), threads)
        if lane == 0 and group < groups:
            sums[1, m, group] = rest[0]

    def logit(token, ij):
        m = 2 * n + ij
        return token.alpha[2] * (token.h_mix[token.t, m] * token.inv[0]) + token.bias[m]

    @T.macro
    def logits(c, token):
        for ij in T.unroll(n * n):
            c[ij] = logit(token, ij)

    @T.macro
    def through_sinkhorn(c, dc, divided, *, token, dh_res, factor, divisors, iters, sinkhorn_eps):
        if iters > 0:
            logits(c, token)
            sinkhorn(
                c,
                iters=iters,
                eps=sinkhorn_eps,
                n=n,
                divisors=divisors,
                t=token.t,
                divided=divided if without_eps else None,
            )
            for ij in T.unroll(n * n):
                factor[token.t, 1 + n + ij] = c[ij]
        for ij in T.unroll(n * n):
            dc[ij] = dh_res[token.t, ij]
        if iters > 0:
            half_steps_back(c, dc, iters=iters, n=n, divisors=divisors, t=token.t)
            logits(c, token)
            softmax_back(c, dc, n)
            if without_eps:
                if least_of(divided, n) < LEAST:
                    logits(c, token)
                    sinkhorn_in_logs(c, iters=iters, n=n, divisors=divisors, t=token.t)
                    for ij in T.unroll(n * n):
                        factor[token.t, 1 + n + ij] = c[ij]
                        dc[ij] = c[ij] * dh_res[token.t, ij]
                        c[ij] = logit(token, ij)
                    sinkhorn_logs_back(c, dc, iters=iters, n=n, divisors=divisors, t=token.t)

    @T.prim_func
    def mhc_pre_dmaps(
        h_mix: T.Tensor((tokens, M), F32),
        inv_rms: T.Tensor((tokens,), F32),
        dh_pre: T.Tensor((tokens, n), F32),
        dh_post: T.Tensor((0 if head else tokens, n), F32),
        dh_res: T.Tensor((0 if head else tokens, n * n), F32),
        alpha: T.Tensor((1 if head else 3,), F32),
        bias: T.Tensor((M,), F32),
        dh_mix: T.Tensor((tokens, columns), dtype),
        factor: T.Tensor((tokens, configs.factors(n, head)), F32),
        sums: T.Tensor((2, M, groups), F32),
        divisors: T.Tensor((half_steps, n, tokens), F32),
        hc_eps: T.float32,
        post_mult: T.float32,
        iters: T.int32,
        sinkhorn_eps: T.float32,
    ):
        with grid(T.ceildiv(tokens, threads.block), threads=threads) as block:
            t = block * threads.block + thread(threads)
            group = t // threads.lanes
            lane = t % threads.lanes
            mix = T.alloc_local((1,), F32)
            inv = T.alloc_local((1,), F32)
            dinv = T.alloc_local((1,), F32)
            z = T.alloc_local((1,), F32)
            gate = T.alloc_local((1,), F32)
            dz = T.alloc_local((1,), F32)
            c = T.alloc_local((n * n,), F32)
            dc = T.alloc_local((n * n,), F32)
            divided = T.alloc_local((2 * n,), F32)
            dinv[0] = 0.0
            inv[0] = 0.0
            mix[0] = 0.0
            if t < tokens:
                inv[0] = inv_rms[t]
            for g in T.unroll(n if head else 2 * n):
                dz[0] = 0.0
                if t < tokens:
                    mix[0] = h_mix[t, g]
                    z[0] = alpha[section(g, n, head)] * (mix[0] * inv[0]) + bias[g]
                    gate[0] = 1.0 / (1.0 + T.exp(-z[0]))
                    dz[0] = gate[0] / (1.0 + T.exp(z[0]))
                    if g < n:
                        factor[t, 1 + g] = gate[0] + hc_eps
                        dz[0] *= dh_pre[t, g]
                    else:
                        dz[0] *= post_mult * dh_post[t, g - n]
                finish(
                    dz=dz[0],
                    mix=mix[0],
                    inv=inv[0],
                    alpha=alpha,
                    m=g,
                    dinv=dinv,
                    dh_mix=dh_mix,
                    sums=sums,
                    t=t,
                    group=group,
                    lane=lane,
                )
            if not head:
                for ij in T.unroll(n * n):
                    dc[ij] = 0.0
                if t < tokens:
                    through_sinkhorn(
                        c,
                        dc,
                        divided,
                        token=Token(t, h_mix, inv, alpha, bias),
                        dh_res=dh_res,
                        factor=factor,
                        divisors=divisors,
                        iters=iters,
                        sinkhorn_eps=sinkhorn_eps,
                    )
                for ij in T.unroll(n * n):
                    if t < tokens:
                        mix[0] = h_mix[t, 2 * n + ij]
                    finish(
                        dz=dc[ij],
                        mix=mix[0],
                        inv=inv[0],
                        alpha=alpha,
                        m=2 * n + ij,
                        dinv=dinv,
                        dh_mix=dh_mix,
                        sums=sums,
                        t=t,
                        group=group,
                        lane=lane,
                    )
            if t < tokens:
                factor[t, 0] = -dinv[0] * inv[0] * inv[0] * inv[0] / K
                for p in numbered:
                    for m in T.unroll(M, rows):
                        dh_mix[t, p * rows + m] = T.cast(0.0, dtype)

    return mhc_pre_dmaps


def back_through_maps(
    *,
    n: int,
    K: int,
    exact: configs.Arithmetic,
    alpha: Tensor,
    bias: Tensor,
    options: PreOptions,
    inv_rms: Tensor,
    h_mix: Tensor,
    dh_pre: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dh_mix in parts, the factors of dx, and the sums [2, M, groups]."""
    T, M = inv_rms.numel(), h_mix.shape[-1]
    head, threads = M == n, configs.per_token(device.of(inv_rms.device))

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=inv_rms.device)

    def or_zeros(gradient: Tensor | None, *shape: int) -> Tensor:
        return inv_rms.new_zeros(shape) if gradient is None else gradient.float().view(shape)

    dh_mix = scratch(T, configs.mix_columns(M, exact.parts), dtype=TYPES[exact.dtype])
    factor = scratch(T, configs.factors(n, head))
    sums = scratch(2, M, cdiv(T, threads.lanes))
    launch = mhc_pre_dmaps_kernel(
        n=n,
        M=M,
        K=K,
        parts=exact.parts,
        dtype=exact.dtype,
        without_eps=not options.sinkhorn_eps,
        threads=threads,
    )
    launch(
        h_mix=h_mix.view(T, M),
        inv_rms=inv_rms.view(T),
        dh_pre=or_zeros(dh_pre, T, n),
        dh_post=scratch(0, n) if head else or_zeros(dh_post, T, n),
        dh_res=scratch(0, n * n) if head else or_zeros(dh_res, T, n * n),
        alpha=alpha,
        bias=bias,
        dh_mix=dh_mix,
        factor=factor,
        sums=sums,
        divisors=divisors(T, n, options.sinkhorn_iters, inv_rms.device),
        hc_eps=options.hc_eps,
        post_mult=options.post_mult,
        iters=options.sinkhorn_iters,
        sinkhorn_eps=options.sinkhorn_eps,
    )
    return dh_mix, factor, sums
