"""Every mHC op on meta tensors, for tests that compile what Triton's launchers launch."""

import cross_compile
import torch
from mhc_kernels import fp32

from mhc_ops.mhc import contracts
from mhc_ops.mhc.options import PreOptions, Residual

SOME, FEW = 100, 16  # tokens, where the projection cuts phi into parts itself, and where one launch does everything


def compiled(target, monkeypatch, *launches, kernels=None):
    """All kernels that these launches compile, or those of these names; none is as cross_compile.check forbids."""
    cross_compile.skip_if_too_old(target)
    with cross_compile.compiling_for(target, monkeypatch, kernels) as found:
        for arguments in launches:
            launch_all(**arguments)
    cross_compile.check(target, found)
    return list({kernel.key: kernel for kernel in found}.values())


def launch_all(*sizes, ops=None, **form):
    """Every op, or those of these names, forward and backward, on meta tensors: shapes and types, no storage."""
    for name, inputs in all_calls(*sizes, **form):
        if ops is None or name in ops:
            getattr(contracts, name).launch(backend="triton", **inputs)


def all_calls(
    T, n, D, dtype, gamma=True, normed=False, mixed=True, transposed=False, shifted=False, eps=1e-6, on="meta"
):
    """Names of ops and their inputs. normed: with the layer's norm, which may be a type; mixed: with a map as residual,
    which may be transposed; shifted: h_in is read with given weights; eps: of Sinkhorn; on: a device"""
    sections = [n, n, n * n] if mixed else [n, n]
    M = sum(sections)

    def tensor(*shape, dtype=fp32):
        return torch.empty(shape, dtype=dtype, device=on)

    residual = (Residual.SINKHORN if mixed else Residual.IDENTITY).value
    x, h_out, h_post, logits = tensor(T, n, D, dtype=dtype), tensor(T, D, dtype=dtype), tensor(T, n), tensor(T, n, n)
    h_res, read = logits if mixed else None, h_post if shifted else None
    given = {"x": x, "h_out": h_out, "h_post": h_post, "h_res": h_res, "read": read, "link": None, "linked": False}
    given |= {"phi": tensor(M, n * D), "alpha": tensor(len(sections)), "bias": tensor(M)}
    given |= {"gamma": tensor(n, D) if gamma else None}
    given |= {"layer_norm_weight": tensor(D, dtype=fp32 if normed is True else normed) if normed else None}
    given |= {"options": PreOptions(residual=residual, transposed=transposed, sinkhorn_eps=eps)}
    given |= {"transposed": transposed, "norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 20, "eps": eps, "n": n}
    given |= {"residual": False, "h_pre": h_post, "logits": logits}
    given |= {"x_next": x, "inv_rms": tensor(T), "h_mix": tensor(T, M)}
    given |= {"dh_in": h_out, "dout": h_out, "dx_next": x, "dlink_next": x}
    for name, cotangent in {"dh_pre": read, "dh_post": h_post, "dh_res": h_res}.items():
        given |= {name: cotangent, f"{name}_next": cotangent}
    head = {"phi": tensor(n, n * D), "alpha": tensor(1), "bias": tensor(n)}
    found = []

    def launch(name, **other):
        found.append((name, {key: (given | other)[key] for key in getattr(contracts, name).inputs}))

    launch("mhc_pre_bwd", dx_next=None)
    launch("mhc_pre_bwd")
    for streams in (x, tensor(SOME, n, D, dtype=dtype), tensor(FEW, n, D, dtype=dtype)):
        launch("mhc_maps_fwd", x=streams)
        launch("mhc_pre_fwd", x=streams)
        launch("mhc_head_fwd", x=streams, **head)
    launch("mhc_layer_pre")
    if shifted:
        few = ("x", "h_out", "h_post", "h_res", "read")
        launch("mhc_next_fwd", **{name: None if given[name] is None else given[name][:FEW] for name in few})
    launch("mhc_post_fwd")
    launch("mhc_post_bwd")
    launch("mhc_post_bwd", residual=True)
    for name in ("mhc_post_pre_fwd", "mhc_next_fwd", "mhc_post_pre_bwd"):
        launch(name)
    launch("mhc_next_bwd", dx_next=None)
    launch("mhc_maps_bwd", dh_pre=h_post)
    for name in ("mhc_read_fwd", "mhc_read_bwd", "mhc_mean_fwd", "mhc_mean_bwd"):
        launch(name)
    launch("mhc_head_bwd", **head, h_mix=tensor(T, n))
    launch("sinkhorn_fwd")
    launch("sinkhorn_bwd", dh_res=logits)
    return found
