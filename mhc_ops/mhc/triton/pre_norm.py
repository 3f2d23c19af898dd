"""mHC pre, backward, pass A where the layer's norm is fused: y = weight ⊙ h_in · r, r = rsqrt(mean(h_in²) + eps).

dh_in = r·(weight ⊙ dy) − c·h_in with c = r³/D·<weight ⊙ dy, h_in>. Pass A has all streams of a token, makes h_in again
and takes its dots beside those of weight ⊙ dy: dh_pre, r and c without dh_in. Pass B makes dh_in from r and c.
"""

import torch
import triton
import triton.language as tl

from ...core import device
from ...core.launch import launch
from ...core.sizes import cdiv, next_power_of_2
from . import configs


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
    dh_pre_ptr,
    factors_ptr,
    T,
    D,
    hc_eps,
    layer_norm_eps,
    n: tl.constexpr,
    M: tl.constexpr,
    TABLE: tl.constexpr,  # columns of a table with r and c of a token in a row, behind its maps; 0: they are apart
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_N)
    in_batch = t < T
    is_map = in_batch[:, None] & (i < n)[None, :]
    h_mix = tl.load(h_mix_ptr + t[:, None] * M + i[None, :], mask=is_map, other=0.0).to(tl.float32)
    inv_rms = tl.load(inv_rms_ptr + t, mask=in_batch, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    z = h_mix * inv_rms[:, None] * tl.load(alpha_ptr).to(tl.float32) + bias[None, :]
    h_pre = tl.where(is_map, tl.sigmoid(z) + hc_eps, 0.0)

    rows = (t[:, None] * n + i[None, :])[:, :, None]
    with_dy = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_D], tl.float32)
    with_h_in = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_D], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        in_row = d < D
        x = tl.load(x_ptr + rows * D + d[None, None, :], mask=is_map[:, :, None] & in_row[None, None, :], other=0.0)
        x = x.to(tl.float32)
        dy = tl.load(dy_ptr + t[:, None] * D + d[None, :], mask=in_batch[:, None] & in_row[None, :], other=0.0)
        weight = tl.load(layer_norm_weight_ptr + d, mask=in_row, other=0.0).to(tl.float32)
        h_in = tl.sum(h_pre[:, :, None] * x, axis=1)
        with_dy += x * (weight[None, :] * dy.to(tl.float32))[:, None, :]
        with_h_in += x * h_in[:, None, :]
        squares += h_in * h_in
    of_dy, of_h_in = tl.sum(with_dy, axis=2), tl.sum(with_h_in, axis=2)
    r = tl.rsqrt(tl.sum(squares, axis=1) / D + layer_norm_eps)
    c = r * r * r / D * tl.sum(h_pre * of_dy, axis=1)
    tl.store(dh_pre_ptr + t[:, None] * n + i[None, :], r[:, None] * of_dy - c[:, None] * of_h_in, mask=is_map)
    r_at = factors_ptr + (t if TABLE == 0 else t * TABLE + (n * n + n + 1))
    tl.store(r_at, r, mask=in_batch)
    tl.store(r_at + (T if TABLE == 0 else 1), c, mask=in_batch)


def normed_dh_pre(*, x, dy, layer_norm_weight, h_mix, inv_rms, alpha, bias, options, wide, table=None):
    """dh_pre [T, n], and the factors [2, T] that pass B makes dh_in with, or the table that they are written to."""
    n, D = x.shape[-2:]
    T, M, on = inv_rms.numel(), h_mix.shape[-1], device.of(x.device)
    dh_pre = torch.empty((T, n), dtype=torch.float32, device=x.device)
    factors = torch.empty((2, T), dtype=torch.float32, device=x.device) if table is None else table
    tile = configs.normed_dh_pre(n, D, wide, on)
    launch(
        mhc_pre_normed_dh_pre_kernel,
        (cdiv(T, tile.block_t),),
        x_ptr=x,
        dy_ptr=dy,
        layer_norm_weight_ptr=layer_norm_weight,
        h_mix_ptr=h_mix,
        inv_rms_ptr=inv_rms,
        alpha_ptr=alpha,
        bias_ptr=bias,
        dh_pre_ptr=dh_pre,
        factors_ptr=factors,
        T=T,
        D=D,
        hc_eps=options.hc_eps,
        layer_norm_eps=options.layer_norm_eps,
        n=n,
        M=M,
        TABLE=0 if table is None else configs.TABLE,
        BLOCK_T=tile.block_t,
        BLOCK_N=next_power_of_2(n),
        BLOCK_D=tile.block_d,
        num_warps=tile.warps,
    )
    return dh_pre, factors
