"""mHC step by step in fp64, forward and backward; each step has a name that a hypothesis can refer to.

x is [T, n, D] here, with all leading dimensions as T; phi is [M, n, D]. "x for h_mix" is x as that step reads it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..cases import Tensors
from .trace import Trace

NORM_EPS = HC_EPS = SINKHORN_EPS = 1e-6  # the defaults of the public functions
POST_MULT, ITERS = 2.0, 20


def section_rows(n: int) -> dict[str, slice]:
    """The rows of phi, bias, z and h_mix that belong to each section."""
    return {"pre": slice(0, n), "post": slice(n, 2 * n), "res": slice(2 * n, 2 * n + n * n)}


def sinkhorn(z: Tensor, iters: int = ITERS, eps: float = SINKHORN_EPS, learned: int = ITERS) -> Tensor:
    """`learned`: how many of the last iterations the gradient goes through; it passes the others unchanged."""
    c = torch.softmax(z, -1) + eps
    for iteration in range(iters):
        after = c / (c.sum(-1, keepdim=True) + eps) if iteration else c
        after = after / (after.sum(-2, keepdim=True) + eps)
        c = after if iteration >= iters - learned else c + (after - c).detach()
    return c


def gradient_of(function: Callable[[Tensor], Tensor], at: Tensor, cotangent: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, cotangent)[0]


def slope(z: Tensor) -> Tensor:
    """σ'"""
    return torch.sigmoid(z) * torch.sigmoid(-z)


def alphas_of(alpha: Tensor, n: int, M: int) -> Tensor:
    """alpha spread over the rows of its sections; the head has one section."""
    if n == M:
        return alpha.reshape(1).expand(M)
    return torch.cat([a.expand(rows.stop - rows.start) for a, rows in zip(alpha, section_rows(n).values())])


def pre_forward(x: Tensor, tensors: Tensors, at: Trace, raw: bool) -> None:
    """inv_rms, h_mix, m, z, the maps, h_in"""
    n, D = x.shape[-2:]
    phi = tensors["phi"].unflatten(-1, (n, D))
    M = phi.shape[0]
    gamma = at("gamma", tensors.get("gamma", x.new_ones(n, D)))
    alphas = at("alpha per row", alphas_of(tensors["alpha"], n, M))
    mean_square = at("x for inv_rms", x).square().mean((-2, -1))
    inv_rms = at("inv_rms", torch.rsqrt(mean_square + at("norm_eps", NORM_EPS)))
    scaled = at("x for h_mix", x) * at("gamma for h_mix", gamma)
    h_mix = at("h_mix", scaled.flatten(1) @ at("phi for h_mix", phi).flatten(1).T)
    m = at("m", h_mix * inv_rms[:, None])
    z = at("z", m * alphas + tensors["bias"])
    h_pre = at("h_pre", torch.sigmoid(z[:, :n]) + HC_EPS)
    if n < M:
        at("h_post", POST_MULT * torch.sigmoid(z[:, n : 2 * n]))
        squash = at("sinkhorn", (lambda logits: logits) if raw else sinkhorn)
        at("h_res", squash(z[:, 2 * n :].unflatten(-1, (n, n))))
    read = at("x for h_in", x)
    at.sum("h_in", {f"h_pre · x of stream {i}": h_pre[:, i, None] * read[:, i] for i in range(n)})


def pre_backward(
    x: Tensor, tensors: Tensors, at: Trace, cotangents: Tensors, further: Tensors | None = None, output: str = "dx"
) -> None:
    """From the gradients of the maps to those of the parameters and of x: `output`, with the further terms it has."""
    values, (n, D) = at.values, x.shape[-2:]
    z, m, h_mix, inv_rms, alphas, gamma = (
        values[name] for name in ("z", "m", "h_mix", "inv_rms", "alpha per row", "gamma")
    )
    phi = at("phi for dx", tensors["phi"].unflatten(-1, (n, D)))
    M = phi.shape[0]
    sections = {"pre": slice(0, n)} if n == M else section_rows(n)
    dh_in = cotangents["h_in"]

    dh_pre = at("dh_pre", (at("x for dh_pre", x) * at("dh_in for dh_pre", dh_in)[:, None]).sum(-1))
    parts = [dh_pre * slope(z[:, :n])]
    if n < M:
        parts.append(POST_MULT * cotangents["h_post"] * slope(z[:, n : 2 * n]))
        squash = at("sinkhorn backward", values["sinkhorn"])
        logits = z[:, 2 * n :].unflatten(-1, (n, n))
        parts.append(gradient_of(squash, logits, at("dh_res for dz", cotangents["h_res"])).flatten(-2))
    dz = at("dz", torch.cat(parts, -1))

    scales = at("dz for dalpha", dz) * at("m for dalpha", m)
    at("dalpha", torch.stack([scales[:, rows].sum() for rows in sections.values()]).reshape(tensors["alpha"].shape))
    at("dbias", at("dz for dbias", dz).sum(0))
    dm = at("dm", dz * alphas)
    dh_mix = at("dh_mix", dm * inv_rms[:, None])
    A = at("dh_mix for dphi", dh_mix).T @ at("x for dphi", x).flatten(1)
    A = A.unflatten(-1, (n, D))
    at("dphi", A * at("gamma for dphi", gamma))
    by_row = at("phi for dgamma", phi) * A
    at.sum("dgamma", {f"the {name} section": by_row[rows].sum(0) for name, rows in sections.items()})

    dinv = at("dinv", dm * h_mix)
    over_norm = (
        at("x for the norm's term", x)
        * (at("inv_rms cubed", inv_rms**3) / at("size of the mean", n * D))[:, None, None]
    )
    terms = {}
    for name, rows in sections.items():
        through_phi = at("dh_mix for dx", dh_mix)[:, rows] @ phi[rows].flatten(1)
        terms[f"gamma ⊙ phiᵀ dh_mix of {name}"] = at("gamma for dx", gamma) * through_phi.unflatten(-1, (n, D))
    for name, rows in sections.items():
        terms[f"the norm's term of {name}"] = -dinv[:, rows].sum(-1)[:, None, None] * over_norm
    terms["h_pre ⊗ dh_in"] = values["h_pre"][..., None] * at("dh_in for dx", dh_in)[:, None]
    at.sum(output, {**terms, **(further or {})})


def post_forward(x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor, at: Trace) -> None:
    read, mix = at("x for x_next", x), at("h_res for x_next", h_res)
    terms = {f"h_resᵀ x of stream {i}": mix[:, i, :, None] * read[:, i, None] for i in range(x.shape[-2])}
    at.sum("x_next", {"h_post ⊗ h_out": h_post[..., None] * at("h_out for x_next", h_out)[:, None], **terms})


def post_backward(x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor, dx_next: Tensor, at: Trace) -> Tensors:
    """dh_out, dh_post, dh_res as steps; what goes back to x as terms of dx."""
    n = x.shape[-2]
    weights, read = at("h_post for dh_out", h_post), at("dx_next for dh_out", dx_next)
    at.sum("dh_out", {f"h_post · dx_next of stream {j}": weights[:, j, None] * read[:, j] for j in range(n)})
    at("dh_post", (at("dx_next for dh_post", dx_next) * at("h_out for dh_post", h_out)[:, None]).sum(-1))
    at("dh_res", at("x for dh_res", x) @ at("dx_next for dh_res", dx_next).mT)
    mix, read = at("h_res for dx", h_res), at("dx_next for dx", dx_next)
    return {f"h_res dx_next of stream {j}": mix[:, :, j, None] * read[:, j, None] for j in range(n)}


def raw_pre(tensors: Tensors, cotangents: Tensors, at: Trace) -> None:
    pre_forward(tensors["x"], tensors, at, raw=True)
    pre_backward(tensors["x"], tensors, at, cotangents)


def pre(tensors: Tensors, cotangents: Tensors, at: Trace) -> None:
    pre_forward(tensors["x"], tensors, at, raw=False)
    pre_backward(tensors["x"], tensors, at, cotangents)


def head(tensors: Tensors, cotangents: Tensors, at: Trace) -> None:
    pre_forward(tensors["x"], tensors, at, raw=True)
    at("out", at.values["h_in"])
    pre_backward(tensors["x"], tensors, at, {"h_in": cotangents["out"]})


def sinkhorn_alone(tensors: Tensors, cotangents: Tensors, at: Trace) -> None:
    squash = at("sinkhorn", sinkhorn)
    at("h_res", squash(tensors["logits"]))
    at(
        "dlogits",
        gradient_of(at("sinkhorn backward", squash), tensors["logits"], at("dh_res for dz", cotangents["h_res"])),
    )


def post(tensors: Tensors, cotangents: Tensors, at: Trace) -> None:
    inputs = (tensors["x"], tensors["h_out"], tensors["h_post"], tensors["h_res"])
    post_forward(*inputs, at)
    at.sum("dx", post_backward(*inputs, cotangents["x_next"], at))


def layer(tensors: Tensors, cotangents: Tensors, at: Trace) -> None:
    x, values = tensors["x"], at.values
    pre_forward(x, tensors, at, raw=False)
    maps = (tensors["h_out"], values["h_post"], values["h_res"])
    post_forward(x, *maps, at)
    past = post_backward(x, *maps, cotangents["x_next"], at)
    of_pre = {"h_in": cotangents["h_in"], "h_post": values["dh_post"], "h_res": values["dh_res"]}
    pre_backward(x, tensors, at, of_pre, past)


def post_pre(tensors: Tensors, cotangents: Tensors, at: Trace) -> None:
    """The pre reads x_next as it was stored."""
    inputs = (tensors["x"], tensors["h_out"], tensors["h_post"], tensors["h_res"])
    post_forward(*inputs, at)
    stored = tensors["stored x_next"]
    pre_forward(stored, tensors, at, raw=False)
    pre_backward(stored, tensors, at, cotangents, {"the cotangent of x_next": cotangents["x_next"]}, "dx_next")
    at.sum("dx", post_backward(*inputs, at.values["dx_next"], at))


MODELS = {
    "mhc_forward_pre": raw_pre,
    "mhc_pre": pre,
    "mhc_post": post,
    "mhc_layer": layer,
    "mhc_post_pre": post_pre,
    "mhc_head": head,
    "sinkhorn": sinkhorn_alone,
}
