"""Sublayers of random parameters with any options, standard and shifted."""

import pytest
import torch

from mhc_ops.testing import cases

fp64 = torch.float64
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
