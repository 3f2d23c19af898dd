"""mHC post: write a layer's output back into the streams, and its gradients. One pass over x each way."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from . import configs
from .exact_products import LANE, own_sums


# Where h_res[i, j] of the old stream i and the new stream j stands among the n² of a token
@triton.jit
def place_in(i: tl.constexpr, j: tl.constexpr, n: tl.constexpr, TRANSPOSED: tl.constexpr):
    place: tl.constexpr = j * n + i if TRANSPOSED else i * n + j
    return place


# h_post[j] and h_res[i, j] of these tokens as two tuples of columns [tokens, 1]; no h_res without its pointer
@triton.jit
def load_maps(h_post_ptr, h_res_ptr, t, in_batch, n: tl.constexpr, TRANSPOSED: tl.constexpr):
    h_post = ()
    h_res = ()
    for j in tl.static_range(n):
        h_post = h_post + (tl.load(h_post_ptr + t * n + j, mask=in_batch, other=0.0).to(tl.float32),)
    if h_res_ptr is not None:
        for ij in tl.static_range(n * n):
            at = h_res_ptr + t * (n * n) + place_in(ij // n, ij % n, n, TRANSPOSED)
            h_res = h_res + (tl.load(at, mask=in_batch, other=0.0).to(tl.float32),)
    return h_post, h_res


# x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i], or + x[j] without h_res; with the same roundings wherever it is
# computed
@triton.jit
def mix(x, h_out, h_post, h_res, j: tl.constexpr, n: tl.constexpr):
    if len(h_res) == 0:
        x_next = tl.fma(tl.broadcast_to(h_post[j], h_out.shape), h_out, x[j])
    else:
        x_next = h_post[j] * h_out
        for i in tl.static_range(n):
            weight = tl.broadcast_to(h_res[i * n + j], x_next.shape)
            x_next = tl.fma(weight, x[i], x_next)
    return x_next


@triton.jit(do_not_specialize=["T"])
def mhc_post_fwd_kernel(
    x_ptr,
    h_out_ptr,
    h_post_ptr,
    h_res_ptr,
    x_next_ptr,
    T,
    D,
    n: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    in_batch = t < T
    in_tile = in_batch & (d < D)
    x = ()
    for i in tl.static_range(n):
        x = x + (tl.load(x_ptr + (t * n + i) * D + d, mask=in_tile, other=0.0).to(tl.float32),)
    h_out = tl.load(h_out_ptr + t * D + d, mask=in_tile, other=0.0).to(tl.float32)
    h_post, h_res = load_maps(h_post_ptr, h_res_ptr, t, in_batch, n, TRANSPOSED)
    for j in tl.static_range(n):
        x_next = mix(x, h_out, h_post, h_res, j, n)
        tl.store(x_next_ptr + (t * n + j) * D + d, x_next.to(x_next_ptr.dtype.element_ty), mask=in_tile)


# dh_out = Σ_j h_post[j]·dx_next[j];  dh_post[j] = <dx_next[j], h_out>;  dh_res[i, j] = <x[i], dx_next[j]>
# dx[i] = Σ_j h_res[i, j]·dx_next[j], or dx_next[i] without h_res, where it is asked for
@triton.jit(do_not_specialize=["T"])
def mhc_post_bwd_kernel(
    x_ptr,
    h_out_ptr,
    h_post_ptr,
    h_res_ptr,
    dx_next_ptr,
    dx_ptr,
    dh_out_ptr,
    dh_post_ptr,
    dh_res_ptr,
    T,
    D,
    n: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    in_batch = t < T
    h_post, h_res = load_maps(h_post_ptr, h_res_ptr, t, in_batch, n, TRANSPOSED)
    dh_post = ()
    dh_res = ()
    for _ in tl.static_range(n):
        dh_post = dh_post + (tl.zeros([BLOCK_T, BLOCK_D // LANE], tl.float32),)
    for _ in tl.static_range(len(h_res)):
        dh_res = dh_res + (tl.zeros([BLOCK_T, BLOCK_D // LANE], tl.float32),)

    for start in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        d = (start + tl.arange(0, BLOCK_D))[None, :]
        in_tile = in_batch & (d < D)
        dx_next = ()
        for j in tl.static_range(n):
            loaded = tl.load(dx_next_ptr + (t * n + j) * D + d, mask=in_tile, other=0.0)
            dx_next = dx_next + (loaded.to(tl.float32),)
        h_out = tl.load(h_out_ptr + t * D + d, mask=in_tile, other=0.0).to(tl.float32)
        dh_out = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        more_post = ()
        more_res = ()
        for j in tl.static_range(n):
            dh_out += h_post[j] * dx_next[j]
            more_post = more_post + (dh_post[j] + own_sums(dx_next[j] * h_out, BLOCK_T, BLOCK_D),)
        tl.store(dh_out_ptr + t * D + d, dh_out.to(dh_out_ptr.dtype.element_ty), mask=in_tile)
        for i in tl.static_range(n):
            if h_res_ptr is None:
                dx = dx_next[i]
            else:
                x = tl.load(x_ptr + (t * n + i) * D + d, mask=in_tile, other=0.0).to(tl.float32)
                dx = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
                for j in tl.static_range(n):
                    more_res = more_res + (dh_res[i * n + j] + own_sums(x * dx_next[j], BLOCK_T, BLOCK_D),)
                    dx += h_res[i * n + j] * dx_next[j]
            if dx_ptr is not None:
                tl.store(dx_ptr + (t * n + i) * D + d, dx.to(dx_ptr.dtype.element_ty), mask=in_tile)
        dh_post = more_post
        dh_res = more_res

    for j in tl.static_range(n):
        total = tl.sum(dh_post[j], axis=1, keep_dims=True).to(dh_post_ptr.dtype.element_ty)
        tl.store(dh_post_ptr + t * n + j, total, mask=in_batch)
    for ij in tl.static_range(len(h_res)):
        total = tl.sum(dh_res[ij], axis=1, keep_dims=True).to(dh_res_ptr.dtype.element_ty)
        tl.store(dh_res_ptr + t * (n * n) + place_in(ij // n, ij % n, n, TRANSPOSED), total, mask=in_batch)


def mhc_post_fwd(
    *, x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor | None, transposed: bool, x_next: Tensor
) -> None:
    n, D = x.shape[-2:]
    T, tile = h_out.numel() // D, configs.post_fwd(n, D, x.dtype == torch.float32, device.of(x.device))
    if T == 0:
        return
    launch(
        mhc_post_fwd_kernel,
        (cdiv(T, tile.block_t), cdiv(D, tile.block_d)),
        x_ptr=x,
        h_out_ptr=h_out,
        h_post_ptr=h_post,
        h_res_ptr=h_res,
        x_next_ptr=x_next,
        T=T,
        D=D,
        n=n,
        TRANSPOSED=transposed,
        BLOCK_T=tile.block_t,
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
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
    n, D = x.shape[-2:]
    wide = torch.float32 in (x.dtype, dx_next.dtype)
    T, tile = h_out.numel() // D, configs.post_bwd(n, D, wide, h_res is not None, device.of(x.device))
    if T == 0:
        return
    launch(
        mhc_post_bwd_kernel,
        (cdiv(T, tile.block_t),),
        x_ptr=x,
        h_out_ptr=h_out,
        h_post_ptr=h_post,
        h_res_ptr=h_res,
        dx_next_ptr=dx_next,
        dx_ptr=dx if residual else None,
        dh_out_ptr=dh_out,
        dh_post_ptr=dh_post,
        dh_res_ptr=dh_res,
        T=T,
        D=D,
        n=n,
        TRANSPOSED=transposed,
        BLOCK_T=tile.block_t,
        BLOCK_D=tile.block_d,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
