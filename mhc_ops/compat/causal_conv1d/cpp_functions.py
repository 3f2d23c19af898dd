"""causal_conv1d.cpp_functions: the package's compiled functions, without autograd. mamba-ssm and fla build autograd
functions of their own on them.
"""

import torch
from torch import Tensor

from .causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update


@torch.no_grad()
def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    """The first result of `causal_conv1d_fn`; final states are written to final_states_out if it is given."""
    activation, wanted = "silu" if silu_activation else None, final_states_out is not None
    result = causal_conv1d_fn(x, weight, bias, seq_idx, initial_states, wanted, final_states_out, activation)
    return result[0] if isinstance(result, tuple) else result


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """dx, dweight, dbias and dinitial_states, None for inputs that are absent. dx is written to if it is given."""
    wanted = {"x": x, "weight": weight, "bias": bias}
    wanted |= {"initial_states": initial_states} if return_dinitial_states else {}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in wanted.items() if tensor is not None}
    with torch.enable_grad():
        result = causal_conv1d_fn(
            leaves["x"],
            leaves["weight"],
            leaves.get("bias"),
            seq_idx,
            leaves.get("initial_states", initial_states),
            return_final_states=dfinal_states is not None,
            activation="silu" if silu_activation else None,
        )
    outputs = result if isinstance(result, tuple) else (result,)
    cotangents = [dout] if dfinal_states is None else [dout, dfinal_states]
    gradients = dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), cotangents)))
    into = gradients["x"] if dx is None else dx.copy_(gradients["x"])
    return into, gradients["weight"], gradients.get("bias"), gradients.get("initial_states")


def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """`causal_conv1d_update`, with the activation as a flag."""
    activation = "silu" if silu_activation else None
    return causal_conv1d_update(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
