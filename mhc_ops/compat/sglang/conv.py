"""SGLang's functions of the convolution: those of its Triton kernels, and those of its CUDA kernels, with another order
of arguments."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...conv.ops import causal_conv1d
from .. import servers


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor | None,
    query_start_loc: Tensor,
    seq_lens_cpu: Sequence[int] | None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int | None = -1,
    validate_data: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """The convolution of chunks of prompts, whose states are in a cache; `mhc_ops.causal_conv1d_prefill`.

    x: [D, tokens]   conv_states: [slots, D, W − 1 or more], the state in the first W − 1 places; x is converted to its
    type, and the result back. Without it sequences begin with zeros, and no state is kept
    cache_indices: [N]. A sequence whose slot is pad_slot_id is skipped, its rows are 0
    seq_lens_cpu, block_table and validate_data have no effect: they belong to the grid of SGLang's kernel.
    """
    if conv_states is None:
        for name, given in (("has_initial_state", has_initial_state), ("cache_indices", cache_indices)):
            if given is not None:
                raise ValueError(f"causal_conv1d_fn: {name} needs conv_states, got None")
        tokens = x.transpose(0, 1)[None]
        y = causal_conv1d(tokens, weight, bias, activation=servers.word(activation), cu_seqlens=query_start_loc)
        return y[0].transpose(0, 1)
    slots: Any = {"conv_state_indices": cache_indices, "pad_slot_id": pad_slot_id}
    bounds: Any = {"cu_seqlens": query_start_loc, "has_initial_state": has_initial_state}
    return servers.prefill(x, conv_states, weight, bias, activation, **bounds, **slots)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int | None = -1,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """One step of decoding or of the verification of drafts, in place on conv_state; `mhc_ops.causal_conv1d_update`.

    x: [B, D] or [B, D, T], which stays; y is a new tensor
    intermediate_conv_window: [lines, steps, D, W − 1], receives the window after each token, in the line that
    intermediate_state_indices names
    retrieve_next_token, retrieve_next_sibling: [B, T] or wider, a tree of drafts, by its first children and next
    siblings, −1 for none. retrieve_parent_token receives the parents. conv_state then stays as it is: the window of the
    accepted token is copied to it afterwards
    cache_seqlens must be None, as in SGLang's kernel. metadata and validate_data have no effect.
    """
    if cache_seqlens is not None:
        raise ValueError("causal_conv1d_update: cache_seqlens must be None, as for SGLang's Triton kernel")
    given: Any = {"num_accepted_tokens": num_accept_tokens, "windows": intermediate_conv_window}
    given["window_indices"] = None if intermediate_conv_window is None else intermediate_state_indices
    if retrieve_next_token is None:
        of_tree = {"retrieve_next_sibling": retrieve_next_sibling, "retrieve_parent_token": retrieve_parent_token}
        for name, value in of_tree.items():
            if value is not None:
                raise ValueError(f"causal_conv1d_update: {name} needs retrieve_next_token, got None")
    else:
        if retrieve_next_sibling is None or x.dim() != 3:
            raise ValueError("causal_conv1d_update: retrieve_next_token needs retrieve_next_sibling and x [B, D, T]")
        T = x.shape[2]
        given["parents"] = parents_in(retrieve_next_token[:, :T], retrieve_next_sibling[:, :T])
        if retrieve_parent_token is not None:
            retrieve_parent_token[:, :T].copy_(given["parents"])
    slots: Any = {"conv_state_indices": conv_state_indices, "pad_slot_id": pad_slot_id}
    return servers.step(x, conv_state, weight, bias, activation, **given, **slots)


def parents_in(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """The parent of each token [B, T] of a tree, 0 where there is none. The host reads no values.

    A token comes after another one, either as its first child or as its next sibling. Each round follows the
    sibling links twice as far, until every token has its parent.
    """
    B, T = next_token.shape
    t = torch.arange(T, device=next_token.device).expand(B, T)
    after = next_token.new_zeros(B, T + 1, dtype=torch.int64)  # the last column takes what leads nowhere
    is_child = torch.ones_like(after, dtype=torch.bool)
    for target, child in ((next_sibling, False), (next_token, True)):
        place = torch.where((target >= 0) & (target < T), target, T).long()
        after.scatter_(1, place, t)
        is_child.scatter_(1, place, child)
    after, is_child = after[:, :T], is_child[:, :T]
    for _ in range(T.bit_length()):
        passed_on = after.gather(1, after), is_child.gather(1, after)
        after, is_child = torch.where(is_child, after, passed_on[0]), is_child | passed_on[1]
    return after.to(next_token.dtype)


def causal_conv1d_fn_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    conv_states: Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int | None = -1,
    seq_lens_cpu: Sequence[int] | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d_fn` with the order of arguments of SGLang's CUDA kernel; x also [B, D, L] without query_start_loc.
    x stays, and y is a new tensor, as SGLang itself does it where x is a transposed view."""
    given: Any = {"conv_states": conv_states, "cache_indices": cache_indices, "has_initial_state": has_initial_state}
    given |= {"activation": activation, "pad_slot_id": pad_slot_id, "seq_lens_cpu": None}
    if query_start_loc is not None:
        return causal_conv1d_fn(x, weight, bias, query_start_loc=query_start_loc, **given)
    if x.dim() != 3:
        raise ValueError(f"causal_conv1d_fn: x must be [B, D, L] without query_start_loc, got {list(x.shape)}")
    B, D, L = x.shape
    packed = x.transpose(1, 2).reshape(B * L, D).transpose(0, 1)
    bounds = torch.arange(B + 1, device=x.device) * L
    y = causal_conv1d_fn(packed, weight, bias, query_start_loc=bounds, **given)
    return y.transpose(0, 1).reshape(B, L, D).transpose(1, 2)


def causal_conv1d_update_cuda(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    pad_slot_id: int | None = -1,
) -> Tensor:
    """One step of decoding in SGLang's CUDA form: y takes the place of x, except at padding.
    cache_seqlens: [B], the state is then a ring buffer"""
    slots: Any = {"conv_state_indices": conv_state_indices, "pad_slot_id": pad_slot_id}
    if cache_seqlens is not None:
        y = servers.step(x, conv_state, weight, bias, activation, cache_seqlens=cache_seqlens, **slots)
        real = cache_seqlens >= 0
        if conv_state_indices is not None:
            real = real & (conv_state_indices >= 0) & (conv_state_indices < len(conv_state))
            if pad_slot_id is not None:
                real = real & (conv_state_indices != pad_slot_id)
        return x.copy_(torch.where(real.view(-1, *[1] * (x.dim() - 1)), y, x))
    return servers.step(x, conv_state, weight, bias, activation, in_place=True, **slots)
