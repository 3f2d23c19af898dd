"""The functions of other libraries, with their arguments, layouts and results, on the operators of mhc_ops."""

from . import causal_conv1d, fla, liger, megatron, sglang, tile_kernels, transformers, transformers_trainer, vllm

__all__ = [
    "causal_conv1d",
    "fla",
    "liger",
    "megatron",
    "sglang",
    "tile_kernels",
    "transformers",
    "transformers_trainer",
    "vllm",
]
