"""mHC: the public functions. prepare.py checks their input and chooses a backend."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import TypeVarTuple, Unpack

from ..core.alike import is_readable
from ..core.call import run
from ..core.check import check_count, check_tensors
from . import prepare, reference
from .options import DEFAULTS, MapKeywords, PreKeywords, spelled_out
from .reference import Carry

Three = tuple[Tensor, Tensor, Tensor]
Maps = tuple[Tensor, Tensor, Any]  # the last, h_res, is None with residual="identity"
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Rest = TypeVarTuple("Rest")  # what a layer returns besides h_out


@overload
def mhc_forward_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    outflag: Literal[False] = False,
    norm_eps: float = DEFAULTS.norm_eps,
    hc_eps: float = DEFAULTS.hc_eps,
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
    norm_eps: float = DEFAULTS.norm_eps,
    hc_eps: float = DEFAULTS.hc_eps,
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
    norm_eps: float = DEFAULTS.norm_eps,
    hc_eps: float = DEFAULTS.hc_eps,
    *,
    gamma: Tensor | None = None,
    backend: str | None = None,
) -> Three | Six: ...


def mhc_forward_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    outflag: bool = False,
    norm_eps: float = DEFAULTS.norm_eps,
    hc_eps: float = DEFAULTS.hc_eps,
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
    return run(
        prepare.forward_pre,
        x=x,
        phi=phi,
        alpha=alpha,
        bias=bias,
        gamma=gamma,
        outflag=outflag,
        backend=backend,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
    )


@spelled_out
def mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    layer_norm_weight: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[PreKeywords],
) -> Maps:
    """What a layer reads from n residual streams, and the maps with which `mhc_post` writes its output back.

    z = (α0, α1, α2) · phi @ (gamma ⊙ v) · inv_rms + bias    inv_rms = rsqrt(mean(v²) + norm_eps)    v = x as [nD]
    h_pre = σ(z_pre) + hc_eps    h_post = post_mult·σ(z_post) + post_eps    h_res = sinkhorn(z_res)
    h_in = Σ_i h_pre[i]·x[i]

    x: [..., n, D]   phi: [n² + 2n, nD]   alpha: [3]   bias: [n² + 2n]   gamma: [n, D] or None for ones
    layer_norm_weight: [D], the RMSNorm that a sublayer begins with: h_in comes out as
    layer_norm_weight ⊙ h_in · rsqrt(mean(h_in²) + layer_norm_eps), rounded once
    residual: "identity" leaves every stream as it is: phi [2n, nD], alpha [2], bias [2n], and h_res is None; "logits"
    returns z_res as h_res. transposed: h_res is [new, old] for `mhc_post`, which takes the same flag; the values of
    this function are the same
    sinkhorn_eps: may be 0
    Returns h_in [..., D] typed as x, h_post [..., n] and h_res [..., n, n], doubly stochastic. Differentiable in x,
    phi, alpha, bias, gamma and layer_norm_weight.
    """
    return run(
        prepare.pre,
        x=x,
        phi=phi,
        alpha=alpha,
        bias=bias,
        gamma=gamma,
        layer_norm_weight=layer_norm_weight,
        backend=backend,
        **options,
    )


@spelled_out
def mhc_maps(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    backend: str | None = None,
    **options: Unpack[MapKeywords],
) -> Maps:
    """The maps of `mhc_pre` alone, each with its gradient: what the streams are read, written and mixed with.

    Arguments as in mhc_pre. Returns h_pre [..., n], h_post [..., n] and h_res [..., n, n]; `mhc_read(x, h_pre)` is
    the h_in of mhc_pre without its norm.
    """
    return run(prepare.maps, x=x, phi=phi, alpha=alpha, bias=bias, gamma=gamma, backend=backend, **options)


def mhc_read(x: Tensor, h_pre: Tensor, *, backend: str | None = None) -> Tensor:
    """What a layer reads from n residual streams: h_in = Σ_i h_pre[i]·x[i].

    x: [..., n, D]   h_pre: [..., n], as `mhc_maps` returns it
    Returns h_in [..., D] typed as x. Differentiable in both.
    """
    return run(prepare.read, x=x, h_pre=h_pre, backend=backend)


def mhc_post(
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    *,
    transposed: bool = DEFAULTS.transposed,
    backend: str | None = None,
) -> Tensor:
    """Write a layer's output back into the streams: x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i].

    x: [..., n, D]   h_out: [..., D]   h_post: [..., n]   h_res: [..., n, n], the maps as `mhc_pre` returns them
    Without h_res (None) every stream stays as it is: x_next[j] = h_post[j]·h_out + x[j].
    transposed: h_res is [new, old]: x_next[j] = h_post[j]·h_out + Σ_i h_res[j, i]·x[i]
    Returns x_next, shaped and typed as x. Differentiable in everything.
    """
    mixing = {"transposed": transposed} if transposed else {}  # each argument costs time in every call
    return run(prepare.post, x=x, h_out=h_out, h_post=h_post, h_res=h_res, backend=backend, **mixing)


@spelled_out
def mhc_post_pre(
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    layer_norm_weight: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[PreKeywords],
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """The boundary between two layers in one call: `mhc_post` of one, then `mhc_pre` of the next.

    x, h_out, h_post, h_res: as in mhc_post
    All others belong to the next layer, as in mhc_pre; transposed applies to both.
    Returns x_next, and h_in, h_post, h_res of the next layer. All have the bits of mhc_post and mhc_pre.
    Differentiable in everything.
    """
    return run(
        prepare.post_pre,
        x=x,
        h_out=h_out,
        h_post=h_post,
        h_res=h_res,
        phi=phi,
        alpha=alpha,
        bias=bias,
        gamma=gamma,
        layer_norm_weight=layer_norm_weight,
        backend=backend,
        **options,
    )


@overload
def mhc_layer(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    layer_norm_weight: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[PreKeywords],
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
    layer_norm_weight: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[PreKeywords],
) -> tuple[Tensor, Unpack[Rest]]: ...


@spelled_out
def mhc_layer(
    x: Tensor,
    layer: Callable[[Tensor], Any],
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    layer_norm_weight: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[PreKeywords],
) -> Any:
    """One layer inside its hyper-connection: `mhc_pre`, h_out = layer(h_in), `mhc_post`.

    layer: any callable from [..., D] to [..., D]; where it returns a tuple, its first element is h_out
    The other arguments are those of mhc_pre. Returns x_next, or (x_next, *rest) where the layer returned a tuple
    (h_out, *rest). The values are those of the three calls. The backward is faster: the two parts of dx, through the
    layer and past it, are added in one kernel and rounded once.
    """
    if not callable(layer):
        raise TypeError(f"mhc_layer: layer must be callable, got {type(layer).__name__}")
    h_in, carry = _enter(
        "mhc_layer",
        x,
        phi=phi,
        alpha=alpha,
        bias=bias,
        gamma=gamma,
        layer_norm_weight=layer_norm_weight,
        backend=backend,
        **options,
    )
    result = layer(h_in)
    h_out, *rest = result if isinstance(result, tuple) and result else (result,)
    x_next = _leave("mhc_layer", carry, h_out, backend)
    return (x_next, *rest) if isinstance(result, tuple) else x_next


@spelled_out
def mhc_enter(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    layer_norm_weight: Tensor | None = None,
    shifted: bool = False,
    read: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[PreKeywords],
) -> tuple[Tensor, Carry]:
    """The start of a stack of sublayers: `mhc_pre` of the first. For models that own their loop; see `HyperStack`.

    >>> h_in, carry = mhc_enter(x, *parameters[0])
    >>> for own in parameters[1:]:
    ...     h_in, carry = mhc_next(carry, layer(h_in), *own)
    >>> x = mhc_leave(carry, layer(h_in))

    Arguments as in mhc_pre. Returns h_in and what `mhc_next` or `mhc_leave` write the sublayer's output back with. The
    values are those of mhc_pre and mhc_post. A carry may be used more than once. Another backend
    takes it too, and then differentiates x as mhc_post does.

    shifted: every sublayer reads with the weights that the one before made of its own x (DeepSeek V4.1), this one with
    `read` [..., n], or stream 0 alone where that is None. The carry remembers: `carry.read` is h_pre of its sublayer.

    >>> h_in, carry = mhc_enter(x, *parameters[0], shifted=True, norm_eps=1e-20)
    >>> for own in parameters[1:]:
    ...     h_in, carry = mhc_next(carry, layer(h_in), *own, norm_eps=1e-20)
    >>> out = mhc_read(*mhc_leave(carry, layer(h_in)))
    """
    sublayer: dict[str, Any] = {"phi": phi, "alpha": alpha, "bias": bias, "gamma": gamma, **options}
    if shifted or read is not None:
        sublayer |= {"shifted": shifted, "read": read}
    return _enter("mhc_enter", x, layer_norm_weight=layer_norm_weight, backend=backend, **sublayer)


@spelled_out
def mhc_next(
    carry: Carry,
    h_out: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    layer_norm_weight: Tensor | None = None,
    backend: str | None = None,
    **options: Unpack[PreKeywords],
) -> tuple[Tensor, Carry]:
    """The boundary between two sublayers: `mhc_post` of the one that returned h_out, `mhc_pre` of the next.

    carry: of the sublayer that ended   h_out: [..., D], what it returned
    All others belong to the next one, as in mhc_pre.
    Returns h_in and the carry of the next sublayer, as mhc_enter does; `carry.x` is x between the two. The gradient
    that x gets past the sublayer needs no pass of its own. With the carry of a shifted stack, h_in is read
    with `carry.read`, whose gradient goes to the maps of the sublayer that ended.
    """
    _check_carry("mhc_next", carry)
    linked = torch.is_grad_enabled()
    shifted, transposed = carry.read is not None, bool(options.get("transposed"))
    if (linked and not prepare.is_link_of_kernels(carry.link)) or carry.transposed != transposed:
        return _enter(
            "mhc_next",
            _leave("mhc_next", carry, h_out, backend),
            phi=phi,
            alpha=alpha,
            bias=bias,
            gamma=gamma,
            layer_norm_weight=layer_norm_weight,
            backend=backend,
            **({"shifted": True, "read": carry.read} if shifted else {}),
            **options,
        )
    own: Any = {"read": carry.read, **options} if shifted else options
    parts = run(
        prepare.next_sublayer,
        link=carry.link if linked else None,
        x=carry.x,
        h_out=h_out,
        h_post=carry.h_post,
        h_res=carry.h_res,
        phi=phi,
        alpha=alpha,
        bias=bias,
        gamma=gamma,
        layer_norm_weight=layer_norm_weight,
        linked=linked,
        backend=backend,
        **own,
    )
    x_next, h_in, *parts = parts
    return h_in, _carried(x_next, parts, shifted, linked, transposed)


def mhc_leave(carry: Carry, h_out: Tensor, *, backend: str | None = None) -> Any:
    """The end of a stack of sublayers: `mhc_post` of the last, whose carry and output h_out [..., D] these are.

    Returns x, shaped and typed as that of the carry; of a shifted stack x and the weights p [..., n] with which a next
    sublayer would read: the model ends with `mhc_read(x, p)`.
    """
    _check_carry("mhc_leave", carry)
    x = _leave("mhc_leave", carry, h_out, backend)
    return x if carry.read is None else (x, carry.read)


def _enter(function: str, x: Tensor, **sublayer: Any) -> tuple[Tensor, Carry]:
    if isinstance(x, Tensor) and x.layout is torch.strided and not x.is_contiguous():
        x = x.contiguous()  # once for both parts
    linked, shifted = torch.is_grad_enabled(), sublayer.get("shifted") is True
    if shifted and sublayer.get("read") is None and isinstance(x, Tensor) and is_readable(x) and x.dim() > 1:
        sublayer["read"] = reference.first_stream(x)
    h_in, *parts = run(prepare.enter, function=function, x=x, linked=linked, **sublayer)
    return h_in, _carried(x, parts, shifted, linked, sublayer.get("transposed", False))


def _carried(x: Tensor, parts: Sequence[Any], shifted: bool, linked: bool, transposed: bool) -> Carry:
    """parts: h_post, h_res; where shifted, h_pre; where linked, the link"""
    h_post, h_res = parts[:2]
    return Carry(x, h_post, h_res, parts[2] if shifted else None, parts[-1] if linked else None, transposed)


def _leave(function: str, carry: Carry, h_out: Tensor, backend: str | None) -> Tensor:
    mixing = {"transposed": carry.transposed} if carry.transposed else {}
    return run(
        prepare.leave,
        function=function,
        link=carry.link,
        x=carry.x,
        h_out=h_out,
        h_post=carry.h_post,
        h_res=carry.h_res,
        backend=backend,
        **mixing,
    )


def _check_carry(function: str, carry: Carry) -> None:
    if not isinstance(carry, Carry):
        got = type(carry).__name__
        raise TypeError(f"{function}: carry must be what mhc_enter or mhc_next returned, got {got}")


def mhc_head(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None = None,
    *,
    norm_eps: float = DEFAULTS.norm_eps,
    hc_eps: float = DEFAULTS.hc_eps,
    backend: str | None = None,
) -> Tensor:
    """The n streams as one, at the end of a model: Σ_i h[i]·x[i], h = σ(α·phi @ (gamma ⊙ v)·inv_rms + bias) + hc_eps.

    x: [..., n, D]   phi: [n, nD]   alpha: [1] or []   bias: [n]   gamma: [n, D] or None for ones
    Returns [..., D] typed as x. Differentiable in x, phi, alpha, bias and gamma.
    """
    return run(
        prepare.head,
        x=x,
        phi=phi,
        alpha=alpha,
        bias=bias,
        gamma=gamma,
        norm_eps=norm_eps,
        hc_eps=hc_eps,
        backend=backend,
    )


def mhc_mean(x: Tensor, *, backend: str | None = None) -> Tensor:
    """The n streams as one, at the end of a model that learns no head: their mean.

    x: [..., n, D]
    Returns [..., D] typed as x. Differentiable.
    """
    return run(prepare.mean, x=x, backend=backend)


def mhc_expand(x: Tensor, n: int) -> Tensor:
    """The start of a model: n contiguous copies of x, [..., D] to [..., n, D]. Differentiable; plain torch."""
    check_tensors("mhc_expand", x=x)
    if x.dim() < 1:
        raise ValueError(f"mhc_expand: x must be [..., D], got {list(x.shape)}")
    check_count("mhc_expand", "n", n)
    return reference.mhc_expand(x, n)


def sinkhorn(
    logits: Tensor,
    iters: int = DEFAULTS.sinkhorn_iters,
    eps: float = DEFAULTS.sinkhorn_eps,
    *,
    backend: str | None = None,
) -> Tensor:
    """Doubly stochastic matrices from logits [..., n, n], by Sinkhorn-Knopp with the gradient of exactly its steps.

    c = softmax(logits, over j) + eps    c /= colsum(c) + eps

    Then, iters − 1 times, c /= rowsum(c) + eps and c /= colsum(c) + eps. Rows sum over j (dim −1), columns over i
    (dim −2).
    Returns fp32, as maps are (fp64 for fp64 logits).
    """
    return run(prepare.sinkhorn, logits=logits, iters=iters, eps=eps, backend=backend)


def mhc_backward(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    inv_rms: Tensor,
    h_mix: Tensor,
    h_pre: Tensor | None,  # not needed: it follows from h_mix
    h_post: Tensor | None,  # not needed: it follows from h_mix
    dh_in: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
    gamma: Tensor | None = None,
    norm_eps: float = DEFAULTS.norm_eps,  # not needed: it is in inv_rms
    hc_eps: float = DEFAULTS.hc_eps,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of mhc_forward_pre from its intermediates and cotangents. autograd does this for you.

    h_pre and h_post, which follow from h_mix and are recomputed, may be None; norm_eps is in inv_rms already. All three
    are in the signature because the guide's callers pass them.

    inv_rms, h_mix: as `mhc_forward_pre(..., outflag=True)` returned them on the same backend
    dh_in: [..., D]   dh_post: [..., n]   dh_res: [..., n, n], each may be None for zeros.
    Returns dx, dphi, dalpha, dbias, dgamma, typed as their tensors; dgamma is None without gamma.
    """
    with torch.no_grad():
        gradients = run(
            prepare.backward,
            x=x,
            phi=phi,
            alpha=alpha,
            bias=bias,
            gamma=gamma,
            inv_rms=inv_rms,
            h_mix=h_mix,
            h_pre=h_pre,
            h_post=h_post,
            dh_in=dh_in,
            dh_post=dh_post,
            dh_res=dh_res,
            norm_eps=norm_eps,
            hc_eps=hc_eps,
            backend=backend,
        )
    return *gradients[:4], None if gamma is None else gradients[4]
