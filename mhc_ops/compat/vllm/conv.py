"""vLLM's two functions of the convolution."""

from typing import Any

from torch import Tensor

from .. import servers


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = -1,
    null_block_id: int | None = 0,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    block_size_to_align: int | None = 0,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """The convolution of chunks of prompts, whose states are in a cache; `mhc_ops.causal_conv1d_prefill`.

    x: [D, tokens]   conv_states: [slots, D, W − 1 or more], the state in the first W − 1 places; x is converted to its
    type, and the result back
    cache_indices: [N], or [N, blocks] with columns for the prefix cache. A sequence whose slot is null_block_id is
    skipped, its rows are 0
    block_size_to_align: states at its multiples are kept if block_idx_first_scheduled_token is given
    pad_slot_id, metadata and validate_data have no effect: they belong to the grid of vLLM's kernel.
    """
    columns: Any = {"read_columns": initial_state_idx, "write_columns": block_idx_last_scheduled_token}
    if block_idx_first_scheduled_token is not None:
        columns |= {"first_columns": block_idx_first_scheduled_token, "tokens_before": num_computed_tokens}
        columns["block_size"] = block_size_to_align
    slots: Any = {"conv_state_indices": cache_indices, "pad_slot_id": null_block_id}
    bounds: Any = {"cu_seqlens": query_start_loc, "has_initial_state": has_initial_state}
    return servers.prefill(x, conv_states, weight, bias, activation, **bounds, **slots, **columns)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = 0,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    validate_data: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """One step of decoding, in place on conv_state; `mhc_ops.causal_conv1d_update`.

    x: [B, D], [B, D, T], or [tokens, D] with query_start_loc, of which the first B + 1 entries count, where B is the
    length of conv_state_indices. Without out, y takes the place of x, except where a slot is null. If the state has
    another type than x, x stays and y is a new tensor
    num_accepted_tokens: [B], of the drafts of the step before; conv_state then has W − 2 + T places or more
    """
    columns: Any = {"read_columns": initial_state_idx, "write_columns": block_idx_last_scheduled_token}
    slots: Any = {"conv_state_indices": conv_state_indices, "pad_slot_id": null_block_id}
    if query_start_loc is not None:
        if conv_state_indices is None:
            raise ValueError("causal_conv1d_update: query_start_loc needs conv_state_indices, got None")
        columns |= {"cu_seqlens": query_start_loc[: len(conv_state_indices) + 1]}
    most: Any = {} if query_start_loc is None else {"max_seqlen": max_query_len}
    given: Any = {"num_accepted_tokens": num_accepted_tokens, **columns, **slots, **most}
    return servers.step(x, conv_state, weight, bias, activation, out=out, in_place=out is None, **given)
