"""mHC: the public functions. Each checks its input, chooses a backend and calls the reference or the kernels."""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import TypeVarTuple, Unpack

from ..core.backend import choose
from ..core.check import (
    KERNEL_FLOATS,
    check_count,
    check_dtype,
    check_numbers,
    check_range,
    check_shapes,
    check_tensors,
)
from ..core.precision import accumulate
from ..core.replay import replayed
from . import contracts, manual, reference

MAX_STREAMS = 8  # of the kernels; the reference takes any n
Three = tuple[Tensor, Tensor, Tensor]
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Rest = TypeVarTuple("Rest")  # what a layer returns besides h_out


@overload
def mhc_forward_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    outflag: Literal[False] = False,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    *,
    gamma: Tensor | None = None,
    backend: str | None = None,
) -> Three: ...


@overload
def mhc_forward_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    outflag: Literal[True],
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    *,
    gamma: Tensor | None = None,
    backend: str | None = None,
) -> Six: ...


@overload
def mhc_forward_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    outflag: bool,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    *,
    gamma: Tensor | None = None,
    backend: str | None = None,
) -> Three | Six: ...


@replayed
def mhc_forward_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    outflag: bool = False,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    *,
    gamma: Tensor | None = None,
    backend: str | None = None,
) -> Three | Six:
    """What a layer reads from n residual streams, and the maps that write its output back (h_res without Sinkhorn).

    inv_rms = rsqrt(mean(v²) + norm_eps)    h_mix = phi @ (gamma ⊙ v)    z = (α0, α1, α2) · h_mix · inv_rms + bias
    h_pre = σ(z_pre) + hc_eps    h_post = 2σ(z_post)    h_res = z_res    h_in = Σ_i h_pre[i]·x[i]

    x: [..., n, D]   phi: [n² + 2n, nD]   alpha: [3]   bias: [n² + 2n]   gamma: [n, D] or None for ones
    Returns h_in [..., D] typed as x, h_post [..., n], h_res [..., n, n]; with outflag also inv_rms [...],
    h_mix [..., n² + 2n], h_pre [..., n], which carry no gradient. Differentiable in x, phi, alpha, bias and gamma.
    """
    function = "mhc_forward_pre"
    numbers = check_numbers(function, norm_eps=norm_eps, hc_eps=hc_eps)
    outputs = _pre(function, x, phi, alpha, bias, gamma, (*numbers, 2.0, 0, 0.0), backend)
    return outputs if outflag else outputs[:3]


@replayed
def mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    post_mult: float = 2.0,
    sinkhorn_iters: int = 20,
    sinkhorn_eps: float = 1e-6,
    backend: str | None = None,
) -> Three:
    """What a layer reads from n residual streams, and the maps with which `mhc_post` writes its output back.

    z = (α0, α1, α2) · phi @ (gamma ⊙ v) · inv_rms + bias    inv_rms = rsqrt(mean(v²) + norm_eps)    v = x as [nD]
    h_pre = σ(z_pre) + hc_eps    h_post = post_mult·σ(z_post)    h_res = sinkhorn(z_res)    h_in = Σ_i h_pre[i]·x[i]

    x: [..., n, D]   phi: [n² + 2n, nD]   alpha: [3]   bias: [n² + 2n]   gamma: [n, D] or None for ones
    Returns h_in [..., D] typed as x, h_post [..., n] and h_res [..., n, n], doubly stochastic. Differentiable in x,
    phi, alpha, bias and gamma.
    """
    options = _options("mhc_pre", norm_eps, hc_eps, post_mult, sinkhorn_iters, sinkhorn_eps)
    h_in, h_post, h_res, *_ = _pre("mhc_pre", x, phi, alpha, bias, gamma, options, backend)
    return h_in, h_post, h_res


def _pre(
    function: str,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    options: tuple[Any, ...],
    backend: str | None,
) -> Six:
    _check_pre(function, x, phi, alpha, bias, gamma)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return reference.mhc_pre(x, phi, alpha, bias, gamma, *options)
    _check_kernel_limits(function, x, name)
    return contracts.mhc_pre_fwd(*_contiguous(x, phi, alpha, bias, gamma), *options, name)


@replayed
def mhc_post(x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor, *, backend: str | None = None) -> Tensor:
    """Write a layer's output back into the streams: x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i].

    x: [..., n, D]   h_out: [..., D]   h_post: [..., n]   h_res: [..., n, n], the maps as `mhc_pre` returns them
    Returns x_next, shaped and typed as x. Differentiable in everything.
    """
    function = "mhc_post"
    _check_post(function, x, h_out, h_post, h_res)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return reference.mhc_post(x, h_out, h_post, h_res)
    _check_kernel_limits(function, x, name)
    return contracts.mhc_post_fwd(*_contiguous(x, h_out, h_post, h_res), name)


@replayed
def mhc_post_pre(
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    post_mult: float = 2.0,
    sinkhorn_iters: int = 20,
    sinkhorn_eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The boundary between two layers in one call: `mhc_post` of one, then `mhc_pre` of the next.

    x, h_out, h_post, h_res: as in mhc_post; phi, alpha, bias, gamma and the options: the next layer's, as in mhc_pre
    Returns x_next, and h_in, h_post, h_res of the next layer. x_next has the bits of mhc_post; in Triton the
    projection for the next layer's maps is made while x_next is still in registers. Differentiable in everything.
    """
    function = "mhc_post_pre"
    options = _options(function, norm_eps, hc_eps, post_mult, sinkhorn_iters, sinkhorn_eps)
    _check_post(function, x, h_out, h_post, h_res)
    _check_pre(function, x, phi, alpha, bias, gamma)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        outputs = reference.mhc_post_pre(x, h_out, h_post, h_res, phi, alpha, bias, gamma, *options)
    else:
        _check_kernel_limits(function, x, name)
        tensors = _contiguous(x, h_out, h_post, h_res, phi, alpha, bias, gamma)
        outputs = contracts.mhc_post_pre_fwd(*tensors, *options, name)
    x_next, h_in, h_post, h_res, *_ = outputs
    return x_next, h_in, h_post, h_res


@overload
def mhc_layer(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    post_mult: float = 2.0,
    sinkhorn_iters: int = 20,
    sinkhorn_eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor: ...


@overload
def mhc_layer(
    x: Tensor,
    layer: Callable[[Tensor], tuple[Tensor, Unpack[Rest]]],
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    post_mult: float = 2.0,
    sinkhorn_iters: int = 20,
    sinkhorn_eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, Unpack[Rest]]: ...


def mhc_layer(
    x: Tensor,
    layer: Callable[[Tensor], Any],
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    post_mult: float = 2.0,
    sinkhorn_iters: int = 20,
    sinkhorn_eps: float = 1e-6,
    backend: str | None = None,
) -> Any:
    """One layer inside its hyper-connection: `mhc_pre`, h_out = layer(h_in), `mhc_post`.

    layer: any callable from [..., D] to [..., D]; where it returns a tuple, its first element is h_out
    The other arguments are those of mhc_pre. Returns x_next, or (x_next, *rest) where the layer returned a tuple
    (h_out, *rest). The values are those of the three calls. The backward is faster: the two parts of dx, through the
    layer and past it, are added in one kernel and rounded once.
    """
    function = "mhc_layer"
    if not callable(layer):
        raise TypeError(f"{function}: layer must be callable, got {type(layer).__name__}")
    options = _options(function, norm_eps, hc_eps, post_mult, sinkhorn_iters, sinkhorn_eps)
    _check_pre(function, x, phi, alpha, bias, gamma)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        streams = accumulate(x)  # once: the two parts of dx meet before they are rounded
        h_in, h_post, h_res, *_ = reference.mhc_pre(streams, phi, alpha, bias, gamma, *options)
        h_in = h_in.to(x.dtype)
    else:
        _check_kernel_limits(function, x, name)
        streams, *parameters = _contiguous(x, phi, alpha, bias, gamma)
        linked = torch.is_grad_enabled()
        if linked:
            h_in, h_post, h_res, link, *_ = contracts.mhc_layer_pre(streams, *parameters, *options, name)
        else:
            h_in, h_post, h_res, *_ = contracts.mhc_pre_fwd(streams, *parameters, *options, name)
    result = layer(h_in)
    h_out, *rest = result if isinstance(result, tuple) and result else (result,)
    _check_post(function, x, h_out, h_post, h_res)
    if name == "reference":
        x_next = reference.mhc_post(streams, h_out, h_post, h_res).to(x.dtype)
    elif linked:
        x_next = contracts.mhc_layer_post(link, streams, h_out.contiguous(), h_post, h_res, name)
    else:
        x_next = contracts.mhc_post_fwd(streams, h_out.contiguous(), h_post, h_res, name)
    return (x_next, *rest) if isinstance(result, tuple) else x_next


@replayed
def mhc_head(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """The n streams as one, at the end of a model: Σ_i h[i]·x[i], h = σ(α·phi @ (gamma ⊙ v)·inv_rms + bias) + hc_eps.

    x: [..., n, D]   phi: [n, nD]   alpha: [1] or []   bias: [n]   gamma: [n, D] or None for ones
    Returns [..., D] typed as x. Differentiable in x, phi, alpha, bias and gamma.
    """
    function = "mhc_head"
    _check_parameters(function, x, phi, alpha, bias, gamma)
    n, D = x.shape[-2:]
    check_shapes(function, phi=(phi, (n, n * D)), bias=(bias, (n,)))
    if alpha.shape not in ((1,), ()):
        raise ValueError(f"{function}: alpha must be [1] or [], got {list(alpha.shape)}")
    numbers = check_numbers(function, norm_eps=norm_eps, hc_eps=hc_eps)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return reference.mhc_head(x, phi, alpha, bias, gamma, *numbers)
    _check_kernel_limits(function, x, name)
    return contracts.mhc_head_fwd(*_contiguous(x, phi, alpha, bias, gamma), *numbers, name)[0]


def mhc_expand(x: Tensor, n: int) -> Tensor:
    """The start of a model: n contiguous copies of x, [..., D] to [..., n, D]. Differentiable; plain torch."""
    check_tensors("mhc_expand", x=x)
    if x.dim() < 1:
        raise ValueError(f"mhc_expand: x must be [..., D], got {list(x.shape)}")
    check_count("mhc_expand", "n", n)
    return reference.mhc_expand(x, n)


@replayed
def sinkhorn(logits: Tensor, iters: int = 20, eps: float = 1e-6, *, backend: str | None = None) -> Tensor:
    """Doubly stochastic matrices from logits [..., n, n], by Sinkhorn-Knopp with the gradient of exactly its steps.

    c = softmax(logits, over j) + eps;  c /= colsum(c) + eps;  then iters − 1 times:  c /= rowsum(c) + eps,
    c /= colsum(c) + eps. Rows sum over j (dim −1), columns over i (dim −2).
    Returns fp32, as maps are (fp64 for fp64 logits).
    """
    function = "sinkhorn"
    check_tensors(function, logits=logits)
    check_count(function, "iters", iters)
    (eps,) = check_numbers(function, eps=eps)
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2] or logits.shape[-1] < 1:
        raise ValueError(f"{function}: logits must be [..., n, n] with n at least 1, got {list(logits.shape)}")
    name = choose(function, "mhc", backend, logits.device)
    if name == "reference":
        return reference.sinkhorn(logits, iters, eps)
    _check_kernel_limits(function, logits, name, "logits")
    return contracts.sinkhorn_fwd(logits.contiguous(), iters, eps, name)


@torch.no_grad()
def mhc_backward(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    inv_rms: Tensor,
    h_mix: Tensor,
    h_pre: Tensor,
    h_post: Tensor,
    dh_in: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
    gamma: Tensor | None = None,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of mhc_forward_pre from its intermediates and cotangents. autograd does this for you.

    inv_rms, h_mix, h_pre, h_post: as `mhc_forward_pre(..., outflag=True)` returned them on the same backend (h_pre and
    h_post follow from h_mix and are recomputed; norm_eps is in inv_rms already).
    dh_in: [..., D]   dh_post: [..., n]   dh_res: [..., n, n], each may be None for zeros.
    Returns dx, dphi, dalpha, dbias, dgamma, typed as their tensors; dgamma is None without gamma.
    """
    function = "mhc_backward"
    _check_pre(function, x, phi, alpha, bias, gamma)
    *outer, n, D = x.shape
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "inv_rms": (inv_rms, (*outer,)),
        "h_mix": (h_mix, (*outer, n * n + 2 * n)),
        "h_pre": (h_pre, (*outer, n)),
        "h_post": (h_post, (*outer, n)),
        "dh_in": (dh_in, (*outer, D)),
        "dh_post": (dh_post, (*outer, n)),
        "dh_res": (dh_res, (*outer, n, n)),
    }
    optional = ("dh_in", "dh_post", "dh_res")
    given = {key: pair for key, pair in shapes.items() if pair[0] is not None or key not in optional}
    check_tensors(function, x=x, **{key: tensor for key, (tensor, _) in given.items()})
    check_shapes(function, **given)
    _, hc_eps = check_numbers(function, norm_eps=norm_eps, hc_eps=hc_eps)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return manual.mhc_pre_bwd(x, phi, alpha, bias, gamma, inv_rms, h_mix, dh_in, dh_post, dh_res, hc_eps)
    _check_kernel_limits(function, x, name)
    inputs = _contiguous(x, phi, alpha, bias, gamma, inv_rms, h_mix, dh_in, dh_post, dh_res)
    *gradients, dgamma = contracts.mhc_pre_bwd(*inputs, None, hc_eps, 2.0, 0, 0.0, name)
    return *gradients, None if gamma is None else dgamma


def _check_parameters(function: str, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> None:
    tensors = {"x": x, "phi": phi, "alpha": alpha, "bias": bias}
    check_tensors(function, **tensors if gamma is None else {**tensors, "gamma": gamma})
    _check_streams(function, x)
    if gamma is not None:
        check_shapes(function, gamma=(gamma, tuple(x.shape[-2:])))


def _check_streams(function: str, x: Tensor) -> None:
    if x.dim() < 2 or x.shape[-2] < 1 or x.shape[-1] < 1:
        raise ValueError(f"{function}: x must be [..., n, D] with n and D at least 1, got {list(x.shape)}")


def _check_pre(function: str, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> None:
    _check_parameters(function, x, phi, alpha, bias, gamma)
    n, D = x.shape[-2:]
    M = n * n + 2 * n
    check_shapes(function, phi=(phi, (M, n * D)), alpha=(alpha, (3,)), bias=(bias, (M,)))


def _check_post(function: str, x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor) -> None:
    check_tensors(function, x=x, h_out=h_out, h_post=h_post, h_res=h_res)
    _check_streams(function, x)
    *outer, n, D = x.shape
    check_shapes(function, h_out=(h_out, (*outer, D)), h_post=(h_post, (*outer, n)), h_res=(h_res, (*outer, n, n)))


def _options(
    function: str, norm_eps: float, hc_eps: float, post_mult: float, sinkhorn_iters: int, sinkhorn_eps: float
) -> tuple[Any, ...]:
    """The options of pre, checked, in the order of the contracts."""
    check_count(function, "sinkhorn_iters", sinkhorn_iters)
    numbers = {"norm_eps": norm_eps, "hc_eps": hc_eps, "post_mult": post_mult, "sinkhorn_eps": sinkhorn_eps}
    norm_eps, hc_eps, post_mult, sinkhorn_eps = check_numbers(function, **numbers)
    return norm_eps, hc_eps, post_mult, sinkhorn_iters, sinkhorn_eps


def _check_kernel_limits(function: str, x: Tensor, backend: str, name: str = "x") -> None:
    context = f" for backend {backend!r}"
    check_dtype(function, name, x, KERNEL_FLOATS, context)
    check_range(function, "n", x.shape[-2], 1, MAX_STREAMS, context)


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
