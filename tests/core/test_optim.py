"""Groups of parameters: what is in which, and that optimizers, checkpoints and wrappers take them."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from mhc_ops import HyperConnection, HyperHead, HyperStack, ShortConv, parameter_groups
from mhc_ops.compat.liger import LigerMHC
from mhc_ops.compat.megatron import HyperConnectionModule
from mhc_ops.distributed import fully_shard

N, D, WORDS = 2, 4, 8
MAPS = ("phi", "alpha", "bias", "gamma", "layer_norm_weight")
EXPECTED = {
    "matrices": {"stack.0.layer.weight", "stack.1.layer.weight"},
    "weights": {"embedding.weight", "experts", "conv.weight"},
    "vectors": {"stack.0.layer.bias", "stack.1.layer.bias", "norm.weight"},
    "maps": {
        *(f"stack.{which}.{name}" for which in (0, 1) for name in MAPS),
        *(f"head.{name}" for name in MAPS[:3]),
        "conv.norm_weight",
    },
}


class Model(nn.Module):
    """The output layer shares the embedding; the stack runs one connection twice; `frozen` does not train."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(WORDS, D), nn.Linear(D, WORDS, bias=False)
        self.out.weight = self.embedding.weight
        connections = [HyperConnection(nn.Linear(D, D), N, D, gamma=True, layer_norm=True) for _ in range(2)]
        self.stack = HyperStack(*connections, connections[0])
        self.conv, self.norm, self.head = ShortConv(N, D), nn.RMSNorm(D), HyperHead(N, D)
        self.experts = nn.Parameter(torch.randn(3, D, D))
        self.frozen = nn.Linear(D, D).requires_grad_(False)


def names_in(groups, network):
    """The names by group; each is there once."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    found = [names[id(parameter)] for group in groups for parameter in group["params"]]
    assert len(found) == len(set(found))
    return {group["name"]: {names[id(parameter)] for parameter in group["params"]} for group in groups}


def test_what_is_in_which_group():
    network = Model()
    groups = parameter_groups(network, lr=0.1, weight_decay=0.2, maps={"lr": 0.3, "betas": (0.5, 0.5)})
    assert names_in(groups, network) == EXPECTED
    options = {group.pop("name"): group for group in groups if group.pop("params")}
    assert options == {
        "matrices": {"lr": 0.1, "weight_decay": 0.2},
        "weights": {"lr": 0.1, "weight_decay": 0.2},
        "vectors": {"lr": 0.1, "weight_decay": 0.0},
        "maps": {"lr": 0.3, "weight_decay": 0.0, "betas": (0.5, 0.5)},
    }
    rate = torch.tensor(0.1)
    assert [group["lr"] is rate for group in parameter_groups(nn.Linear(2, 2), lr=rate, weight_decay=0)] == [True] * 2


def test_modules_of_other_libraries():
    sizes = {"hidden_size": D, "num_residual_streams": N, "mhc_sinkhorn_iterations": 1}
    config = SimpleNamespace(**sizes, mhc_init_gating_factor=1.0, sequence_parallel=False)
    for module in (LigerMHC(nn.Identity(), hc=N, c=D), HyperConnectionModule(config, 0)):
        found = names_in(parameter_groups(module, lr=0.1, weight_decay=0.1), module)
        assert found == {"maps": {*dict(module.named_parameters())}}


def wrapped():
    """Under FSDP2 a parameter keeps its dimensions; after FSDP1 it is refused."""
    sharded = fully_shard(Model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    network = FSDP1(nn.Linear(D, D), use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="is flattened by FSDP1; make the groups before"):
        parameter_groups(network, lr=0.1, weight_decay=0.1)
    return names_in(parameter_groups(sharded, lr=0.1, weight_decay=0.1), sharded)


@pytest.mark.thorough
def test_fsdp():
    assert run(2, wrapped) == [EXPECTED] * 2


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"model": 1}, TypeError, "model must be an nn.Module, got int"),
        ({"lr": -1.0}, ValueError, "lr must be 0 or more, got -1.0"),
        ({"lr": "1"}, TypeError, "lr must be a number, got str"),
        ({"weight_decay": None}, TypeError, "weight_decay must be a number, got NoneType"),
        ({"maps": 0.1}, TypeError, "maps must be a mapping of options, got float"),
        ({"maps": {"params": []}}, ValueError, "maps must be options of the optimizer, got 'params'"),
        ({"maps": {"lr": torch.tensor([-2.0])}}, ValueError, "maps['lr'] must be 0 or more, got -2.0"),
        ({"model": nn.Identity()}, ValueError, "this Identity has no trainable parameters"),
        ({"maps": {"lr": 0.1}}, ValueError, "maps must be left out, because this Linear has no trainable maps"),
    ],
)
def test_wrong_uses(arguments, kind, message):
    given = {"model": nn.Linear(2, 2), "lr": 0.1, "weight_decay": 0.1, **arguments}
    with pytest.raises(kind) as error:
        parameter_groups(**given)
    assert str(error.value) == f"parameter_groups: {message}"
