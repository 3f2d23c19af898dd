"""mHC read and mean: the weighted sum of the streams and their mean, with gradients. One pass over x each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from . import configs


# h_in = Σ_i h_pre[i]·x[i], or the mean without h_pre
@triton.jit(do_not_specialize=["T"])
def mhc_read_fwd_kernel(
    x_ptr, h_pre_ptr, h_in_ptr, T, D, n: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    in_batch = t < T
    in_tile = in_batch & (d < D)
    h_in = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for i in tl.static_range(n):
        if h_pre_ptr is None:
            h_in += tl.load(x_ptr + (t * n + i) * D + d, mask=in_tile, other=0.0).to(tl.float32)
        else:
            weight = tl.load(h_pre_ptr + t * n + i, mask=in_batch, other=0.0).to(tl.float32)
            h_in += weight * tl.load(x_ptr + (t * n + i) * D + d, mask=in_tile, other=0.0).to(tl.float32)
    if h_pre_ptr is None:
        h_in = h_in / n
    tl.store(h_in_ptr + t * D + d, h_in.to(h_in_ptr.dtype.element_ty), mask=in_tile)


# dx[i] = h_pre[i]·dh_in;  dh_pre[i] = <dh_in, x[i]>
@triton.jit(do_not_specialize=["T"])
def mhc_read_bwd_kernel(
    x_ptr,
    h_pre_ptr,
    dh_in_ptr,
    dx_ptr,
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
    maps = t[:, None] * n + i[None, :]
    is_map = (t < T)[:, None] & (i < n)[None, :]
    h_pre = tl.load(h_pre_ptr + maps, mask=is_map, other=0.0).to(tl.float32)
    products = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = (start + tl.arange(0, BLOCK_D))[None, None, :]
        in_tile = is_map[:, :, None] & (d < D)
        x = tl.load(x_ptr + maps[:, :, None] * D + d, mask=in_tile, other=0.0).to(tl.float32)
        in_row = (t < T)[:, None, None] & (d < D)
        dh_in = tl.load(dh_in_ptr + t[:, None, None] * D + d, mask=in_row, other=0.0).to(tl.float32)
        products += x * dh_in
        dx = h_pre[:, :, None] * dh_in
        tl.store(dx_ptr + maps[:, :, None] * D + d, dx.to(dx_ptr.dtype.element_ty), mask=in_tile)
    dh_pre = tl.sum(products, axis=2)
    tl.store(dh_pre_ptr + maps, dh_pre.to(dh_pre_ptr.dtype.element_ty), mask=is_map)


# dx[i] = dout / n
@triton.jit(do_not_specialize=["T"])
def mhc_mean_bwd_kernel(dout_ptr, dx_ptr, T, D, n: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    d = (tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    in_tile = (t < T) & (d < D)
    dx = tl.load(dout_ptr + t * D + d, mask=in_tile, other=0.0).to(tl.float32) / n
    for i in tl.static_range(n):
        tl.store(dx_ptr + (t * n + i) * D + d, dx.to(dx_ptr.dtype.element_ty), mask=in_tile)


def mhc_read_fwd(*, x: Tensor, h_pre: Tensor | None, h_in: Tensor) -> None:
    n, D = x.shape[-2:]
    T, tile = h_in.numel() // D, configs.post_fwd(n, D, x.dtype == torch.float32, device.of(x.device))
    if T == 0:
        return
    launch(
        mhc_read_fwd_kernel,
        (cdiv(T, tile.block_t), cdiv(D, tile.block_d)),
        x_ptr=x,
        h_pre_ptr=h_pre,
        h_in_ptr=h_in,
        T=T,
        D=D,
        n=n,
        BLOCK_T=tile.block_t,
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )


def mhc_read_bwd(*, x: Tensor, h_pre: Tensor, dh_in: Tensor, dx: Tensor, dh_pre: Tensor) -> None:
    n, D = x.shape[-2:]
    T, tile = dh_in.numel() // D, configs.read_bwd(n, D, device.of(x.device))
    if T == 0:
        return
    launch(
        mhc_read_bwd_kernel,
        (cdiv(T, tile.block_t),),
        x_ptr=x,
        h_pre_ptr=h_pre,
        dh_in_ptr=dh_in,
        dx_ptr=dx,
        dh_pre_ptr=dh_pre,
        T=T,
        D=D,
        n=n,
        BLOCK_T=tile.block_t,
        BLOCK_N=next_power_of_2(n),
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )


def mhc_mean_fwd(*, x: Tensor, n: int, out: Tensor) -> None:
    mhc_read_fwd(x=x, h_pre=None, h_in=out)


def mhc_mean_bwd(*, n: int, dout: Tensor, dx: Tensor) -> None:
    D = dout.shape[-1]
    T, tile = dout.numel() // D, configs.post_fwd(n, D, dout.dtype == torch.float32, device.of(dout.device))
    if T == 0:
        return
    launch(
        mhc_mean_bwd_kernel,
        (cdiv(T, tile.block_t), cdiv(D, tile.block_d)),
        dout_ptr=dout,
        dx_ptr=dx,
        T=T,
        D=D,
        n=n,
        BLOCK_T=tile.block_t,
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )
