"""Maps stay fp32: under every cast, in copies, from checkpoints and under wrappers, unless they are asked to follow."""

import copy
import pickle
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

from mhc_ops import HyperConnection, HyperHead, HyperStack, MHCBlock, ShortConv, mhc_expand
from mhc_ops.distributed import fully_shard

N, D = 4, 8
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MAP = re.compile(r"conv\.norm_weight|(stack\.\d|head|block)\.(phi|alpha|bias|gamma|layer_norm_weight)")
CASTS = {
    "to": (BF16, lambda model: model.to(BF16)),
    "to a tensor": (FP16, lambda model: model.to(torch.zeros(1, dtype=FP16))),
    "type": (BF16, lambda model: model.type(BF16)),
    "after double": (BF16, lambda model: model.double().bfloat16()),
}


class Model(nn.Module):
    def __init__(self, depth=2, **own):
        super().__init__()
        self.embedding = nn.Linear(D, D)
        self.conv, self.block = ShortConv(N, D, **own), MHCBlock(N, D, **own)
        layers = [nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in range(depth)]
        self.stack = HyperStack(*(HyperConnection(each, N, D, gamma=True, layer_norm=True, **own) for each in layers))
        self.head = HyperHead(N, D, **own)

    def forward(self, x):
        x = self.conv(mhc_expand(self.embedding(x.to(self.embedding.weight.dtype)), N))
        h_in, h_post, h_res = self.block(x)
        return self.head(self.stack(x)) + (h_in * h_post.mean(-1, True) * h_res.mean((-2, -1))[..., None]).to(x.dtype)


def model(**own):
    """Away from the fresh state, so that every parameter has a gradient."""
    torch.manual_seed(0)
    made = Model(**own)
    for module in (*made.stack, made.head):
        nn.init.normal_(module.phi, std=0.2)
    return made


def types(network):
    """Those of maps, and those of the rest."""
    named = dict(network.named_parameters())
    return tuple({named[name].dtype for name in named if bool(MAP.fullmatch(name)) == maps} for maps in (True, False))


def step(network):
    out = network(torch.randn(2, 3, D, generator=torch.Generator().manual_seed(1)))
    out.float().square().mean().backward()
    return out


@pytest.mark.parametrize("cast", CASTS)
def test_a_narrower_type_leaves_maps_and_their_gradients_as_they_are(cast):
    dtype, function = CASTS[cast]
    network = model()
    step(network)
    before = {name: (each.detach().clone(), each.grad.clone()) for name, each in network.named_parameters()}
    assert function(network) is network
    assert types(network) == ({FP32}, {dtype})
    for name, now in network.named_parameters():
        expected = before[name] if MAP.fullmatch(name) else [each.to(dtype) for each in before[name]]
        assert torch.equal(now, expected[0]) and torch.equal(now.grad, expected[1]), name
    network.zero_grad()
    assert step(network).dtype == dtype


def test_other_casts_and_moves():
    network = model().to(BF16)
    assert types(network.double()) == ({FP64}, {FP64})
    assert types(network.float()) == ({FP32}, {FP32})
    assert types(network.to("meta", BF16)) == ({FP32}, {BF16})
    assert {parameter.device.type for parameter in network.parameters()} == {"meta"}
    assert types(network.to_empty(device="cpu")) == ({FP32}, {BF16})
    assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}


def test_what_is_asked_for():
    """cast_maps rounds them, at construction or later, or a narrow dtype does."""
    assert types(model(cast_maps=True)) == ({FP32}, {FP32})
    assert types(model(cast_maps=True).bfloat16()) == ({BF16}, {BF16})
    assert types(model(dtype=BF16).half()) == ({FP16}, {FP16})
    network = model()
    for module in network.modules():
        module.cast_maps = True
    assert types(network.bfloat16()) == ({BF16}, {BF16})
    assert "cast_maps=True" in repr(HyperHead(2, 4, cast_maps=True))
    with pytest.raises(TypeError, match="ShortConv: cast_maps must be a bool, got int"):
        ShortConv(2, 4, cast_maps=1)
    for dtype in (torch.complex64, torch.int32):
        with pytest.raises(TypeError, match=r"HyperHead: dtype must be bfloat16, .* or float64, got (complex64|int32)"):
            HyperHead(2, 4, dtype=dtype)


@pytest.mark.parametrize("cast_maps", [False, True])
def test_copies_keep_them_too(cast_maps):
    network = model(cast_maps=cast_maps)
    for copied in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert types(copied.bfloat16()) == ({BF16 if cast_maps else FP32}, {BF16})


@pytest.mark.parametrize("assign", [False, True])
def test_a_bf16_checkpoint_widens(assign):
    narrow = model(dtype=BF16).bfloat16()
    state = narrow.state_dict()
    network = model().bfloat16()
    with torch.device("meta"):
        network = Model().bfloat16() if assign else network
    network.load_state_dict(state, assign=assign)
    assert types(network) == ({FP32}, {BF16})
    assert all(torch.equal(loaded, state[name].to(loaded.dtype)) for name, loaded in network.state_dict().items())
    assert {tensor.dtype for tensor in state.values()} == {BF16}  # as it was
    follows = model(cast_maps=True).bfloat16()
    follows.load_state_dict(state, assign=assign)
    assert types(follows) == ({BF16}, {BF16})


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, phi):
        return self.factor * phi


def test_parametrized_maps():
    """The tensors that a parametrization makes a map of are maps; what else it has is cast."""
    network = model()
    parametrize.register_parametrization(network.head, "phi", Scaled())
    parametrizations.weight_norm(network.stack[0], "gamma")
    expected = network.head.phi.detach().clone()
    network.bfloat16()
    narrow = {name for name, parameter in network.named_parameters() if parameter.dtype == BF16 and "param" in name}
    assert narrow == {"head.parametrizations.phi.0.factor"}
    assert torch.equal(network.head.phi, expected)
    assert network.stack[0].gamma.dtype == FP32
    step(network)
    network.load_state_dict({name: tensor.to(BF16) for name, tensor in network.state_dict().items()}, assign=True)
    assert {parameter.dtype for name, parameter in network.named_parameters() if ".original" in name} == {FP32}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_maps_that_older_tools_make():
    """nn.utils.prune and the weight_norm before parametrizations keep what a map is made of under other names."""
    network = model()
    prune.random_unstructured(network.head, "phi", amount=0.5)
    nn.utils.weight_norm(network.stack[0], "phi")
    network.stack[1].bias_v = nn.Parameter(torch.zeros(2, 2))  # bias is there: it is not made of this
    named = dict(network.bfloat16().named_parameters())
    made = {name for name in named if named[name].dtype == FP32 and not MAP.fullmatch(name)}
    assert made == {"head.phi_orig", "stack.0.phi_g", "stack.0.phi_v"}


def test_shared_maps_stay_shared():
    """Those that shared a parameter and load one bf16 tensor, while the first has the values that it loaded."""
    one, other = HyperHead(2, 4), HyperHead(2, 4)
    both = nn.ModuleList([one, other])
    other.phi = one.phi
    state = {name: tensor.to(BF16) for name, tensor in both.state_dict().items()}
    state["1.phi"] = state["0.phi"].detach()
    both.load_state_dict(state, assign=True)
    assert one.phi is other.phi and one.phi.dtype == FP32 and one.bias is not other.bias
    one.load_state_dict({name[2:]: state[name] for name in state if name[0] == "0"}, assign=True)
    nn.init.ones_(one.phi)
    other.load_state_dict({name[2:]: state[name] for name in state if name[0] == "1"}, assign=True)
    assert torch.equal(other.phi, state["1.phi"].to(FP32))
    with pytest.raises(RuntimeError, match=r'parameter named "phi", expected torch.Tensor'):
        one.load_state_dict({**one.state_dict(), "phi": [1.0]}, assign=True)


def wrapped():
    """The types of maps and of the rest after a training step under each wrapper, and the parameters that stayed."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    wrappers = {"DDP": DistributedDataParallel, "FSDP2": partial(fully_shard, mesh=mesh)}
    for kind, wrap in wrappers.items():
        network = model().bfloat16()
        if kind == "FSDP2":
            network.conv = nn.Identity()  # it has two types
        whole = wrap(network)
        optimizer = torch.optim.SGD(whole.parameters(), lr=1.0)
        before = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
        step(whole)
        optimizer.step()
        now = dict(whole.named_parameters())
        found[kind] = (*types(network), [name for name, then in before.items() if now[name].equal(then)])
    with pytest.raises(ValueError, match="conv is bfloat16 and float32, and a group has one type; leave the model"):
        fully_shard(model().bfloat16(), mesh=mesh)
    return found


def test_wrappers():
    expected = ({FP32}, {BF16}, [])
    assert run(2, wrapped) == [dict.fromkeys(("DDP", "FSDP2"), expected)] * 2
