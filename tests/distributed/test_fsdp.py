"""FSDP2 around hyper-connections: 2 and 4 processes against one."""

import older_torch
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mhc_kernels import bf16, fp32
from processes import run
from sending import Sending
from stack_results import assert_close, assert_equal, exact, random_cotangents
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

import mhc_ops
import mhc_ops.mhc.carry
import mhc_ops.mhc.modules
from mhc_ops import HyperConnection, HyperHead, HyperStack, ShortConv
from mhc_ops.distributed import fully_shard

N, D, WORDS, BATCH, LENGTH = 3, 8, 11, 4, 5
MOST = 0.5  # the norm that gradients are clipped to


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Connections in a stack and one outside of it, a head, a convolution, an embedding and an output layer."""

    def __init__(self, streams):
        super().__init__()
        self.streams = streams
        self.embedding = nn.Embedding(WORDS, D)
        self.conv = ShortConv(N, D)
        self.stack = HyperStack(
            HyperConnection(MLP(), N, D, gamma=True, layer_norm=True),
            HyperConnection(torch.tanh, N, D),
            HyperConnection(MLP(), N, D, checkpoint=True),
        )
        self.alone = HyperConnection(MLP(), N, D, checkpoint=True)
        self.head = HyperHead(N, D, gamma=True)
        self.out = nn.Linear(D, WORDS)

    def forward(self, words):
        x = mhc_ops.mhc_expand(self.embedding(words).to(self.streams), N)
        h = self.head(self.alone(self.stack(self.conv(x))))
        return self.out(h.to(self.out.weight.dtype))


def model(streams=fp32):
    """The same in every process, away from the fresh state, so that every gradient is alive."""
    torch.manual_seed(0)
    made = Model(streams)
    for module in made.modules():
        if hasattr(module, "phi"):
            nn.init.normal_(module.phi, std=module.phi.shape[1] ** -0.5)
            nn.init.ones_(module.alpha)
    return made


def words():
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def line():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def gradients_of(network):
    return [whole(parameter.grad) for parameter in network.parameters()]


def own(tensor):
    """This rank's share of a batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def backward(network):
    """The output of this rank's tokens; gradients of the sum over all ranks: torch takes the mean."""
    out = network(own(words()))
    (cotangent,) = random_cotangents([torch.empty(BATCH, LENGTH, WORDS)])
    out.backward(own(cotangent).to(out.dtype) * dist.get_world_size())
    return out.detach()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def adamw(network):
    return torch.optim.AdamW(network.parameters(), lr=0.1)


def state(network, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(network, optimizer)))


def leaves(tree):
    """The tensors of a state, whole."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [whole(tree)] if isinstance(tree, torch.Tensor) else []


def load(network, optimizer, folder):
    kept = state(network, optimizer)
    dcp.load(kept, checkpoint_id=folder)
    set_state_dict(network, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])


def train(folder, save):
    """Output, gradients, their norm, the gradients when clipped; and the state that was saved or loaded."""
    network = fully_shard(model(), mesh=line())
    optimizer = adamw(network)
    out = backward(network)
    gradients = gradients_of(network)
    norm = whole(nn.utils.clip_grad_norm_(network.parameters(), MOST))
    clipped = gradients_of(network)
    for _ in range(1 if save else 2):  # away from what was saved
        optimizer.step()
    if save:
        dcp.save(state(network, optimizer), checkpoint_id=folder)
    else:
        load(network, optimizer, folder)
    return out, gradients, norm, clipped, leaves(state(network, optimizer))


def on_four(folder):
    """Train and save; also the gradients if two pairs of processes hold the model twice."""
    trained = train(folder, save=True)
    network = fully_shard(model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    backward(network)
    return trained, gradients_of(network)


def on_two(folder):
    """FSDP2 of an older torch does not cast the inputs of a layer that is computed again."""
    return train(folder, save=False), None if older_torch.OLDER else small_things()


def on_one(folder):
    """Load into a model that is not sharded, and into one of a mesh of one; then wrong uses."""
    found = []
    for network in (model(), fully_shard(model(), mesh=line())):
        optimizer = adamw(network)
        backward(network)
        optimizer.step()
        load(network, optimizer, folder)
        found.append(leaves(state(network, optimizer)))
    wrong_uses()
    return found


FUNCTIONS = [
    (mhc_ops.mhc.carry, "mhc_enter"),
    (mhc_ops.mhc.carry, "mhc_next"),
    (mhc_ops.mhc.modules, "mhc_layer"),
    (mhc_ops.mhc.modules, "mhc_head"),
]
LAYERS = ("stack.0.layer", "stack.2.layer", "alone.layer")


def names_of_maps():
    modules = {name: module for name, module in model().named_modules() if hasattr(module, "phi")}
    return {f"{name}.{own}" for name, module in modules.items() for own, _ in module.named_parameters(recurse=False)}


def noted(function, seen):
    """The function, which then notes the types of what it is given."""

    def call(*arguments, **options):
        given = [getattr(argument, "x", argument) for argument in (*arguments, *options.values())]
        seen.append((function.__name__, [tensor.dtype for tensor in given if isinstance(tensor, torch.Tensor)]))
        return function(*arguments, **options)

    return call


def cast(streams):
    """What torch's cast of all but the maps comes to, in one process."""
    network, maps = model(streams), names_of_maps()
    for name, parameter in network.named_parameters():
        if name not in maps:
            parameter.data = parameter.data.bfloat16()
    for name in LAYERS:
        network.get_submodule(name).register_forward_pre_hook(lambda module, inputs: (inputs[0].bfloat16(),))
    return network


def mixed(streams):
    """In bf16 but for the maps: the types seen, whether the output is that of the cast by hand, gradients by name."""
    network = fully_shard(model(streams), mesh=line(), mp_policy=MixedPrecisionPolicy(param_dtype=bf16))
    seen = []
    for name in LAYERS:
        network.get_submodule(name).register_forward_pre_hook(
            lambda layer, inputs: seen.append(("layer", [inputs[0].dtype, layer.up.weight.dtype]))
        )
    network.conv.register_forward_pre_hook(
        lambda conv, inputs: seen.append(("conv", [inputs[0].dtype, conv.weight.dtype]))
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        for place, name in FUNCTIONS:
            monkeypatch.setattr(place, name, noted(getattr(place, name), seen))
        out = backward(network)
    expected = cast(streams)(own(words()))
    gradients = {name: whole(parameter.grad) for name, parameter in network.named_parameters()}
    return seen, torch.equal(out, expected), gradients


def collectives(sending):
    return [sent.how for sent in sending.sent]


def small_things():
    """Types and gradients in bf16, by the type of the streams; collectives forward and backward; placements."""
    network = fully_shard(model(), mesh=line())
    with Sending() as forward:
        out = network(own(words()))
    with Sending() as back:
        out.sum().backward()
    placements = {name: parameter.placements for name, parameter in network.stack[0].named_parameters()}
    return {bf16: mixed(bf16), fp32: mixed(fp32)}, collectives(forward), collectives(back), placements


def wrong_uses():
    whole, part, uneven = model(), model(), model()
    fully_shard(whole, mesh=line())
    torch_fully_shard(part.alone, mesh=line())
    uneven.stack[1].cast_maps = True
    uneven.stack[1].bfloat16()
    for network, message in [
        (whole, "the model is sharded already; shard a model once, before use"),
        (whole.stack, "the model is sharded already; shard a model once, before use"),
        (part, "alone is sharded already; shard a model once, before use"),
        (uneven, "the maps of stack are bfloat16 and float32; give them one type"),
        (whole.out.weight, "model must be a Module, got DTensor"),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"^fully_shard: {message}$"):
            fully_shard(network, mesh=line())
    with pytest.raises(TypeError, match=r"^fully_shard: mesh must be a DeviceMesh, got int$"):
        fully_shard(model(), mesh=2)
    assert not any(isinstance(parameter, DTensor) for parameter in uneven.parameters())


def test_four_processes_and_two_are_one(tmp_path):
    """Output, gradients and clipping; two and one process load what four have saved."""
    network = model(torch.float64).double()
    one = exact(network(words()), list(network.parameters()))  # with the sizes of the terms of gradients
    four, replicated = zip(*run(4, on_four, str(tmp_path)))
    two, seen = zip(*run(2, on_two, str(tmp_path)))
    for ranks in (four, two):
        for rank in ranks:
            assert_close([torch.cat([out for out, *_ in ranks]), *rank[1]], one)
        assert_clipped(ranks)
    for gradients in replicated:
        assert_close(gradients, one[1:])
    *_, saved = four[0]
    assert len(saved) == 4 * len(list(network.parameters()))  # with two moments and a count of steps
    ((plain, meshed),) = run(1, on_one, str(tmp_path))
    for loaded in (*(rank[-1] for rank in two), plain, meshed):
        assert_equal(loaded, saved)
    for rank in filter(None, seen):
        assert_small_things(*rank)


def assert_clipped(ranks):
    network = model()
    network(words()).backward(*random_cotangents([torch.empty(BATCH, LENGTH, WORDS)]))
    expected = nn.utils.clip_grad_norm_(list(network.parameters()), MOST)
    assert expected > 2 * MOST
    for _, gradients, norm, clipped, _ in ranks:
        assert_close([norm], [expected])
        assert_close(clipped, [gradient.double() * MOST / (norm.double() + 1e-6) for gradient in gradients])


def assert_small_things(by_streams, forward, backward, placements):
    for streams, (seen, as_by_hand, gradients) in by_streams.items():
        # x keeps its type and the maps theirs, where layers and all else are bf16: the bits of a cast by hand.
        types = {"layer": (bf16, bf16), "conv": (streams, bf16)}
        for name, (x, *parameters) in seen:
            h_out = [parameters.pop(0)] if name == "mhc_next" else []
            assert (x, *set(parameters)) == types.get(name, (streams, fp32))
            assert h_out in ([], [bf16], [streams])
        assert {name for name, _ in seen} == {*types, *(name for _, name in FUNCTIONS)}
        assert as_by_hand
        # Gradients of maps are reduced in fp32, those of layers in bf16, as the policy says.
        rounded = {name for name, one in gradients.items() if torch.equal(one, one.to(bf16).to(fp32))}
        assert rounded == set(gradients) - names_of_maps()
    # One group for the maps of the stack, beside three layers, the maps of one connection and of the head, and the
    # rest. The backward need not gather the maps of the head, which torch may still hold.
    assert forward == ["all-gather"] * 7
    assert backward.count("reduce-scatter") == 7
    assert len(backward) <= 7 + 6
    # Maps are sharded without padding: phi and gamma have 15 and 3 rows.
    assert placements["phi"] == placements["gamma"] == (Shard(1),)
    assert placements["bias"] == placements["layer.up.weight"] == (Shard(0),)
