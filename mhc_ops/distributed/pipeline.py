"""`PipelineStage`: of a carry between stages, x travels ahead of the rest.

A carry has D values per token more than x_next, but x is known before the layer runs. `PipelineStage` sends x while the
layer runs, and afterwards only h_out and the maps: D values and a few. In the backward the layer waits for the gradient
of h_out only; the gradient of x arrives while the layer's backward runs.
"""

from collections.abc import MutableMapping
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from ..mhc.metrics import unseen
from .stages import HyperStage, Send


class PipelineStage(pipelining.PipelineStage):
    """torch's PipelineStage, for its schedules, that sends x of a carry while the layer before the boundary runs.

    submodule: one `HyperStage` with send="carry", or a module that holds one and passes its tensors on, x first.
    Other arguments are those of torch. The gradient of x arrives while that layer's backward runs. torch's own
    PipelineStage sends the same tensors after the layer.

    x has process groups of its own, one for each boundary and one for each boundary's gradients, so that nothing else
    waits for it in any schedule. They are made with the first stage that a process makes for a group, by all processes
    of the group together.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        **others: Any,
    ):
        stages = [module for module in submodule.modules() if isinstance(module, HyperStage)]
        if [stage.send for stage in stages] != [Send.CARRY]:
            raise ValueError(f"PipelineStage: stage {stage_index} must hold one HyperStage, with send='carry'")
        super().__init__(submodule, stage_index, num_stages, device, group=group, **others)
        self.hyper_stage = stages[0]
        self.lanes = _lanes(group, num_stages)
        self.lanes.add(stage_index, self.hyper_stage.span)
        self.outlets: dict[int, _Outlet] = {}  # by microbatch, until its backward
        self.arriving: dict[int, dist.Work] = {}  # x of the stage before
        # False if everything that made x is frozen, in this stage or in earlier ones.
        self.x_gets_gradient = self.x_sends_gradient = True

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        """torch makes its own communicators here, before the first step."""
        self.lanes.check(self.group, self.stage_index_to_group_rank, self.group_rank)
        self.lanes.open(self.stage_index_to_group_rank, self.group_rank, self.device)
        return super()._warmup_forward_vote(*args, **kwargs)

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        """In the first step torch runs the stage on memory of any content, to find the shapes of its outputs."""
        with unseen():
            return super()._forward_metadata_inference(*args, **kwargs)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.lanes.running.add(self.stage_index)
        if fwd_chunk_id in self.arriving:
            self.arriving.pop(fwd_chunk_id).wait()
        self.outlets[fwd_chunk_id] = self.hyper_stage.outlet = _Outlet(self)
        try:
            result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            self.hyper_stage.outlet = None
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        self.x_gets_gradient = not self.is_last and outputs[0].requires_grad
        self.x_sends_gradient = not self.is_first and inputs[0].requires_grad
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        if ops:
            self.arriving[fwd_chunk_id] = self.receive_x(ops[0].tensor, self.stage_index - 1)
        return ops[1:]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return super().get_fwd_send_ops(fwd_chunk_id)[1:]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        if not ops or not self.x_gets_gradient:
            return ops
        self.outlets[bwd_chunk_id].gradient = ops[0].tensor
        return ops[1:]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if not ops or not self.x_sends_gradient:
            return ops
        self.send_x(ops[0].tensor, self.stage_index - 1)
        return ops[1:]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        outlet = self.outlets.pop(bwd_chunk_id)
        outlet.expect_gradient()
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        outlet.close()
        return result

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """A schedule calls this after the last backward of a stage."""
        super().perform_reduce_grad(grad_scale_factor)
        self.lanes.ended(self.stage_index)

    def clear_runtime_states(self) -> None:
        """A schedule calls this before each step; the last step may have had no backward."""
        super().clear_runtime_states()
        self.lanes.ended(self.stage_index)
        self.outlets.clear()

    def on_this_rank(self, stage: int) -> bool:
        return self.stage_index_to_group_rank[stage] == self.group_rank

    def send_x(self, tensor: Tensor, stage: int) -> Any:
        """Begin to send x or its gradient to that stage."""
        group, peer = self.lanes.groups[self.stage_index, stage], self.stage_index_to_group_rank[stage]
        work = dist.isend(tensor, group=group, group_dst=peer)
        sending = self.lanes.sending
        sending[:] = [*(earlier for earlier in sending if not earlier.is_completed()), work]  # frees their memory
        return work

    def receive_x(self, tensor: Tensor, stage: int) -> Any:
        """Begin to receive x or its gradient from that stage."""
        group, peer = self.lanes.groups[stage, self.stage_index], self.stage_index_to_group_rank[stage]
        return dist.irecv(tensor, group=group, group_src=peer)


class _Lanes:
    """The process groups of x, by (from stage, to stage), and the sends of this process that are not yet received.

    Sends must outlive their stage, so they are awaited here, when all stages that ran have ended. Waiting earlier could
    block: the receiver may wait for another stage of this process.

    Each direction has a group of its own. In one group NCCL would send and receive in the order of the calls, which
    differs between the two processes: x of the next microbatch leaves before this one's gradient is expected.
    """

    def __init__(self, group: dist.ProcessGroup, num_stages: int):
        ranks = dist.get_process_group_ranks(group)
        _check_groups(group, num_stages)
        ends = [lane for one, other in pairwise(range(num_stages)) for lane in ((one, other), (other, one))]
        self.groups = {lane: dist.new_group(ranks, use_local_synchronization=True) for lane in ends}
        self.sending: list[Any] = []
        self.running: set[int] = set()
        self.opened: dict[int, int] = {}
        self.spans: dict[
            int, tuple[int, int, int]
        ] = {}  # stages of this process: start, stop, connections of the stack
        self.checked = True

    def add(self, stage: int, span: tuple[int, int, int]) -> None:
        self.spans[stage], self.checked = span, False

    def check(self, group: dist.ProcessGroup | None, ranks: dict[int, int], here: int) -> None:
        """Check, if stages are new, that the stages of all processes form the stack. ranks: by stage, in the group"""
        if not self.checked:
            own = {
                stage: span for stage, span in self.spans.items() if ranks[stage] == here
            }  # not those of earlier pipelines
            _check_spans(group, own)
            self.checked = True

    def open(self, ranks: dict[int, int], here: int, device: torch.device) -> None:
        """Both ends of every lane make their communicator, in one order; within a step NCCL could wait forever.
        ranks: by stage, in the group"""
        if self.opened == ranks:
            return
        for (start, stop), group in self.groups.items():
            if ranks[start] != ranks[stop]:
                nothing = torch.zeros(1, device=device)
                if here == ranks[start]:
                    dist.send(nothing, group=group, group_dst=ranks[stop])
                if here == ranks[stop]:
                    dist.recv(nothing, group=group, group_src=ranks[start])
        self.opened = dict(ranks)

    def ended(self, stage: int) -> None:
        self.running.discard(stage)
        while self.sending and not self.running:
            self.sending.pop().wait()


def _check_groups(group: dist.ProcessGroup, num_stages: int) -> None:
    """torch names a group by how many groups its process has made: if the counts differ, processes wait forever."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (len(dist.distributed_c10d._world.pg_names), num_stages), group=group)
    counts, stages = map(list, zip(*found))
    if len(set(stages)) > 1:
        raise ValueError(f"PipelineStage: num_stages must be the same on all processes of the group, got {stages}")
    if len(set(counts)) > 1:
        raise ValueError(
            f"PipelineStage: the processes of the group have made different numbers of groups, {counts}: "
            "make the stages first"
        )


def _check_spans(group: dist.ProcessGroup | None, spans: dict[int, tuple[int, int, int]]) -> None:
    """Tensors between stages have the same shapes for any cut, so a wrong cut would go unnoticed."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, spans, group=group)
    stages = sorted((stage, *span) for spans in found for stage, span in spans.items())
    ends = [0, *(stop for _, _, stop, _ in stages)]
    if [start for _, start, _, _ in stages] != ends[:-1] or {of for *_, of in stages} != {ends[-1]}:
        told = ", ".join(f"{start} to {stop} of {of} in stage {stage}" for stage, start, stop, of in stages)
        raise ValueError(f"PipelineStage: the stages must have each connection once, got {told}")


_LANES: MutableMapping[dist.ProcessGroup, dict[int, _Lanes]] = WeakKeyDictionary()


def _lanes(group: dist.ProcessGroup | None, num_stages: int) -> _Lanes:
    """One _Lanes for all stages that this process has in a group."""
    group = group or dist.group.WORLD
    assert group is not None, "torch's PipelineStage has asked for its rank"
    found = _LANES.setdefault(group, {})
    if num_stages not in found:
        found[num_stages] = _Lanes(group, num_stages)
    return found[num_stages]


class _Outlet:
    """How x of one microbatch leaves a stage, and its gradient comes back."""

    def __init__(self, stage: PipelineStage):
        self.stage = stage
        self.leaving: Any = None
        self.gradient: Tensor | None = None  # its buffer; None if the next stage is in this process
        self.arriving: Any = None

    def send(self, x: Tensor) -> None:
        target = self.stage.stage_index + 1
        if not self.stage.on_this_rank(target):
            self.leaving = self.stage.send_x(x, target)

    def expect_gradient(self) -> None:
        """Called after the layer's other gradients are there: a tensor is sent when its receiver is ready."""
        if self.gradient is not None:
            self.arriving = self.stage.receive_x(self.gradient, self.stage.stage_index + 1)

    def await_gradient(self) -> None:
        if self.arriving is not None:
            self.arriving.wait()

    def close(self) -> None:
        """The gradient has come, so x was received: free its memory before the end of the step."""
        if self.leaving is not None:
            if self.leaving in self.stage.lanes.sending:
                self.stage.lanes.sending.remove(self.leaving)
            self.leaving.wait()
