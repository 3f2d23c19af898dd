"""The ops with one step done wrong: computed by diagnose's steps in fp32, as kernels do it, each fault a change of one.

Without a fault these are the ops.
"""

import torch

from mhc_ops.core.steps import evaluate
from mhc_ops.measure.cases import Case
from mhc_ops.measure.diagnose import conv, mhc
from mhc_ops.mhc import reference

BLOCK = 32  # of the faults that have one
N = 4  # streams
PRE, POST, RES = slice(0, N), slice(N, 2 * N), slice(2 * N, None)


class Faulty(torch.autograd.Function):
    """Called with the tensors of a case; in the backward the steps run once more, now with the cotangents."""

    @staticmethod
    def forward(ctx, case, changes, names, *tensors):
        ctx.case, ctx.changes, ctx.names = case, changes, names
        ctx.save_for_backward(*tensors)
        given = dict(zip(names, tensors))
        shapes = case.subject.call(**given, backend="reference")
        values = steps(case, given, [torch.zeros_like(output) for output in shapes], changes)
        outputs = [values[name].to(like.dtype).view_as(like) for name, like in zip(case.subject.outputs, shapes)]
        ctx.mark_non_differentiable(*outputs[len(case.subject.differentiable) :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *cotangents):
        tensors = ctx.saved_tensors
        values = steps(ctx.case, dict(zip(ctx.names, tensors)), cotangents, ctx.changes)
        gradients = [
            values[f"d{name}"].to(tensor.dtype).view_as(tensor) if tensor.is_floating_point() else None
            for name, tensor in zip(ctx.names, tensors)
        ]
        return None, None, None, *gradients


def steps(case, tensors, cotangents, changes):
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    cotangents = {name: c.float() for name, c in zip(case.subject.differentiable, cotangents)}
    model = (
        mhc.model(case, tensors, cotangents, {}) if isinstance(case, Case) else conv.model(case, tensors, cotangents)
    )
    with torch.no_grad():
        return evaluate(model.steps, model.inputs, changes)


def call(case, fault):
    """To be diagnosed in place of the op of the case."""
    changes = {} if fault is None else FAULTS[fault]
    return lambda backend, **tensors: Faulty.apply(case, changes, tuple(tensors), *tensors.values())


def zeros_at(index):
    """Not read there."""

    def change(value, values):
        value = value.clone()
        value[index] = 0
        return value

    return change


def times(factor, index):
    def change(value, values):
        value = value.clone()
        value[index] *= factor
        return value

    return change


def unwritten(index):
    """As a kernel leaves it that does not get there: fresh memory."""

    def change(value, values):
        mask = torch.zeros_like(value, dtype=torch.bool)
        mask[index] = True
        return torch.where(mask, torch.empty_like(value), value)

    return change


def side_by_side(value, values):
    """Of the streams as one row, only its first block."""
    row = value.flatten(-2).clone()
    row[..., 4 * BLOCK :] = 0
    return row.view_as(value)


def without_last_tokens(value, values):
    """38 tokens are two blocks of 16 and a rest."""
    rows = value.reshape(-1, value.shape[-1]).clone()
    rows[len(rows) // 16 * 16 :] = 0
    return rows.view_as(value)


def wrong_variable(value, values):
    """The norm's term with what the pre section has accumulated n² times, in place of the res section's."""
    dm, h_mix, x = values["dm"], values["h_mix"], values["x"]
    parts = [(dm * h_mix)[..., rows].sum(-1) for rows in (PRE, POST)]
    dinv_rms = parts[0] + parts[1] + N * N * parts[0]
    return -(dinv_rms * values["inv_rms"] ** 3 / x[0, 0].numel())[..., None, None] * x


def section(rows, change):
    def changed(value, values):
        wrong = change(value, values)
        value = value.clone()
        value[..., rows] = wrong[..., rows]
        return value

    return changed


def no_halo(rows, values):
    """A tap reads nothing of the block before that of its token."""
    tokens_from, L = 1 + values["state"][..., 0].numel(), rows.shape[-1]
    t = torch.arange(L)
    return torch.where((rows - tokens_from) % L // BLOCK == t // BLOCK, rows, 0)


def leak(rows, values):
    """A tap reads the token before, whosever it is."""
    B, L = rows.shape[1:]
    lag = torch.arange(len(rows) - 1, -1, -1)[:, None, None]
    t = torch.arange(L) - lag
    tokens = 1 + values["state"][..., 0].numel() + torch.arange(B)[None, :, None] * L + t
    return torch.where(t < 0, rows, tokens)


def sinkhorn(iters=20, eps=1e-6):
    return lambda logits: reference.sinkhorn(logits, iters, eps)


def instead(value):
    return lambda right, values: value


FAULTS = {
    # the four that the original found by hand
    "block shorter than a row": {"x for h_mix": zeros_at((..., slice(BLOCK, None)))},
    "wrong variable accumulated n*n times": {"through_norm": wrong_variable},
    "inv_rms missing in res, backward": {"dh_mix": section(RES, lambda dh_mix, values: values["dm"])},
    "grid covers the first stream only, backward": {"dx": unwritten((..., slice(1, None), slice(None)))},
    # and more of their kind
    "block shorter than the streams in a row": {"x for h_mix": side_by_side},
    "norm_eps left out": {"norm_eps": instead(0.0)},
    "gamma left out of h_mix": {"gamma for h_mix": lambda gamma, values: torch.ones_like(gamma)},
    "inv_rms missing in post, forward": {"m for z": section(POST, lambda m, values: values["h_mix"])},
    "last partial block of h_in not written": {"h_in": unwritten((..., slice(2 * BLOCK, None)))},
    "derivative of sigma missing in pre": {
        "dz": section(PRE, lambda dz, values: torch.cat([values["dh_pre"], dz], -1))
    },
    "dbias of res accumulated n*n times": {"dbias": times(N * N, RES)},
    "dphi without the last tokens": {"dh_mix for dprojection": without_last_tokens},
    "norm term left out": {"through_norm": lambda term, values: torch.zeros_like(term)},
    "grid covers the first stream only, forward": {"x_next": unwritten((..., slice(1, None), slice(None)))},
    "h_res read transposed": {
        name: lambda h_res, values: h_res.mT for name in ("h_res for mixed", "h_res for through_mix", "dh_res")
    },
    "stream 2 left out of the mix": {"x for mixed": zeros_at((..., 2, slice(None)))},
    "sinkhorn stops one iteration early": {"squash": instead(sinkhorn(iters=19))},
    "sinkhorn without eps": {"squash": instead(sinkhorn(eps=0.0))},
    "sinkhorn with rows and columns swapped": {"squash": instead(lambda logits: sinkhorn()(logits.mT).mT)},
    "h_res transposed": {"squash": instead(lambda logits: sinkhorn()(logits).mT)},
    "sinkhorn gradient of the softmax alone": {"squash for dlogits": instead(lambda logits: torch.softmax(logits, -1))},
    # of the convolution
    "taps reversed": {"weight for z": lambda weight, values: weight.flip(-1)},
    "bias left out": {"bias for z": lambda bias, values: torch.zeros_like(bias)},
    "activation left out": {"convolved": lambda y, values: values["z"]},
    "residual left out": {"added": lambda residual, values: torch.zeros_like(residual)},
    "halo missing": {"rows for z": no_halo},
    "leak between sequences": {"rows for z": leak},
    "derivative of SiLU missing": {"g": lambda g, values: values["dy"]},
    "dweight without its last strip": {"g for dweight": zeros_at((slice(None), slice(2 * BLOCK, None)))},
    "taps of dweight reversed": {"dweight": lambda dweight, values: dweight.flip(-1)},
    "dbias counted per tap": {"dbias": times(4, ...)},
    "halo missing in dx": {"rows for back_taps": no_halo},
}
