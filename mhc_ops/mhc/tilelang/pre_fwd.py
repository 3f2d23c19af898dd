"""mHC pre, forward: a projection of x, then one kernel that finishes each token.

1. pre_project.py: partials[slice, :, t] = phi · x[t] and Σ x², per slice of K = nD
2. finish    add the slices in order, make the maps (Sinkhorn included), sum the streams to h_in

The head is the same with the pre rows of phi alone.
"""

from typing import Any

import tilelang.language as T
from torch import Tensor

from ...core import device
from ...core.sizes import cdiv
from ..options import PreOptions
from ..records import Pre
from . import configs
from .build import F32, NAMES, ON_CPU, grid, kernel, readable, thread, vector
from .pre_project import project
from .sinkhorn import LEAST, least_of, sinkhorn, sinkhorn_in_logs


# h_mix, Σ x² = Σ partials;  inv_rms = rsqrt(Σ x² / K + norm_eps);  z = alpha·h_mix·inv_rms + bias
# h_pre = σ(z_pre) + hc_eps;  h_post = post_mult·σ(z_post);  h_res = sinkhorn(z_res), or z_res where iters is 0
# h_in = Σ_i h_pre[i]·x[i]
@kernel
def mhc_pre_finish_kernel(*, n, D, M, dtype, slices, without_eps, threads, vectors, resident):
    """The first blocks make the maps, a thread per token; the others read x, a block per token and block of channels,
    and make the h_pre of their token themselves. In the head, M is n, and h_post and h_res are empty."""
    tokens = T.dynamic("tokens")
    head = M == n
    width = vector(threads, D, dtype)
    stride = threads.block * width
    blocks = cdiv(D, stride * vectors)

    @T.macro
    def make_maps(
        t,
        *,
        partials,
        alpha,
        bias,
        h_post,
        h_res,
        inv_rms,
        h_mix,
        h_pre,
        norm_eps,
        hc_eps,
        post_mult,
        iters,
        sinkhorn_eps,
    ):
        mix = T.alloc_local((M + 1,), F32)
        inv = T.alloc_local((1,), F32)
        c = T.alloc_local((n * n,), F32)
        divided = T.alloc_local((2 * n,), F32)
        for m in T.unroll(M + 1):
            mix[m] = 0.0
        for k_slice in T.serial(slices):
            for m in T.unroll(M + 1):
                mix[m] += partials[k_slice, m, t]
        inv[0] = 1.0 / T.sqrt(mix[M] / (n * D) + norm_eps)
        inv_rms[t] = inv[0]
        for m in T.unroll(M):
            h_mix[t, m] = mix[m]
        for i in T.unroll(n):
            h_pre[t, i] = 1.0 / (1.0 + T.exp(-(alpha[0] * (mix[i] * inv[0]) + bias[i]))) + hc_eps
        if not head:
            for j in T.unroll(n):
                h_post[t, j] = post_mult / (1.0 + T.exp(-(alpha[1] * (mix[n + j] * inv[0]) + bias[n + j])))
            for ij in T.unroll(n * n):
                c[ij] = alpha[2] * (mix[2 * n + ij] * inv[0]) + bias[2 * n + ij]
            if iters > 0:
                sinkhorn(c, iters=iters, eps=sinkhorn_eps, n=n, divided=divided if without_eps else None)
                if without_eps:
                    if least_of(divided, n) < LEAST:
                        for ij in T.unroll(n * n):
                            c[ij] = alpha[2] * (mix[2 * n + ij] * inv[0]) + bias[2 * n + ij]
                        sinkhorn_in_logs(c, iters=iters, n=n)
            for ij in T.unroll(n * n):
                h_res[t, ij] = c[ij]

    @T.macro
    def read(t, first, *, x, partials, alpha, bias, h_in, norm_eps, hc_eps):
        mix = T.alloc_local((n + 1,), F32)
        inv = T.alloc_local((1,), F32)
        x_own = T.alloc_local((vectors * n * width,), dtype)
        in_own = T.alloc_local((width,), dtype)
        total = T.alloc_local((1,), F32)
        for u in T.unroll(vectors):
            if first + u * stride < D:
                for i in T.unroll(n):
                    for v in T.vectorized(width):
                        x_own[(u * n + i) * width + v] = x[t, i, first + u * stride + v]
        for i in T.unroll(n + 1):
            mix[i] = 0.0
        for k_slice in T.unroll(slices):
            for i in T.unroll(n):
                mix[i] += partials[k_slice, i, t]
            mix[n] += partials[k_slice, M, t]
        inv[0] = 1.0 / T.sqrt(mix[n] / (n * D) + norm_eps)
        for i in T.unroll(n):
            mix[i] = 1.0 / (1.0 + T.exp(-(alpha[0] * (mix[i] * inv[0]) + bias[i]))) + hc_eps
        for u in T.unroll(vectors):
            if first + u * stride < D:
                for v in T.unroll(width):
                    total[0] = 0.0
                    for i in T.unroll(n):
                        total[0] += mix[i] * T.cast(x_own[(u * n + i) * width + v], F32)
                    in_own[v] = T.cast(total[0], dtype)
                for v in T.vectorized(width):
                    h_in[t, first + u * stride + v] = in_own[v]

    @T.prim_func
    def mhc_pre_finish(
        x: T.Tensor((tokens, n, D), dtype),
        partials: T.Tensor((slices, M + 1, tokens), F32),
        alpha: T.Tensor((1 if head else 3,), F32),
        bias: T.Tensor((M,), F32),
        h_in: T.Tensor((tokens, D), dtype),
        h_post: T.Tensor((0 if head else tokens, n), F32),
        h_res: T.Tensor((0 if head else tokens, n * n), F32),
        inv_rms: T.Tensor((tokens,), F32),
        h_mix: T.Tensor((tokens, M), F32),
        h_pre: T.Tensor((tokens, n), F32),
        norm_eps: T.float32,
        hc_eps: T.float32,
        post_mult: T.float32,
        iters: T.int32,
        sinkhorn_eps: T.float32,
    ):
        with grid(T.ceildiv(tokens, threads.block) + tokens * blocks, threads=threads) as block:
            if threads != ON_CPU:
                T.annotate_min_blocks_per_sm(resident)
            if block < T.ceildiv(tokens, threads.block):
                t = block * threads.block + thread(threads)
                if t < tokens:
                    make_maps(
                        t,
                        partials=partials,
                        alpha=alpha,
                        bias=bias,
                        h_post=h_post,
                        h_res=h_res,
                        inv_rms=inv_rms,
                        h_mix=h_mix,
                        h_pre=h_pre,
                        norm_eps=norm_eps,
                        hc_eps=hc_eps,
                        post_mult=post_mult,
                        iters=iters,
                        sinkhorn_eps=sinkhorn_eps,
                    )
            else:
                item = block - T.ceildiv(tokens, threads.block)
                first = item % blocks * (stride * vectors) + thread(threads) * width
                read(
                    item // blocks,
                    first,
                    x=x,
                    partials=partials,
                    alpha=alpha,
                    bias=bias,
                    h_in=h_in,
                    norm_eps=norm_eps,
                    hc_eps=hc_eps,
                )

    return mhc_pre_finish


def finish(pre: Pre, x: Tensor, partials: Tensor) -> None:
    """From the sums of `project`. x: as kernels read it"""
    n, D = x.shape[-2:]
    slices, T, M = partials.shape[0], partials.shape[2], partials.shape[1] - 1
    dtype, options = NAMES[x.dtype], pre.options
    config = configs.finish(device.of(x.device), n, D, dtype)
    launch = mhc_pre_finish_kernel(
        n=n,
        D=D,
        M=M,
        dtype=dtype,
        slices=slices,
        without_eps=not options.sinkhorn_eps,
        threads=config.threads,
        vectors=config.vectors,
        resident=config.resident,
    )
    assert pre.h_in is not None, "prepare.py refuses maps alone"
    none = pre.inv_rms.new_empty(0)
    launch(
        x=x.view(T, n, D),
        partials=partials,
        alpha=pre.alpha.float().view(-1),
        bias=pre.bias.float(),
        h_in=pre.h_in.view(T, D),
        h_post=(none if pre.h_post is None else pre.h_post).view(-1, n),
        h_res=(none if pre.h_res is None else pre.h_res).view(-1, n * n),
        inv_rms=pre.inv_rms.view(T),
        h_mix=pre.h_mix.view(T, M),
        h_pre=pre.inv_rms.new_empty(T, n) if pre.h_pre is None else pre.h_pre.view(T, n),
        norm_eps=options.norm_eps,
        hc_eps=options.hc_eps,
        post_mult=options.post_mult,
        iters=options.sinkhorn_iters,
        sinkhorn_eps=options.sinkhorn_eps,
    )


def mhc_pre_fwd(**arguments: Any) -> None:
    pre = Pre(**arguments)
    assert pre.layer_norm_weight is None and pre.read is None, "prepare.py refuses it"
    if pre.x.numel():
        x = readable(pre.x)
        finish(pre, x, project(x, pre.phi, pre.gamma))


def mhc_layer_pre(*, link: Tensor, h_pre: Tensor, **arguments: Any) -> None:
    """The link is not read, and h_pre is empty."""
    mhc_pre_fwd(**arguments)


def mhc_head_fwd(*, norm_eps: float, hc_eps: float, out: Tensor, **arguments: Any) -> None:
    mhc_pre_fwd(**arguments, options=PreOptions(norm_eps=norm_eps, hc_eps=hc_eps, sinkhorn_iters=0), h_in=out)
