"""DeepSeek V4, GLM-5.3 and Hy4 of transformers, with their hyper-connections on the operators of this library.

    from mhc_ops.compat import transformers as on_mhc_ops

    on_mhc_ops.patch()                       # models that from_pretrained or from_config makes from now on
    on_mhc_ops.patch(model)                  # an existing model
    with on_mhc_ops.patched(model): ...      # within a block
    on_mhc_ops.hyperconnect(model, 4)        # a plain Llama, Mistral or Qwen gets four streams

What stays: parameters and their names in checkpoints, names of classes, hidden states and other recorded outputs,
caches, gradient checkpointing, hooks. A patched module differs from transformers' own only in its class, a subclass;
`unpatch` restores the same bits. Importing this module patches nothing.

What differs:

- Maps stay in fp32, which transformers rounds to the type of the streams; sums are rounded once. Their parameters stay
  fp32 too where a patched model is cast, or is loaded in a narrower type.
- The RMSNorm before a sublayer is fused with reading the streams, without a call of its module, if that is the model's
  own and has neither hooks nor another forward.
- A hook on `attn_hc` or `ffn_hc` of a patched layer sees (h_in, carry) as the output; `carry.h_post` and `carry.h_res`
  are the maps. Called as in transformers, these modules return what they return there.

`exact_as_eager=True` rounds the maps as transformers does and calls the norm.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..core.maps import KeepsMaps, ReadsStreams
from ..mhc.ops import Carry, mhc_enter, mhc_head, mhc_leave, mhc_mean, mhc_next, mhc_pre
from .transformers_classes import check_module, check_untouched, may_be_fused, replacement
from .transformers_streams import collapse as collapse
from .transformers_streams import hyperconnect as hyperconnect
from .transformers_streams import load as load


def patch(model: nn.Module | None = None, *, exact_as_eager: bool = False) -> tuple[str, ...]:
    """Run the hyper-connections of a model on mhc_ops; without a model, those of all models loaded from now on.

    Models are loaded by `from_pretrained` and `from_config` of transformers, or by a constructor inside its
    `apply_patches()`. exact_as_eager: round the maps as transformers does, and call the modules of the norms.
    What is patched already becomes what this call asks for. Returns the kinds that are patched, out of "deepseek_v4",
    "glm5_next" and "hy_v4": those in this model, or without a model those of the installed transformers.
    """
    if model is None:
        return _register(exact_as_eager)
    kinds, changes = _changes_in(model, exact_as_eager)
    for _, module, replaced_by in changes:
        module.__class__ = replaced_by
    return kinds


def unpatch(model: nn.Module | None = None) -> None:
    """Undo `patch`: for a model, in whichever way it was patched; without one, for models loaded from now on. What
    is not patched stays as it is."""
    if model is None:
        _unregister()
        return
    for module in _replaced_in(model):
        module.__class__ = type(module).original


@contextmanager
def patched(model: nn.Module | None = None, *, exact_as_eager: bool = False) -> Iterator[nn.Module | None]:
    """`patch` within a with block: this model, or all models loaded in the block, which stay patched after it. A patch
    from before the block holds again after it."""
    if model is None:
        before = _ours_registered()
        patch(exact_as_eager=exact_as_eager)
        try:
            yield None
        finally:
            unpatch()
            import_module("transformers.monkey_patching").register_patch_mapping(before)
        return
    changed = [(name, module, type(module)) for name, module, _ in _changes_in(model, exact_as_eager)[1]]
    patch(model, exact_as_eager=exact_as_eager)
    replaced_by = {module: type(module) for _, module, _ in changed}
    try:
        yield model
    finally:
        for name, module, _ in changed:
            check_untouched("unpatch", name, module, replaced_by[module])
        for _, module, original in changed:
            module.__class__ = original


class _WideMaps(KeepsMaps):
    """Maps that are fp32, also where transformers makes or loads a model in a narrower type."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.widen_maps()


class _Connection(_WideMaps, ReadsStreams):
    """`attn_hc` and `ffn_hc`, which read the streams for a sublayer."""

    map_names = ("fn", "scale", "base")
    exact_as_eager: bool
    norm: type  # the model's own RMSNorm
    rounds_maps: bool  # whether transformers rounds maps to the type of the streams
    fn: Tensor
    scale: Tensor
    base: Tensor

    def streams_read(self, given: Any, result: Any) -> Tensor:
        return result[1].x if isinstance(result[1], Carry) else given

    def forward(self, hidden_streams: Any, h_out: Tensor | None = None, *, norm: Any = None) -> Any:
        """The normed h_in of a sublayer and its carry, from x, or from the carry and h_out of the sublayer before.
        Without `norm`, what transformers returns: the maps, then h_in without a norm."""
        own: Any = {"phi": self.fn, "alpha": self.scale, "bias": self.base, **self.map_options()}
        if norm is None:
            h_in, h_post, h_res = mhc_pre(hidden_streams, **own)
            return (h_post, h_in) if h_res is None else (h_post, h_res, h_in)
        if self.exact_as_eager:
            x = hidden_streams if h_out is None else mhc_leave(hidden_streams, h_out)
            h_in, *maps = mhc_pre(x, **own)
            return norm(h_in), Carry(x, *(_rounded(each, x) for each in maps) if self.rounds_maps else maps)
        fused = may_be_fused(norm, self.norm)
        if fused:
            own |= {"layer_norm_weight": norm.weight, "layer_norm_eps": norm.variance_epsilon}
        h_in, carry = mhc_enter(hidden_streams, **own) if h_out is None else mhc_next(hidden_streams, h_out, **own)
        return h_in if fused else norm(h_in), carry


class _SinkhornConnection(_Connection):
    rounds_maps = True
    hc_eps: float
    hc_sinkhorn_iters: int
    input_norm: Any

    def map_options(self) -> Any:
        of_sinkhorn = {"sinkhorn_iters": self.hc_sinkhorn_iters, "sinkhorn_eps": self.hc_eps}
        return {"norm_eps": self.input_norm.eps, "hc_eps": self.hc_eps, **of_sinkhorn}


class _IdentityConnection(_Connection):
    rounds_maps = False
    hc_eps: float
    hc_post_magnitude: float
    input_norm: Any

    def map_options(self) -> Any:
        of_post = {"post_mult": self.hc_post_magnitude, "post_eps": self.hc_eps}
        return {"norm_eps": self.input_norm.eps, "hc_eps": self.hc_eps, "residual": "identity", **of_post}


class _DeepseekLayer:
    self_attn: Any
    mlp: Any

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        x, _ = _sublayers(
            self,
            hidden_states,
            attention=lambda h_in: self.self_attn(h_in, **kwargs),
            feed_forward=lambda h_in: self.mlp(h_in, input_ids=input_ids),
        )
        return x


class _IndexedLayer:
    """A layer whose attention chooses the tokens it reads, and returns the choice for layers that share it."""

    self_attn: Any
    mlp: Any

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: Any = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        of_attention = {
            **kwargs,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "position_embeddings": position_embeddings,
            "prev_topk_indices": prev_topk_indices,
        }
        x, (_, topk_indices) = _sublayers(
            self, hidden_states, attention=lambda h_in: self.attend(h_in, of_attention), feed_forward=self.mlp
        )
        return x, topk_indices

    def attend(self, h_in: Tensor, given: dict[str, Any]) -> tuple[Tensor, Any, Any]:
        """h_out, weights, indices"""
        return self.self_attn(hidden_states=h_in, **given)


class _GlmLayer(_IndexedLayer):
    block_type: str

    def attend(self, h_in: Tensor, given: dict[str, Any]) -> tuple[Tensor, Any, Any]:
        if self.block_type != "linear_attention":
            return super().attend(h_in, given)
        of_others = ("position_ids", "past_key_values", "use_cache", "position_embeddings", "prev_topk_indices")
        own = {name: value for name, value in given.items() if name not in of_others}
        return self.self_attn(hidden_states=h_in, cache_params=given["past_key_values"], **own), None, None


def _sublayers(layer: Any, x: Tensor, attention: Any, feed_forward: Any) -> tuple[Tensor, list[Any]]:
    """x after both sublayers, and what attention returned after h_out."""
    h_in, carry = layer.attn_hc(x, norm=layer.input_layernorm)
    h_out, *rest = attention(h_in)
    h_in, carry = layer.ffn_hc(carry, h_out, norm=layer.post_attention_layernorm)
    return mhc_leave(carry, feed_forward(h_in)), rest


class _LearnedHead(_WideMaps):
    map_names = ("hc_fn", "hc_scale", "hc_base")
    hc_fn: Tensor
    hc_scale: Tensor
    hc_base: Tensor
    input_norm: Any
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return mhc_head(x, self.hc_fn, self.hc_scale, self.hc_base, norm_eps=self.input_norm.eps, hc_eps=self.eps)


class _MeanHead:
    def forward(self, hidden_streams: Tensor) -> Tensor:
        return mhc_mean(hidden_streams)


def _rounded(h: Tensor, x: Tensor) -> Tensor:
    return h.to(x.dtype).to(h.dtype)


class Kind(NamedTuple):
    """A family of models of transformers: the names of its classes and their replacements."""

    norm: str
    parts: dict[str, type]

    @staticmethod
    def file(name: str) -> str:
        return f"transformers.models.{name}.modeling_{name}"


KINDS = {
    "deepseek_v4": Kind(
        norm="DeepseekV4RMSNorm",
        parts={
            "DeepseekV4DecoderLayer": _DeepseekLayer,
            "DeepseekV4HyperConnection": _SinkhornConnection,
            "DeepseekV4HyperHead": _LearnedHead,
        },
    ),
    "glm5_next": Kind(
        norm="Glm5NextTextRMSNorm",
        parts={
            "Glm5NextTextDecoderLayer": _GlmLayer,
            "Glm5NextTextHyperConnection": _SinkhornConnection,
            "Glm5NextTextHyperHead": _MeanHead,
        },
    ),
    "hy_v4": Kind(
        norm="HYV4RMSNorm",
        parts={
            "HYV4DecoderLayer": _IndexedLayer,
            "HYV4HyperConnection": _IdentityConnection,
            "HYV4HyperHead": _LearnedHead,
        },
    ),
}


class _Replacement(type):
    """The metaclass of patched classes: subclasses of transformers' own (`original`) with the same name.

    Device maps and FSDP find layers by that name. transformers also looks for a registered class when it records the
    outputs of layers, in all models of the kind. For models that are not patched, an instance of the original therefore
    counts as one of the replacement.
    """

    original: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, vars(cls).get("original", ()))


@cache
def _replacement(kind: str, name: str, exact_as_eager: bool) -> Any:
    module = import_module(Kind.file(kind))
    original = getattr(module, name)

    own = {"exact_as_eager": exact_as_eager, "norm": getattr(module, KINDS[kind].norm)}
    arguments = (kind, name, exact_as_eager)
    return replacement(original, KINDS[kind].parts[name], _unpickled, arguments, kind=_Replacement, **own)


def _unpickled(kind: str, name: str, exact_as_eager: bool) -> Any:
    replaced_by = _replacement(kind, name, exact_as_eager)
    return replaced_by.__new__(replaced_by)


def _register(exact_as_eager: bool) -> tuple[str, ...]:
    kinds = _installed_kinds("patch")
    names = {name: kind for kind in kinds for name in KINDS[kind].parts}
    patching = import_module("transformers.monkey_patching")
    for name in names.keys() & patching.get_patch_mapping().keys() - _ours_registered().keys():
        raise ValueError(f"patch: {name} of transformers is replaced already, by a class of another library")
    _unregister()
    patching.register_patch_mapping({name: _replacement(kind, name, exact_as_eager) for name, kind in names.items()})
    return kinds


def _unregister() -> None:
    _installed_kinds("unpatch")
    import_module("transformers.monkey_patching").unregister_patch_mapping(list(_ours_registered()))


def _ours_registered() -> dict[str, type]:
    """Our classes among those that transformers takes for models it loads."""
    _installed_kinds("patch")
    mapping = import_module("transformers.monkey_patching").get_patch_mapping()
    return {name: replaced_by for name, replaced_by in mapping.items() if isinstance(replaced_by, _Replacement)}


def _installed_kinds(function: str) -> tuple[str, ...]:
    if find_spec("transformers") is None:
        raise ModuleNotFoundError(f"{function}: the package transformers is not installed: pip install transformers")
    kinds = tuple(kind for kind in KINDS if find_spec(f"transformers.models.{kind}") is not None)
    if not kinds:
        version = import_module("transformers").__version__
        raise ImportError(f"{function}: transformers {version} has none of {', '.join(KINDS)}; 5.8 was the first")
    return kinds


def _changes_in(model: nn.Module, exact_as_eager: bool) -> tuple[tuple[str, ...], list[tuple[str, nn.Module, Any]]]:
    """The kinds in a model, and its modules that need another class, each with its name and that class. Only kinds
    whose file is loaded can occur."""
    check_module("patch", model)
    loaded = {kind: sys.modules[Kind.file(kind)] for kind in KINDS if Kind.file(kind) in sys.modules}
    known = {getattr(file, name): kind for kind, file in loaded.items() for name in KINDS[kind].parts}
    kinds, changes = set(), []
    for name, module in model.named_modules():
        of_transformers = next((each for each in type(module).__mro__ if each in known), None)
        if of_transformers is not None:
            kinds.add(kind := known[of_transformers])
            replaced_by = _replacement(kind, of_transformers.__name__, exact_as_eager)
            if (of_ours := _ours_of(module)) is not replaced_by:
                check_untouched("patch", name, module, of_ours or of_transformers)
                changes.append((name, module, replaced_by))
    if not kinds:
        listed = ", ".join(KINDS)
        raise ValueError(f"patch: {type(model).__name__} has no hyper-connections of a known kind ({listed})")
    return tuple(sorted(kinds)), changes


def _replaced_in(model: nn.Module) -> list[Any]:
    check_module("unpatch", model)
    found: list[Any] = []
    for name, module in model.named_modules():
        of_ours = _ours_of(module)
        if of_ours is not None:
            check_untouched("unpatch", name, module, of_ours)
            found.append(module)
    return found


def _ours_of(module: nn.Module) -> type | None:
    """Its class that replaces one of transformers, if it has one."""
    mro = type(module).__mro__
    return next((each for each in mro if isinstance(each, _Replacement) and "original" in vars(each)), None)
