"""Sublayers of random parameters with any options, standard and shifted, and ways to run them."""

import pytest
import stack_oracle
import torch
from mhc_kernels import fp32
from stack_results import assert_close, exact, gradients

import mhc_ops
from mhc_ops.testing import cases

fp64 = torch.float64
T, D = 5, 7  # sizes that are a multiple of nothing
OPTIONS = {
    "standard": {},
    "identity": {"residual": "identity"},
    "identity of Hy4": {"residual": "identity", "post_eps": 1e-6, "norm_eps": 1e-5},
    "post_eps": {"post_eps": 0.25, "post_mult": 1.5},
    "transposed": {"transposed": True},
    "no eps": {"sinkhorn_eps": 0.0, "hc_eps": 0.0},
    "norm_eps of V4.1": {"norm_eps": 1e-20},
    "all else": {"norm_eps": 1e-2, "hc_eps": 1e-2, "sinkhorn_iters": 3, "sinkhorn_eps": 1e-3, "layer_norm_eps": 1e-2,
                 "transposed": True, "post_eps": 0.1},
}  # fmt: skip
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
both_forms = pytest.mark.parametrize("shifted", [False, True], ids=["standard form", "shifted"])


def layer(h_in):
    return torch.tanh(h_in) + 0.5 * h_in


def sublayers(options, outer, n, D, dtype, gamma=True, norm=True, device="cpu", **more):
    """x, and the parameters of a sublayer for each of the options, by their names; all need a gradient."""
    drawn = []
    for number, own in enumerate(options):
        seed = cases.SEED + number
        case = cases.Case(cases.MHC_PRE_NORMED, outer, n, D, dtype, gamma=gamma, seed=seed, **more)
        tensors = case.inputs(device)
        if own.get("residual") == "identity":
            tensors |= {name: tensors[name][: 2 * n].clone() for name in ("phi", "bias")}
            tensors["alpha"] = tensors["alpha"][:2].clone()
        if not norm:
            del tensors["layer_norm_weight"]
        drawn.append(tensors)
    x, *_ = [tensors.pop("x") for tensors in drawn]
    if dtype == fp64:
        drawn = [{name: t.double() for name, t in own.items()} for own in drawn]
    return x.requires_grad_(), [{k: t.requires_grad_() for k, t in own.items()} for own in drawn]


def in_a_loop(x, parameters, options, shifted=False):
    """x after all sublayers; shifted, x, p and what they are contracted to."""
    h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], **options[0], shifted=shifted)
    for own, given in zip(parameters[1:], options[1:]):
        h_in, carry = mhc_ops.mhc_next(carry, layer(h_in), **own, **given)
    out = mhc_ops.mhc_leave(carry, layer(h_in))
    return (*out, mhc_ops.mhc_read(*out)) if shifted else (out,)


def in_oracle(x, parameters, options, shifted=False, scaled=None):
    out = stack_oracle.stack(x, [layer] * len(parameters), parameters, options, None, shifted, scaled)
    return (*out, stack_oracle.contract(*out)) if shifted else (out,)


def layer_by_layer(x, parameters, options):
    for own, given in zip(parameters, options):
        x = mhc_ops.mhc_layer(x, layer, **own, **given)
    return (x,)


def unfused(x, parameters, options):
    """Every sublayer by mhc_pre and mhc_post."""
    for own, given in zip(parameters, options):
        h_in, h_post, h_res = mhc_ops.mhc_pre(x, **own, **given)
        x = mhc_ops.mhc_post(x, layer(h_in), h_post, h_res, transposed=given.get("transposed", False))
    return (x,)


def by_parts(x, parameters, options, shifted):
    """By mhc_maps, mhc_read and mhc_post, where nothing is fused."""
    p = torch.eye(x.shape[-2], device=x.device)[0].expand(x.shape[:-1])
    for own, given in zip(parameters, options):
        weight, eps = own.get("layer_norm_weight"), given.get("layer_norm_eps", 1e-6)
        maps = {name: t for name, t in own.items() if name != "layer_norm_weight"}
        of_maps = {name: value for name, value in given.items() if name != "layer_norm_eps"}
        h_pre, h_post, h_res = mhc_ops.mhc_maps(x, **maps, **of_maps)
        h_in = mhc_ops.mhc_read(x.float(), p if shifted else h_pre)
        if weight is not None:
            h_in = weight * h_in * torch.rsqrt(h_in.square().mean(-1, keepdim=True) + eps)
        transposed = given.get("transposed", False)
        x, p = mhc_ops.mhc_post(x, layer(h_in.to(x.dtype)), h_post, h_res, transposed=transposed), h_pre
    return (x, p, mhc_ops.mhc_read(x, p)) if shifted else (x,)


def leaves_of(x, parameters, *more):
    return [x, *(tensor for own in parameters for tensor in own.values()), *more]


def in_doubles(x, parameters):
    wide = [{name: t.detach().double().requires_grad_() for name, t in own.items()} for own in parameters]
    return x.detach().double().requires_grad_(), wide


def assert_like_the_oracle(options, n=3, dtype=fp64, shifted=True, outer=(T,), **drawn):
    x, parameters = sublayers(options, outer, n, D, dtype, **drawn)
    results = gradients(in_a_loop(x, parameters, options, shifted), leaves_of(x, parameters))
    wide, double = in_doubles(x, parameters)
    scaled = []
    outputs = in_oracle(wide, double, options, shifted, scaled=scaled)
    assert_close(results, exact(outputs, leaves_of(wide, double), scaled))


def assert_rounded_once(options, tokens, n, dtype, device="cpu", scale=1.0, **drawn):
    """Outputs and gradients of one shifted sublayer, around a layer whose output is given."""
    x, (own,) = sublayers([options], (tokens,), n, 33, dtype, device=device, scale=scale, **drawn)
    generator = torch.Generator().manual_seed(cases.SEED + 5)
    read = torch.sigmoid(torch.randn(tokens, n, generator=generator)).to(device).requires_grad_()
    h_out = (scale * torch.randn(tokens, 33, generator=generator)).to(device, dtype).requires_grad_()
    h_in, carry = mhc_ops.mhc_enter(x, **own, **options, shifted=True, read=read)
    outputs = (h_in, *mhc_ops.mhc_leave(carry, h_out))
    assert [output.dtype for output in outputs] == [dtype, dtype, fp32]
    results = gradients(outputs, leaves_of(x, [own], read, h_out))
    wide, (double,) = in_doubles(x, [own])
    of_read, of_h_out = (t.detach().double().requires_grad_() for t in (read, h_out))
    h_ins, scaled = [], []

    def keep(h_in):
        h_ins.append(h_in)
        return of_h_out

    out = stack_oracle.stack(wide, [keep], [double], [options], of_read, True, scaled)
    leaves = leaves_of(wide, [double], of_read, of_h_out)
    found = exact((*h_ins, *out), leaves, scaled, [o.dtype for o in outputs])
    assert_close([r.float() if r.dtype == fp64 else r for r in results], found)  # an fp64 parameter: fp32 sums
