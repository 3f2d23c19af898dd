"""Compile the kernels of a stack ahead, so that the first training step or request does not wait for each."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.ahead import compile_ahead, up_to
from ..core.backend import choose
from ..core.check import check_count, check_flag, check_is_dtype, checked_sizes
from . import contracts
from .options import PreKeywords, Residual, spelled_out
from .prepare import check_kernel_limits, check_kernel_options, check_not_tilelang, checked_to_mix


@spelled_out
def warmup(
    n: int,
    D: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    tokens: int | Sequence[int] = 8192,
    gamma: bool = False,
    layer_norm: bool = False,
    shifted: bool = False,
    training: bool = True,
    parameter_dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    backend: str | None = None,
    verbose: bool = True,
    **options: Unpack[PreKeywords],
) -> int:
    """Compile what a `HyperConnection` or `HyperStack` of these sizes needs, with and without gradients, on all cores.

    tokens: about how many a step has, or a list of such sizes; kernels for few (below a thousand) and for many differ
    shifted: as HyperStack has it
    training: False compiles what a server calls, for every number of tokens up to the largest of `tokens`: `mhc_pre`,
      `mhc_post`, `mhc_post_pre`, `mhc_head`, and with shifted what `mhc_enter`, `mhc_next` and `mhc_read` run without
      gradients
    device: None is the GPU where there is one, else the CPU
    verbose: say on stderr what was compiled and how long it took, with a bar on a terminal

    Returns how many kernels it compiled or found in the cache on disk. The reference has none. With TileLang, one step
    is run instead. `conv_warmup` is for the convolution.
    """
    function = "warmup"
    sizes = checked_sizes(function, tokens)
    largest = max(sizes)
    for name, count in (("n", n), ("D", D)):
        check_count(function, name, count)
    for name, value in (("dtype", dtype), ("parameter_dtype", parameter_dtype)):
        check_is_dtype(function, name, value)
    flags = {"gamma": gamma, "layer_norm": layer_norm, "shifted": shifted, "training": training, "verbose": verbose}
    for name, flag in flags.items():
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
    x = torch.zeros(largest, n, D, dtype=dtype, device=where)
    check_kernel_limits(function, x, name)
    check_kernel_options(function, run["options"], name)
    for wanted, word in ((layer_norm, "layer_norm"), (shifted, "shifted")):
        if wanted:
            check_not_tilelang(f"{function} with {word}", name)
    step = _step if training else _serving_step

    def steps() -> None:
        for size in sizes if training else up_to(largest):
            step(x[:size], gamma, layer_norm, shifted, parameter_dtype, **run)

    if name == "triton":
        return compile_ahead(function, steps, x.device, verbose)
    steps()
    return 0


def _parameters(x: Tensor, gamma: bool, layer_norm: bool, dtype: torch.dtype, options: Any) -> dict[str, Any]:
    n, D = x.shape[-2:]
    sections = [n, n] if options.residual == Residual.IDENTITY else [n, n, n * n]

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=x.device)

    return {
        "phi": zeros(sum(sections), n * D),
        "alpha": zeros(len(sections)),
        "bias": zeros(sum(sections)),
        "gamma": zeros(n, D) if gamma else None,
        "layer_norm_weight": zeros(D) if layer_norm else None,
    }


def _serving_step(
    x: Tensor, gamma: bool, layer_norm: bool, shifted: bool, dtype: torch.dtype, backend: str, options: Any
) -> None:
    """What a server calls, on zeros."""
    n = x.shape[-2]
    own = _parameters(x, gamma, layer_norm, dtype, options)
    pre_inputs = {"x": x, **own, "options": options, "backend": backend}
    pre = contracts.mhc_pre_fwd.launch(**pre_inputs)
    h_res = pre.h_res if pre.h_res.numel() else None
    of_post = {"h_out": pre.h_in, "h_post": pre.h_post, "h_res": h_res}
    contracts.mhc_post_fwd.launch(x=x, **of_post, transposed=options.transposed, backend=backend)
    contracts.mhc_post_pre_fwd.launch(**pre_inputs, **of_post)
    of_head = {"phi": own["phi"][:n], "alpha": own["alpha"][:1], "bias": own["bias"][:n], "gamma": own["gamma"]}
    eps = {"norm_eps": options.norm_eps, "hc_eps": options.hc_eps}
    contracts.mhc_head_fwd.launch(x=x, **of_head, **eps, backend=backend)
    if shifted:
        read = torch.zeros(x.shape[:-1], dtype=torch.float32, device=x.device)
        contracts.mhc_layer_pre.launch(**pre_inputs, read=read)
        contracts.mhc_next_fwd.launch(**pre_inputs, **of_post, read=read, link=None, linked=False)
        contracts.mhc_read_fwd.launch(x=x, h_pre=read, backend=backend)


def _step(
    x: Tensor, gamma: bool, layer_norm: bool, shifted: bool, dtype: torch.dtype, backend: str, options: Any
) -> None:
    """The ops of a training step of a stack and of a forward without gradients, on zeros."""
    own = _parameters(x, gamma, layer_norm, dtype, options)
    pre_inputs = {"x": x, **own, "options": options, "backend": backend}
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
    if read is not None:  # with which a shifted stack ends
        contracts.mhc_read_fwd.launch(x=x, h_pre=read, backend=backend)
        contracts.mhc_read_bwd.launch(x=x, h_pre=read, dh_in=pre.h_in, backend=backend)
