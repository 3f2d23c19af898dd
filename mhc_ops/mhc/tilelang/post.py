"""mHC post: write a layer's output back into the streams, and its gradients. One pass over x each way."""

from typing import Any

import tilelang.language as T
from torch import Tensor

from ...core import device
from ...core.sizes import cdiv
from . import configs
from .build import F32, NAMES, grid, in_fp32, kernel, lane_sum, readable, thread, vector


# x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i]
@kernel
def mhc_post_fwd_kernel(*, n, D, dtype, out_dtype, threads, vectors):
    """A thread takes `vectors` vectors of channels of a token."""
    tokens = T.dynamic("tokens")
    width = vector(threads, D, dtype, out_dtype)
    block_d = threads.block * vectors * width

    @T.prim_func
    def mhc_post_fwd(
        x: T.Tensor((tokens, n, D), dtype),
        h_out: T.Tensor((tokens, D), out_dtype),
        h_post: T.Tensor((tokens, n), F32),
        h_res: T.Tensor((tokens, n * n), F32),
        x_next: T.Tensor((tokens, n, D), dtype),
    ):
        with grid(tokens, T.ceildiv(D, block_d), threads=threads) as (t, block):
            post = T.alloc_local((n,), F32)
            res = T.alloc_local((n * n,), F32)
            x_own = T.alloc_local((vectors * n * width,), dtype)
            out_own = T.alloc_local((vectors * width,), out_dtype)
            next_own = T.alloc_local((width,), dtype)
            total = T.alloc_local((1,), F32)
            first = block * block_d + thread(threads) * width
            for u in T.unroll(vectors):
                if first + u * (threads.block * width) < D:
                    d = first + u * (threads.block * width)
                    for i in T.unroll(n):
                        for v in T.vectorized(width):
                            x_own[(u * n + i) * width + v] = x[t, i, d + v]
                    for v in T.vectorized(width):
                        out_own[u * width + v] = h_out[t, d + v]
            for j in T.unroll(n):
                post[j] = h_post[t, j]
            for ij in T.unroll(n * n):
                res[ij] = h_res[t, ij]
            for u in T.unroll(vectors):
                if first + u * (threads.block * width) < D:
                    d = first + u * (threads.block * width)
                    for j in T.unroll(n):
                        for v in T.unroll(width):
                            total[0] = post[j] * T.cast(out_own[u * width + v], F32)
                            for i in T.unroll(n):
                                total[0] += res[i * n + j] * T.cast(x_own[(u * n + i) * width + v], F32)
                            next_own[v] = T.cast(total[0], dtype)
                        for v in T.vectorized(width):
                            x_next[t, j, d + v] = next_own[v]

    return mhc_post_fwd


# dh_out = Σ_j h_post[j]·dx_next[j];  dh_post[j] = <dx_next[j], h_out>;  dh_res[i, j] = <x[i], dx_next[j]>
# dx[i] = Σ_j h_res[i, j]·dx_next[j], where it is asked for (`residual`)
@kernel
def mhc_post_bwd_kernel(*, n, D, dtype, out_dtype, grad_dtype, residual, threads):
    """A group of lanes takes a token."""
    tokens = T.dynamic("tokens")
    width = vector(threads, D, dtype, out_dtype, grad_dtype)
    steps = cdiv(D, threads.lanes * width)

    @T.prim_func
    def mhc_post_bwd(
        x: T.Tensor((tokens, n, D), dtype),
        h_out: T.Tensor((tokens, D), out_dtype),
        h_post: T.Tensor((tokens, n), F32),
        h_res: T.Tensor((tokens, n * n), F32),
        dx_next: T.Tensor((tokens, n, D), grad_dtype),
        dx: T.Tensor((tokens if residual else 0, n, D), dtype),
        dh_out: T.Tensor((tokens, D), out_dtype),
        dh_post: T.Tensor((tokens, n), F32),
        dh_res: T.Tensor((tokens, n * n), F32),
    ):
        with grid(T.ceildiv(tokens, threads.groups), threads=threads) as block:
            t = block * threads.groups + thread(threads) // threads.lanes
            lane = thread(threads) % threads.lanes
            post = T.alloc_local((n,), F32)
            res = T.alloc_local((n * n,), F32)
            dpost = T.alloc_local((n,), F32)
            dres = T.alloc_local((n * n,), F32)
            x_own = T.alloc_local((n * width,), dtype)
            grad_own = T.alloc_local((n * width,), grad_dtype)
            out_own = T.alloc_local((width,), out_dtype)
            dx_own = T.alloc_local((width,), dtype)
            dout_own = T.alloc_local((width,), out_dtype)
            total = T.alloc_local((1,), F32)
            if t < tokens:
                for j in T.unroll(n):
                    post[j] = h_post[t, j]
                    dpost[j] = 0.0
                for ij in T.unroll(n * n):
                    dres[ij] = 0.0
                    if residual:
                        res[ij] = h_res[t, ij]
                for step in T.serial(steps):
                    if (step * threads.lanes + lane) * width < D:
                        d = (step * threads.lanes + lane) * width
                        for j in T.unroll(n):
                            for v in T.vectorized(width):
                                grad_own[j * width + v] = dx_next[t, j, d + v]
                        for i in T.unroll(n):
                            for v in T.vectorized(width):
                                x_own[i * width + v] = x[t, i, d + v]
                        for v in T.vectorized(width):
                            out_own[v] = h_out[t, d + v]
                        for v in T.unroll(width):
                            total[0] = 0.0
                            for j in T.unroll(n):
                                total[0] += post[j] * T.cast(grad_own[j * width + v], F32)
                                dpost[j] += T.cast(grad_own[j * width + v], F32) * T.cast(out_own[v], F32)
                                for i in T.unroll(n):
                                    dres[i * n + j] += T.cast(grad_own[j * width + v], F32) * T.cast(
                                        x_own[i * width + v], F32
                                    )
                            dout_own[v] = T.cast(total[0], out_dtype)
                        for v in T.vectorized(width):
                            dh_out[t, d + v] = dout_own[v]
                        if residual:
                            for i in T.unroll(n):
                                for v in T.unroll(width):
                                    total[0] = 0.0
                                    for j in T.unroll(n):
                                        total[0] += res[i * n + j] * T.cast(grad_own[j * width + v], F32)
                                    dx_own[v] = T.cast(total[0], dtype)
                                for v in T.vectorized(width):
                                    dx[t, i, d + v] = dx_own[v]
                for j in T.unroll(n):
                    dpost[j] = lane_sum(dpost[j], threads)
                for ij in T.unroll(n * n):
                    dres[ij] = lane_sum(dres[ij], threads)
                if lane == 0:
                    for j in T.unroll(n):
                        dh_post[t, j] = dpost[j]
                    for ij in T.unroll(n * n):
                        dh_res[t, ij] = dres[ij]

    return mhc_post_bwd


def mhc_post_fwd(
    *, x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor | None, transposed: bool, x_next: Tensor
) -> None:
    assert h_res is not None and not transposed, "prepare.py refuses it"
    n, D = x.shape[-2:]
    T = h_out.numel() // D
    if T == 0:
        return
    x, h_out = readable(x), readable(h_out)
    dtype, out_dtype = NAMES[x.dtype], NAMES[h_out.dtype]
    spread = configs.stream(device.of(x.device), D, dtype, out_dtype)
    launch = mhc_post_fwd_kernel(
        n=n, D=D, dtype=dtype, out_dtype=out_dtype, threads=spread.threads, vectors=spread.vectors
    )
    launch(
        x=x.view(T, n, D),
        h_out=h_out.view(T, D),
        h_post=h_post.float().view(T, n),
        h_res=h_res.float().view(T, n * n),
        x_next=x_next.view(T, n, D),
    )


def mhc_layer_post(*, link: Tensor, **arguments: Any) -> None:
    """The link is not read."""
    mhc_post_fwd(**arguments)


def mhc_post_bwd(
    *,
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    transposed: bool,
    dx_next: Tensor,
    residual: bool,
    dx: Tensor,
    dh_out: Tensor,
    dh_post: Tensor,
    dh_res: Tensor,
) -> None:
    assert h_res is not None and not transposed, "prepare.py refuses it"
    n, D = x.shape[-2:]
    T = h_out.numel() // D
    if T == 0:
        return
    x, h_out, dx_next = readable(x), readable(h_out), readable(dx_next)
    launch = mhc_post_bwd_kernel(
        n=n,
        D=D,
        dtype=NAMES[x.dtype],
        out_dtype=NAMES[h_out.dtype],
        grad_dtype=NAMES[dx_next.dtype],
        residual=residual,
        threads=configs.per_group(device.of(x.device)),
    )
    outputs = {"dh_post": dh_post, "dh_res": dh_res}
    if dh_out.dtype != h_out.dtype:  # of a type that kernels do not know
        outputs["dh_out"] = dh_out
    with in_fp32(**outputs) as wide:
        launch(
            x=x.view(T, n, D),
            h_out=h_out.view(T, D),
            h_post=h_post.float().view(T, n),
            h_res=h_res.float().view(T, n * n),
            dx_next=dx_next.view(T, n, D),
            dx=dx.view(-1, n, D),
            dh_out=wide.get("dh_out", dh_out).view(T, D),
            dh_post=wide["dh_post"].view(T, n),
            dh_res=wide["dh_res"].view(T, n * n),
        )
