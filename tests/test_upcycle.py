"""convert.upcycle: a plain model's checkpoint in the same model with hyper-connections, which computes the same."""

import copy
import re
from collections import OrderedDict

import pytest
import torch
from compat_oracle import distance
from torch import nn

from mhc_ops import HyperConnection, HyperHead, HyperStack, convert, mhc_expand

N, D, DEPTH = 3, 16, 2
LOGITS = 1e-5  # fp32, relative to the norm of what the plain model computes


def layers():
    return nn.Linear(D, D), nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


def says(error, begin):
    return pytest.raises(error, match=f"^convert: {re.escape(begin)}")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(D, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = layers()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, D), nn.Linear(D, 9)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))

    def forward(self, ids):
        return self.out(self.blocks(self.embed(ids)))


class Stacked(nn.Module):
    def __init__(self, layer_norm=True, **options):
        super().__init__()
        self.embed, self.out, self.head = nn.Embedding(9, D), nn.Linear(D, 9), HyperHead(N, D)
        all_layers = [layer for _ in range(DEPTH) for layer in layers()]
        if not layer_norm:
            norms = [nn.RMSNorm(D, eps=1e-6) for _ in all_layers]
            all_layers = [nn.Sequential(OrderedDict(norm=norm, layer=each)) for norm, each in zip(norms, all_layers)]
        self.stack = HyperStack(*(HyperConnection(each, N, D, layer_norm=layer_norm, **options) for each in all_layers))

    def forward(self, ids):
        return self.out(self.head(self.stack(mhc_expand(self.embed(ids), N))))


NAMES = {
    "blocks.{i}.norm1.weight": "stack.{2i}.layer_norm_weight",
    "blocks.{i}.attn": "stack.{2i}",
    "blocks.{i}.norm2.weight": "stack.{2i+1}.layer_norm_weight",
    "blocks.{i}.mlp": "stack.{2i+1}",
}
NORMS_INSIDE = {
    "blocks.{i}.norm1": "stack.{2i}.norm",
    "blocks.{i}.attn": "stack.{2i}.layer",
    "blocks.{i}.norm2": "stack.{2i+1}.norm",
    "blocks.{i}.mlp": "stack.{2i+1}.layer",
}
WAYS = {
    "a stack": (Stacked, NAMES),
    "norms in the layers": (lambda: Stacked(layer_norm=False), NORMS_INSIDE),
    "identity": (lambda: Stacked(residual="identity", gamma=True), NAMES),
}


@pytest.fixture
def plain():
    torch.manual_seed(0)
    model = Plain()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_computes_the_same(way, plain):
    build, names = WAYS[way]
    ids, model, state = torch.randint(9, (4, 7)), build(), plain.state_dict()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = convert.upcycle(state, model.state_dict(), names)
    maps = [key for keys in convert.groups(before, "mhc_ops").values() for key in keys]
    assert all(torch.equal(found[key], before[key]) for key in maps)
    others = {found[key] for key in found.keys() - set(maps)}
    assert len(others) == len(state) and others == set(state.values())  # the same tensors
    model.load_state_dict(found)
    assert distance(model(ids), plain(ids)) < LOGITS


@torch.no_grad()
def test_bf16(plain):
    """The maps stay fp32. Logits are as near to those of fp32 as before, in the mean."""
    ids, ratios = torch.randint(9, (4, 7)), []
    wide, narrow = plain(ids), copy.deepcopy(plain).bfloat16()
    for build, names in WAYS.values():
        model = build()
        found = convert.upcycle(narrow.state_dict(), model.state_dict(), names)
        assert {tensor.dtype for key, tensor in found.items() if key.endswith("phi")} == {torch.float32}
        model.load_state_dict(found, assign=True)
        assert model(ids).dtype == torch.bfloat16
        ratios.append(distance(model(ids), wide) / distance(narrow(ids), wide))
    assert torch.tensor(ratios).log().mean().exp() < 1.5


def test_only_the_connections_of_a_large_model(plain):
    """Which alone need memory; on the meta device the others have shapes."""
    model, state = Stacked(), plain.state_dict()
    expected = convert.upcycle(state, model.state_dict(), NAMES)
    alone = {key: tensor for key, tensor in model.state_dict().items() if key in expected and ".layer." not in key}
    alone = {key: tensor for key, tensor in alone.items() if key.startswith(("stack", "head"))}
    on_meta = {key: tensor if key in alone else tensor.to("meta") for key, tensor in model.state_dict().items()}
    for fresh in (alone, on_meta):
        found = convert.upcycle(state, fresh, NAMES)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


def test_names():
    state = {"module.a.3.b.1.w": torch.zeros(2), "module.a.3.w": torch.zeros(2), "module.a.bc": torch.zeros(2)}
    fresh = HyperConnection(torch.tanh, N, D).state_dict()
    names = {"module": "", "module.a.{i}.b.{j}": "c.{2j}.{3i-1}", "module.a.b": "never"}
    with says(ValueError, "no tensor of the plain model has the name 'module.a.b'"):
        convert.upcycle(state, fresh, names)
    del names["module.a.b"]
    found = convert.upcycle(state, fresh, names)  # the whole model is the layer of a connection
    assert list(found) == ["layer.c.2.8.w", "layer.a.3.w", "layer.a.bc", *fresh]
    found = convert.upcycle({"w": torch.zeros(2)}, {f"m.{key}": tensor for key, tensor in fresh.items()}, {"": "m"})
    assert next(iter(found)) == "m.layer.w"


MAPS, OLD = N * N + 2 * N, ("old.phi", "old.alpha", "old.bias")


def bias_with(rows, value):
    """That of a fresh connection with another value there"""
    torch.manual_seed(0)
    bias = HyperConnection(torch.tanh, N, D).bias.detach().clone()
    bias[rows] = value
    return bias


NOT_AS_FRESH = [("h_pre", slice(N), -50), ("h_pre", slice(N), torch.tensor([0.0, 0.0, -50.0]))]  # the latter sum to 1
NOT_AS_FRESH += [("h_post", slice(N, N + 1), 0.1), ("h_post", slice(N, 2 * N), -50)]
NOT_AS_FRESH += [("h_res", slice(2 * N, None), 0), ("h_res", slice(-1, None), float("nan"))]
WRONG = [  # which argument, what is other in it, and what is said
    *(("fresh", {"stack.1.bias": bias_with(*to)}, f"{h} of stack.1.bias is not as in") for h, *to in NOT_AS_FRESH),
    ("fresh", {"head.bias": torch.tensor([0.25, 0.25, 0.5]).logit()}, "h_pre of head.bias is not as in a fresh"),
    ("fresh", {"stack.1.phi": torch.ones(MAPS, N * D)}, "stack.1.phi is not 0: fresh must be"),
    ("fresh", {"stack.1.bias": torch.zeros(MAPS, device="meta")}, "stack.1.phi or its bias is on the meta device"),
    ("fresh", {"a.weight": (1,)}, "a.weight of the new model would have no tensor; names says"),
    ("state", {"a.weight": (1,)}, "a.weight of the plain model would have no place in the new one; names says"),
    ("state", dict.fromkeys("stuv", (1,)), "s, t, u and 1 more of the plain model would have no place in the new one"),
    ("state", {"out.weight": (9, 2)}, f"out.weight is [9, 2], but out.weight of the new model is [9, {D}]"),
    ("state", {"blocks.0.norm1.bias": (D,)}, "blocks.0.norm1.bias: the norm of a connection"),
    ("state", dict.fromkeys(OLD, (1,)), f"{', '.join(OLD)} of the plain model are maps"),
    ("names", {"embed": "out"}, "two tensors would be out.weight"),
    ("names", {"blocks.{i}.mlp": "stack.{2j}"}, "'stack.{2j}' is no name for 'blocks.{i}.mlp': numbers are"),
    ("names", {"a.{i}.{i}": "a"}, "'a.{i}.{i}' is no name: its numbers are"),
]


@pytest.mark.parametrize(("which", "changes", "message"), WRONG)
def test_what_does_not_fit(which, changes, message, plain):
    given = {"state": plain.state_dict(), "fresh": Stacked().state_dict(), "names": dict(NAMES)}
    given[which] |= {key: torch.zeros(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    with says(ValueError, message):
        convert.upcycle(**given)


@pytest.mark.parametrize("n", [1, 2, 8, 40])
def test_a_fresh_model_of_any_seed_and_options(n):
    """This holds where a random h_pre was cut off too, and after the maps were rounded."""
    options = {"hc_eps": 0.001, "post_mult": 1.0}, {"hc_eps": 0.0, "post_mult": 3.0, "post_eps": 0.1}, {}
    for seed, own in enumerate(options * 8):
        torch.manual_seed(seed)
        model = nn.Sequential(HyperConnection(nn.Linear(1, 1), n, 1, **own), HyperHead(n, 1))
        for dtype in (torch.float32, torch.bfloat16):
            fresh = {key: tensor.to(dtype) for key, tensor in model.state_dict().items()}
            convert.upcycle({"0.weight": torch.ones(1, 1), "0.bias": torch.ones(1)}, fresh)


MAPS_OF_A = {f"a.{key}": tensor for key, tensor in HyperConnection(torch.tanh, N, D).state_dict().items()}
NOT_TENSORS = [
    ({"model": {}, "step": 3}, None, TypeError, "state['model'] must be a tensor, got dict"),
    ({3: torch.ones(1)}, None, TypeError, "the names in state must be str, got int"),
    ({"a.w": torch.ones(1)}, ["a"], TypeError, "names must be a dict of str, got list"),
    ({"a.w": torch.ones(1)}, {"a": 1}, TypeError, "names must be a dict of str, got int in it"),
    ({f"b.{'9' * 5000}.w": torch.ones(1)}, {"b.{i}": "a.{2i}"}, ValueError, "a number in 'b.{i}' is too large"),
    ({"x.w": torch.ones(1)}, None, ValueError, "a.layer of the new model would have no tensor; names says"),
]


@pytest.mark.parametrize(("state", "names", "error", "message"), NOT_TENSORS)
def test_with_the_maps_alone_what_does_not_fit(state, names, error, message):
    with says(error, message):
        convert.upcycle(state, MAPS_OF_A, names)


def test_a_model_without_connections(plain):
    with says(TypeError, "fresh must be a state dict, got Stacked"):
        convert.upcycle(plain.state_dict(), Stacked())
    with says(ValueError, "fresh must be the state dict of a model with HyperConnections"):
        convert.upcycle(plain.state_dict(), plain.state_dict())
