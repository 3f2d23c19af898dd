"""The convolution and the hyper-connections of SGLang 0.5.23 on the operators of this library.

SGLang finds it as a plug-in. The environment decides: `MHC_OPS_SGLANG=1` runs both parts, `MHC_OPS_SGLANG=conv` or
`mhc` one of them. Without the variable nothing is replaced. A program that has SGLang's models in its own process may
call

    from mhc_ops.compat import sglang as on_mhc_ops
    on_mhc_ops.register()

Part "conv": `causal_conv1d_fn` and `causal_conv1d_update`, of the Triton and of the CUDA kernels. Part "mhc": the
functions of `kernels/ops/layernorm` that DeepSeek V4 and V4.1, GLM-5.3 and Hy4 call.

The same as in SGLang: arguments and their order, shapes and types of results, padding.

Different:

- The convolution never waits for the GPU and needs no lengths on the host. Rows of skipped sequences are 0. With a tree
  of drafts the state stays until the window of the accepted token is copied to it.
- The sublayer's norm takes h_in unrounded; SGLang rounds it to bf16 first. The projection of mHC is exact to fp32. A
  token has the same bits in every batch.
- What SGLang fuses with an all-reduce or with quantised outputs stays its own, as does DeepGEMM's boundary.
- An argument that SGLang would ignore is a TypeError.
"""

from typing import Any

from .. import servers, stand_ins
from . import mhc
from .conv import causal_conv1d_fn, causal_conv1d_fn_cuda, causal_conv1d_update, causal_conv1d_update_cuda

TRIED = "0.5.23"
VARIABLE = "MHC_OPS_SGLANG"
CONV: dict[str, dict[str, Any]] = {
    "sglang.kernels.ops.mamba.causal_conv1d_triton": {
        "causal_conv1d_fn": causal_conv1d_fn,
        "causal_conv1d_update": causal_conv1d_update,
    },
    "sglang.srt.layers.attention.mamba.causal_conv1d": {
        "causal_conv1d_fn": causal_conv1d_fn_cuda,
        "causal_conv1d_update": causal_conv1d_update_cuda,
    },
}


def register(*parts: str) -> tuple[str, ...]:
    """Run these parts of SGLang on mhc_ops, "conv" and "mhc"; without a name both.

    Returns the names that are replaced. A second call does nothing. ImportError if this SGLang lacks a name.
    """
    wanted = servers.checked_parts(parts)
    functions = (CONV if "conv" in wanted else {}) | (mhc.FUNCTIONS if "mhc" in wanted else {})
    names = servers.replace(servers.places("sglang", TRIED, functions))
    servers.say("sglang", names)
    return names


def unregister() -> None:
    """Undo `register`. A second call does nothing."""
    stand_ins.remove("sglang")


def plugin() -> None:
    """What SGLang calls in each of its processes: `register` with the words of MHC_OPS_SGLANG, if it is set."""
    if words := servers.asked(VARIABLE):
        register(*words)
