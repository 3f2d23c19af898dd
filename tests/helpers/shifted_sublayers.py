"""What tests of the shifted form and the other maps share: options, sublayers of random parameters, and ways to run
them."""

import pytest
import shifted_oracle
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


def sublayers(options, outer, n, D, dtype, gamma=True, norm=True, scale=1.0, parameter_dtype=fp32, device="cpu"):
    """x, and the parameters of a sublayer for each of the options, by their names; all need a gradient."""
    drawn = []
    for number, own in enumerate(options):
        seed = cases.SEED + number
        case = cases.Case(
            cases.MHC_PRE_NORMED,
            outer,
            n,
            D,
            dtype,
            gamma=gamma,
            scale=scale,
            parameter_dtype=parameter_dtype,
            seed=seed,
        )
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


def in_a_loop(x, parameters, options, shifted=False, read=None):
    """x behind all sublayers; shifted, x, p and what they are contracted to."""
    of_shifted = {"shifted": True, "read": read} if shifted else {}
    h_in, carry = mhc_ops.mhc_enter(x, **parameters[0], **options[0], **of_shifted)
    for own, given in zip(parameters[1:], options[1:]):
        h_in, carry = mhc_ops.mhc_next(carry, layer(h_in), **own, **given)
    out = mhc_ops.mhc_leave(carry, layer(h_in))
    return (*out, mhc_ops.mhc_read(*out)) if shifted else (out,)


def in_oracle(x, parameters, options, shifted=False, read=None, scaled=None):
    out = shifted_oracle.stack(x, [layer] * len(parameters), parameters, options, read, shifted, scaled)
    return (*out, shifted_oracle.contract(*out)) if shifted else (out,)


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


def sublayer(x, read, h_out, own, options):
    """One shifted sublayer around a layer whose output is given: h_in, x_next, p."""
    h_in, carry = mhc_ops.mhc_enter(x, **own, **options, shifted=True, read=read)
    return h_in, *mhc_ops.mhc_leave(carry, h_out)


def sublayer_in_oracle(x, read, h_out, own, options, scaled):
    h_ins = []

    def keep(h_in):
        h_ins.append(h_in)
        return h_out

    out = shifted_oracle.stack(x, [keep], [own], [options], read, True, scaled)
    return h_ins[0], *out


def by_parts(x, parameters, options, shifted):
    """Of mhc_maps, mhc_read and mhc_post, where nothing is fused."""
    of_post = {"transposed": options.get("transposed", False)}
    of_maps = {name: value for name, value in options.items() if name != "layer_norm_eps"}
    p = torch.eye(x.shape[-2], device=x.device)[0].expand(x.shape[:-1])
    for own in parameters:
        weight = own.get("layer_norm_weight")
        maps = {name: t for name, t in own.items() if name != "layer_norm_weight"}
        h_pre, h_post, h_res = mhc_ops.mhc_maps(x, **maps, **of_maps)
        h_in = mhc_ops.mhc_read(x.float(), p if shifted else h_pre)
        if weight is not None:
            h_in = (
                weight * h_in * torch.rsqrt(h_in.square().mean(-1, keepdim=True) + options.get("layer_norm_eps", 1e-6))
            )
        h_in = h_in.to(x.dtype)
        x, p = mhc_ops.mhc_post(x, layer(h_in), h_post, h_res, **of_post), h_pre
    return (x, p, mhc_ops.mhc_read(x, p)) if shifted else (x,)
