"""The ops once more, forward and backward written out as kernels do it, with faults to switch on, each at its line.

A fault is a name; `fault == name` marks the line that is then wrong. Without a fault these are the ops.
"""

import torch
import torch.nn.functional as F

ITERS, EPS = 20, 1e-6
BLOCK = 32  # of the faults that have one


def sinkhorn(z, fault=None):
    iters = ITERS - 1 if fault == "sinkhorn stops one iteration early" else ITERS
    eps = 0 if fault == "sinkhorn without eps" else EPS
    rows, columns = (-2, -1) if fault == "sinkhorn with rows and columns swapped" else (-1, -2)
    c = torch.softmax(z, rows) + eps
    c = c / (c.sum(columns, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(rows, keepdim=True) + eps)
        c = c / (c.sum(columns, keepdim=True) + eps)
    return c.mT if fault == "h_res transposed" else c


def sinkhorn_bwd(z, dh_res, fault):
    if fault == "sinkhorn gradient of the softmax alone":
        p = torch.softmax(z, -1)
        return p * (dh_res - (p * dh_res).sum(-1, keepdim=True))
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        return torch.autograd.grad(sinkhorn(z, fault), z, dh_res)[0]


class Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, fault):
        ctx.save_for_backward(logits)
        ctx.fault = fault
        return sinkhorn(logits.float(), fault)

    @staticmethod
    def backward(ctx, dh_res):
        (logits,) = ctx.saved_tensors
        return sinkhorn_bwd(logits.float(), dh_res, ctx.fault).to(logits.dtype), None


class Pre(torch.autograd.Function):
    """mhc_forward_pre"""

    @staticmethod
    def forward(ctx, x, phi, alpha, bias, gamma, fault):
        *outer, n, D = x.shape
        wide = x.float().reshape(-1, n, D)
        read = wide.clone()
        if fault == "block shorter than a row":
            read[..., BLOCK:] = 0
        if fault == "block shorter than the streams in a row":
            read.view(-1, n * D)[:, 4 * BLOCK :] = 0
        alphas = torch.cat([a.expand(size) for a, size in zip(alpha, (n, n, n * n))])
        eps = 0 if fault == "norm_eps left out" else EPS
        inv_rms = torch.rsqrt(wide.square().mean((1, 2)) + eps)
        h_mix = (read * gamma).flatten(1) @ phi.T
        if fault == "gamma left out of h_mix":
            h_mix = read.flatten(1) @ phi.T
        m = h_mix * inv_rms[:, None]
        if fault == "inv_rms missing in post, forward":
            m = torch.cat([m[:, :n], h_mix[:, n : 2 * n], m[:, 2 * n :]], -1)
        z = m * alphas + bias
        if fault == "alpha of pre in post":
            z[:, n : 2 * n] = m[:, n : 2 * n] * alpha[0] + bias[n : 2 * n]
        h_pre = torch.sigmoid(z[:, :n]) + EPS
        h_post = 2 * torch.sigmoid(z[:, n : 2 * n])
        if fault == "h_post without its factor":
            h_post = torch.sigmoid(z[:, n : 2 * n])
        h_res = z[:, 2 * n :].unflatten(-1, (n, n))
        h_in = (h_pre[..., None] * wide).sum(1).to(x.dtype)
        if fault == "last partial block of h_in not written":
            h_in = _unwritten(h_in, (slice(None), slice(D // BLOCK * BLOCK, None)))
        ctx.save_for_backward(x, phi, alphas, bias, gamma, inv_rms, h_mix)
        ctx.fault = fault
        outputs = (h_in, h_post, h_res, inv_rms, h_mix, h_pre)
        outputs = tuple(output.reshape(*outer, *output.shape[1:]) for output in outputs)
        ctx.mark_non_differentiable(*outputs[3:])
        return outputs

    @staticmethod
    def backward(ctx, dh_in, dh_post, dh_res, *_):
        x, phi, alphas, bias, gamma, inv_rms, h_mix = ctx.saved_tensors
        fault = ctx.fault
        n, D = x.shape[-2:]
        wide, dh_in = x.float().reshape(-1, n, D), dh_in.float().reshape(-1, D)
        dh_post, dz_res = dh_post.reshape(-1, n), dh_res.reshape(-1, n * n)
        pre, post, res = slice(0, n), slice(n, 2 * n), slice(2 * n, None)
        m = h_mix * inv_rms[:, None]
        z = m * alphas + bias
        slope = torch.sigmoid(z) * torch.sigmoid(-z)
        dh_pre = (wide * dh_in[:, None]).sum(-1)
        if fault == "derivative of sigma missing in pre":
            slope[:, pre] = 1
        dz = torch.cat([dh_pre * slope[:, pre], 2 * dh_post * slope[:, post], dz_res], -1)
        dalpha = torch.stack([(dz * m)[:, rows].sum() for rows in (pre, post, res)])
        dbias = dz.sum(0)
        if fault == "dbias of res accumulated n*n times":
            dbias[res] *= n * n
        dm = dz * alphas
        dh_mix = dm * inv_rms[:, None]
        if fault == "inv_rms missing in res, backward":
            dh_mix[:, res] = dm[:, res]
        A = torch.einsum("tm,tnd->mnd", dh_mix, wide)
        if fault == "dphi without the last tokens":
            T = len(wide) // 16 * 16
            A = torch.einsum("tm,tnd->mnd", dh_mix[:T], wide[:T])
        dphi, dgamma = (A * gamma).flatten(1), (phi.unflatten(-1, (n, D)) * A).sum(0)
        parts = [(dm * h_mix)[:, rows].sum(-1) for rows in (pre, post, res)]
        dinv = parts[0] + parts[1] + parts[2]
        if fault == "wrong variable accumulated n*n times":
            dinv = parts[0] + parts[1] + n * n * parts[0]
        through_norm = -(dinv * inv_rms**3 / (n * D))[:, None, None] * wide
        if fault == "norm term left out":
            through_norm = 0
        through_phi = gamma * (dh_mix @ phi).unflatten(-1, (n, D))
        h_pre = torch.sigmoid(z[:, pre]) + EPS
        dx = through_phi + through_norm + h_pre[..., None] * dh_in[:, None]
        dx = dx.to(x.dtype).reshape(x.shape)
        if fault == "grid covers the first stream only, backward":
            dx = _unwritten(dx, (..., slice(1, None), slice(None)))
        return dx, dphi, dalpha, dbias, dgamma, None


def post(x, h_out, h_post, h_res, fault):
    """mhc_post, left to autograd"""
    if fault == "stream 2 left out of the mix":
        h_res = h_res.index_fill(-2, torch.tensor(2), 0)
    mixed = (h_res if fault == "h_res read transposed" else h_res.mT) @ x.float()
    x_next = (mixed + h_post[..., None] * h_out[..., None, :].float()).to(x.dtype)
    if fault == "grid covers the first stream only, forward":
        x_next = _unwritten(x_next, (..., slice(1, None), slice(None)))
    return x_next


class Conv(torch.autograd.Function):
    """causal_conv1d with seq_idx (no padding)"""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, seq_idx, fault):
        taps = _taps(x.float(), seq_idx, weight.shape[1], fault)
        if fault == "taps reversed":
            taps = taps[::-1]
        z = sum(tap * weight[:, k] for k, tap in enumerate(taps))
        z = z if fault == "bias left out" else z + bias
        y = z if fault == "activation left out" else F.silu(z)
        y = y if fault == "residual left out" else y + residual
        ctx.save_for_backward(x, weight, bias, seq_idx)
        ctx.fault = fault
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias, seq_idx = ctx.saved_tensors
        fault, W = ctx.fault, weight.shape[1]
        L = x.shape[1]
        right = None if fault in FORWARD_ONLY else fault
        taps = _taps(x.float(), seq_idx, W, right)
        z = sum(tap * weight[:, k] for k, tap in enumerate(taps)) + bias
        sigma = torch.sigmoid(z)
        g = dy.float() * (1 if fault == "derivative of SiLU missing" else sigma * (1 + z * (1 - sigma)))
        strips = g.clone()
        if fault == "dweight without its last strip":
            strips[:, L // BLOCK * BLOCK :] = 0
        dweight = torch.stack([(strips * tap).sum((0, 1)) for tap in taps], -1)
        if fault == "taps of dweight reversed":
            dweight = dweight.flip(-1)
        dbias = g.sum((0, 1))
        if fault == "dbias counted per tap":
            dbias = W * dbias
        with torch.enable_grad():
            leaf = x.float().requires_grad_()
            seen = _taps(leaf, seq_idx, W, "halo missing" if fault == "halo missing in dx" else right)
            total = sum(tap * weight[:, k] for k, tap in enumerate(seen))
            (dx,) = torch.autograd.grad(total, leaf, g)
        return dx.to(x.dtype), dweight, dbias, dy.clone(), None, None


FORWARD_ONLY = ("halo missing", "taps reversed", "leak between sequences", "bias left out", "activation left out")


def _taps(x, seq_idx, W, fault):
    L = x.shape[1]
    padded, ids = F.pad(x, (0, 0, W - 1, 0)), F.pad(seq_idx, (W - 1, 0), value=-1)
    t, taps = torch.arange(L), []
    for k in range(W):
        same = ids[:, k : k + L] == seq_idx
        if fault == "leak between sequences":
            same = torch.ones_like(same)
        if fault == "halo missing":
            same = same & ((t - (W - 1 - k)) // BLOCK == t // BLOCK)
        taps.append(torch.where(same[..., None], padded[:, k : k + L], 0))
    return taps


def _unwritten(tensor, place):
    """As a kernel leaves it that does not get there: fresh memory."""
    fresh = torch.empty_like(tensor)
    mask = torch.zeros_like(tensor, dtype=torch.bool)
    mask[place] = True
    return torch.where(mask, fresh, tensor)
