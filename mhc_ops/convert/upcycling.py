"""Upcycling: the checkpoint of a plain residual model becomes that of the same model with hyper-connections."""

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from .formats import Format, Parameters, State, add, groups, parameters

NUMBER = re.compile(r"\{([a-z])\}")  # in a name of the plain model
MULTIPLE = re.compile(r"\{(\d*)([a-z])([+-]\d+)?\}")  # in one of the new model
NORM = "layer_norm_weight"
MOST_NAMED = 3  # tensors in one message
LEAST = 2**-8  # of h_pre in a fresh module, as 1 − LEAST is the most
LARGEST = math.log(1 / LEAST - 1)  # of the bias of such an h_pre or h_post
MOST_EPS = 0.01  # hc_eps of a model that is upcycled: state dicts do not say it


def upcycle(state: Mapping[str, Tensor], fresh: Mapping[str, Tensor], names: Mapping[str, str] | None = None) -> State:
    """The checkpoint of a plain residual model as that of the same model with hyper-connections.

    state: the state dict of the plain model. fresh: that of the new model, as its constructor leaves it. names: where
    modules and tensors of the plain model are in the new one, if they moved.

    >>> model = GPT(n=4)  # fresh
    >>> model.load_state_dict(convert.upcycle(torch.load("plain.pt"), model.state_dict()))

    The new model exists anyway, because it is to be trained. Its state dict says which layers have connections and what
    their maps are, so that neither n and D nor options are given here. A tensor under the name of a `HyperConnection`
    moves to its layer: blocks.0.attn.out.weight to blocks.0.attn.layer.out.weight. All tensors of maps are taken from
    `fresh`; with them the new model computes what the plain one does, up to rounding.

    Where layers move to another place, as into a `HyperStack`, or the weight of an RMSNorm into its connection
    (layer_norm=True), names says so. A name is that of a module or of a tensor; {i} is any number. The longest name
    that fits counts, and each must fit something:

    >>> names = {
    ...     "blocks.{i}.norm1.weight": "stack.{2i}.layer_norm_weight",
    ...     "blocks.{i}.attn": "stack.{2i}",
    ...     "blocks.{i}.norm2.weight": "stack.{2i+1}.layer_norm_weight",
    ...     "blocks.{i}.mlp": "stack.{2i+1}",
    ... }

    A tensor without a place in the new model, a place without a tensor, a shape that differs and maps that are not as
    in a fresh model (with an hc_eps of at most 0.01) are a ValueError. Where the new model is too large to be made,
    `fresh` may have its connections and heads alone: only they are compared, and each layer must get a tensor.
    """
    converted: State = {new: state[key] for key, new in places(state, fresh, names).items()}
    for keys in groups(fresh, Format.MHC_OPS).values():
        for key in keys:
            add(converted, key, fresh[key])
    return converted


def places(
    state: Mapping[str, Tensor], fresh: Mapping[str, Tensor], names: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What `upcycle` calls each tensor of the plain model, after all its checks. Of the tensors of the plain model only
    the shapes are read."""
    names = {} if names is None else names
    _check_types(state, fresh, names)
    _check_plain(state)
    found = parameters(fresh, Format.MHC_OPS)
    _check_fresh(found)
    connections = [begin for begin, own in found.items() if own.alpha.numel() > 1]  # a head has one
    placed: dict[str, str] = {}
    for key, new in _renamed(state, names).items():
        add(placed, _in_layers(new, connections), key)
    maps = {key for keys in groups(fresh, Format.MHC_OPS).values() for key in keys}
    _check_places(placed, state, {key: fresh[key] for key in fresh if key not in maps}, connections)
    return {key: new for new, key in placed.items()}


def _check_types(state: object, fresh: object, names: object) -> None:
    for argument, value in (("state", state), ("fresh", fresh)):
        if not isinstance(value, Mapping):
            raise TypeError(f"convert: {argument} must be a state dict, got {type(value).__name__}")
        for key, tensor in value.items():
            if not isinstance(key, str):
                raise TypeError(f"convert: the names in {argument} must be str, got {type(key).__name__}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"convert: {argument}[{key!r}] must be a tensor, got {type(tensor).__name__}")
    if not isinstance(names, Mapping):
        raise TypeError(f"convert: names must be a dict of str, got {type(names).__name__}")
    for name in (*names, *names.values()):
        if not isinstance(name, str):
            raise TypeError(f"convert: names must be a dict of str, got {type(name).__name__} in it")


def _check_plain(state: Mapping[str, Tensor]) -> None:
    for key in state:
        begin, _, last = key.rpartition(".")
        maps = [_under(begin, name) for name in ("phi", "alpha", "bias")]
        if last == "phi" and state.keys() >= set(maps):
            what = "are maps of a connection or a head: it has streams already"
            raise ValueError(f"convert: {', '.join(maps)} of the plain model {what}")


def _check_fresh(found: Mapping[str, Parameters]) -> None:
    if not found:
        raise ValueError("convert: fresh must be the state dict of a model with HyperConnections, and has none")
    for begin, own in found.items():
        phi = _under(begin, "phi")
        if any(tensor is not None and tensor.is_meta for tensor in own):
            raise ValueError(f"convert: {phi} or its bias is on the meta device; give HyperConnection device='cpu'")
        if own.phi.any():
            raise ValueError(f"convert: {phi} is not 0: fresh must be the state dict of a model that was not trained")
        if moved := _moved(own):
            what = f"{', '.join(moved)} of {_under(begin, 'bias')} {'are' if len(moved) > 1 else 'is'}"
            raise ValueError(f"convert: {what} not as in a fresh model, which computes what the plain one does")


def _moved(own: Parameters) -> list[str]:
    """Those of h_pre, h_post and h_res whose bias no fresh module has, whatever its options. h_pre sums to 1 and, in a
    head, is one number. h_post is one number, which depends on post_mult and post_eps. h_res is 4 on its diagonal."""
    n, eps = own.n, torch.finfo(own.bias.dtype).eps if own.bias.is_floating_point() else 0.0
    pre, post, res = own.bias.detach().cpu().double().tensor_split([n, 2 * n])
    h_pre, rounding = pre.sigmoid(), n * eps
    above = h_pre.sum() - 1
    cut_off = LEAST * (h_pre <= LEAST + rounding).sum()  # adds to the sum
    as_fresh = {
        "h_pre": -n * MOST_EPS - LEAST - rounding <= above <= cut_off + rounding and _in_range(pre, eps),
        "h_post": bool((post == post[:1]).all()) and _in_range(post, eps),
        "h_res": torch.allclose(res, 4 * torch.eye(n).double().flatten()[: len(res)], rtol=eps, atol=0),
    }
    if own.alpha.numel() == 1:
        as_fresh["h_pre"] &= bool((pre == pre[0]).all())
    return [name for name, same in as_fresh.items() if not same]


def _in_range(bias: Tensor, eps: float) -> bool:
    return bool((bias.abs() <= LARGEST * (1 + eps)).all())


def _check_places(
    placed: dict[str, str], state: Mapping[str, Tensor], others: Mapping[str, Tensor], connections: list[str]
) -> None:
    """placed: {name in the new model: name in the plain one}   others: tensors of the new model beside its maps"""
    norms = {_under(begin, NORM) for begin in connections}
    for norm in norms & placed.keys():
        bias = f"{placed[norm].removesuffix('weight')}bias"
        if bias in state:
            raise ValueError(f"convert: {bias}: the norm of a connection is an RMSNorm, which has no bias")
    left, missing = [], [key for key in others if key not in placed]
    if others.keys() - norms:
        left = [key for new, key in placed.items() if new not in others]
    else:  # fresh has connections and heads alone
        layers = [_under(begin, "layer") for begin in connections]
        missing += [layer for layer in layers if not any(new.startswith(f"{layer}.") for new in placed)]
    if left or missing:
        found = [f"{_first(left)} of the plain model would have no place in the new one"] if left else []
        found += [f"{_first(missing)} of the new model would have no tensor"] if missing else []
        raise ValueError(f"convert: {', and '.join(found)}; names says where tensors moved")
    for new, key in placed.items():
        if new in others and state[key].shape != others[new].shape:
            shapes = f"{list(state[key].shape)}, but {new} of the new model is {list(others[new].shape)}"
            raise ValueError(f"convert: {key} is {shapes}")


def _first(keys: list[str]) -> str:
    return ", ".join(keys[:MOST_NAMED]) + (f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else "")


def _in_layers(key: str, connections: list[str]) -> str:
    """The key with .layer after each connection that it lies in; the weight of a connection's norm stays."""
    for begin in sorted(connections, key=len):
        rest = key.removeprefix(f"{begin}.") if begin else key
        if (rest != key or not begin) and rest != NORM:
            key = _under(begin, f"layer.{rest}")
    return key


def _under(begin: str, name: str) -> str:
    return f"{begin}.{name}" if begin else name


def _renamed(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, str]:
    patterns = {_pattern(old): (old, new) for old, new in names.items()}
    unused, renamed = dict(names), {}
    for key in state:
        fits = [found for pattern in patterns if (found := pattern.match(f".{key}"))]
        renamed[key] = key
        if fits:
            longest = max(fits, key=lambda found: found.end())
            old, new = patterns[longest.re]
            unused.pop(old, None)
            begin = _numbered(new, old, longest)
            renamed[key] = (f".{begin}" * bool(begin) + f".{key}"[longest.end() :]).removeprefix(".")
    for old in unused:
        raise ValueError(f"convert: no tensor of the plain model has the name {old!r}")
    return renamed


def _pattern(name: str) -> re.Pattern[str]:
    """Fits a key with a dot before it, from its beginning to a dot or its end."""
    parts = NUMBER.split(name)
    if len(set(parts[1::2])) < len(parts[1::2]) or any("{" in part for part in parts[::2]):
        raise ValueError(f"convert: {name!r} is no name: its numbers are {{i}}, {{j}}, …, each once")
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = (rf"(?P<{letter}>\d+)" for letter in parts[1::2])
    return re.compile(rf"\.{''.join(parts)}(?=\.|$)" if name else "")


def _numbered(new: str, old: str, found: re.Match[str]) -> str:
    """stack.7 for stack.{2i+1}, where i is 3"""

    def number(part: re.Match[str]) -> str:
        times, letter, plus = part.groups()
        try:
            return str(int(times or 1) * int(numbers[letter]) + int(plus or 0)) if letter in numbers else part[0]
        except ValueError:  # of more digits than Python converts
            raise ValueError(f"convert: a number in {old!r} is too large") from None

    numbers = found.groupdict()
    name = MULTIPLE.sub(number, new)
    if "{" in name:
        raise ValueError(
            f"convert: {new!r} is no name for {old!r}: numbers are {{i}}, {{2i}} or {{2i+1}}, of an {{i}} there"
        )
    return name
