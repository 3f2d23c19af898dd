"""The launches of a convolution in training, decoding and serving, to be compiled ahead (core/launch.py: collected)."""

from typing import Any

import torch
from torch import Tensor

from . import contracts


def launch_all(
    D: int,
    W: int,
    dtype: torch.dtype,
    *,
    tokens: int,
    silu: bool,
    bias: bool,
    parameter_dtype: torch.dtype,
    index_dtype: torch.dtype,
    places_last: bool,
    device: torch.device,
    backend: str,
) -> None:
    """The kernels of `causal_conv1d`, `causal_conv1d_prefill` and `causal_conv1d_update` for D channels, on zeros.

    tokens: about how many a step has; index_dtype: of slots, boundaries and columns; places_last: the cache is
    [slots, D, length] in memory, not [slots, length, D].
    """

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def launch(op: Any, **inputs: Any) -> None:
        op.launch(backend=backend, **{**dict.fromkeys(op.inputs), **filters, **inputs})

    filters: dict[str, Any] = {"weight": zeros(D, W, dtype=parameter_dtype), "silu": silu}
    filters["bias"] = zeros(D, dtype=parameter_dtype) if bias else None
    x, N = zeros(1, tokens, D), 2
    bounds, index = zeros(N + 1, dtype=index_dtype), zeros(N, dtype=index_dtype)
    states = zeros(N, W - 1, D).transpose(1, 2)
    for where in ({}, {"cu_seqlens": bounds}, {"cu_seqlens": bounds, "initial_state": states}):
        final = "initial_state" in where
        launch(contracts.causal_conv1d_fwd, x=x, **where, dilation=1, output_final_state=final)
        dstates = states.contiguous() if final else None
        launch(contracts.causal_conv1d_bwd, x=x, **where, dilation=1, dy=x, dfinal_state=dstates)
    cache = zeros(N, D, W) if places_last else zeros(N, W, D).transpose(1, 2)
    slots: dict[str, Any] = {"conv_state": cache, "conv_state_indices": index, "pad_slot_id": -1}
    launch(contracts.causal_conv1d_update_, x=zeros(N, D), **slots, dilation=1)
    if W < 2:  # a cache holds at least one input
        return
    goes_on, table = zeros(N, dtype=torch.bool), {"conv_state_indices": zeros(N, 2, dtype=index_dtype)}
    packed = {"x": x[0], **slots, "cu_seqlens": bounds, "has_initial_state": goes_on, "block_size": 0}
    columns = {**table, "read_columns": index, "write_columns": index}
    blocks = {**columns, "first_columns": index, "tokens_before": index, "block_size": 16}
    launch(contracts.causal_conv1d_prefill_, **packed)
    launch(contracts.causal_conv1d_prefill_, **{**packed, **blocks})
    # A step of one token, drafts, and packed drafts: y new and in place; between columns in place.
    one, several, rows = zeros(N, D), zeros(N, 2, D), {"cu_seqlens": bounds}
    accepted = {"num_accepted_tokens": index}
    forms: list[tuple[Tensor, dict[str, Any]]] = [(one, {}), (several, accepted), (one, {**accepted, **rows})]
    for given, form in forms:
        for how in ({"x": given}, {"out": given}, {"out": given, **columns}):
            launch(contracts.causal_conv1d_step_, **{**slots, **form, **how, "max_seqlen": 1})
    windows = {"windows": zeros(N, 2, D, W - 1), "window_indices": index}
    tree = {"parents": zeros(N, 2, dtype=index_dtype)}
    for form in (windows, {**windows, **tree}):
        launch(contracts.causal_conv1d_step_, **{**slots, **form, "x": several, "max_seqlen": 2})
