"""The ops with one step done wrong: diagnose's steps in fp32, with one of them changed. Unchanged, they are the ops."""

import torch

from mhc_ops.core.steps import at, ones, zeros
from mhc_ops.measure.diagnose.ops import model_of

BLOCK = 32  # of the faults that have one
N = 4  # streams
PRE, POST, RES = slice(0, N), slice(N, 2 * N), slice(2 * N, None)


class Faulty(torch.autograd.Function):
    """Takes the tensors of a case; in the backward the steps run once more, now with the cotangents."""

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
    """A pre after a post goes on with what was stored."""
    between = ("x_next", "dlink") if "link" in tensors else ("x_next",) if {"h_post", "phi"} <= set(tensors) else ()
    stored = {}
    for name in between:
        values = model_of(case, tensors, cotangents, stored, torch.float32).run(changes)
        stored[name] = values[name].to(case.dtype)
    return model_of(case, tensors, cotangents, stored, torch.float32).run(changes)


def call(case, fault):
    """To be diagnosed in place of the op of the case. fault: of FAULTS, of PLACED, None, or changes without a name."""
    changes = (FAULTS | PLACED)[fault] if isinstance(fault, str) else fault or {}
    return lambda backend, **tensors: Faulty.apply(case, changes, tuple(tensors), *tensors.values())


def times(factor):
    return lambda value, values: factor * value


def unwritten(value, values):
    """Fresh memory, as a kernel leaves what it does not reach."""
    return torch.empty_like(value)


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


def no_halo(taps, values):
    """A tap reads nothing of the block before that of its token."""
    W, _, L, _ = taps.shape
    t, lag = torch.arange(L), torch.arange(W - 1, -1, -1)[:, None]
    return torch.where(((t - lag) // BLOCK == t // BLOCK)[:, None, :, None], taps, 0)


def leak(taps, values):
    """A tap reads the token before, even of another sequence."""
    W, _, L, _ = taps.shape
    padded = torch.nn.functional.pad(values["x"], (0, 0, W - 1, 0))
    return torch.stack([padded[:, k : k + L] for k in range(W)])


FAULTS = {
    # the four that the original found by hand
    "block shorter than a row": {"x for h_mix": at((..., slice(BLOCK, None)), zeros)},
    "wrong variable accumulated n*n times": {"dx via inv_rms": wrong_variable},
    "inv_rms missing in res, backward": {"dh_mix": at((..., RES), lambda _, values: values["dm"])},
    "grid covers the first stream only, backward": {"dx": at((..., slice(1, None), slice(None)), unwritten)},
    # what the original's forward did beside its backward
    "gamma left out of h_mix": {"gamma for h_mix": ones},
    # and more of their kind
    "inv_rms missing in post, forward": {"m for z": at((..., POST), lambda _, values: values["h_mix"])},
    "last partial block of h_in not written": {"h_in": at((..., slice(2 * BLOCK, None)), unwritten)},
    "dbias of res accumulated n*n times": {"dbias": at(RES, times(N * N))},
    "dphi without the last tokens": {"dh_mix for dphi via h_mix": without_last_tokens},
    "norm term left out": {"dx via inv_rms": zeros},
    "norm term of x_next left out": {"dstored via inv_rms": zeros},
    "alpha left out": {"alphas for z": ones},
    "grid covers the first stream only, forward": {"x_next": at((..., slice(1, None), slice(None)), unwritten)},
    "stream 2 left out of the mix": {"x for mixed": at((..., 2, slice(None)), zeros)},
    "stream 2 left out of h_in": {"x for h_in": at((..., 2, slice(None)), zeros)},
    # of the layer's norm
    "norm's weight left out": {"layer_norm_weight for h_in": ones},
    "norm's factor left out": {"r for h_in": ones},
    "norm over the first block": {"h_read for r": at((..., slice(BLOCK, None)), zeros)},
    "norm's weight left out, backward": {f"layer_norm_weight for {name} via h_in": ones for name in ("dh_read", "dr")},
    "norm's factor taken as constant": {"dh_read via r": zeros},
    "norm's factor missing in its weight's gradient": {"r for dlayer_norm_weight via h_in": ones},
    "norm's weight's gradient without the last tokens": {"dh_in for dlayer_norm_weight via h_in": without_last_tokens},
    # of a boundary
    "block shorter than a row, of x_next": {"stored for h_mix": at((..., slice(BLOCK, None)), zeros)},
    "last partial block of x_next not written": {"x_next": at((..., slice(2 * BLOCK, None)), unwritten)},
    "stream 2 left out of the next mix": {"stored for mixed after": at((..., 2, slice(None)), zeros)},
    "what comes past the sublayer left out": {"dx via mixed after": zeros},
    "norm term n times": {"dx via inv_rms": times(N)},
    "stream 2 of dlink not read": {"dx_next for dh_out via written": at((..., 2, slice(None)), zeros)},
    "dlink read up to the first block": {
        "dx_next for dh_post before via written": at((..., slice(BLOCK, None)), zeros)
    },
    # of the shifted form, the identity and the mean
    "gradient of the weights before of the first block": {
        "dh_in for dread via h_in": at((..., slice(BLOCK, None)), zeros)
    },
    "streams not kept": {"kept": zeros},
    "streams kept, but not backward": {"dx via kept": zeros},
    "sum of the streams": {"out": times(N)},
    # of the convolution
    "bias left out": {"bias for shift": zeros},
    "activation left out": {"gate for convolved": ones},
    "residual left out": {"added": zeros},
    "dweight without its last strip": {"dz for dweight via tapped": at((slice(None), slice(2 * BLOCK, None)), zeros)},
    "dbias counted per tap": {"dbias": times(4)},
}

# Faults of which only the place is found.
PLACED = {
    "halo missing": {"taps": no_halo},
    "leak between sequences": {"taps": leak},
    "halo missing in dweight": {"taps for dweight via tapped": no_halo},
}
