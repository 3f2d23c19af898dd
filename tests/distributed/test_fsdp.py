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
    """Connections in a stack and one outside of it, a head, a convolution, and what every model has beside them."""

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
    kept = state(network, optimizer)
    if save:
        dcp.save(kept, checkpoint_id=folder)
    else:
        dcp.load(kept, checkpoint_id=folder)
        set_state_dict(network, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        kept = state(network, optimizer)
    return out, gradients, norm, clipped, leaves(kept)


def save_and_replicate(folder):
    """Also the gradients where two pairs of processes hold the model twice."""
    trained = train(folder, save=True)
    network = fully_shard(model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    backward(network)
    return trained, gradients_of(network)


def load(folder):
    """Into a model that is not sharded, and into one of a mesh of one."""
    found = []
    for network in (model(), fully_shard(model(), mesh=line())):
        optimizer = adamw(network)
        backward(network)
        optimizer.step()
        kept = state(network, optimizer)
        dcp.load(kept, checkpoint_id=folder)
        set_state_dict(network, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        found.append(leaves(state(network, optimizer)))
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
    """What each is told."""

    def told(*arguments, **options):
        with pytest.raises((TypeError, ValueError)) as found:
            fully_shard(*arguments, **options)
        return str(found.value)

    whole, part, uneven = model(), model(), model()
    fully_shard(whole, mesh=line())
    torch_fully_shard(part.alone, mesh=line())
    uneven.stack[1].bfloat16()
    messages = [told(network, mesh=line()) for network in (whole, whole.stack, part, uneven, whole.out.weight)]
    assert not any(isinstance(parameter, DTensor) for parameter in uneven.parameters())
    return [*messages, told(model(), mesh=2)]


@pytest.fixture(scope="module")
def one():
    """Of one process, in fp64: output and gradients, with the sizes of their terms."""
    network = model(torch.float64).double()
    return exact(network(words()), list(network.parameters()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def saved_by_four(folder):
    return run(4, save_and_replicate, folder)


@pytest.fixture(scope="module")
def four(saved_by_four):
    return [trained for trained, _ in saved_by_four]


@pytest.fixture(scope="module")
def two(four, folder):
    """They load what four have saved."""
    return run(2, train, folder, False)


@pytest.fixture(params=["two", "four"])
def ranks(request):
    return request.getfixturevalue(request.param)


def test_is_one_process(ranks, one):
    for rank in ranks:
        assert_close([torch.cat([out for out, *_ in ranks]), *rank[1]], one)


def test_replicated_and_sharded(saved_by_four, one):
    for _, gradients in saved_by_four:
        assert_close(gradients, one[1:])


def test_clipping_is_that_of_one_process(ranks):
    network = model()
    network(words()).backward(*random_cotangents([torch.empty(BATCH, LENGTH, WORDS)]))
    parameters = list(network.parameters())
    expected = nn.utils.clip_grad_norm_(parameters, MOST)
    assert expected > 2 * MOST
    for _, gradients, norm, clipped, _ in ranks:
        assert_close([norm], [expected])
        assert_close(clipped, [gradient.double() * MOST / (norm.double() + 1e-6) for gradient in gradients])


def test_checkpoint_of_four_is_loaded_by_two_and_by_one(four, two, folder):
    """Parameters and the state of AdamW, bit for bit."""
    *_, saved = four[0]
    parameters = len(list(model().parameters()))
    assert len(saved) == 4 * parameters  # with two moments and a count of steps
    for *_, loaded in two:
        assert_equal(loaded, saved)
    ((plain, meshed),) = run(1, load, folder)
    assert_equal(plain, saved)
    assert_equal(meshed, saved)


@pytest.fixture(scope="module")
def seen_by_two():
    return run(2, small_things)


@pytest.mark.parametrize("streams", [bf16, fp32], ids=str)
@older_torch.CAST_IN_CHECKPOINT
def test_maps_stay_out_of_the_cast(streams, seen_by_two):
    """x keeps its type and the maps theirs, where layers and all else are bf16: the bits of a cast by hand."""
    for rank, *_ in seen_by_two:
        seen, as_by_hand, _ = rank[streams]
        types = {"layer": (bf16, bf16), "conv": (streams, bf16)}
        for name, (x, *parameters) in seen:
            h_out = [parameters.pop(0)] if name == "mhc_next" else []
            assert (x, *set(parameters)) == types.get(name, (streams, fp32))
            assert h_out in ([], [bf16], [streams])
        assert {name for name, _ in seen} == {*types, *(name for _, name in FUNCTIONS)}
        assert as_by_hand


@older_torch.CAST_IN_CHECKPOINT
def test_gradients_of_maps_are_reduced_in_fp32(seen_by_two):
    """Those of the layers in bf16, as the policy says."""
    for rank, *_ in seen_by_two:
        for _, _, gradients in rank.values():
            rounded = {
                name for name, gradient in gradients.items() if torch.equal(gradient, gradient.to(bf16).to(fp32))
            }
            assert rounded == set(gradients) - names_of_maps()


@older_torch.CAST_IN_CHECKPOINT
def test_one_group_for_the_maps_of_a_stack(seen_by_two):
    """Beside three layers, the maps of the stack, of one connection and of the head, and the rest; of the backward's
    gathers those of the head, which torch holds with the rest where it is the last, may be left out."""
    for _, forward, backward, _ in seen_by_two:
        assert forward == ["all-gather"] * 7
        assert backward.count("reduce-scatter") == 7
        assert len(backward) <= 7 + 6


@older_torch.CAST_IN_CHECKPOINT
def test_maps_are_sharded_without_padding(seen_by_two):
    for *_, placements in seen_by_two:
        assert placements["phi"] == placements["gamma"] == (Shard(1),)  # 15 and 3 rows
        assert placements["bias"] == placements["layer.up.weight"] == (Shard(0),)


def test_wrong_use_is_told():
    assert run(1, wrong_uses) == [
        [
            "fully_shard: the model is sharded already; shard a model once, before use",
            "fully_shard: the model is sharded already; shard a model once, before use",
            "fully_shard: alone is sharded already; shard a model once, before use",
            "fully_shard: the maps of stack are bfloat16 and float32; give them one type",
            "fully_shard: model must be a Module, got DTensor",
            "fully_shard: mesh must be a DeviceMesh, got int",
        ]
    ]


def kernels():
    """Of a sharded stack on the kernels, which see the whole maps: this rank's output, and the gradients."""
    network = fully_shard(stack_on_kernels(), mesh=line())
    out = network(own(streams()))
    (out.square().sum() * dist.get_world_size()).backward()
    return out.detach(), gradients_of(network)


def stack_on_kernels():
    torch.manual_seed(0)
    made = [HyperConnection(nn.Linear(D, D), N, D, gamma=True, sinkhorn_iters=2, backend="triton") for _ in range(2)]
    for connection in made:
        nn.init.normal_(connection.phi, std=connection.phi.shape[1] ** -0.5)
    return HyperStack(*made)


def streams():
    return torch.randn(2, N, D, generator=torch.Generator().manual_seed(2))


@pytest.mark.interpreted
def test_kernels():
    network = stack_on_kernels()
    expected = torch.cat([network(share) for share in streams().chunk(2)])  # as a product of matrices has other bits
    expected.square().sum().backward()
    ranks = run(2, kernels)
    assert torch.equal(torch.cat([out for out, _ in ranks]), expected)
    for _, gradients in ranks:
        assert_close(gradients, [parameter.grad for parameter in network.parameters()])
