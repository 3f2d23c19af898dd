"""Compile the kernels of a convolution ahead, so that the first training step or request does not wait for each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.ahead import compile_ahead, up_to
from ..core.backend import choose
from ..core.check import check_count, check_flag, check_is_dtype, checked_sizes
from . import contracts
from .prepare import check_filter, check_kernel_limits


def conv_warmup(
    D: int,
    W: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int | Sequence[int] = 8192,
    bias: bool = False,
    activation: str | None = "silu",
    parameter_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int32,
    device: torch.device | str | None = None,
    backend: str | None = None,
    verbose: bool = True,
) -> int:
    """Compile what a convolution of D channels needs in training and in a server, on all cores.

    These are `causal_conv1d` with its gradients, `causal_conv1d_prefill`, and `causal_conv1d_update` of single tokens
    and of drafts, in the forms that the adapters of vLLM and SGLang call. A form that is not among them is compiled at
    its first call.

    tokens: how many a step, a chunk or a batch has at most, or a list of which the largest counts; sequences, slots and
      drafts may be any number. Caches are compiled for in both layouts, channels fastest or places fastest
    parameter_dtype: of weight and bias; None is dtype   index_dtype: of slots, boundaries and columns
    device: None is the GPU where there is one, else the CPU
    verbose: say on stderr what was compiled and how long it took, with a bar on a terminal

    Returns how many kernels it compiled or found in the cache on disk. The reference has none, and HIP's kernels are
    compiled at their first use.
    """
    function = "conv_warmup"
    largest = max(checked_sizes(function, tokens))
    for name, count in (("D", D), ("W", W)):
        check_count(function, name, count)
    types = {"dtype": dtype, "index_dtype": index_dtype}
    types |= {} if parameter_dtype is None else {"parameter_dtype": parameter_dtype}
    for name, value in types.items():
        check_is_dtype(function, name, value)
    for name, flag in (("bias", bias), ("verbose", verbose)):
        check_flag(function, name, flag)
    x, weight = (torch.zeros(shape, dtype=dtype, device="meta") for shape in ((1, largest, D), (D, W)))
    silu = check_filter(function, x, "[1, tokens, D]", weight, None, activation, 1)
    gpu = torch.cuda.is_available()
    where = torch.device(("cuda" if gpu else "cpu") if device is None else device)
    name = choose(function, "conv", backend, where)
    if name != "triton":
        return 0
    if where.type == "cuda" and not gpu:
        raise ValueError(f"{function}: device must be there, got {where} and torch sees no GPU")
    parameters = dtype if parameter_dtype is None else parameter_dtype
    check_kernel_limits(function, x, weight, name)
    own: Any = {"silu": silu, "bias": bias, "parameter_dtype": parameters, "index_dtype": index_dtype}

    def forms() -> None:
        for places_last in (False, True):
            for size in up_to(largest):
                launch_all(D, W, dtype, tokens=size, **own, places_last=places_last, device=where, backend=name)

    return compile_ahead(function, forms, where, verbose)


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
    for form in ({}, {"has_initial_state": None}, columns, blocks):
        launch(contracts.causal_conv1d_prefill_, **{**packed, **form})
    # A step of one token, drafts, and packed drafts: y new and in place; between columns in place.
    one, several, rows = zeros(N, D), zeros(N, 2, D), {"cu_seqlens": bounds}
    accepted = {"num_accepted_tokens": index}
    forms: list[tuple[Tensor, dict[str, Any]]] = [
        (one, {}), (several, accepted), (one, rows), (one, {**accepted, **rows}),
    ]  # fmt: skip
    for given, form in forms:
        for how in ({"x": given}, {"out": given}, {"out": given, **columns}):
            launch(contracts.causal_conv1d_step_, **{**slots, **form, **how, "max_seqlen": 1})
    windows = {"windows": zeros(N, 2, D, W - 1), "window_indices": index}
    tree = {"parents": zeros(N, 2, dtype=index_dtype)}
    for form in (windows, {**windows, **tree}):
        launch(contracts.causal_conv1d_step_, **{**slots, **form, "x": several, "max_seqlen": 2})
