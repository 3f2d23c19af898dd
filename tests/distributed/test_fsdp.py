"""FSDP2 around hyper-connections: 2 and 4 processes against one."""

from functools import partial

import older_torch
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mhc_kernels import bf16, fp32
from networks import exact_step, language_model, of_logits, one_of_each, words
from one_process import assert_close
from processes import run, run_each
from sending import Sending
from stack_results import assert_equal
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from mhc_ops.distributed import fully_shard


def model(streams=fp32, **own):
    return language_model(streams, **one_of_each(**own))


def line():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def own(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def backward(network):
    """The output of this rank's tokens; gradients of the sum over all ranks: torch takes the mean."""
    out = network(own(words()))
    out.backward(own(of_logits()).to(out.dtype) * dist.get_world_size())
    return out.detach()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients_of(network):
    return {name: whole(parameter.grad) for name, parameter in network.named_parameters()}


def trained(own):
    """Output and gradients; and those where two pairs hold the model twice, or torch shards each connection."""
    network = fully_shard(model(**own), mesh=line())
    out, gradients = backward(network), gradients_of(network)
    if dist.get_world_size() == 4:
        network = fully_shard(model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    else:
        network = model(**own)
        for part in (*network.stack, network):
            torch_fully_shard(part, mesh=line())
    backward(network)
    return out, gradients, gradients_of(network)


ON_KERNELS = pytest.param(2, {"backend": "triton", "recompute": 2}, marks=pytest.mark.interpreted, id="2-interpreted")


@pytest.mark.parametrize(("world", "own"), [(2, {"recompute": 2}), (4, {}), ON_KERNELS])
def test_processes_are_one(world, own):
    out, gradients = exact_step(model(torch.float64))
    outs, *found = zip(*run(world, trained, own))
    assert_close({"out": torch.cat(outs)}, {"out": out})
    for each in (*found[0], *found[1]):
        assert_close(each, gradients)


def kept(folder, save, sharded=True):
    """Saves the state after one step, or loads it after two; returns its tensors, whole."""
    network = fully_shard(model(), mesh=line()) if sharded else model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    backward(network)
    for _ in range(1 if save else 2):
        optimizer.step()
    state = dict(zip(("model", "optimizer"), get_state_dict(network, optimizer)))
    (dcp.save if save else dcp.load)(state, checkpoint_id=folder)
    set_state_dict(network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return [whole(each) for each in tree_leaves(get_state_dict(network, optimizer)) if isinstance(each, torch.Tensor)]


def test_any_number_of_processes_loads_a_checkpoint(tmp_path):
    folder = str(tmp_path)
    expected, *_ = run(4, kept, folder, True)
    assert len(expected) == 4 * len([*model().parameters()])  # with two moments and a count of steps
    for world, sharded in ((2, True), (1, True), (1, False)):
        for found in run(world, kept, folder, False, sharded):
            assert_equal(found, expected)


def cast(network):
    """What the policy comes to, in one process, and the names of the maps."""
    modules = {name: module for name, module in network.named_modules() if hasattr(module, "phi")}
    maps = {f"{name}.{own}" for name, module in modules.items() for own, _ in module.named_parameters(recurse=False)}
    for name, parameter in network.named_parameters():
        if name not in maps:
            parameter.data = parameter.data.bfloat16()
    for name in ("stack.0.layer", "stack.2.layer", "alone.layer"):
        network.get_submodule(name).register_forward_pre_hook(lambda module, inputs: (inputs[0].bfloat16(),))
    return network, maps


def maps_are_not_cast(streams):
    """x keeps its type and the maps theirs, where layers and all else are bf16. Gradients of maps are reduced in fp32,
    those of layers in bf16, as the policy says."""
    network = fully_shard(model(streams), mesh=line(), mp_policy=MixedPrecisionPolicy(param_dtype=bf16))
    by_hand, maps = cast(model(streams))
    assert torch.equal(backward(network), by_hand(own(words())))
    gradients = gradients_of(network)
    rounded = {name for name, gradient in gradients.items() if torch.equal(gradient, gradient.to(bf16).to(fp32))}
    assert rounded == set(gradients) - maps, rounded


def maps_of_a_stack_are_one_group():
    """Beside three layers, a connection, the head and the rest. The backward may still hold the head's maps."""
    network = fully_shard(model(), mesh=line())
    with Sending() as forward:
        out = network(own(words()))
    with Sending() as backward:
        out.sum().backward()
    assert [sent.how for sent in forward.sent] == ["all-gather"] * 7, forward.sent
    back = [sent.how for sent in backward.sent]
    assert back.count("reduce-scatter") == 7 and len(back) <= 7 + 6, back
    # Maps are sharded without padding: phi and gamma have 15 and 3 rows.
    placements = {name: parameter.placements for name, parameter in network.stack[0].named_parameters()}
    assert placements["phi"] == placements["gamma"] == (Shard(1),), placements
    assert placements["bias"] == placements["layer.up.weight"] == (Shard(0),), placements


def wrong_uses_are_told():
    whole, part, uneven = fully_shard(model(), mesh=line()), model(), model()
    torch_fully_shard(part.alone, mesh=line())
    uneven.stack[1].cast_maps = True
    uneven.stack[1].bfloat16()
    for network, message in [
        (whole, "the model is sharded already; shard a model once, before use"),
        (part, "alone is sharded already; shard a model once, before use"),
        (uneven, "the maps of stack are bfloat16 and float32; give them one type"),
        (whole.out.weight, "model must be a Module, got DTensor"),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"^fully_shard: {message}$"):
            fully_shard(network, mesh=line())
    with pytest.raises(TypeError, match=r"^fully_shard: mesh must be a DeviceMesh, got int$"):
        fully_shard(model(), mesh=2)
    assert not any(isinstance(parameter, DTensor) for parameter in uneven.parameters())


def test_types_groups_and_wrong_uses():
    types = [] if older_torch.OLDER else [partial(maps_are_not_cast, streams) for streams in (bf16, fp32)]
    run_each(2, maps_of_a_stack_are_one_group, wrong_uses_are_told, *types)  # older_torch.py says what fails
