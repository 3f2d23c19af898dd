"""mHC of Megatron-Core's dev branch: the functions of `core/fusions/fused_mhc_kernels.py`, and `HyperConnectionModule`.

For Megatron itself, before the model is built, with `use_fused_mhc` in its config:

    from mhc_ops.compat import megatron
    megatron.install()

Megatron's modules then call these functions, with its recomputation and parallelism around them. The projection, for
which Megatron has a kernel on Blackwell only, has one on every GPU. `HyperConnectionModule` is for models outside of
Megatron: the same parameters (names, shapes, initialisation), `forward` and `fused_h_res_h_post_bda`.

The same as in Megatron: arguments and defaults, [s, b, n, C] and [s, b, n·C] layouts, sums in fp32, DeepSeek's Sinkhorn
and h_res[old, new], what `fused_h_aggregate_into` refuses, the mean and the learned contraction at the end.

Different:

- The norm's factor is rsqrt(rms² + eps²), in Megatron 1/(rms + eps). They differ by a relative eps/rms at most, 1e-6
  for streams of rms 1.
- `HyperConnectionModule` keeps maps in fp32; Megatron rounds them to the type of the streams. It refuses a recompute
  manager and an output slot, which need Megatron's own module.
- Results and gradients have the same bits in every run.

Megatron's main branch has another mHC (h_res[new, old], no eps in h_pre and Sinkhorn) with the same names of
parameters; `mhc_ops.convert` has its options.
"""

import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..core.maps import HasMaps
from ..mhc import ops
from . import stand_ins

SINKHORN_EPS = COMPUTE_H_EPS = NORM_EPS = 1e-6


def fused_sinkhorn(input_logits: Tensor, num_iterations: int, eps: float = 1e-6) -> Tensor:
    """Doubly stochastic matrices from logits [..., n, n], typed as the logits; `mhc_ops.sinkhorn`."""
    return ops.sinkhorn(input_logits, num_iterations, eps).to(input_logits.dtype)


def fused_h_aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    """Σ_i h_pre[i]·x[i]: x [s, b, n, C], h_pre [s, b, n] to [s, b, C]; `mhc_ops.mhc_read`."""
    return ops.mhc_read(x, h_pre)


def fused_h_aggregate_into(x: Tensor, h_pre: Tensor, out: Tensor) -> Tensor:
    """`fused_h_aggregate` written to out [s, b, C], which is contiguous, requires no gradient, and is returned."""
    expected = x.shape[:-2] + x.shape[-1:]
    if out.shape != expected:
        raise ValueError(f"fused_h_aggregate_into: out must be {list(expected)}, got {list(out.shape)}")
    if out.dtype != x.dtype or out.device != x.device:
        got = f"{out.dtype} on {out.device}"
        raise ValueError(f"fused_h_aggregate_into: out must be {x.dtype} on {x.device} as x is, got {got}")
    if not out.is_contiguous():
        raise ValueError(f"fused_h_aggregate_into: out must be contiguous, got strides {out.stride()}")
    if out.requires_grad:
        raise ValueError("fused_h_aggregate_into: out must not require a gradient")
    return out.copy_(fused_h_aggregate(x, h_pre))


def fused_h_post_bda(
    h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    """h_resᵀ @ residual + h_post·(x + bias), typed as the residual; `mhc_ops.mhc_post`.

    h_res: [s, b, n, n]   original_residual: [s, b, n, C]   h_post: [s, b, n]   x: [s, b, C]   bias: [C] or None
    """
    return ops.mhc_post(original_residual, _with_bias(x, bias), h_post, h_res)


def fused_proj_rms_compute_h(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
    eps: float = 1e-6,
    compute_h_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The maps before Sinkhorn: σ(z_pre) + compute_h_eps [T, n], 2σ(z_post) [T, n], z_res [T, n²], and rms(x) [T, 1].

    x: [T, n·C]   weight: [n² + 2n, n·C]   alpha_pre, alpha_post, alpha_res: [1]   bias: [n² + 2n]. `mhc_ops.mhc_maps`.
    """
    alpha = torch.cat([alpha_pre, alpha_post, alpha_res])
    streams = x.unflatten(-1, (n, -1))
    h_pre, h_post, h_res = ops.mhc_maps(
        streams, weight, alpha, bias, norm_eps=eps * eps, hc_eps=compute_h_eps, residual="logits"
    )
    rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=h_pre.dtype) / x.shape[-1] ** 0.5
    return h_pre, h_post, h_res.flatten(-2), rms


def fused_add_3(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a + b + c"""
    return a + b + c


def is_cutile_available() -> bool:
    """False: mhc_ops has no cuTile kernels."""
    return False


def is_triton_available() -> bool:
    """True: Triton or another backend for the device."""
    return True


def log_fused_mhc_backend_once() -> None:
    """Logs nothing; `mhc-ops info` shows the backend."""


def learned_output_contract(
    hidden_states: Tensor, head_fn: Tensor, base: Tensor, scale: Tensor, n: int, eps: float
) -> Tensor:
    """The streams as one, [..., n·C] to [..., C], by weights σ(scale·head_fn @ v·rsqrt(mean(v²) + eps) + base) + eps;
    `mhc_ops.mhc_head`. head_fn: [n, n·C]   base: [n]   scale: [1]"""
    streams = hidden_states.unflatten(-1, (n, -1))
    return ops.mhc_head(streams, head_fn, scale, base, norm_eps=eps, hc_eps=eps)


class HyperConnectionModule(HasMaps, nn.Module):
    """The maps of one sublayer, applied to the streams [s, b, n·C].

    config: anything with hidden_size, num_residual_streams, mhc_sinkhorn_iterations, mhc_init_gating_factor and
    sequence_parallel. Parameters, in fp32: mapping_proj.weight [n² + 2n, n·C], alpha_pre, alpha_post, alpha_res [1],
    bias [n² + 2n].
    """

    map_names = ("mapping_proj.weight", "alpha_pre", "alpha_post", "alpha_res", "bias")

    def __init__(self, config: Any, layer_number: int):
        super().__init__()
        self.config, self.layer_number = config, layer_number
        self.n, self.hidden_size = config.num_residual_streams, config.hidden_size
        self.sinkhorn_iterations = config.mhc_sinkhorn_iterations
        self.norm_eps, self.sinkhorn_eps, self.compute_h_eps = NORM_EPS, SINKHORN_EPS, COMPUTE_H_EPS
        maps = self.n * self.n + 2 * self.n
        self.mapping_proj = nn.Linear(self.n * self.hidden_size, maps, bias=False)
        nn.init.xavier_uniform_(self.mapping_proj.weight)
        self.alpha_pre = nn.Parameter(torch.full((1,), config.mhc_init_gating_factor))
        self.alpha_post = nn.Parameter(torch.full((1,), config.mhc_init_gating_factor))
        self.alpha_res = nn.Parameter(torch.full((1,), config.mhc_init_gating_factor))
        self.bias = nn.Parameter(torch.zeros(maps))
        for parameter in self.parameters():
            parameter.keep_in_fp32 = True  # type: ignore[attr-defined]  # Megatron casts the others
            if config.sequence_parallel:  # their gradients are then added up over the group
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(
        self, hidden_states: Tensor, mhc_recompute_manager: Any = None, output_slot: Any = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sublayer's input [s, b, C], h_res [s, b, n, n], h_post [s, b, n], and hidden_states unchanged."""
        _refuse_recomputation(mhc_recompute_manager, output_slot)
        aggregated, h_post, h_res = ops.mhc_pre(
            self._streams(hidden_states),
            self.mapping_proj.weight,
            torch.cat([self.alpha_pre, self.alpha_post, self.alpha_res]),
            self.bias,
            norm_eps=self.norm_eps * self.norm_eps,
            hc_eps=self.compute_h_eps,
            sinkhorn_iters=self.sinkhorn_iterations,
            sinkhorn_eps=self.sinkhorn_eps,
        )
        return aggregated, h_res, h_post, hidden_states

    def fused_h_res_h_post_bda(
        self,
        h_res: Tensor,
        original_residual: Tensor,
        h_post: Tensor,
        layer_output_with_bias: tuple[Tensor, Tensor | None],
        dropout_prob: float,
        training: bool,
        fused: bool,
        manager: Any = None,
    ) -> Tensor:
        """h_resᵀ @ residual + dropout(h_post·(x + bias)), [s, b, n·C]."""
        _refuse_recomputation(manager)
        x, bias = layer_output_with_bias
        streams = self._streams(original_residual)
        if dropout_prob == 0.0 or not training:
            return fused_h_post_bda(h_res, streams, h_post, x, bias).flatten(-2)
        written = h_post[..., None].to(torch.float32) * _with_bias(x, bias).unsqueeze(-2)
        mixed = h_res.mT.to(torch.float32) @ streams.to(torch.float32)
        return (mixed + nn.functional.dropout(written, dropout_prob)).to(streams.dtype).flatten(-2)

    def _streams(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.unflatten(-1, (self.n, self.hidden_size))

    @staticmethod
    def input_expand(x: Tensor, n: int) -> Tensor:
        """n copies: [s, b, C] to [s, b, n·C]; `mhc_ops.mhc_expand`."""
        return ops.mhc_expand(x, n).flatten(-2)

    @staticmethod
    def output_contract(x: Tensor, n: int) -> Tensor:
        """The mean of the streams: [s, b, n·C] to [s, b, C]; `mhc_ops.mhc_mean`."""
        return ops.mhc_mean(x.unflatten(-1, (n, -1)))


def _with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x + bias in fp32, in which the sum is then multiplied."""
    return x if bias is None else x.to(torch.promote_types(x.dtype, torch.float32)) + bias


def _refuse_recomputation(*given: Any) -> None:
    if any(argument is not None for argument in given):
        raise NotImplementedError("HyperConnectionModule: recomputation needs Megatron's own module; see install()")


_SLOT = "megatron.core.fusions.fused_mhc_kernels"
_FUNCTIONS = (
    fused_add_3,
    fused_h_aggregate,
    fused_h_aggregate_into,
    fused_h_post_bda,
    fused_proj_rms_compute_h,
    fused_sinkhorn,
    is_cutile_available,
    is_triton_available,
    log_fused_mhc_backend_once,
)


def _has_slot() -> bool:
    """Whether Megatron's module exists or is loaded. Imports the packages above it, not the module."""
    try:
        return _SLOT in sys.modules or importlib.util.find_spec(_SLOT) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not _SLOT.startswith(error.name):  # a package that Megatron needs
            raise
        return False


def install() -> None:
    """Replace Megatron's `fused_mhc_kernels` by these functions, for models that are built afterwards.

    ImportError if Megatron has no such module, RuntimeError if it is loaded already. A second call does nothing.
    """
    if not _has_slot():
        file = f"{_SLOT.replace('.', '/')}.py"
        raise ImportError(f"install: there is no {file} here; Megatron-Core's dev branch has it")
    stand_ins.put({_SLOT: {function.__name__: function for function in _FUNCTIONS}})


def uninstall() -> None:
    """Undo `install`, for models that are built afterwards."""
    stand_ins.remove("megatron")
