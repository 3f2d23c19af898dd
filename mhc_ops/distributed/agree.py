"""What the ranks of a group must agree on before they exchange anything: asked in every call, forward and backward.

A rank that takes part with another type, size or step than the others does not fail by itself: where the bytes are as
many, rows are taken for what they are not; where they are not, gloo ends the process and NCCL waits. An answer from an
earlier call says nothing about this one. So each exchange begins with a message of fixed size, which is read before
anything else is sent.

It goes between the hosts, through a gloo group of its own: what is on a GPU is not waited for, NCCL has no part in it,
and nothing that a program sends in its own group can be taken for it. Within torch.compile it is an op of the graph.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.check import FLOATS, name_of

LAYOUTS = ("contiguous", "zigzag")
FUNCTIONS = ("causal_conv1d", "short_conv", "HyperParallel")
STEPS = ("the forward", "the backward", "the backward of final_state")
# What a call is, a number each; those of a word count it.
TYPES = [*(name_of(dtype) for dtype in FLOATS), "no float"]
WORDS = {"step": STEPS, "function": FUNCTIONS, "type": TYPES, "layout": LAYOUTS}
CHOICES = ("activation", "bias", "residual", "seq_idx", "cu_seqlens", "initial_state", "output_final_state")
FIELDS = ("number", "function", "step", "type", "is_cuda", "B", "L", "n", "D", "W", "dilation", "layout", *CHOICES)


class Call(NamedTuple):
    """One call of a function, or the backward of it, as this rank makes it. values: by FIELDS"""

    group: dist.ProcessGroup
    values: tuple[int, ...]

    @property
    def function(self) -> str:
        return FUNCTIONS[self.value("function")]

    def value(self, name: str) -> int:
        return self.values[FIELDS.index(name)]

    def backward(self, step: str = STEPS[1]) -> "Call":
        return self._replace(values=(*self.values[:2], STEPS.index(step), *self.values[3:]))


def call(function: str, group: dist.ProcessGroup, x: Tensor, **fields: int) -> Call:
    """fields: what else the function has of FIELDS"""
    known = {
        "function": FUNCTIONS.index(function),
        "type": FLOATS.index(x.dtype) if x.dtype in FLOATS else len(FLOATS),
        "is_cuda": int(x.is_cuda),
        **fields,
    }
    return Call(group, tuple([known.get(name, 0) for name in FIELDS]))


def sizes(x: Tensor, weight: Tensor) -> dict[str, int]:
    """Of a convolution. x: [B, L, D] or [B, L, n, D]"""
    B, L, *streams, D = x.shape
    return {"B": B, "L": L, "n": streams[0] if streams else 0, "D": D, "W": weight.shape[1]}


def agreed(call: Call, like: Tensor) -> Tensor:
    """No rows of `like` [B, rows, ...], when all ranks have said that they make this call; else a ValueError on each.
    Part of what is sent, they keep a compiler from sending it before."""
    if torch.compiler.is_compiling():
        return _in_graph(like.detach(), list(call.values), call.group.group_name)
    _ask(call)
    return like.detach()[:, :0]


@torch.library.custom_op("mhc_ops_distributed::agreed", mutates_args=())
def _in_graph(like: Tensor, values: Sequence[int], group_name: str) -> Tensor:
    group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    _ask(Call(group, tuple(values)))
    return like.new_empty(like.shape[0], 0, *like.shape[2:])


@_in_graph.register_fake
def _(like: Tensor, values: Sequence[int], group_name: str) -> Tensor:
    return like.new_empty(like.shape[0], 0, *like.shape[2:])


torch.fx.node.has_side_effect(torch.ops.mhc_ops_distributed.agreed.default)  # none may be dropped


_hosts: "WeakKeyDictionary[dist.ProcessGroup, Any]" = WeakKeyDictionary()  # the gloo group of each group
_numbers: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()


def next_number(group: dist.ProcessGroup) -> int:
    """Of a call in its group. A rank that an error kept from a call shows by it, and two backwards whose order differs.
    0, which is that of none, in a graph: it is the same in each run."""
    if torch.compiler.is_compiling():
        return 0
    _numbers[group] = _numbers.get(group, 0) + 1
    return _numbers[group]


def _ask(call: Call) -> None:
    mine = torch.tensor(call.values, dtype=torch.int64).expand(call.group.size(), -1).contiguous()
    everyone = torch.empty_like(mine)
    try:
        if call.group not in _hosts:
            _hosts[call.group] = _between_hosts(call.group, torch.device("cuda" if call.value("is_cuda") else "cpu"))
        _hosts[call.group].alltoall_base(everyone, mine, [], []).wait()  # one message to each, all at once
    except RuntimeError as error:
        step = STEPS[call.value("step")]
        raise RuntimeError(
            f"{call.function}: a rank of the group has ended, or has not come to {step} of this call in time: "
            "all ranks must make the same calls in the same order"
        ) from error
    if not torch.equal(mine, everyone):
        _compare(call, everyone.tolist())


def _between_hosts(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroupGloo:
    """By the store and with the timeout of the group. No group of torch, whose names depend on how many there are."""
    store = dist.PrefixStore("mhc_ops", dist.distributed_c10d._world.pg_map[group][1])
    timeout = group._get_backend(device).options._timeout
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)


def _compare(call: Call, ranks: list[list[int]]) -> None:
    """Raise where two differ. A number is that of no call in a graph."""
    for rank, values in enumerate(ranks):
        pairs = {name: pair for name, *pair in zip(FIELDS, ranks[0], values) if pair[0] != pair[1]}
        if 0 in pairs.get("number", ()):
            del pairs["number"]
        if pairs:
            one, other = (", ".join(_said(name, pair[i]) for name, pair in pairs.items()) for i in range(2))
            help = ": pad the sequence" if [*pairs] == ["L"] else ", in the same order"
            raise ValueError(
                f"{call.function}: all ranks of the group must make the same call, "
                f"got {one} on rank 0 and {other} on rank {rank}{help}"
            )


def _said(name: str, value: int) -> str:
    if name in ("step", "function"):
        return WORDS[name][value]
    if name == "number":
        return f"call {value}"
    return f"{name} {WORDS[name][value] if name in WORDS else value}"
