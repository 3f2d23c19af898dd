"""Sublayers with every option of their maps, standard and shifted, in plain fp64 loops over streams, written from the
equations and from nothing else.

A stream is [..., D], a weight or a logit [..., 1]; x is a list of n streams.
"""

import torch


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def doubly_stochastic(z, iters=20, eps=1e-6):
    """Rows over j, columns over i."""
    exps = [[torch.exp(entry) for entry in row] for row in z]
    c = [[e / sum(row) + eps for e in row] for row in exps]
    for _ in range(2 * iters - 1):  # columns first, then rows and columns in turn
        c = [[entry / (sum(column) + eps) for entry in column] for column in zip(*c)]
    return [list(row) for row in zip(*c)]


def one_hot(x):
    """p_0: the first sublayer of a shifted stack reads stream 0."""
    one = torch.ones_like(x[0][..., :1])
    return [one if i == 0 else 0 * one for i in range(len(x))]


def logits(x, phi, alpha, bias, gamma, norm_eps):
    """z of all rows: pre (n), post (n) and, where there are more, res"""
    n, D = len(x), x[0].shape[-1]
    squares = sum((stream * stream).sum(-1, keepdim=True) for stream in x)
    inv_rms = 1 / (squares / (n * D) + norm_eps).sqrt()
    scaled = x if gamma is None else [stream * own for stream, own in zip(x, gamma)]
    z = []
    for m in range(len(bias)):
        h_mix = sum((phi[m, i * D : (i + 1) * D] * scaled[i]).sum(-1, keepdim=True) for i in range(n))
        section = 0 if m < n else 1 if m < 2 * n else 2
        z.append(alpha[section] * h_mix * inv_rms + bias[m])
    return z


DEFAULTS = {"norm_eps": 1e-6, "hc_eps": 1e-6, "post_mult": 2.0, "post_eps": 0.0, "residual": "sinkhorn",
            "sinkhorn_iters": 20, "sinkhorn_eps": 1e-6}  # fmt: skip


def maps(x, phi, alpha, bias, gamma=None, **given):
    """h_pre [n], h_post [n], h_res [n][n], which is None for the identity"""
    n, options = len(x), DEFAULTS | given
    z = logits(x, phi, alpha, bias, gamma, options["norm_eps"])
    h_pre = [sigmoid(z[i]) + options["hc_eps"] for i in range(n)]
    h_post = [options["post_mult"] * sigmoid(z[n + j]) + options["post_eps"] for j in range(n)]
    if options["residual"] == "identity":
        return h_pre, h_post, None
    z_res = [[z[2 * n + i * n + j] for j in range(n)] for i in range(n)]
    return h_pre, h_post, doubly_stochastic(z_res, options["sinkhorn_iters"], options["sinkhorn_eps"])


def read(x, p, weight=None, layer_norm_eps=1e-6, scaled=None):
    """scaled: a list that gets h_in as the norm scales it, apart from the h_in that makes the norm's factor"""
    h_in = sum(p[i] * x[i] for i in range(len(x)))
    if weight is None:
        return h_in
    factor = 1 / ((h_in * h_in).mean(-1, keepdim=True) + layer_norm_eps).sqrt()
    h_in = h_in.clone()
    if scaled is not None:
        scaled.append(h_in)
    return weight * h_in * factor


def write(x, h_out, h_post, h_res, transposed=False):
    if h_res is not None:
        of_new = h_res if transposed else zip(*h_res)
        x = [sum(weight * stream for weight, stream in zip(weights, x)) for weights in of_new]
    return [kept + weight * h_out for kept, weight in zip(x, h_post)]


def stack(x, layers, parameters, options, p=None, shifted=False, scaled=None):
    """x [..., n, D] after all sublayers; shifted also the p [..., n] that the next one would read with.

    parameters: of each sublayer by name, phi, alpha, bias and, where it has them, gamma and layer_norm_weight
    options: those of each; p: of the sublayer before the first, one-hot if None
    """
    x = list(x.unbind(-2))
    p = one_hot(x) if p is None else [column[..., None] for column in p.unbind(-1)]
    for layer, own, given in zip(layers, parameters, options, strict=True):
        own = dict(own)
        weight = own.pop("layer_norm_weight", None)
        h_pre, h_post, h_res = maps(x, **own, **given)
        h_in = read(x, p if shifted else h_pre, weight, given.get("layer_norm_eps", 1e-6), scaled)
        x = write(x, layer(h_in), h_post, h_res, given.get("transposed", False))
        p = h_pre
    stacked = torch.stack(x, -2)
    return (stacked, torch.cat(p, -1)) if shifted else stacked


def contract(x, p):
    """The end of a shifted model: Σ_i p[i]·x[i]"""
    return read(list(x.unbind(-2)), [column[..., None] for column in p.unbind(-1)])
