"""The functions of other libraries, with their arguments, layouts and return values, on the operators of this one."""

from . import causal_conv1d, fla, liger, megatron, tile_kernels, transformers

__all__ = ["causal_conv1d", "fla", "liger", "megatron", "tile_kernels", "transformers"]
