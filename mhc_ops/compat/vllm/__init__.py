"""The convolution and the hyper-connections of vLLM 0.32 on the operators of this library.

vLLM finds it as a plug-in. The environment decides: `MHC_OPS_VLLM=1` runs both parts, `MHC_OPS_VLLM=conv` or `mhc` one
of them. Without the variable nothing is replaced. A program that has vLLM in its own process may call

    from mhc_ops.compat import vllm as on_mhc_ops
    on_mhc_ops.register()

Part "conv": `causal_conv1d_fn` and `causal_conv1d_update`. Part "mhc": the custom ops MHCPreOp, MHCFusedPostPreOp,
MHCPreDelayedOp, MHCPostOp and HCHeadOp. DeepSeek V4 and V4.1 on NVIDIA call functions in place of these ops;
`register(force=True)` replaces those too. The word `force` in the variable stands for the part "mhc" with these.

The same as in vLLM: arguments and their order, shapes and types of results, what is changed in place, null slots.

Different:

- The convolution never waits for the GPU, and ignores `metadata`. Rows of skipped sequences are 0. A chunk shorter than
  the state leaves the block it reads alone.
- The projection of mHC is exact to fp32, where vLLM's is tf32 with DeepGEMM. A token has the same bits in every batch.
- With `force`, V4.1 has neither the side stream for maps nor the all-reduce inside a boundary, which belong to vLLM's
  kernels.
"""

import sys
from importlib import import_module
from typing import Any

from .. import servers, stand_ins
from . import nvidia
from .conv import causal_conv1d_fn, causal_conv1d_update
from .mhc import hc_head, mhc_fused_post_pre, mhc_post, mhc_pre, mhc_pre_delayed

TRIED = "0.32.0"
VARIABLE = "MHC_OPS_VLLM"
CONV: dict[str, dict[str, Any]] = {
    "vllm.model_executor.layers.mamba.ops.causal_conv1d": {
        "causal_conv1d_fn": causal_conv1d_fn,
        "causal_conv1d_update": causal_conv1d_update,
    }
}
CUSTOM_OPS: dict[str, Any] = {
    "MHCPreOp": mhc_pre,
    "MHCFusedPostPreOp": mhc_fused_post_pre,
    "MHCPreDelayedOp": mhc_pre_delayed,
    "MHCPostOp": mhc_post,
    "HCHeadOp": hc_head,
}
_CUSTOM_OP = "vllm.model_executor.custom_op"
_LAYERS = "vllm.model_executor.layers.mhc"
_PLATFORMS = ("native", "cuda", "hip", "xpu", "cpu", "tpu", "oot")


def register(*parts: str, force: bool = False) -> tuple[str, ...]:
    """Run these parts of vLLM on mhc_ops, "conv" and "mhc"; without a name both. Call it before models are built.

    force: also the functions that DeepSeek V4 and V4.1 call on NVIDIA in place of custom ops
    Returns the names that are replaced. A second call does nothing. ImportError if this vLLM lacks a name, RuntimeError
    if another package has replaced a custom op.
    """
    wanted = servers.checked_parts(parts)
    if force and "mhc" not in wanted:
        raise ValueError("register: force=True belongs to the part 'mhc', which is not among the parts")
    functions = (CONV if "conv" in wanted else {}) | (nvidia.FUNCTIONS if force else {})
    found = servers.places("vllm", TRIED, functions)
    custom = _custom_ops() if "mhc" in wanted else {}
    names = (*servers.replace(found), *custom)
    for name in custom.keys() - _registry().keys():
        import_module(_CUSTOM_OP).CustomOp.register_oot(name=name)(custom[name])
    servers.say("vllm", names)
    return names


def unregister() -> None:
    """Undo `register` for models that are built afterwards. A second call does nothing."""
    stand_ins.remove("vllm")
    registry = _registry()
    for name in [name for name in CUSTOM_OPS if hasattr(registry.get(name), "of_mhc_ops")]:
        del registry[name]


def plugin() -> None:
    """What vLLM calls in each of its processes: `register` with the words of MHC_OPS_VLLM, if it is set."""
    words = servers.asked(VARIABLE, (*servers.PARTS, "force"))
    if words:
        register(*("mhc" if word == "force" else word for word in words), force="force" in words)


def _registry() -> dict[str, Any]:
    """vLLM's table of classes that other packages put in the place of custom ops; empty if it is not loaded."""
    return getattr(sys.modules.get(_CUSTOM_OP), "op_registry_oot", {})


def _custom_ops() -> dict[str, type]:
    """Subclasses of vLLM's own, because it makes an instance of these in place of one of its own."""
    needed = {_CUSTOM_OP: {"CustomOp": None, "op_registry_oot": None}, _LAYERS: CUSTOM_OPS}
    _, module = servers.places("vllm", TRIED, needed)
    registry, ours = _registry(), {}
    for name, function in CUSTOM_OPS.items():
        there = registry.get(name)
        if there is not None and not hasattr(there, "of_mhc_ops"):
            raise RuntimeError(f"register: {name} is replaced already, by {there.__module__}")
        forwards = {f"forward_{platform}": staticmethod(function) for platform in _PLATFORMS}
        own = {**forwards, "name": name, "of_mhc_ops": True, "__module__": __name__}
        ours[name] = there or type(name, (getattr(module, name),), own)
    return ours
