"""A stack of sublayers in plain fp64 loops over streams, written from the equations and from nothing else."""

import torch


def sigmoid(z):
    return 1 / (1 + torch.exp(-z))


def doubly_stochastic(z, iters=20, eps=1e-6):
    """Rows over j, columns over i."""
    n = len(z)
    e = [[torch.exp(z[i][j]) for j in range(n)] for i in range(n)]
    c = [[e[i][j] / sum(e[i]) + eps for j in range(n)] for i in range(n)]
    for half_step in range(2 * iters - 1):
        if half_step % 2 == 0:
            sums = [sum(c[i][j] for i in range(n)) + eps for j in range(n)]
            c = [[c[i][j] / sums[j] for j in range(n)] for i in range(n)]
        else:
            sums = [sum(c[i]) + eps for i in range(n)]
            c = [[c[i][j] / sums[i] for j in range(n)] for i in range(n)]
    return c


def maps(x, phi, alpha, bias, gamma):
    """h_pre [n], h_post [n] and h_res [n][n] of one token; x: n streams [D]"""
    n, D = len(x), len(x[0])
    inv_rms = 1 / (sum((stream * stream).sum() for stream in x) / (n * D) + 1e-6).sqrt()
    z = []
    for m in range(n * n + 2 * n):
        parts = [phi[m, i * D : (i + 1) * D] * x[i] * (1 if gamma is None else gamma[i]) for i in range(n)]
        section = 0 if m < n else 1 if m < 2 * n else 2
        z.append(alpha[section] * sum(part.sum() for part in parts) * inv_rms + bias[m])
    h_pre = [sigmoid(z[i]) + 1e-6 for i in range(n)]
    h_post = [2 * sigmoid(z[n + j]) for j in range(n)]
    return h_pre, h_post, doubly_stochastic([[z[2 * n + i * n + j] for j in range(n)] for i in range(n)])


def read(x, h_pre, weight=None):
    h_in = sum(h_pre[i] * x[i] for i in range(len(x)))
    return h_in if weight is None else weight * h_in / ((h_in * h_in).mean() + 1e-6).sqrt()


def write(x, h_out, h_post, h_res):
    n = len(x)
    return [h_post[j] * h_out + sum(h_res[i][j] * x[i] for i in range(n)) for j in range(n)]


def stack(x, layers, parameters, weights):
    """x [T, n, D] behind all sublayers; parameters: (phi, alpha, bias, gamma) of each, weights: of its norm, or None"""
    tokens = []
    for token in x:
        streams = list(token)
        for layer, own, weight in zip(layers, parameters, weights):
            h_pre, h_post, h_res = maps(streams, *own)
            streams = write(streams, layer(read(streams, h_pre, weight)), h_post, h_res)
        tokens.append(torch.stack(streams))
    return torch.stack(tokens)
