"""The functions of `tile_kernels.modeling.mhc` and `.ops` of DeepSeek's TileKernels 1.0, which version 2 removed.

    from mhc_ops.compat.tile_kernels import mhc_pre, mhc_post, mhc_head

or, before the first import of a program that imports them by their own name:

    from mhc_ops.compat import tile_kernels
    tile_kernels.install()

The same as in TileKernels: names, arguments and defaults (post_mult_value 1.0 and sinkhorn_repeat 10, not DeepSeek V4's
2.0 and 20), shapes ([..., n, 1] for pre and post), types, and what is written to `out` and to the lists of
`mhc_multilayer_recompute`. The gradient of a parameter that has a `main_grad` is added to it, and autograd gets none.

Different:

- No limits: n from 1 to 8, any D, any leading dimensions and strides, fp16 and fp32 too, CPU tensors.
- Results are computed in fp32 and rounded once; TileKernels rounds fn to tf32.
- `main_grad` is always used, for fn, norm_weight, scale and base; in TileKernels for the first two, and only with a
  norm_weight. A parameter with `grad_added_to_main_grad` (Megatron's DDP) gets it set, and zeros as its gradient.
- norm_weight is used without gradients too; TileKernels ignores it then.
- The gradient of the streams goes through autograd. In TileKernels `fuse_grad_acc` passes it from `mhc_post` to
  `mhc_pre` in an attribute of the storage. Here fuse_grad_acc and n_splits have no effect.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.check import check_tensors
from ..mhc import ops
from . import stand_ins


def expand_from_embedding(x: Tensor, mhc_mult: int = 4) -> Tensor:
    """The start of a model: mhc_mult copies of x, [..., D] to [..., n, D]."""
    return expand_to_mhc(x, mhc_mult)


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The input of a sublayer, and (post_mix, comb_mix) for `mhc_post`; `mhc_ops.mhc_pre` in one call.

    residual: [..., n, D]   fn: [n² + 2n, nD]   scale: [3]   base: [n² + 2n]   norm_weight: [nD]
    Returns layer_input [..., D] and (post_mix [..., n, 1], comb_mix [..., n, n]).
    """
    _check_mult("mhc_pre", mhc_mult, residual)
    layer_input, post_mix, comb_mix = ops.mhc_pre(
        residual,
        _to_main_grad(fn),
        _to_main_grad(scale),
        _to_main_grad(base),
        _gamma(residual, norm_weight),
        norm_eps=norm_eps,
        hc_eps=pre_eps,
        post_mult=post_mult_value,
        sinkhorn_iters=sinkhorn_repeat,
        sinkhorn_eps=sinkhorn_eps,
    )
    return layer_input, (post_mix.unsqueeze(-1), comb_mix)


def mhc_head(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int = 16,
) -> Tensor:
    """Merge the streams at the end of a model; `mhc_ops.mhc_head`.

    residual: [..., n, D]   fn: [n, nD]; further rows are not read   scale: [1] or []   base: [n]
    """
    _check_mult("mhc_head", mhc_mult, residual)
    return ops.mhc_head(
        residual,
        _to_main_grad(fn)[:mhc_mult],
        _to_main_grad(scale),
        _to_main_grad(base),
        _gamma(residual, norm_weight),
        norm_eps=norm_eps,
        hc_eps=pre_eps,
    )


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """mhc_mult copies of hidden, [..., D] to [..., n, D]."""
    return _written(out, ops.mhc_expand(hidden, mhc_mult))


def mhc_pre_norm_fn(
    residual: Tensor,
    mhc_fn: Tensor,
    mhc_norm_weight: Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,
) -> Tensor:
    """fn @ (norm_weight ⊙ v) · rsqrt(mean(v²) + eps) with v = residual as [nD]: [..., n, D] to [..., rows of fn], fp32.

    It runs on the kernels of `mhc_maps`, n² rows at a time: with alpha 1 and bias 0 these are the logits of h_res.
    """
    n, D = residual.shape[-2:]
    gamma, mhc_fn = _gamma(residual, mhc_norm_weight), _to_main_grad(mhc_fn)
    alpha, bias = mhc_fn.new_ones(3), mhc_fn.new_zeros(n * n + 2 * n)
    mixes = []
    for rows in mhc_fn.split(n * n):
        phi = torch.cat([rows.new_zeros(2 * n, n * D), rows, rows.new_zeros(n * n - len(rows), n * D)])
        *_, logits = ops.mhc_maps(residual, phi, alpha, bias, gamma, norm_eps=mhc_norm_eps, residual="logits")
        mixes.append(logits.flatten(-2)[..., : len(rows)])
    return torch.cat(mixes, -1)


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """pre_mix = σ(z_pre) + pre_eps, post_mix = post_mult·σ(z_post), comb_mix = z_res, z = scale·mixes + base.

    input_mixes: [..., n² + 2n]. Returns pre_mix and post_mix [..., n, 1], comb_mix [..., n, n], no Sinkhorn yet.
    """
    sizes = [mhc_mult, mhc_mult, mhc_mult * mhc_mult]
    scales = torch.cat([scale.expand(size) for scale, size in zip(_to_main_grad(mhc_scale).unbind(), sizes)])
    pre, post, comb = (input_mixes * scales + _to_main_grad(mhc_base)).split(sizes, -1)
    pre_mix = torch.sigmoid(pre).unsqueeze(-1) + mhc_pre_eps
    post_mix = torch.sigmoid(post).unsqueeze(-1) * mhc_post_mult_value
    return pre_mix, post_mix, comb.unflatten(-1, (mhc_mult, mhc_mult))


def mhc_head_compute_mix(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    """σ(scale·mix + base) + pre_eps, of [..., n]."""
    return torch.sigmoid(input_mix * _to_main_grad(mhc_scale) + _to_main_grad(mhc_base)) + mhc_pre_eps


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Doubly stochastic matrices from logits [..., n, n], typed as x; `mhc_ops.sinkhorn`."""
    return ops.sinkhorn(x, repeat, eps).to(x.dtype)


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """Σ_i mix[i]·x[i]: x [..., n, D] and mix [..., n, 1] to [..., D]; `mhc_ops.mhc_read`."""
    return _written(out, ops.mhc_read(x, mix.squeeze(-1)))


@torch.no_grad()
def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """`mhc_pre` without gradients: post_mix [..., n, 1], comb_mix [..., n, n], layer_input [..., D], in this order."""
    layer_input, (post_mix, comb_mix) = mhc_pre(
        residual,
        fn,
        mhc_scale,
        mhc_base,
        norm_eps=rms_eps,
        mhc_mult=residual.shape[-2],
        post_mult_value=mhc_post_mult_value,
        pre_eps=mhc_pre_eps,
        sinkhorn_eps=mhc_sinkhorn_eps,
        sinkhorn_repeat=sinkhorn_repeat,
    )
    return post_mix, comb_mix, layer_input


def mhc_post(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> Tensor:
    """Write a sublayer's output x [..., D] back into the streams: post[j]·x + Σ_i comb[i, j]·residual[i].

    residual: [..., n, D]   post_layer_mix: [..., n, 1]   comb_res_mix: [..., n, n]. `mhc_ops.mhc_post`.
    """
    return _written(out, ops.mhc_post(residual, x, post_layer_mix.squeeze(-1), comb_res_mix))


@torch.no_grad()
def mhc_post_fwd(
    x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor, out: Tensor | None = None
) -> Tensor:
    """`mhc_post` without gradients."""
    return mhc_post(x, residual, post_layer_mix, comb_res_mix, out)


def mhc_post_bwd(
    x: Tensor,
    residual: Tensor,
    post_layer_mix: Tensor,
    comb_res_mix: Tensor,
    d_o: Tensor,
    fuse_grad_acc: bool = True,
) -> tuple[Tensor, ...]:
    """The gradients of `mhc_post` in x, residual, post_layer_mix and comb_res_mix. It runs the forward again."""
    given = [tensor.detach().requires_grad_() for tensor in (x, residual, post_layer_mix, comb_res_mix)]
    with torch.enable_grad():
        return torch.autograd.grad(mhc_post(*given), given, d_o)


@torch.no_grad()
def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: Sequence[Tensor],
    layer_output_list: Sequence[Tensor],
    post_mix_list: Sequence[Tensor],
    comb_mix_list: Sequence[Tensor],
    layer_input_list: Sequence[Tensor],
    residual_list: Sequence[Tensor],
) -> None:
    """Recompute the inputs of L layers and the streams between them from layer outputs and maps.

    layer_input_list[l] becomes Σ_i pre_mix[l][i]·x[i], residual_list[l] the streams after layer l, which the next layer
    reads. There are L outputs, or L − 1: then nothing is written after the last input.
    """
    after = (layer_output_list, post_mix_list, comb_mix_list, residual_list)
    lengths = [len(pre_mix_list), len(layer_input_list), *map(len, after)]
    if lengths[0] != lengths[1] or len(set(lengths[2:])) > 1 or lengths[0] - lengths[2] not in (0, 1):
        raise AssertionError(f"mhc_multilayer_recompute: L inputs and L or L − 1 outputs are needed, got {lengths}")
    streams = initial_residual
    for layer, pre_mix in enumerate(pre_mix_list):
        weights = pre_mix.reshape(streams.shape[:-1])
        layer_input_list[layer].copy_(ops.mhc_read(streams, weights).view_as(layer_input_list[layer]))
        if layer < len(layer_output_list):
            output, post, comb, residual = (values[layer] for values in after)
            *outer, n, D = streams.shape
            of_post = output.reshape(*outer, D), post.reshape(*outer, n), comb.reshape(*outer, n, n)
            streams = ops.mhc_post(streams, *of_post)
            residual.copy_(streams.view_as(residual))


def _mhc_sinkhorn_fwd(hidden_size: int, token_block_size: int, repeat: int, eps: float) -> Callable[..., None]:
    """A function that fills out [T, n, n] from x, as NeMo Automodel calls it."""

    def kernel(x: Tensor, out: Tensor) -> None:
        with torch.no_grad():
            out.copy_(ops.sinkhorn(x, repeat, eps))

    return kernel


def _mhc_sinkhorn_bwd(hidden_size: int, token_block_size: int, repeat: int, eps: float) -> Callable[..., None]:
    """A function that fills the gradient of x from that of out and x, as NeMo Automodel calls it."""

    def kernel(d_out: Tensor, x: Tensor, d_x: Tensor) -> None:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(sinkhorn_normalize(x, repeat, eps), x, d_out)
        d_x.copy_(gradient)

    return kernel


class _ToMainGrad(torch.autograd.Function):
    """A parameter whose gradient is added to its main_grad; autograd gets none. If the parameter has
    grad_added_to_main_grad, it is set and autograd gets zeros: Megatron's DDP waits for a gradient but must not add it.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, main_grad: Tensor) -> Tensor:
        ctx.parameter, ctx.main_grad = parameter, main_grad
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        ctx.main_grad.add_(gradients[0])
        if not hasattr(ctx.parameter, "grad_added_to_main_grad"):
            return None, None
        ctx.parameter.grad_added_to_main_grad = True
        return torch.zeros_like(ctx.parameter), None


def _to_main_grad(parameter: Tensor) -> Tensor:
    main_grad = getattr(parameter, "main_grad", None)
    return parameter if main_grad is None else _ToMainGrad.apply(parameter, main_grad)


def _gamma(residual: Tensor, norm_weight: Tensor | None) -> Tensor | None:
    """norm_weight [nD] as [n, D]."""
    return None if norm_weight is None else _to_main_grad(norm_weight).view(residual.shape[-2:])


def _check_mult(function: str, mhc_mult: int, residual: Tensor) -> None:
    check_tensors(function, residual=residual)
    if residual.dim() < 2 or residual.shape[-2] != mhc_mult:
        raise ValueError(f"{function}: residual must be [..., {mhc_mult}, D], got {list(residual.shape)}")


def _written(out: Tensor | None, result: Tensor) -> Tensor:
    """result, written to out if it is given. Gradients go through an alias of out, so that a buffer that is used again
    does not keep the graph of its last use."""
    if out is None:
        return result
    written = out.detach() if result.requires_grad else out
    return written.copy_(result)


_MODELING = "tile_kernels.modeling.mhc"
_KERNELS = "tile_kernels.mhc.sinkhorn_kernel"
_FUNCTIONAL: dict[str, Any] = {f.__name__: f for f in (expand_from_embedding, mhc_head, mhc_pre)}
_OPS: dict[str, tuple[Any, ...]] = {
    "expand": (expand_to_mhc,),
    "head_compute_mix": (mhc_head_compute_mix,),
    "multilayer_recompute": (mhc_multilayer_recompute,),
    "norm_fn": (mhc_pre_norm_fn,),
    "post": (mhc_post, mhc_post_bwd, mhc_post_fwd),
    "pre_apply_mix": (mhc_pre_apply_mix,),
    "pre_big_fuse": (mhc_pre_big_fuse,),
    "pre_split_mixes": (mhc_pre_split_mixes,),
    "sinkhorn": (sinkhorn_normalize,),
}


def install() -> None:
    """Make `import tile_kernels.modeling.mhc` find these functions. Call it before the first import of tile_kernels.

    `tile_kernels.mhc.sinkhorn_kernel` gets the two functions that NeMo Automodel needs, if it lacks them. Everything
    else is TileKernels' own if it is installed (version 2 has no mHC layer); if not, the parent packages are put too. A
    second call does nothing. RuntimeError if the real mHC layer is loaded.
    """
    of_ops = {name: {f.__name__: f for f in functions} for name, functions in _OPS.items()}
    modules: dict[str, dict[str, Any]] = {
        _MODELING: _FUNCTIONAL,
        f"{_MODELING}.functional": _FUNCTIONAL,
        f"{_MODELING}.ops": {name: f for functions in of_ops.values() for name, f in functions.items()},
        **{f"{_MODELING}.ops.{name}": functions for name, functions in of_ops.items()},
    }
    packages: dict[str, dict[str, Any]] = {
        "tile_kernels": {},
        "tile_kernels.modeling": {},
        "tile_kernels.mhc": {},
        _KERNELS: {},
    }
    stand_ins.put(modules, packages)
    stand_ins.fill(_KERNELS, {"_mhc_sinkhorn_fwd": _mhc_sinkhorn_fwd, "_mhc_sinkhorn_bwd": _mhc_sinkhorn_bwd})


def uninstall() -> None:
    """Undo `install`. A second call does nothing."""
    stand_ins.remove("tile_kernels")
