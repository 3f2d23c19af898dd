"""mHC pre, backward: two passes over x with a small step per token between them, then sums in fixed order.

1. dh_pre    pass A: dh_pre[t, i] = <dh_in[t], x[t, i]>
2. pre_dmaps.py, per token: back through σ, Sinkhorn and the scales to dh_mix; what multiplies x, dh_in and dx_next
   in dx
3. pre_dx.py, pass B: dx, and A = Σ_t dh_mix[t] ⊗ x[t] per slice of the tokens
4. pre_sums.py: dphi and dgamma from A, dalpha and dbias from the sums of step 2

dh_mix is kept without its factor alpha, which dx gets through phi and dphi at the end: alpha may be zero, and the sums
without it are still needed.
"""

from typing import Any

import tilelang.language as T
import torch
from torch import Tensor

from ...core import device
from ...core.sizes import cdiv
from ..options import PreOptions
from ..records import PreBackward
from . import configs
from .build import F32, NAMES, grid, kernel, lane_sum, readable, thread, vector
from .exact_products import phi_parts, weighted
from .pre_dmaps import back_through_maps
from .pre_dx import DxNext, mhc_pre_dx_kernel
from .pre_sums import sum_gradients


# dh_pre[t, i] = Σ_d dh_in[t, d]·x[t, i, d]
@kernel
def mhc_pre_dh_pre_kernel(*, n, D, dtype, in_dtype, threads):
    """A group of lanes takes a token."""
    tokens = T.dynamic("tokens")
    width = vector(threads, D, dtype, in_dtype)
    steps = cdiv(D, threads.lanes * width)

    @T.prim_func
    def mhc_pre_dh_pre(
        x: T.Tensor((tokens, n, D), dtype),
        dh_in: T.Tensor((tokens, D), in_dtype),
        dh_pre: T.Tensor((tokens, n), F32),
    ):
        with grid(T.ceildiv(tokens, threads.groups), threads=threads) as block:
            t = block * threads.groups + thread(threads) // threads.lanes
            lane = thread(threads) % threads.lanes
            total = T.alloc_local((n,), F32)
            x_own = T.alloc_local((n * width,), dtype)
            in_own = T.alloc_local((width,), in_dtype)
            if t < tokens:
                for i in T.unroll(n):
                    total[i] = 0.0
                for step in T.serial(steps):
                    if (step * threads.lanes + lane) * width < D:
                        d = (step * threads.lanes + lane) * width
                        for i in T.unroll(n):
                            for v in T.vectorized(width):
                                x_own[i * width + v] = x[t, i, d + v]
                        for v in T.vectorized(width):
                            in_own[v] = dh_in[t, d + v]
                        for i in T.unroll(n):
                            for v in T.unroll(width):
                                total[i] += T.cast(x_own[i * width + v], F32) * T.cast(in_own[v], F32)
                for i in T.unroll(n):
                    total[i] = lane_sum(total[i], threads)
                if lane == 0:
                    for i in T.unroll(n):
                        dh_pre[t, i] = total[i]

    return mhc_pre_dh_pre


def dh_pre_of(x: Tensor, dh_in: Tensor) -> Tensor:
    """Pass A: [T, n]"""
    n, D = x.shape[-2:]
    T = dh_in.numel() // D
    dh_pre = torch.empty((T, n), dtype=torch.float32, device=x.device)
    threads = configs.per_group(device.of(x.device))
    launch = mhc_pre_dh_pre_kernel(n=n, D=D, dtype=NAMES[x.dtype], in_dtype=NAMES[dh_in.dtype], threads=threads)
    launch(x=x.view(T, n, D), dh_in=dh_in.view(T, D), dh_pre=dh_pre)
    return dh_pre


def mhc_pre_bwd(**arguments: Any) -> None:
    pre_bwd(PreBackward(**arguments))


def mhc_head_bwd(*, hc_eps: float, dout: Tensor, **arguments: Any) -> None:
    """Pre's backward with h_in alone."""
    options = PreOptions(hc_eps=hc_eps, sinkhorn_iters=0)
    pre_bwd(PreBackward(**arguments, options=options, dh_in=dout, dh_post=None, dh_res=None, dx_next=None))


def pre_bwd(pre: PreBackward) -> None:
    assert pre.layer_norm_weight is None and pre.read is None, "prepare.py refuses it"
    if pre.zero_without_tokens():
        return
    x, dh_in = readable(pre.x), None if pre.dh_in is None else readable(pre.dh_in)
    alpha, bias, weighted_phi = pre.alpha.float().view(-1), pre.bias.float(), weighted(pre.phi, pre.gamma)
    n, exact = x.shape[-2], configs.arithmetic(NAMES[pre.x.dtype], device.of(x.device))
    dh_mix, factor, sums = back_through_maps(
        n=n,
        K=pre.phi.shape[1],
        exact=exact,
        alpha=alpha,
        bias=bias,
        options=pre.options,
        inv_rms=pre.inv_rms.float(),
        h_mix=pre.h_mix.float(),
        dh_pre=None if dh_in is None else dh_pre_of(x, dh_in),
        dh_post=pre.dh_post,
        dh_res=pre.dh_res,
    )
    order = configs.phi_order(exact.parts)
    phi = phi_parts(phi=weighted_phi, alpha=alpha, n=n, order=order, dtype=exact.dtype)
    A = pass_b(pre, x=x, dh_in=dh_in, dh_mix=dh_mix, phi=phi, factor=factor)
    sum_gradients(
        A=A,
        sums=sums,
        phi=pre.phi.float(),
        gamma=None if pre.gamma is None else pre.gamma.float(),
        weighted_phi=weighted_phi,
        alpha=alpha,
        n=n,
        exact=exact,
        dphi=pre.dphi,
        dgamma=pre.dgamma,
        dalpha=pre.dalpha,
        dbias=pre.dbias,
    )


def pass_b(
    pre: PreBackward,
    *,
    x: Tensor,
    dh_in: Tensor | None,
    dh_mix: Tensor,
    phi: Tensor,
    factor: Tensor,
) -> Tensor:
    """Fills dx; returns A [slices, M, K]. The kernel takes dx_next or dx_added: where a hook used x between two
    sublayers there are both, and dx_added is added by torch."""
    n, D = x.shape[-2:]
    (M, K), T = pre.phi.shape, pre.inv_rms.numel()
    mixed = pre.dx_next is not None
    assert not mixed or pre.options.sinkhorn_iters > 0
    dx_next = pre.dx_next if mixed else pre.dx_added
    if dx_next is not None:
        dx_next = readable(dx_next)
    dtype, on = NAMES[pre.x.dtype], device.of(x.device)
    exact, config = configs.arithmetic(dtype, on), configs.dx(n=n, D=D, M=M, dtype=dtype, on=on)
    steps, slices = configs.partition_rows(T, n=n, D=D, config=config, processors=on.processors)
    A = torch.empty((slices, M, K), dtype=torch.float32, device=x.device)
    launch = mhc_pre_dx_kernel(
        n=n,
        D=D,
        M=M,
        dtype=dtype,
        in_dtype=None if dh_in is None else NAMES[dh_in.dtype],
        dx_dtype=NAMES[pre.dx.dtype],
        residual=DxNext.NONE if dx_next is None else DxNext.MIXED if mixed else DxNext.ADDED,
        exact=exact,
        config=config,
    )
    launch(
        x=x.view(T, K),
        dh_in=x.new_empty(0, D) if dh_in is None else dh_in.view(T, D),
        dx_next=x.new_empty(0, K) if dx_next is None else dx_next.view(T, K),
        dh_mix=dh_mix,
        phi=phi,
        factor=factor,
        dx=pre.dx.view(T, K),
        A=A,
        steps=steps,
    )
    if mixed and pre.dx_added is not None:
        pre.dx.add_(pre.dx_added)
    return A
