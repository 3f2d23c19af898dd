"""mHC pre, backward, pass A where the layer's norm is fused: y = weight ⊙ h_in · r, r = rsqrt(mean(h_in²) + eps).

dh_in = r·(weight ⊙ dy) − c·h_in with c = r³/D·<weight ⊙ dy, h_in>. Pass A has all streams of a token, makes h_in again
and takes its dots beside those of weight ⊙ dy: dh_pre, r and c without dh_in. Pass B makes dh_in from r and c.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv
from ..records import PreBackward
from . import configs
from .exact_products import LANE, own_sums
from .pre_finish import load_streams, weigh


# h_in = Σ_i h_pre[i]·x[i];  r = rsqrt(mean(h_in²) + layer_norm_eps);  c = r³/D·<weight ⊙ dy, h_in>
# dh_pre[i] = r·<weight ⊙ dy, x[i]> − c·<h_in, x[i]>;  factors = r of all tokens, then c
@triton.jit(do_not_specialize=["T"])
def mhc_pre_normed_dh_pre_kernel(
    x_ptr,
    dy_ptr,
    layer_norm_weight_ptr,
    h_mix_ptr,
    inv_rms_ptr,
    alpha_ptr,
    bias_ptr,
    read_ptr,  # what h_in was read with, where that is not σ(z_pre) + hc_eps
    dh_pre_ptr,
    factors_ptr,
    T,
    D,
    hc_eps,
    layer_norm_eps,
    n: tl.constexpr,
    M: tl.constexpr,
    TABLE: tl.constexpr,  # columns of a table with r and c of a token in a row, after its maps; 0: they are apart
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_batch = t < T
    rows, is_row = t[:, None], in_batch[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    # Each block is on its way while the one before is summed, the first while the gates are made.
    x = load_streams(x_ptr, rows, d, in_batch, D, n)
    dy = tl.load(dy_ptr + rows * D + d, mask=is_row & (d < D), other=0.0)
    inv_rms = tl.load(inv_rms_ptr + rows, mask=is_row, other=0.0)
    alpha = tl.load(alpha_ptr).to(tl.float32)
    h_pre = ()
    of_dy = ()
    of_h_in = ()
    squares = tl.zeros([BLOCK_T, BLOCK_D // LANE], tl.float32)
    for i in tl.static_range(n):
        if read_ptr is None:
            h_mix = tl.load(h_mix_ptr + rows * M + i, mask=is_row, other=0.0)
            h_pre = h_pre + (tl.sigmoid(h_mix * inv_rms * alpha + tl.load(bias_ptr + i).to(tl.float32)) + hc_eps,)
        else:
            h_pre = h_pre + (tl.load(read_ptr + rows * n + i, mask=is_row, other=0.0).to(tl.float32),)
        of_dy = of_dy + (squares,)
        of_h_in = of_h_in + (squares,)

    for start in range(0, D, BLOCK_D):
        d = (start + tl.arange(0, BLOCK_D))[None, :]
        ahead = d + BLOCK_D
        x_ahead = load_streams(x_ptr, rows, ahead, in_batch, D, n)
        dy_ahead = tl.load(dy_ptr + rows * D + ahead, mask=is_row & (ahead < D), other=0.0)
        weighted = dy.to(tl.float32) * tl.load(layer_norm_weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        h_in = weigh(x, h_pre, n)
        with_dy = ()
        with_h_in = ()
        for i in tl.static_range(n):
            wide = x[i].to(tl.float32)
            with_dy = with_dy + (of_dy[i] + own_sums(wide * weighted, BLOCK_T, BLOCK_D),)
            with_h_in = with_h_in + (of_h_in[i] + own_sums(wide * h_in, BLOCK_T, BLOCK_D),)
        of_dy = with_dy
        of_h_in = with_h_in
        squares += own_sums(h_in * h_in, BLOCK_T, BLOCK_D)
        x = x_ahead
        dy = dy_ahead

    r = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / D + layer_norm_eps)
    dots = ()
    along = tl.zeros([BLOCK_T, 1], tl.float32)
    for i in tl.static_range(n):
        dots = dots + (tl.sum(of_dy[i], axis=1, keep_dims=True),)
        along += h_pre[i] * dots[i]
    c = r * r * r / D * along
    for i in tl.static_range(n):
        dh_pre = r * dots[i] - c * tl.sum(of_h_in[i], axis=1, keep_dims=True)
        tl.store(dh_pre_ptr + rows * n + i, dh_pre.to(dh_pre_ptr.dtype.element_ty), mask=is_row)
    r_at = factors_ptr + (rows if TABLE == 0 else rows * TABLE + (M - n + 1))
    tl.store(r_at, r, mask=is_row)
    tl.store(r_at + (T if TABLE == 0 else 1), c, mask=is_row)


def normed_dh_pre(pre: PreBackward, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """dh_pre [T, n], in dread where h_in was read with `read`; and the factors [2, T] that pass B makes dh_in with, or
    the table that they are written to."""
    n, D = pre.x.shape[-2:]
    T, on = pre.inv_rms.numel(), device.of(pre.x.device)
    dh_pre = pre.filled_by_pass_a()
    factors = torch.empty((2, T), dtype=torch.float32, device=pre.x.device) if table is None else table
    tile = configs.normed_dh_pre(n, D, on)
    launch(
        mhc_pre_normed_dh_pre_kernel,
        (cdiv(T, tile.block_t),),
        x_ptr=pre.x,
        dy_ptr=pre.dh_in,
        layer_norm_weight_ptr=pre.layer_norm_weight,
        h_mix_ptr=pre.h_mix,
        inv_rms_ptr=pre.inv_rms,
        alpha_ptr=pre.alpha,
        bias_ptr=pre.bias,
        read_ptr=pre.read,
        dh_pre_ptr=dh_pre,
        factors_ptr=factors,
        T=T,
        D=D,
        hc_eps=pre.options.hc_eps,
        layer_norm_eps=pre.options.layer_norm_eps,
        n=n,
        M=pre.h_mix.shape[-1],
        TABLE=0 if table is None else table.shape[1],
        BLOCK_T=tile.block_t,
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )
    return dh_pre, factors
