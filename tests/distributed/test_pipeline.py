"""Stages of a pipeline against the whole stack, in one process and in two."""

from functools import partial
from types import SimpleNamespace

import older_torch
import pytest
import torch
import torch.distributed as dist
from mhc_kernels import bf16, fp32
from networks import BATCH, LENGTH, D, N, exact_step, language_model, of_logits, unlike_connections, words
from one_process import assert_close as assert_close_by_name
from processes import run, run_each
from sending import Sending
from stack_results import PLACES, assert_close, assert_equal, gradients
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import mhc_ops
from mhc_ops import HyperConnection, HyperHead, HyperStack
from mhc_ops.distributed import HyperStage, PipelineStage, boundary_bytes, fully_shard, pipeline_stages

# A schedule; where it cuts four connections; the stages of a process: one each, two each in turn, or there and back
SCHEDULES = {
    "1F1B": (pipelining.Schedule1F1B, (2,), lambda rank: [rank]),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, (1, 2, 3), lambda rank: [rank, rank + 2]),
    "V": (pipelining.ScheduleZBVZeroBubble, (1, 2, 3), lambda rank: [rank, 3 - rank]),
}
FORMS = pytest.mark.parametrize("shifted", [False, True], ids=["standard", "shifted"])


def stack_of(backend="reference", streams=fp32, **settings):
    return HyperStack(*unlike_connections(backend, partial(nn.Linear, D, D, dtype=streams)), **settings)


def model(shifted, streams=fp32):
    """Shifted it has no head."""
    parts = {} if shifted else {"head": HyperHead(N, D)}
    return language_model(streams, stack=stack_of(shifted=shifted), **parts)


@pytest.mark.parametrize("streams", [bf16, fp32], ids=str)
@FORMS
@pytest.mark.parametrize("send", ["x_next", "carry"])
def test_stages_are_the_stack(send, shifted, streams):
    """Values bit for bit in every cut; gradients too where x_next is sent. The first stage expands."""
    for cuts in ((1,), (2,), (3,), (1, 2, 3)):
        check_stages(("reference", "cpu"), cuts, send, shifted, streams)
    h = torch.randn(2, D)
    assert torch.equal(pipeline_stages(stack_of(), [1])[0].expand(h), mhc_ops.mhc_expand(h, N))


@pytest.mark.parametrize(("send", "shifted"), [("x_next", False), ("carry", True)])
@pytest.mark.parametrize("place", PLACES[1:])
def test_stages_in_kernels(place, send, shifted):
    check_stages(place, (2,), send, shifted, fp32)


def check_stages(place, cuts, send, shifted, streams):
    backend, device = place
    x = torch.randn(3, N, D, generator=torch.Generator().manual_seed(2)).to(device, streams).requires_grad_()
    stack = stack_of(backend, streams, shifted=shifted, recompute=2).to(device)
    expected = gradients(stack(x), leaves := [x, *stack.parameters()])
    found = gradients(nn.Sequential(*pipeline_stages(stack, cuts, send=send))(x), leaves)
    assert_equal(found[:1], expected[:1])
    if send == "x_next":
        assert_equal(found, expected)
    elif streams == fp32:
        assert_close(found, expected)


def pipeline(shifted, send, kind, name="1F1B", *, cuts=None, group=None, share=0, shard=lambda part: part):
    """This process's parts of a model by number, and a step of a schedule. share: the half of the batch, of a group"""
    kind_of_schedule, own_cuts, numbers = SCHEDULES[name]
    every = pipeline_stages(model(shifted), cuts or own_cuts, send=send)
    parts = {number: shard(every[number]) for number in numbers(dist.get_rank(group))}
    stages = [kind(part, number, len(every), torch.device("cpu"), group=group) for number, part in parts.items()]
    options = {"loss_fn": lambda out, cotangent: (out * cotangent).sum(), "scale_grads": False}
    pieces, halves = (2, 2) if group else (4, 1)
    schedule = kind_of_schedule(stages[0] if len(stages) == 1 else stages, pieces, **options)
    inputs = [words().chunk(halves)[share]] if 0 in parts else []
    cotangent = halves * of_logits().chunk(halves)[share]  # torch takes the mean over the copies
    targets = {"target": cotangent} if len(every) - 1 in parts else {}
    return parts, lambda run="step": getattr(schedule, run)(*inputs, **targets)


def gradients_of(parts):
    return {name: parameter.grad.clone() for part in parts.values() for name, parameter in part.named_parameters()}


def trained(shifted, send, kind, name):
    """Gradients by name and the output; the bytes that another step sends, and those for which a layer waits: all but
    the streams. Then without gradients, and with them; torch runs a V with gradients alone."""
    parts, step = pipeline(shifted, send, kind, name)
    out = step()
    found = gradients_of(parts)
    with Sending() as sending:
        outs = [step()]
    outs += [step(run) for run in (("step",) if name == "V" else ("eval", "step"))]
    assert out is None or all(torch.equal(out, again) for again in outs)
    late = sum(sent.bytes for sent in sending.sent if not any(shape[-2:] == (N, D) for shape in sent.shapes))
    return found, out, sending.bytes.total(), late


SENDERS = [("x_next", pipelining.PipelineStage), ("carry", pipelining.PipelineStage), ("carry", PipelineStage)]
WAYS = [(send, kind, name) for send, kind in SENDERS for name in SCHEDULES]


def trained_in_all_ways(shifted):
    return [trained(shifted, *way) for way in WAYS]


@FORMS
@older_torch.SHAPES_TO_ITSELF
def test_two_processes_are_one(shifted):
    """Every way of sending gives the same bits forward, and sends the bytes that `boundary_bytes` says; in a V, whose
    middle boundary lies within a process, not there."""
    out, truths = exact_step(model(shifted, torch.float64))
    ranks, outs = run(2, trained_in_all_ways, shifted), []
    for (send, _, name), (first, *on_first), (second, *on_second) in zip(WAYS, *ranks, strict=True):
        assert_close_by_name(first | second, truths)
        outs += [one for one in (on_first[0], on_second[0]) if one is not None]
        crossed = [cut for cut in SCHEDULES[name][1] if (name, cut) != ("V", 2)]
        for place, critical in ((1, False), (2, True)) if send == "carry" else ((1, False),):
            given = {"send": send, "shifted": shifted, "critical": critical}
            per_token = sum(boundary_bytes(N, D, 4, identity=cut == 3, **given) for cut in crossed)
            assert on_first[place] == on_second[place] == BATCH * LENGTH * per_token
    assert_close(outs[:1], [out])
    assert_equal(outs, outs[:1] * len(WAYS))


def on_four():
    """Gradients of four stages. Then two pipelines of two stages; each stage is sharded over its two copies: gradients
    in fp32; and with layers in bf16, the types of a stage's inputs."""
    parts, step = pipeline(False, "carry", PipelineStage, cuts=(1, 2, 3))
    step()
    piped = gradients_of(parts)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    own = {"group": mesh["pipeline"].get_group(), "share": mesh.get_local_rank("data")}
    shard = partial(fully_shard, mesh=mesh["data"])
    parts, step = pipeline(False, "carry", PipelineStage, **own, shard=shard)
    step()
    sharded = {name: gradient.full_tensor() for name, gradient in gradients_of(parts).items()}
    policy, types = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32), []
    parts, step = pipeline(False, "carry", PipelineStage, **own, shard=partial(shard, mp_policy=policy))
    for part in parts.values():
        stage = next(module for module in part.modules() if isinstance(module, HyperStage))
        stage.register_forward_pre_hook(lambda _, inputs: types.append([tensor.dtype for tensor in inputs]))
    step()
    return piped, sharded, types[-1]


def test_four_processes_are_one():
    _, truths = exact_step(model(False, torch.float64))
    piped, sharded, types = zip(*run(4, on_four))
    for stages in (piped, sharded[:2], sharded[2:]):
        assert_close_by_name({name: gradient for rank in stages for name, gradient in rank.items()}, truths)
    assert types[1][2:] == types[3][2:] == [fp32, fp32], "maps are not cast"


SEEN = []  # in this process


class Noting(PipelineStage):
    def send_x(self, tensor, stage):
        SEEN.append("x")
        return super().send_x(tensor, stage)

    def receive_x(self, tensor, stage):
        work = super().receive_x(tensor, stage)
        return SimpleNamespace(wait=lambda: (SEEN.append("dx"), work.wait()))


def note_the_layer(layer, inputs):
    SEEN.append("layer")
    if inputs[0].requires_grad:
        inputs[0].register_hook(lambda _: SEEN.append("its backward"))


def x_leaves_while_the_layer_runs():
    """It is sent before the layer runs, and its gradient is awaited when the layer has run backward."""
    parts, step = pipeline(False, "carry", Noting)
    if 0 in parts:
        parts[0].stack[1].layer.register_forward_pre_hook(note_the_layer)
    step()
    SEEN.clear()  # torch has looked for shapes
    step()
    forward, backward = ["x", "layer"], ["layer", "its backward", "dx"]  # the layer is a checkpoint
    expected = [*forward, *(forward + backward) * 3, *backward]
    assert 1 in parts or expected == SEEN, SEEN


def x_without_a_gradient():
    """The first stage trains its last layer alone, so that nothing in it needs x's gradient."""
    if older_torch.OLDER:
        return  # it sends the gradient of x even if everything that made x is frozen
    late, early = (frozen(kind) for kind in (pipelining.PipelineStage, PipelineStage))
    assert [gradient is None for gradient in early] == [gradient is None for gradient in late]
    assert_equal(*([gradient for gradient in found if gradient is not None] for found in (early, late)))


def frozen(kind):
    parts, step = pipeline(False, "carry", kind)
    if 0 in parts:
        parts[0].requires_grad_(False)
        parts[0].stack[1].layer.requires_grad_()
    step()
    return [parameter.grad for part in parts.values() for parameter in part.parameters()]


def test_x_travels_alone():
    run_each(2, x_leaves_while_the_layer_runs, x_without_a_gradient)


WRONG = [
    (lambda stack: HyperStage(stack, 0, 5), "HyperStage: cut 5 is outside of the stack, which has 4 connections"),
    (lambda stack: HyperStage(stack, -1, 2), "HyperStage: cut -1 is outside of the stack, which has 4 connections"),
    (lambda stack: pipeline_stages(stack, [2.0]), "pipeline_stages: a cut must be an int, got float"),
    (lambda stack: HyperStage(nn.Sequential(), 0, 1), "HyperStage: stack must be a HyperStack, got Sequential"),
    (lambda stack: boundary_bytes(4, 64, 2, send="x"), "boundary_bytes: send must be 'x_next' or 'carry', got 'x'"),
    (lambda stack: pipeline_stages(stack, [2, 2]), "pipeline_stages: a stage from connection 2 to 2 is empty"),
    (lambda stack: pipeline_stages(nn.Linear(2, 2), [1]), "pipeline_stages: model must be a HyperStack or an "
     "nn.Sequential with one in it, got Linear with 0"),
    (lambda stack: HyperStage(stack, 0, 1, send="x"), "HyperStage: send must be 'x_next' or 'carry', got 'x'"),
    (lambda stack: HyperStage(stack, 2, 4).expand(torch.ones(2, D)),
     "HyperStage: only the first stage expands; this one begins with connection 2"),
    (lambda stack: HyperStage(stack, 1, 4, send="carry")(torch.ones(2, N, D)),
     "HyperStage: the input must be (x, h_out, h_post, h_res) of the stage before, got (Tensor)"),
    (lambda stack: HyperStage(HyperStack(HyperConnection(lambda h: (h, 1), N, D)), 0, 1)(torch.ones(2, N, D)),
     "HyperStage: the layer of connection 0 must return h_out alone in a pipeline"),
    (lambda stack: PipelineStage(HyperStage(stack, 0, 4), 0, 1, torch.device("cpu")),
     "PipelineStage: stage 0 must hold one HyperStage, with send='carry'"),
]  # fmt: skip


@pytest.mark.parametrize(("use", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_use_is_told(use, message):
    with pytest.raises((TypeError, ValueError)) as told:
        use(stack_of())
    assert str(told.value) == message
