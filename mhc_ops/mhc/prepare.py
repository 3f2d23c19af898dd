"""What the public functions do first: check the input, choose a backend, and name the op to call, or return the
reference's result. Eager calls that are like an earlier one skip this (core/call.py)."""

from typing import Any

from torch import Tensor

from ..core.alike import is_readable
from ..core.backend import choose
from ..core.call import Request
from ..core.check import (
    KERNEL_FLOATS,
    check_count,
    check_dtype,
    check_flag,
    check_numbers,
    check_range,
    check_shapes,
    check_tensors,
)
from . import backward_formula, contracts, reference
from .options import DEFAULTS, NOT_IN_TILELANG, MapKeywords, PreOptions, Residual, checked

MAX_STREAMS = 8  # of the kernels; the reference takes any n


def forward_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    outflag: bool,
    backend: str | None,
    **numbers: float,
) -> Any:
    check_flag("mhc_forward_pre", "outflag", outflag)
    options = checked("mhc_forward_pre", {**numbers, "residual": Residual.LOGITS.value})
    returns = contracts.PreOutputs._fields[: 6 if outflag else 3]
    return _pre_on(
        function="mhc_forward_pre",
        x=x,
        phi=phi,
        alpha=alpha,
        bias=bias,
        gamma=gamma,
        layer_norm_weight=None,
        options=options,
        backend=backend,
        returns=returns,
    )


def pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    backend: str | None,
    **given: Any,
) -> Any:
    returns = contracts.PreOutputs._fields[:3]
    options = checked("mhc_pre", given)
    return _pre_on(
        function="mhc_pre",
        x=x,
        phi=phi,
        alpha=alpha,
        bias=bias,
        gamma=gamma,
        layer_norm_weight=layer_norm_weight,
        options=options,
        backend=backend,
        returns=returns,
    )


def _pre_on(
    function: str,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
    backend: str | None,
    returns: tuple[str, ...],
) -> Any:
    """returns: outputs of the op"""
    check_pre(function, x, phi, alpha, bias, gamma, options)
    check_layer_norm(function, x, layer_norm_weight)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return reference.mhc_pre(x, phi, alpha, bias, gamma, layer_norm_weight, options)[: len(returns)]
    check_kernels(function, x, layer_norm_weight, name)
    check_kernel_options(function, options, name)
    inputs = _pre_inputs(x, phi, alpha, bias, gamma, layer_norm_weight, options)
    return Request(contracts.mhc_pre_fwd, name, inputs, _there(returns, options))


def _there(outputs: tuple[str, ...], options: PreOptions) -> tuple[str | None, ...]:
    """The outputs that a function returns, with None for h_res where the residual is the identity."""
    without = ("h_res", "h_res_next") if options.residual == Residual.IDENTITY else ()
    return tuple(None if name in without else name for name in outputs)


def _pre_inputs(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    options: PreOptions,
) -> dict[str, Any]:
    """The inputs of an op, by their names."""
    parameters = {"phi": phi, "alpha": alpha, "bias": bias, "gamma": gamma, "layer_norm_weight": layer_norm_weight}
    return {"x": x, **parameters, "options": options}


def maps(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, backend: str | None, **given: Any
) -> Any:
    function = "mhc_maps"
    options = checked(function, given, MapKeywords.__optional_keys__)
    check_pre(function, x, phi, alpha, bias, gamma, options)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return reference.mhc_maps(x, phi, alpha, bias, gamma, options)[:3]
    check_kernel_limits(function, x, name)
    check_kernel_options(function, options, name)
    check_not_tilelang(function, name)
    inputs = {"x": x, "phi": phi, "alpha": alpha, "bias": bias, "gamma": gamma, "options": options}
    return Request(contracts.mhc_maps_fwd, name, inputs, _there(contracts.MapsOutputs._fields[:3], options))


def read(x: Tensor, h_pre: Tensor, backend: str | None) -> Any:
    function = "mhc_read"
    check_tensors(function, x=x, h_pre=h_pre)
    check_streams(function, x)
    check_shapes(function, h_pre=(h_pre, tuple(x.shape[:-1])))
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return reference.mhc_read(x, h_pre)
    check_kernel_limits(function, x, name)
    check_not_tilelang(function, name)
    return Request(contracts.mhc_read_fwd, name, {"x": x, "h_pre": h_pre}, "h_in")


def mean(x: Tensor, backend: str | None) -> Any:
    function = "mhc_mean"
    check_tensors(function, x=x)
    check_streams(function, x)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return reference.mhc_mean(x)
    check_kernel_limits(function, x, name)
    check_not_tilelang(function, name)
    return Request(contracts.mhc_mean_fwd, name, {"x": x, "n": x.shape[-2]}, "out")


def post(
    x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor | None, backend: str | None, transposed: bool = False
) -> Any:
    function = "mhc_post"
    check_post(function, x, h_out, h_post, h_res, transposed)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return reference.mhc_post(x, h_out, h_post, h_res, transposed)
    check_kernel_limits(function, x, name)
    check_kernel_residual(function, h_res, transposed, name)
    inputs = {"x": x, "h_out": h_out, "h_post": h_post, "h_res": h_res, "transposed": transposed}
    return Request(contracts.mhc_post_fwd, name, inputs, "x_next")


def post_pre(
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    backend: str | None,
    **given: Any,
) -> Any:
    function = "mhc_post_pre"
    options = checked(function, given)
    check_post(function, x, h_out, h_post, h_res, options.transposed)
    check_pre(function, x, phi, alpha, bias, gamma, options)
    check_layer_norm(function, x, layer_norm_weight)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        outputs = reference.mhc_post_pre(
            x=x,
            h_out=h_out,
            h_post=h_post,
            h_res=h_res,
            phi=phi,
            alpha=alpha,
            bias=bias,
            gamma=gamma,
            layer_norm_weight=layer_norm_weight,
            options=options,
        )
        return outputs[:4]
    check_kernels(function, x, layer_norm_weight, name)
    check_kernel_residual(function, h_res, options.transposed, name)
    check_kernel_options(function, options, name)
    inputs = _pre_inputs(x, phi, alpha, bias, gamma, layer_norm_weight, options)
    inputs |= {"h_out": h_out, "h_post": h_post, "h_res": h_res}
    return Request(contracts.mhc_post_pre_fwd, name, inputs, _there(contracts.PostPreOutputs._fields[:4], options))


def enter(
    function: str,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    linked: bool,
    backend: str | None,
    shifted: bool = False,
    read: Tensor | None = None,
    **given: Any,
) -> Any:
    """h_in, h_post, h_res; where shifted, h_pre; where linked, the link. function: mhc_layer, mhc_enter or mhc_next"""
    options = checked_to_mix(function, given)
    check_pre(function, x, phi, alpha, bias, gamma, options)
    check_layer_norm(function, x, layer_norm_weight)
    check_shifted(function, x, shifted, read)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        sublayer = (phi, alpha, bias, gamma, layer_norm_weight, options)
        h_in, carry = reference.mhc_enter(x, *sublayer, shifted=shifted, read=read)
        h_pre = (carry.read,) if shifted else ()
        return h_in, carry.h_post, carry.h_res, *h_pre, *((carry.link,) if linked else ())
    check_kernels(function, x, layer_norm_weight, name)
    check_kernel_options(function, options, name)
    if shifted:
        check_not_tilelang(f"{function} with shifted=True", name)
    inputs = _pre_inputs(x, phi, alpha, bias, gamma, layer_norm_weight, options)
    returns = _there(("h_in", "h_post", "h_res"), options) + (("h_pre",) if shifted else ())
    if linked or shifted:
        returns += ("link",) if linked else ()
        return Request(contracts.mhc_layer_pre, name, inputs | {"read": read}, returns)
    return Request(contracts.mhc_pre_fwd, name, inputs, returns)


def leave(
    function: str,
    link: Tensor | None,
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    backend: str | None,
    transposed: bool = False,
) -> Any:
    check_post(function, x, h_out, h_post, h_res, transposed)
    check_link(function, x, link)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        usable = None if is_link_of_kernels(link) else link
        return reference.mhc_leave(reference.Carry(x, h_post, h_res, None, usable, transposed), h_out)
    check_kernel_limits(function, x, name)
    check_kernel_residual(function, h_res, transposed, name)
    inputs = {"x": x, "h_out": h_out, "h_post": h_post, "h_res": h_res, "transposed": transposed}
    if not is_link_of_kernels(link):
        return Request(contracts.mhc_post_fwd, name, inputs, "x_next")
    return Request(contracts.mhc_layer_post, name, {"link": link, **inputs}, "x_next")


def next_sublayer(
    link: Tensor | None,
    x: Tensor,
    h_out: Tensor,
    h_post: Tensor,
    h_res: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    layer_norm_weight: Tensor | None,
    linked: bool,
    backend: str | None,
    read: Tensor | None = None,
    **given: Any,
) -> Any:
    """x_next, h_in, h_post, h_res; where read is given, h_pre; where linked, the link. With gradients, the carry has a
    kernel link. transposed applies to both h_res."""
    function = "mhc_next"
    options = checked_to_mix(function, given)
    check_post(function, x, h_out, h_post, h_res, options.transposed)
    check_link(function, x, link)
    check_shifted(function, x, read is not None, read)
    check_pre(function, x, phi, alpha, bias, gamma, options)
    check_layer_norm(function, x, layer_norm_weight)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        sublayer = (phi, alpha, bias, gamma, layer_norm_weight, options)
        ended = reference.Carry(x, h_post, h_res, read, None, options.transposed)
        h_in, carry = reference.mhc_next(ended, h_out, *sublayer)
        found = (carry.x, h_in, carry.h_post, carry.h_res)
        return found + (() if read is None else (carry.read,)) + ((carry.link,) if linked else ())
    check_kernels(function, x, layer_norm_weight, name)
    check_kernel_residual(function, h_res, options.transposed, name)
    check_kernel_options(function, options, name)
    if read is not None:
        check_not_tilelang(f"{function} of a shifted stack", name)
    inputs = _pre_inputs(x, phi, alpha, bias, gamma, layer_norm_weight, options)
    inputs |= {"h_out": h_out, "h_post": h_post, "h_res": h_res, "read": read, "link": link, "linked": linked}
    returns = _there(("x_next", "h_in", "h_post_next", "h_res_next"), options)
    returns += (() if read is None else ("h_pre_next",)) + (("link_next",) if linked else ())
    return Request(contracts.mhc_next_fwd, name, inputs, returns)


def is_link_of_kernels(link: Tensor | None) -> bool:
    """True for a kernel link: zero strides over one placeholder element. The reference's link, x in fp32, counts as no
    link: x then gets its gradient as it does without one."""
    return isinstance(link, Tensor) and is_readable(link) and not any(link.stride())


def check_link(function: str, x: Tensor, link: Tensor | None) -> None:
    if link is not None:
        check_tensors(function, x=x, link=link)
        check_shapes(function, link=(link, tuple(x.shape)))


def head(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    backend: str | None,
) -> Any:
    function = "mhc_head"
    check_parameters(function, x, phi, alpha, bias, gamma)
    n, D = x.shape[-2:]
    check_shapes(function, phi=(phi, (n, n * D)), bias=(bias, (n,)))
    if alpha.shape not in ((1,), ()):
        raise ValueError(f"{function}: alpha must be [1] or [], got {list(alpha.shape)}")
    norm_eps, hc_eps = check_numbers(function, norm_eps=norm_eps, hc_eps=hc_eps)
    name = choose(function, "mhc", backend, x.device)
    if name == "reference":
        return reference.mhc_head(x, phi, alpha, bias, gamma, norm_eps, hc_eps)
    check_kernel_limits(function, x, name)
    inputs = {"x": x, "phi": phi, "alpha": alpha, "bias": bias, "gamma": gamma}
    return Request(contracts.mhc_head_fwd, name, {**inputs, "norm_eps": norm_eps, "hc_eps": hc_eps}, "out")


def sinkhorn(logits: Tensor, iters: int, eps: float, backend: str | None) -> Any:
    function = "sinkhorn"
    check_tensors(function, logits=logits)
    check_count(function, "iters", iters)
    (eps,) = check_numbers(function, eps=eps)
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2] or logits.shape[-1] < 1:
        raise ValueError(f"{function}: logits must be [..., n, n] with n at least 1, got {list(logits.shape)}")
    name = choose(function, "mhc", backend, logits.device)
    if name == "reference":
        return reference.sinkhorn(logits, iters, eps)
    check_kernel_limits(function, logits, name, "logits")
    return Request(contracts.sinkhorn_fwd, name, {"logits": logits, "iters": iters, "eps": eps}, "h_res")


def backward(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    inv_rms: Tensor,
    h_mix: Tensor,
    h_pre: Tensor | None,
    h_post: Tensor | None,
    dh_in: Tensor | None,
    dh_post: Tensor | None,
    dh_res: Tensor | None,
    norm_eps: float,
    hc_eps: float,
    backend: str | None,
) -> Any:
    function = "mhc_backward"
    options = checked(function, {"norm_eps": norm_eps, "hc_eps": hc_eps, "residual": Residual.LOGITS.value})
    check_pre(function, x, phi, alpha, bias, gamma, options)
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
    given = {key: pair for key, pair in shapes.items() if pair[0] is not None or key in ("inv_rms", "h_mix")}
    check_tensors(function, x=x, **{key: tensor for key, (tensor, _) in given.items()})
    check_shapes(function, **given)
    name = choose(function, "mhc", backend, x.device)
    maps: dict[str, Any] = {"inv_rms": inv_rms, "h_mix": h_mix, "dh_in": dh_in, "dh_post": dh_post, "dh_res": dh_res}
    if name == "reference":
        return backward_formula.mhc_pre_bwd(x, phi, alpha, bias, gamma, **maps, hc_eps=options.hc_eps)
    check_kernel_limits(function, x, name)
    inputs = {
        **_pre_inputs(x, phi, alpha, bias, gamma, None, options),
        **maps,
        "dx_next": None,
        "read": None,
        "dh_pre": None,
    }
    returns = contracts.PreGradients._fields[: 4 if gamma is None else 5]
    return Request(contracts.mhc_pre_bwd, name, inputs, returns)


def check_parameters(function: str, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> None:
    tensors = {"x": x, "phi": phi, "alpha": alpha, "bias": bias}
    check_tensors(function, **tensors if gamma is None else {**tensors, "gamma": gamma})
    check_streams(function, x)
    if gamma is not None:
        check_shapes(function, gamma=(gamma, tuple(x.shape[-2:])))


def check_streams(function: str, x: Tensor) -> None:
    if x.dim() < 2 or x.shape[-2] < 1 or x.shape[-1] < 1:
        raise ValueError(f"{function}: x must be [..., n, D] with n and D at least 1, got {list(x.shape)}")


def check_pre(
    function: str,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    options: PreOptions,
) -> None:
    check_parameters(function, x, phi, alpha, bias, gamma)
    n, D = x.shape[-2:]
    sections = [n, n] if options.residual == Residual.IDENTITY else [n, n, n * n]
    M = sum(sections)
    check_shapes(function, phi=(phi, (M, n * D)), alpha=(alpha, (len(sections),)), bias=(bias, (M,)))


def check_post(
    function: str, x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor | None, transposed: bool = False
) -> None:
    """h_res is None where the residual is the identity."""
    check_tensors(function, x=x, h_out=h_out, h_post=h_post)
    check_streams(function, x)
    check_flag(function, "transposed", transposed)
    *outer, n, D = x.shape
    check_shapes(function, h_out=(h_out, (*outer, D)), h_post=(h_post, (*outer, n)))
    if h_res is not None:
        check_tensors(function, x=x, h_res=h_res)
        check_shapes(function, h_res=(h_res, (*outer, n, n)))
    elif transposed:
        raise ValueError(f"{function}: transposed=True has no meaning without h_res")


def check_shifted(function: str, x: Tensor, shifted: bool, read: Tensor | None) -> None:
    check_flag(function, "shifted", shifted)
    if read is not None:
        if not shifted:
            raise ValueError(f"{function}: read has no meaning without shifted=True")
        check_tensors(function, x=x, read=read)
        check_shapes(function, read=(read, tuple(x.shape[:-1])))


def checked_to_mix(function: str, given: dict[str, Any]) -> PreOptions:
    """The options of a function that mixes the streams with h_res itself."""
    options = checked(function, given)
    if options.residual == Residual.LOGITS:
        raise ValueError(f"{function}: residual='logits' is not a map to mix streams with; mhc_pre returns it")
    return options


def check_layer_norm(function: str, x: Tensor, layer_norm_weight: Tensor | None) -> None:
    if layer_norm_weight is not None:
        check_tensors(function, x=x, layer_norm_weight=layer_norm_weight)
        check_shapes(function, layer_norm_weight=(layer_norm_weight, (x.shape[-1],)))


def check_kernels(function: str, x: Tensor, layer_norm_weight: Tensor | None, backend: str) -> None:
    check_kernel_limits(function, x, backend)
    if layer_norm_weight is not None:
        check_not_tilelang(f"{function} with layer_norm_weight", backend)


def check_kernel_options(function: str, options: PreOptions, backend: str) -> None:
    """An option that no kernel reads is refused, not ignored. Kernels make raw logits with 0 iterations."""
    for name in NOT_IN_TILELANG:
        value = getattr(options, name)
        if value != getattr(DEFAULTS, name) and value != Residual.LOGITS:
            check_not_tilelang(f"{function} with {name}={value!r}", backend)


def check_kernel_residual(function: str, h_res: Tensor | None, transposed: bool, backend: str) -> None:
    if h_res is None:
        check_not_tilelang(f"{function} without h_res", backend)
    if transposed:
        check_not_tilelang(f"{function} with transposed=True", backend)


def check_not_tilelang(what: str, backend: str) -> None:
    if backend == "tilelang":
        raise NotImplementedError(f"{what}: backend 'tilelang' does not have it, 'triton' and 'reference' do")


def check_kernel_limits(function: str, x: Tensor, backend: str, name: str = "x") -> None:
    context = f" for backend {backend!r}"
    check_dtype(function, name, x, KERNEL_FLOATS, context)
    check_range(function, "n", x.shape[-2], 1, MAX_STREAMS, context)
