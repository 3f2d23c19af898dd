"""Every mHC op on meta tensors, for tests that compile what Triton's launchers launch."""

import torch

from mhc_ops.mhc import contracts
from mhc_ops.mhc.options import PreOptions, Residual

SOME, FEW = 100, 16  # tokens, where the projection cuts phi into parts itself, and where one launch does everything
fp32 = torch.float32


def launch_all(*sizes, ops=None, **form):
    """Every op, or those of these names, forward and backward, on meta tensors: shapes and types, no storage."""
    for name, inputs in all_calls(*sizes, **form):
        if ops is None or name in ops:
            getattr(contracts, name).launch(backend="triton", **inputs)


def all_calls(
    T, n, D, dtype, gamma=True, normed=False, mixed=True, transposed=False, shifted=False, eps=1e-6, on="meta"
):
    """Names of ops and their inputs. normed: with the layer's norm; mixed: with a map as residual, which may be
    transposed; shifted: h_in is read with given weights; eps: of Sinkhorn; on: a device"""
    found = []

    def launch(name, **inputs):
        found.append((name, inputs))

    sections = [n, n, n * n] if mixed else [n, n]
    M = sum(sections)

    def tensor(*shape, dtype=fp32):
        return torch.empty(shape, dtype=dtype, device=on)

    x, h_out = tensor(T, n, D, dtype=dtype), tensor(T, D, dtype=dtype)
    h_post, h_res, inv_rms, h_mix = tensor(T, n), tensor(T, n, n) if mixed else None, tensor(T), tensor(T, M)
    weight, read = tensor(n, D) if gamma else None, tensor(T, n) if shifted else None
    residual = (Residual.SINKHORN if mixed else Residual.IDENTITY).value
    options = PreOptions(residual=residual, transposed=transposed, sinkhorn_eps=eps)
    maps = {"phi": tensor(M, n * D), "alpha": tensor(len(sections)), "bias": tensor(M), "gamma": weight}
    maps["options"] = options
    pre = {**maps, "layer_norm_weight": tensor(D) if normed else None}
    head = {"phi": tensor(n, n * D), "alpha": tensor(1), "bias": tensor(n), "gamma": weight, "hc_eps": 1e-6}
    boundary = {"x": x, "h_out": h_out, "h_post": h_post, "h_res": h_res}
    post = {**boundary, "transposed": transposed}
    kept = {"inv_rms": inv_rms, "h_mix": h_mix}
    for dx_next in (None, x):
        cotangents = {"dh_in": h_out, "dh_post": h_post, "dh_res": h_res, "dh_pre": read, "dx_next": dx_next}
        launch("mhc_pre_bwd", x=x, read=read, **pre, **kept, **cotangents)
    for streams in (x, tensor(SOME, n, D, dtype=dtype), tensor(FEW, n, D, dtype=dtype)):
        launch("mhc_maps_fwd", x=streams, **maps)
        launch("mhc_pre_fwd", x=streams, **pre)
        launch("mhc_head_fwd", x=streams, **head, norm_eps=1e-6)
    launch("mhc_layer_pre", x=x, read=read, **pre)
    if shifted:
        few = {name: None if t is None else t[:FEW] for name, t in {**boundary, "read": read}.items()}
        launch("mhc_next_fwd", **few, **pre, link=None, linked=False)
    launch("mhc_post_fwd", **post)
    for residual in (False, True):
        launch("mhc_post_bwd", **post, dx_next=x, residual=residual)
    launch("mhc_post_pre_fwd", **boundary, **pre)
    launch("mhc_next_fwd", **boundary, read=read, **pre, link=None, linked=False)
    cotangents = {"dx_next": x, "dh_in": h_out, "dh_post_next": h_post, "dh_res_next": h_res}
    launch("mhc_post_pre_bwd", **boundary, **pre, x_next=x, **kept, **cotangents)
    of_next = {"dx_next": None, "dh_in": h_out, "dh_post_next": h_post, "dh_res_next": h_res, "dlink_next": x}
    of_next |= {"read": read, "dh_pre_next": read}
    launch("mhc_next_bwd", **boundary, **pre, x_next=x, **kept, **of_next)
    launch("mhc_maps_bwd", x=x, **maps, **kept, dh_pre=h_post, dh_post=h_post, dh_res=h_res)
    launch("mhc_read_fwd", x=x, h_pre=h_post)
    launch("mhc_read_bwd", x=x, h_pre=h_post, dh_in=h_out)
    launch("mhc_mean_fwd", x=x, n=n)
    launch("mhc_mean_bwd", n=n, dout=h_out)
    launch("mhc_head_bwd", x=x, **head, inv_rms=inv_rms, h_mix=tensor(T, n), dout=h_out)
    logits = tensor(T, n, n)
    launch("sinkhorn_fwd", logits=logits, iters=20, eps=eps)
    launch("sinkhorn_bwd", logits=logits, iters=20, eps=eps, dh_res=logits)
    return found
