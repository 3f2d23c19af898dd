"""Compile the kernels of a stack ahead and in parallel, so that the first training step does not wait for each."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.backend import choose
from ..core.check import check_count, check_flag
from ..core.launch import collected
from . import contracts
from .options import PreKeywords, Residual, spelled_out
from .prepare import check_kernel_limits, check_kernel_options, check_not_tilelang, checked_to_mix


@spelled_out
def warmup(
    n: int,
    D: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int = 8192,
    gamma: bool = False,
    layer_norm: bool = False,
    shifted: bool = False,
    parameter_dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    backend: str | None = None,
    **options: Unpack[PreKeywords],
) -> int:
    """Compile what a `HyperConnection` or `HyperStack` of these sizes needs, with and without gradients, on all cores.

    tokens: about how many a step has; kernels for few (below a thousand) and for many differ
    shifted: as HyperStack has it
    device: None is the GPU where there is one, else the CPU

    Returns how many kernels it compiled or found in the cache on disk. The reference has none. With TileLang, one step
    is run instead.
    """
    function = "warmup"
    for name, count in (("n", n), ("D", D), ("tokens", tokens)):
        check_count(function, name, count)
    for name, value in (("dtype", dtype), ("parameter_dtype", parameter_dtype)):
        if not isinstance(value, torch.dtype):
            raise TypeError(f"{function}: {name} must be a torch.dtype, got {type(value).__name__}")
    for name, flag in (("gamma", gamma), ("layer_norm", layer_norm), ("shifted", shifted)):
        check_flag(function, name, flag)
    run: dict[str, Any] = {"options": checked_to_mix(function, dict(options))}
    gpu = torch.cuda.is_available()
    where = torch.device(("cuda" if gpu else "cpu") if device is None else device)
    name = run["backend"] = choose(function, "mhc", backend, where)
    if name == "reference":
        return 0
    if where.type == "cuda" and not gpu:
        without = "without the argument it is the CPU here, where there is nothing to compile"
        raise ValueError(f"{function}: device must be there, got {where} and torch sees no GPU; {without}")
    x = torch.zeros(tokens, n, D, dtype=dtype, device=where)
    check_kernel_limits(function, x, name)
    check_kernel_options(function, run["options"], name)
    for wanted, word in ((layer_norm, "layer_norm"), (shifted, "shifted")):
        if wanted:
            check_not_tilelang(f"{function} with {word}", name)
    if name != "triton":
        _step(x, gamma, layer_norm, shifted, parameter_dtype, **run)
        return 0
    with collected() as compilations:
        _step(x, gamma, layer_norm, shifted, parameter_dtype, **run)

    def compile_one(compilation: Any) -> None:
        with torch.cuda.device(x.device) if x.is_cuda else torch.no_grad():  # threads have a current device each
            compilation()

    distinct = {_signature(compilation): compilation for compilation in compilations}  # ops share kernels
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compile_one, distinct.values()))
    return len(distinct)


def _signature(compilation: Any) -> tuple[Any, ...]:
    """Equal where Triton would compile the same."""

    def kind(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.data_ptr() % 16
        return value if isinstance(value, int | float | str | None) else id(value)

    options = [value for name, value in compilation.keywords.items() if name != "grid"]
    return compilation.func, *((type(value), kind(value)) for value in (*compilation.args, *options))


def _step(
    x: Tensor, gamma: bool, layer_norm: bool, shifted: bool, dtype: torch.dtype, backend: str, options: Any
) -> None:
    """The ops of a training step of a stack and of a forward without gradients, on zeros."""
    n, D = x.shape[-2:]
    sections = [n, n] if options.residual == Residual.IDENTITY else [n, n, n * n]
    M = sum(sections)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=x.device)

    maps = {
        "phi": zeros(M, n * D),
        "alpha": zeros(len(sections)),
        "bias": zeros(M),
        "gamma": zeros(n, D) if gamma else None,
    }
    weight = zeros(D) if layer_norm else None
    pre_inputs = {"x": x, **maps, "layer_norm_weight": weight, "options": options, "backend": backend}
    read = torch.zeros(*x.shape[:-1], dtype=torch.float32, device=x.device) if shifted else None
    pre = contracts.mhc_layer_pre.launch(**pre_inputs, read=read)
    h_res = pre.h_res if pre.h_res.numel() else None
    boundary = {"x": x, "h_out": pre.h_in, "h_post": pre.h_post, "h_res": h_res, "backend": backend}
    post_inputs = {**boundary, "transposed": options.transposed}
    contracts.mhc_layer_post.launch(link=pre.link, **post_inputs)
    post = contracts.mhc_post_bwd.launch(**post_inputs, dx_next=x, residual=False)
    dh_res = post.dh_res if post.dh_res.numel() else None
    kept = {"inv_rms": pre.inv_rms, "h_mix": pre.h_mix, "read": read, "dh_pre": read}
    cotangents = {"dh_in": pre.h_in, "dh_post": post.dh_post, "dh_res": dh_res, "dx_next": x}
    contracts.mhc_pre_bwd.launch(**pre_inputs, **kept, **cotangents)
    contracts.mhc_pre_fwd.launch(**pre_inputs)

    next_inputs = {**pre_inputs, **boundary, "read": read}
    between = contracts.mhc_next_fwd.launch(**next_inputs, link=pre.link, linked=True)
    contracts.mhc_next_fwd.launch(**next_inputs, link=None, linked=False)
    kept = {"x_next": x, "inv_rms": between.inv_rms, "h_mix": between.h_mix, "dx_next": None, "dlink_next": x}
    cotangents = {"dh_in": pre.h_in, "dh_post_next": post.dh_post, "dh_res_next": dh_res, "dh_pre_next": read}
    contracts.mhc_next_bwd.launch(**next_inputs, **kept, **cotangents)
