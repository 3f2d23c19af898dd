"""Plain models of transformers with n residual streams in the place of one: `hyperconnect`, `collapse` and `load`."""

import copy
import inspect
import os
import sys
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import HyperConnection, HyperHead, mhc_expand
from ..core.check import check_count
from ..mhc.carry import StackCarry, begin, boundary, end
from ..mhc.modules import MOST
from .transformers_classes import check_module, check_untouched, may_be_fused, replacement

KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
ENDS = ("Model", "DecoderLayer", "RMSNorm")  # of the names of their classes
MAPS = ("attn_hc", "ffn_hc", "hc_head")  # modules of the maps, named as in the models of transformers that have streams
STREAMS = "hc_mult"  # of a config: n, as there
LEAST = 1 - MOST
OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def hyperconnect(model: nn.Module, n: int) -> nn.Module:
    """Give a plain model of transformers n residual streams, in place: Llama, Mistral, Qwen2 or Qwen3.

    The logits stay the same up to rounding: the maps of a fresh `HyperConnection` read and keep equal streams as they
    are. Each decoder layer gets the maps `attn_hc` and `ffn_hc` and the last norm a `HyperHead`, `hc_head`, in fp32,
    with random h_pre of torch's generator. All other parameters keep their names and values. `generate` and its
    caches, gradient checkpointing and `save_pretrained` work as before; `load` reads what `save_pretrained` wrote.

    >>> model = hyperconnect(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), 4)

    n: 2 or more streams. Give it the whole model, which gets a config of its own: others may have been made from the
    same one. Call it before anything that changes classes or `forward` of modules, such as FSDP2. Returns the model.
    """
    parts = _parts("hyperconnect", model)
    check_count("hyperconnect", "n", n)
    if n < 2:
        raise ValueError(f"hyperconnect: n must be at least 2, got {n}: one stream is what the model has")
    for part in parts:
        if part.connected:
            raise ValueError(f"hyperconnect: {type(part.model).__name__} has streams already")
        for name, module, expected in part.modules():
            check_untouched("hyperconnect", name, module, expected)
    _copy_configs(model, parts)
    for part in parts:
        _connect(part, n)
    return model


def collapse(model: nn.Module) -> nn.Module:
    """Undo `hyperconnect`, in place: the model is plain again, with the bits that it had or that training gave its
    other parameters. A ValueError says which map is no longer that of a fresh model: a plain model cannot have it.
    Returns the model.
    """
    parts = _parts("collapse", model)
    for part in parts:
        if not part.connected:
            raise ValueError(f"collapse: {type(part.model).__name__} has no streams of hyperconnect")
        for name, module, expected in part.modules():
            check_untouched("collapse", name, module, _with_streams(expected))
            for which, maps in module.named_children():
                if which in MAPS and (moved := _moved(maps)):
                    what = f"{', '.join(moved)} of {name}.{which} {'are' if len(moved) > 1 else 'is'}"
                    raise ValueError(f"collapse: {what} not as in a fresh model, and a plain one has no such map")
    for part in parts:
        for _, module, original in part.modules():
            for which in MAPS:
                module._modules.pop(which, None)
            vars(module).pop("expands", None)
            module.__class__ = original
        vars(part.model.config).pop(STREAMS, None)
    return model


def load(folder: Any, **options: Any) -> Any:
    """A model that `save_pretrained` wrote after `hyperconnect`. options: of `from_pretrained` of its class, which
    reads it (dtype, device_map, …). The maps are fp32. `from_pretrained` alone would read a plain model, without maps.
    With output_loading_info=True it returns (model, information), as that does.
    """
    transformers = import_module("transformers")
    hub = {name: options[name] for name in OF_THE_HUB if name in options}
    config, with_info = options.pop("config", None), options.pop("output_loading_info", False)
    if config is None or isinstance(config, str | os.PathLike):
        config = transformers.AutoConfig.from_pretrained(config or folder, **hub)
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"load: config must be a config of transformers or a path, got {type(config).__name__}")
    n = getattr(config.get_text_config(), STREAMS, None)
    if n is None or not config.architectures:
        raise ValueError(f"load: {folder} has no streams of hyperconnect: its config has no {STREAMS}")
    kind: Any = getattr(transformers, config.architectures[0])

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        hyperconnect(self, n)

    # Under the same name: transformers finds what it records of a model by that.
    own = {"__init__": build, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    builder: Any = type(kind.__name__, (kind,), own)
    model, info = builder.from_pretrained(folder, config=config, output_loading_info=True, **options)
    model.__class__ = kind
    mismatched = {key for key, *_ in info["mismatched_keys"]}
    for key in sorted({*info["missing_keys"], *mismatched}):
        if any(f".{which}." in key for which in MAPS):
            what = f"is not of {n} streams" if key in mismatched else "is missing"
            raise ValueError(f"load: {key} {what} in {folder}")
    return (model, info) if with_info else model


class _Sublayer(HyperConnection):
    """`attn_hc` and `ffn_hc`: a connection that is handed its norm and its layer in each call. They stay in the decoder
    layer, under their names."""

    def __init__(self, n: int, D: int, norm: type, device: torch.device):
        super().__init__(_normed, n, D, device=device, dtype=torch.float32)
        self.norm = norm

    def forward(self, before: StackCarry, /, norm: Any, layer: Any) -> Any:  # type: ignore[override]
        if not may_be_fused(norm, self.norm):
            return super().forward(before, norm, layer)
        self.check(before.carry.x)
        own = {"layer_norm_weight": norm.weight, "layer_norm_eps": norm.variance_epsilon}
        h_in, carry = boundary(before, self.phi, self.alpha, self.bias, None, backend=None, **own)
        return carry._replace(h_out=layer(h_in))


def _normed(h_in: Tensor, norm: Any, layer: Any) -> Any:
    return layer(norm(h_in))


class _Layer:
    """A decoder layer. Between two of them the streams are hidden states, which hooks and checkpoints see."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any
    attn_hc: _Sublayer
    ffn_hc: _Sublayer
    expands: bool  # the first one makes the streams
    original: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args:  # as that of transformers names them
            names = inspect.signature(self.original.forward)
            names.bind(self, hidden_states, *args, **kwargs)  # a TypeError where they do not fit
            kwargs |= dict(zip(list(names.parameters)[2:], args))

        def attention(h_in: Tensor) -> Tensor:
            return self.self_attn(hidden_states=h_in, **kwargs)[0]

        x = mhc_expand(hidden_states, self.attn_hc.n) if self.expands else hidden_states
        carry = self.attn_hc(begin(x, every=0), self.input_layernorm, attention)
        carry = self.ffn_hc(carry, self.post_attention_layernorm, self.mlp)
        return end(carry, backend=None)


class _LastNorm:
    """The norm after the last layer, which first makes one vector of the streams."""

    hc_head: HyperHead

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(self.hc_head(hidden_states))  # type: ignore[misc]


class Shape(NamedTuple):
    """The classes of one kind of plain model."""

    model: Any
    layer: Any
    norm: Any


class Part(NamedTuple):
    """A plain decoder in a model: its base model, or the text model of one that reads images too."""

    name: str
    model: Any
    shape: Shape

    @property
    def connected(self) -> bool:
        return hasattr(self.model.norm, "hc_head")

    def modules(self) -> list[tuple[str, Any, type]]:
        """The modules that change, with their names and their classes in transformers."""
        begin = f"{self.name}." if self.name else ""
        layers = [(f"{begin}layers.{i}", layer, self.shape.layer) for i, layer in enumerate(self.model.layers)]
        return [*layers, (f"{begin}norm", self.model.norm, self.shape.norm)]


def _parts(function: str, model: nn.Module) -> list[Part]:
    """The plain decoders of a model. Only kinds whose file is loaded can occur."""
    check_module(function, model)
    names = {f"transformers.models.{kind}.modeling_{kind}": name for kind, name in KINDS.items()}
    loaded = [(sys.modules[file], name) for file, name in names.items() if file in sys.modules]
    shapes = [Shape(*(getattr(file, name + end) for end in ENDS)) for file, name in loaded]
    found = []
    for name, module in model.named_modules():
        for shape in shapes:
            if isinstance(module, shape.model):
                check_untouched(function, name or "the model", module, shape.model)
                found.append(Part(name, module, shape))
    if not found:
        raise ValueError(f"{function}: {type(model).__name__} is no plain model of a known kind ({', '.join(KINDS)})")
    return found


def _copy_configs(model: nn.Module, parts: list[Part]) -> None:
    """n is written into the configs of the parts, which the modules within a model share and other models may."""
    written = {id(part.model.config) for part in parts}
    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = vars(module).get("config")
        if written & {id(config), *map(id, getattr(config, "__dict__", {}).values())}:  # it, or one that has it
            module.config = copy.deepcopy(config, copies)


def _connect(part: Part, n: int) -> None:
    model, shape = part.model, part.shape
    D = model.norm.weight.shape[-1]
    for number, layer in enumerate(model.layers):
        device = layer.input_layernorm.weight.device  # that of the layer: a device map may have several
        layer.attn_hc, layer.ffn_hc = (_Sublayer(n, D, shape.norm, device).train(layer.training) for _ in range(2))
        layer.expands = number == 0
        layer.__class__ = _with_streams(shape.layer)
    head = HyperHead(n, D, device=model.norm.weight.device, dtype=torch.float32)
    model.norm.hc_head = head.train(model.norm.training)
    model.norm.__class__ = _with_streams(shape.norm)
    setattr(model.config, STREAMS, n)


@cache
def _with_streams(original: type) -> Any:
    part = _LastNorm if original.__name__.endswith("Norm") else _Layer
    return replacement(original, part, _unpickled, (original,))


def _unpickled(original: type) -> Any:
    return object.__new__(_with_streams(original))


@torch.no_grad()
def _moved(maps: HyperConnection | HyperHead) -> list[str]:
    """Those of h_pre, h_post and h_res that are not as a fresh module has them."""
    own, n = copy.deepcopy(maps).cpu(), maps.n
    fresh = copy.deepcopy(own)
    with torch.random.fork_rng(devices=[]):
        fresh.reset_parameters()
    same = torch.isclose(own.bias, fresh.bias, rtol=torch.finfo(own.bias.dtype).eps, atol=0)
    if isinstance(maps, HyperConnection):
        same[:n] = _sums_to_one(own)  # h_pre is random
    as_fresh = same & (own.phi == 0).all(-1)
    sections = zip(("h_pre", "h_post", "h_res"), as_fresh.tensor_split([n, 2 * n]))
    return [name for name, section in sections if not section.all()]


def _sums_to_one(connection: HyperConnection | HyperHead) -> bool:
    """Whether h_pre does, up to the rounding of its bias. A fresh one is cut off at LEAST, which adds to the sum."""
    h_pre = connection.bias[: connection.n].double().sigmoid() + connection.options["hc_eps"]
    rounding = connection.n * torch.finfo(connection.bias.dtype).eps
    cut_off = LEAST * (h_pre <= LEAST + connection.options["hc_eps"] + rounding).sum()
    return bool((h_pre.sum() - 1).abs() <= rounding + cut_off)
