"""Stages of a pipeline against the whole stack, in one process and in two."""

import threading
from collections import OrderedDict

import older_torch
import pytest
import torch
import torch.distributed as dist
from mhc_kernels import bf16, fp32
from processes import run, run_each
from sending import Sending
from stack_results import PLACES, assert_close, assert_equal, exact, gradients, random_cotangents
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import mhc_ops
from mhc_ops import HyperConnection, HyperHead, HyperStack
from mhc_ops.distributed import HyperStage, PipelineStage, boundary_bytes, fully_shard, pipeline_stages

N, D, DEPTH, WORDS, BATCH, LENGTH, PIECES = 3, 8, 4, 11, 8, 5, 4
WAYS = ("x_next", "carry")
SCHEDULES = {
    "1F1B": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "V": pipelining.ScheduleZBVZeroBubble,
}
CUTS = {schedule: (2,) if schedule is pipelining.Schedule1F1B else (1, 2, 3) for schedule in SCHEDULES.values()}
FORMS = pytest.mark.parametrize("shifted", [False, True], ids=["standard", "shifted"])


class Expand(nn.Module):
    def forward(self, h):
        return mhc_ops.mhc_expand(h, N)


def stack_of(backend="reference", streams=fp32, **settings):
    """Away from the fresh state, so that every gradient is alive, and no two connections alike: the second mixes
    transposed, the third not at all. Two iterations of Sinkhorn: the interpreter takes its time."""
    torch.manual_seed(0)
    few = {"sinkhorn_iters": 2, "backend": backend}
    made = [
        HyperConnection(nn.Linear(D, D, dtype=streams), N, D, gamma=True, layer_norm=True, **few),
        HyperConnection(nn.Linear(D, D, dtype=streams), N, D, transposed=True, checkpoint=True, **few),
        HyperConnection(nn.Linear(D, D, dtype=streams), N, D, residual="identity", backend=backend),
        HyperConnection(nn.Linear(D, D, dtype=streams), N, D, **few),
    ]
    for connection in made:
        nn.init.normal_(connection.phi, std=connection.phi.shape[1] ** -0.5)
        nn.init.ones_(connection.alpha)
    return HyperStack(*made, **settings)


def model(shifted):
    """Shifted it has no head."""
    torch.manual_seed(1)
    parts = {"embedding": nn.Embedding(WORDS, D), "expand": Expand(), "stack": stack_of(shifted=shifted)}
    parts |= {} if shifted else {"head": HyperHead(N, D)}
    return nn.Sequential(OrderedDict(parts | {"out": nn.Linear(D, WORDS)}))


def through(stages, x):
    for stage in stages:
        x = stage(x)
    return x


@pytest.mark.parametrize("streams", [bf16, fp32], ids=str)
@FORMS
@pytest.mark.parametrize("send", WAYS)
def test_stages_are_the_stack(send, shifted, streams):
    """Values bit for bit in every cut; gradients too where x_next is sent."""
    for cuts in ((1,), (2,), (3,), (1, 2, 3)):
        check_stages(("reference", "cpu"), cuts, send, shifted, streams)


@pytest.mark.parametrize(("send", "shifted"), [("x_next", False), ("carry", True)])
@pytest.mark.parametrize("place", PLACES[1:])
def test_stages_in_kernels(place, send, shifted):
    check_stages(place, (2,), send, shifted, fp32)


def check_stages(place, cuts, send, shifted, streams):
    backend, device = place
    x = torch.randn(3, N, D, generator=torch.Generator().manual_seed(2)).to(device, streams).requires_grad_()
    stack = stack_of(backend, streams, shifted=shifted, recompute=2).to(device)
    expected = gradients(stack(x), leaves := [x, *stack.parameters()])
    found = gradients(through(pipeline_stages(stack, cuts, send=send), x), leaves)
    assert_equal(found[:1], expected[:1])
    if send == "x_next":
        assert_equal(found, expected)
    elif streams == fp32:
        assert_close(found, expected)


@FORMS
def test_keys_are_those_of_the_model(shifted):
    whole = model(shifted)
    parts = pipeline_stages(whole, [1, 3])
    assert [key for part in parts for key in part.state_dict()] == list(whole.state_dict())
    for part in parts:
        part.load_state_dict({key: whole.state_dict()[key] for key in part.state_dict()})
    ends = ["stack", *([] if shifted else ["head"]), "out"]
    expected = ["embedding", "expand", "stack"], ["stack"], ends
    assert [[name for name, _ in part.named_children()] for part in parts] == list(expected)
    h = torch.randn(2, D)
    assert torch.equal(parts[0].stack.expand(h), mhc_ops.mhc_expand(h, N))


def critical(sending):
    """Bytes that a layer waits for: all but the streams."""
    return sum(sent.bytes for sent in sending.sent if not any(shape[-2:] == (N, D) for shape in sent.shapes))


def words():
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def cotangent():
    return random_cotangents([torch.empty(BATCH, LENGTH, WORDS)])[0]


def loss(out, cotangent):
    return (out * cotangent).sum()


def numbers(schedule, rank, world):
    """The stages of a process: one each, two each in turn, or two each there and back."""
    if schedule is pipelining.Schedule1F1B:
        return [rank]
    return [rank, rank + world] if schedule is pipelining.ScheduleInterleaved1F1B else [rank, 2 * world - 1 - rank]


def pipeline(shifted, send, kind, schedule, group=None, shard=lambda part: part, pieces=PIECES, cuts=None):
    """This process's parts of a model by number, and a step of a schedule."""
    every = pipeline_stages(model(shifted), cuts or CUTS[schedule], send=send)
    own = numbers(schedule, dist.get_rank(group), dist.get_world_size(group))
    parts = {number: shard(every[number]) for number in own}
    stages = [kind(part, number, len(every), torch.device("cpu"), group=group) for number, part in parts.items()]
    options = {"n_microbatches": pieces, "loss_fn": loss, "scale_grads": False}
    schedule = schedule(stages[0] if len(stages) == 1 else stages, **options)

    def step(words, cotangent, run="step"):
        inputs = [words] if 0 in parts else []
        targets = {"target": cotangent} if len(every) - 1 in parts else {}
        return getattr(schedule, run)(*inputs, **targets)

    return parts, step


def gradients_of(parts):
    return {name: parameter.grad.clone() for part in parts.values() for name, parameter in part.named_parameters()}


def trained(*arguments):
    """Gradients by name and the output; the bytes that another step sends. Then without gradients, and with them; torch
    runs a V with gradients alone."""
    parts, step = pipeline(*arguments)
    more = ("step",) if pipelining.ScheduleZBVZeroBubble in arguments else ("eval", "step")
    out = step(words(), cotangent())
    found = gradients_of(parts)
    with Sending() as sending:
        outs = [step(words(), cotangent())]
    outs += [step(words(), cotangent(), run) for run in more]
    assert out is None or all(torch.equal(out, again) for again in outs)
    return found, out, sending.bytes.total(), critical(sending)


def trained_in_all_ways(shifted):
    ways = [("x_next", pipelining.PipelineStage), ("carry", pipelining.PipelineStage), ("carry", PipelineStage)]
    return {
        (send, kind is PipelineStage, name): trained(shifted, send, kind, schedule)
        for send, kind in ways
        for name, schedule in SCHEDULES.items()
    }


def one_process(shifted):
    """The output and the gradients by name, in fp64."""
    wide = model(shifted).double()
    out, *truths = exact(wide(words()), list(wide.parameters()))
    return out, dict(zip(dict(wide.named_parameters()), truths))


@FORMS
@older_torch.SHAPES_TO_ITSELF
def test_two_processes_are_one(shifted):
    """Every way of sending gives the same bits forward, and sends the bytes that `boundary_bytes` says; in a V, whose
    middle boundary lies within a process, not there."""
    out, truths = one_process(shifted)
    ranks = run(2, trained_in_all_ways, shifted)
    bits = ranks[1]["x_next", False, "1F1B"][1]
    for send, early, name in ranks[0]:
        (first, *outs), (second, *others) = (rank[send, early, name] for rank in ranks)
        assert_close([(first | second)[parameter] for parameter in truths], list(truths.values()))
        (found,) = (one for one in (outs[0], others[0]) if one is not None)
        assert_close([found], [out])
        assert torch.equal(found, bits)
        crossed = [cut for cut in CUTS[SCHEDULES[name]] if (name, cut) != ("V", 2)]
        per_token = [boundary_bytes(N, D, 4, send=send, shifted=shifted, identity=cut == 3) for cut in crossed]
        assert outs[1] == others[1] == BATCH * LENGTH * sum(per_token)
        if send == "carry":
            kinds = {"send": send, "shifted": shifted, "critical": True}
            per_token = [boundary_bytes(N, D, 4, identity=cut == 3, **kinds) for cut in crossed]
            assert outs[2] == others[2] == BATCH * LENGTH * sum(per_token)


def four_stages():
    """Gradients by name."""
    parts, step = pipeline(False, "carry", PipelineStage, pipelining.Schedule1F1B, cuts=(1, 2, 3))
    step(words(), cotangent())
    return gradients_of(parts)


def sharded_and_piped():
    """Two pipelines of two stages; each stage is sharded over its two copies. Gradients in fp32; then, with layers in
    bf16, the types of a stage's inputs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    group, data = mesh["pipeline"].get_group(), mesh["data"]
    carried = (False, "carry", PipelineStage, pipelining.Schedule1F1B, group)
    share = data.get_local_rank()
    given = words().chunk(2)[share], 2 * cotangent().chunk(2)[share]  # torch takes the mean over the copies
    parts, step = pipeline(*carried, lambda part: fully_shard(part, mesh=data), 2)
    step(*given)
    found = {name: gradient.full_tensor() for name, gradient in gradients_of(parts).items()}
    policy, types = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32), []
    parts, step = pipeline(*carried, lambda part: fully_shard(part, mesh=data, mp_policy=policy), 2)
    for part in parts.values():
        stage = next(module for module in part.modules() if isinstance(module, HyperStage))
        stage.register_forward_pre_hook(lambda _, inputs: types.append([tensor.dtype for tensor in inputs]))
    step(*given)
    return found, types[-1]


def on_four():
    return four_stages(), *sharded_and_piped()


def test_four_processes_are_one():
    _, truths = one_process(False)
    piped, sharded, types = zip(*run(4, on_four))
    for stages in (piped, sharded[:2], sharded[2:]):
        by_name = {name: gradient for rank in stages for name, gradient in rank.items()}
        assert_close([by_name[name] for name in truths], list(truths.values()))
    assert types[1][2:] == types[3][2:] == [fp32, fp32], "maps are not cast"


class Later(threading.Thread):
    """Something that is done meanwhile."""

    def __init__(self, function):
        super().__init__(target=function)
        self.start()

    def wait(self):
        self.join()


class Handshake(PipelineStage):
    """The stage before is told when x has come; x's gradient waits until that stage's layer has run backward."""

    on = False

    def receive_x(self, tensor, stage):
        work = super().receive_x(tensor, stage)
        if not self.on or stage > self.stage_index:
            return work
        work.wait()
        return Later(lambda: dist.send(torch.zeros(1), 0, tag=1000))

    def send_x(self, tensor, stage):
        begin = super().send_x
        if not self.on or stage > self.stage_index:
            return begin(tensor, stage)
        return Later(lambda: (dist.recv(torch.zeros(1), 0, tag=1001), begin(tensor, stage)))


class Waits(nn.Module):
    """A layer that ends when the next stage has x, and says when it has run backward."""

    def forward(self, h_in):
        if Handshake.on:
            dist.recv(torch.zeros(1), 1, tag=1000)
        return Says.apply(h_in)


class Says(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.view_as(h)

    @staticmethod
    def backward(ctx, dh):
        if Handshake.on:
            dist.send(torch.zeros(1), 1, tag=1001)
        return dh


def x_leaves_while_the_layer_runs():
    """The layer waits until the next stage has x, and x's gradient waits for that layer's backward: no step could end
    if either were sent or awaited with the rest."""
    parts, step = pipeline(False, "carry", Handshake, pipelining.Schedule1F1B)
    if 0 in parts:
        connection = parts[0].stack[1]
        connection.layer = nn.Sequential(connection.layer, Waits())
    step(words(), cotangent())
    expected = gradients_of(parts)
    for part in parts.values():
        part.zero_grad()
    Handshake.on = True
    step(words(), cotangent())
    Handshake.on = False
    assert_equal(list(gradients_of(parts).values()), list(expected.values()))


def x_without_a_gradient():
    """The first stage trains its last layer alone, so that nothing in it needs x's gradient."""
    if older_torch.OLDER:
        return  # it sends the gradient of x even if everything that made x is frozen
    late, early = (frozen(kind) for kind in (pipelining.PipelineStage, PipelineStage))
    assert [gradient is None for gradient in early] == [gradient is None for gradient in late]
    assert_equal(*([gradient for gradient in found if gradient is not None] for found in (early, late)))


def frozen(kind):
    parts, step = pipeline(False, "carry", kind, pipelining.Schedule1F1B)
    if 0 in parts:
        parts[0].requires_grad_(False)
        parts[0].stack[1].layer.requires_grad_()
    step(words(), cotangent())
    return [parameter.grad for part in parts.values() for parameter in part.parameters()]


def test_x_travels_alone():
    run_each(2, x_leaves_while_the_layer_runs, x_without_a_gradient)


OUTSIDE = "is outside of the stack, which has 4 connections"
WRONG = [
    (lambda stack: pipeline_stages(stack, [5]), f"pipeline_stages: cut 5 {OUTSIDE}"),
    (lambda stack: HyperStage(stack, -1, 2), f"HyperStage: cut -1 {OUTSIDE}"),
    (lambda stack: pipeline_stages(stack, [2, 2]), "pipeline_stages: a stage from connection 2 to 2 is empty"),
    (lambda stack: pipeline_stages(stack, [4]), "pipeline_stages: a stage from connection 4 to 4 is empty"),
    (lambda stack: pipeline_stages(stack, [2.0]), "pipeline_stages: a cut must be an int, got float"),
    (lambda stack: pipeline_stages(nn.Linear(2, 2), [1]), "pipeline_stages: model must be a HyperStack or an "
     "nn.Sequential with one in it, got Linear with 0"),
    (lambda stack: HyperStage(nn.Sequential(), 0, 1), "HyperStage: stack must be a HyperStack, got Sequential"),
    (lambda stack: HyperStage(stack, 0, 1, send="x"), "HyperStage: send must be 'x_next' or 'carry', got 'x'"),
    (lambda stack: boundary_bytes(4, 64, 2, send="x"), "boundary_bytes: send must be 'x_next' or 'carry', got 'x'"),
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
