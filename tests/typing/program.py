"""What a user's program sees of every public name. `mypy --strict` reads it; it is not run."""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import mhc_ops
from mhc_ops.compat.causal_conv1d import causal_conv1d_fn

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
Three = tuple[Tensor, Tensor, Tensor]
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
t = torch.zeros(1)
flag = bool(t.sum())


def two(h: Tensor) -> tuple[Tensor, int]:
    return h, 1


assert_type(mhc_ops.__version__, str)
with mhc_ops.use_backend("triton", conv="hip"):
    assert_type(mhc_ops.mhc_forward_pre(t, t, t, t), Three)
    assert_type(mhc_ops.mhc_forward_pre(t, t, t, t, False, gamma=t), Three)
    assert_type(mhc_ops.mhc_forward_pre(t, t, t, t, True), Six)
    assert_type(mhc_ops.mhc_forward_pre(t, t, t, t, outflag=True, norm_eps=1e-5), Six)
    found: Three | Six = mhc_ops.mhc_forward_pre(t, t, t, t, outflag=flag)

assert_type(mhc_ops.mhc_pre(t, t, t, t, post_mult=1, residual="identity", post_eps=1e-6), tuple[Tensor, Tensor, Any])
assert_type(mhc_ops.mhc_post(t, t, t, t, transposed=True), Tensor)
assert_type(mhc_ops.mhc_post(t, t, t, None, backend="reference"), Tensor)
assert_type(mhc_ops.mhc_post_pre(t, t, t, t, t, t, t), tuple[Tensor, Tensor, Tensor, Any])
assert_type(mhc_ops.mhc_maps(t, t, t, t, post_mult=1), tuple[Tensor, Tensor, Any])
assert_type(mhc_ops.mhc_read(t, t, backend="triton"), Tensor)
assert_type(mhc_ops.mhc_enter(t, t, t, t, layer_norm_weight=t, layer_norm_eps=1e-5), tuple[Tensor, mhc_ops.Carry])
h_in, carry = mhc_ops.mhc_next(mhc_ops.mhc_enter(t, t, t, t)[1], t, t, t, t, t, sinkhorn_iters=3)
assert_type((carry, carry.x, carry.read), tuple[mhc_ops.Carry, Tensor, Tensor | None])
ended: Tensor = mhc_ops.mhc_leave(carry, t)
h_in, carry = mhc_ops.mhc_enter(t, t, t, t, shifted=True, read=None)
ended, read = mhc_ops.mhc_leave(carry, t)
assert_type(mhc_ops.mhc_mean(t), Tensor)
assert_type(mhc_ops.mhc_layer(t, torch.tanh, t, t, t), Tensor)
assert_type(mhc_ops.mhc_layer(t, two, t, t, t, hc_eps=0.0), tuple[Tensor, int])
assert_type(mhc_ops.mhc_head(t, t, t, t, t), Tensor)
assert_type(mhc_ops.mhc_expand(t, 4), Tensor)
assert_type(mhc_ops.sinkhorn(t, 3, 1e-6), Tensor)
assert_type(mhc_ops.warmup(4, 256, torch.bfloat16, tokens=64, sinkhorn_iters=3), int)
assert_type(mhc_ops.warmup(4, 256, tokens=(1, 64), training=False), int)
assert_type(mhc_ops.conv_warmup(256, tokens=(1, 64), activation=None), int)
assert_type(mhc_ops.mhc_backward(t, t, t, t, t, t, t, t, None, t, None), Gradients)

assert_type(mhc_ops.mhc_forward_pre_triton(t, t, t, t), Three)
assert_type(mhc_ops.mhc_forward_pre_triton_optimized(t, t, t, t, outflag=True), Six)
assert_type(mhc_ops.mhc_forward_pre_tilelang(t, t, t, t, gamma=t), Three)
assert_type(mhc_ops.mhc_backward_triton(t, t, t, t, t, t, t, t, t, t, t, t), Gradients)
assert_type(mhc_ops.mhc_backward_tilelang(t, t, t, t, t, t, t, t, None, None, None), Gradients)
assert_type(mhc_ops.mhc_backward_manual(t, t, t, t, t, t, t, t, t, t, t, hc_eps=0.0), Gradients)
assert_type(mhc_ops.MHCForwardPreTileLang(1, 2, 4, 8)(t, t, t, t), Three)
assert_type(mhc_ops.MHCBackwardTileLang(1, 2, 4, 8, dtype=t.dtype)(t, t, t, t, t, t, t, t, t, t, t), Gradients)

assert_type(mhc_ops.causal_conv1d(t, t), Tensor)
assert_type(mhc_ops.causal_conv1d(t, t, t, output_final_state=True), tuple[Tensor, Tensor])
assert_type(mhc_ops.causal_conv1d(t, t, output_final_state=flag), Tensor | tuple[Tensor, Tensor])
assert_type(mhc_ops.causal_conv1d_update(t, t, t, activation="silu"), Tensor)
assert_type(mhc_ops.causal_conv1d_prefill(t, t, t, cu_seqlens=t, conv_state_indices=t), Tensor)
assert_type(mhc_ops.short_conv(t, t, t, residual=False), Tensor)
assert_type(causal_conv1d_fn(t, t), Tensor)
assert_type(mhc_ops.compat.causal_conv1d.causal_conv1d_fn(t, t, return_final_states=True), tuple[Tensor, Tensor])

tile_kernels, liger, megatron = mhc_ops.compat.tile_kernels, mhc_ops.compat.liger, mhc_ops.compat.megatron
assert_type(tile_kernels.mhc_pre(t, t, t, t, sinkhorn_repeat=20), tuple[Tensor, tuple[Tensor, Tensor]])
assert_type(liger.liger_mhc_coeffs(t, t, t, t, t, t, tmax=20), Three)
assert_type(megatron.fused_h_post_bda(t, t, t, t, None), Tensor)
assert_type(mhc_ops.convert.to_ours({"hc_attn_fn": t}, "deepseek"), dict[str, Tensor])
assert_type(mhc_ops.distributed.boundary_bytes(4, 256, 2, send="carry"), int)
assert_type(mhc_ops.hub.files(), dict[str, str])

assert_type(mhc_ops.MHCBlock(n=4, D=8, dtype=torch.bfloat16).forward(t), Three)
assert_type(mhc_ops.HyperHead(4, 8, gamma=True).forward(t), Tensor)
assert_type(mhc_ops.ShortConv(4, 8, device="cpu").forward(t), Tensor)
assert_type(mhc_ops.HyperConnection(nn.Linear(8, 8), 4, 8).phi, nn.Parameter)
assert_type(mhc_ops.HyperStack(mhc_ops.HyperConnection(nn.Linear(8, 8), 4, 8, layer_norm=True)).recompute, int)
assert_type(mhc_ops.HyperStack(shifted=True, first=False, last=False).shifted, bool)
assert_type(mhc_ops.parameter_groups(nn.Linear(8, 8), lr=1e-3, weight_decay=0.1), list[dict[str, Any]])
with mhc_ops.metrics(nn.Linear(8, 8)) as health:
    assert_type(health, mhc_ops.Metrics)
    assert_type(health.result(), dict[str, float])

# Each of these must be an error: --strict reports an ignore that is not needed.
mhc_ops.mhc_pre(t, t, t)  # type: ignore[call-arg]
mhc_ops.mhc_pre(t, t, t, t, norm_epsilon=1e-6)  # type: ignore[call-arg]
mhc_ops.mhc_post(t, t, t, 1.0)  # type: ignore[arg-type]
mhc_ops.mhc_maps(t, t, t, t, layer_norm_eps=1e-6)  # type: ignore[call-arg]
mhc_ops.mhc_next(t, t, t, t, t)  # type: ignore[arg-type]
mhc_ops.sinkhorn(t, iters="20")  # type: ignore[arg-type]
mhc_ops.mhc_backward_manual(t, t, t, t)  # type: ignore[call-arg]
mhc_ops.mhc_forward_pre_triton(t, t, t, t, backend="reference")  # type: ignore[call-overload]
mhc_ops.causal_conv1d(t, t, dilatation=2)  # type: ignore[call-overload]
mhc_ops.causal_conv1d_update(t, t)  # type: ignore[call-arg]
mhc_ops.short_conv(t, t)  # type: ignore[call-arg]
mhc_ops.use_backend(conv=1)  # type: ignore[arg-type]
mhc_ops.distribute()  # type: ignore[attr-defined]
