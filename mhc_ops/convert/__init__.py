"""Convert state dicts between `HyperConnection` and `HyperHead` and the mHC of other libraries, or from a plain model.

    state = convert.to_ours(checkpoint, "deepseek")            # layers.0.hc_attn_fn becomes layers.0.hc_attn.phi
    connection = HyperConnection(layer, n, D, **convert.options("deepseek"))
    checkpoint = convert.from_ours(state, "deepseek")          # and back, bit for bit
    state = convert.upcycle(plain, model.state_dict())         # a model without mHC becomes one with fresh mHC

Keys with a common prefix, such as `layers.0.hc_attn`, are one connection or one head. The prefix stays, except that
`hc_attn` of DeepSeek is `attn_hc` in transformers. All other keys stay as they are, in their places; parameters of a
third format are a ValueError. Tensors keep their types and are not changed in place; a result may share them.

The same parameters mean different functions in different libraries: `options(format)` are the options with which a
HyperConnection computes as that library does. `mhc-ops convert` converts files and shards of safetensors.
"""

from .formats import (
    Format,
    Parameters,
    State,
    between,
    fold_gamma,
    from_ours,
    groups,
    options,
    parameters,
    refuse_other_formats,
    to_ours,
)
from .upcycling import places, upcycle

__all__ = [
    "Format",
    "Parameters",
    "State",
    "between",
    "fold_gamma",
    "from_ours",
    "groups",
    "options",
    "parameters",
    "places",
    "refuse_other_formats",
    "to_ours",
    "upcycle",
]
